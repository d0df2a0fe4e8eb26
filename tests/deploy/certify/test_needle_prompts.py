"""Prompts of a certification: their length, the needle's place, and that no two begin alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.tokens import Tokenizer
from deploy.certify.needles import haystack, make_prompts, prompts_sha256
from placement.errors import ConfigError
from placement.evidence import Asked

ASKED = Asked((256, 1024), (0, 50, 100), 4, 48, "")
SENTENCE_TOKENS = 32


@pytest.fixture(scope="module")
def tokenizer(embedded_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(embedded_model_dir)


def test_each_length_leaves_room_for_an_answer_and_little_more(tokenizer: Tokenizer) -> None:
    for length, prompts in make_prompts(tokenizer, ASKED).items():
        assert [prompt.depth for prompt in prompts] == [0, 50, 100, 0]
        for prompt in prompts:
            assert len(prompt.ids) + prompt.answer_tokens == length
            assert 48 <= prompt.answer_tokens < 48 + SENTENCE_TOKENS


def test_the_needle_stands_at_its_depth() -> None:
    sentences = [f"s{number}." for number in range(8)]
    for depth, before in ((0, 0), (25, 2), (50, 4), (100, 8)):
        lines = haystack(sentences, depth, "river", "12345").split("\n")
        assert lines[before] == "The secret code for river is 12345."
        assert lines[-2:] == ["", "What is the secret code for river?"]


def test_prompts_are_the_same_each_time_and_begin_differently(tokenizer: Tokenizer) -> None:
    first, second = make_prompts(tokenizer, ASKED), make_prompts(tokenizer, ASKED)
    assert first == second
    assert prompts_sha256(first) == prompts_sha256(second)
    everything = [prompt for prompts in first.values() for prompt in prompts]
    assert len({prompt.ids[:64] for prompt in everything}) == len(everything)
    assert len({prompt.code for prompt in everything}) == len(everything)
    for prompt in everything:
        assert tokenizer.decode(prompt.ids).count(prompt.code) == 1


def test_a_long_prompt_is_encoded_a_few_times_only(tokenizer: Tokenizer) -> None:
    class Counting:
        calls = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
            return tokenizer.encode(text, add_special_tokens)

        def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
            self.calls += 1
            return tokenizer.encode_chat(messages)

    counting = Counting()
    (prompts,) = make_prompts(counting, Asked((32768,), (50,), 1, 48, "")).values()
    assert prompts[0].answer_tokens < 48 + SENTENCE_TOKENS
    assert counting.calls <= 5


def test_a_length_without_room_for_the_question_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"60 tokens has no room .* and an answer of 48"):
        make_prompts(tokenizer, Asked((60,), (0,), 1, 48, ""))
