import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftmill import cli, errors
from draftmill.recipe import Recipe

RUNNER = CliRunner()
ERRORS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.DraftmillError)]


def test_every_error_has_an_exit_code_of_its_own() -> None:
    assert len({error.exit_code for error in ERRORS}) == len(ERRORS)
    assert all(0 < error.exit_code < 256 for error in ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_an_error_ends_as_a_message_and_its_code(
    error: type[errors.DraftmillError], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error("what [happened]", cause="the cause", next_step="the next step")

    with pytest.raises(SystemExit) as caught:
        cli.main(fail)
    assert caught.value.code == error.exit_code
    said = capsys.readouterr().err
    assert all(words in said for words in ("what [happened]", "the cause", "the next step"))
    assert "Traceback" not in said


def test_ctrl_c_ends_as_a_message() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        cli.main(interrupted)
    assert caught.value.code == 130


def test_ctrl_c_in_a_command_ends_as_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.pins, "check", interrupted)
    monkeypatch.setattr(sys, "argv", ["draftmill", "pins", "check"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
    assert "run the same command again" in capsys.readouterr().err


def test_a_full_disk_anywhere_ends_as_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        with Path("/dev/full").open("w") as file:
            file.write("x")

    with pytest.raises(SystemExit) as caught:
        cli.main(full)
    assert caught.value.code == errors.DiskError.exit_code
    assert "the disk is full" in capsys.readouterr().err


def test_help_names_every_stage() -> None:
    text = RUNNER.invoke(cli.app, ["--help"]).output
    assert all(stage in text for stage in (*cli.STAGES, "run", "store", "patches", "pins"))


def test_version_names_the_stack_and_the_patches() -> None:
    lines = RUNNER.invoke(cli.app, ["--version"]).output.splitlines()
    names = [line.split()[0] for line in lines]
    assert {"draftmill", "python", "torch", "transformers", "speculators"} <= set(names)
    assert any("+draftmill." in line for line in lines if line.startswith("speculators"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["prepare", "--recipe", "nowhere.toml"], errors.RecipeError.exit_code),
        (["train", "--set", "train.stepz=1"], errors.RecipeError.exit_code),
        (["train", "--set", "steps"], errors.RecipeError.exit_code),
        (["train", "--sett"], 2),
        (["no-such-command"], 2),
        (["store", "verify", "nowhere"], errors.StoreError.exit_code),
    ],
)
def test_wrong_use_ends_with_a_message(words: list[str], code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "draftmill", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_run_is_all_stages_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[list[str]] = []

    def record(command: list[str]) -> int:
        called.append(command)
        return 0

    monkeypatch.setattr(cli, "foreground", record)
    monkeypatch.setattr(cli.Recipe, "load", lambda *_: Recipe.parse(_text(tmp_path), name="r"))
    assert RUNNER.invoke(cli.app, ["run", "--set", "train.steps=3", "--yes", "--keep-going"]).exit_code == 0
    assert [command[3] for command in called] == list(cli.STAGES)
    assert all("train.steps=3" in command for command in called)
    assert ["--yes" in command for command in called] == [False, True, False, False, False]
    assert ["--keep-going" in command for command in called] == [True, False, False, False, False]


def test_run_stops_at_the_first_stage_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codes = iter([0, 15])
    monkeypatch.setattr(cli, "foreground", lambda _: next(codes))
    monkeypatch.setattr(cli.Recipe, "load", lambda *_: Recipe.parse(_text(tmp_path), name="r"))
    assert RUNNER.invoke(cli.app, ["run"]).exit_code == 15


def _text(folder: Path) -> str:
    return f"""
        run = {{ name = "r", folder = "{folder}" }}
        target = {{ path = "{folder}" }}
        data = {{ sources = [{{ format = "messages", path = "x" }}] }}
        evaluate = {{ prompts = [{{ name = "p", format = "messages", path = "x" }}] }}
    """


def test_sigterm_is_what_ctrl_c_is(tmp_path: Path) -> None:
    script = (
        "import time\nfrom draftmill import cli\n"
        "def wait():\n    print('ready', flush=True)\n    time.sleep(30)\n"
        "cli.main(wait)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.readline()
        os.kill(started.pid, signal.SIGTERM)
        assert started.wait(timeout=20) == 130
        assert "interrupted" in started.stderr.read()
