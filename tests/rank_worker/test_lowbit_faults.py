"""A damaged low-bit checkpoint is refused in one line that names the tensor, before any step."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deploy.cli import main
from ops.lowbit.pack import Writer
from placement import formats
from placement.config import EngineConfig
from placement.errors import CheckpointError, ConfigError, NrankError
from placement.prepare import prepare
from rank_worker.rank import Rank
from rank_worker.stated_shapes import check_stated_shapes
from tests.golden import lowbit_checkpoint
from tests.golden.lowbit_checkpoint import EXPERTS, WIDTH, Recipe

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]
UP = "model.layers.2.mlp.experts.9.up_proj"
OUT = r"linear_attn\.out_proj\.weight$"
OUT_NAME = "model.layers.0.linear_attn.out_proj.weight"
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight"
DOWN = "model.layers.1.mlp.experts.3.down_proj"


@pytest.fixture(scope="module")
def folder_of(
    tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = lowbit_checkpoint.write(tiny_checkpoint, name, folder, mtp=False).packed
        return made[name]

    return get


@pytest.fixture
def broken(folder_of: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Change], Path]:
    """The checkpoint of a recipe with its tensors changed."""

    def make(name: str, change: Change) -> Path:
        tensors = load_file(folder_of(name) / "m.safetensors")
        change(tensors)
        shutil.copy(folder_of(name) / "config.json", tmp_path)
        save_file(tensors, tmp_path / "m.safetensors")
        return tmp_path

    return make


def refusal(folder: Path, ranks: int = 1, rank: int = 0) -> str:
    """What loading one rank of a gang says, as far as it needs no other rank."""
    config = EngineConfig(str(folder), ranks=ranks, context_tokens=64)
    with pytest.raises(NrankError) as caught:
        Rank(config, rank, ranks).load()
    assert isinstance(caught.value, CheckpointError | ConfigError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(name: str, value: float, *at: int) -> Change:
    """One value of a tensor."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[at[0] if at else 0] = value

    return change


VALUES = [
    (
        "w4g32",
        put(f"{UP}.weight_shape", 64, 1),
        rf"{UP}.weight_shape says \[128, 64\], but .*128\]",
    ),
    ("w4-dense", put(f"{OUT_NAME}_shape", 5), rf"{OUT_NAME}_shape says \[5, 192\], but its matrix"),
    (
        "w4g32",
        put(f"{UP}.weight_scale", float("nan"), 5),
        rf"{UP}.weight_scale: 1 of .* nan at \[1, 1\]",
    ),
    ("w4g32", put(f"{DOWN}.weight_scale", 0.0), r"the first is 0 at \[0, 0\]"),
    ("w4g32", put(f"{DOWN}.weight_scale", -0.5), f"{DOWN}.weight_scale: .*above 0"),
    ("w4g32", put(f"{DOWN}.weight_scale", float("inf")), f"{DOWN}.weight_scale: .*at most 8188"),
    ("w4g32", put(f"{DOWN}.weight_scale", 60000.0), f"{DOWN}.weight_scale: .*at most 8188"),
    ("nibbles", put(f"{UP}.weight_offset", 100, 7), f"{UP}.weight_offset: .*a zero.*up to 16"),
    ("w8-offset", put(f"{UP}.weight_zero_point", float("nan")), f"{UP}.weight_zero_point"),
    ("nvfp4", put(f"{UP}.weight_scale_2", 0.0), f"{UP}.weight_scale_2: .*global scale"),
    ("nvfp4-packed", put(f"{UP}.weight_global_scale", float("nan")), f"{UP}.weight_global_scale"),
    ("nvfp4", put(f"{UP}.weight_scale_2", 1e30), f"{UP}.weight_scale_2: .*at most 24.36"),
    ("nvfp4-packed", put(f"{UP}.weight_global_scale", 1e-45), f"{UP}.weight_global_scale: .*least"),
    ("nvfp4-packed", put(f"{UP}.weight_global_scale", 1e-9), f"{UP}.weight_global_scale: .*least"),
    ("nvfp4", put(f"{UP}.weight_scale", 0.0, 3), f"{UP}.weight_scale: "),
    ("mxfp4", put(f"{UP}.weight_scale", 255, 3), f"{UP}.weight_scale: "),
    ("fp8", put(f"{UP}.weight_scale_inv", 0.0), f"{UP}.weight_scale_inv: "),
    ("fp8", put(f"{UP}.weight", float("nan"), 70), "layers.2.channel.experts_gate_up holds a code"),
    ("fp8", put(TABLE, float("nan"), 3), "layers.1.ngram.table holds a code that is no number"),
    ("fp8", put(TABLE, float("-nan"), 5), "layers.1.ngram.table holds a code that is no number"),
    ("w4-w2", put(f"{UP}_scale", float("nan")), f"{UP}_scale: "),
]


