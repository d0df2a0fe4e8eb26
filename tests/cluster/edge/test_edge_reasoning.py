"""Reasoning against content: the same split for every cut, no tag in either part."""

from __future__ import annotations

import pytest

from cluster.reasoning import ReasoningSplitter, Section, section_after

CASES = [
    (Section.UNDECIDED, "<think>\nwhy\n</think>\n\nbecause", "why", "because"),
    (Section.UNDECIDED, "\n <think>a b</think>c", "a b", "c"),
    (Section.UNDECIDED, "<think>\n\n</think>\n\nnow", "", "now"),
    (Section.UNDECIDED, "  plain answer", "", "  plain answer"),
    (Section.UNDECIDED, "<thin", "", "<thin"),
    (Section.UNDECIDED, "<think>cut off </thi", "cut off </thi", None),
    (Section.UNDECIDED, "<think>a < b </x> c</think> d </think> e", "a < b </x> c", "d </think> e"),
    (Section.UNDECIDED, "", "", ""),
    (Section.REASONING, "so\n\nthus\n</think>\nyes ", "so\n\nthus", "yes "),
    (Section.REASONING, "<think>twice</think>ok", "twice", "ok"),
    (Section.REASONING, "never closed", "never closed", None),
    (Section.CONTENT, "\n<think> as text </think>", "", "\n<think> as text </think>"),
]


def split(section: Section, parts: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(section)
    deltas = [*map(splitter.push, parts), splitter.flush()]
    reasoning = "".join(delta.reasoning for delta in deltas)
    assert splitter.reasoned == bool(reasoning)
    return reasoning, "".join(delta.content for delta in deltas)


@pytest.mark.parametrize(("section", "text", "reasoning", "content"), CASES)
def test_every_cut_splits_alike(
    section: Section, text: str, reasoning: str, content: str | None
) -> None:
    expected = (reasoning, content or "")
    assert split(section, [text]) == expected
    assert split(section, list(text)) == expected
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert split(section, [text[:first], text[first:second], text[second:]]) == expected


def test_nothing_is_held_longer_than_needed() -> None:
    splitter = ReasoningSplitter(Section.UNDECIDED)
    assert splitter.push("<think>go").reasoning == "go"
    assert splitter.push(" on</").reasoning == " on"
    assert splitter.push("b>").reasoning == "</b>"
    assert splitter.push("</think>ans").content == "ans"
    assert splitter.push("wer").content == "wer"


@pytest.mark.parametrize(
    ("prompt", "section"),
    [
        ("<|im_start|>assistant\n", Section.UNDECIDED),
        ("<|im_start|>assistant\n<think>\n", Section.REASONING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Section.CONTENT),
        ("user said <think> and </think> before\nassistant:", Section.UNDECIDED),
    ],
)
def test_the_prompts_end_tells_where_an_answer_begins(prompt: str, section: Section) -> None:
    assert section_after(prompt) is section
