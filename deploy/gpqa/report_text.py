"""A report in words and as JSON. Ids, letters and counts only: no text of a question or answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from deploy.gpqa.comparison import Comparison
from deploy.gpqa.report import Report, Score

CHANCE = 0.25  # of four options
DIFFERING_SHARE = 0.02  # more than this of the answers: look at what the model writes
RULE_TEXTS = {
    "robust": "robust extraction",
    "strict": "strict, as AISBench",
    "final": "final answer only",
}
SHOWN_FAILURES = 10


def percent(ratio: float) -> str:
    return f"{100 * ratio:.1f}"


def score_text(score: Score) -> str:
    """`140/198 = 70.7 % (64.0-76.6)`"""
    low, high = score.interval
    share = "-" if score.ratio is None else percent(score.ratio)
    return f"{score.correct}/{score.count} = {share} % ({percent(low)}-{percent(high)})"


def report_lines(report: Report) -> Iterator[str]:
    header = report.header
    yield (
        f"model {header.model}, plan {header.plan_id or 'unknown'}, server code "
        f"{header.server_revision or 'unknown'}; run {header.run_id}"
    )
    yield (
        f"dataset sha256 {header.dataset_sha256[:16]}, preset {header.preset}, temperature "
        f"{_set(header.temperature)}, top_p {_set(header.top_p)}, top_k {_set(header.top_k)}, seed "
        f"{header.seed}, at most {header.max_tokens} tokens"
    )
    part = "all" if report.is_complete else f"PARTIAL, {report.settled} of"
    if not report.answered:
        yield f"{part} {header.questions} questions; none was answered, so there is no score"
        yield from _failures(report)
        return
    yield f"{part} {header.questions} questions; Wilson 95 % intervals, chance is 25 %"
    for name, score in report.scores.items():
        yield f"  {RULE_TEXTS[name]:<20} {score_text(score)}{_against_chance(score)}"
    for domain, score in report.domains.items():
        yield f"  {domain:<20} {score_text(score)}"
    yield f"  {'right letters':<20} " + ", ".join(f"{k} {n}" for k, n in report.keys.items())
    yield "  " + ", ".join(f"{name} {count}" for name, count in report.states.items())
    yield _extraction(report)
    yield from _failures(report)
    yield from _figures(report)


def _against_chance(score: Score) -> str:
    low, high = score.interval
    if not score.count:
        return ""
    if low <= CHANCE <= high:
        return ", not told from chance"
    return ", above chance" if low > CHANCE else ", below chance"


def _extraction(report: Report) -> str:
    note = ""
    if report.differing > DIFFERING_SHARE * report.answered:
        note = f": more than {100 * DIFFERING_SHARE:g} %, look at the answers in the ledger"
    different = f"{report.differing} of {report.answered}"
    return f"  strict and robust name different letters in {different}{note}"


def _failures(report: Report) -> Iterator[str]:
    """Each reason once, with the questions."""
    reasons = dict[str, list[str]]()
    for record_id, reason in report.failures.items():
        reasons.setdefault(reason, []).append(record_id)
    for reason, ids in reasons.items():
        more = len(ids) - SHOWN_FAILURES
        rest = f" and {more} more, in the ledger" if more > 0 else ""
        yield f"  failed: {len(ids)} by {reason}: {', '.join(ids[:SHOWN_FAILURES])}{rest}"


def _figures(report: Report) -> Iterator[str]:
    speed, drafts = report.speed, report.drafts
    yield (
        f"tokens: {report.prompt_tokens} prompt, {report.completion_tokens} completion, "
        f"{report.reasoning_tokens} of them reasoning"
    )
    yield (
        f"speed: {_figure(speed.tokens_per_s)} tok/s together, median answer "
        f"{_figure(speed.request_tokens_per_s)} tok/s, first token {_figure(speed.ttft_s, 3)} s; "
        f"{duration(speed.active_s)} in {report.sessions} sessions, {report.retried} answers "
        f"retried, {report.waited_s:.1f} s waited for the server"
    )
    acceptance = "no drafts" if drafts.acceptance is None else f"{percent(drafts.acceptance)} %"
    eager = "unknown" if drafts.eager_fallbacks is None else str(drafts.eager_fallbacks)
    yield (
        f"drafts: acceptance {acceptance}; {drafts.zero_intervals} of {drafts.intervals} intervals "
        f"without any accepted; eager fallbacks {eager}; held {_figure(drafts.held_s)} s"
    )


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Which fields moved stands first: a difference has as many causes."""
    moved = comparison.differences
    yield f"the other run: {comparison.pairs} questions paired, {comparison.left_out} left out"
    yield f"  differs in: {', '.join(moved)}" if moved else "  no setting differs"
    if len(moved) > 1:
        yield f"  {len(moved)} settings differ: no one of them alone explains a difference"
    for pairing in comparison.pairings:
        yield (
            f"  {RULE_TEXTS[pairing.rule]:<20} both {pairing.both}, only this "
            f"{pairing.only_first}, only the other {pairing.only_second}, neither "
            f"{pairing.neither}; exact McNemar p = {pairing.p:.3g}"
        )


def report_json(report: Report, comparison: Comparison | None = None) -> dict[str, Any]:
    """All fields; scores with their ratio and interval."""
    value = asdict(report)
    value["complete"] = report.is_complete
    value["scores"] = {name: _score_json(score) for name, score in report.scores.items()}
    value["domains"] = {name: _score_json(score) for name, score in report.domains.items()}
    if comparison is not None:
        value["against"] = asdict(comparison)
        for pairing, told in zip(comparison.pairings, value["against"]["pairings"], strict=True):
            told["p"] = pairing.p
    return value


def _score_json(score: Score) -> dict[str, Any]:
    low, high = score.interval
    return {**asdict(score), "ratio": score.ratio, "low": low, "high": high}


def duration(seconds: float) -> str:
    """`5:24:03`"""
    return str(timedelta(seconds=round(seconds)))


def _figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _set(value: float | None) -> str:
    return "the server's" if value is None else f"{value:g}"
