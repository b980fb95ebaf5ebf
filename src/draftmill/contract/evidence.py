"""A finding made of a use, with its evidence: the provider's line, its signature, and the way by which it was
reached."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftmill.contract.calls import Use
from draftmill.contract.findings import Finding, Kind, Place, Verdict


@dataclass(frozen=True)
class Evidence:
    """`site` is "file:line" in the provider; a bare file stands for its first line."""

    site: str = ""
    signature: str = ""
    path: Sequence[str] = ()

    @property
    def place(self) -> Place | None:
        if not self.site:
            return None
        file, colon, line = self.site.rpartition(":")
        return Place(file=file, line=int(line)) if colon and line.isdigit() else Place(file=self.site, line=1)


NOTHING = Evidence()


def finding(use: Use, verdict: Verdict, kind: Kind = "", message: str = "", evidence: Evidence = NOTHING) -> Finding:
    """A finding on `use`."""
    return Finding(
        verdict=verdict,
        kind=kind,
        how=use.how,
        use=use.text,
        consumer=Place(file=use.module.place, line=use.line),
        provider=evidence.place,
        signature=evidence.signature,
        path=list(evidence.path),
        message=message,
    )
