#!/bin/sh
# The last layer, the only one that a change of draftmill's own code makes anew: draftmill, what it is started by, and the manifest
# of every package, held against the lock.
set -eu
variant=$1 vllm_from=$2
/mnt/install.sh /mnt/dist/*.whl
mkdir /opt/draftmill
cp /mnt/audit.json /mnt/entrypoint.sh /opt/draftmill/
ours=draftmill,speculators$([ "$vllm_from" = wheel ] || echo ,vllm)
/opt/venv/bin/draftmill --version >/dev/null # it starts: the lock has all that it imports
/opt/venv/bin/python -m draftmill.manifest check --ours "$ours" "/mnt/lockfiles/pylock.$variant.toml" \
    /opt/venv/lib/python3.12/site-packages /opt/draftmill/manifest.txt
