"""Tensor headers of a model that isn't on this machine, from a JSON file.

The file holds what a safetensors file starts with, of all shards in one object:
`{"name": {"dtype": "BF16", "shape": [2, 3]}, ...}`; other keys of an entry are not read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from placement.errors import CheckpointError, ConfigError
from placement.headers import CheckpointHeaders, TensorHeader, read_json
from placement.models.registry import ADAPTERS, spec_from_config
from placement.spec import ModelSpec

ITEM_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I8": 8, "U8": 8}


def spec_from_header_file(
    config_path: str, header_path: str
) -> tuple[ModelSpec, CheckpointHeaders]:
    """The spec that the adapter makes of a config with headers; errors as for a directory."""
    spec = spec_from_config(config_path)  # refuses what no adapter reads
    config = read_json(config_path)
    headers = read_header_file(header_path)
    return ADAPTERS[config["model_type"]](spec.name, config, None, headers), headers


def read_header_file(path: str) -> CheckpointHeaders:
    """Headers without places: `offset` is 0, for planning only."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}; check --headers") from error
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: bad JSON ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: must be an object of tensors by name")
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry) for name, entry in entries.items()}
    return CheckpointHeaders(model_dir=path, tensors=tensors, header_bytes=len(text))


def _tensor(path: str, name: str, entry: Any) -> TensorHeader:
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if dtype not in ITEM_BITS:
        raise CheckpointError(f"{path}: {name} has dtype {dtype!r}, known: {', '.join(ITEM_BITS)}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(f"{path}: {name} has shape {shape!r}, needs a list of sizes")
    return TensorHeader(path, dtype, tuple(shape), 0, math.prod(shape) * ITEM_BITS[dtype] // 8)
