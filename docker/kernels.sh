#!/bin/sh
# Builds vLLM in /vllm: its kernels alone, or with `python` the wheel, for which the kernels are then there already.
# One compiler process of these kernels takes about 4 GB, so the memory bounds the jobs, unless MAX_JOBS does.
set -eu
cd /vllm
memory=$(awk '/MemAvailable/ {print int($2 / 4194304)}' /proc/meminfo)
cores=$(nproc)
[ "$memory" -ge 1 ] || memory=1
export MAX_JOBS="${MAX_JOBS:-$([ "$memory" -lt "$cores" ] && echo "$memory" || echo "$cores")}"
export PATH=/opt/venv/bin:$PATH
export TORCH_CUDA_ARCH_LIST VLLM_TARGET_DEVICE
if [ "${1:-}" = python ]; then
    python setup.py --quiet bdist_wheel --dist-dir /dist
elif [ "$VLLM_TARGET_DEVICE" != empty ]; then
    python setup.py --quiet build_ext
fi
