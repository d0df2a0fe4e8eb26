"""Defaults that the command line and the config file share. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from placement.errors import CheckpointError, ConfigError
from placement.headers import read_json

if TYPE_CHECKING:
    from placement.spec import ModelSpec

EMBEDDED_MODEL = Path(__file__).parent / "models" / "tiny-flash-next"
EMBEDDED_RANKS = 2  # `serve` without a model shows a gang, not a single process
DEVICES = ("cpu", "cuda", "npu")
BUILT_IN_DEVICES = DEVICES  # those that a rank can open; plans are made for all
DEFAULT_DRAFTS = 2
DTYPES = ("float32", "bfloat16", "float16")
COMMS = ("auto", "shm", "gloo")


def default_drafts(model_dir: str) -> int:
    """Draft tokens a step for a model; 0 where it can't be read: whoever runs it says why."""
    from placement.models.registry import load_model_spec

    try:
        spec, _ = load_model_spec(model_dir)
    except (CheckpointError, ConfigError):
        return 0
    return drafts_of(spec)


def drafts_of(spec: ModelSpec) -> int:
    """As many as pay, where there is a draft head that can be run."""
    return DEFAULT_DRAFTS if spec.draft_tensors and len(spec.draft_layers) == 1 else 0


def default_dtype(device: str, model_dir: str) -> str:
    """The type that weights run in: what each device is fast in.

    bfloat16 products are 5-8 times slower than float32 on AVX2, and a 310P has no bfloat16 at all.
    """
    if device == "cpu":
        return "float32"
    if device == "npu":
        return "float16"
    return checkpoint_dtype(model_dir)


def checkpoint_dtype(model_dir: str) -> str:
    """The type that config.json names; ConfigError when it names none that a run can have."""
    path = Path(model_dir) / "config.json"
    try:
        config = read_json(str(path))
    except CheckpointError as error:
        raise ConfigError(f"{error}; correct the file or set dtype") from error
    for source in (config, config.get("text_config")):
        found = source.get("dtype", source.get("torch_dtype")) if isinstance(source, dict) else None
        if found in DTYPES:
            return str(found)
    raise ConfigError(f"{path} names no dtype out of {', '.join(DTYPES)}; set dtype")
