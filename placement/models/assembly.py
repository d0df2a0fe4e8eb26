"""What every adapter ends with: tensors checked against the headers, their formats, end tokens.

Knows what a config.json says outside of a family's own keys; knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders
from placement.models.claims import remarks_on
from placement.models.config_reader import ConfigReader, bad_key
from placement.models.matching import check_float_dtypes, match
from placement.models.quantised import (
    Formatted,
    align_inner_widths,
    formats_of_config,
    formats_on_disk,
    resplit_scales,
    runs_packed,
)
from placement.spec import TensorSpec

DEFAULT_DTYPE = "bfloat16"
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
CONFIG = "config.json"
PACKED_PARTS = "experts, projections and the head run packed, the n-gram table from FP8"


@dataclass(frozen=True)
class DiskTensors:
    """All tensors of a model and of its draft head, their scales, and the names left unread."""

    tensors: tuple[TensorSpec, ...]
    draft_tensors: tuple[TensorSpec, ...]
    scale_tensors: tuple[TensorSpec, ...]
    draft_scale_tensors: tuple[TensorSpec, ...]
    ignored: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def num_pieces(self) -> int:
        """Different tensors on disk; a tied head reads those of the embedding."""
        every = (
            *self.tensors, *self.draft_tensors, *self.scale_tensors, *self.draft_scale_tensors,
        )  # fmt: skip
        return len({piece.name for spec in every for piece in spec.pieces})

    @property
    def format_obstacles(self) -> tuple[str, ...]:
        """Why no engine part can use the weights as they are stored."""
        found = {
            spec.format.name: spec.role
            for spec in (*self.draft_tensors, *self.tensors)
            if spec.format is not None and not runs_packed(spec)
        }
        return tuple(
            f"{role} is stored as {name}; {PACKED_PARTS}" for name, role in sorted(found.items())
        )


def settle_tensors(
    tensors: Sequence[TensorSpec],
    drafts: Sequence[TensorSpec],
    headers: CheckpointHeaders | None,
    config: Mapping[str, Any],
    ignores: Callable[[str], bool],
) -> DiskTensors:
    """Formats and checks. Raises CheckpointError naming what is missing, unknown or misshapen."""
    quantisation = quantisation_of(config)
    if headers is None:
        return _of_config(tensors, drafts, quantisation)
    main, draft = formats_on_disk(tensors, headers), formats_on_disk(drafts, headers)
    ignored = tuple(name for name in headers.tensors if ignores(name))
    side = (*main.side, *draft.side)
    every = [*main.tensors, *main.scales, *draft.tensors, *draft.scales]
    match(every, headers, {*ignored, *side})
    check_float_dtypes(main.tensors, headers)
    check_float_dtypes(draft.tensors, headers)
    return _joined(main, draft, (*ignored, *side), remarks_on(quantisation, every))


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation section of a config; None without one."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    found = config.get("quantization_config") or nested
    if found and not isinstance(found, Mapping):
        raise bad_key("quantization_config", found, "an object")
    return found or None


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model in plain floats."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = without_quantisation(plain["text_config"])
    return plain


def _of_config(
    tensors: Sequence[TensorSpec],
    drafts: Sequence[TensorSpec],
    quantisation: Mapping[str, Any] | None,
) -> DiskTensors:
    if quantisation is None:
        return _joined(Formatted(list(tensors)), Formatted(list(drafts)), ())
    main = formats_of_config(tensors, quantisation, CONFIG)
    return _joined(main, formats_of_config(drafts, quantisation, CONFIG), ())


def _joined(
    main: Formatted, draft: Formatted, ignored: tuple[str, ...], remarks: tuple[str, ...] = ()
) -> DiskTensors:
    aligned = align_inner_widths([*main.tensors, *draft.tensors])
    return DiskTensors(
        tensors=tuple(aligned[: len(main.tensors)]),
        draft_tensors=tuple(aligned[len(main.tensors) :]),
        scale_tensors=resplit_scales(main.scales, aligned),
        draft_scale_tensors=resplit_scales(draft.scales, aligned),
        ignored=ignored,
        remarks=remarks,
    )


def find_prefix(
    prefixes: Sequence[tuple[str, str]], headers: CheckpointHeaders | None, nested: bool
) -> tuple[str, str]:
    """Prefix of the text model and name of the output head, by where the embedding is.

    Without headers the first pair for a config with a nested text section, else the last.
    """
    if headers is None:
        return prefixes[0] if nested else prefixes[-1]
    for prefix, head in prefixes:
        if prefix + "embed_tokens.weight" in headers.tensors:
            return prefix, head
    tried = ", ".join(prefix + "embed_tokens.weight" for prefix, _ in prefixes)
    raise CheckpointError(f"{headers.model_dir}: has no embedding (looked for {tried})")


def text_section(config: Mapping[str, Any]) -> tuple[ConfigReader, bool]:
    """The text model's keys, and whether they are nested beside those of other modalities."""
    whole = ConfigReader(config)
    nested = "text_config" in config
    return (whole.section("text_config") if nested else whole), nested


def end_tokens(
    config: Mapping[str, Any],
    cfg: ConfigReader,
    generation_config: Mapping[str, Any] | None,
    vocab: int,
) -> tuple[int, ...]:
    """Those of the generation config, else of the text section, else of the whole config."""
    ends = ConfigReader(generation_config or {}).token_ids("eos_token_id", vocab)
    ends = ends or cfg.token_ids("eos_token_id", vocab)
    return ends or ConfigReader(config).token_ids("eos_token_id", vocab)


def checkpoint_dtype(
    config: Mapping[str, Any], cfg: ConfigReader, embed: str, headers: CheckpointHeaders | None
) -> str:
    """The dtype of the embedding on disk where it is in floats, else the one of the config."""
    if headers is not None and (found := DTYPE_NAMES.get(headers.tensors[embed].dtype)):
        return found
    stated = cfg.get("dtype") or cfg.get("torch_dtype") or config.get("dtype")
    stated = stated or config.get("torch_dtype") or DEFAULT_DTYPE
    if stated not in DTYPE_NAMES.values():
        raise bad_key("dtype", stated, ", ".join(DTYPE_NAMES.values()))
    return str(stated)
