"""A call that would corrupt memory on a chip is refused by name and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ops.lowbit.pack import quantise, quantise_table
from ops.registry import OpSet
from ops.spec import ContractError
from placement import formats

I64 = torch.int64
PACKED_1 = quantise(torch.randn(5, 32), formats.W4G32)
PACKED_3 = quantise(torch.randn(3, 5, 32), formats.W4G32)


def _moe() -> dict[str, Any]:
    return {
        "x": torch.randn(2, 4), "weights": torch.rand(2, 2),
        "local": torch.tensor([[0, 1], [-1, -1]]),
        "gate_up": torch.randn(3, 6, 4), "down": torch.randn(3, 4, 3),
    }  # fmt: skip


def _attention() -> dict[str, Any]:
    return {
        "query": torch.randn(1, 2, 3, 4), "k_pool": torch.randn(5, 4, 2, 4),
        "v_pool": torch.randn(5, 4, 2, 4), "page_table": torch.tensor([[4, 1, -1]]),
        "positions": torch.tensor([[6, 7]]), "block_ids": torch.tensor([[[0, -1], [0, 1]]]),
        "block_tokens": 4, "kv_groups": (2, 1), "scale": 0.5,
    }  # fmt: skip


def _selection() -> dict[str, Any]:
    return {
        "query": torch.randn(1, 2, 3, 4), "index_pool": torch.randn(5, 2, 4),
        "page_table": torch.tensor([[4, 1]]), "positions": torch.tensor([[6, -1]]),
        "block_tokens": 4, "max_blocks": 2,
    }  # fmt: skip


def _write() -> dict[str, Any]:
    return {
        "k_pool": torch.zeros(2, 4, 1, 3), "v_pool": torch.zeros(2, 4, 1, 3),
        "slots": torch.tensor([0, 7]), "k": torch.zeros(2, 1, 3), "v": torch.zeros(2, 1, 3),
    }  # fmt: skip


def _conv() -> dict[str, Any]:
    return {
        "x": torch.zeros(1, 5), "weight": torch.zeros(5, 4), "windows": torch.zeros(2, 3, 5),
        "slots": torch.tensor([1]),
    }  # fmt: skip


def _delta() -> dict[str, Any]:
    return {
        "q": torch.zeros(1, 2, 4), "k": torch.zeros(1, 2, 4), "v": torch.zeros(1, 4, 3),
        "g": torch.zeros(1, 4), "beta": torch.zeros(1, 4), "key_head": torch.tensor([0, 0, 1, 1]),
        "states": torch.zeros(2, 4, 4, 3), "slots": torch.tensor([1]),
    }  # fmt: skip


def _sampling() -> dict[str, Any]:
    one = torch.zeros(1, dtype=I64)
    return {
        "logits": torch.zeros(1, 5), "temperature": torch.ones(1), "top_k": one,
        "top_p": torch.ones(1), "min_p": torch.zeros(1), "seed": one, "choice": one,
        "position": one,
    }  # fmt: skip


def _hyper() -> dict[str, Any]:
    return {
        "streams": torch.zeros(2, 4, 3), "scale": torch.ones(4, 3),
        "down_inject": torch.zeros(6, 12), "up": torch.zeros(12, 2), "eps": 1e-6, "rank": 2,
    }  # fmt: skip


def _ngram() -> dict[str, Any]:
    return {
        "history": torch.zeros(1, 5, dtype=I64), "eos": 1, "multipliers": torch.tensor([3, 5, 7]),
        "vocab_sizes": torch.tensor([11, 13]), "offsets": torch.tensor([0, 11]),
    }  # fmt: skip


def _packed_moe() -> dict[str, Any]:
    banks = {"gate_up": torch.randn(3, 64, 32), "down": torch.randn(3, 32, 32)}
    packed = {name: quantise(bank, formats.W4G32_ASYM) for name, bank in banks.items()}
    x = torch.randn(2, 32)
    return {**_moe(), "x": x, **packed, "int8_activations": False}


def _packed_linear() -> dict[str, Any]:
    weight = quantise(torch.randn(5, 32), formats.NVFP4)
    return {"x": torch.randn(2, 32), "weight": weight, "int8_activations": False}


def _table() -> dict[str, Any]:
    codes, scale = quantise_table(torch.randn(5, 4))
    ids = torch.tensor([3, 9])
    return {"table": codes.view(torch.uint8), "scale": scale, "ids": ids, "start": 2,
            "dtype": torch.float32}  # fmt: skip


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "moe_experts": _moe, "paged_attention": _attention, "select_blocks": _selection,
    "write_kv_": _write, "causal_conv_step": _conv, "gated_delta_step": _delta,
    "sample": _sampling, "hyper_mix": _hyper, "ngram_ids": _ngram,
    "packed_experts": _packed_moe, "packed_linear": _packed_linear, "packed_table_rows": _table,
}  # fmt: skip


@pytest.mark.parametrize("op", CALLS)
def test_a_good_call_passes(ops: OpSet, op: str) -> None:
    getattr(ops, op)(**CALLS[op]())


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("moe_experts", {"local": torch.tensor([[0, 1], [2, 3]])}, r"is 3, allowed is -1\.\.2"),
        ("moe_experts", {"local": torch.tensor([[0, 1], [2, -2]])}, "local is -2"),
        ("moe_experts", {"local": torch.tensor([[0, 1], [2, 2]])}, "twice in a row of local is 2"),
        ("moe_experts", {"gate_up": torch.randn(3, 5, 4)}, "gate_up"),
        ("moe_experts", {"weights": torch.rand(2, 3)}, "size 1 of local .* is 2, allowed is k = 3"),
        ("moe_experts", {"local": torch.zeros(2, 2).int()}, "dtype of local .*int32"),
        ("paged_attention", {"positions": torch.tensor([[6, 12]])}, r"is 12, allowed is -1\.\.11"),
        ("paged_attention", {"positions": torch.tensor([[6, -2]])}, "positions is -2"),
        ("paged_attention", {"page_table": torch.tensor([[4, 5, 0]])}, "page_table is 5"),
        ("paged_attention", {"page_table": torch.tensor([[4, -1, 0]])}, "page_table is -1"),
        ("paged_attention", {"block_ids": torch.tensor([[[1, -1], [0, 1]]])}, "block_ids is 1"),
        ("paged_attention", {"block_ids": torch.tensor([[[-2, -1], [0, 1]]])}, "block_ids is -2"),
        ("paged_attention", {"kv_groups": (2, 2)}, r"kv_groups is \(2, 2\)"),
        ("paged_attention", {"kv_groups": (3,)}, r"kv_groups is \(3,\)"),
        ("paged_attention", {"v_pool": torch.randn(5, 4, 1, 4)}, "v_pool"),
        ("select_blocks", {"positions": torch.tensor([[16, 0]])}, "positions is 16"),
        ("select_blocks", {"page_table": torch.tensor([[5, 1]])}, "page_table is 5"),
        ("select_blocks", {"index_pool": torch.randn(5, 2, 3)}, "index_pool"),
        ("write_kv_", {"slots": torch.tensor([0, 8])}, r"slots is 8, allowed is 0\.\.7"),
        ("write_kv_", {"slots": torch.tensor([0, -1])}, "slots is -1"),
        ("write_kv_", {"k": torch.zeros(3, 1, 3)}, "size 0 of k"),
        ("causal_conv_step", {"slots": torch.tensor([2])}, "slots is 2"),
        ("causal_conv_step", {"windows": torch.zeros(2, 4, 5)}, "length of windows is 4"),
        ("causal_conv_step", {"dilation": 2}, "length of windows is 3"),
        ("gated_delta_step", {"slots": torch.tensor([2])}, "slots is 2"),
        ("gated_delta_step", {"key_head": torch.tensor([0, 0, 1, 2])}, "key_head is 2"),
        ("gated_delta_step", {"states": torch.zeros(2, 4, 4, 3).half()}, "dtype of states"),
        ("gated_delta_step", {"g": torch.zeros(1, 3)}, "size 1 of g"),
        ("sample", {"temperature": torch.tensor([-1.0])}, "temperature is -1.0"),
        ("sample", {"temperature": torch.tensor([float("nan")])}, "temperature is nan"),
        ("sample", {"seed": torch.zeros(2, dtype=I64)}, "size 0 of seed"),
        ("hyper_mix", {"down_inject": torch.zeros(5, 12)}, "rows of down_inject is 5"),
        ("hyper_mix", {"scale": torch.ones(4, 3).half()}, "dtype of scale"),
        ("ngram_ids", {"vocab_sizes": torch.tensor([11, 13, 17])}, "vocab_sizes|offsets|heads"),
        ("packed_experts", {"local": torch.tensor([[0, 1], [2, 3]])}, r"is 3, allowed is -1\.\.2"),
        ("packed_experts", {"local": torch.tensor([[0, 1], [2, 2]])}, "twice in a row"),
        ("packed_experts", {"down": PACKED_3}, "size 1 of down .* is 5, allowed is H = 32"),
        ("packed_linear", {"x": torch.randn(2, 64)}, "size 1 of weight .* is 32"),
        ("packed_linear", {"weight": replace(PACKED_1, scale=PACKED_1.scale[:4])}, "weight.scale"),
        ("packed_linear", {"weight": replace(PACKED_1, codes=PACKED_1.codes[:, 1:])}, "codes"),
        ("packed_table_rows", {"table": torch.zeros(5, 4)}, "dtype of table"),
        ("packed_table_rows", {"ids": torch.tensor([-1])}, "ids is -1"),
        ("ngram_ids", {"history": torch.zeros(1, 1, dtype=I64)}, "history is 1"),
    ],
)
def test_a_bad_call_is_refused(ops: OpSet, op: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=f"^{op}: .*(?:{message})"):
        getattr(ops, op)(**{**CALLS[op](), **change})


def test_positional_calls_are_checked_too(ops: OpSet) -> None:
    with pytest.raises(ContractError, match="top_k is 9"):
        ops.route(torch.zeros(1, 8), 9, True)


def test_serving_calls_are_not_checked(bare_ops: OpSet) -> None:
    call = {**_selection(), "page_table": torch.tensor([[4, -1]])}
    assert bare_ops.select_blocks(**{**call, "positions": torch.tensor([[6, 7]])}).shape == (
        1,
        2,
        2,
    )
