"""What a comparison with a baseline calls lost, and from where on it fails."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from deploy.quality.measured import Answered, Measured, Scored, Text, read_call, read_code
from deploy.quality.smoke_set import Asking, SmokeSet
from deploy.quality.verdict import TOLERANCES, Part, divergence, first_difference, verdict

ASKING = Asking("one", (1, 2), 4)


def scored(*shares: float) -> Scored:
    top = tuple((token, math.log(share)) for token, share in enumerate(shares))
    return Scored(top[0][1], tuple(sorted(top, key=lambda pair: -pair[1])))


def answered(*right: bool) -> tuple[Answered, ...]:
    return tuple(Answered("A" if is_right else "B", is_right) for is_right in right)


BASE = Measured(
    (Text((5, 6, 7), (1.0, 1e-5, 1.0)), Text((5, 6), (1.0, 1.0))),
    answered(True, True),
    answered(*[True] * 8, *[False] * 12),
    answered(True, True, True),
    (scored(0.7, 0.2, 0.05), scored(0.5, 0.3, 0.1)),
)
SMOKE = SmokeSet((ASKING,) * 2, (ASKING,) * 2, (ASKING,) * 20, (ASKING,) * 3, (ASKING,))


def parts(tolerance: str = "exact", **changed: Any) -> dict[str, Part]:
    found = verdict(SMOKE, replace(BASE, **changed), BASE, TOLERANCES[tolerance])
    return {part.name: part for part in found}


def test_a_run_equal_to_its_baseline_passes() -> None:
    found = parts()
    assert list(found) == ["text", "tool calls", "choices", "needles", "logits"]
    assert all(part.passed and not part.losses for part in found.values())
    assert found["logits"].figures["mean_kl"] == pytest.approx(0, abs=1e-12)


def test_another_token_fails_unless_the_best_two_were_equally_likely() -> None:
    close = parts(texts=(Text((5, 9, 9), (1.0, 1.0, 1.0)), BASE.texts[1]))["text"]
    assert close.passed
    assert "position 1 of 3, where the baseline's best two" in close.losses[0]
    wrong = parts(texts=(BASE.texts[0], Text((5, 7), (1.0, 1.0))))["text"]
    assert not wrong.passed
    assert wrong.figures == {"texts": 2, "differing": 1, "tokens": 5, "shared": 4}
    assert parts("low-bit", texts=(BASE.texts[0], Text((), ())))["text"].passed is None


def test_where_answers_part() -> None:
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2, 3), (1, 2)) == 2
    assert first_difference((1,), (1, 2)) == 1
    assert first_difference((3, 2), (1, 2)) == 0


def test_lost_answers_count_net_of_those_won() -> None:
    lost_two_won_one = (*answered(False, False), *BASE.choices[2:8], *answered(True), *[
        Answered("B", False)
    ] * 11)  # fmt: skip
    assert not parts(choices=lost_two_won_one)["choices"].passed
    half = parts("half", choices=lost_two_won_one)["choices"]
    assert half.passed
    assert half.figures | {"p": 0} == {
        "count": 20, "right": 7, "baseline": 8, "lost": 2, "won": 1, "changed": 3, "p": 0,
        "allowed": 1,
    }  # fmt: skip
    assert half.losses == ("one: lost, answered 'B'",) * 2 + ("one: won",)
    four = (*answered(*[False] * 4), *BASE.choices[4:])
    assert not parts("low-bit", choices=four)["choices"].passed
    assert parts("low-bit", choices=(*answered(*[False] * 3), *BASE.choices[3:]))["choices"].passed


def test_logits_fail_by_mean_worst_and_best_token() -> None:
    near = (scored(0.7001, 0.1999, 0.05), BASE.scored[1])
    assert parts(scored=near)["logits"].passed
    far = (scored(0.6, 0.3, 0.05), BASE.scored[1])
    assert not parts(scored=far)["logits"].passed
    assert parts("low-bit", scored=far)["logits"].passed
    other_best = (scored(0.2, 0.7, 0.05), BASE.scored[1])
    found = parts("low-bit", scored=other_best)["logits"]
    assert not found.passed
    assert found.figures["same_best"] == 0.5
    assert found.figures["worst_at"] == 0
    assert found.figures["nats_lost_a_token"] == pytest.approx(math.log(0.7 / 0.2) / 2)


def test_a_divergence_is_that_of_the_whole_distribution() -> None:
    base, now = scored(0.7, 0.2), scored(0.6, 0.2)
    expected = 0.7 * math.log(0.7 / 0.6) + 0.1 * math.log(0.1 / 0.2)
    assert divergence(base, now)[0] == pytest.approx(expected)
    assert divergence(base, now)[1] == pytest.approx(math.log(0.7 / 0.6))
    assert divergence(base, Scored(float("nan"), ((0, float("nan")),)))[0] == math.inf


def test_a_call_is_right_with_its_name_and_arguments_alone() -> None:
    expected = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    call = '<tool_call>\n{"arguments": {"b": 2, "a": 1}, "name": "add"}\n</tool_call>'
    assert read_call(f"<think></think>{call}", expected).is_right
    assert not read_call(call + call, expected).is_right
    assert not read_call(call.replace("2", "3"), expected).is_right
    assert read_call("<tool_call>{add}</tool_call>", expected).given == "a call that is no JSON"
    assert read_call(expected, expected) == Answered("0 calls", False)


def test_a_code_is_found_anywhere_in_the_answer() -> None:
    assert read_code("I think\nit is 48213.", "48213") == Answered("it is 48213.", True)
    assert not read_code("it is 48214.", "48213").is_right
