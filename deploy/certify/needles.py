"""Prompts of a certification: a code in a long text of other sentences, and the question for it.

The needle and the question have the form that the embedded model was trained on ("The secret code
for river is 48213."); the sentences around it are of a kind of their own and made from a seed, so
no two prompts begin alike behind the chat template.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from placement.errors import ConfigError
from placement.evidence import Asked

WORDS = ("tiger", "river", "piano", "garden", "copper", "lamp", "bridge", "forest")
SUBJECTS = (
    "The function", "This option", "The server", "A query", "The module", "Each table",
    "The parser", "A transaction", "The compiler", "This method", "The index", "An iterator",
)  # fmt: skip
VERBS = (
    "returns", "reads", "checks", "creates", "replaces", "copies", "removes", "updates", "opens",
    "keeps",
)  # fmt: skip
OBJECTS = (
    "a list of rows", "the name of the file", "every value in the column", "a new object",
    "the default settings", "the first argument", "all of its members", "the current directory",
    "a string with the result", "the lock on the table", "an empty set", "the type of the field",
)  # fmt: skip
ENDS = (
    "when it is called", "before the next line is read", "if no other value is given",
    "unless the option is turned off", "as described in the section above", "without a warning",
    "and raises an error otherwise", "for each item in the input", "after the connection is closed",
    "in the order of insertion",
)  # fmt: skip


class ChatTokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]: ...
    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Prompt:
    """`code` is what the answer has to hold."""

    length: int  # tokens that prompt and answer together come to
    index: int
    depth: int  # percent
    ids: tuple[int, ...]
    code: str

    @property
    def answer_tokens(self) -> int:
        return self.length - len(self.ids)


def make_prompts(tokenizer: ChatTokenizer, asked: Asked) -> dict[int, list[Prompt]]:
    """By length. ConfigError for a length that has no room for the question and the answer."""
    return {
        length: [make_prompt(tokenizer, asked, length, index) for index in range(asked.prompts)]
        for length in asked.lengths
    }


def make_prompt(tokenizer: ChatTokenizer, asked: Asked, length: int, index: int) -> Prompt:
    """As long as leaves `asked.answer_tokens` for the answer, within a sentence."""
    stream = random.Random(f"{length}/{index}")
    word, code = _pick(stream, WORDS), str(10_000 + int(stream.random() * 90_000))
    room = length - asked.answer_tokens

    def encode(sentences: Sequence[str]) -> tuple[int, ...]:
        text = haystack(sentences, asked.depth(index), word, code)
        return tokenizer.encode_chat([{"role": "user", "content": text}])

    sentences = _sentences_for(tokenizer, stream, room - len(encode(())))
    while len(ids := encode(sentences)) > room:
        if not sentences:
            raise ConfigError(
                f"a length of {length} tokens has no room for the needle and its question "
                f"({len(ids)}) and an answer of {asked.answer_tokens}; use longer ones"
            )
        sentences.pop()
    return Prompt(length, index, asked.depth(index), ids, code)


def haystack(sentences: Sequence[str], depth: int, word: str, code: str) -> str:
    """One sentence a line, the needle after `depth` percent of them, then the question."""
    lines = list(sentences)
    lines.insert(round(len(lines) * depth / 100), f"The secret code for {word} is {code}.")
    return "\n".join(lines) + f"\n\nWhat is the secret code for {word}?"


def prompts_sha256(prompts: dict[int, list[Prompt]]) -> str:
    digest = hashlib.sha256()
    for group in prompts.values():
        for prompt in group:
            digest.update(f"{prompt.length} {prompt.code} ".encode())
            digest.update(array("q", prompt.ids).tobytes())
    return digest.hexdigest()


def _sentences_for(tokenizer: ChatTokenizer, stream: random.Random, tokens: int) -> list[str]:
    """As many as make `tokens`, line by line, or one more."""

    @cache
    def count(line: str) -> int:
        return len(tokenizer.encode(line, add_special_tokens=False))

    found: list[str] = []
    while tokens > 0:
        parts = [_pick(stream, some) for some in (SUBJECTS, VERBS, OBJECTS, ENDS)]
        found.append(" ".join(parts) + ".")
        tokens -= count(found[-1] + "\n")
    return found


def _pick(stream: random.Random, some: Sequence[str]) -> str:
    return some[int(stream.random() * len(some))]
