"""A conversation as token ids, with a mask of those that the assistant said.

Supervised is what the target would generate: from the end of the generation prompt to the end of the turn, its end
marker with it, the white space that a template puts after the marker without.
"""

import bisect
from dataclasses import dataclass
from typing import Any

from draftmill.prepare.conversations import Conversation

METHODS = {
    "template": "the template's own generation marks",
    "offsets": "character offsets",
    "ids": "token ids of the conversation's beginnings",
}


class TemplateError(Exception):
    """The template cannot render this conversation, or renders it so that the assistant's part cannot be told."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer with its chat template, and the way in which the mask is found."""

    tokenizer: Any
    method: str

    @classmethod
    def of(cls, tokenizer: Any) -> "Encoder":
        """Takes the surest way that this tokenizer and template allow."""
        template = tokenizer.chat_template
        marked = isinstance(template, str) and "{% generation" in template.replace("{%-", "{%")
        method = "ids" if not tokenizer.is_fast else "template" if marked else "offsets"
        return cls(tokenizer=tokenizer, method=method)

    def encode(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Token ids and mask, both of length T.

        Raises:
            TemplateError: the mask would not be sure.
        """
        messages = conversation.messages()
        if self.method == "template":
            return self._by_template(messages)
        return self._by_offsets(messages) if self.method == "offsets" else self._by_ids(messages)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids from which the target generates the next answer.

        Raises:
            TemplateError: the template cannot render it.
        """
        return list(self._render(messages, tokenize=True, add_generation_prompt=True))

    def _render(self, messages: list[dict[str, str]], **options: Any) -> Any:
        from jinja2.exceptions import TemplateError as JinjaError

        try:
            rendered = self.tokenizer.apply_chat_template(messages, **{"return_dict": False, **options})
        except (JinjaError, ValueError, TypeError, KeyError, IndexError) as error:
            raise TemplateError(f"the template fails: {error}") from error
        return rendered

    def _by_template(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        found = self._render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), [int(m) for m in found["assistant_masks"]]

    def _by_offsets(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        text = self._render(messages, tokenize=False)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        mask = [0] * len(offsets)
        starts = [start for start, _ in offsets]
        for index in _assistant(messages):
            before = self._render(messages[:index], tokenize=False, add_generation_prompt=True)
            upto = self._render(messages[: index + 1], tokenize=False)
            if not (text.startswith(before) and text.startswith(upto) and len(before) < len(upto)):
                raise TemplateError("the template writes earlier turns otherwise than alone")
            begin, end = len(before), len(upto.rstrip())
            for token in range(bisect.bisect_left(starts, begin), bisect.bisect_left(starts, end)):
                mask[token] = 1
        return list(encoded["input_ids"]), mask

    def _by_ids(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        ids = self._render(messages, tokenize=True)
        mask = [0] * len(ids)
        for index in _assistant(messages):
            before = self.prompt(messages[:index])
            upto = self._render(messages[: index + 1], tokenize=True)
            if not (ids[: len(before)] == before and ids[: len(upto)] == upto and len(before) < len(upto)):
                raise TemplateError("the template writes earlier turns otherwise than alone")
            end = len(upto)
            while end > len(before) and not self.tokenizer.decode([upto[end - 1]]).strip():
                end -= 1
            mask[len(before) : end] = [1] * (end - len(before))
        return list(ids), mask


def _assistant(messages: list[dict[str, str]]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]
