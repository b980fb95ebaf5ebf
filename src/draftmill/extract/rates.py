"""How fast extraction went, over all the attempts that a store took."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from draftmill.files import write_whole


class Rates(BaseModel):
    """What is in extraction.json. `plain_prefill_*`, the same engine with nothing captured, are of the last attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0
    plain_prefill_tokens: int
    plain_prefill_tokens_per_second: float
    computed_in: str

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def and_a_shard(self, tokens: int, seconds: float, size: int) -> "Rates":
        """These, and one more shard's."""
        more = {"tokens": self.tokens + tokens, "seconds": self.seconds + seconds, "bytes": self.bytes + size}
        return self.model_copy(update=more)

    def write(self, path: Path) -> None:
        """Raises:
        DiskError: it cannot be written.
        """
        found = {**self.model_dump(), "tokens_per_second": self.tokens_per_second}
        write_whole(path, (json.dumps(found, indent=1) + "\n").encode())

    def gone_on_from(self, path: Path) -> "Rates":
        """These with what earlier attempts counted, where there were any."""
        try:
            found = json.loads(path.read_bytes())
            found.pop("tokens_per_second")
            earlier = Rates.model_validate(found)
        except (OSError, ValueError, ValidationError, KeyError, AttributeError):
            return self
        return self.and_a_shard(earlier.tokens, earlier.seconds, earlier.bytes)
