"""What could never be served is a 400 at once: too many answers, prompts far above the context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.normalizers import Lowercase

from cluster.model_card import ModelCard
from cluster.tokens import Tokenizer
from cluster.validate import valid_chat, valid_completion
from placement.errors import ClientError, ErrorKind

CHAT: dict[str, Any] = {
    "model": "tiny-flash-next",
    "messages": [{"role": "user", "content": "hi"}],
}
TEXT: dict[str, Any] = {"model": "tiny-flash-next", "prompt": "hi"}
TEXTS = ("hi", "", "The river", "a" * 5000, "中文" * 900, "😀", "e\u0301" * 50, "\u212b", "\ud800")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**CHAT, "n": 7}, "n"),
        ({**TEXT, "n": 7}, "n"),
        ({**TEXT, "prompt": ["a"] * 7}, "prompt"),
        ({**TEXT, "prompt": ["a"] * 4, "n": 2}, "n"),
    ],
)
def test_more_answers_than_the_server_ever_takes_are_refused(
    card: ModelCard, tokenizer: Tokenizer, body: dict[str, Any], param: str
) -> None:
    """They would be a 429 for ever."""
    small = replace(card, max_choices=6)
    validate = valid_chat if "messages" in body else valid_completion
    with pytest.raises(ClientError, match=r"(7|4 prompts times n=2).* limit of 6 ") as caught:
        validate(body, small, tokenizer)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
    assert validate(body, card, tokenizer)


class Untouched:
    """A tokenizer that must not be asked to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.render, self.least_tokens = tokenizer.render, tokenizer.least_tokens


@pytest.mark.parametrize("shape", ["chat", "text", "texts"])
def test_a_prompt_far_above_the_context_is_refused_without_tokenising(
    card: ModelCard, tokenizer: Tokenizer, shape: str
) -> None:
    long = "The river runs to the sea. " * 1000
    body = {
        "chat": {**CHAT, "messages": [{"role": "user", "content": long}]},
        "text": {**TEXT, "prompt": long},
        "texts": {**TEXT, "prompt": ["hi", long]},
    }[shape]
    validate: Any = valid_chat if shape == "chat" else valid_completion
    with pytest.raises(ClientError, match="at least") as caught:
        validate(body, card, Untouched(tokenizer))
    error = caught.value
    assert error.kind is ErrorKind.CONTEXT_LENGTH
    assert error.param == ("messages" if shape == "chat" else "prompt")
    assert f"context is {card.context_tokens}" in str(error)
    assert len(tokenizer.encode(long)) > card.context_tokens


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_never_has_fewer_tokens_than_told(tokenizer: Tokenizer, text: str) -> None:
    least = tokenizer.least_tokens(text)
    if text.isascii() and text:
        assert least >= 1
    if text != "\ud800":  # refused by encode()
        assert least <= len(tokenizer.encode(text))


def test_the_least_is_told_by_the_longest_token(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.vocabulary.token_bytes
    longest = max((piece for piece in pieces if piece.isascii()), key=len).decode()
    text = longest * 20
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens(text) == -(-len(text) // max(map(len, pieces)))


@pytest.mark.parametrize("change", ["normalizer", "strip"])
def test_nothing_is_told_where_text_may_shrink_before_it_is_cut(
    tokenizer: Tokenizer, embedded_model_dir: Path, change: str
) -> None:
    fast = FastTokenizer.from_file(str(embedded_model_dir / "tokenizer.json"))
    if change == "normalizer":
        fast.normalizer = Lowercase()
    else:
        fast.add_special_tokens([AddedToken("<cut>", lstrip=True)])
    assert Tokenizer(fast, tokenizer.vocabulary, "", {}).least_tokens("a" * 5000) == 0
