"""Requests of `nrank generate`: from flags or a JSON-lines file to checked engine requests."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.config import EngineConfig
from placement.errors import ClientError, ConfigError
from placement.headers import require_regular
from rank_worker.messages import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from cluster.tokens import Tokenizer

SEED_LIMIT = 1 << 63
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class ModelLimits:
    """What a prompt is checked against before any weight is read."""

    model_dir: str
    vocab: int
    context_tokens: int
    end_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, config: EngineConfig) -> ModelLimits:
        from placement.models.registry import load_model_spec

        spec, _ = load_model_spec(config.model_dir)
        context = config.context_tokens or spec.max_context
        return cls(config.model_dir, spec.vocab, context, spec.eos_token_ids)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ConfigError when this environment or model has none."""
        try:
            from cluster.tokens import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"text needs the tokenizer's packages ({error}); install them or use --prompt-ids"
            ) from error
        return Tokenizer.load(self.model_dir)

    @property
    def has_tokenizer(self) -> bool:
        """Whether ids can be turned into text here; a broken tokenizer is still an error."""
        if not os.path.lexists(os.path.join(self.model_dir, "tokenizer.json")):
            return False
        try:
            return bool(self.tokenizer)
        except ConfigError:
            return False


@dataclass(frozen=True)
class Job:
    """One request as asked: ids, limits, sampling, and stop strings that apply to the text."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool

    def request(self, request_id: str, limits: ModelLimits) -> EngineRequest:
        return EngineRequest(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            max_tokens=self.max_tokens,
            sampling=SamplingParams(temperature=self.temperature, seed=self.seed or 0),
            stop_token_ids=limits.end_token_ids,
            ignore_eos=self.ignore_eos,
        )


def jobs_from_flags(arguments: argparse.Namespace, limits: ModelLimits) -> list[Job]:
    if arguments.prompt_ids is not None:
        ids = _parse_ids(arguments.prompt_ids)
    elif arguments.chat is not None:
        ids = limits.tokenizer.encode_chat([{"role": "user", "content": arguments.chat}])
    else:
        ids = limits.tokenizer.encode(arguments.prompt)
    job = Job(
        tuple(ids),
        arguments.max_tokens,
        arguments.temperature,
        arguments.seed,
        tuple(arguments.stop),
        arguments.ignore_eos,
    )
    return [check(job, limits, "the prompt")]


def jobs_from_lines(arguments: argparse.Namespace, limits: ModelLimits) -> list[Job]:
    """One JSON object a line; flags give what a line leaves out. Names the line of an error."""
    path = arguments.requests
    try:
        require_regular(path)
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; check --requests") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"can't read {path}: {error}; check --requests") from error
    jobs = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may hold U+2028
        if line.strip():
            where = f"{path} line {number}"
            job = _job(_object(line, where), arguments, limits)
            jobs.append(check(job, limits, where))
    if not jobs:
        raise ConfigError(f"{path} holds no request; put one JSON object on each line")
    return jobs


def check(job: Job, limits: ModelLimits, where: str) -> Job:
    """Refuse what the engine can't run; draw a seed where sampling needs one."""
    count, vocab = len(job.prompt_ids), limits.vocab
    if not count:
        raise ClientError(f"{where} is empty; give at least one token")
    if wrong := [i for i in job.prompt_ids if not 0 <= i < vocab]:
        raise ClientError(f"{where} has token id {wrong[0]}; this model's ids are 0 to {vocab - 1}")
    if job.max_tokens < 1:
        raise ClientError(f"{where} asks for max_tokens {job.max_tokens}; ask for at least 1")
    if count + job.max_tokens > limits.context_tokens:
        raise ClientError(
            f"{where} has {count} tokens and asks for {job.max_tokens} more, the context is "
            f"{limits.context_tokens}; shorten it or lower max_tokens"
        )
    if not 0 <= job.temperature <= MAX_TEMPERATURE:
        raise ClientError(
            f"{where} has temperature {job.temperature}; use 0 to {MAX_TEMPERATURE:g}"
        )
    if job.seed is not None and not 0 <= job.seed < SEED_LIMIT:
        raise ClientError(f"{where} has seed {job.seed}; use 0 to {SEED_LIMIT - 1}")
    if "" in job.stop:
        raise ClientError(f"{where} has an empty stop string; leave it out")
    if job.stop:
        _ = limits.tokenizer  # refused here rather than after the answer
    if job.temperature > 0 and job.seed is None:
        return replace(job, seed=secrets.randbelow(SEED_LIMIT))
    return job


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            f"--prompt-ids {text[:60]!r} is no list of whole numbers; write 1,2,3"
        ) from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} must be a JSON object, found a {type(found).__name__}")
    if unknown := sorted(set(found) - set(_KINDS)):
        known = ", ".join(sorted(_KINDS))
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known: {known}")
    if (found.get("prompt") is None) == (found.get("prompt_ids") is None):
        raise ConfigError(f"{where} needs either prompt or prompt_ids")
    for key, value in found.items():
        kind = _KINDS[key]
        if value is not None and not kind.holds(value):
            raise ConfigError(f"{where}: {key} must be {kind.words}, found {_short(value)}")
    return found


@dataclass(frozen=True)
class _Kind:
    """What a field may hold: one of `one`, or a list of `each`. A bool is no number here."""

    words: str
    one: tuple[type, ...] = ()
    each: tuple[type, ...] = ()

    def holds(self, value: object) -> bool:
        if isinstance(value, list) and self.each:
            return all(type(item) in self.each for item in value)
        return type(value) in self.one


_KINDS: Mapping[str, _Kind] = {
    "prompt": _Kind("a string", one=(str,)),
    "prompt_ids": _Kind("a list of whole numbers", each=(int,)),
    "max_tokens": _Kind("a whole number", one=(int,)),
    "temperature": _Kind("a number", one=(int, float)),
    "seed": _Kind("a whole number", one=(int,)),
    "stop": _Kind("a string or a list of strings", one=(str,), each=(str,)),
    "ignore_eos": _Kind("true or false", one=(bool,)),
}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _job(found: Mapping[str, Any], arguments: argparse.Namespace, limits: ModelLimits) -> Job:
    def value(key: str) -> Any:
        return getattr(arguments, key) if found.get(key) is None else found[key]

    stop: str | Sequence[str] = value("stop")
    return Job(
        _ids(found, limits),
        value("max_tokens"),
        float(value("temperature")),
        value("seed"),
        (stop,) if isinstance(stop, str) else tuple(stop),
        value("ignore_eos"),
    )


def _ids(found: Mapping[str, Any], limits: ModelLimits) -> tuple[int, ...]:
    if found.get("prompt") is not None:
        return limits.tokenizer.encode(found["prompt"])
    return tuple(found["prompt_ids"])
