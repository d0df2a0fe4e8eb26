"""POST /tokenize and /detokenize, as vLLM has them: what a prompt becomes, and back.

Needs the tokenizer only, so both answer in every state of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.chat import normalise_messages
from cluster.model_card import ModelCard
from cluster.protocol import DetokenizeBody, TokenizeBody
from cluster.tokens import Tokenizer
from cluster.validate import checked_body, known_ids
from placement.errors import ClientError


def tokenize(raw: Mapping[str, Any], card: ModelCard, tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids of a text, or of a chat as its template renders it. ClientError naming the field."""
    body = checked_body(TokenizeBody, raw, card)
    if (body.prompt is None) == (body.messages is None):
        raise ClientError("send either prompt or messages", param="prompt", code="invalid_value")
    if body.messages is not None:
        text = tokenizer.render(normalise_messages(body.messages), body.chat_template_kwargs)
        ids = tokenizer.encode(text, add_special_tokens=body.add_special_tokens or False)
    else:
        special = body.add_special_tokens is not False
        ids = tokenizer.encode(body.prompt or "", add_special_tokens=special)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": card.context_tokens,
        "tokens": list(ids),
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.decode([one], skip_special=False) for one in ids]
    return answer


def detokenize(raw: Mapping[str, Any], card: ModelCard, tokenizer: Tokenizer) -> dict[str, Any]:
    """Text of ids, special ones included. ClientError naming the field."""
    body = checked_body(DetokenizeBody, raw, card)
    ids = known_ids(body.tokens, card, "tokens")
    return {"prompt": tokenizer.decode(ids, skip_special=False)}
