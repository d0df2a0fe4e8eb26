"""Defaults that the command line and the config file share. Standard library only."""

from __future__ import annotations

from pathlib import Path

from placement.errors import CheckpointError, ConfigError
from placement.headers import read_json

EMBEDDED_MODEL = Path(__file__).parent / "models" / "tiny-flash-next"
EMBEDDED_RANKS = 2  # `serve` without a model shows a gang, not a single process
DEVICES = ("cpu", "cuda", "npu")
BUILT_IN_DEVICES = ("cpu",)  # those that a rank can open; plans are made for all
DTYPES = ("float32", "bfloat16", "float16")
COMMS = ("auto", "shm", "gloo")


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
