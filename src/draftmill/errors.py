"""Expected failures, which stop a run, each with its exit code; and findings, values that a check returns."""

from dataclasses import dataclass


class DraftmillError(Exception):
    """Base of everything that may stop a run for a reason the user can act on.

    Args:
        what: what happened, with the place (file, line, sample) in it.
        cause: the likely cause; empty where `what` already says it.
        next_step: what to do now.
    """

    exit_code = 1

    def __init__(self, what: str, *, cause: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.next_step = next_step


class RecipeError(DraftmillError):
    """The recipe cannot be read, holds an unknown key or a value out of range."""

    exit_code = 10


class DataError(DraftmillError):
    """Conversations or token ids cannot be used as they are."""

    exit_code = 11


class TargetError(DraftmillError):
    """The target model's folder lacks weights, a tokenizer, a chat template, or fails to load."""

    exit_code = 12


class LayerError(DraftmillError):
    """Layer ids out of range, repeated, or not those of the store."""

    exit_code = 13


class StoreError(DraftmillError):
    """The store belongs to another run, or a part of it cannot be read."""

    exit_code = 14


class DiskError(DraftmillError):
    """The disk is full, or would be."""

    exit_code = 15


class StackError(DraftmillError):
    """vLLM, torch or speculators is missing, of another version, or failed."""

    exit_code = 16


class PatchError(DraftmillError):
    """A patch is malformed, unlisted, or does not apply."""

    exit_code = 17


class PinError(DraftmillError):
    """A lock is stale, or a downloaded part is not the pinned one."""

    exit_code = 18


class TrainingError(DraftmillError):
    """Training cannot start or go on: NaN loss, a checkpoint of another run."""

    exit_code = 19


class ProcessError(DraftmillError):
    """A command that draftmill ran failed."""

    exit_code = 20


class EngineError(DraftmillError):
    """No Docker engine answers, or what it was asked for failed: a build, a container."""

    exit_code = 21


class ReleaseError(DraftmillError):
    """A published image is not what it should be: its signature, its digest, its labels, a saved file's checksum."""

    exit_code = 23


class NodeError(DraftmillError):
    """A machine cannot be judged as asked, or is not fit."""

    exit_code = 22


class Interrupted(DraftmillError):
    """Ctrl-C or SIGTERM: the run stopped at a point from which it resumes."""

    exit_code = 130


class AuditError(DraftmillError):
    """The contract audit reached no verdict: a side is missing, cannot be read, or holds no Python sources."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a check found to be otherwise than it should be: a value, since a check goes on to the next.

    Args:
        kind: which fault it is, in a few fixed words.
        place: the file, shard, sample or patch that has it.
        expected: what was to be there.
        found: what was there.
    """

    kind: str
    place: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}: expected {self.expected}, found {self.found}"