@pytest.mark.parametrize(("name", "change", "message"), VALUES)
def test_a_value_that_can_be_no_scale_is_refused_with_its_tensor(
    broken: Callable[[str, Change], Path], name: str, change: Change, message: str
) -> None:
    assert re.search(message, refusal(broken(name, change)))


def test_only_the_rank_that_owns_an_expert_refuses_it(
    broken: Callable[[str, Change], Path], folder_of: Callable[[str], Path]
) -> None:
    """Expert 9 of 14 is the last rank's of three; its scales are named by what they are on disk."""
    folder = broken("w4g32", put(f"{UP}.weight_scale", float("nan"), 5))
    assert f"{UP}.weight_scale" in refusal(folder, ranks=2, rank=1)


def test_a_shape_of_another_rank_is_not_read(
    broken: Callable[[str, Change], Path],
) -> None:
    """Expert 9 is rank 1's of two."""
    folder = broken("w4g32", put(f"{UP}.weight_shape", 5))
    assert f"{UP}.weight_shape says" in refusal(folder, ranks=2, rank=1)
    prepared = prepare(EngineConfig(str(folder), ranks=2, context_tokens=64))
    shares = [rank.share for rank in prepared.plan.ranks]
    check_stated_shapes(prepared.spec.tensors, shares[0], prepared.headers)


