"""Bytes of low-bit formats, against sums written out and public sizes."""

from __future__ import annotations

from math import prod

import pytest

from placement.errors import ConfigError
from placement.formats import FORMATS, FP8_TENSOR, W8, WeightFormat, parse_format

GIB = 1 << 30
# Routed experts of Qwen3.8-Flash-Next: 48 layers of 512 experts, gate over up, and down.
GATE_UP, DOWN = (512, 1280, 2560), (512, 2560, 640)


def expert_bytes(form: WeightFormat) -> int:
    return sum(
        form.payload_bytes(shape) + form.scale_bytes_of(shape, stacked)
        for shape, stacked in ((GATE_UP, 2), (DOWN, 1))
    )


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("bf16", 225.0),
        ("fp8_block128", 112.5),
        ("w8", 113.2),  # F32 scale and F32 offset a row
        ("w4g128", 58.0),
        ("w4g128_asym", 58.9),  # fp16 scale and int8 zero point a group
        ("w4g32", 63.3),
        ("w4g32_asym", 66.8),
        ("nvfp4", 63.3),
    ],
)
def test_experts_of_flash_next(name: str, gib: float) -> None:
    assert round(48 * expert_bytes(FORMATS[name]) / GIB, 1) == gib


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("fp8_block128", 24.0),
        ("w8", 24.1),
        ("w4g128", 12.38),
        ("w4g32", 13.5),
        ("mxfp4", 12.75),
        ("w4b32", 12.09),
        ("w2", 6.09),
    ],
)
def test_one_expert_of_glm(name: str, mib: float) -> None:
    """Gate, up and down of 2048 x 4096: 25,165,824 weights."""
    form = FORMATS[name]
    size = sum(
        form.payload_bytes(shape) + form.scale_bytes_of(shape, stacked)
        for shape, stacked in (((1, 4096, 4096), 2), ((1, 4096, 2048), 1))
    )
    assert round(size / (1 << 20), 1 if mib in (24.0, 24.1, 13.5) else 2) == mib


def test_blocks_at_the_edge_are_whole() -> None:
    """130 x 200 in blocks of 128 x 128 has 2 x 2 scales; 4 bits of 201 columns take 101 bytes."""
    fp8 = FORMATS["fp8"]
    assert fp8.scale_counts((130, 200)) == (2, 2)
    assert fp8.scale_bytes_of((130, 200)) == 16
    assert fp8.payload_bytes((130, 200)) == 26_000
    assert FORMATS["w4g128"].payload_bytes((3, 201)) == 303


def test_stacked_matrices_have_blocks_of_their_own() -> None:
    """Two matrices of 64 rows in one of 128: a block of 128 rows doesn't reach across them."""
    assert FORMATS["fp8"].scale_counts((128, 128), stacked=2) == (2, 1)
    assert FORMATS["fp8"].scale_counts((128, 128), stacked=1) == (1, 1)


def test_scales_of_a_whole_matrix_count_once() -> None:
    nvfp4 = FORMATS["nvfp4"]
    assert nvfp4.scale_bytes_of((3, 8, 32), stacked=2) == 3 * (8 * 2 + 2 * 4)
    assert FP8_TENSOR.scale_bytes_of((1000, 160)) == 4
    assert W8.scale_bytes_of((5, 7)) == 5 * 8


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_nothing_takes_no_bytes_and_parts_add_up(name: str) -> None:
    form = FORMATS[name]
    assert form.scale_bytes_of((0, 1280, 2560), 2) == form.payload_bytes((0, 1280, 2560)) == 0
    parts = [(86, *GATE_UP[1:])] * 2 + [(85, *GATE_UP[1:])] * 4
    assert sum(form.payload_bytes(one) for one in parts) == form.payload_bytes(GATE_UP)
    assert sum(form.scale_bytes_of(one, 2) for one in parts) == form.scale_bytes_of(GATE_UP, 2)
    assert form.payload_bytes(GATE_UP) * 8 == prod(GATE_UP) * form.bits
    assert form.is_plain == (form.scale_bytes_of(GATE_UP, 2) == 0)


def test_format_of_a_range_of_layers() -> None:
    rule = parse_format("w4b32:3-32,w2:33-44")
    assert [rule.of_layer(i).name for i in (3, 32, 33, 44)] == ["w4b32", "w4b32", "w2", "w2"]
    assert rule.name == "w4b32:3-32,w2:33-44"
    with pytest.raises(ConfigError, match="nothing about layer 45"):
        rule.of_layer(45)
    assert parse_format("fp8").of_layer(1000).name == "fp8_block128"
    assert parse_format("w2:7,bf16").of_layer(8).name == "bf16"


@pytest.mark.parametrize("text", ["", "w9", "w2:a-b", "w2:4-3", "w2:1-2-3", "w2 w4g32"])
def test_texts_that_are_no_format(text: str) -> None:
    with pytest.raises(ConfigError, match="format "):
        parse_format(text)
