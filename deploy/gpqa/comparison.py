"""Two runs on the same questions, paired question by question."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.gpqa.ledger import Contents
from deploy.gpqa.report import RULES, settle
from deploy.gpqa.significance import mcnemar
from placement.errors import ConfigError


@dataclass(frozen=True)
class Pairing:
    """Questions where one run alone is right, and the exact two-sided p of that by chance."""

    rule: str
    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def p(self) -> float:
        return mcnemar(self.only_first, self.only_second)


@dataclass(frozen=True)
class Comparison:
    """`differences` are header fields that moved; `left_out` questions that one run alone has."""

    differences: tuple[str, ...]
    pairs: int
    left_out: int
    pairings: tuple[Pairing, ...]


def compare(first: Contents, second: Contents) -> Comparison:
    """ConfigError when the two did not ask the same questions."""
    mine, theirs = first.header, second.header
    if mine.dataset_sha256 != theirs.dataset_sha256:
        raise ConfigError(
            f"the runs can't be paired: their datasets are {mine.dataset_sha256[:12]} and "
            f"{theirs.dataset_sha256[:12]} (SHA-256); compare runs on one file"
        )
    outcomes, others = _outcomes(first), _outcomes(second)
    shared = sorted(outcomes.keys() & others.keys())
    pairings = []
    for rule in RULES:
        pairs = [(rule in outcomes[key], rule in others[key]) for key in shared]
        pairings.append(
            Pairing(
                rule,
                both=pairs.count((True, True)),
                only_first=pairs.count((True, False)),
                only_second=pairs.count((False, True)),
                neither=pairs.count((False, False)),
            )
        )
    return Comparison(
        differences=tuple(mine.differences(theirs)),
        pairs=len(shared),
        left_out=len(outcomes.keys() ^ others.keys()),
        pairings=tuple(pairings),
    )


def _outcomes(contents: Contents) -> dict[str, frozenset[str]]:
    """Id of a settled question -> the rules by which it is right."""
    answers, failures = settle(contents.records)
    right = {
        answer.id: frozenset(name for name, rule in RULES.items() if rule(answer))
        for answer in answers
    }
    return right | {failure.id: frozenset() for failure in failures}
