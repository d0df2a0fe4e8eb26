"""Products with low-bit weights of ops/npu: numbers, as played, and steps on pretend chips."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ops.lowbit.convert import without_fp8
from ops.lowbit.pack import quantise, quantise_table
from ops.lowbit.packed import Packed, dequantised
from ops.npu import custom, library, packed
from ops.reference import packed as reference
from ops.registry import OpSet, resolve
from ops.spec import PASSED, REFERENCE, Capability
from placement import formats
from placement.errors import ConfigError
from placement.formats import WeightFormat
from rank_worker.moe import Experts
from tests.golden import lowbit_checkpoint
from tests.npu.played import HALF, PlayedLibrary

FORMS = (
    formats.W4G32, formats.W4G128_ASYM, formats.W4B32, formats.W2, formats.NVFP4, formats.MXFP4,
    formats.W8, formats.W8_SYM, formats.FP8_BLOCK128, formats.FP8_CHANNEL, formats.MXFP8,
)  # fmt: skip
IN_FP16 = 1.5e-3  # in the 2-norm: weights and sums are rounded to fp16
IN_INT8 = 0.03  # one more rounding of weights, of inputs that differ by a rounding of fp16
CHIP = Capability("npu", "Ascend310P3", HALF, (("torch_npu", "2.13.0"),))
by_name = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
EMBEDDED = Path(__file__).parents[2] / "deploy" / "models" / "tiny-flash-next-w4"


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "library", PlayedLibrary)
    torch.manual_seed(3)
    yield
    packed._values_of_bytes.cache_clear()


def pack(form: WeightFormat, *shape: int) -> Packed:
    return without_fp8(quantise(torch.randn(shape) * shape[-1] ** -0.5, form))


def banks(form: WeightFormat, owned: int, hidden: int = 256, inner: int = 128) -> list[Packed]:
    return [pack(form, owned, 2 * inner, hidden), pack(form, owned, hidden, inner)]


def routes(tokens: int, owned: int, others: int, top_k: int, hidden: int = 256) -> list[Tensor]:
    ids = torch.rand(tokens, owned + others).argsort(dim=1)[:, :top_k]
    local = torch.where(ids < owned, ids, -1)
    return [torch.randn(tokens, hidden).half(), torch.rand(tokens, top_k).half(), local]


def close(found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.dtype is HALF
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    error, size = (found.float() - expected.float()).norm(), expected.float().norm()
    assert error <= bound * size, (error, size)


def expected_of(x: Tensor, weights: Tensor, local: Tensor, *rest: Any) -> Tensor:
    return reference.packed_experts(x.float(), weights.float(), local, *rest)


@by_name
@pytest.mark.parametrize("is_int8", [False, True])
def test_experts_of_every_format(form: WeightFormat, is_int8: bool) -> None:
    """Few routes, where the busy experts are found first; and more than there are experts."""
    weights = banks(form, 12)
    for tokens in (1, 2, 9):
        inputs = routes(tokens, 12, 12, 4)
        found = packed.packed_experts(*inputs, *weights, is_int8)
        expected = expected_of(*inputs, *weights, is_int8)
        close(found, expected, IN_INT8 if is_int8 else IN_FP16)


@pytest.mark.parametrize("tokens", [1, 4, 65])
@pytest.mark.parametrize("form", [formats.W4G32, formats.W8_SYM], ids=lambda form: form.name)
def test_512_experts(form: WeightFormat, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All on one rank and the 86 of one of six; 65 tokens name more than are wide at once."""
    monkeypatch.setattr(packed, "WIDENED_BYTES", 200 * 2 * 3 * 32 * 128)
    weights = banks(form, 512, 128, 32)
    for owned in (512, 86):
        own = [replace(b, shape=(owned, *b.shape[1:]), codes=b.codes[:owned],
                       scale=b.scale[:owned]) for b in weights]  # fmt: skip
        inputs = routes(tokens, owned, 512 - owned, 10, 128)
        for is_int8 in (False, True):
            found = packed.packed_experts(*inputs, *own, is_int8)
            close(found, expected_of(*inputs, *own, is_int8), IN_INT8 if is_int8 else IN_FP16)


