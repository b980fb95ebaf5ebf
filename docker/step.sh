#!/bin/sh
# Runs one step of the build. What it needs is mounted in /mnt, and is not in the layer. A download has the CA bundle of the build
# secret `ca`, where there is one; or, with a prefetched folder, comes from that alone (the parts of the locks name its files
# already). What the step writes gets the time of SOURCE_DATE_EPOCH, so that the same step is the same layer.
set -eu
if [ -s /mnt/ca ]; then
    export SSL_CERT_FILE=/mnt/ca PIP_CERT=/mnt/ca REQUESTS_CA_BUNDLE=/mnt/ca CURL_CA_BUNDLE=/mnt/ca GIT_SSL_CAINFO=/mnt/ca
fi
if [ -d /mnt/prefetched/index ]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/mnt/prefetched/index
fi
export PYTHONDONTWRITEBYTECODE=1
touch /mnt/started
"$@"
[ -n "${SOURCE_DATE_EPOCH:-}" ] || exit 0
find / \( -path /proc -o -path /sys -o -path /dev -o -path /mnt -o -path /etc/hosts -o -path /etc/resolv.conf \) -prune \
    -o -newer /mnt/started -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
touch --date "@$SOURCE_DATE_EPOCH" /tmp # a step of the network writes there, and the same step without it does not
