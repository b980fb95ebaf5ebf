#!/bin/sh
# Installs what the base lacks of the named Debian or Ubuntu packages. Ubuntu's are those of the snapshot (APT_SNAPSHOT), so
# that a later build installs the same; an archive that keeps no snapshots gives its present ones. A prefetched folder has
# each call's packages in a folder of the call's name; with KEEP_DEBS one is made, in /debs.
set -eu
lacking=
for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || lacking="$lacking $package"
done
[ -n "$lacking" ] || exit 0
export DEBIAN_FRONTEND=noninteractive
install="apt-get install -qq -y --no-install-recommends"
name=$(echo "$@" | tr ' ' +)
if [ -d "/prefetched/debs/$name" ]; then
    $install "/prefetched/debs/$name"/*.deb >/dev/null
else
    option=
    if [ -n "${APT_SNAPSHOT:-}" ] && grep -q '^ID=ubuntu' /etc/os-release; then
        option="--snapshot $APT_SNAPSHOT"
    fi
    apt-get $option update -qq
    if [ -n "${KEEP_DEBS:-}" ]; then
        mkdir -p "/debs/$name/partial"
        $install --download-only -o Dir::Cache::archives="/debs/$name" $lacking >/dev/null
        rm -rf "/debs/$name/partial" "/debs/$name/lock"
    fi
    $install $lacking >/dev/null
fi
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache /var/log/apt /var/log/dpkg.log /var/log/alternatives.log
