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
# What apt writes beside the packages stays out of the layer: its lists and archives hold times, and to delete a base's files
# would too.
mkdir -p /mnt/apt/lists/partial /mnt/apt/archives/partial /mnt/apt/log
printf 'Dir::State::lists "/mnt/apt/lists";\nDir::Cache "/mnt/apt";\nDir::Log "/mnt/apt/log";\nDPkg::Options { "--log=/mnt/apt/log/dpkg.log"; };\n' \
    >/mnt/apt/settings
export APT_CONFIG=/mnt/apt/settings
install="apt-get install -qq -y --no-install-recommends"
name=$(echo "$@" | tr ' ' +)
if [ -d "/mnt/prefetched/debs/$name" ]; then
    $install "/mnt/prefetched/debs/$name"/*.deb >/dev/null
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
for log in /var/log/alternatives.log /var/cache/ldconfig/aux-cache; do # these hold times, and nobody needs them
    [ ! -e "$log" ] || : >"$log"
done
