"""Figures of ledgers: denominators, intervals, speed, drafts, and two runs against each other."""

from __future__ import annotations

import json
from dataclasses import replace
from math import comb
from pathlib import Path

import pytest

from deploy.gpqa.comparison import compare
from deploy.gpqa.ledger import Ledger
from deploy.gpqa.records import Counters, End
from deploy.gpqa.report import make_report
from deploy.gpqa.report_text import comparison_lines, report_lines
from deploy.gpqa.significance import mcnemar, wilson
from placement.errors import ConfigError
from tests.deploy.gpqa.conftest import Run
from tests.deploy.gpqa.ledger_samples import FAILURE, HEADER, SESSION, answer, contents


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    [
        (140, 198, 0.640, 0.766),  # as published for the reference box
        (165, 198, 0.775, 0.879),
        (0, 10, 0.0, 0.278),
        (10, 10, 0.722, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_intervals(correct: int, count: int, low: float, high: float) -> None:
    assert wilson(correct, count) == pytest.approx((low, high), abs=5e-4)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 2 / 32), (1, 9, 2 * 11 / 1024), (9, 1, 2 * 11 / 1024)],
)
def test_exact_mcnemar(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p)


def test_mcnemar_of_thousands_of_questions() -> None:
    tail = sum(comb(3000, k) for k in range(1401))
    assert mcnemar(1400, 1600) == pytest.approx(2 * tail / 2**3000)


def test_failed_and_letterless_answers_are_wrong_and_a_part_says_so() -> None:
    report = make_report(contents(answer("q1"), FAILURE, answer("q3", None)))
    assert (report.scores["robust"].correct, report.scores["robust"].count) == (1, 3)
    assert report.states == {
        "correct": 1,
        "wrong": 0,
        "no_answer": 1,
        "truncated": 0,
        "failed": 1,
    }
    assert not report.is_complete
    assert any(line.startswith("PARTIAL, 3 of 4 questions") for line in report_lines(report))
    assert {name: (s.correct, s.count) for name, s in report.domains.items()} == {
        "Biology": (0, 1),
        "Physics": (1, 2),
    }


def test_an_answer_after_a_failure_takes_its_place() -> None:
    report = make_report(contents(FAILURE, answer("q2"), questions=1))
    assert report.failures == {}
    assert report.scores["robust"].correct == report.settled == 1


def test_lower_case_is_right_for_robust_alone() -> None:
    one = replace(answer("q1"), strict="d")
    report = make_report(contents(one))
    assert (report.scores["strict"].correct, report.scores["robust"].correct) == (0, 1)
    assert report.differing == 0


def test_letters_that_differ_often_are_pointed_at() -> None:
    one = replace(answer("q1"), strict="A")
    lines = list(report_lines(make_report(contents(one))))
    assert any("different letters in 1 of 1: more than 2 %" in line for line in lines)


def test_time_between_sessions_does_not_count() -> None:
    later = replace(SESSION, started_at=1000.0)
    records = (answer("q1"), End(111.0, "interrupted"), later)
    last = answer("q2", started_at=1005.0, ended_at=1030.0)
    report = make_report(contents(*records, last))
    assert report.speed.active_s == 40.0  # 100 to 110 and 1000 to 1030
    assert report.speed.tokens_per_s == 5.0
    assert report.speed.request_tokens_per_s == 7.0  # median of 10 and 4
    assert report.sessions == 2
    assert make_report(contents(*records, last), now=1040.0).speed.active_s == 50.0


def marks(*values: tuple[float | None, float | None, float | None]) -> list[Counters]:
    return [
        Counters(float(at), of, kept, eager, 0.0) for at, (of, kept, eager) in enumerate(values)
    ]


def test_intervals_of_the_servers_counters() -> None:
    first = marks((0, 0, 5), (100, 0, 5), (200, 50, 7), (205, 50, 7))
    second = marks((1000, 900, 90), (1016, 900, 90), (20, 20, 1))  # restarted: begins at 0
    records = (*first, replace(SESSION, started_at=120.0), *second)
    drafts = make_report(contents(*records)).drafts
    assert (drafts.intervals, drafts.zero_intervals) == (4, 2)
    assert drafts.eager_fallbacks == 3
    unknown = make_report(contents(*marks((None, None, None), (None, None, None)))).drafts
    assert (unknown.intervals, unknown.eager_fallbacks) == (0, None)


def test_two_runs_are_paired_by_question() -> None:
    first = contents(answer("q1"), answer("q2", "A"), answer("q3"), answer("q4", "A"))
    second = contents(
        answer("q1"), FAILURE, answer("q3", "A"), answer("q5"), preset="x", preset_sha256="y"
    )
    comparison = compare(first, second)
    assert (comparison.pairs, comparison.left_out) == (3, 2)
    robust = comparison.pairings[0]
    assert (robust.both, robust.only_first, robust.only_second, robust.neither) == (1, 1, 0, 1)
    assert comparison.differences == ("preset aisbench -> x",)
    moved = replace(second.header, seed=2)
    text = "\n".join(comparison_lines(compare(first, replace(second, header=moved))))
    assert "differs in: preset aisbench -> x, seed 1 -> 2" in text
    assert "no one of them alone explains" in text
    with pytest.raises(ConfigError, match="datasets are dddddddddddd and eeeeeeeeeeee"):
        compare(first, contents(dataset_sha256="e" * 64))


def test_report_of_a_folder_with_another(run: Run, tmp_path: Path) -> None:
    for name, letter in (("one", "D"), ("two", "A")):
        ledger = Ledger(tmp_path / name, replace(HEADER, seed=ord(letter), questions=1))
        ledger.append(answer("q1", letter))
        ledger.close()
    assert run.command("report", "--out", tmp_path / "one", "--against", tmp_path / "two") == 0
    assert "1/1 = 100.0 %" in run.out
    assert "only this 1, only the other 0, neither 0; exact McNemar p = 1" in run.out
    assert run.command("report", "--out", tmp_path / "two", "--json") == 0
    told = json.loads(run.out)
    assert told["scores"]["robust"] == pytest.approx(
        {"correct": 0, "count": 1, "ratio": 0.0, "low": 0.0, "high": 0.7935}, abs=1e-4
    )
    assert run.command("report", "--out", tmp_path / "none") == 2
    assert run.err.count("\n") == 1
