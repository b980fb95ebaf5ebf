"""Expected failures. Each says what happened, the likely cause and the next step, and has its own exit code."""


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


class Interrupted(DraftmillError):
    """Ctrl-C or SIGTERM: the run stopped at a point from which it resumes."""

    exit_code = 130
