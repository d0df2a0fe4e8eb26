"""Low-bit checkpoints of the random family, each beside a twin that stores the same values plain.

Weights are those of `tiny_checkpoint` at a width of 128, so that blocks of 128 exist. What a
recipe doesn't name stays in float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ops.lowbit.pack import Writer, quantise, quantise_table, stored
from ops.lowbit.packed import dequantised
from placement import formats
from placement.formats import WeightFormat

WIDTH = 128
EXPERTS = r"\.experts\.\d+\.(gate|up|down)_proj\.weight$"
DENSE = (
    r"(in_proj_(qkv|z)|out_proj|self_attn\.[qkvo]_proj|index_qk_proj"
    r"|shared_expert\.(gate|up|down)_proj|lm_head|mtp\.fc_(embedding|hidden))\.weight$"
)
TABLE = r"\.ngram_embedding\.shard_(\d+)\.weight$"


@dataclass(frozen=True)
class Recipe:
    """Which matrices are packed and how: the first pattern that a name has counts."""

    rules: tuple[tuple[str, WeightFormat, Writer], ...]
    fp8_table: bool = False


def _layers(numbers: str) -> str:
    return rf"(^mtp\.|layers\.[{numbers}]\..*){EXPERTS}"


C, F = Writer.COMPRESSED, formats
RECIPES: dict[str, Recipe] = {
    "w4g128": Recipe(((EXPERTS, F.W4G128, C),)),
    "w4g32": Recipe(((EXPERTS, F.W4G32, C),)),
    "w4g32-asym": Recipe(((EXPERTS, F.W4G32_ASYM, C),)),
    "w4g128-asym": Recipe(((EXPERTS, F.W4G128_ASYM, C),)),
    "nibbles": Recipe(((EXPERTS, F.W4G128_ASYM, Writer.NIBBLES),)),
    "fp8": Recipe(((EXPERTS, F.FP8_BLOCK128, Writer.BLOCKS),), fp8_table=True),
    "w8": Recipe(((EXPERTS, F.W8_SYM, C), (DENSE, F.W8_SYM, C))),
    "w8-offset": Recipe(((EXPERTS, F.W8, C), (DENSE, F.W8, C))),
    "nvfp4": Recipe(((EXPERTS, F.NVFP4, Writer.MODELOPT),)),
    "nvfp4-packed": Recipe(((EXPERTS, F.NVFP4, C),)),
    "mxfp4": Recipe(((EXPERTS, F.MXFP4, C),)),
    "w4-w2": Recipe(((_layers("01"), F.W4B32, Writer.CODES), (_layers("23"), F.W2, Writer.CODES))),
    "w4-w8-dense": Recipe(((EXPERTS, F.W4G32, C), (DENSE, F.W8_SYM, C))),
    "w4-dense": Recipe(((EXPERTS, F.W4G32, C), (DENSE, F.W4G32_ASYM, C))),
}


@dataclass(frozen=True)
class Pair:
    """Two model directories."""

    packed: Path
    twin: Path


def write(tiny: Any, name: str, folder: Path, layers: int = 4, mtp: bool = True) -> Pair:
    """The checkpoint of a recipe and its twin. `tiny`: the module `tiny_checkpoint`, which keeps
    its own widths."""
    widths = tiny.HIDDEN, tiny.EXPERT_DIM
    tiny.HIDDEN = tiny.EXPERT_DIM = WIDTH
    try:
        variant = tiny.Variant(layers=layers, mtp=mtp)
        config, named = tiny.config(variant), list(_named(tiny, variant))
    finally:
        tiny.HIDDEN, tiny.EXPERT_DIM = widths
    packed: dict[str, Tensor] = {}
    twin: dict[str, Tensor] = {}
    for key, value in named:
        packed |= _pack(RECIPES[name], key, value, twin)
    if RECIPES[name].fp8_table:
        _pack_table(packed, twin)
    for part, tensors in (("packed", packed), ("twin", twin)):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(config))
        save_file({k: t.contiguous() for k, t in tensors.items()}, folder / part / "m.safetensors")
    return Pair(folder / "packed", folder / "twin")


def _named(tiny: Any, variant: Any) -> Iterator[tuple[str, Tensor]]:
    for key, value in tiny.tensors(variant).items():
        yield from tiny._on_disk(variant, key, value)


def _pack(recipe: Recipe, key: str, value: Tensor, twin: dict[str, Tensor]) -> dict[str, Tensor]:
    rule = next((rule for rule in recipe.rules if re.search(rule[0], key)), None)
    if rule is None:
        twin[key] = value
        return {key: value}
    _, form, writer = rule
    matrix = quantise(value, form)
    twin[key] = dequantised(matrix)
    return stored(key.removesuffix(".weight"), matrix, writer)


def _pack_table(packed: dict[str, Tensor], twin: dict[str, Tensor]) -> None:
    """All shards under one scale, which is named after the table."""
    names = [name for name in packed if re.search(TABLE, name)]
    codes, scale = quantise_table(torch.cat([packed[name] for name in names]))
    sizes = [packed[name].shape[0] for name in names]
    for name, part in zip(names, codes.split(sizes), strict=True):
        packed[name], twin[name] = part, part.float() * scale
    packed[re.sub(TABLE, ".ngram_embedding.weight_scale", names[0])] = scale
