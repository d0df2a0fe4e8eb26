"""Stop strings: the first to complete wins, nothing of it leaks, nothing else is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.stops import StopMatcher


def by_character(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The meaning: read one character at a time until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


def run(parts: list[str], stops: tuple[str, ...]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    sent = [matcher.push(part) for part in parts]
    matched = matcher.matched is not None
    return [*sent, matcher.flush()], matched


@given(
    parts=st.lists(st.text(alphabet="ab¢", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab¢", min_size=1, max_size=4), max_size=4).map(tuple),
)
def test_any_cut_gives_what_reading_by_character_gives(
    parts: list[str], stops: tuple[str, ...]
) -> None:
    sent, matched = run(parts, stops)
    assert ("".join(sent), matched) == by_character("".join(parts), stops)


@pytest.mark.parametrize(
    ("parts", "stops", "sent"),
    [
        (["ab", "cd"], ("bc",), ["a", "", ""]),
        (["ab", "x"], ("bc",), ["a", "bx", ""]),
        (["aaa", "b"], ("aab",), ["a", "", ""]),
        (["xab", "ab"], ("abc",), ["x", "ab", "ab"]),
        (["abcd"], ("abcd", "bc"), ["a", ""]),
        (["12\n", "\n", "User:"], ("\n\nUser:",), ["12", "", "", ""]),
        (["ok", ""], (), ["ok", "", ""]),
        (["👍", "🏽!"], ("👍🏽",), ["", "", ""]),
    ],
)
def test_only_what_may_become_a_stop_is_held(
    parts: list[str], stops: tuple[str, ...], sent: list[str]
) -> None:
    assert run(parts, stops)[0] == sent


def test_held_text_is_given_once() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("the EN") == "the "
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(("#",))
    assert matcher.push("a#b") == "a"
    assert matcher.push("c") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "#"
