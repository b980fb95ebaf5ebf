"""The CPU image on a real engine, and a small run of the demo's model and data in it. `.ci/engine` starts these."""

import os
import shutil
from collections.abc import Iterator

import pytest
from containers import CARRIED, ROOT, UID, Compose, options, overrides, recipe

from draftmill import image
from draftmill.recipe import resolve


@pytest.fixture(scope="session")
def built() -> str:
    """The tag of the CPU image of this checkout."""
    planned = image.plan("cpu", root=ROOT, overrides=overrides(), options=options())
    image.build(planned, root=ROOT)
    return planned.tag


@pytest.fixture(scope="session")
def compose(built: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    folder = tmp_path_factory.mktemp("run")
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)  # pytest makes them its user's own, and the containers run as another
    for path, place in CARRIED.items():
        (folder / place[1:]).mkdir(exist_ok=True)
        shutil.copy(resolve(path), folder / place[1:])
    (folder / "recipe.toml").write_text(recipe())
    (folder / "runs").mkdir()
    os.chown(folder / "runs", UID, UID)
    places = {name: str(folder / name) for name in ("models", "data", "runs")}
    environment = {
        **os.environ,
        "DRAFTMILL_IMAGE": built,
        "DRAFTMILL_UID": str(UID),
        "DRAFTMILL_GID": str(UID),
        "DRAFTMILL_RECIPE": str(folder / "recipe.toml"),
        "DRAFTMILL_PORT": "18000",
        "HF_HUB_OFFLINE": "1",
        **{f"DRAFTMILL_{name.upper()}": place for name, place in places.items()},
    }
    made = Compose(folder=folder, environment=environment)
    yield made
    made("down", "--volumes", "--timeout", "5")
