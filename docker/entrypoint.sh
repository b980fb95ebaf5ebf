#!/bin/sh
# Says what a container lacks, before a stage fails on it; then becomes draftmill, so that signals reach it.
set -eu
if [ "${DRAFTMILL_VARIANT:-}" = cuda ]; then
    [ -e /dev/nvidiactl ] ||
        echo "draftmill: no GPU is attached: start it with --gpus all, or use the CPU image (compose.cpu.yaml)" >&2
    shm=$(df --output=size --block-size=1M /dev/shm 2>/dev/null | tail -n 1 | tr -d ' ')
    [ "${shm:-0}" -ge 1024 ] ||
        echo "draftmill: /dev/shm has ${shm:-0} MB, and vLLM's workers meet there: add --ipc=host or --shm-size=16g" >&2
fi
for folder in /cache runs; do
    [ ! -e "$folder" ] || [ -w "$folder" ] || echo "draftmill: UID $(id -u) cannot write to $folder: mount a folder of that user's there" >&2
done
exec draftmill "$@"
