"""What a check is, what it comes to, and what a machine is wanted to be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from draftmill.node import Read, Unread

GB = 1_000_000_000
UNLIMITED = 1 << 62

Verdict = Literal["ok", "warn", "critical", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check's outcome."""

    what: str
    found: str
    wanted: str
    verdict: Verdict
    do: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a kind of machine must have. Sizes in bytes."""

    name: str
    gpus: int  # at least
    exactly: bool = False
    card: str = ""  # in the GPUs' names
    capability: tuple[int, int] = (8, 0)
    memory: int  # the host's
    disk: int


def always(subject: Any, profile: Profile) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of a table of checks.

    Args:
        value: the reading, of a machine or of a GPU.
        good: whether it is as wanted.
        wanted: that in words; a function where it depends on the profile.
        bad: the verdict where it is not.
        show: the reading in words.
        do: what to do where it is not good; `unread`: where it was not read.
        when: whether this is asked at all.
    """

    what: str
    value: Callable[[Any], Read[Any]]
    good: Callable[[Any, Profile], bool]
    wanted: str | Callable[[Profile], str]
    bad: Verdict = "critical"
    show: Callable[[Any], str] = str
    do: str = ""
    unread: str = ""
    when: Callable[[Any, Profile], bool] = always

    def row(self, subject: Any, profile: Profile, name: str = "") -> Row:
        """The outcome for a machine or a GPU; `name` goes before the check's own."""
        what = f"{name} {self.what}".strip()
        wanted = self.wanted if isinstance(self.wanted, str) else self.wanted(profile)
        value = self.value(subject)
        if isinstance(value, Unread):
            return Row(what=what, found=f"not read: {value.reason}", wanted=wanted, verdict="unknown", do=self.unread)
        if self.good(value, profile):
            return Row(what=what, found=self.show(value), wanted=wanted, verdict="ok")
        return Row(what=what, found=self.show(value), wanted=wanted, verdict=self.bad, do=self.do)


def at_least(
    *, what: str, value: Callable[[Any], Read[Any]], least: Any, show: Callable[[Any], str] = str, **more: Any
) -> Check:
    """A check of a reading that must not be less than `least`: a value, or a function of the profile."""

    def bound(profile: Profile) -> Any:
        return least(profile) if callable(least) else least

    return Check(
        what=what,
        value=value,
        good=lambda found, profile: found >= bound(profile),
        wanted=lambda profile: f"{show(bound(profile))} or more",
        show=show,
        **more,
    )


def release(*, what: str, value: Callable[[Any], Read[Any]], least: str, **more: Any) -> Check:
    """A check of a version that must not be earlier than `least`."""
    return Check(
        what=what,
        value=value,
        good=lambda found, profile: Version(found) >= Version(least),
        wanted=f"{least} or later",
        **more,
    )


def both(first: Read[Any], second: Read[Any]) -> Read[tuple[Any, Any]]:
    """Two readings to be held against each other; unread where one is."""
    for one in (first, second):
        if isinstance(one, Unread):
            return one
    return first, second


def size(found: int) -> str:
    """Bytes in words."""
    if found >= UNLIMITED:
        return "unlimited"
    return f"{found / GB:,.1f} GB" if found >= GB // 10 else f"{found / 1e6:,.2f} MB"


def on_off(found: bool) -> str:
    """A switch in words."""
    return "on" if found else "off"


def dotted(found: tuple[int, ...]) -> str:
    """A version of numbers in words."""
    return ".".join(map(str, found))
