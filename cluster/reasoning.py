"""Splits a chat answer into reasoning (inside the thinking tags) and content.

Owns the tag grammar only: `<think>` at most once at the start, one `</think>`. Whether an answer
starts inside a thinking block is read off the rendered prompt, so templates that open or close
the block themselves need no setting. Knows nothing of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.tokens import THINK_CLOSE, THINK_OPEN


class Section(StrEnum):
    """Where the next character of the answer belongs."""

    UNDECIDED = "undecided"  # the model may open a thinking block first
    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True)
class Delta:
    """A piece of an answer; both parts may be empty."""

    reasoning: str = ""
    content: str = ""


def section_after(prompt: str) -> Section:
    """Section in which an answer to the rendered `prompt` begins.

    An open `<think>` at the very end of the prompt: reasoning; a closed block there: content;
    neither: the model decides.
    """
    tail = prompt.rstrip()
    if tail.endswith(THINK_OPEN):
        return Section.REASONING
    if tail.endswith(THINK_CLOSE):
        return Section.CONTENT
    return Section.UNDECIDED


class ReasoningSplitter:
    """Feeds text pieces through the grammar; the joined result doesn't depend on the cuts.

    White space next to the tags is part of the markup and dropped. An answer that doesn't open
    with `<think>` (when the prompt didn't) is content to the last character.
    """

    def __init__(self, section: Section) -> None:
        self.section = section
        self.reasoned = False  # true once reasoning text was given
        self._held = ""
        self._trim_reasoning = True
        self._trim_content = False

    def push(self, text: str) -> Delta:
        self._held += text
        if self.section is Section.UNDECIDED:
            self._decide()
        reasoning = self._reasoning() if self.section is Section.REASONING else ""
        content = self._content() if self.section is Section.CONTENT else ""
        self.reasoned = self.reasoned or bool(reasoning)
        return Delta(reasoning, content)

    def flush(self) -> Delta:
        """What is held back when the answer ends: an unfinished tag or white space."""
        held, self._held = self._held, ""
        if self.section is Section.REASONING:
            if self._trim_reasoning:
                held = held.lstrip().removeprefix(THINK_OPEN).lstrip()
            self.reasoned = self.reasoned or bool(held)
            return Delta(reasoning=held)
        return Delta(content=held)

    def _decide(self) -> None:
        text = self._held.lstrip()
        if text.startswith(THINK_OPEN):
            self.section = Section.REASONING
        elif not THINK_OPEN.startswith(text):
            self.section = Section.CONTENT

    def _reasoning(self) -> str:
        if self._trim_reasoning:
            self._drop_opening()
        if self._trim_reasoning:
            return ""
        before, tag, after = self._held.partition(THINK_CLOSE)
        if tag:
            self._close(after)
            return before.rstrip()
        keep = _open_tail(before, THINK_CLOSE)
        sendable = before[: len(before) - keep].rstrip()
        self._held = before[len(sendable) :]
        return sendable

    def _drop_opening(self) -> None:
        """White space and the tag before the first reasoning text; stays on while undecidable."""
        text = self._held.lstrip()
        if text.startswith(THINK_OPEN):
            text = text.removeprefix(THINK_OPEN).lstrip()
        if text.startswith(THINK_CLOSE):
            self._close(text.removeprefix(THINK_CLOSE))
        elif not (THINK_OPEN.startswith(text) or THINK_CLOSE.startswith(text)):
            self._held = text
            self._trim_reasoning = False

    def _close(self, after: str) -> None:
        self.section = Section.CONTENT
        self._held = after
        self._trim_content = True

    def _content(self) -> str:
        text = self._held.lstrip() if self._trim_content else self._held
        if text:
            self._trim_content = False
        self._held = ""
        return text


def _open_tail(text: str, tag: str) -> int:
    """Length of the longest tail of `text` that is a proper prefix of `tag`."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
