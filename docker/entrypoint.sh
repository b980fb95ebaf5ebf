#!/bin/sh
# Says what a container lacks, before a stage fails on it; then becomes draftmill, so that signals reach it.
set -eu
say() { echo "draftmill: $*" >&2; }
if [ "${DRAFTMILL_VARIANT:-}" = cuda ]; then
    [ -e /dev/nvidiactl ] ||
        say "no GPU is attached: start it with --gpus all, or use the CPU image (compose.cpu.yaml)"
    shm=$(df --output=size --block-size=1M /dev/shm 2>/dev/null | tail -n 1 | tr -d ' ')
    [ "${shm:-0}" -ge 1024 ] ||
        say "/dev/shm has ${shm:-0} MB, and vLLM's workers meet there: add --ipc=host or --shm-size=16g"
fi
case "${1:-}" in
prepare | extract | train | evaluate | report | run)
    grep -q " $PWD/runs " /proc/mounts ||
        say "no volume at $PWD/runs: what is written there ends with the container; add --volume \"\$PWD/runs:$PWD/runs\""
    ;;
esac
for folder in /cache runs; do
    [ ! -e "$folder" ] || [ -w "$folder" ] ||
        say "UID $(id -u) cannot write to $folder: mount a folder of that user's there"
done
exec draftmill "$@"
