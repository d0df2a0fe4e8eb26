"""Flags that several commands share, and the engine configuration that they add up to."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deploy.defaults import (
    BUILT_IN_DEVICES,
    COMMS,
    DEVICES,
    DTYPES,
    EMBEDDED_MODEL,
    default_drafts,
    default_dtype,
)
from placement.config import EngineConfig
from placement.errors import CheckpointError, ConfigError

# flag destination -> EngineConfig field, for flags that were given
ENGINE_FIELDS = {
    "ranks": "ranks",
    "device": "device",
    "dtype": "dtype",
    "mtp": "mtp",
    "prefix_bytes": "prefix_bytes",
    "prefix_host_bytes": "prefix_host_bytes",
    "comm": "comm",
    "context": "context_tokens",
    "sequences": "max_sequences",
    "step_tokens": "step_tokens",
    "prefill_chunk": "prefill_chunk_tokens",
    "page_tokens": "page_tokens",
    "chip": "chip_profile",
    "ownership": "ownership_file",
}


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="model directory (default: the embedded)")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags without a default here: what is not given is left to config file or EngineConfig."""
    positive, count = bounded(1), bounded(0)
    parser.add_argument("--ranks", type=positive, metavar="N", help="number of ranks")
    parser.add_argument("--device", choices=DEVICES, help="backend (default cpu)")
    parser.add_argument("--dtype", choices=DTYPES, help="type that weights run in")
    parser.add_argument("--context", type=positive, metavar="T", help="tokens a sequence may have")
    parser.add_argument("--sequences", type=positive, metavar="S", help="sequences at a time")
    parser.add_argument("--step-tokens", type=positive, metavar="N", help="token budget of a step")
    parser.add_argument("--page-tokens", type=positive, metavar="N", help="tokens of a page")
    parser.add_argument(
        "--mtp", type=count, metavar="K", help="drafts a step (0: off; default 2 with a draft head)"
    )
    parser.add_argument(
        "--prefix-cache", choices=("on", "off"), help="reuse of prompt prefixes (default on)"
    )
    parser.add_argument(
        "--prefix-bytes", type=count, metavar="B",
        help="of each rank for states of prefixes (default: two a sequence)",
    )  # fmt: skip
    parser.add_argument(
        "--prefix-host-bytes", type=count, metavar="B",
        help="the same in host memory (default: four times as many states)",
    )  # fmt: skip


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--comm", choices=COMMS, help="collectives (default auto)")
    parser.add_argument("--prefill-chunk", type=bounded(1), metavar="N", help="largest chunk")
    parser.add_argument(
        "--ownership", metavar="FILE", help="experts by rank, as nrank plan --json writes"
    )
    parser.add_argument(
        "--mtp-auto", choices=("on", "off"), help="stop drafts that slow a request down (on)"
    )


class Bounded:
    """Argument type: an integer from a minimum on, up to a maximum where there is one."""

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        self.minimum, self.maximum = minimum, maximum

    def __call__(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < self.minimum:
            raise argparse.ArgumentTypeError(f"{number} is below {self.minimum}")
        if self.maximum is not None and number > self.maximum:
            raise argparse.ArgumentTypeError(
                f"{number} is not within {self.minimum} and {self.maximum}"
            )
        return number


def bounded(minimum: int, maximum: int | None = None) -> Bounded:
    return Bounded(minimum, maximum)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """EngineConfig fields of the flags that were given."""
    values = {
        field: value
        for flag, field in ENGINE_FIELDS.items()
        if (value := getattr(arguments, flag, None)) is not None
    }
    for switch in ("prefix_cache", "mtp_auto"):
        if (state := getattr(arguments, switch, None)) is not None:
            values[switch] = state == "on"
    return values


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The flags as EngineConfig, with the defaults of device and model."""
    model_dir = model_path(arguments.model)
    values = given(arguments)
    values.setdefault("prefix_cache", True)
    if "mtp" not in values:
        values["mtp"] = default_drafts(model_dir)
    values.setdefault("dtype", default_dtype(values.get("device", "cpu"), model_dir))
    values.setdefault("pin_cpus", values.get("device", "cpu") != "cpu")
    return EngineConfig(model_dir=model_dir, **values)


def model_path(model: str | None) -> str:
    if model is None:
        return str(EMBEDDED_MODEL)
    if not model or not Path(model).is_dir():
        raise CheckpointError(
            f"{model or repr(model)} is no model directory; --model takes a folder of weights"
        )
    return model


def refuse_missing_features(config: EngineConfig) -> None:
    """What flags can name already but no rank can do yet."""
    if config.device not in BUILT_IN_DEVICES:
        raise ConfigError(
            f"--device {config.device} is not built in yet; use --device {BUILT_IN_DEVICES[0]}"
        )
