"""Fixtures of all tests: the embedded model, random checkpoints, golden answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
MARGIN = 2e-4  # two correct float32 implementations may differ where the best two are this close


@dataclass(frozen=True)
class GoldenCase:
    """What the reference answered to one prompt, end tokens ignored."""

    name: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    margins: np.ndarray  # [len(token_ids)] best minus second logit
    logits: dict[int, np.ndarray]  # absolute position -> [vocab]
    largest_logit: float  # absolute, over all positions of prompt and answer

    def comparable(self) -> int:
        """Leading tokens that an implementation must reproduce."""
        close = np.flatnonzero(self.margins < MARGIN)
        return int(close[0]) if len(close) else len(self.token_ids)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Fail unless the ids equal the reference's up to its first too close decision."""
        count = min(self.comparable(), len(token_ids))
        if count < len(self.token_ids):
            print(f"{self.name}: compared {count} of {len(self.token_ids)} ids")
        assert tuple(token_ids[:count]) == self.token_ids[:count], self.name
        assert len(token_ids) <= len(self.token_ids), self.name


@dataclass(frozen=True)
class Golden:
    """All cases of one checkpoint by prompt length."""

    weights_sha256: str
    cases: dict[int, GoldenCase] = field(default_factory=dict)


def _read_golden(name: str) -> Golden:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        meta = json.loads(str(arrays["meta"]))
        cases = {}
        for length in meta["lengths"]:
            part = {k: arrays[f"{length}/{k}"] for k in ("prompt", "ids", "margins", "logits")}
            positions = arrays[f"{length}/positions"].tolist()
            cases[length] = GoldenCase(
                f"{name}/{length}",
                tuple(part["prompt"].tolist()),
                tuple(part["ids"].tolist()),
                part["margins"],
                dict(zip(positions, part["logits"], strict=True)),
                float(arrays[f"{length}/largest"]),
            )
    return Golden(meta["weights_sha256"], cases)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """The machine's cores are shared by ranks and workers: one thread a process."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def embedded_model_dir() -> Path:
    return ROOT / "deploy" / "models" / "tiny-flash-next"


@pytest.fixture(scope="session")
def tiny_checkpoint() -> ModuleType:
    """The generator script of random checkpoints as a module."""
    spec = spec_from_file_location("tiny_checkpoint", GOLDEN / "tiny_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def random_checkpoint(
    tiny_checkpoint: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Factory of model directories, written once a session; keywords as in its Variant.

    layers (4 or 8), experts ("split", "fused"), prefix ("model.", "model.language_model."),
    max_position, mtp.
    """
    made: dict[Any, Path] = {}
    base = tmp_path_factory.mktemp("checkpoints")

    def make(**options: Any) -> Path:
        variant = tiny_checkpoint.Variant(**options)
        if variant not in made:
            made[variant] = tiny_checkpoint.write(variant, base / variant.name)
        return made[variant]

    return make


@pytest.fixture(scope="session")
def golden(tiny_checkpoint: ModuleType) -> Callable[[str], Golden]:
    """Golden answers by name: "embedded", "random-8", "random-4" (the number of layers).

    Fails when the random weights of this machine are not those that the answers belong to.
    """
    read: dict[str, Golden] = {}

    def get(name: str) -> Golden:
        if name not in read:
            found = _read_golden(name)
            if name.startswith("random-"):
                layers = int(name.removeprefix("random-"))
                digest = tiny_checkpoint.digest(tiny_checkpoint.Variant(layers=layers))
                assert digest == found.weights_sha256, (
                    f"{name}: the generated weights have sha256 {digest[:12]}, the golden file "
                    f"belongs to {found.weights_sha256[:12]}; run tests/golden/make_golden.py"
                )
            read[name] = found
        return read[name]

    return get
