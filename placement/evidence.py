"""What a certification has shown: an evidence file's cells, and the context length they certify.

Owns the file's format and the rule. Three lengths are told apart: configured is asked for,
allocated has room, certified was run to its end with the right answer. Knows nothing of how a
cell is run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar, get_type_hints

from placement.errors import ConfigError
from placement.headers import require_regular

VERSION = 1
T = TypeVar("T")


class Pass(StrEnum):
    """In the order in which they run. All but the first compare with the ids of the first."""

    GRID = "grid"  # each prompt alone, nothing of it cached: the needle is found
    REUSE = "reuse"  # the same prompt again in the same gang
    RESTART = "restart"  # each prompt alone in a new gang
    FILL = "fill"  # all sequences together in a new gang, and again where prefixes are kept


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    MISSING = "missing"  # not all of it was run


@dataclass(frozen=True)
class Binding:
    """What evidence is of. Another value of any of these, and it says nothing."""

    plan_id: str
    engine_hash: str  # of the configuration that ranks run with
    checkpoint: str  # hash of the model directory's files
    revision: str  # of nrank, and of changes to it that are not committed

    def differences(self, here: Binding) -> list[str]:
        """Words for what differs `here`, with both values."""
        return [
            f"{field.name} was {was or 'unknown'}, is {now or 'unknown'}"
            for field in fields(self)
            if (was := getattr(self, field.name)) != (now := getattr(here, field.name))
        ]


@dataclass(frozen=True)
class Asked:
    """What a certification was to run. Each length has `prompts` prompts of its own."""

    lengths: tuple[int, ...]  # tokens of prompt and answer, ascending
    depths: tuple[int, ...]  # percent of the text before the needle
    sequences: int  # together, in the fill
    answer_tokens: int  # room for an answer, at least
    prompts_sha256: str  # of all prompts' ids

    @property
    def prompts(self) -> int:
        return max(len(self.depths), self.sequences)

    def indices(self, stage: Pass) -> range:
        """Of the prompts that a pass runs at each length."""
        return range(self.sequences if stage is Pass.FILL else self.prompts)

    def depth(self, index: int) -> int:
        return self.depths[index % len(self.depths)]

    @property
    def num_cells(self) -> int:
        return len(self.lengths) * sum(len(self.indices(stage)) for stage in Pass)


@dataclass(frozen=True)
class Cell:
    """One sequence of one pass.

    `got` is a hash of the answer's ids up to its first end token, `expected` the needle's code in
    the grid and the grid's `got` in the other passes.
    """

    stage: Pass
    length: int  # tokens of prompt and answer
    index: int  # of the prompt
    depth: int  # percent
    prompt_tokens: int
    completed_tokens: int  # of prompt and answer
    cached_tokens: int
    expected: str
    got: str
    at_once: int  # whole prompts that the gang held at one moment: below `sequences`, some waited
    preemptions: int  # of the gang meanwhile: pages were short, tokens were computed again
    seconds: float  # from submission to the last token
    passed: bool
    reason: str = ""  # why it failed

    @property
    def key(self) -> tuple[Pass, int, int]:
        return self.stage, self.length, self.index


@dataclass(frozen=True)
class Evidence:
    model: str
    binding: Binding
    asked: Asked
    cells: tuple[Cell, ...] = ()

    @cached_property
    def by_key(self) -> Mapping[tuple[Pass, int, int], Cell]:
        return {cell.key: cell for cell in self.cells}

    def of(self, stage: Pass, length: int) -> list[Cell]:
        """The cells of a pass at a length that were run."""
        keys = ((stage, length, index) for index in self.asked.indices(stage))
        return [self.by_key[key] for key in keys if key in self.by_key]

    def verdict(self, stage: Pass, length: int) -> Verdict:
        cells = self.of(stage, length)
        if not all(cell.passed for cell in cells):
            return Verdict.FAILED
        whole = len(cells) == len(self.asked.indices(stage))
        return Verdict.PASSED if whole else Verdict.MISSING

    @property
    def is_complete(self) -> bool:
        return len(self.cells) == self.asked.num_cells

    @property
    def certified_tokens(self) -> int:
        """The largest length up to which every pass was run whole and every cell passed; 0: none.

        What was not run certifies nothing.
        """
        certified = 0
        for length in self.asked.lengths:
            if any(self.verdict(stage, length) is not Verdict.PASSED for stage in Pass):
                break
            certified = length
        return certified

    @property
    def limit_reason(self) -> str:
        """What keeps the next length from being certified; "" when all asked ones are."""
        for length in self.asked.lengths:
            for stage in Pass:
                verdict = self.verdict(stage, length)
                if verdict is not Verdict.PASSED:
                    text = "was not run whole" if verdict is Verdict.MISSING else "failed"
                    return f"{stage} at {length} tokens {text}"
        return ""

    def to_json(self) -> str:
        summary = {
            "certified_tokens": self.certified_tokens,
            "limit": self.limit_reason,
            "lengths": {
                str(length): {stage.value: self.verdict(stage, length).value for stage in Pass}
                for length in self.asked.lengths
            },
        }
        whole = {"version": VERSION, "summary": summary, **asdict(self)}
        return json.dumps(whole, indent=1) + "\n"


@dataclass(frozen=True)
class Claim:
    """Evidence beside what runs here. The plan comes last: `here` has none yet."""

    evidence: Evidence
    here: Binding

    def standing(self, plan_id: str) -> tuple[int, str]:
        """Certified tokens of the plan, and a warning where the evidence gives less than it could.

        Evidence of anything else certifies nothing here.
        """
        evidence = self.evidence
        then = evidence.certified_tokens
        changed = evidence.binding.differences(replace(self.here, plan_id=plan_id))
        if changed:
            text = f"the evidence certified {then} tokens, but since then {'; '.join(changed)}"
            return 0, f"{text}: run nrank certify again"
        if not then:
            return 0, f"the evidence certifies no length: {evidence.limit_reason}"
        return then, ""


def read_evidence(path: str) -> Evidence:
    """ConfigError for what can't be read or is no evidence; the file's summary is not trusted."""
    try:
        require_regular(path)
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}; give an evidence file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no evidence file: {error}") from None
    try:
        return _evidence(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        detail = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is no evidence file of this version: {detail}") from None


def _evidence(found: dict[str, Any]) -> Evidence:
    if found["version"] != VERSION:
        raise ValueError(f"version {found['version']!r}, this nrank reads {VERSION}")
    asked, cells = found["asked"], found["cells"]
    if not isinstance(cells, list):
        raise TypeError("cells must be a list")
    lengths, depths = (_whole_numbers(asked[key]) for key in ("lengths", "depths"))
    if not lengths or list(lengths) != sorted(set(lengths)) or not depths:
        raise ValueError("lengths must ascend and depths can't be empty")
    if min(lengths[0], asked["sequences"], asked["answer_tokens"]) < 1:
        raise ValueError("lengths, sequences and answer_tokens must be at least 1")
    evidence = Evidence(
        found["model"],
        _read(Binding, found["binding"]),
        _read(Asked, {**asked, "lengths": lengths, "depths": depths}),
        tuple(_read(Cell, {**cell, "stage": Pass(cell["stage"])}) for cell in cells),
    )
    known = {
        (stage, length, index)
        for stage in Pass
        for length in lengths
        for index in evidence.asked.indices(stage)
    }
    if len(evidence.by_key) < len(evidence.cells) or not known >= evidence.by_key.keys():
        raise ValueError("it has a cell twice, or one that was not asked for")
    for cell in evidence.cells:
        if cell.passed and not _can_pass(evidence, cell):
            raise ValueError(f"{cell.stage} {cell.length}/{cell.index} can't have passed")
    return evidence


def _can_pass(evidence: Evidence, cell: Cell) -> bool:
    if cell.completed_tokens != cell.length or cell.depth != evidence.asked.depth(cell.index):
        return False
    first = evidence.by_key.get((Pass.GRID, cell.length, cell.index))
    is_same = first is not None and cell.got == cell.expected == first.got
    return is_same or cell.stage is Pass.GRID


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise TypeError(f"{values!r} is no list of whole numbers")
    return tuple(values)


def _read(kind: type[T], found: dict[str, Any]) -> T:
    """A flat dataclass out of a JSON object; TypeError for a field that is of another type."""
    hints = get_type_hints(kind)
    for name, value in found.items():
        wanted = hints.get(name)
        plain = getattr(wanted, "__origin__", wanted)
        if wanted is float and type(value) is int:
            continue
        if plain is None or type(value) is not plain:
            raise TypeError(f"{name} can't be {value!r:.60}")
    return kind(**found)
