#!/bin/sh
# Runs a command of the build that downloads: with the CA bundle of the build secret `ca`, where there is one; or, with a
# prefetched folder, from that alone (the parts of the locks name its files already).
set -eu
ca=/run/secrets/ca
if [ -s "$ca" ]; then
    export SSL_CERT_FILE="$ca" PIP_CERT="$ca" REQUESTS_CA_BUNDLE="$ca" CURL_CA_BUNDLE="$ca" GIT_SSL_CAINFO="$ca"
fi
if [ -d /prefetched/index ]; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/prefetched/index
fi
exec "$@"
