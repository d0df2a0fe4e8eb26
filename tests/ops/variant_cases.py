"""Arguments of every operator that the CPU has a variant of, at the geometries that it meets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ops.lowbit.convert import without_fp8
from ops.lowbit.pack import quantise, quantise_table
from ops.lowbit.packed import Packed
from placement import formats

EPS = 1e-6
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Geometry:
    """What one rank of a model computes with."""

    hidden: int
    streams: int
    low_rank: int
    kv_groups: tuple[int, ...]  # query heads of this rank by K/V head
    head_dim: int
    key_head: tuple[int, ...]  # key head of each value head
    key_dim: int
    value_dim: int
    experts: int
    owned: tuple[int, ...]
    inner: int
    top_k: int
    conv_kernel: int = 4


GEOMETRIES = {
    "embedded": Geometry(
        192,
        4,
        24,
        (6, 6),
        32,
        tuple(i // 3 for i in range(12)),
        32,
        32,
        14,
        tuple(range(14)),
        64,
        4,
    ),
    "uneven": Geometry(
        36, 3, 5, (1, 3), 20, (0, 1, 1, 1, 2), 12, 24, 13, (1, 4, 5, 12), 18, 3, conv_kernel=3
    ),
    # One rank of six of the 169 GiB model; two of its experts stand for 85.
    "production": Geometry(
        2560, 4, 320, (4,), 256, tuple(i // 3 for i in range(8)), 128, 128, 512, (3, 200), 640, 10
    ),
    # All of its heads.
    "whole": Geometry(
        2560, 4, 320, (12, 12), 256, tuple(i // 3 for i in range(48)), 128, 128, 512, (9,), 32, 10
    ),
}


def spread_slots(batch: int) -> Tensor:
    return torch.randperm(batch + 3)[:batch]


def rms_norm(g: Geometry, batch: int) -> Iterable[Arguments]:
    for shape in ((batch, len(g.kv_groups), g.head_dim), (batch, 0, g.head_dim), (batch, g.hidden)):
        yield {"x": torch.randn(shape) * 3, "scale": torch.rand(shape[-1]) + 0.5, "eps": EPS}
    yield {"x": torch.zeros(batch, 4), "scale": torch.ones(4), "eps": EPS}


def gated_rms_norm(g: Geometry, batch: int) -> Iterable[Arguments]:
    shape = (batch, len(g.key_head), g.value_dim)
    for activation in ("sigmoid", "silu"):
        yield {
            "x": torch.randn(shape) * 2, "weight": torch.rand(g.value_dim) + 0.5,
            "gate": torch.randn(shape), "eps": EPS, "activation": activation,
        }  # fmt: skip


def grouped_rms_norm(g: Geometry, batch: int) -> Iterable[Arguments]:
    shape = (batch, g.streams, g.hidden)
    yield {"x": torch.randn(shape), "scale": torch.rand(shape[1:]) + 0.5, "eps": EPS}


def hyper_mix(g: Geometry, batch: int) -> Iterable[Arguments]:
    wide = g.streams * g.hidden
    for rows in (g.low_rank, g.low_rank + g.streams):
        yield {
            "streams": torch.randn(batch, g.streams, g.hidden),
            "scale": torch.rand(g.streams, g.hidden) + 0.5,
            "down_inject": torch.randn(rows, wide) * wide**-0.5,
            "up": torch.randn(wide, g.low_rank) * g.low_rank**-0.5, "eps": EPS, "rank": g.low_rank,
        }  # fmt: skip


def hyper_inject_(g: Geometry, batch: int) -> Iterable[Arguments]:
    yield {
        "streams": torch.randn(batch, g.streams, g.hidden),
        "inject": torch.rand(batch, g.streams) * 2, "y": torch.randn(batch, g.hidden),
    }  # fmt: skip


def delta_gates(g: Geometry, batch: int) -> Iterable[Arguments]:
    heads = len(g.key_head)
    yield {
        "a": torch.randn(batch, heads) * 4, "b": torch.randn(batch, heads) * 4,
        "a_log": torch.randn(heads), "dt_bias": torch.randn(heads),
    }  # fmt: skip


def causal_conv_step(g: Geometry, batch: int) -> Iterable[Arguments]:
    channels = 2 * (max(g.key_head) + 1) * g.key_dim + len(g.key_head) * g.value_dim
    for dilation in (1, 3):
        window = (g.conv_kernel - 1) * dilation
        yield {
            "x": torch.randn(batch, channels), "weight": torch.randn(channels, g.conv_kernel),
            "windows": torch.randn(batch + 3, window, channels), "slots": spread_slots(batch),
            "dilation": dilation,
        }  # fmt: skip


def causal_conv_chunk(g: Geometry, batch: int) -> Iterable[Arguments]:
    for dilation in (1, 3):
        window = (g.conv_kernel - 1) * dilation
        yield {
            "x": torch.randn(batch, g.hidden), "weight": torch.randn(g.hidden, g.conv_kernel),
            "window": torch.randn(window, g.hidden), "dilation": dilation,
        }  # fmt: skip


def delta_inputs(g: Geometry, batch: int) -> Arguments:
    keys, heads = max(g.key_head) + 1, len(g.key_head)
    return {
        "q": torch.randn(batch, keys, g.key_dim), "k": torch.randn(batch, keys, g.key_dim),
        "v": torch.randn(batch, heads, g.value_dim), "g": -torch.rand(batch, heads) * 3,
        "beta": torch.rand(batch, heads), "key_head": torch.tensor(g.key_head),
    }  # fmt: skip


def gated_delta_step(g: Geometry, batch: int) -> Iterable[Arguments]:
    states = torch.randn(batch + 3, len(g.key_head), g.key_dim, g.value_dim) * 0.3
    yield {**delta_inputs(g, batch), "states": states, "slots": spread_slots(batch)}


def gated_delta_chunk(g: Geometry, batch: int) -> Iterable[Arguments]:
    state = torch.randn(len(g.key_head), g.key_dim, g.value_dim) * 0.3
    yield {**delta_inputs(g, batch), "state": state}
    yield {**delta_inputs(g, 63 + batch), "state": state}


def in_rows(arguments: Arguments, names: str, tokens: int) -> Arguments:
    """The named tensors [B * Q, ...] as [B, Q, ...]."""
    changed = {name: arguments[name].unflatten(0, (-1, tokens)) for name in names.split()}
    return {**arguments, **changed}


def causal_conv_verify(g: Geometry, batch: int) -> Iterable[Arguments]:
    for tokens in (2, 5):
        for case in causal_conv_step(g, batch):
            x = torch.randn(batch, tokens, case["x"].shape[1])
            yield {**case, "x": x}


def window_commit_(g: Geometry, batch: int) -> Iterable[Arguments]:
    for window, tokens in ((3, 2), (3, 5), (9, 3)):
        x, windows = torch.randn(batch, tokens, g.hidden), torch.randn(batch + 3, window, g.hidden)
        counts, slots = torch.randint(0, tokens + 1, (batch,)), spread_slots(batch)
        rest = {"slots": slots, "counts": counts}
        yield {"x": x, "windows": windows, **rest}
        ids = [(one[..., :1] * 2**40).long() for one in (x, windows)]  # as of token histories
        yield {"x": ids[0], "windows": ids[1], **rest}


def gated_delta_verify(g: Geometry, batch: int) -> Iterable[Arguments]:
    (step,) = gated_delta_step(g, batch)
    for tokens in (2, 5):
        yield in_rows({**step, **delta_inputs(g, batch * tokens)}, "q k v g beta", tokens)


def gated_delta_commit_(g: Geometry, batch: int) -> Iterable[Arguments]:
    for case in gated_delta_verify(g, batch):
        case["counts"] = torch.randint(0, case.pop("q").shape[1] + 1, (batch,))
        yield case


def route(g: Geometry, batch: int) -> Iterable[Arguments]:
    flat = torch.zeros(batch, g.experts)
    flat[:, 1::2] = 1.5
    for logits in (torch.randn(batch, g.experts) * 2, flat):
        for normalise in (True, False):
            yield {"logits": logits, "top_k": g.top_k, "normalise": normalise}


def moe_experts(g: Geometry, batch: int) -> Iterable[Arguments]:
    """Routes to owned and to peers' experts, to peers' only, all to one, and a rank without any."""
    spread = torch.rand(batch, g.experts).argsort(dim=1)[:, : g.top_k].contiguous()
    gate_up = torch.randn(len(g.owned), 2 * g.inner, g.hidden) * g.hidden**-0.5
    down = torch.randn(len(g.owned), g.hidden, g.inner) * g.inner**-0.5
    spread[0, 0] = g.owned[-1] if g.owned[-1] not in spread[0] else spread[0, 0]
    peers = torch.tensor([e for e in range(g.experts) if e not in g.owned], dtype=torch.int64)
    cases = [(spread, g.owned), (spread, g.owned[:1]), (spread, ())]
    if len(peers) >= g.top_k:
        cases.append((peers[: g.top_k].repeat(batch, 1), g.owned))
        one = torch.cat((torch.tensor([g.owned[0]]), peers[: g.top_k - 1]))
        cases.append((one.repeat(batch, 1), g.owned))
    for ids, owned in cases:
        local_of = torch.full((g.experts,), -1)
        local_of[list(owned)] = torch.arange(len(owned))
        weights = torch.rand(batch, g.top_k) + 0.05
        yield {
            "x": torch.randn(batch, g.hidden), "weights": weights, "local": local_of[ids],
            "gate_up": gate_up[: len(owned)], "down": down[: len(owned)],
        }  # fmt: skip


# What a kernel has a path of its own for: 2, 4 and 8 bits, floats, zero points, blocks of rows.
PACKED = (
    formats.W4G32, formats.W4G32_ASYM, formats.W2, formats.NVFP4, formats.MXFP4, formats.W8,
    formats.FP8_BLOCK128,
)  # fmt: skip


def fits(form: formats.WeightFormat, *columns: int) -> bool:
    return form.bits == 8 or not any(one % form.group for one in columns)


def packed_weight(form: formats.WeightFormat, *shape: int) -> Packed:
    """Random weights, FP8 as a loader hands it out; banks of two halves have two whole scales."""
    return without_fp8(quantise(torch.randn(shape) * shape[-1] ** -0.5, form))


def packed_linear(g: Geometry, batch: int) -> Iterable[Arguments]:
    for form in PACKED:
        if fits(form, g.hidden):
            weight = packed_weight(form, 2 * g.inner + 3 * (form.block_rows < 2), g.hidden)
            for x in (torch.randn(batch, g.hidden), torch.randn(batch, 2, g.hidden)):
                yield {"x": x, "weight": weight, "int8_activations": False}


def packed_experts(g: Geometry, batch: int) -> Iterable[Arguments]:
    """As of the plain experts, each bank in a format of its own."""
    forms = [form for form in PACKED if fits(form, g.hidden, g.inner)]
    is_slow = g.hidden > 1000 or batch > 8  # the reference unpacks an expert a route
    for index, case in enumerate(moe_experts(g, batch)):
        for form in forms[index % len(forms) :: len(forms)] if is_slow else forms:
            gate_up, down = (quantise_bank(case[name], form) for name in ("gate_up", "down"))
            packed = {"gate_up": gate_up, "down": down, "int8_activations": False}
            yield {**case, **packed}


def quantise_bank(bank: Tensor, form: formats.WeightFormat) -> Packed:
    if len(bank):
        return without_fp8(quantise(bank, form))
    blank = quantise(torch.zeros(1, *bank.shape[1:]), form)
    zero = None if blank.zero is None else blank.zero[:0]
    whole = None if blank.whole is None else blank.whole[:0]
    codes, scale, shape = blank.codes[:0], blank.scale[:0], tuple(bank.shape)
    return replace(blank, shape=shape, codes=codes, scale=scale, zero=zero, whole=whole)


def packed_table_rows(g: Geometry, batch: int) -> Iterable[Arguments]:
    codes, scale = quantise_table(torch.randn(50, 16))
    for table, start in ((codes.view(torch.uint8), 7), (codes.view(torch.uint8)[:0], 0)):
        for dtype in (torch.float32, torch.bfloat16):
            ids = torch.randint(0, 70, (batch, 3))
            yield {"table": table, "scale": scale, "ids": ids, "start": start, "dtype": dtype}


def select_blocks(g: Geometry, batch: int) -> Iterable[Arguments]:
    """Rows that see no block, some and all; keys that nobody may see are NaN; all scores equal."""
    table_pages, page_blocks, block_tokens = 5, 4, 4
    pages = batch * table_pages + 2
    for queries, heads, chosen in ((1, 4, 3), (5, 4, 7), (2, 3, 99)):
        last = torch.randint(queries - 1, table_pages * page_blocks * block_tokens, (batch, 1))
        positions = last - torch.arange(queries - 1, -1, -1)
        pool = torch.full((pages, page_blocks, g.head_dim), float("nan"))
        table = torch.randperm(pages)[: batch * table_pages].view(batch, table_pages)
        for row in range(batch):
            for block in range((int(last[row]) + 1) // block_tokens):
                page = table[row, block // page_blocks]
                pool[page, block % page_blocks] = torch.randn(g.head_dim)
        query = torch.randn(batch, queries, heads, g.head_dim)
        rest = {"page_table": table, "positions": positions, "block_tokens": block_tokens}
        for one in (query, torch.zeros_like(query)):
            yield {"query": one, "index_pool": pool, **rest, "max_blocks": chosen}


def attention(
    g: Geometry, batch: int, queries: int, page: int, blocks: int, groups: tuple[int, ...]
) -> Arguments:
    """Contexts of any length on shuffled pages; all that a query may not see is NaN."""
    block_tokens, table_pages = 4, 5
    last = torch.randint(queries - 1, table_pages * page, (batch, 1))
    positions = last - torch.arange(queries - 1, -1, -1)
    pages = batch * table_pages + 2
    shape = (pages, page, len(groups), g.head_dim)
    pools = [torch.full(shape, float("nan")) for _ in range(2)]
    table = torch.randperm(pages)[: batch * table_pages].view(batch, table_pages)
    for row in range(batch):
        for token in range(int(last[row]) + 1):
            for pool in pools:
                pool[table[row, token // page], token % page] = torch.randn(shape[2:])
    block_ids = None
    if blocks:
        complete = (positions + 1) // block_tokens
        scores = torch.rand(batch, queries, table_pages * page // block_tokens)
        allowed = torch.arange(scores.shape[-1]) < complete[..., None]
        best = scores.masked_fill(~allowed, -1).topk(blocks)
        block_ids = best.indices.masked_fill(best.values < 0, -1)
    return {
        "query": torch.randn(batch, queries, sum(groups), g.head_dim),
        "k_pool": pools[0], "v_pool": pools[1], "page_table": table, "positions": positions,
        "block_ids": block_ids, "block_tokens": block_tokens, "kv_groups": groups,
        "scale": g.head_dim**-0.5,
    }  # fmt: skip


def paged_attention(g: Geometry, batch: int) -> Iterable[Arguments]:
    page = 8
    for blocks in (0, 3):
        for queries in (1, 6):
            yield attention(g, batch, queries, page, blocks, g.kv_groups)
        yield attention(g, batch, 1, page, blocks, ())
    yield attention(g, batch, 1, 4, 0, g.kv_groups[:1])


def write_kv_(g: Geometry, batch: int) -> Iterable[Arguments]:
    shape = (batch, len(g.kv_groups), g.head_dim)
    pools = [torch.zeros(batch + 1, 4, *shape[1:]) for _ in range(2)]
    yield {
        "k_pool": pools[0], "v_pool": pools[1], "slots": torch.randperm(4 * batch)[:batch],
        "k": torch.randn(shape), "v": torch.randn(shape),
    }  # fmt: skip


def apply_rope(g: Geometry, batch: int) -> Iterable[Arguments]:
    """Partial and whole rotation, a rank without heads, and the [B, Q, heads, d] form."""
    for rotary_dim in (g.head_dim, g.head_dim // 4 * 2):
        angles = torch.randn(batch, rotary_dim // 2).repeat(1, 2) * 9
        tables = {"cos": angles.cos(), "sin": angles.sin()}
        for heads in (sum(g.kv_groups), 0):
            yield {"x": torch.randn(batch, heads, g.head_dim), **tables}
    yield {
        "x": torch.randn(1, batch, 2, g.head_dim), "cos": tables["cos"][None],
        "sin": tables["sin"][None],
    }  # fmt: skip


def rope_tables(g: Geometry, batch: int) -> Iterable[Arguments]:
    for shape in ((batch,), (2, batch)):
        positions = torch.randint(0, 300_000, shape)
        rest = {"rotary_dim": g.head_dim // 4 * 2, "theta": 1e7, "dtype": torch.float32}
        yield {"positions": positions, **rest}


def index_keys(g: Geometry, batch: int) -> Iterable[Arguments]:
    for members in (4, 1):
        yield {
            "raw": torch.randn(batch, members, g.head_dim) * 3,
            "scale": torch.rand(g.head_dim) + 0.5, "eps": EPS,
            "first_positions": torch.randint(0, 300_000, (batch,)),
            "rotary_dim": g.head_dim // 4 * 2, "theta": 1e7,
        }  # fmt: skip


def gated_swiglu(g: Geometry, batch: int) -> Iterable[Arguments]:
    for inner in (g.inner, g.inner // 3, 0):
        gate_up = torch.randn(batch, 2 * inner) * 3
        yield {"gate_up": gate_up, "gate": torch.randn(batch, 1) * 3}


def linear(g: Geometry, batch: int) -> Iterable[Arguments]:
    experts, head = g.experts + 1, g.head_dim
    for outs, ins in ((g.hidden, head), (experts, g.hidden), (1, head), (0, head), (head, 0)):
        yield {"x": torch.randn(batch, ins), "weight": torch.randn(outs, ins)}


def ngram_ids(g: Geometry, batch: int) -> Iterable[Arguments]:
    """Decode rows and chunks; end tokens anywhere; products up to the largest int64."""
    eos, multipliers = 40, torch.tensor([2**63 // 41 - 6, 2**62 // 41, 2**63 // 41 - 48, 3])
    sizes = torch.tensor([1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049])
    for order, heads, queries in ((3, 4, 1), (3, 4, 9), (2, 1, 1), (4, 2, 5)):
        history = torch.randint(0, eos + 1, (batch, order - 1 + queries))
        history[:, ::2][torch.rand(history[:, ::2].shape) < 0.3] = eos
        yield {
            "history": history, "eos": eos, "multipliers": multipliers[:order],
            "vocab_sizes": sizes[: (order - 1) * heads],
            "offsets": (sizes.cumsum(0) - sizes)[: (order - 1) * heads],
        }  # fmt: skip


def table_rows(g: Geometry, batch: int) -> Iterable[Arguments]:
    """Some, all and no rows here, with NaN in rows that nobody asks for."""
    for rows, start in ((50, 0), (20, 17), (20, 60), (0, 0)):
        table = torch.randn(rows, g.head_dim)
        for shape in ((batch,), (batch, 1, 8)):
            ids = torch.randint(0, 50, shape)
            yield {"table": table, "ids": ids, "start": start}
            local = ids[(ids >= start) & (ids < start + rows)] - start
            spoilt = torch.full_like(table, float("nan"))
            spoilt[local] = table[local]
            yield {"table": spoilt, "ids": ids, "start": start}


def ngram_gate(g: Geometry, batch: int) -> Iterable[Arguments]:
    wide, dim = g.streams * g.hidden, 2 * g.head_dim
    yield {
        "embedding": torch.randn(batch, dim), "streams": torch.randn(batch, g.streams, g.hidden),
        "key": torch.randn(wide, dim) * dim**-0.5, "value": torch.randn(g.hidden, dim) * dim**-0.5,
        **{f"norm_{n}": torch.rand(g.streams, g.hidden) + 0.5 for n in ("key", "query", "conv")},
        "eps": EPS,
    }  # fmt: skip


def greedy(g: Geometry, batch: int) -> Iterable[Arguments]:
    """Clear winners, ties, a row of one value, infinities, and NaN."""
    yield {"logits": torch.randn(batch, 503)}
    yield {"logits": torch.randint(0, 4, (batch, 503)).float()}
    yield {"logits": torch.full((batch, 37), float("-inf"))}
    spoilt = torch.randn(batch, 503)
    spoilt[batch // 2, [77, 300]] = float("nan")
    yield {"logits": spoilt}


def sampling(batch: int, vocab: int) -> Arguments:
    return {
        "logits": torch.randn(batch, vocab) * 4,
        "temperature": torch.tensor([0.7, 1.5, 0.0, 0.2]).repeat(batch)[:batch],
        "seed": torch.randint(-(2**63), 2**63 - 1, (batch,)),
        "choice": torch.randint(0, 9, (batch,)), "position": torch.randint(0, 2**20, (batch,)),
    }  # fmt: skip


def sample_local(g: Geometry, batch: int) -> Iterable[Arguments]:
    for vocab, start in ((503, 0), (4096, 150_000), (0, 40)):
        yield {**sampling(batch, vocab), "vocab_start": start}


def sample(g: Geometry, batch: int) -> Iterable[Arguments]:
    """Each filter alone, all together, none; more kept than are sorted at first; ties."""
    filters = ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.8, 0.01))
    for top_k, top_p, min_p in (*filters, (0, 0.9999, 0.0), (1, 0.5, 0.0), (9999, 0.0, 1.0)):
        case = sampling(batch, 2048)
        if top_p == 0.9999:
            case["logits"] = case["logits"] * 0.1
        elif top_k == 20:
            case["logits"] = case["logits"].round()
        yield {
            **case, "top_k": torch.full((batch,), top_k), "top_p": torch.full((batch,), top_p),
            "min_p": torch.full((batch,), min_p),
        }  # fmt: skip


def nonfinite_rows(g: Geometry, batch: int) -> Iterable[Arguments]:
    clean = torch.randn(batch, 500) * 50
    yield {"logits": clean}
    yield {"logits": clean[:, :0]}
    for values in ((float("nan"),), (float("inf"),), (float("-inf"), float("inf")), (-1e30, 1e30)):
        spoilt = clean.clone()
        spoilt[batch // 2, 100 : 100 + len(values)] = torch.tensor(values)
        yield {"logits": spoilt}


Cases = Callable[[Geometry, int], Iterable[Arguments]]
CASES: dict[str, Cases] = {
    f.__name__: f
    for f in (
        rms_norm, gated_rms_norm, grouped_rms_norm, hyper_mix, hyper_inject_, delta_gates,
        causal_conv_step, causal_conv_chunk, gated_delta_step, gated_delta_chunk,
        causal_conv_verify, window_commit_, gated_delta_verify, gated_delta_commit_, route,
        moe_experts, select_blocks, paged_attention, write_kv_, apply_rope, rope_tables,
        index_keys, gated_swiglu, linear, ngram_ids, ngram_gate, table_rows,
        nonfinite_rows, greedy, sample, sample_local, packed_linear, packed_experts,
        packed_table_rows,
    )
}  # fmt: skip
