"""The request bodies of the OpenAI routes: which fields exist, their types and their fate.

Every known field is in exactly one of three places: a model below (it works), `IGNORED_FIELDS`
(accepted, can't change an answer here) or `UNSUPPORTED_FIELDS` (accepted at the value that means
"off", else refused by name; a field of one route stands there for the other). Fields that nobody
knows are refused, too. Knows nothing of tokens or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOPS = 4  # OpenAI's limit
MAX_LOGPROBS = 20  # OpenAI's limit of likely tokens beside each one
MAX_CHOICES = 64  # prompts x n of one request: each is a sequence of its own in the queue

IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "parallel_tool_calls",
        "spaces_between_special_tokens",
    }
)


def _off(*values: object) -> Callable[[object], bool]:
    """True for a value that leaves the feature off; 0 and False are told apart from each other."""
    return lambda value: any(value == off and type(value) is type(off) for off in values)


_NUMBER_ZERO = _off(0, 0.0)
_NUMBER_ONE = _off(1, 1.0)

UNSUPPORTED_FIELDS: Mapping[str, Callable[[object], bool]] = MappingProxyType(
    {
        "top_logprobs": _off(0),
        "prompt_logprobs": _off(0),
        "echo": _off(False),
        "suffix": _off(""),
        "best_of": _off(1),
        "logit_bias": _off({}),
        "presence_penalty": _NUMBER_ZERO,
        "frequency_penalty": _NUMBER_ZERO,
        "repetition_penalty": _NUMBER_ONE,
        "length_penalty": _NUMBER_ONE,
        "use_beam_search": _off(False),
        "min_tokens": _off(0),
        "bad_words": _off([]),
        "allowed_token_ids": _off([]),
        "tools": _off([]),
        "tool_choice": _off("none", "auto"),
        "functions": _off([]),
        "function_call": _off("none", "auto"),
        "response_format": _off({"type": "text"}),
        "structured_outputs": _off({}),
        "guided_json": _off(),
        "guided_regex": _off(),
        "guided_choice": _off(),
        "guided_grammar": _off(),
        "guided_decoding_backend": _off(),
        "guided_whitespace_pattern": _off(),
        "return_tokens_as_token_ids": _off(False),
        "mm_processor_kwargs": _off({}),
        "kv_transfer_params": _off({}),
        "vllm_xargs": _off({}),
        "modalities": _off(["text"]),
        "audio": _off(),
        "prediction": _off(),
        "web_search_options": _off(),
        "include_reasoning": _off(True),
        "include_stop_str_in_output": _off(False),
        "return_token_ids": _off(False),
        "truncate_prompt_tokens": _off(-1),
        "continue_final_message": _off(False),
        "add_generation_prompt": _off(True),
        "prompt_embeds": _off(),
        "thinking_token_budget": _off(),
        "chat_template": _off(),
        "documents": _off([]),
        "logits_processors": _off([]),
        "typical_p": _NUMBER_ONE,
        "cache_salt": _off(""),
        "reasoning": _off({}),
    }
)


class StreamOptions(BaseModel):
    """`include_obfuscation` changes nothing: streams are never padded."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class ModelBody(BaseModel):
    """Names the model. A null field is an absent one (dropped before parsing)."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str


class GenerationBody(ModelBody):
    """Fields that both routes share.

    Of waiting requests the one with the least `priority` goes first, and it is preempted last.
    """

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. `max_completion_tokens` wins over `max_tokens`.

    `enable_thinking` is short for the same key in `chat_template_kwargs`, which wins; all keys of
    the latter and `reasoning_effort` reach the chat template as variables.
    """

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions. A prompt is a text or a list of token ids, or a list of either.

    With `echo` the prompt stands before the answer, which may then be empty (`max_tokens` 0).
    """

    prompt: str | list[Any]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | Literal[False] | None = None


class TokenizeBody(ModelBody):
    """POST /tokenize: a text, or a chat. Special tokens are added to a text unless told not to."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(ModelBody):
    """POST /detokenize."""

    tokens: list[int]


class HoldBody(BaseModel):
    """POST /admin/hold; may be left out. The reason stands in /status and /ready."""

    model_config = ConfigDict(strict=True, extra="forbid")

    reason: Annotated[str, Field(max_length=200)] = "by hand"
