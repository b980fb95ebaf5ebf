"""What the image holds and does not hold, and what stops its build."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from containers import ROOT, options, overrides

from draftmill import engine, image
from draftmill.errors import EngineError


def inside(tag: str, script: str) -> str:
    return engine.run(tag, "sh", ["-c", script], user="0:0")


def test_smoke(built: str) -> None:
    assert "speculators 0.3.0+draftmill." in image.smoke(built)


def test_its_labels_say_what_it_is_made_of(built: str) -> None:
    labels = engine.labels(built)
    assert labels is not None
    assert labels["draftmill.variant"] == "cpu"
    assert labels["draftmill.content"][:12] == built.rpartition("-")[2]
    assert "torch==2.10.0" in labels["draftmill.stack"]
    assert "unknown" not in labels.values()


def test_what_builds_it_is_not_in_it(built: str) -> None:
    programs = "for p in git gcc cc g++ uv ccache; do command -v $p || true; done"
    files = "find / -xdev ( -name uv_cache.json -o -name .cache -o -path /run/secrets/* )".replace("(", "\\(")
    kept = "find /cache /var/lib/apt/lists -type f -size +0"  # an empty lock is the base's
    assert inside(built, f"{programs}; {files}; {kept}".replace(" )", " \\)")) == ""


def test_no_ca_bundle_of_the_build_is_in_it(built: str) -> None:
    history = "".join(layer.made_by for layer in engine.layers(built))
    ca = os.environ.get("DRAFTMILL_TEST_CA")
    if not ca:
        return
    assert ca not in history
    size = Path(ca).stat().st_size
    same = inside(built, f"find / -xdev -type f -size {size}c -exec sha256sum {{}} +")
    assert subprocess.run(["sha256sum", ca], capture_output=True, text=True, check=True).stdout.split()[0] not in same


def test_it_is_nobody_s_and_times_are_the_epoch_s(built: str) -> None:
    assert engine.run(built, "id", ["-u"], user="").strip() == "65534"
    assert inside(built, f"find /opt/venv -newermt @{image.EPOCH} | head -n 3") == ""


def test_the_audit_passed_and_its_report_is_in_it(built: str) -> None:
    verdicts = [one["verdict"] for one in json.loads(inside(built, "cat /opt/draftmill/audit.json"))["findings"]]
    assert verdicts.count("compatible") > 80
    assert "broken" not in verdicts


def broken_patch(tree: Path) -> str:
    first = sorted((tree / "patches" / "speculators").glob("*.patch"))[0]
    text = first.read_text()
    hunk = text.index("\n@@")
    at = text.index("\n ", hunk) + 2
    first.write_text(text[:at] + "never there" + text[at:])
    return "does not apply"


def unlisted_patch(tree: Path) -> str:
    series = tree / "patches" / "speculators" / "series"
    lines = series.read_text().splitlines(keepends=True)
    series.write_text("".join(lines[:-1]))
    return "a line in series"


def stale_lock(tree: Path) -> str:
    pinned = tree / "lockfiles" / "pins.toml"
    pinned.write_text(pinned.read_text().replace('"loguru==0.7.3"', '"loguru==0.7.2"'))
    return "was not made from these pins"


@pytest.mark.parametrize("change", [broken_patch, unlisted_patch, stale_lock], ids=lambda c: c.__name__)
def test_a_fault_in_the_sources_stops_the_build(change: Callable[[Path], str], built: str, tmp_path: Path) -> None:
    tree = copied(tmp_path)
    expected = change(tree)
    assert expected in failure(tree, "speculators-patched")


def test_a_changed_signature_of_vllm_stops_the_build(built: str, tmp_path: Path) -> None:
    file = "/opt/venv/lib/python3.12/site-packages/vllm/v1/core/kv_cache_utils.py"
    changed = "draftmill-test-changed:local"
    old, new = "def get_kv_cache_config_from_groups(", "def get_kv_cache_config_from_groups(brand_new, "
    dockerfile = f"FROM {built}\nUSER 0:0\nRUN grep -q '{old}$' {file} && sed -i 's/{old}$/{new}/' {file}\n"
    subprocess.run(["docker", "build", "--quiet", "--tag", changed, "-"], input=dockerfile.encode(), check=True)
    try:
        said = failure(copied(tmp_path), "audited", f"--build-context=stack=docker-image://{changed}")
    finally:
        subprocess.run(["docker", "image", "rm", changed], check=False, capture_output=True)
    assert "get_kv_cache_config_from_groups" in said
    assert "brand_new" in said


@pytest.mark.slow
def test_a_second_build_with_no_network_gives_the_same_packages_files_and_layers(built: str, tmp_path: Path) -> None:
    again, folder = "draftmill-test-again:local", tmp_path / "prefetched"
    base = overrides()
    words = ["image", "fetch", "cpu", "--out", str(folder), "--network", "host"]
    words += [word for name, value in base.items() for word in ("--arg", f"{name}={value}")]
    words += ["--ca", os.environ["DRAFTMILL_TEST_CA"]] if os.environ.get("DRAFTMILL_TEST_CA") else []
    subprocess.run([sys.executable, "-m", "draftmill", *words], cwd=ROOT, check=True)
    planned = image.plan("cpu", root=ROOT, overrides={**base, "FILES_URL": image.PREFETCHED})
    offline = (*planned.options, "--no-cache", "--network=none", f"--build-context=prefetched={folder}")
    engine.build(ROOT / image.DOCKERFILE, ROOT, again, {**planned.arguments, **planned.labels}, offline)
    try:
        manifests = [inside(tag, "cat /opt/draftmill/manifest.txt") for tag in (built, again)]
        assert manifests[0] == manifests[1]
        assert manifests[0].count("\n") > 200
        script = "cd /opt && find . -type f -exec sha256sum {} + | sort -k 2"
        files = [set(inside(tag, script).splitlines()) for tag in (built, again)]
        assert sorted(files[0] ^ files[1]) == []
        layers = [engine.digests(tag) for tag in (built, again)]
        assert layers[0] == layers[1]
    finally:
        subprocess.run(["docker", "image", "rm", again], check=False, capture_output=True)
        # Its layers, and the folder's copy, are as large as the image once more.
        subprocess.run(["docker", "buildx", "prune", "--all", "--force"], check=False, capture_output=True)
        shutil.rmtree(folder)


def copied(folder: Path) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    for name in image.INPUTS:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, tree / name)
        else:
            shutil.copy(place, tree / name)
    return tree


def failure(tree: Path, target: str, *more: str) -> str:
    arguments = {"VARIANT": "cpu", **overrides()}
    with pytest.raises(EngineError) as caught:
        engine.build(
            tree / image.DOCKERFILE,
            tree,
            "draftmill-test-fault:local",
            arguments,
            (*options(), "--target", target, *more),
        )
    return "\n".join(caught.value.what.splitlines()[-15:])
