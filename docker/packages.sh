#!/bin/sh
# Installs what the base lacks of the named Debian or Ubuntu packages. Ubuntu's are those of the snapshot (APT_SNAPSHOT), so
# that a later build installs the same; an archive that keeps no snapshots gives its present ones.
set -eu
lacking=
for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || lacking="$lacking $package"
done
[ -n "$lacking" ] || exit 0
export DEBIAN_FRONTEND=noninteractive
option=
if [ -n "${APT_SNAPSHOT:-}" ] && grep -q '^ID=ubuntu' /etc/os-release; then
    option="--snapshot $APT_SNAPSHOT"
fi
apt-get $option update -qq
apt-get $option install -qq -y --no-install-recommends $lacking >/dev/null
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
