#!/bin/sh
# Installs wheels and pylock files into /opt/venv so that the same input gives the same bytes: no cache,
# .pyc files that hold their source's hash instead of its time, and every time the one of SOURCE_DATE_EPOCH.
set -eu
export UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 PYC_INVALIDATION_MODE=UNCHECKED_HASH UV_PYTHON_DOWNLOADS=never
export UV_HTTP_TIMEOUT=600
for what in "$@"; do
    case $what in
    *.toml) set -- -r "$what" ;;
    *) set -- "$what" ;;
    esac
    /opt/tools/bin/uv pip install --quiet --python /opt/venv --no-deps "$@"
done
# uv writes one for what it installs from a file, with that file's time in it, and lists it.
find /opt/venv -name uv_cache.json | while read -r written; do
    sed -i '/uv_cache\.json,/d' "${written%/*}/RECORD"
    rm "$written"
done
find /opt/venv -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
