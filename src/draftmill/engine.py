"""The Docker engine, to which no other module talks. Builds go through `docker buildx`: the SDK has no BuildKit."""

import collections
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.errors import EngineError

KEPT_LINES = 400  # of a build's output, in which its failure is looked for


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of an image: its size unpacked, and the instruction that made it."""

    size: int
    made_by: str


@contextlib.contextmanager
def client(timeout: int = 600) -> Iterator[Any]:
    """The SDK's client.

    Args:
        timeout: seconds that the engine has for an answer.

    Raises:
        EngineError: the SDK is missing, or no engine answers; and whatever the engine refuses within the block.
    """
    try:
        import docker
    except ImportError as error:
        raise EngineError("the Docker SDK for Python is not installed", next_step="run ./just setup") from error
    try:
        found = docker.from_env(timeout=timeout)
        try:
            found.ping()
            yield found
        finally:
            found.close()
    except (docker.errors.ContainerError, docker.errors.APIError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        raise EngineError(
            f"Docker: {said.decode(errors='replace').strip()}", next_step="read that message; `docker info` says more"
        ) from error
    except docker.errors.DockerException as error:
        raise EngineError(
            f"no Docker engine answers: {error}",
            cause="it is not installed, not started, or this user may not use it",
            next_step="start it, or join the group docker; on Debian .ci/engine sets one up",
        ) from error


def about() -> dict[str, Any]:
    """What `docker info` tells, by the engine's own names.

    Raises:
        EngineError: as `client`.
    """
    with client(timeout=30) as found:
        return dict(found.info())


def labels(tag: str) -> dict[str, str] | None:
    """An image's labels; None when there is no such image."""
    with client() as found:
        images = found.images.list(name=tag)
        return dict(images[0].labels) if images else None


def layers(tag: str) -> list[Layer]:
    """An image's layers, the base's first."""
    with client() as found:
        history = found.images.get(tag).history()
    return [Layer(size=row["Size"], made_by=" ".join(row["CreatedBy"].split())) for row in reversed(history)]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a transfer is: bytes of one of its parts, by the engine's name for that."""

    part: str
    done: int
    total: int


def push(tag: str, repository: str, name: str, show: Callable[[Progress], None]) -> str:
    """Sends an image to a registry as repository:name, and returns the digest that it has there.

    Raises:
        EngineError: the registry refused it, or does not answer.
    """
    with client() as found:
        found.images.get(tag).tag(repository, name)
        events = found.api.push(repository, name, stream=True, decode=True)
        said = [event["aux"]["Digest"] for event in _followed(events, show) if "Digest" in event.get("aux", {})]
    return str(said[-1])


def pull(reference: str, show: Callable[[Progress], None]) -> None:
    """Fetches an image, named by its digest; the engine checks every layer's.

    Raises:
        EngineError: the registry refused it, does not answer, or sent something else.
    """
    with client() as found:
        for _ in _followed(found.api.pull(reference, stream=True, decode=True), show):
            pass


def _followed(events: Iterable[dict[str, Any]], show: Callable[[Progress], None]) -> Iterator[dict[str, Any]]:
    for event in events:
        if "error" in event:
            raise EngineError(f"Docker: {event['error']}", next_step="read that message; `docker info` says more")
        detail = event.get("progressDetail") or {}
        if detail.get("total") and event.get("status") in ("Downloading", "Pushing"):
            show(Progress(part=event["id"], done=min(detail["current"], detail["total"]), total=detail["total"]))
        yield event


def published(reference: str) -> str:
    """The digest that a registry has for an image's name.

    Raises:
        EngineError: it has none of that name, or does not answer.
    """
    with client(timeout=60) as found:
        return str(found.images.get_registry_data(reference).id)


def name(image: str, tag: str) -> None:
    """Gives an image another tag."""
    with client() as found:
        found.images.get(image).tag(tag)


def names(image: str) -> list[str]:
    """An image's tags, and its names with a registry's digest."""
    with client() as found:
        attributes = found.images.get(image).attrs
    return [*(attributes["RepoTags"] or ()), *(attributes["RepoDigests"] or ())]


def save(tag: str) -> Iterator[bytes]:
    """An image as `docker save` writes it, in pieces."""
    with client() as found:
        yield from found.images.get(tag).save(named=tag)


def load(data: Any) -> None:
    """Takes what `save` gave, from a file open for reading.

    Raises:
        EngineError: it is not an image.
    """
    with client() as found:
        found.images.load(data)


def digests(tag: str) -> list[str]:
    """The digest of each of an image's layers, unpacked, the base's first."""
    with client() as found:
        return list(found.images.get(tag).attrs["RootFS"]["Layers"])


def run(tag: str, program: str, words: Sequence[str], *, user: str) -> str:
    """Runs a program of an image with no network and nothing to write to but /cache, and returns what it printed."""
    with client() as found:
        output: bytes = found.containers.run(
            tag,
            list(words),
            entrypoint=[program],
            user=user,
            network_mode="none",
            read_only=True,
            tmpfs={"/cache": "mode=1777", "/tmp": "mode=1777"},
            remove=True,
            stderr=True,
        )
    return output.decode(errors="replace")


def build(
    dockerfile: Path,
    context: Path,
    tag: str | None,
    arguments: Mapping[str, str],
    options: Sequence[str] = (),
) -> None:
    """Builds an image with BuildKit, showing its output.

    Args:
        tag: its name; none where `options` give another `--output`.
        options: for `docker buildx build`, as `--secret` and `--build-context`.

    Raises:
        EngineError: the build failed; its message ends with what the failing step said.
    """
    command = ["docker", "buildx", "build", "--progress", "plain", "--file", str(dockerfile)]
    command += ["--tag", tag] if tag else []
    command += [word for name, value in sorted(arguments.items()) for word in ("--build-arg", f"{name}={value}")]
    kept: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
    try:
        with subprocess.Popen(
            [*command, *options, str(context)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                sys.stderr.write(line)
                kept.append(line.rstrip())
    except FileNotFoundError as error:
        raise EngineError("there is no `docker` command", next_step="install Docker with its buildx plugin") from error
    if child.returncode:
        raise EngineError(f"the image was not built:\n{reason(list(kept))}", next_step="correct that and build again")


def reason(output: Sequence[str]) -> str:
    """What the failing step said, out of BuildKit's output, where it stands between two rules."""
    rules = [number for number, line in enumerate(output) if line == "------"]
    for first, second in itertools.pairwise(rules):
        if output[first + 1].startswith(" > "):
            return "\n".join(output[first + 1 : second])
    return "\n".join(line for line in output if line.startswith("ERROR")) or "\n".join(output[-5:])
