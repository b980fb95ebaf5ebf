"""The contract audit: every use that one package makes of another, checked against the other's source, which never
runs."""

from draftmill.contract.commands import app

__all__ = ["app"]
