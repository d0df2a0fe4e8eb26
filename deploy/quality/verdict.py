"""Whether a run of the smoke set is as good as a baseline, part by part, and what was lost.

Pure arithmetic on two `Measured`. How much may be lost depends on what was changed: with the same
dtype and formats nothing but rounding, with another dtype or with fewer bits so much as
`TOLERANCES` says. What has no bound is told and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.gpqa.significance import mcnemar
from deploy.quality.measured import Answered, Measured, Scored, Text
from deploy.quality.smoke_set import SmokeSet

CLOSE_MARGIN = 2e-4  # two correct float32 implementations may choose differently below it


@dataclass(frozen=True)
class Tolerance:
    """`lost` right answers a part, net of those won; KL divergences in nats a position."""

    name: str
    same_ids: bool
    lost_tools: int
    lost_choices: int
    lost_needles: int
    mean_kl: float
    worst_kl: float
    same_best: float  # share of positions with the same most likely token


# Measured on the embedded model against its float32 baseline: 2 and 3 ranks KL 1.4e-10 at most,
# worst 1.3e-8; bfloat16 0.0042, worst 0.079, same best token 97 %; experts rounded to 4 bits in
# groups of 32 0.061, 0.87, 81 %; to 2 bits 1.8, 9, 19 %. Another's loss may differ.
TOLERANCES = {
    tolerance.name: tolerance
    for tolerance in (
        Tolerance("exact", True, 0, 0, 0, 1e-6, 1e-5, 1.0),
        Tolerance("half", False, 0, 1, 1, 0.01, 0.2, 0.95),
        Tolerance("low-bit", False, 1, 3, 2, 0.1, 2.0, 0.75),
    )
}


@dataclass(frozen=True)
class Part:
    """`passed` None: told only. `figures` in plain values; `losses` say what exactly was lost."""

    name: str
    passed: bool | None
    told: str
    figures: dict[str, Any]
    losses: tuple[str, ...] = field(default=())

    @property
    def status(self) -> str:
        return {True: "pass", False: "FAIL", None: "-"}[self.passed]


def verdict(
    smoke: SmokeSet, now: Measured, base: Measured, tolerance: Tolerance
) -> tuple[Part, ...]:
    names = {
        part: [asking.name for asking in askings]
        for part, askings in (
            ("text", smoke.texts), ("tools", smoke.tools), ("choices", smoke.choices),
            ("needles", smoke.needles),
        )
    }  # fmt: skip
    return (
        _texts(names["text"], now.texts, base.texts, tolerance),
        _answers("tool calls", names["tools"], now.tools, base.tools, tolerance.lost_tools),
        _answers("choices", names["choices"], now.choices, base.choices, tolerance.lost_choices),
        _answers("needles", names["needles"], now.needles, base.needles, tolerance.lost_needles),
        _logits(now.scored, base.scored, tolerance),
    )


def _texts(
    names: Sequence[str], now: Sequence[Text], base: Sequence[Text], tolerance: Tolerance
) -> Part:
    losses, shared, total, is_bad = [], 0, 0, False
    for name, new, old in zip(names, now, base, strict=True):
        at = first_difference(new.ids, old.ids)
        total += len(old.ids)
        shared += len(old.ids) if at is None else at
        if at is None:
            continue
        is_close = at < len(old.margins) and old.margins[at] < CLOSE_MARGIN
        is_bad |= not is_close
        why = ", where the baseline's best two were equally likely" if is_close else ""
        losses.append(f"{name}: another token at position {at} of {len(old.ids)}{why}")
    figures = {"texts": len(base), "differing": len(losses), "tokens": total, "shared": shared}
    told = f"{len(base) - len(losses)} of {len(base)} equal, {shared} of {total} tokens before the"
    told += " first difference"
    return Part("text", not is_bad if tolerance.same_ids else None, told, figures, tuple(losses))


def first_difference(now: Sequence[int], base: Sequence[int]) -> int | None:
    """Where one ends first, it differs there."""
    if tuple(now) == tuple(base):
        return None
    pairs = enumerate(zip(now, base, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(now), len(base)))


def _answers(
    part: str, names: Sequence[str], now: Sequence[Answered], base: Sequence[Answered], allowed: int
) -> Part:
    if not base:
        return Part(part, None, "none: the model has no chat template", {"count": 0})
    pairs = list(zip(names, now, base, strict=True))
    lost = [(name, new) for name, new, old in pairs if old.is_right and not new.is_right]
    won = [name for name, new, old in pairs if new.is_right and not old.is_right]
    right, before = sum(a.is_right for a in now), sum(a.is_right for a in base)
    p = mcnemar(len(lost), len(won))
    changed = sum(new.given != old.given for new, old in zip(now, base, strict=True))
    figures = {
        "count": len(base), "right": right, "baseline": before, "lost": len(lost),
        "won": len(won), "changed": changed, "p": round(p, 4), "allowed": allowed,
    }  # fmt: skip
    told = f"{right} of {len(base)} right, baseline {before}; {changed} answers changed"
    if lost or won:
        told += f", {len(lost)} lost, {len(won)} won (McNemar p = {p:.2g})"
    losses = [f"{name}: lost, answered {new.given!r}" for name, new in lost]
    losses += [f"{name}: won" for name in won]
    return Part(part, len(lost) - len(won) <= allowed, told, figures, tuple(losses))


def _logits(now: Sequence[Scored], base: Sequence[Scored], tolerance: Tolerance) -> Part:
    divergences, spreads, same = [], [], 0
    for new, old in zip(now, base, strict=True):
        kl, spread = divergence(old, new)
        divergences.append(kl)
        spreads.append(spread)
        same += new.top[0][0] == old.top[0][0]
    count = len(base)
    mean, worst = sum(divergences) / count, max(divergences)
    at = divergences.index(worst)
    loss = sum(old.logprob - new.logprob for new, old in zip(now, base, strict=True)) / count
    share = same / count
    passed = mean <= tolerance.mean_kl and worst <= tolerance.worst_kl
    figures = {
        "positions": count, "mean_kl": mean, "worst_kl": worst, "worst_at": at,
        "largest_difference": max(spreads), "same_best": share, "nats_lost_a_token": loss,
    }  # fmt: skip
    told = (
        f"KL {mean:.2g} a position (bound {tolerance.mean_kl:g}), worst {worst:.2g} at {at} (bound "
        f"{tolerance.worst_kl:g}), largest difference of a log-probability {max(spreads):.2g}, "
        f"same best token at {same} of {count}, {loss:+.4f} nats a token"
    )
    return Part("logits", passed and share >= tolerance.same_best, told, figures)


def divergence(base: Scored, now: Scored) -> tuple[float, float]:
    """KL(base || now) in nats over base's likely tokens and all others together, and the largest
    difference of their log-probabilities.

    A token that isn't among those reported now counts as likely as the least of them, at most: KL
    comes out too small rather than too large there. Infinite where a figure is no number.
    """
    known = dict(now.top)
    least = now.top[-1][1]
    pairs = [(p, known.get(token, least)) for token, p in base.top if math.isfinite(p)]
    if any(math.isnan(q) for _, q in pairs):
        return float("inf"), float("inf")
    rest_p = max(0.0, 1 - sum(math.exp(p) for p, _ in pairs))
    rest_q = max(1e-12, 1 - sum(math.exp(q) for _, q in pairs))
    kl = sum(math.exp(p) * (p - q) for p, q in pairs)
    if rest_p > 1e-6:  # below it rounding of the log-probabilities decides
        kl += rest_p * math.log(rest_p / rest_q)
    likely = [(p, q) for p, q in pairs if p > -10]
    return max(0.0, kl), max((abs(p - q) for p, q in likely), default=0.0)
