"""How a question is asked: the prompt's text and the order of its options.

Each preset is a public framework's, so that figures can be compared with published ones. Owns
templates and orders; knows nothing of files or servers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deploy.gpqa.dataset import Question

LETTERS = "ABCD"
Order = tuple[int, int, int, int]  # position -> option; option 0 is the correct one

_SIMPLE_EVALS = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering.\n\n{question}\n\nA) {a}\nB) {b}\nC) {c}\nD) {d}"
)
_LM_EVAL = (
    "What is the correct answer to this question:{question}\nChoices:\n(A) {a}\n(B) {b}\n(C) {c}\n"
    "(D) {d}\nLet's think step by step: "
)
_CYCLE: tuple[Order, ...] = ((1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2), (0, 1, 2, 3))


def cyclic() -> Iterator[Order]:
    """AISBench and OpenCompass: the first question's key is D, then C, B, A, D, ..."""
    while True:
        yield from _CYCLE


def sampled() -> Iterator[Order]:
    """simple-evals: a permutation a question from one generator of seed 0."""
    generator = random.Random(0)
    while True:
        a, b, c, d = generator.sample(range(4), 4)
        yield a, b, c, d


def shuffled() -> Iterator[Order]:
    """lm-eval: wrong options first, shuffled by one generator that starts at seed 0."""
    generator = random.Random(0)
    while True:
        order = [1, 2, 3, 0]
        generator.shuffle(order)
        a, b, c, d = order
        yield a, b, c, d


@dataclass(frozen=True)
class Preset:
    """`orders` goes on for ever; the first N questions get the same ones whatever comes after."""

    name: str
    template: str
    orders: Callable[[], Iterator[Order]]

    @property
    def sha256(self) -> str:
        """Of the template and of the first four orders: what an answer depends on."""
        orders = self.orders()
        first = [next(orders) for _ in range(len(LETTERS))]
        return hashlib.sha256(f"{self.template}\x1f{first}".encode()).hexdigest()


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("aisbench", _SIMPLE_EVALS, cyclic),  # gpqa_gen_0_shot_cot_chat_prompt
        Preset("simple-evals", _SIMPLE_EVALS, sampled),  # gpqa_eval.py, n_repeats 1
        Preset("lm-eval", _LM_EVAL, shuffled),  # gpqa_*_cot_zeroshot 2.2
    )
}


@dataclass(frozen=True)
class Prompt:
    """A question as it is sent. `order` spells which option stands where: A is the correct one."""

    question: Question
    order: str
    key: str  # the letter of the correct option
    text: str = field(repr=False)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def make_prompts(preset: Preset, questions: Sequence[Question]) -> list[Prompt]:
    return [
        _prompt(preset, question, order)
        for question, order in zip(questions, preset.orders(), strict=False)
    ]


def _prompt(preset: Preset, question: Question, order: Order) -> Prompt:
    a, b, c, d = (question.options[option] for option in order)
    text = preset.template.format(question=question.text, a=a, b=b, c=c, d=d)
    spelled = "".join(LETTERS[option] for option in order)
    return Prompt(question, spelled, LETTERS[order.index(0)], text)
