import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from draftmill import patches
from draftmill.errors import PatchError, PinError

ROOT = Path(__file__).parents[2]
SOURCE = "".join(f"line {n}\n" for n in range(1, 21))
GOOD = """From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: draftmill <draftmill@localhost>
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: [PATCH] Say ten

Description: the tenth line says ten.
Origin: draftmill
Bug: none known
Forwarded: no
Removal: when it says ten
---
 src/speculators/a.py | 2 +-
 1 file changed, 1 insertion(+), 1 deletion(-)

diff --git a/src/speculators/a.py b/src/speculators/a.py
--- a/src/speculators/a.py
+++ b/src/speculators/a.py
@@ -7,7 +7,7 @@
 line 7
 line 8
 line 9
-line 10
+line ten
 line 11
 line 12
 line 13
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "speculators-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("speculators/a.py", SOURCE)
        archive.writestr(
            "speculators-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: speculators\nVersion: 1.0\n\nVersion: 1.0",
        )
        archive.writestr("speculators-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "patches"
    path.mkdir()
    (path / "0001-ten.patch").write_text(GOOD)
    (path / "series").write_text("# a comment\n0001-ten.patch\n")
    return path


def test_a_good_series_has_no_findings(folder: Path, wheel: Path) -> None:
    assert patches.check(folder, wheel) == []


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        (old, "", ["header"])
        for old in (
            "Description: the tenth line says ten.\n",
            "Origin: draftmill\n",
            "Bug: none known\n",
            "Forwarded: no\n",
            "Removal: when it says ten\n",
        )
    ]
    + [
        ("Removal: when it says ten", "Removal:", ["header"]),
        ("From 0000000000000000000000000000000000000000", "From 1234567890123456789012345678901234567890", ["format"]),
        ("[PATCH]", "[PATCH 1/3]", ["format"]),
        ("-line 10\n", "-line 1O\n", ["does not apply"]),
        # patch(1) takes this one by leaving out a line of context: that is fuzz.
        (" line 7\n", " line seven\n", ["does not apply"]),
        ("@@ -7,7 +7,7 @@", "@@ -7,9 +7,9 @@", ["format", "does not apply"]),
        ("src/speculators/a.py", "src/speculators/b.py", ["does not apply"]),
    ],
)
def test_a_bad_patch_is_found(folder: Path, wheel: Path, old: str, new: str, kinds: list[str]) -> None:
    changed = GOOD.replace(old, new)
    assert changed != GOOD
    (folder / "0001-ten.patch").write_text(changed)
    findings = patches.check(folder, wheel)
    assert [f.kind for f in findings] == kinds
    assert {f.place for f in findings} == {"0001-ten.patch"}


def test_a_patch_without_a_diff_is_found(folder: Path, wheel: Path) -> None:
    (folder / "0001-ten.patch").write_text(GOOD.partition("diff --git")[0])
    assert "format" in [f.kind for f in patches.check(folder, wheel)]


@pytest.mark.parametrize(
    ("series", "kinds"),
    [
        ("", ["unused"]),
        ("0001-ten.patch\n0001-ten.patch\n", ["listed twice"]),
        ("0001-ten.patch\n0002-more.patch\n", ["missing"]),
        ("#0001-ten.patch\n", ["unused"]),
    ],
)
def test_a_bad_series_is_found(folder: Path, wheel: Path, series: str, kinds: list[str]) -> None:
    (folder / "series").write_text(series)
    assert [f.kind for f in patches.check(folder, wheel)] == kinds


def test_without_a_series(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="series"):
        patches.read_series(tmp_path)


def test_the_patched_wheel(folder: Path, wheel: Path, tmp_path: Path) -> None:
    built = patches.build(folder, wheel, tmp_path / "out")
    version = f"1.0+draftmill.{patches.series_digest(folder)[:12]}"
    assert built.name == f"speculators-{version}-py3-none-any.whl"
    with zipfile.ZipFile(built) as archive:
        assert archive.read("speculators/a.py").decode() == SOURCE.replace("line 10", "line ten")
        metadata = archive.read(f"speculators-{version}.dist-info/METADATA").decode()
        assert metadata == f"Metadata-Version: 2.1\nName: speculators\nVersion: {version}\n\nVersion: 1.0"
        rows = archive.read(f"speculators-{version}.dist-info/RECORD").decode().splitlines()
        assert {row.partition(",")[0] for row in rows} == set(archive.namelist())


def test_the_same_patches_give_the_same_bytes(folder: Path, wheel: Path, tmp_path: Path) -> None:
    one = patches.build(folder, wheel, tmp_path / "one")
    two = patches.build(folder, wheel, tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()


def test_a_byte_of_a_patch_changes_the_version(folder: Path, wheel: Path, tmp_path: Path) -> None:
    before = patches.build(folder, wheel, tmp_path).name
    (folder / "0001-ten.patch").write_text(GOOD.replace("line ten", "line Ten"))
    assert patches.build(folder, wheel, tmp_path).name != before


def test_a_bad_series_is_not_built(folder: Path, wheel: Path, tmp_path: Path) -> None:
    (folder / "series").write_text("")
    with pytest.raises(PatchError, match="unused"):
        patches.build(folder, wheel, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_tree_has_a_commit_a_patch(folder: Path, wheel: Path, tmp_path: Path) -> None:
    out = patches.tree(folder, wheel, tmp_path / "tree", patches.read_series(folder))
    assert "line ten" in (out / "src/speculators/a.py").read_text()
    log = subprocess.run(["git", "log", "--format=%s"], cwd=out, capture_output=True, text=True, check=True).stdout
    assert log.splitlines() == ["Say ten", wheel.name]
    with pytest.raises(PatchError, match="not empty"):
        patches.tree(folder, wheel, out, [])


@pytest.mark.parametrize("how", ["file", "variables"])
def test_a_users_git_settings_change_nothing(
    folder: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    settings = {"commit.gpgsign": "true", "core.autocrlf": "true", "am.threeWay": "true"}
    before = patches.build(folder, wheel, tmp_path / "one").read_bytes()
    if how == "file":
        lines = (f"[{key.partition('.')[0]}]\n\t{key.partition('.')[2]} = {value}\n" for key, value in settings.items())
        (tmp_path / "config").write_text("".join(lines))
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    else:
        monkeypatch.setenv("GIT_CONFIG_COUNT", str(len(settings)))
        for number, (key, value) in enumerate(settings.items()):
            monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
            monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    assert patches.build(folder, wheel, tmp_path / "two").read_bytes() == before


def test_run_from_a_git_hook_the_users_repository_stays_as_it_is(
    folder: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "users"
    git = ["git", "-c", "user.name=u", "-c", "user.email=u@localhost", "-C", str(users)]
    subprocess.run(["git", "init", "--quiet", str(users)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "theirs"], check=True)
    before = {path: path.read_bytes() for path in users.rglob("*") if path.is_file()}
    elsewhere = patches.build(folder, wheel, tmp_path / "one").read_bytes()
    with monkeypatch.context() as hook:
        hook.setenv("GIT_DIR", str(users / ".git"))
        hook.setenv("GIT_WORK_TREE", str(users))
        hook.setenv("GIT_INDEX_FILE", str(users / ".git" / "index"))
        hook.setenv("GIT_OBJECT_DIRECTORY", str(users / ".git" / "objects"))
        assert patches.check(folder, wheel) == []
        assert patches.build(folder, wheel, tmp_path / "two").read_bytes() == elsewhere
    assert {path: path.read_bytes() for path in users.rglob("*") if path.is_file()} == before


def test_another_wheel_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    cached = tmp_path / "speculators-0.3.0-py3-none-any.whl"
    cached.write_bytes(b"another")
    with pytest.raises(PinError, match=hashlib.sha256(b"another").hexdigest()):
        patches.pristine(ROOT / "lockfiles", tmp_path)
    assert not cached.exists()


def test_the_real_series_applies_to_the_real_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert patches.check(patches.FOLDER, patches.pristine()) == []
