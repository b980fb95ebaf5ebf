set positional-arguments

# What can be done here
default:
    @just --list

# Make .venv: the locked CPU stack, the patched speculators, the demo's data and draftmill itself
setup:
    @PYTHONPATH=src uv run --quiet --no-project python -m draftmill.environment

# The whole pipeline on a small real model, on the CPU: ends with runs/demo/report.html
demo *arguments: setup
    @.venv/bin/draftmill run "$@"

# Resolve lockfiles/pylock.*.toml anew from lockfiles/pins.toml
lock: setup
    @.venv/bin/draftmill pins lock

# Fail when a lock is stale
pins: setup
    @.venv/bin/draftmill pins check

# Check the patches: format, headers, series, and that all apply
patches: setup
    @.venv/bin/draftmill patches check

# Style, types, pins and patches
lint: setup pins patches
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy

# Everything that CI runs: it takes a Docker engine and 25 GB of disk; .ci/engine sets one up on Debian
test *arguments: lint
    .ci/engine .venv/bin/python -m pytest -m "not slow" --cov=draftmill --cov-report=term --durations=10 "$@"

# The tests that take seconds
test-unit *arguments: setup
    .venv/bin/python -m pytest tests/unit "$@"

# The image, for this checkout: cuda, or cpu
image *arguments: setup
    @.venv/bin/draftmill image build "$@"

# A fresh node: check it, then pull, verify and try the image that image.lock names
pull *arguments:
    @uv venv --quiet --allow-existing .host && uv pip install --quiet --python .host -r lockfiles/pylock.host.toml
    @PYTHONPATH=src .host/bin/python -m draftmill node up "$@"

# All that the image is built from, into prefetched/
fetch *arguments: setup
    @.venv/bin/draftmill image fetch "$@"

# The image, from prefetched/ alone, with no network
image-offline *arguments: setup
    @.venv/bin/draftmill image build --prefetched prefetched "$@"

# All of the image's tests: a real engine builds the CPU image twice, once with no network, and runs the stages in it
test-docker *arguments: setup
    .ci/engine .venv/bin/python -m pytest tests/docker "$@"

# Extraction's rate against plain prefill and what else there is; on a GPU see benchmarks/extract.py
bench-extract *arguments: setup
    .venv/bin/python benchmarks/extract.py --out runs/bench-extract --ways plain,ours,hf --lengths 256 --tokens 16000 "$@"

# Training's rate from a store against that of its step alone, on the demo's samples; on a GPU see benchmarks/train.py
bench-train *arguments: setup
    .venv/bin/python benchmarks/train.py --prepared runs/demo/prepared/train.jsonl --out runs/bench-train --shape tiny --pack 1024 --samples 100 --vocabulary 2048 --ways ours,resident "$@"