def test_widths_of_the_169_gib_model() -> None:
    weights, inputs = banks(formats.W4G128_ASYM, 2, 2560, 640), routes(1, 2, 0, 2, 2560)
    for is_int8 in (False, True):
        found = packed.packed_experts(*inputs, *weights, is_int8)
        close(found, expected_of(*inputs, *weights, is_int8), IN_INT8 if is_int8 else IN_FP16)


def test_gate_and_up_have_scales_of_their_own() -> None:
    """Each half was stored apart: blocks of 32 rows and whole scales begin anew."""
    for form in (formats.W4B32, formats.NVFP4):
        gate, up = pack(form, 4, 48, 256), pack(form, 4, 48, 256)
        whole = None if gate.whole is None or up.whole is None else torch.cat(
            (gate.whole, 3 * up.whole), dim=1)  # fmt: skip
        both = replace(
            gate, shape=(4, 96, 256), codes=torch.cat((gate.codes, up.codes), dim=1),
            scale=torch.cat((gate.scale, up.scale), dim=1), whole=whole, stacked=2,
        )  # fmt: skip
        expected = torch.stack([dequantised(both[i]) for i in range(4)])
        close(packed.widened(both, torch.arange(4)), expected, 1e-3)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that was made with three dimensions, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() > 2 and out._base is None:
            self.bytes[out.dtype] = max(self.bytes.get(out.dtype, 0), out.nbytes)
        return out


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("tokens", [2, 40])
def test_no_more_than_so_many_experts_are_wide_at_once(
    is_int8: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, inputs = banks(formats.W4G32, 24), routes(tokens, 24, 0, 8)
    whole = packed.packed_experts(*inputs, *weights, is_int8)
    kind, item = (torch.int8, 1) if is_int8 else (HALF, 2)
    each = item * 2 * 128 * 256  # of the larger bank
    monkeypatch.setattr(packed, "WIDENED_BYTES", 5 * item * 3 * 128 * 256)
    monkeypatch.setattr(packed, "TILE_WEIGHTS", 1)
    with Largest() as seen:
        found = packed.packed_experts(*inputs, *weights, is_int8)
    assert seen.bytes[kind] == 5 * each
    close(found, whole, 2e-3)


def test_only_busy_experts_are_wide() -> None:
    """Two tokens with the same four of 24 experts, and routes to peers: 16 slots, ids in order."""
    local = torch.tensor([[3, 17, -1, 9], [17, -1, 3, 20]])
    experts, places = packed.active(local, 24)
    assert experts[:4].tolist() == [3, 9, 17, 20]
    assert len(experts) == local.numel()
    assert sorted(set(experts.tolist())) == sorted(experts.tolist())
    assert torch.equal(torch.where(local >= 0, experts[places.clamp_min(0)], -1), local)
    every, same = packed.active(local, 8)
    assert torch.equal(every, torch.arange(8))
    assert same is local


@pytest.mark.parametrize("is_int8", [False, True])
def test_routes_that_are_all_peers_give_exact_zeros(is_int8: bool) -> None:
    weights = banks(formats.W4G32, 6)
    x, shares, local = routes(3, 6, 0, 4)
    found = packed.packed_experts(x, shares, torch.full_like(local, -1), *weights, is_int8)
    assert torch.equal(found, torch.zeros(3, 256, dtype=HALF))


def test_widths_that_the_int8_operator_does_not_take_are_refused() -> None:
    weights, inputs = banks(formats.W8_SYM, 4, 256, 20), routes(2, 4, 0, 2)
    message = (
        r"experts of 40 x 256 in w8_sym: int8 products of an Ascend 310P take multiples of 16; "
        "set int8_activations: false"
    )
    with pytest.raises(ConfigError, match=message):
        packed.packed_experts(*inputs, *weights, True)
    close(packed.packed_experts(*inputs, *weights, False),
          expected_of(*inputs, *weights, False), IN_FP16)  # fmt: skip


@by_name
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("rows", [256, 230])
def test_dense_layers(
    form: WeightFormat, rows: int, is_int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and so many rows at a time; 230 are no multiple of 16: rounded inputs in fp16."""
    weight, x = pack(form, rows, 256), torch.randn(2, 3, 256).half()
    expected = reference.packed_linear(x.float(), weight, is_int8)
    bound = IN_INT8 if is_int8 and rows % 16 == 0 else IN_FP16
    close(packed.packed_linear(x, weight, is_int8), expected, bound)
    monkeypatch.setattr(packed, "WIDENED_BYTES", 1)
    weight.views.clear()
    close(packed.packed_linear(x, weight, is_int8), expected, bound)
    assert len(packed._row_parts(weight)) > 1
    assert packed.packed_linear(x[:0], weight, is_int8).shape == (0, 3, rows)


def test_rows_of_a_table() -> None:
    codes, scale = quantise_table(torch.randn(50, 16))
    ids = torch.randint(0, 70, (3, 4))
    for table in (codes.view(torch.uint8), codes.view(torch.uint8)[:0]):
        arguments = (table, scale, ids, 7, HALF)
        assert torch.equal(
            packed.packed_table_rows(*arguments), reference.packed_table_rows(*arguments)
        )


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, HALF, torch.int8]
)
def test_numbers_are_read_through_their_bits(dtype: torch.dtype) -> None:
    numbers = (torch.rand(4, 5) * 3 + 0.5).to(dtype)
    assert torch.equal(packed.floats(numbers), numbers.float())
    chosen = torch.tensor([2, 0])
    assert torch.equal(packed.selected(numbers, chosen).float(), numbers.float()[chosen])


def test_the_registry_takes_them_on_a_310p() -> None:
    taken = {one.op: one.implementation for one in OpSet(CHIP).op_info()}
    for op in ("packed_experts", "packed_linear", "packed_table_rows"):
        assert taken[op] == f"ops.npu.packed.{op}"
    other = resolve("packed_experts", replace(CHIP, soc="Ascend910B3"))
    assert other.implementation.backend == REFERENCE
    assert "are not for Ascend910B3" in other.refused[0][1]


# A library of others, played.


def product(rows: Tensor, codes: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    form = formats.W2 if codes.shape[-1] * 4 == rows.shape[1] else formats.W4B32
    bank = Packed(form, (*codes.shape[:2], rows.shape[1]), codes, scale)
    out, begin = torch.full((len(rows), codes.shape[1]), torch.nan).half(), 0
    for expert, end in enumerate(ends.tolist()):
        out[begin:end] = (rows[begin:end].float() @ dequantised(bank[expert]).t()).half()
        begin = end
    return out


@pytest.fixture
def found_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "vllm_ascend_C.so"
    path.write_bytes(b"of one build")
    monkeypatch.setattr(custom, "operator", lambda path: product)
    monkeypatch.setattr(custom, "_schema", lambda found: custom.SCHEMAS[0])
    return path


def proven(capability: Capability, name: str) -> Capability:
    return replace(capability, versions=(*capability.versions, (f"op:{name}", PASSED)))


def test_a_library_of_others_counts_where_it_was_found_right(found_library: Path) -> None:
    def variant() -> Any:
        return custom.variant_of(found_library, lambda capability: None)

    first = variant()
    assert "run nrank doctor --ops and set ops_file" in first.requires(CHIP)
    assert first.requires(proven(CHIP, first.name)) is None
    found_library.write_bytes(b"of another build")
    second = variant()
    assert second.name != first.name
    assert "run nrank doctor --ops" in second.requires(proven(CHIP, first.name))


def test_another_schema_is_refused(found_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "_schema", lambda found: "_C_ascend::other(Tensor x) -> Tensor")
    variant = custom.variant_of(found_library, lambda capability: None)
    reason = variant.requires(proven(CHIP, variant.name))
    assert reason is not None
    assert "has _C_ascend::other(Tensor x) -> Tensor, known is" in reason


def test_a_file_that_is_no_library_is_told(tmp_path: Path) -> None:
    path = tmp_path / "vllm_ascend_C.so"
    path.write_bytes(b"no library")
    variant = custom.variant_of(path, lambda capability: None)
    assert "vllm_ascend_C.so can't be used" in str(variant.requires(proven(CHIP, variant.name)))


@pytest.mark.parametrize("form", [formats.W4B32, formats.W2, formats.W4G32],
                         ids=lambda form: form.name)  # fmt: skip
def test_a_library_of_others_multiplies_codes_as_they_lie(
    found_library: Path, form: WeightFormat
) -> None:
    variant = custom.variant_of(found_library, lambda capability: None)
    weights, inputs = banks(form, 6), routes(5, 6, 3, 4)
    assert custom.takes(weights[0]) == (form is not formats.W4G32)
    with Largest() as seen:
        found = variant.function(*inputs, *weights, False)
    close(found, expected_of(*inputs, *weights, False), IN_FP16)
    assert (seen.bytes[HALF] > 1 << 19) == (form is formats.W4G32)  # no bank in fp16


# Steps of whole models on pretend chips.


@pytest.fixture(scope="module")
def w8_model(tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lowbit_checkpoint.write(tiny_checkpoint, "w8", tmp_path_factory.mktemp("w8")).packed


@pytest.fixture(scope="module")
def steps(program: Callable[..., Any], w8_model: Path) -> list[dict[str, Any]]:
    cases = [(str(EMBEDDED), False), (str(EMBEDDED), True), (str(w8_model), True)]
    told: list[dict[str, Any]] = program(
        str(Path(__file__).with_name("lowbit_steps.py")), json.dumps(cases)
    )
    return told


def test_steps_of_packed_models_cost_what_others_do(steps: list[dict[str, Any]]) -> None:
    """Nothing is allocated, read back or refused; a recorded step is one launch."""
    for told in steps:
        assert "error" not in told, told
        assert told["prefill"]["counts"]["refused_tensors"] == 0
        for step in told["steps"][1:]:
            counts = step["counts"]
            assert counts["malloc_bytes"] == step["kept_bytes"] == counts["refused_tensors"] == 0
            assert (counts["d2h_calls"], counts["stream_syncs"]) == (1, 1)
        assert told["refused"] == ""
        assert told["recorded"]["counts"]["replays"] == 1


def test_experts_go_through_the_grouped_products(steps: list[dict[str, Any]]) -> None:
    """W4 in fp16 and in int8, W8 as it is: no expert of it is widened or copied."""
    names = ("aclnnQuantGroupedMatmulDequant", "aclnnGroupedMatmulV5", "aclnnFloor")
    used = [{name for name in names if name in told["steps"][1]["trace"]} for told in steps]
    grouped, plain, taken_apart = names
    assert used == [{plain, taken_apart}, {grouped, taken_apart}, {grouped}]
    assert [told["codes"] for told in steps] == [["npu torch.uint8"]] * 2 + [["npu torch.int8"]]
    for told in steps:
        assert told["ops"]["packed_experts"] == "ops.npu.packed.packed_experts"


def test_what_a_chip_can_not_compute_is_refused_where_its_layer_is_loaded() -> None:
    def unable(*_: Any) -> Tensor:
        raise RuntimeError("call aclnnRightShift failed\nmore")

    bank = pack(formats.W4G32, 2, 32, 32)
    ops = SimpleNamespace(dtype=HALF, packed_experts=unable)
    device = SimpleNamespace(capability=lambda dtype: replace(CHIP, soc="Ascend910B3"))
    parts: Any = SimpleNamespace(ops=ops, device=device, int8_activations=False)
    with pytest.raises(ConfigError) as refused:
        Experts(parts, bank, bank)
    assert str(refused.value) == (
        "experts in w4g32 can't be computed in float16 on Ascend910B3 (call aclnnRightShift "
        "failed): use a checkpoint in floats, or another --dtype or --device"
    )
    with pytest.raises(ConfigError, match="packed in one bank and plain in the other"):
        Experts(parts, bank, torch.zeros(2, 32, 16))
