"""From the bytes of a request body to a request that can be served, or one clear refusal.

Owns the order of checks (JSON, model, fields, values, prompt, context) and the types of a checked
request. Knows nothing of HTTP responses or of the engine's state.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from cluster.chat import normalise_messages
from cluster.model_card import ModelCard
from cluster.protocol import (
    IGNORED_FIELDS,
    MAX_STOPS,
    UNSUPPORTED_FIELDS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    ModelBody,
)
from cluster.reasoning import Section, section_after
from cluster.tokens import Tokenizer
from placement.errors import ClientError, ErrorKind
from rank_worker.messages import EngineRequest, SamplingParams

_SEED_MASK = 2**63 - 1
# What pydantic adds to the place of a fault in a field of several types.
_UNION_MEMBERS = ("str", "list[str]", "list[any]", "constrained-int", "literal[False]")
_OTHER_ROUTE: Mapping[type[ModelBody], frozenset[str]] = {
    ChatBody: frozenset(CompletionBody.model_fields) - frozenset(ChatBody.model_fields),
    CompletionBody: frozenset(ChatBody.model_fields) - frozenset(CompletionBody.model_fields),
}
BodyT = TypeVar("BodyT", bound=ModelBody)


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt; `section` is where a chat answer begins, None for plain completions."""

    token_ids: tuple[int, ...]
    section: Section | None = None


