#!/bin/sh
# Installs wheels and pylock files into /opt/venv so that the same input gives the same bytes: no cache, and .pyc files that hold
# their source's hash instead of its time. A .pyc file also depends on what its process compiled before, so each process of these
# has its files in their order.
set -eu
export UV_NO_CACHE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
export UV_HTTP_TIMEOUT=600
for what in "$@"; do
    case $what in
    *.toml) set -- -r "$what" ;;
    *) set -- "$what" ;;
    esac
    /mnt/tools/bin/uv pip install --quiet --python /opt/venv --no-deps "$@"
done
# uv writes one for what it installs from a file, with that file's time in it, and lists it.
find /opt/venv -name uv_cache.json | while read -r written; do
    sed -i '/uv_cache\.json,/d' "${written%/*}/RECORD"
    rm "$written"
done
find /opt/venv -newer /mnt/started -name '*.py' -print0 | LC_ALL=C sort -z |
    PYTHONHASHSEED=0 xargs -0 -r -n 400 -P "$(nproc)" /opt/venv/bin/python -m compileall -qq --invalidation-mode unchecked-hash ||
    true # some packages carry templates and sources of other Pythons, which do not compile
