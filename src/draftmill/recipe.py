"""One run's settings, read from a TOML file: strict, so that a misspelt key is an error and not a default."""

import importlib.util
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from draftmill.errors import RecipeError

PACKAGE = "package:"
DEMO = "demo"


def _safe_name(name: str) -> str:
    if not name or name.startswith(".") or any(c in name for c in "/\\\0"):
        raise ValueError("must be a plain folder name")
    return name


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Run(_Section):
    """Where the run's files go: `<folder>/<name>/`."""

    name: Annotated[str, AfterValidator(_safe_name)]
    folder: str = "runs"
    seed: int = 0


class Target(_Section):
    """The target model: a Hugging Face folder, or a GGUF file, which `prepare` turns into such a folder."""

    path: str
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    trust_remote_code: bool = False


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return text


class Source(_Section):
    """One file of conversations. `limit` takes the first so many usable ones whose user's turns have a `match`."""

    format: Literal["sharegpt", "messages", "tokens"]
    path: str
    match: Annotated[str, AfterValidator(_pattern)] | None = None
    limit: int | None = Field(default=None, ge=1)


class Regenerate(_Section):
    """Answers written anew by the target itself, so that the draft learns the distribution that it will be asked for.

    `batch` conversations are answered at a time and are on disk before the next begin: a stopped run resumes there.
    """

    enabled: bool = True
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    turns: int = Field(default=1, ge=1)
    batch: int = Field(default=128, ge=1)


class Data(_Section):
    """Conversations and how they become samples."""

    sources: list[Source] = Field(min_length=1)
    max_length: int = Field(default=2048, ge=2)
    overlong: Literal["drop", "truncate"] = "drop"
    held_out: float = Field(default=0.05, ge=0.0, lt=1.0)
    regenerate: Regenerate = Regenerate(enabled=False)


class Extract(_Section):
    """How hidden states are extracted. `layers` as in `draftmill.layers`; None takes EAGLE-3's default three."""

    layers: list[int] | None = None
    tensor_parallel: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.8, gt=0.0, lt=1.0)
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    shard_samples: int = Field(default=64, ge=1)


