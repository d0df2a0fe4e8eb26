"""The server's configuration: one YAML file, overridden by flags, checked before anything starts.

Owns names, bounds and defaults of what a user turns. Knows nothing of how it is carried out:
`engine()` gives the part that ranks run with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from deploy.defaults import EMBEDDED_MODEL, EMBEDDED_RANKS, default_drafts, default_dtype
from placement.config import EngineConfig
from placement.errors import ConfigError
from placement.headers import require_regular

MAX_CELSIUS = 120.0  # no chip here is meant to get so hot; sensors are not believed above 150


class ServeConfig(BaseModel):
    """Everything `nrank serve` can be told. Zero means "choose" where the comment says so."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = ""  # model directory; empty: the embedded model
    model_name: str = ""  # id in the API; empty: the directory's name
    ranks: int = Field(1, ge=1, le=4096)
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""  # empty: the device's
    context_tokens: int = Field(0, ge=0)  # 0: the model's own limit
    max_sequences: int = Field(8, ge=1, le=4096)
    step_tokens: int = Field(512, ge=1)
    prefill_chunk_tokens: int = Field(0, ge=0)  # 0: bounded by step_tokens
    page_tokens: int = Field(64, ge=1)
    kv_pool_tokens: int = Field(0, ge=0)  # 0: chosen by the plan
    chips: int = Field(0, ge=0)  # 0: as many as ranks, or as the machine has
    chip_profile: str = ""  # empty: the device's
    usable_bytes: int = Field(0, ge=0)  # of each chip; 0: as the profile says
    evidence_file: str = ""  # of the context length, as `nrank certify` writes; empty: none
    ownership_file: str = ""  # experts by rank, as `nrank plan --json` writes; empty: contiguous
    mtp: int | None = Field(None, ge=0, le=4)  # draft tokens a step, 0: off; null: the model's
    mtp_auto: bool = True  # a request that drafts slow down stops drafting
    prefix_cache: bool = True
    prefix_bytes: int = Field(-1, ge=-1)  # of each rank for kept states; -1: two a sequence
    prefix_host_bytes: int = Field(-1, ge=-1)  # in host memory; -1: four times as many
    prefix_interval_tokens: int = Field(512, ge=1)  # a state is kept at least this often
    decode_share: float = Field(0.55, ge=0, lt=1)  # of their rate that answers keep beside prefill
    check_interval_steps: int = Field(64, ge=1)
    check_contracts: bool = False
    ops_file: str = ""  # results of operators on this machine, as `nrank doctor --ops` writes
    graphs: bool = True  # decode steps are recorded and replayed, on devices that can
    int8_activations: bool = False  # inputs of products with packed weights in 8 bits
    pin_cpus: bool | None = None  # step loops on cores of their own; null: on every device but cpu
    comm: Literal["auto", "shm", "gloo"] = "auto"
    load_timeout_s: float = Field(600.0, gt=0)
    start_timeout_s: float = Field(120.0, gt=0)
    step_timeout_s: float = Field(20.0, gt=0)
    master_address: str = "127.0.0.1"

    sensors: Literal["auto", "on", "off"] = "auto"  # auto: on every device but cpu
    hold_celsius: float = Field(
        94.0, gt=0, le=MAX_CELSIUS
    )  # a chip so hot brings all ranks to rest
    resume_celsius: float = Field(85.0, gt=0, le=MAX_CELSIUS)  # until every chip is so cool
    cut_celsius: float = Field(96.0, gt=0, le=MAX_CELSIUS)  # running answers end with an error
    silence_s: float = Field(
        30.0, gt=0, le=3600
    )  # so long without a temperature brings them to rest, too
    hold_when_silent: bool = True
    stay_down_after_cut: bool = False  # until resumed by hand

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    admin_token_file: str = ""  # who has its token may hold and resume; empty: this machine may
    ray_address: str = ""  # empty: start a local Ray
    resource_name: str = ""  # what a rank asks Ray for; empty: the device's
    ingress_replicas: int = Field(1, ge=1, le=64)
    max_queue_requests: int = Field(64, ge=0)
    sse_comment_interval_s: float = Field(15.0, gt=0)
    drain_timeout_s: float = Field(60.0, ge=0)
    request_timeout_s: float = Field(0.0, ge=0)  # from admission to the last token; 0: none
    restart_limit: int = Field(5, ge=0)
    restart_backoff_s: float = Field(1.0, ge=0)

    @field_validator("sensors", mode="before")
    @classmethod
    def _yaml_word(cls, value: object) -> object:
        """YAML takes a bare on, off, yes or no for a boolean."""
        return ("off", "on")[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _celsius_in_order(self) -> ServeConfig:
        if not self.resume_celsius < self.hold_celsius < self.cut_celsius:
            raise ValueError(
                f"resume_celsius={self.resume_celsius:g} must lie below "
                f"hold_celsius={self.hold_celsius:g}, and that below "
                f"cut_celsius={self.cut_celsius:g}"
            )
        return self

    def resolved(self) -> ServeConfig:
        """The same with every "choose" that needs no device filled in."""
        model = self.model or str(EMBEDDED_MODEL)
        changes: dict[str, Any] = {"model": model}
        if not self.model and "ranks" not in self.model_fields_set:
            changes["ranks"] = EMBEDDED_RANKS
        changes["dtype"] = self.dtype or default_dtype(self.device, model)
        changes["mtp"] = default_drafts(model) if self.mtp is None else self.mtp
        changes["pin_cpus"] = self.device != "cpu" if self.pin_cpus is None else self.pin_cpus
        changes["model_name"] = self.model_name or Path(model).resolve().name
        return self.model_copy(update=changes)

    def engine(self) -> EngineConfig:
        """The part that ranks run with, resolved."""
        full = self.resolved()
        names = {field.name for field in fields(EngineConfig)} & set(type(full).model_fields)
        return EngineConfig(model_dir=full.model, **{name: getattr(full, name) for name in names})

    @property
    def config_hash(self) -> str:
        """Names the resolved configuration in the start log, `/status` and metrics."""
        text = json.dumps(self.resolved().model_dump(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_config(
    path: str | None = None, overrides: Mapping[str, object] | None = None
) -> ServeConfig:
    """Read a YAML file (or nothing) and put `overrides` above it.

    Raises ConfigError in one line for a file that can't be read, an unknown key (with the nearest
    known one) and a value out of bounds.
    """
    values = _read(path) if path else {}
    _refuse_unknown(values, path or "flags")
    values |= overrides or {}
    try:
        return ServeConfig.model_validate(values).resolved()
    except ValidationError as error:
        raise ConfigError(_first_line(error.errors(), path or "flags")) from error


def _read(path: str) -> dict[str, Any]:
    try:
        require_regular(path)
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"can't read config file {path}: {reason}; check --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"can't read config file {path}: {error}; check --config") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {reason}; correct it") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, found a {type(found).__name__}")
    return {str(key): value for key, value in found.items()}


def _refuse_unknown(keys: Iterable[str], source: str) -> None:
    known = list(ServeConfig.model_fields)
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {key!r}; {hint}")


def _first_line(errors: list[ErrorDetails], source: str) -> str:
    first = errors[0]
    if not first["loc"]:  # between keys: the message names them
        return f"{source}: {first['msg'].removeprefix('Value error, ')}"
    key = ".".join(map(str, first["loc"]))
    return f"{source}: {key} = {first['input']!r}: {first['msg']}"
