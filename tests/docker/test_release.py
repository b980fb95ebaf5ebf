"""Publishing, a fresh node and the air gap, on a registry and with signatures that are real."""

import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from containers import ROOT, options, overrides

from draftmill import archive, cosign, engine, image, node, patches, pins, release
from draftmill.doctor import profile_of
from draftmill.errors import DraftmillError, EngineError, NodeError, ReleaseError

SETTINGS = """version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}}}, delete: {{enabled: true}}}}
http: {{addr: 127.0.0.1:{port}}}
"""


@dataclass
class Registry:
    """A registry of its own on this machine, which can go away and come back."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = self.folder / "config.yml"
        settings.write_text(SETTINGS.format(folder=self.folder / "data", port=self.port))
        self.process = subprocess.Popen(["docker-registry", "serve", settings], stderr=subprocess.DEVNULL)
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError("the registry does not answer")

    def stop(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def blob(self, digest: str) -> Path:
        return self.folder / "data/docker/registry/v2/blobs/sha256" / digest[7:9] / digest[7:] / "data"

    def layers(self, digest: str) -> list[str]:
        return [layer["digest"] for layer in json.loads(self.blob(digest).read_bytes())["layers"]]

    @property
    def repository(self) -> str:
        return f"127.0.0.1:{self.port}/team/draftmill"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    if lacking := [program for program in ("docker-registry", "cosign") if not shutil.which(program)]:
        pytest.fail(f"these need {' and '.join(lacking)}; .ci/engine installs them on Debian")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = Registry(folder=tmp_path_factory.mktemp("registry"), port=port)
    found.start()
    yield found
    found.stop()
    shutil.rmtree(found.folder)  # as large as the image
    listed = subprocess.run(
        ["docker", "images", "--quiet", found.repository], capture_output=True, text=True, check=True
    ).stdout.split()
    names = [name for one in set(listed) for name in engine.names(one) if name.startswith(found.repository)]
    subprocess.run(["docker", "rmi", *names], check=True, capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two pairs of keys: `ours` and `theirs`, and `ours.pub` and `theirs.pub`."""
    folder = tmp_path_factory.mktemp("keys")
    os.environ["COSIGN_PASSWORD"] = "of the tests alone"
    for name in ("ours", "theirs"):
        subprocess.run(
            ["cosign", "generate-key-pair", "--output-key-prefix", name], cwd=folder, check=True, capture_output=True
        )
    return {path.name.removesuffix(".key"): path for path in folder.iterdir()}


def small(registry: Registry, tag: str, labels: dict[str, str], *, size: int = 1) -> str:
    """Pushes an image of a few random MB and returns its name with the digest; nothing of it stays in the engine."""
    name = f"{registry.repository}:{tag}"
    words = [word for key, value in labels.items() for word in ("--change", f"LABEL {key}={value}")]
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            head = tarfile.TarInfo("data")
            head.size = size << 20
            tar.addfile(head, io.BytesIO(os.urandom(head.size)))
        file.flush()
        # Not built: the build's cache would keep the layer, and nothing would have to be pulled.
        subprocess.run(["docker", "import", *words, file.name, name], check=True, capture_output=True)
    digest = engine.push(name, registry.repository, tag, lambda _: None)
    subprocess.run(["docker", "rmi", name], check=True, capture_output=True)
    return f"{registry.repository}@{digest}"


