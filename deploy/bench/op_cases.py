"""Arguments of operators at production shapes, for timing them alone.

The shapes are those of a hybrid model of 169 GiB (hidden 2,560 in 4 streams, 16/48 recurrent heads
of 128, 24/2 attention heads of 256, sparse above 2,051 tokens, 512 experts of 640, top 10), whole
where memory allows: the experts, the embedding and the output head are those of one rank of six.
Weights lie in memory as the CPU keeps them (`rank_worker.device`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIDDEN, STREAMS, LOW_RANK = 2560, 4, 320
QUERY_HEADS, KV_GROUPS, HEAD_DIM, ROTARY_DIM = 24, (12, 12), 256, 64
KEY_HEADS, VALUE_HEADS, STATE_DIM = 16, 48, 128
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * STATE_DIM  # of the short convolution
TAPS = 4
EXPERTS, TOP_K, INNER = 512, 10, 640
INDEX_HEADS, INDEX_DIM, BLOCK_TOKENS, MAX_BLOCKS = 4, 128, 4, 512
VOCAB = 248320
NGRAM_HEADS, NGRAM_WIDTH, TABLE_ROWS = 16, 160, 200_000
RANKS = 6
OWNED = 86  # experts of the rank that has most
PAGE_TOKENS, CONTEXT = 64, 16_384
DENSE_CONTEXT = 2048  # the longest that attention looks at as a whole
EPS, THETA = 1e-6, 1e7
DECODE_ROWS, CHUNK_TOKENS, VERIFY_TOKENS = (1, 4), 256, 3
EXPERT_CHUNK_TOKENS = 64
EXPERT_SETS = 2  # of routes
DTYPES = (torch.float32, torch.float16)
SEED = 3107  # random tensors are the same in every run
Arguments = dict[str, Any]


@dataclass(frozen=True)
class OpCase:
    """`make(dtype)` gives sets of arguments that take turns: what is read comes from memory, not
    from the cache that the call before left behind.
    """

    op: str
    shape: str
    make: Callable[[torch.dtype], Sequence[Arguments]]
    rows: int  # tokens of the call
    dtypes: tuple[torch.dtype, ...] = DTYPES  # of activations; only those that a variant can run

    @property
    def id(self) -> str:
        return f"{self.op} {self.shape}"


def normal(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def packed(dtype: torch.dtype, outputs: int, inputs: int) -> Tensor:
    """A projection [outputs, inputs], column-major."""
    return normal(dtype, inputs, outputs, scale=inputs**-0.5).t()


def expert_bank(dtype: torch.dtype, outputs: int, inputs: int) -> Tensor:
    """[OWNED, outputs, inputs], each expert column-major; they differ by a factor."""
    one = normal(dtype, inputs, outputs, scale=inputs**-0.5)
    factors = torch.linspace(0.5, 1.5, OWNED).to(dtype)
    return (one * factors[:, None, None]).transpose(1, 2)


def norms(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    scale = torch.rand(HEAD_DIM) + 0.5
    yield "rms_norm", {"x": normal(dtype, rows, QUERY_HEADS, HEAD_DIM), "scale": scale, "eps": EPS}
    wide = {"scale": torch.rand(STREAMS, HIDDEN) + 0.5, "eps": EPS}
    yield "grouped_rms_norm", {"x": normal(dtype, rows, STREAMS, HIDDEN), **wide}
    heads = (rows, VALUE_HEADS, STATE_DIM)
    yield "gated_rms_norm", {
        "x": normal(dtype, *heads), "weight": torch.rand(STATE_DIM) + 0.5,
        "gate": normal(dtype, *heads), "eps": EPS, "activation": "sigmoid",
    }  # fmt: skip
    positions = torch.arange(rows) + CONTEXT
    yield "rope_tables", {
        "positions": positions, "rotary_dim": ROTARY_DIM, "theta": THETA, "dtype": dtype,
    }  # fmt: skip
    tables = {"cos": normal(dtype, rows, ROTARY_DIM), "sin": normal(dtype, rows, ROTARY_DIM)}
    yield "apply_rope", {"x": normal(dtype, rows, QUERY_HEADS, HEAD_DIM), **tables}


def streams(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    wide = STREAMS * HIDDEN
    yield "hyper_mix", {
        "streams": normal(dtype, rows, STREAMS, HIDDEN),
        "scale": torch.rand(STREAMS, HIDDEN) + 0.5,
        "down_inject": packed(dtype, LOW_RANK + STREAMS, wide),
        "up": packed(dtype, wide, LOW_RANK), "eps": EPS, "rank": LOW_RANK,
    }  # fmt: skip
    yield "hyper_inject_", {
        "streams": normal(dtype, rows, STREAMS, HIDDEN),
        "inject": torch.rand(rows, STREAMS).to(dtype), "y": normal(dtype, rows, HIDDEN, scale=0.01),
    }  # fmt: skip


def dense(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    yield "gated_swiglu", {
        "gate_up": normal(dtype, rows, 2 * INNER), "gate": normal(dtype, rows, 1),
    }  # fmt: skip
    yield "swiglu_mlp", {
        "x": normal(dtype, rows, HIDDEN), "gate_up": packed(dtype, 2 * INNER, HIDDEN),
        "down": packed(dtype, HIDDEN, INNER),
    }  # fmt: skip
    queries = 2 * QUERY_HEADS * HEAD_DIM  # with their gates
    yield "linear", {"x": normal(dtype, rows, HIDDEN), "weight": packed(dtype, queries, HIDDEN)}


def delta_inputs(dtype: torch.dtype, *rows: int) -> Arguments:
    return {
        "q": normal(dtype, *rows, KEY_HEADS, STATE_DIM),
        "k": normal(dtype, *rows, KEY_HEADS, STATE_DIM),
        "v": normal(dtype, *rows, VALUE_HEADS, STATE_DIM),
        "g": -torch.rand(*rows, VALUE_HEADS), "beta": torch.rand(*rows, VALUE_HEADS),
        "key_head": torch.arange(VALUE_HEADS) // (VALUE_HEADS // KEY_HEADS),
    }  # fmt: skip


def slot_states(rows: int) -> Arguments:
    shape = (rows + 1, VALUE_HEADS, STATE_DIM, STATE_DIM)
    return {"states": torch.randn(shape) * 0.1, "slots": torch.arange(rows, 0, -1)}


def windows(dtype: torch.dtype, rows: int) -> Arguments:
    past = normal(dtype, rows + 1, TAPS - 1, CHANNELS)
    return {"windows": past, "slots": torch.arange(rows, 0, -1)}


def recurrent(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    weight = packed(dtype, CHANNELS, TAPS)
    yield "causal_conv_step", {
        "x": normal(dtype, rows, CHANNELS), "weight": weight, **windows(dtype, rows),
    }  # fmt: skip
    yield "delta_gates", {
        "a": normal(dtype, rows, VALUE_HEADS), "b": normal(dtype, rows, VALUE_HEADS),
        "a_log": torch.randn(VALUE_HEADS), "dt_bias": torch.randn(VALUE_HEADS),
    }  # fmt: skip
    yield "gated_delta_step", {**delta_inputs(dtype, rows), **slot_states(rows)}


def verified(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    """A known token and two drafts a row, of which some stay."""
    tokens = VERIFY_TOKENS
    x, weight = normal(dtype, rows, tokens, CHANNELS), packed(dtype, CHANNELS, TAPS)
    counts = torch.arange(rows) % tokens + 1
    yield "causal_conv_verify", {"x": x, "weight": weight, **windows(dtype, rows)}
    yield "window_commit_", {"x": x, **windows(dtype, rows), "counts": counts}
    inputs = {**delta_inputs(dtype, rows, tokens), **slot_states(rows)}
    yield "gated_delta_verify", inputs
    kept = {name: value for name, value in inputs.items() if name != "q"}
    yield "gated_delta_commit_", {**kept, "counts": counts}


def chunked(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    yield "causal_conv_chunk", {
        "x": normal(dtype, rows, CHANNELS), "weight": packed(dtype, CHANNELS, TAPS),
        "window": normal(dtype, TAPS - 1, CHANNELS),
    }  # fmt: skip
    state = torch.randn(VALUE_HEADS, STATE_DIM, STATE_DIM) * 0.1
    yield "gated_delta_chunk", {**delta_inputs(dtype, rows), "state": state}
    yield "linear", {"x": normal(dtype, rows, HIDDEN), "weight": packed(dtype, HIDDEN, HIDDEN)}


def tables(rows: int, context: int) -> Arguments:
    """Pages in another order than they are used; every row is at its context's end."""
    pages = context // PAGE_TOKENS
    table = torch.randperm(rows * pages).view(rows, pages)
    return {"page_table": table, "positions": torch.full((rows, 1), context - 1)}


