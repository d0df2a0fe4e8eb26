"""What is sent when: all that is known to be text is out before the next step ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.scripted.cases import CASES, ENDS
from tests.cluster.scripted.client import Client
from tests.cluster.scripted.gated_server import GatedServer

# Text that a client has after each step without drafts; in a chat that of the thinking block first.
SHOWN = {
    "lone": ("a", "a", "a\ufffdbc", "a\ufffdbcd"),
    "one-three": ("a", "a", "a👍", "a👍b"),
    "two-two": ("a", "a", "a👍", "a👍b"),
    "cjk": ("", "中", "中", "中文", "中文字"),
    "restart": ("", "\ufffd", "\ufffd👍", "\ufffd👍!"),
    "ends-half": ("x", "x", "x", "x\ufffd"),
    "four": ("So: ", "So: ", "So: ", "So: ", "So: "),
    "two": ("one ", "one "),
    "fails": ("", "ab", "abababx", "abababx!"),
    "prefix": ("ends in ", "ends in ", "ends in STO"),
    "prefixes": ("a", "a\n\n", "a\n\nST", "a\n\nST\n"),
    "half-stop": ("ok ", "ok ", "ok ", "ok 👍!"),
    "split-tags": ("", "", "", "why", "why", "why", "why", "why", "whyyes"),
    "opened": ("hm", "hm", "hm", "hm", "hmyes"),
    "never-closed": ("cut", "cut </thi"),
    "no-tag": ("", "", "<thin"),
    "tool": ("<tool_", '<tool_call>\n{"name": "f", '),
}


async def read_step_by_step(server: GatedServer, body: dict[str, Any], shown: list[str]) -> str:
    """Lets a step through once the client has what the one before it made; all text in the end."""
    answers, seen = Client(server).read(body), ""
    async with contextlib.aclosing(answers):
        for expected in shown:
            server.gate.let_one_through()
            while seen != expected:
                seen = (await anext(answers)).choices[0].text
                assert expected.startswith(seen), "sent too early"
        server.gate.open()
        async for answer in answers:
            seen = answer.choices[0].text
    return seen


@pytest.fixture
def held(server_of: Callable[[str], GatedServer]) -> Any:
    """A server of the wanted kind, whose rank waits before each step."""
    with contextlib.ExitStack() as opened:

        def get(drafting: str) -> GatedServer:
            server = server_of(drafting)
            server.hold()
            opened.callback(server.gate.open)
            return server

        yield get


@pytest.mark.parametrize("name", SHOWN)
def test_text_is_sent_as_soon_as_it_can_be_nothing_else(
    held: Callable[[str], GatedServer], name: str
) -> None:
    case, server = CASES[name], held("plain")
    body = {"messages": [{"role": "user", "content": case.script.prompt}], **case.fields}
    said = server.run(read_step_by_step(server, body, list(SHOWN[name])))
    assert said == case.reasoning + case.content


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_the_first_token_does_not_wait_for_drafts(
    held: Callable[[str], GatedServer], kind: str
) -> None:
    """One token after the first step, then up to four a round."""
    script, server = ENDS[9], held("drafts")
    chat = {"messages": [{"role": "user", "content": script.prompt}]}
    body = chat if kind == "chat" else {"prompt": script.prompt}
    shown = [script.text(count) for count in (1, 5, 9)]
    assert server.run(read_step_by_step(server, body, shown)) == shown[-1]


def test_a_chat_opens_with_its_first_token_even_if_that_is_no_text(
    held: Callable[[str], GatedServer],
) -> None:
    case, server = CASES["cjk"], held("plain")

    async def opening() -> str:
        body = {"messages": [{"role": "user", "content": case.script.prompt}]}
        answers = Client(server).read(body)
        async with contextlib.aclosing(answers):
            server.gate.let_one_through()
            return (await anext(answers)).choices[0].text

    assert server.run(opening()) == ""
