"""The served model as the HTTP edge knows it: its name, limits and sampling defaults.

Owns the reading of `generation_config.json` and of two numbers of `config.json`. Knows nothing of
layers or tensors.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.protocol import MAX_CHOICES
from placement.errors import CheckpointError
from placement.headers import read_json

_LOG = logging.getLogger("nrank.edge")


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request that names no value gets. Without a file: OpenAI's temperature of 1."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class ModelCard:
    """One served model. `context_tokens` bounds prompt plus answer of one sequence."""

    id: str
    context_tokens: int
    vocab_size: int
    created_s: int
    defaults: SamplingDefaults = SamplingDefaults()
    eos_token_ids: tuple[int, ...] = ()
    owned_by: str = "nrank"
    max_choices: int = MAX_CHOICES  # answers of one request


def load_model_card(
    model_dir: str | Path, model_id: str, created_s: int, context_tokens: int = 0
) -> ModelCard:
    """Card of the model in `model_dir`; `context_tokens` 0 takes the model's own limit.

    Raises CheckpointError naming the file and the missing key.
    """
    directory = Path(model_dir)
    path = directory / "config.json"
    config = _read(path)
    if isinstance(text := config.get("text_config"), dict):
        config = {**config, **text}
    generation_path = directory / "generation_config.json"
    generation = _read(generation_path) if os.path.lexists(generation_path) else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelCard(
        id=model_id,
        context_tokens=context_tokens or _integer(path, config, "max_position_embeddings"),
        vocab_size=_integer(path, config, "vocab_size"),
        created_s=created_s,
        defaults=_defaults(generation_path, generation),
        eos_token_ids=_end_tokens(directory, eos),
    )


def _end_tokens(directory: Path, eos: object) -> tuple[int, ...]:
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if wrong := [i for i in ids if type(i) is not int]:
        raise CheckpointError(f"{directory}: eos_token_id must be token ids, not {wrong[0]!r}")
    return tuple(ids)


def _defaults(path: Path, generation: dict[str, Any]) -> SamplingDefaults:
    """`do_sample: false` means greedy, whatever temperature stands beside it."""
    penalty = generation.get("repetition_penalty")
    if penalty not in (None, 1, 1.0):
        _LOG.warning("generation_config's repetition_penalty %s is not applied", penalty)
    fallback = SamplingDefaults()
    greedy = generation.get("do_sample") is False
    temperature = _number(path, generation, "temperature", fallback.temperature)
    return SamplingDefaults(
        temperature=0.0 if greedy else temperature,
        top_k=max(0, int(_number(path, generation, "top_k", fallback.top_k))),
        top_p=_number(path, generation, "top_p", fallback.top_p),
        min_p=_number(path, generation, "min_p", fallback.min_p),
    )


def _number(path: Path, generation: dict[str, Any], key: str, default: float) -> float:
    value = generation.get(key)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise CheckpointError(f"{path}: {key} must be a number, not {value!r}")
    return float(value)


def _integer(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {key} must be a positive integer, not {value!r}")
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(str(path))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; copy the file again") from error