def halve(name: str, dim: int = -1) -> Change:
    def change(tensors: Tensors) -> None:
        part = tensors[name]
        tensors[name] = part.narrow(dim, 0, part.shape[dim] // 2).contiguous()

    return change


def add(name: str, value: Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, value)


def half_plain(name: str) -> Change:
    """This half of a bank, gates or ups, is in floats for all experts of its layer."""

    def change(tensors: Tensors) -> None:
        half = re.compile(re.sub(r"experts\\\.\d+", r"experts\\.\\d+", re.escape(name)) + r"\.")
        for key in [key for key in tensors if half.match(key)]:
            base = key.rpartition(".")[0]
            del tensors[key]
            tensors[base + ".weight"] = torch.zeros(WIDTH, WIDTH)

    return change


GATE, UP_0 = (f"model.layers.2.mlp.experts.0.{part}_proj" for part in ("gate", "up"))
HEADERS = [
    (lambda t: t.pop(f"{UP}.weight_scale"), f"{UP}.weight_scale is missing"),
    (lambda t: t.pop(f"{UP}.weight_packed"), f"1 missing tensors \\({UP}.weight\\)"),
    (lambda t: t.pop(f"{UP}.weight_shape"), f"{UP}.weight_shape is missing"),
    (add(f"{UP}.weight_scale_inv", torch.ones(1, 1)), f"unknown tensors .*{UP}.weight_scale_inv"),
    (add(f"{UP}.weight_g_idx", torch.zeros(128, dtype=torch.int32)), f"{UP}.weight_g_idx orders"),
    (halve(f"{UP}.weight_packed"), rf"{UP}.weight_packed has shape \[128, 8\]"),
    (halve(f"{UP}.weight_packed", 0), rf"{UP}.weight_packed has shape \[64, 16\]"),
    (add(f"{UP}.weight_shape", torch.ones(2)), rf"{UP}.weight_shape is F32 \[2\], but .*I64|I32"),
    (add(f"{UP}.weight_shape", torch.ones(3).long()), rf"{UP}.weight_shape is I64 \[3\], but"),
    (half_plain(UP_0), rf"{UP_0}.weight is plain, but {GATE}.weight_packed is w4g32; both"),
    (half_plain(GATE), rf"{GATE}.weight is plain, but {UP_0}.weight_packed is w4g32; both are"),
    (add(f"{UP}.weight_scale", torch.ones(128, 16).half()), "128 columns have groups of 8"),
    (add(f"{UP}.weight_scale", torch.ones(128, 3).half()), rf"{UP}.weight_scale is F16 \[128, 3\]"),
    (add(f"{UP}.weight_scale", torch.ones(128, 4).half().int()), f"{UP}.weight_scale is I32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HEADERS)
def test_a_tensor_that_is_missing_extra_or_misshapen_is_refused_with_the_headers(
    broken: Callable[[str, Change], Path], change: Change, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        prepare(EngineConfig(str(broken("w4g32", change)), context_tokens=64))
    assert "\n" not in str(caught.value)


OTHERS = [
    ("nvfp4-packed", lambda t: t.pop(f"{UP}.weight_global_scale"), f"{UP}.weight_global_scale is "),
    (
        "w4g32",
        lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].float()}),
        rf"{UP}.weight_packed is w4g32 with scales of 4 bytes, but .* w4g32 with scales of 2 bytes",
    ),
    (
        "w8-offset",
        lambda t: t.update({f"{UP}.weight_zero_point": t[f"{UP}.weight_zero_point"].half()}),
        rf"{UP}.weight is w8 .* zero points of 2, but .* w8 .* zero points of 4; both",
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_an_embedding_that_is_not_plain_is_refused_by_name(
    broken: Callable[[str, Change], Path], dtype: torch.dtype
) -> None:
    def change(tensors: Tensors) -> None:
        name = "model.embed_tokens.weight"
        tensors[name] = tensors[name].to(dtype)
        tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1)

    with pytest.raises(CheckpointError, match=r"can't be run: embed is stored as (fp8|w8)_\w+;"):
        prepare(EngineConfig(str(broken("w4g32", change)), context_tokens=64))


@pytest.mark.parametrize(("name", "change", "message"), OTHERS)
def test_the_part_that_is_missing_or_of_another_width_is_told(
    broken: Callable[[str, Change], Path], name: str, change: Change, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        prepare(EngineConfig(str(broken(name, change)), context_tokens=64))


def test_a_truncated_file_of_codes_is_refused(
    broken: Callable[[str, Change], Path],
) -> None:
    folder = broken("w4g32", lambda tensors: None)
    file = folder / "m.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        prepare(EngineConfig(str(folder), context_tokens=64))


def test_the_command_line_says_it_in_one_line(
    broken: Callable[[str, Change], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = broken("w4g32", put(f"{UP}.weight_scale", 0.0))
    code = main(["generate", "--model", str(folder), "--prompt-ids", "1,2", "--max-tokens", "1",
                 "--context", "64", "--mtp", "0"])  # fmt: skip
    out, err = capfd.readouterr()
    assert code == 2
    lines = [line for line in err.splitlines() if "weight_scale" in line]
    assert len(lines) == 1
    assert UP in lines[0]
    assert "Traceback" not in err
    assert not out.strip()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_group_that_a_split_of_heads_would_cut_is_an_error_of_the_plan(
    tiny_checkpoint: Any, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 16 columns in groups of 128: one rank holds all, two would cut a group in half."""
    rules = tuple((which, formats.W4G128, Writer.COMPRESSED) for which in (OUT, EXPERTS))
    monkeypatch.setitem(lowbit_checkpoint.RECIPES, "w4g128-dense", Recipe(rules))
    monkeypatch.setattr(tiny_checkpoint, "VALUE_HEADS", 8)  # 128 columns of out_proj
    folder = lowbit_checkpoint.write(tiny_checkpoint, "w4g128-dense", tmp_path, mtp=False).packed
    config = EngineConfig(str(folder), ranks=ranks, context_tokens=64)
    if ranks == 1:
        prepare(config)
        return
    owned = r"rank 0 would own columns 0\.\.\d+ of 128 of layers\.0\.mixer\.out"
    with pytest.raises(ConfigError, match=owned) as caught:
        prepare(config)
    assert "isn't a multiple of its blocks of 128" in str(caught.value)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_experts_owned_whole_are_never_cut(folder_of: Callable[[str], Path], ranks: int) -> None:
    plan = prepare(EngineConfig(str(folder_of("w4g128")), ranks=ranks, context_tokens=64)).plan
    assert sum(len(rank.share.experts[0]) for rank in plan.ranks) == 14
