"""Probes of small models, and the models that they need."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.cli import make_parser
from deploy.probe_command import probe
from rank_worker.layer_tap import TappedRank

PROMPT_IDS = ",".join(str(37 * i % 500) for i in range(60))
Probe = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="session")
def production_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 4 layers with 16 key and 48 value heads of 128, as the large one has."""
    file = Path(__file__).parents[2] / "golden" / "tiny_checkpoint.py"
    spec = spec_from_file_location("tiny_checkpoint", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)  # one of its own, since its constants are changed
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "tiny_checkpoint", module)
        spec.loader.exec_module(module)
    module.KEY_HEADS, module.VALUE_HEADS, module.LINEAR_DIM = 16, 48, 128
    variant = module.Variant(layers=4)
    written: Path = module.write(variant, tmp_path_factory.mktemp("heads") / "model")
    return written


@pytest.fixture
def loud_expert(random_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """loud_expert(layer, expert, factor): a copy whose expert's output is so much larger."""

    def make(layer: int, expert: int, factor: float) -> Path:
        folder = copytree(random_checkpoint(layers=4), tmp_path / "loud")
        name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        file = folder / weight_map[name]
        tensors = load_file(file)
        tensors[name] = tensors[name] * factor
        save_file(tensors, file)
        return folder

    return make


@pytest.fixture
def probed(capsys: pytest.CaptureFixture[str]) -> Probe:
    """probed(folder, ranks, fault, **its options): exit code and JSON of `nrank probe`."""

    def run(
        folder: Path, ranks: int, fault: type[TappedRank] = TappedRank, flags: tuple[str, ...] = (),
        **options: Any,
    ) -> tuple[int, dict[str, Any]]:  # fmt: skip
        torch.set_num_threads(1)
        line = ["probe", "--model", str(folder), "--ranks", str(ranks), "--json", *flags]
        arguments = make_parser().parse_args([*line, "--prompt-ids", PROMPT_IDS])
        code = probe(arguments, partial(fault, **options))
        return code, json.loads(capsys.readouterr().out)

    return run
