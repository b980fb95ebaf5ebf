"""An image as a file, for a machine that reaches no registry."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill import engine
from draftmill.errors import EngineError, ReleaseError
from draftmill.files import disk_errors, sha256, write_whole

_LEVEL = 3  # zstd's: larger ones cost minutes on an image of this size and save little


class Saved(BaseModel):
    """What lies beside a saved image, in a file of its name and `.json`. `layers` are digests, unpacked."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tag: str
    sha256: str
    layers: list[str]
    labels: dict[str, str]


def save(tag: str, path: Path) -> Saved:
    """Writes an image into a file, zstd of what `docker save` gives, and what it is into a second one: .json.

    Raises:
        EngineError: there is no such image, or no engine.
        DiskError: it does not fit.
    """
    import zstandard

    labels = engine.labels(tag)
    if labels is None:
        raise EngineError(f"there is no image {tag}", next_step="run `draftmill image build`")
    part = path.with_name(path.name + ".part")
    with disk_errors(path, part), part.open("wb") as file:
        with zstandard.ZstdCompressor(level=_LEVEL, threads=-1).stream_writer(file, closefd=False) as packed:
            for piece in engine.save(tag):
                packed.write(piece)
        file.flush()
    part.replace(path)
    found = Saved(tag=tag, sha256=sha256(path), layers=engine.digests(tag), labels=labels)
    write_whole(_beside(path), (found.model_dump_json(indent=2) + "\n").encode())
    return found


def load(path: Path) -> Saved:
    """Takes an image from a file of `save`.

    Raises:
        ReleaseError: a file is missing or changed, or the engine has another image of that name afterwards.
        EngineError: no engine answers.
    """
    import zstandard

    try:
        said = Saved.model_validate_json(_beside(path).read_bytes())
        found = sha256(path)
    except OSError as error:
        raise ReleaseError(
            f"cannot read {error.filename}: {error.strerror}", next_step="bring both files: the image and its .json"
        ) from error
    except ValidationError as error:
        raise ReleaseError(f"{_beside(path)} is not as it should be: {error}", next_step="copy it again") from error
    if found != said.sha256:
        raise ReleaseError(
            f"{path} has the checksum {found}, and should have {said.sha256}",
            cause="it was cut off or changed on its way",
            next_step="copy it again",
        )
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as data:
        engine.load(data)
    if engine.digests(said.tag) != said.layers or engine.labels(said.tag) != said.labels:
        raise ReleaseError(
            f"{said.tag} is not the image that was saved",
            cause="the file holds another image of that name",
            next_step="save it again where it was built",
        )
    return said


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")