def kv_pools(dtype: torch.dtype, pages: int) -> Arguments:
    shape = (pages, PAGE_TOKENS, len(KV_GROUPS), HEAD_DIM)
    return {"k_pool": normal(dtype, *shape), "v_pool": normal(dtype, *shape)}


def attended(dtype: torch.dtype, rows: int, context: int, is_sparse: bool) -> Arguments:
    blocks = None
    if is_sparse:
        chosen = [torch.randperm(context // BLOCK_TOKENS)[:MAX_BLOCKS] for _ in range(rows)]
        blocks = torch.stack(chosen)[:, None]
    return {
        "query": normal(dtype, rows, 1, QUERY_HEADS, HEAD_DIM),
        **kv_pools(dtype, rows * context // PAGE_TOKENS), **tables(rows, context),
        "block_ids": blocks, "block_tokens": BLOCK_TOKENS, "kv_groups": KV_GROUPS,
        "scale": HEAD_DIM**-0.5,
    }  # fmt: skip


def selected(dtype: torch.dtype, rows: int) -> Arguments:
    """Whole numbers, whose scores are exact: equal ones go to the lowest block on every backend."""
    blocks = PAGE_TOKENS // BLOCK_TOKENS
    pool = torch.randint(-3, 4, (rows * CONTEXT // PAGE_TOKENS, blocks, INDEX_DIM))
    query = torch.randint(-3, 4, (rows, 1, INDEX_HEADS, INDEX_DIM))
    return {
        "query": query.to(dtype), "index_pool": pool.to(dtype), **tables(rows, CONTEXT),
        "block_tokens": BLOCK_TOKENS, "max_blocks": MAX_BLOCKS,
    }  # fmt: skip


def cached(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    yield "write_kv_", {
        **kv_pools(dtype, rows + 1), "slots": torch.arange(rows) * PAGE_TOKENS,
        "k": normal(dtype, rows, len(KV_GROUPS), HEAD_DIM),
        "v": normal(dtype, rows, len(KV_GROUPS), HEAD_DIM),
    }  # fmt: skip
    yield "index_keys", {
        "raw": normal(dtype, rows, BLOCK_TOKENS, INDEX_DIM),
        "scale": torch.rand(INDEX_DIM) + 0.5, "eps": EPS,
        "first_positions": torch.arange(rows) * BLOCK_TOKENS,
        "rotary_dim": ROTARY_DIM, "theta": THETA,
    }  # fmt: skip


def routed(dtype: torch.dtype, rows: int) -> Arguments:
    return {"logits": normal(dtype, rows, EXPERTS), "top_k": TOP_K, "normalise": True}


def routes(rows: int) -> Tensor:
    """Indices [rows, TOP_K] into the owned experts, -1 for those of the other ranks."""
    ids = torch.rand(rows, EXPERTS).argsort(dim=1)[:, :TOP_K]
    return torch.where(ids < OWNED, ids, -1)


def expert_sets(dtype: torch.dtype, rows: int) -> list[Arguments]:
    """Sets that share one bank and read other experts of it."""
    bank = {
        "gate_up": expert_bank(dtype, 2 * INNER, HIDDEN),
        "down": expert_bank(dtype, HIDDEN, INNER),
    }
    return [
        {
            "x": normal(dtype, rows, HIDDEN),
            "weights": torch.rand(rows, TOP_K).to(dtype), "local": routes(rows), **bank,
        }
        for _ in range(EXPERT_SETS if rows in DECODE_ROWS else 1)  # a chunk reads all experts
    ]  # fmt: skip


def ngrams(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    sizes = torch.full((NGRAM_HEADS,), 20_000_003)
    yield "ngram_ids", {
        "history": torch.randint(0, VOCAB, (rows, 3)), "eos": VOCAB - 276,
        "multipliers": torch.tensor([2**63 // VOCAB - 5, 2**62 // VOCAB, 2**61 // VOCAB]),
        "vocab_sizes": sizes, "offsets": sizes.cumsum(0) - sizes,
    }  # fmt: skip
    yield "table_rows", {
        "table": normal(dtype, TABLE_ROWS, NGRAM_WIDTH),
        "ids": torch.randint(0, RANKS * TABLE_ROWS, (rows, 1, NGRAM_HEADS)), "start": TABLE_ROWS,
    }  # fmt: skip
    wide, scales = STREAMS * HIDDEN, (STREAMS, HIDDEN)
    yield "ngram_gate", {
        "embedding": normal(dtype, rows, HIDDEN), "streams": normal(dtype, rows, *scales),
        "key": packed(dtype, wide, HIDDEN), "value": packed(dtype, HIDDEN, HIDDEN),
        **{f"norm_{name}": torch.rand(scales) + 0.5 for name in ("key", "query", "conv")},
        "eps": EPS,
    }  # fmt: skip


def drawn(dtype: torch.dtype, rows: int, vocab: int) -> Arguments:
    return {
        "logits": normal(dtype, rows, vocab, scale=4), "temperature": torch.full((rows,), 0.7),
        "seed": torch.arange(rows) + 1, "choice": torch.zeros(rows, dtype=torch.int64),
        "position": torch.arange(rows) + 100,
    }  # fmt: skip


def sampled(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Arguments]]:
    logits = normal(dtype, rows, VOCAB, scale=4)
    yield "greedy", {"logits": logits}
    yield "nonfinite_rows", {"logits": logits}
    part = VOCAB // RANKS
    yield "sample_local", {**drawn(dtype, rows, part), "vocab_start": part}
    yield "sample", {
        **drawn(dtype, rows, VOCAB), "top_k": torch.full((rows,), 20),
        "top_p": torch.full((rows,), 0.95), "min_p": torch.zeros(rows),
    }  # fmt: skip


Group = Callable[[torch.dtype, int], Iterator[tuple[str, Arguments]]]


def _one_of(group: Group, op: str, rows: int) -> Callable[[torch.dtype], Sequence[Arguments]]:
    """The arguments that a group yields for an operator; what comes after it isn't made."""

    def make(dtype: torch.dtype) -> Sequence[Arguments]:
        return [next(arguments for name, arguments in group(dtype, rows) if name == op)]

    return make


def _of_group(group: Group, ops: Sequence[str], rows: Sequence[int], text: str) -> list[OpCase]:
    return [
        OpCase(op, text.format(count), _one_of(group, op, count), count)
        for op in ops
        for count in rows
    ]


def _attention_cases(rows: int) -> list[OpCase]:
    dense_text, sparse_text = f"{rows}x{DENSE_CONTEXT} dense", f"{rows}x{CONTEXT} sparse"
    return [
        OpCase(
            "select_blocks", f"{rows}x{CONTEXT}", lambda dtype: [selected(dtype, rows)], rows
        ),
        OpCase(
            "paged_attention", dense_text,
            lambda dtype: [attended(dtype, rows, DENSE_CONTEXT, False)], rows,
        ),
        OpCase(
            "paged_attention", sparse_text,
            lambda dtype: [attended(dtype, rows, CONTEXT, True)], rows,
        ),
    ]  # fmt: skip


def _expert_cases(rows: int) -> list[OpCase]:
    cases = [OpCase("moe_experts", f"{rows}x{TOP_K}", lambda d: expert_sets(d, rows), rows)]
    if rows in DECODE_ROWS:
        cases.insert(0, OpCase("route", f"{rows}x512", lambda d: [routed(d, rows)], rows))
    return cases


def _cases() -> Iterator[OpCase]:
    norm_ops = ("rms_norm", "grouped_rms_norm", "gated_rms_norm", "rope_tables", "apply_rope")
    verify_ops = (
        "causal_conv_verify", "window_commit_", "gated_delta_verify", "gated_delta_commit_",
    )  # fmt: skip
    chunk_ops = ("causal_conv_chunk", "gated_delta_chunk", "linear")
    rows, draws = DECODE_ROWS, ("greedy", "nonfinite_rows", "sample_local")
    yield from _of_group(norms, norm_ops, rows, "{}")
    yield from _of_group(streams, ("hyper_mix", "hyper_inject_"), rows, "{}")
    yield from _of_group(dense, ("linear", "swiglu_mlp", "gated_swiglu"), rows, "{}")
    steps = ("causal_conv_step", "delta_gates", "gated_delta_step")
    yield from _of_group(recurrent, steps, rows, "{}")
    yield from _of_group(verified, verify_ops, rows, f"{{}}x{VERIFY_TOKENS}")
    yield from _of_group(chunked, chunk_ops, (CHUNK_TOKENS,), "{}")
    yield from _of_group(cached, ("write_kv_", "index_keys"), rows, "{}")
    for count in rows:
        yield from _attention_cases(count)
    for count in (*rows, EXPERT_CHUNK_TOKENS):
        yield from _expert_cases(count)
    yield from _of_group(ngrams, ("ngram_ids", "table_rows", "ngram_gate"), rows, "{}")
    yield from _of_group(sampled, draws, rows, "{}")
    yield from _of_group(sampled, ("sample",), rows[:1], "{}")  # its reference sorts for a second


CASES = tuple(_cases())
