"""What can be used of the sources, and why the rest cannot."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field

from draftmill.prepare.conversations import Conversation, Dropped, read
from draftmill.prepare.masks import Encoder, TemplateError
from draftmill.recipe import Recipe, Source
from draftmill.tokens import TokenSample

EXAMPLES = 3  # places named for each reason to drop something


@dataclass
class Counts:
    """What was read, and what became of it."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, place: str) -> None:
        self.dropped[reason] += 1
        found = self.places.setdefault(reason, [])
        if len(found) < EXAMPLES:
            found.append(place)


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Reads the sources until each has given as much of use as its limit asks for.

    What it gives is by a digest of its content, in the order read: samples, or where the target is to answer anew,
    conversations still without answers.
    """

    recipe: Recipe
    encoder: Encoder
    vocab_size: int
    counts: Counts

    def collect(self, *, keep_going: bool) -> dict[str, Conversation | TokenSample]:
        """Reads all sources.

        Raises:
            DataError: as `conversations.read`.
        """
        regenerate = self.recipe.data.regenerate
        collected: dict[str, Conversation | TokenSample] = {}
        for source in self.recipe.data.sources:
            kept = 0
            for found in read(source, self.vocab_size, answered=not regenerate.enabled, keep_going=keep_going):
                self.counts.read += 1
                item = found
                if isinstance(found, Conversation) and regenerate.enabled:
                    item = found.without_answers(regenerate.turns)
                digest = _digest(item)
                usable = self._usable(item, digest, source) if digest not in collected else "a duplicate"
                if isinstance(usable, str):
                    self.counts.drop(usable, item.id if isinstance(item, TokenSample) else item.place)
                    continue
                collected[digest] = usable
                kept += 1
                if kept == source.limit:
                    break
        return collected

    def _usable(
        self, item: Conversation | TokenSample | Dropped, digest: str, source: Source
    ) -> Conversation | TokenSample | str:
        """What becomes of one conversation or sample, or why it is dropped."""
        if isinstance(item, Dropped):
            return item.reason
        if isinstance(item, TokenSample):
            return self.fit(item)
        if source.match and not item.asks(source.match):
            return "not matching"
        try:
            if self.recipe.data.regenerate.enabled:
                return self._answerable(item)
            ids, mask = self.encoder.encode(item)
        except TemplateError as error:
            return str(error)
        return self.fit(TokenSample(id=digest, input_ids=ids, loss_mask=mask))

    def _answerable(self, conversation: Conversation) -> Conversation | str:
        prompt = self.encoder.prompt(conversation.messages()[: 2 if conversation.turns[0].role == "system" else 1])
        if max(prompt, default=0) >= self.vocab_size:
            return _OUTSIDE
        room = self.recipe.data.max_length - self.recipe.data.regenerate.max_new_tokens
        return conversation if len(prompt) <= room else "no room for an answer within max_length"

    def fit(self, sample: TokenSample) -> TokenSample | str:
        """The sample within the length limit, or why it is dropped."""
        limit = self.recipe.data.max_length
        ids, mask = sample.input_ids, sample.loss_mask
        if len(ids) > limit:
            if self.recipe.data.overlong == "drop":
                return "longer than max_length"
            ids, mask = ids[:limit], mask[:limit]
        if not any(mask):
            return "nothing to learn from: the mask is empty"
        # A tokenizer may know markers that this target has no row for in its embedding.
        return TokenSample(id=sample.id, input_ids=ids, loss_mask=mask) if max(ids) < self.vocab_size else _OUTSIDE


_OUTSIDE = "token ids outside the target's vocabulary"


def _digest(found: Conversation | TokenSample | Dropped) -> str:
    if isinstance(found, Dropped):
        return ""
    if isinstance(found, Conversation):
        return found.digest
    return hashlib.sha256(json.dumps([found.input_ids, found.loss_mask]).encode()).hexdigest()
