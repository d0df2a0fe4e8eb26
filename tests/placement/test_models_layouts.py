"""Low-bit checkpoints recognised from headers: each layout, its scales, and each way it breaks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from placement.errors import CheckpointError
from placement.formats import FORMATS
from placement.headers import DTYPE_BITS, CheckpointHeaders, TensorHeader
from placement.models.claims import Claim
from placement.models.layouts import LayoutFinder
from placement.models.qwen4_exp import build_spec
from placement.models.registry import require_runnable, spec_from_config
from placement.partition import make_shares
from placement.reads import plan_reads
from placement.spec import Component, ModelSpec

MakeHeaders = Callable[..., CheckpointHeaders]
Parts = Mapping[str, tuple[str, tuple[int, ...]]]  # suffix -> dtype, shape
EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
FILE = "/synthetic/model.safetensors"


def fp8_block(n: int, k: int) -> Parts:
    return {
        ".weight": ("F8_E4M3", (n, k)),
        ".weight_scale_inv": ("BF16", (-(-n // 128), -(-k // 128))),
    }


def fp8_channel(n: int, k: int) -> Parts:
    return {".weight": ("F8_E4M3", (n, k)), ".weight_scale": ("F32", (n, 1))}


def mxfp8(n: int, k: int) -> Parts:
    return {".weight": ("F8_E4M3", (n, k)), ".weight_scale": ("U8", (n, k // 32))}


def w8_asym(n: int, k: int) -> Parts:
    return {
        ".weight": ("I8", (n, k)), ".weight_scale": ("F32", (n, 1)),
        ".weight_offset": ("F32", (n, 1)),
    }  # fmt: skip


def w8_sym(n: int, k: int) -> Parts:
    return {".weight": ("I8", (n, k)), ".weight_scale": ("F32", (n, 1))}


def w4_nibbles(n: int, k: int) -> Parts:
    return {
        ".weight": ("I8", (n, k // 2)), ".weight_scale": ("F16", (n, k // 32)),
        ".weight_offset": ("I8", (n, k // 32)),
    }  # fmt: skip


def w4_packed(n: int, k: int) -> Parts:
    return {
        ".weight_packed": ("I32", (n, k // 8)), ".weight_scale": ("BF16", (n, k // 32)),
        ".weight_shape": ("I64", (2,)),
    }  # fmt: skip


def w4_packed_asym(n: int, k: int) -> Parts:
    return {**w4_packed(n, k), ".weight_zero_point": ("I32", (-(-n // 8), k // 32))}


def nvfp4_modelopt(n: int, k: int) -> Parts:
    return {
        ".weight": ("U8", (n, k // 2)), ".weight_scale": ("F8_E4M3", (n, k // 16)),
        ".weight_scale_2": ("F32", ()), ".input_scale": ("F32", ()),
    }  # fmt: skip


def nvfp4_packed(n: int, k: int) -> Parts:
    return {
        ".weight_packed": ("U8", (n, k // 2)), ".weight_scale": ("F8_E4M3", (n, k // 16)),
        ".weight_global_scale": ("F32", (1,)), ".input_global_scale": ("F32", (1,)),
    }  # fmt: skip


def mxfp4_packed(n: int, k: int) -> Parts:
    return {".weight_packed": ("U8", (n, k // 2)), ".weight_scale": ("U8", (n, k // 32))}


def codes4(n: int, k: int) -> Parts:
    return {"_codes": ("U8", (n, k // 2)), "_scale": ("F32", (n // 32, k // 32))}


def codes2(n: int, k: int) -> Parts:
    return {"_codes": ("U8", (n, k // 4)), "_scale": ("F32", (n // 32, k // 32))}


LAYOUTS: list[tuple[Callable[[int, int], Parts], str]] = [
    (fp8_block, "fp8_block128"), (fp8_channel, "fp8_channel"), (mxfp8, "mxfp8"),
    (w8_asym, "w8"), (w8_sym, "w8_sym"), (w4_nibbles, "w4g32_asym"), (w4_packed, "w4g32"),
    (w4_packed_asym, "w4g32_asym"), (nvfp4_modelopt, "nvfp4"), (nvfp4_packed, "nvfp4"),
    (mxfp4_packed, "mxfp4"), (codes4, "w4b32"), (codes2, "w2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def quantised(
    tiny_config: dict[str, Any], make_headers: MakeHeaders
) -> Callable[[Callable[[int, int], Parts]], CheckpointHeaders]:
    """Headers of the embedded geometry with all expert matrices in a layout."""
    plain = make_headers(tiny_config, per_expert=True, shards=4)

    def make(layout: Callable[[int, int], Parts]) -> CheckpointHeaders:
        tensors: dict[str, TensorHeader] = {}
        at = 0
        for name, header in plain.tensors.items():
            entries: Parts = {name: (header.dtype, header.shape)}
            if EXPERT.search(name):
                stem = name.removesuffix(".weight")
                parts = layout(*header.shape)
                entries = {stem + suffix: part for suffix, part in parts.items()}
            for key, (dtype, shape) in entries.items():
                nbytes = prod(shape) * DTYPE_BITS[dtype] // 8
                tensors[key] = TensorHeader(FILE, dtype, shape, at, nbytes)
                at += nbytes
        return replace(plain, tensors=tensors)

    return make


def experts_of(spec: ModelSpec) -> list[Any]:
    return [t for t in (*spec.tensors, *spec.draft_tensors) if t.expert_layer >= 0]


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_layout_is_recognised_and_every_byte_accounted_for(
    quantised: Any, tiny_config: dict[str, Any], layout: Any, name: str, ranks: int
) -> None:
    headers = quantised(layout)
    spec = build_spec("t", tiny_config, None, headers)
    assert {t.format.name for t in experts_of(spec)} == {name}
    assert spec.formats() == (name,)
    if name == "mxfp8":
        with pytest.raises(CheckpointError, match=f"is stored as {name}"):
            require_runnable(spec)
    else:
        require_runnable(spec)
    tensors = [*spec.tensors, *spec.draft_tensors]
    scales = [*spec.scale_tensors, *spec.draft_scale_tensors]
    ignored = sum(headers.tensors[one].nbytes for one in spec.ignored_tensors)
    claimed = {piece.name for t in (*tensors, *scales) for piece in t.pieces}
    assert claimed | set(spec.ignored_tensors) == set(headers.tensors)
    assert all(t.component in (Component.SCALES, Component.MTP) for t in scales)
    shares = make_shares(spec, ranks)
    experts = experts_of(spec)
    read = [plan_reads([*experts, *scales], share, headers) for share in shares]
    on_disk = sum(
        headers.tensors[piece.name].nbytes for t in (*experts, *scales) for piece in t.pieces
    )
    assert sum(one.nbytes for part in read for one in part) == on_disk
    planned = sum(t.payload_bytes(t.shape) + t.scale_bytes(t.shape) for t in experts)
    packed_zeros = layout is w4_packed_asym  # four bits on disk, a byte each in memory
    assert planned == on_disk or packed_zeros
    assert (ignored > 0) == any(layout(64, 64).keys() & {".weight_shape", ".input_scale",
                                                         ".input_global_scale"})  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_read_whole_experts_of_packed_codes(
    quantised: Any, tiny_config: dict[str, Any], ranks: int
) -> None:
    headers = quantised(w4_packed)
    spec = build_spec("t", tiny_config, None, headers)
    gate_up = next(t for t in spec.tensors if t.role == "layers.2.channel.experts_gate_up")
    for share in make_shares(spec, ranks):
        (reads,) = plan_reads([gate_up], share, headers)
        owned = len(share.experts[2])
        assert reads.disk_dtype == "I32"
        assert reads.local_shape == (owned, 128, 192 // 8)
        assert reads.nbytes == gate_up.payload_bytes((owned, 128, 192))


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_each_missing_part_is_named(
    quantised: Any, tiny_config: dict[str, Any], layout: Any, name: str
) -> None:
    """A zero point may be absent by design; without any other part the matrix means nothing."""
    headers = quantised(layout)
    stem = "model.layers.5.mlp.experts.7.up_proj"
    for suffix in layout(64, 192):
        if suffix in (".input_scale", ".input_global_scale"):
            continue
        tensors = {n: h for n, h in headers.tensors.items() if n != stem + suffix}
        with pytest.raises(CheckpointError) as caught:
            build_spec("t", tiny_config, None, replace(headers, tensors=tensors))
        assert stem in str(caught.value), suffix
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_each_misshapen_part_is_named_with_its_file(
    quantised: Any, tiny_config: dict[str, Any], layout: Any, name: str, change: str
) -> None:
    headers = quantised(layout)
    stem = "model.layers.0.mlp.experts.3.down_proj"
    for suffix in layout(64, 192):
        if suffix in (".input_scale", ".input_global_scale"):
            continue
        header = headers.tensors[stem + suffix]
        wrong = (
            replace(header, dtype="F64")
            if change == "dtype"
            else replace(header, shape=(*header.shape, 3))
        )
        tensors = {**headers.tensors, stem + suffix: wrong}
        with pytest.raises(CheckpointError) as caught:
            build_spec("t", tiny_config, None, replace(headers, tensors=tensors))
        assert stem in str(caught.value), suffix
        assert FILE in str(caught.value)


def test_two_formats_in_one_bank_are_refused(quantised: Any, tiny_config: dict[str, Any]) -> None:
    headers = quantised(w8_sym)
    other = quantised(fp8_channel)
    stem = "model.layers.4.mlp.experts.9.gate_proj"
    mixed = {**headers.tensors, stem + ".weight": other.tensors[stem + ".weight"]}
    with pytest.raises(CheckpointError, match=rf"{stem}.weight is fp8_channel.*w8_sym"):
        build_spec("t", tiny_config, None, replace(headers, tensors=mixed))
    plain = replace(headers.tensors[stem + ".weight"], dtype="BF16")
    mixed = {**headers.tensors, stem + ".weight": plain}
    with pytest.raises(CheckpointError, match=rf"{stem}.weight is plain.*w8_sym"):
        build_spec("t", tiny_config, None, replace(headers, tensors=mixed))


def test_what_config_claims_does_not_count(quantised: Any, tiny_config: dict[str, Any]) -> None:
    """A converted checkpoint whose config is still that of its FP8 original."""
    claims = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    spec = build_spec("t", {**tiny_config, "quantization_config": claims}, None, quantised(codes2))
    assert spec.formats() == ("w2",)
    assert spec.remarks == ("config.json claims quantisation fp8, tensors are w2",)
    silent = build_spec("t", tiny_config, None, quantised(codes2))
    assert silent.remarks == ("config.json names no quantisation, tensors are w2",)
    fp8 = build_spec("t", {**tiny_config, "quantization_config": claims}, None,
                     quantised(fp8_block))  # fmt: skip
    assert fp8.remarks == ()


def group(bits: int, size: int | None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": size, "symmetric": symmetric, "type": "int", **more}
    return {"targets": ["Linear"], "weights": weights}


def compressed(*groups: Any) -> dict[str, Any]:
    named = {f"group_{index}": one for index, one in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named}


FLOAT4 = {"type": "float", "strategy": "tensor_group"}
CLAIMS: list[tuple[Callable[[int, int], Parts], Any, list[str]]] = [
    (w4_packed, compressed(group(4, 32)), []),
    (w4_packed, compressed(group(4, 32), {"weights": None}), []),
    (w4_packed, compressed(group(4, 128)), [
        "config.json claims 4-bit int groups of 128 symmetric, but tensors are w4g32, which counts",
        "claims 4-bit int groups of 128 symmetric, which no tensor is; tensors are w4g32",
    ]),
    (w4_packed, compressed(group(4, 32, symmetric=False)), ["with zero points, but", "which no"]),
    (w4_packed_asym, compressed(group(4, 32)), ["but tensors are w4g32_asym", "which no tensor"]),
    (w4_packed_asym, compressed(group(4, 32, symmetric=False)), []),
    (w4_packed, compressed(group(8, 32)), ["claims 8-bit int groups of 32", "which no tensor"]),
    (w4_packed, compressed(group(4, 32), group(8, None, strategy="channel")), [
        "claims 8-bit int a scale a row symmetric, which no tensor is; tensors are w4g32",
    ]),
    (w4_packed, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, [
        "claims 4-bit groups of 128 symmetric, but tensors are w4g32", "which no tensor is",
    ]),
    (w4_packed, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, []),
    (w4_packed, {"quant_method": "fbgemm_fp8"}, ["claims quantisation fbgemm_fp8, tensors are w4"]),
    (w8_sym, compressed(group(8, None, strategy="channel")), []),
    (w8_sym, compressed(group(8, -1)), []),
    (w8_sym, compressed(group(8, 64)), ["8-bit int groups of 64", "which no tensor"]),
    (nvfp4_packed, compressed(group(4, 16, **FLOAT4)), []),
    (nvfp4_packed, compressed(group(4, 16)), ["4-bit int groups of 16", "which no tensor"]),
    (mxfp4_packed, compressed(group(4, 16, **FLOAT4)), ["groups of 16", "which no tensor"]),
    (codes2, compressed(group(2, 32, block_structure=[32, 32])), []),
    (w4_packed, compressed("x"), ["has groups of formats that can't be read, tensors are w4g32"]),
    (w4_packed, compressed(group("4", 32)), ["has groups of formats that can't be read"]),
    (w4_packed, {"quant_method": "compressed-tensors", "config_groups": [1]}, ["can't be read"]),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "claims", "expected"), CLAIMS)
def test_what_config_claims_of_bits_groups_and_zero_points_is_compared(
    quantised: Any, tiny_config: dict[str, Any], layout: Any, claims: Any, expected: list[str]
) -> None:
    config = {**tiny_config, "quantization_config": claims}
    remarks = build_spec("t", config, None, quantised(layout)).remarks
    assert len(remarks) == len(expected), remarks
    for remark, part in zip(remarks, expected, strict=True):
        assert part in remark


def test_a_group_as_long_as_a_row_is_a_scale_a_row() -> None:
    form = FORMATS["w4g128"]
    assert Claim(4, 0).fits(form, frozenset({128}))
    assert Claim(4, 128).fits(form, frozenset({128, 256}))
    assert not Claim(4, 0).fits(form, frozenset({128, 256}))


@pytest.mark.parametrize("excluded", ["lm_head", [1], {"a": 1}, ["re:("]])
def test_exclusions_that_are_no_names_are_refused(
    tiny_config: dict[str, Any], excluded: Any
) -> None:
    claims = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    claims["modules_to_not_convert"] = excluded
    with pytest.raises(CheckpointError, match=r"modules_to_not_convert: .*; repair it") as caught:
        build_spec("t", {**tiny_config, "quantization_config": claims}, None, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", [mxfp4_packed, nvfp4_packed, nvfp4_modelopt, w4_nibbles])
def test_an_odd_number_of_columns_leaves_no_whole_bytes(layout: Any) -> None:
    """The last value of each row would be dropped."""
    entries = layout(64, 33) | {".weight_scale": (layout(64, 33)[".weight_scale"][0], (64, 3))}
    headers = CheckpointHeaders("m", {
        "m" + suffix: TensorHeader(FILE, dtype, shape, 0, 0)
        for suffix, (dtype, shape) in entries.items()
    }, 0)  # fmt: skip
    with pytest.raises(CheckpointError, match="33 columns of 4 bits don't fill whole bytes"):
        LayoutFinder(headers).find("m.weight", (64, 33))


def as_fp8_table(headers: CheckpointHeaders, scale: bool = True) -> CheckpointHeaders:
    tensors = {
        name: replace(header, dtype="F8_E4M3", nbytes=header.nbytes // 2)
        if ".ngram_embedding.shard_" in name
        else header
        for name, header in headers.tensors.items()
    }
    if scale:
        name = "model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale"
        tensors[name] = TensorHeader(FILE, "BF16", (1,), 0, 2)
    return replace(headers, tensors=tensors)


def test_a_table_under_one_scale(tiny_config: dict[str, Any], make_headers: MakeHeaders) -> None:
    headers = as_fp8_table(make_headers(tiny_config, per_expert=True, shards=4))
    spec = build_spec("t", tiny_config, None, headers)
    table = next(t for t in spec.tensors if t.component is Component.NGRAM_TABLE)
    assert table.format is not None
    assert table.format.name == "fp8_tensor"
    assert table.scale_bytes((7, 16)) == 2
    (scale,) = spec.scale_tensors
    for share in make_shares(spec, 2):
        rows, one = plan_reads([table, scale], share, headers)
        assert rows.nbytes == prod(rows.local_shape)
        assert one.nbytes == 2
    with pytest.raises(CheckpointError, match=r"ngram_embedding\.weight_scale is missing"):
        build_spec(
            "t", tiny_config, None,
            as_fp8_table(make_headers(tiny_config, per_expert=True, shards=4), scale=False),
        )  # fmt: skip


def test_a_header_that_says_the_other_16_bit_type_is_refused(
    tiny_config: dict[str, Any], make_headers: MakeHeaders
) -> None:
    headers = make_headers(tiny_config, per_expert=True, shards=4)
    name = "model.layers.3.self_attn.k_proj.weight"
    flipped = {**headers.tensors, name: replace(headers.tensors[name], dtype="F16")}
    with pytest.raises(CheckpointError, match=rf"{FILE}: {name} has dtype F16.*are BF16"):
        build_spec("t", tiny_config, None, replace(headers, tensors=flipped))


def test_inner_widths_are_dealt_out_in_whole_blocks(config_path: Callable[[str], str]) -> None:
    """512 shared columns in blocks of 128 over 6 ranks: four ranks have a block, two none."""
    spec = spec_from_config(config_path("Qwen3.6-35B-A3B-FP8"))
    shares = make_shares(spec, 6)
    ranges = [share.ranges["shared_ffn"] for share in shares]
    assert ranges == [(0, 1), (1, 2), (2, 3), (3, 4), (0, 0), (0, 0)]
    down = next(t for t in spec.tensors if t.role == "layers.0.channel.shared_down")
    scale = next(t for t in spec.scale_tensors if t.role == "layers.0.channel.shared_down.scale")
    assert [segment.block for segment in down.split.segments] == [128]
    assert [segment.block for segment in scale.split.segments] == [1]
