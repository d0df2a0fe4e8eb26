"""Drafts of the scripted head: always right, never right, right at chosen places; one text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.scripted.cases import DRAFTS, ENDS, MISSES, word
from tests.cluster.scripted.client import Client, Reply
from tests.cluster.scripted.gated_server import GatedServer
from tests.golden.scripted_checkpoint import Script


def accepted_and_drafted(script: Script, is_right: Callable[[int], bool]) -> tuple[int, int]:
    """By the rule: drafts count up to the first wrong one and up to the answer's end."""
    total = len(script.pieces) + 1  # with the end token
    made, accepted, rounds = 1, 0, 0
    while made < total:
        right = 0
        while right < DRAFTS and is_right(made + right):
            right += 1
        taken = min(right + 1, total - made)
        accepted += min(right, taken)
        made += taken
        rounds += 1
    return accepted, DRAFTS * rounds


@pytest.mark.parametrize("drafting", ["drafts", "bad-drafts"])
@pytest.mark.parametrize("script", [MISSES, *ENDS], ids=lambda script: script.prompt)
def test_usage_tells_the_drafts_that_the_script_says(
    server_of: Callable[[str], GatedServer], drafting: str, script: Script
) -> None:
    def is_right(place: int) -> bool:
        return drafting == "drafts" and place not in script.missed

    accepted, drafted = accepted_and_drafted(script, is_right)
    client = Client(server_of(drafting))
    ((whole, stream),) = client.ask_both_ways({"prompt": script.prompt})
    for answer in (whole, stream):
        assert answer.choices == [Reply(script.text(), "", "stop")]
        details = answer.usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == accepted
        assert details["rejected_prediction_tokens"] == drafted - accepted
    assert whole.usage == stream.usage


def test_drafts_behind_a_stop_string_count_as_rejected(
    server_of: Callable[[str], GatedServer],
) -> None:
    """Wherever in a round it ends: those of later rounds don't count at all."""
    script = ENDS[-1]
    bodies = [{"prompt": script.prompt, "stop": word(at)} for at in range(len(script.pieces))]
    for at, both in enumerate(Client(server_of("drafts")).ask_both_ways(*bodies)):
        rounds = -(-at // (DRAFTS + 1))  # the first token comes without one
        accepted = at - at // (DRAFTS + 1)
        for answer in both:
            details = answer.usage["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == accepted
            assert details["rejected_prediction_tokens"] == DRAFTS * rounds - accepted


def test_the_rule_has_cases_of_all_kinds() -> None:
    assert accepted_and_drafted(MISSES, lambda place: True) == (19, 21)
    assert accepted_and_drafted(MISSES, lambda place: False) == (0, 75)
    assert accepted_and_drafted(MISSES, lambda place: place not in MISSES.missed) == (14, 33)