@dataclass(frozen=True)
class ValidRequest:
    """A request within all limits. Choices are numbered prompt by prompt, `n` of each."""

    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: tuple[int, ...]  # [prompts]
    sampling: SamplingParams
    stops: tuple[str, ...]
    end_token_ids: tuple[int, ...]
    priority: int
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    logprobs: int = -1  # likely tokens told beside each one; -1: no log-probabilities
    echo: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def max_tokens_of(self, choice: int) -> int:
        """0: nothing but the echoed prompt is wanted."""
        return self.max_tokens[choice // self.n]

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.n]

    def engine_request(self, request_id: str, choice: int, arrival_s: float) -> EngineRequest:
        """What the engine runs for one choice; all choices share the seed, not the stream."""
        sampling = SamplingParams(
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            min_p=self.sampling.min_p,
            seed=self.sampling.seed,
            choice=choice % self.n,
        )
        return EngineRequest(
            request_id=f"{request_id}-{choice}",
            prompt_ids=self.prompt_of(choice).token_ids,
            max_tokens=max(1, self.max_tokens[choice // self.n]),
            sampling=sampling,
            stop_token_ids=self.end_token_ids,
            arrival_s=arrival_s,
            rounds_apart=bool(self.stops),
            logprobs=self.logprobs,
            prompt_logprobs=self.echo and self.logprobs >= 0,
            priority=self.priority,
        )


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, without its null fields. ClientError for anything else."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ClientError(
            f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json"
        )
    return {key: item for key, item in value.items() if item is not None}


def valid_chat(raw: Mapping[str, Any], card: ModelCard, tokenizer: Tokenizer) -> ValidRequest:
    """Check a chat body and tokenise it. Raises ClientError naming the field."""
    body = checked_body(ChatBody, raw, card)
    options = dict(body.chat_template_kwargs)
    if body.enable_thinking is not None:
        options.setdefault("enable_thinking", body.enable_thinking)
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    _check_choices(1, body.n, card)
    text = tokenizer.render(normalise_messages(body.messages), options)
    _check_size(text, "messages", card, tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = Prompt(token_ids, section_after(text))
    limit = body.max_completion_tokens or body.max_tokens
    field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    request = _request(body, (prompt,), limit, field, "messages", card)
    return replace(request, logprobs=_chat_logprobs(body))


def valid_completion(raw: Mapping[str, Any], card: ModelCard, tokenizer: Tokenizer) -> ValidRequest:
    """Check a completion body and tokenise its texts. Raises ClientError naming the field."""
    body = checked_body(CompletionBody, raw, card)
    items = _prompt_items(body.prompt)
    _check_choices(len(items), body.n, card)
    for item in items:
        if isinstance(item, str):
            _check_size(item, "prompt", card, tokenizer)
    prompts = tuple(
        Prompt(tokenizer.encode(item) if isinstance(item, str) else known_ids(item, card, "prompt"))
        for item in items
    )
    if body.max_tokens == 0 and not body.echo:
        raise ClientError(
            "max_tokens: 0 leaves nothing to answer; send at least 1, or echo=true",
            param="max_tokens", code="invalid_value",
        )  # fmt: skip
    request = _request(body, prompts, body.max_tokens, "max_tokens", "prompt", card)
    logprobs = -1 if body.logprobs is None or body.logprobs is False else body.logprobs
    return replace(request, logprobs=logprobs, echo=body.echo)


def _check_choices(num_prompts: int, n: int, card: ModelCard) -> None:
    """All choices of a request are admitted together: more than ever fit would never be."""
    if num_prompts * n > card.max_choices:
        what = f"n={n} is" if num_prompts == 1 else f"{num_prompts} prompts times n={n} are"
        raise ClientError(
            f"{what} above the limit of {card.max_choices} answers that one request may ask this "
            "server for; split it",
            param="n" if n > 1 else "prompt",
            code="invalid_value",
        )


def _check_size(text: str, field: str, card: ModelCard, tokenizer: Tokenizer) -> None:
    """Refuses at once what would be tokenised for seconds only to be refused then."""
    least = tokenizer.least_tokens(text)
    if least >= card.context_tokens:
        raise ClientError(
            f"the prompt has at least {least} tokens and the context is {card.context_tokens}, "
            "which leaves no room for an answer; shorten the prompt",
            kind=ErrorKind.CONTEXT_LENGTH,
            param=field,
        )


def _chat_logprobs(body: ChatBody) -> int:
    if body.logprobs:
        return body.top_logprobs
    if body.top_logprobs:
        raise ClientError(
            "top_logprobs needs logprobs=true; set it or remove top_logprobs", param="top_logprobs"
        )
    return -1


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def checked_body(model: type[BodyT], raw: Mapping[str, Any], card: ModelCard) -> BodyT:
    """The body with its fields checked, for this server's model. ClientError naming the field."""
    _check_model(raw, card)
    _check_fields(model, raw)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise field_error(error) from error


def _check_model(raw: Mapping[str, Any], card: ModelCard) -> None:
    name = raw.get("model")
    if not isinstance(name, str):
        raise ClientError(
            f"model is required: a string, for example {card.id!r}", param="model", code="missing"
        )
    if name != card.id:
        raise unknown_model(name, card)


def unknown_model(name: str, card: ModelCard) -> ClientError:
    return ClientError(
        f"the model {name!r} does not exist; this server has {card.id!r}",
        kind=ErrorKind.NOT_FOUND,
        param="model",
    )


def _never(value: object) -> bool:
    """A field of the other route has no value that means nothing here."""
    return False


def _check_fields(model: type[ModelBody], raw: Mapping[str, Any]) -> None:
    """Nothing that a client asks for is dropped without a word."""
    others = _OTHER_ROUTE.get(model, frozenset())
    for name, value in raw.items():
        if name in model.model_fields or name in IGNORED_FIELDS:
            continue
        is_off = UNSUPPORTED_FIELDS.get(name, _never if name in others else None)
        if is_off is None:
            raise _unknown_field(name, model)
        if not is_off(value):
            raise ClientError(
                f"{name} is not supported by this server; remove it",
                param=name,
                code="unsupported_parameter",
            )


def _unknown_field(name: str, model: type[ModelBody]) -> ClientError:
    near = difflib.get_close_matches(name, model.model_fields, 1)
    remedy = f"did you mean {near[0]}?" if near else "remove it"
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    return ClientError(
        f"{shown!r} is not a parameter of this route; {remedy}",
        param=shown,
        code="unknown_parameter",
    )


def field_error(error: ValidationError) -> ClientError:
    """The first fault, as one line: field, what is wrong, the value."""
    first = error.errors(include_url=False)[0]
    location = [part for part in first["loc"] if part not in _UNION_MEMBERS]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)[1:]
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "missing":
        return ClientError(f"{path} is required", param=path, code="missing")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ClientError(f"{path}: {message}, got {shown}", param=path, code="invalid_value")


def _prompt_items(prompt: str | list[Any]) -> list[Any]:
    """The separate prompts of the four legal shapes: text, ids, list of texts, list of id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(_is_id(item) for item in prompt):
        return [prompt]
    if prompt and all(isinstance(item, str) for item in prompt):
        return prompt
    if prompt and all(isinstance(item, list) and all(map(_is_id, item)) for item in prompt):
        return prompt
    raise ClientError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        param="prompt",
    )


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def known_ids(ids: Sequence[int], card: ModelCard, field: str) -> tuple[int, ...]:
    """ClientError for an id that the model doesn't have."""
    for token_id in ids:
        if not 0 <= token_id < card.vocab_size:
            raise ClientError(
                f"token id {token_id} is outside the vocabulary of {card.vocab_size}",
                param=field,
            )
    return tuple(ids)


def _request(
    body: GenerationBody,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    limit_field: str,
    prompt_field: str,
    card: ModelCard,
) -> ValidRequest:
    return ValidRequest(
        prompts=prompts,
        n=body.n,
        max_tokens=tuple(
            _room(prompt, max_tokens, limit_field, prompt_field, card) for prompt in prompts
        ),
        sampling=_sampling(body, card),
        stops=_stops(body.stop),
        end_token_ids=tuple(
            dict.fromkeys([*body.stop_token_ids, *(() if body.ignore_eos else card.eos_token_ids)])
        ),
        priority=body.priority,
        skip_special_tokens=body.skip_special_tokens,
        stream=body.stream,
        include_usage=_include_usage(body),
    )


def _room(
    prompt: Prompt, max_tokens: int | None, limit_field: str, prompt_field: str, card: ModelCard
) -> int:
    """Tokens that one answer may have; the whole remaining context when the request names none."""
    used = len(prompt.token_ids)
    room = card.context_tokens - used
    if used == 0:
        raise ClientError("the prompt has no tokens; send at least one", param=prompt_field)
    if room < 1:
        raise ClientError(
            f"the prompt has {used} tokens and the context is {card.context_tokens}, which leaves "
            "no room for an answer; shorten the prompt",
            kind=ErrorKind.CONTEXT_LENGTH,
            param=prompt_field,
        )
    if max_tokens is not None and max_tokens > room:
        raise ClientError(
            f"{used} prompt tokens plus {limit_field}={max_tokens} are above the context of "
            f"{card.context_tokens}; at most {room} fit",
            kind=ErrorKind.CONTEXT_LENGTH,
            param=limit_field,
        )
    return room if max_tokens is None else max_tokens


def _sampling(body: GenerationBody, card: ModelCard) -> SamplingParams:
    """Request over generation_config; a seed is drawn when the request names none."""
    defaults = card.defaults
    top_k = defaults.top_k if body.top_k is None else max(0, body.top_k)
    seed = secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK
    return SamplingParams(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=top_k,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        seed=seed,
    )


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise ClientError(
            f"stop has {len(stops)} strings, the limit is {MAX_STOPS}; send fewer", param="stop"
        )
    if "" in stops:
        raise ClientError("stop holds an empty string; remove it", param="stop")
    return stops


def _include_usage(body: GenerationBody) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ClientError(
            "stream_options needs stream=true; set it or remove stream_options",
            param="stream_options",
        )
    return body.stream_options.include_usage