def labels_of_this_checkout() -> dict[str, str]:
    return {
        "draftmill.variant": "cpu",
        "draftmill.pins": pins.load(ROOT / pins.FOLDER).digest,
        "draftmill.patches": patches.series_digest(ROOT / patches.FOLDER),
    }


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` reads this checkout's pins from where it is run."""
    monkeypatch.chdir(ROOT)


def up(reference: str, key: Path, known: dict[str, release.Published] | None = None) -> str:
    return release.up(reference, "cpu", key, profile_of("cpu"), Path("runs"), known or {})


def test_publish_then_a_node_with_nothing_comes_up_and_runs(
    built: str, registry: Registry, keys: dict[str, Path], tmp_path: Path, checkout: None
) -> None:
    planned = image.plan("cpu", root=ROOT, overrides=overrides(), options=options())
    lock = tmp_path / "image.lock"
    published = release.publish(planned, registry.repository, keys["ours"], lock=lock)
    assert release.read_lock(lock) == {"cpu": published}
    names = [f"{registry.repository}:{published.tag}", "draftmill:cpu", built]
    subprocess.run(["docker", "rmi", *names], check=True, capture_output=True)
    try:
        assert engine.labels(published.reference) is None
        told = up(published.reference, keys["ours.pub"])
        assert told == f"draftmill:cpu is {published.reference}"
        assert "speculators 0.3.0+draftmill." in image.smoke("draftmill:cpu")
    finally:
        engine.name(published.reference, built)  # of which the other tests are
    for kind, path, some in (
        ("cyclonedx", ("components",), {"pkg:pypi/torch@2.10.0"}),
        ("slsaprovenance1", ("buildDefinition", "resolvedDependencies"), {"pkg:pypi/speculators"}),
    ):
        words = ["cosign", "verify-attestation", "--insecure-ignore-tlog=true", "--allow-http-registry", "--type", kind]
        words += ["--key", str(keys["ours.pub"]), published.reference]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        found = json.loads(base64.b64decode(json.loads(done.stdout)["payload"]))["predicate"]
        for key in path:
            found = found[key]
        assert some <= {one.get("purl") or one.get("uri") for one in found}
        assert str(os.environ["COSIGN_PASSWORD"]) not in done.stdout
        for home in (
            str(Path.home()),
            socket.gethostname(),
        ):  # as words: a machine may have the name of a package's part
            assert not re.search(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", json.dumps(found))


def test_what_is_not_as_published_is_refused_by_name(registry: Registry, keys: dict[str, Path], checkout: None) -> None:
    good = small(registry, "good", labels_of_this_checkout())
    with pytest.raises(ReleaseError, match=f"{good} is not signed$"):
        up(good, keys["ours.pub"])
    cosign.sign(good, keys["theirs"])
    with pytest.raises(ReleaseError, match=r"is not signed with the key of .*ours\.pub"):
        up(good, keys["ours.pub"])
    with pytest.raises(ReleaseError, match="there is no public key"):
        up(good, keys["ours"].with_name("none.pub"))

    other = small(registry, "other", labels_of_this_checkout() | {"draftmill.pins": "0" * 64})
    cosign.sign(other, keys["ours"])
    with pytest.raises(ReleaseError, match=r"of another checkout:\n  draftmill.pins: 0+ in the image"):
        up(other, keys["ours.pub"])
    cuda = small(registry, "cuda", labels_of_this_checkout() | {"draftmill.variant": "cuda"})
    cosign.sign(cuda, keys["ours"])
    with pytest.raises(ReleaseError, match="is the variant cuda, not cpu"):
        up(cuda, keys["ours.pub"])


def test_a_layer_changed_in_the_registry_is_refused(registry: Registry, keys: dict[str, Path], checkout: None) -> None:
    reference = small(registry, "altered", labels_of_this_checkout())
    cosign.sign(reference, keys["ours"])
    (layer,) = registry.layers(reference.rpartition("@")[2])
    data = bytearray(registry.blob(layer).read_bytes())
    data[len(data) // 2] ^= 1
    registry.blob(layer).write_bytes(data)
    with pytest.raises(ReleaseError, match="is not what its digest says"):
        up(reference, keys["ours.pub"])


def test_a_tag_is_looked_up_in_image_lock_and_may_not_have_moved(registry: Registry, checkout: None) -> None:
    first = small(registry, "moving", labels_of_this_checkout())
    tag = f"{registry.repository}:moving"
    digest = first.rpartition("@")[2]
    known = {"cpu": release.Published(repository=registry.repository, tag="moving", digest=digest, content="")}
    assert release.by_digest(tag, known) == first
    with pytest.raises(ReleaseError, match="names no digest"):
        release.by_digest(tag, {})
    small(registry, "moving", labels_of_this_checkout())
    with pytest.raises(ReleaseError, match=f"the tag {tag} is sha256:.* in the registry, {digest} in image.lock"):
        release.by_digest(tag, known)


def test_a_pull_ends_although_the_registry_goes_away_in_the_middle(registry: Registry, checkout: None) -> None:
    reference = small(registry, "broken", labels_of_this_checkout(), size=400)
    begun = threading.Event()
    pull = engine.pull

    def watched(name: str, show: object) -> None:
        def seen(progress: engine.Progress) -> None:
            if 0 < progress.done < progress.total // 2:
                begun.set()

        pull(name, seen)

    def away() -> None:
        assert begun.wait(60)
        registry.stop()
        time.sleep(3)
        registry.start()

    gone = threading.Thread(target=away)
    gone.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "pull", watched)
        release.pull(reference, pause=1.0)
    gone.join()
    assert begun.is_set()
    assert engine.labels(reference) is not None


def test_a_registry_that_stays_away_ends_it(registry: Registry) -> None:
    with pytest.raises(EngineError, match="refused"):
        release.pull(f"127.0.0.1:1/team/draftmill@sha256:{'0' * 64}", tries=2, pause=0.1)


def test_a_machine_that_is_not_fit_pulls_nothing(
    registry: Registry, keys: dict[str, Path], checkout: None, capsys: pytest.CaptureFixture[str]
) -> None:
    if not isinstance(node.node(Path("runs")).gpus, node.Unread):
        pytest.fail("this test is of a machine with no GPU")
    with pytest.raises(NodeError, match=r"this machine is not usable as any-gpu: .*GPU"):
        release.up("x@sha256:" + "0" * 64, "cuda", keys["ours.pub"], profile_of("any-gpu"), Path("runs"), {})


def test_an_image_crosses_an_air_gap_and_a_changed_file_does_not(
    registry: Registry, tmp_path: Path, checkout: None
) -> None:
    reference = small(registry, "carried", labels_of_this_checkout(), size=3)
    release.pull(reference)
    tag = "draftmill-test:carried"
    engine.name(reference, tag)
    file = tmp_path / "image.tar.zst"
    saved = archive.save(tag, file)
    subprocess.run(["docker", "rmi", tag, reference], check=True, capture_output=True)
    assert archive.load(file) == saved
    assert engine.digests(tag) == saved.layers
    subprocess.run(["docker", "rmi", tag], check=True, capture_output=True)

    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ReleaseError, match="has the checksum"):
        archive.load(file)
    assert engine.labels(tag) is None
    file.with_name("image.tar.zst.json").unlink()
    with pytest.raises(ReleaseError, match=r"cannot read .*image\.tar\.zst\.json"):
        archive.load(file)


@pytest.mark.parametrize(
    ("reference", "said"), [("a/b@sha256:12", "ends with no sha256 digest"), ("a/b:c", "names no digest")]
)
def test_a_reference_that_names_no_image_exactly_is_refused(reference: str, said: str) -> None:
    with pytest.raises(DraftmillError, match=re.escape(said)):
        release.by_digest(reference, {})
