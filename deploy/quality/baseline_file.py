"""Baselines: what a model answered to the smoke set when it was known to be good.

A JSON file bound to the model's architecture, its tokenizer and the smoke set; those of others are
refused. Weights, dtype and formats may differ: comparing them is what a baseline is for.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.defaults import EMBEDDED_MODEL
from deploy.quality.measured import Measured
from deploy.quality.smoke_set import SmokeSet
from deploy.version import code_revision
from placement.config import EngineConfig
from placement.errors import ConfigError, NrankError
from placement.headers import require_regular
from placement.spec import ModelSpec
from placement.whole_file import write_whole

VERSION = 1
EMBEDDED_BASELINE = Path(__file__).parent / "embedded.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class BaselineFailure(NrankError):
    """A baseline that can't be written (exit code 1); what stood there before still does."""


@dataclass(frozen=True)
class Origin:
    """What answered. The first three make a baseline another model's when they differ."""

    architecture: str  # hash of kinds and sizes of all layers
    tokenizer: str  # hash of its files
    smoke_set: str  # hash of all prompts
    model: str
    dtype: str
    formats: tuple[str, ...]  # low-bit ones of the weights
    ranks: int
    revision: str

    def differences(self, base: Origin) -> list[str]:
        """Why `base` is none of this model's."""
        names = ("architecture", "tokenizer", "smoke_set")
        return [
            f"{name.replace('_', ' ')} {getattr(base, name)} is not {getattr(self, name)}"
            for name in names
            if getattr(self, name) != getattr(base, name)
        ]

    def tolerance(self, base: Origin) -> str:
        """Name of what may differ from `base`."""
        if self.formats != base.formats:
            return "low-bit"
        return "exact" if self.dtype == base.dtype else "half"

    def words(self) -> str:
        return f"{self.model}, {self.dtype}{''.join(f' + {name}' for name in self.formats)}"


@dataclass(frozen=True)
class Baseline:
    origin: Origin
    measured: Measured


def origin_of(config: EngineConfig, spec: ModelSpec, smoke: SmokeSet) -> Origin:
    layers = [spec.family, repr(spec.layers), repr(spec.residual), spec.vocab, spec.hidden]
    return Origin(
        _short(json.dumps(layers).encode()), _tokenizer_hash(Path(config.model_dir)), smoke.sha256,
        spec.name, config.dtype, spec.formats(), config.ranks, code_revision(),
    )  # fmt: skip


def baseline_path(given: str | None, model_dir: str) -> Path | None:
    """The given one, or the embedded model's own; None where there is none."""
    if given is not None:
        return Path(given)
    is_embedded = Path(model_dir).resolve() == EMBEDDED_MODEL.resolve()
    return EMBEDDED_BASELINE if is_embedded else None


def load_baseline(path: Path) -> Baseline:
    """Of whatever model. ConfigError, in one line, for a file that is none."""
    try:
        require_regular(str(path))
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ConfigError(
                f"{path} is a baseline of version {found['version']}, this nrank reads {VERSION}; "
                f"write a new one with --write-baseline"
            )
        origin = Origin(**{**found["origin"], "formats": tuple(found["origin"]["formats"])})
        measured = Measured.from_json(found["measured"])
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; check --baseline") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no baseline ({type(error).__name__}: {error}); write one with "
            f"--write-baseline"
        ) from None
    return Baseline(origin, measured)


def read_baseline(path: Path, now: Origin, smoke: SmokeSet) -> Baseline:
    """ConfigError, in one line, for a file that is none or of another model."""
    base = load_baseline(path)
    if changes := now.differences(base.origin):
        raise ConfigError(
            f"{path} is the baseline of another model or set ({base.origin.words()}): "
            f"{'; '.join(changes)}; give this model's own, or write it with --write-baseline"
        )
    if base.measured.counts != smoke.counts:
        raise ConfigError(
            f"{path} is no baseline: it has {base.measured.counts} answers and positions where the "
            f"smoke set has {smoke.counts}; write one with --write-baseline"
        )
    return base


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Whole or not at all."""
    try:
        write_whole(path, baseline_text(baseline))
    except OSError as error:
        raise BaselineFailure(
            f"{path} can't be written: {error.strerror}; choose another --write-baseline"
        ) from None


def baseline_text(baseline: Baseline) -> str:
    """JSON with one answer or position a line."""
    whole: dict[str, Any] = {"version": VERSION, "origin": asdict(baseline.origin)}
    head = json.dumps(whole, indent=1)[:-2]
    parts = [
        f'  "{name}": [\n   ' + ",\n   ".join(json.dumps(item) for item in items) + "\n  ]"
        for name, items in baseline.measured.to_json().items()
    ]
    return f'{head},\n "measured": {{\n' + ",\n".join(parts) + "\n }\n}\n"


def _tokenizer_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