class Train(_Section):
    """The draft and its training: `steps` optimiser steps of `packs` packs of up to `pack_tokens` positions each.

    The packs of a step are shared by the ranks that torchrun starts; a rank goes through its own one after another.
    With `parallel` "ddp" each has the whole draft and its optimiser's state, with "fsdp" a part of both, for less
    memory.

    `train_head` false keeps the target's own output embedding. `noise` blurs the states that the draft reads,
    uniformly by up to so many standard deviations, which keeps a draft from learning a small store by heart. The draft
    is that of the validation with the longest acceptance length; after `patience` validations that are no longer,
    training ends.
    """

    steps: int = Field(default=1000, ge=1)
    pack_tokens: int = Field(default=2048, ge=2)
    packs: int = Field(default=1, ge=1)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    learning_rate: float = Field(default=1e-3, gt=0.0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(default=50, ge=0)
    loss: Literal["forward_kl", "cross_entropy", "total_variation", "acceptance"] = "forward_kl"
    clip_norm: float = Field(default=1.0, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    ttt_steps: int = Field(default=3, ge=1)
    ttt_step_loss_decay: float = Field(default=1.0, gt=0.0)
    draft_vocab_size: int | None = Field(default=None, ge=1)
    num_layers: int = Field(default=1, ge=1)
    train_head: bool = True
    noise: float = Field(default=0.0, ge=0.0)
    checkpoint_steps: int = Field(default=100, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    validate_steps: int = Field(default=100, ge=1)
    patience: int | None = Field(default=None, ge=1)


class Prompts(_Section):
    """A prompt set: HumanEval's JSONL (or .gz), MT-Bench's question.jsonl, JSONL with `messages` or `prompt`, or
    samples as `prepare` writes them, of which what comes before the first answer is the prompt.
    """

    name: Annotated[str, AfterValidator(_safe_name)]
    format: Literal["humaneval", "mt_bench", "messages", "tokens"]
    path: str
    limit: int | None = Field(default=None, ge=1)


class Evaluate(_Section):
    """Acceptance length by greedy speculative decoding; engine "auto" is vLLM's where the platform has it.

    `concurrency`: numbers of requests in flight at which vLLM's tokens/s are measured, with the draft and without.
    """

    prompts: list[Prompts] = Field(min_length=1)
    draft_tokens: int = Field(default=3, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    batch: int = Field(default=16, ge=1)
    concurrency: list[Annotated[int, Field(ge=1)]] = [1, 4, 16]
    engine: Literal["auto", "reference", "vllm"] = "auto"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Where each stage of one run reads and writes. The only place that names these files."""

    root: Path

    @property
    def target(self) -> Path:
        """The target as a Hugging Face folder, when `prepare` had to make one."""
        return self.root / "target"

    @property
    def prepared(self) -> Path:
        """`train.jsonl`, `held_out.jsonl` and `prepared.json`."""
        return self.root / "prepared"

    @property
    def store_train(self) -> Path:
        return self.root / "store" / "train"

    @property
    def store_held_out(self) -> Path:
        return self.root / "store" / "held_out"

    @property
    def extraction_json(self) -> Path:
        return self.root / "extraction.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def metrics_jsonl(self) -> Path:
        """One JSON object a line and training step."""
        return self.root / "metrics.jsonl"

    @property
    def draft(self) -> Path:
        """The draft that vLLM and speculators load as it is."""
        return self.root / "draft"

    @property
    def evaluation_json(self) -> Path:
        return self.root / "evaluation.json"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def report_json(self) -> Path:
        return self.root / "report.json"


class Recipe(_Section):
    """Everything that describes a run. The same recipe, pins and inputs give the same run."""

    run: Run
    target: Target
    data: Data
    extract: Extract = Extract()
    train: Train = Train()
    evaluate: Evaluate

    @property
    def folder(self) -> RunFolder:
        return RunFolder(root=Path(self.run.folder) / self.run.name)

    @property
    def target_folder(self) -> Path:
        """The target as a Hugging Face folder: the one named, or the one that `prepare` makes from a GGUF file."""
        path = resolve(self.target.path)
        return self.folder.target if path.suffix == ".gguf" else path

    @classmethod
    def parse(cls, text: str, *, name: str, overrides: Mapping[str, str] | None = None) -> Self:
        """Reads a recipe from TOML text. `overrides` are `section.key` to TOML values, as `--set` takes them.

        Raises:
            RecipeError: the text is no TOML, a key is unknown, or a value is of another type or out of range.
        """
        try:
            tree = tomllib.loads(text)
            for dotted, value in (overrides or {}).items():
                _assign(tree, dotted, tomllib.loads(f"value = {value}")["value"])
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"{name} is no valid TOML: {error}", next_step="correct that line") from error
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            rows = "\n".join(f"  {_dotted(e['loc'])}: {e['msg']}" for e in error.errors())
            raise RecipeError(
                f"{name} is not a valid recipe:\n{rows}", next_step="correct these; README.md lists every key"
            ) from error

    @classmethod
    def load(cls, path: Path | None, overrides: Mapping[str, str] | None = None) -> Self:
        """Reads a recipe file; None reads the embedded demo.

        Raises:
            RecipeError: as `parse`, or the file cannot be read.
        """
        if path is None:
            text = resources.files("draftmill").joinpath("recipes", f"{DEMO}.toml").read_text(encoding="utf-8")
            return cls.parse(text, name="the demo recipe", overrides=overrides)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(
                f"cannot read the recipe {path}: {error}",
                cause="a wrong path, or in a container a folder that is not mounted",
                next_step="check the path, or leave --recipe out to run the demo",
            ) from error
        return cls.parse(text, name=str(path), overrides=overrides)


def _assign(tree: dict[str, object], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        child = tree.setdefault(key, {})
        if not isinstance(child, dict):
            raise RecipeError(f"--set {dotted}: {key} is not a section", next_step="use section.key=value")
        tree = child
    tree[last] = value


def _dotted(place: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in place) or "(top)"


def resolve(path: str) -> Path:
    """A recipe's path. `package:NAME/FILE` names a file that an installed Python package carries (it is not imported).

    Raises:
        RecipeError: the package is not installed, or has no such file.
    """
    if not path.startswith(PACKAGE):
        return Path(os.path.expandvars(path)).expanduser()
    package, _, file = path.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        if (found := Path(folder) / file).exists():
            return found
    raise RecipeError(
        f"{path}: no such file in an installed package",
        cause=f"the package {package} is not installed here" if not folders else f"{package} has no {file}",
        next_step="run ./just setup, which installs the demo's data, or name a file of your own",
    )
