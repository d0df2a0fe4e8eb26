"""Texts that `nrank bench` measures drafts on, as prompts through the model's own tokenizer.

Four tasks from easy to guess to hardly: counting, finding a code in a passage (both through the
chat template, answered to the model's own end), going on with prose, going on with noise.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.bench.workloads import CONCURRENCIES, Sizes, Workload, random_prompt

if TYPE_CHECKING:
    from cluster.tokens import Tokenizer
    from deploy.prompts import ModelLimits

NUM_PROMPTS = max(CONCURRENCIES)
COUNT_FROM = (11, 23, 37, 48)
COUNT_STEPS = 25
CODE_WORDS = ("tiger", "river", "piano", "garden")
NOISE_CHARACTERS = 64
PASSAGE = (
    "The workshop opens at seven and the first hour goes to cleaning the tools.",
    "Visitors may look at the machines but have to stay behind the yellow line.",
    "The finished chairs stand near the door until the van comes on Friday.",
)
PROSE = (
    "A cache keeps results of earlier work so that they need not be computed again. When it is "
    "full,",
    "The function returns the number of rows that were changed. If no row matches,",
    "To read a file line by line, open it and iterate over the object. Each line",
    "An index speeds up queries that select few rows, but every insert and update has to",
)


@dataclass(frozen=True)
class Text:
    """Prompts of one task; `has_end`: answers end where the model ends them."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    has_end: bool = False

    def workloads(self, end_token_ids: tuple[int, ...], sizes: Sizes) -> tuple[Workload, Workload]:
        """One request at a time, and all together."""
        length = sizes.text_new if self.has_end else sizes.new
        ends = end_token_ids if self.has_end else ()
        in_turn = self.prompts[: sizes.in_turn]
        return (
            Workload(f"{self.name}-1", in_turn, length, ends, in_turn=True),
            Workload(f"{self.name}-{len(self.prompts)}", self.prompts, length, ends),
        )


def draft_workloads(
    limits: ModelLimits, usable: Sequence[int], sizes: Sizes
) -> tuple[list[Workload], list[str]]:
    """Workloads of all texts and of random ids, and a line for whatever has to be left out."""
    texts, left_out = list[Text](), list[str]()
    if limits.has_tokenizer:
        texts += make_texts(limits.tokenizer, sizes)
        if not limits.tokenizer.has_template:
            left_out.append("drafts on counting and retrieval: the model has no chat template")
    else:
        left_out.append("drafts on text: the model has no tokenizer that can be used here")
    ids = (random_prompt(usable, index, sizes.prompt) for index in range(NUM_PROMPTS))
    texts.append(Text("random-ids", tuple(ids)))
    return [w for text in texts for w in text.workloads(limits.end_token_ids, sizes)], left_out


def make_texts(tokenizer: Tokenizer, sizes: Sizes) -> Iterator[Text]:
    """Those that the tokenizer and its chat template can put into ids."""
    indices = range(NUM_PROMPTS)
    if tokenizer.has_template:
        tasks = {
            "counting": [counting(index) for index in indices],
            "retrieval": [retrieval(index, sizes.passage_sentences) for index in indices],
        }
        for name, questions in tasks.items():
            chats = [[{"role": "user", "content": question}] for question in questions]
            yield Text(name, tuple(map(tokenizer.encode_chat, chats)), has_end=True)
    yield Text("prose", tuple(map(tokenizer.encode, PROSE)))
    yield Text("noise", tuple(tokenizer.encode(noise(index)) for index in indices))


def counting(index: int) -> str:
    first = COUNT_FROM[index]
    return f"Count from {first} to {first + COUNT_STEPS}."


def retrieval(index: int, num_sentences: int) -> str:
    """A passage with a code in it, and the question for the code."""
    word, code = CODE_WORDS[index], 10_000 + int(random.Random(index).random() * 90_000)
    sentences = list(PASSAGE[:num_sentences])
    place = len(sentences) * index // NUM_PROMPTS
    sentences.insert(place, f"The secret code for {word} is {code}.")
    return "\n".join(sentences) + f"\n\nWhat is the secret code for {word}?"


def noise(index: int) -> str:
    stream, characters = random.Random(index), string.ascii_letters + string.digits
    return "".join(
        characters[int(stream.random() * len(characters))] for _ in range(NOISE_CHARACTERS)
    )
