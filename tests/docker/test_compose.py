"""What compose.yaml comes to, as the engine's own Compose reads it."""

import json
import os
import subprocess

import pytest
from containers import ROOT

SERVICES = {"prepare", "extract", "train", "evaluate", "report", "serve", "doctor", "test"}


def services(*files: str, gpus: str = "all") -> dict[str, dict[str, object]]:
    words = [word for file in files for word in ("-f", str(ROOT / file))]
    done = subprocess.run(
        ["docker", "compose", *words, "config", "--format", "json"],
        env={**os.environ, "DRAFTMILL_GPUS": gpus},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["services"])


@pytest.mark.parametrize(("gpus", "count"), [("1", 1), ("4", 4), ("8", 8), ("all", -1)])
def test_the_gpus_are_attached(gpus: str, count: int) -> None:
    found = services("compose.yaml", gpus=gpus)
    assert set(found) == SERVICES
    for service in found.values():
        devices = json.loads(json.dumps(service))["deploy"]["resources"]["reservations"]["devices"]
        assert [(one["driver"], one["count"], one["capabilities"]) for one in devices] == [("nvidia", count, ["gpu"])]
        assert service["init"] is True
        assert service["ipc"] == "host"
        assert service["read_only"] is True


def test_on_the_cpu_nothing_is_attached() -> None:
    found = services("compose.yaml", "compose.cpu.yaml")
    assert set(found) == SERVICES
    for service in found.values():
        assert service.get("deploy") is None
        assert service["image"] == "draftmill:cpu"


def test_the_example_of_the_settings_is_what_is_read() -> None:
    text = (ROOT / "compose.yaml").read_text() + (ROOT / "compose.cpu.yaml").read_text()
    lines = (ROOT / ".env.example").read_text().splitlines()
    named = {line.lstrip("#").partition("=")[0] for line in lines if "=" in line and " " not in line.partition("=")[0]}
    assert named == {word.partition(":-")[0] for word in text.split("${")[1:]}
