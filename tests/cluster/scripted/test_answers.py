"""Every case through the real engine: whole and streamed, both routes, with and without drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.scripted.cases import CASES, ENDS, PARTS, PARTS_STOP, Case, word
from tests.cluster.scripted.client import Answer, Body, Client, Reply
from tests.cluster.scripted.gated_server import GatedServer
from tests.golden.scripted_checkpoint import Script, ScriptedCheckpoint

# What a chat and a completion may ask for beside the text, which stays the same.
EXTRAS: dict[str, tuple[Body, Body]] = {
    "text": ({}, {}),
    "logprobs": ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
}


@pytest.fixture(params=["plain", "drafts"])
def client(request: pytest.FixtureRequest, server_of: Callable[[str], GatedServer]) -> Client:
    return Client(server_of(request.param))


def chat(script: Script, **fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": script.prompt}], **fields}


def completion(script: Script, **fields: Any) -> Body:
    return {"prompt": script.prompt, **fields}


def counts(answer: Answer) -> dict[str, int]:
    details = answer.usage["completion_tokens_details"]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {**{name: answer.usage[name] for name in names}, "thought": details["reasoning_tokens"]}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("name", CASES)
def test_whole_answers_and_streams_show_the_same_text(
    client: Client, name: str, extra: tuple[Body, Body]
) -> None:
    case = CASES[name]
    talking = chat(case.script, **case.fields, **extra[0])
    completing = completion(case.script, **case.fields, **extra[1])
    (whole_chat, chat_stream), (whole_raw, raw_stream) = client.ask_both_ways(talking, completing)
    talk = Reply(case.content, case.reasoning, case.finish)
    assert (whole_chat.choices, chat_stream.choices) == ([talk], [talk])
    raw = Reply(case.raw_text, "", case.finish)
    assert (whole_raw.choices, raw_stream.choices) == ([raw], [raw])
    for whole, stream in ((whole_chat, chat_stream), (whole_raw, raw_stream)):
        assert counts(whole) == counts(stream)
        assert whole.usage["completion_tokens"] == case.tokens
        assert whole.usage["prompt_tokens"] == 1


@pytest.mark.parametrize("route", [chat, completion])
def test_the_end_token_may_stand_anywhere_in_a_round(
    client: Client, route: Callable[..., Body]
) -> None:
    answers = client.ask_both_ways(*map(route, ENDS))
    for script, both in zip(ENDS, answers, strict=True):
        said = script.text()
        for answer in both:
            assert answer.choices == [Reply(said, "", "stop")]
            assert answer.usage["completion_tokens"] == len(script.pieces) + 1


@pytest.mark.parametrize("route", [chat, completion])
def test_a_limit_may_fall_anywhere(client: Client, route: Callable[..., Body]) -> None:
    """Inside a character, inside what may become a stop string, inside a round of drafts."""
    limits = range(1, len(PARTS.pieces) + 3)
    bodies = [route(PARTS, max_tokens=limit, stop=PARTS_STOP) for limit in limits]
    for limit, both in zip(limits, client.ask_both_ways(*bodies), strict=True):
        said = PARTS.text(limit)
        has_ended = limit > len(PARTS.pieces)
        for answer in both:
            assert answer.choices == [Reply(said, "", "stop" if has_ended else "length")]
            assert answer.usage["completion_tokens"] == min(limit, len(PARTS.pieces) + 1)


@pytest.mark.parametrize("route", [chat, completion])
def test_a_stop_string_may_end_anywhere(client: Client, route: Callable[..., Body]) -> None:
    """Nothing of it is sent, and what was drafted behind it never was."""
    script = ENDS[-1]
    bodies = [route(script, stop=word(index)) for index in range(len(script.pieces))]
    for at, both in enumerate(client.ask_both_ways(*bodies)):
        for answer in both:
            assert answer.choices == [Reply(script.text(at), "", "stop")]
            assert answer.usage["completion_tokens"] == at + 1


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_may_stand_anywhere(
    client: Client, checkpoint: ScriptedCheckpoint, ignore_eos: bool
) -> None:
    """It is counted and not shown; what was drafted behind it never was."""
    chain = checkpoint.chains[PARTS.prompt]
    bodies = [
        completion(PARTS, stop_token_ids=[token], ignore_eos=ignore_eos) for token in chain[1:-1]
    ]
    for at, both in enumerate(client.ask_both_ways(*bodies)):
        said = PARTS.text(at)
        for answer in both:
            assert answer.choices == [Reply(said, "", "stop")]
            assert answer.usage["completion_tokens"] == at + 1


@pytest.mark.parametrize("route", [chat, completion])
def test_an_ignored_end_token_gives_no_text(client: Client, route: Callable[..., Body]) -> None:
    script = ENDS[5]
    (both,) = client.ask_both_ways(route(script, ignore_eos=True, max_tokens=20))
    for answer in both:
        assert answer.choices == [Reply(script.text(), "", "length")]
        assert answer.usage["completion_tokens"] == 20


@pytest.mark.parametrize("name", ["four", "prefix", "one-three", "ends-half", "split-tags"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_two_choices_say_it_twice(client: Client, name: str, sampling: dict[str, Any]) -> None:
    case = CASES[name]
    bodies = [route(case.script, n=2, **case.fields, **sampling) for route in (chat, completion)]
    talk, raw = Reply(case.content, case.reasoning, "stop"), Reply(case.raw_text, "", "stop")
    for reply, both in zip((talk, raw), client.ask_both_ways(*bodies), strict=True):
        for answer in both:
            assert answer.choices == [reply, reply]
            assert answer.usage["completion_tokens"] == 2 * case.tokens
            assert answer.usage["prompt_tokens"] == 1


def test_prompts_of_one_request_say_each_their_own(client: Client) -> None:
    cases: list[Case] = [CASES[name] for name in ("two-two", "lone", "special-tags", "tool")]
    body: Body = {"prompt": [case.script.prompt for case in cases], "n": 1}
    for answer in client.ask({**body, "stream": False}):
        assert answer.choices == [Reply(case.raw_text, "", "stop") for case in cases]
        assert answer.usage["completion_tokens"] == sum(case.tokens for case in cases)
