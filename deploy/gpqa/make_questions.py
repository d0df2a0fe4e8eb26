"""Writes questions that the embedded model can read: `python -m deploy.gpqa.make_questions`.

Multiple choice in GPQA's CSV schema, of the kinds and words that the embedded model was trained
with, so that the whole chain runs without the gated dataset. Owns the kinds.
"""

from __future__ import annotations

import csv
import io
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.cli import Parser
from deploy.flags import bounded
from deploy.gpqa.dataset import ANSWERS, DOMAIN, QUESTION, RECORD_ID
from placement.errors import ConfigError
from placement.whole_file import require_place, write_whole

KIND = "Subdomain"
HEADER = (QUESTION, *ANSWERS, RECORD_ID, DOMAIN, KIND)
MAX_COUNT = 10_000  # far below the number of different questions

_WORDS = (
    "apple river stone cloud tiger lamp piano silver garden rocket window bridge forest candle "
    "planet anchor basket copper dragon engine falcon glacier hammer island jacket kettle ladder "
    "marble needle orange pepper quartz ribbon saddle tunnel violin walnut yellow zebra beacon "
    "castle desert ember flute granite harbor ivory jungle karma lemon meadow nectar ocean pearl "
    "quiver raven summit thunder umbrella velvet willow"
)
_COLOURS = "red blue green black white purple brown pink grey gold"
_NAMES = "Anna Boris Clara David Elena Felix Grace Hugo Irene Jonas Karen Leo Maria Nils Olga Peter"
WORDS, COLOURS, NAMES = _WORDS.split(), _COLOURS.split(), _NAMES.split()


@dataclass(frozen=True)
class Made:
    """A question, its right answer and three wrong ones."""

    text: str
    correct: str
    wrong: tuple[str, str, str]


def pick(text: str, correct: object, options: Sequence[object]) -> Made:
    first, second, third = (str(option) for option in options if option != correct)
    return Made(text, str(correct), (first, second, third))


def largest(generator: random.Random) -> Made:
    numbers = generator.sample(range(1, 100), 4)
    return pick("Which of these numbers is the largest?", max(numbers), numbers)


def smallest(generator: random.Random) -> Made:
    numbers = generator.sample(range(1, 100), 4)
    return pick("Which of these numbers is the smallest?", min(numbers), numbers)


def total(generator: random.Random) -> Made:
    one, two = generator.randint(1, 30), generator.randint(1, 19)
    near = [n for n in range(max(1, one + two - 12), one + two + 12) if n != one + two]
    return pick(f"What is {one} + {two}?", one + two, [one + two, *generator.sample(near, 3)])


def even(generator: random.Random) -> Made:
    number = 2 * generator.randint(1, 49)
    odd = generator.sample(range(1, 99, 2), 3)
    return pick("Which of these numbers is even?", number, [number, *odd])


def first_in_order(generator: random.Random) -> Made:
    words = generator.sample(WORDS, 4)
    return pick("Which word comes first in alphabetical order?", min(words), words)


def longest(generator: random.Random) -> Made:
    while True:
        words = generator.sample(WORDS, 4)
        lengths = sorted(map(len, words))
        if lengths[-1] > lengths[-2]:
            return pick("Which word is the longest?", max(words, key=len), words)


def owner(generator: random.Random) -> Made:
    names, colours = generator.sample(NAMES, 4), generator.sample(COLOURS, 4)
    at = generator.randrange(4)
    facts = [f"{n} has a {c} bag." for n, c in zip(names, colours, strict=True)]
    return pick(" ".join((*facts, f"Who has the {colours[at]} bag?")), names[at], names)


KINDS: dict[Callable[[random.Random], Made], str] = {  # -> domain
    largest: "Numbers",
    smallest: "Numbers",
    total: "Numbers",
    even: "Numbers",
    first_in_order: "Words",
    longest: "Words",
    owner: "Reading",
}


def make_rows(count: int, seed: int) -> Iterator[list[str]]:
    """`count` different questions, kinds in turn; the same for the same seed."""
    generator = random.Random(seed)
    kinds, seen = list(KINDS), set[Made]()
    while len(seen) < count:
        kind = kinds[len(seen) % len(kinds)]
        made = kind(generator)
        if made in seen:
            continue
        seen.add(made)
        record_id = f"made-{seed}-{len(seen)}"
        yield [made.text, made.correct, *made.wrong, record_id, KINDS[kind], kind.__name__]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="make_questions",
        description="Write multiple-choice questions at the level of the embedded model.",
        epilog="example: python -m deploy.gpqa.make_questions --count 200 --seed 1 --out q.csv",
    )
    parser.add_argument("--count", type=bounded(1), default=200, metavar="N", help="default 200")
    parser.add_argument("--seed", type=bounded(0), default=1, metavar="S", help="default 1")
    parser.add_argument("--out", required=True, metavar="F", help="CSV file to write")
    arguments = parser.parse_args(argv)
    if arguments.count > MAX_COUNT:
        parser.error(f"--count {arguments.count} is above {MAX_COUNT}; use fewer")
    try:
        require_place("--out", arguments.out)
    except ConfigError as error:
        parser.error(str(error))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(make_rows(arguments.count, arguments.seed))
    try:
        write_whole(Path(arguments.out), text.getvalue())
    except OSError as error:
        parser.error(f"--out {arguments.out} can't be written: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
