"""What each operator demands of its arguments: shapes, dtypes, and indices within bounds.

A kernel trusts these; checked on any backend, a CPU test catches what would corrupt memory on a
chip. Checking reads device data, so it is for tests and for hunting a fault, not for serving.

A shape is written as names: "T S*H" has two dimensions, "..." stands for any leading ones. The
first use of a name binds it, integer arguments are bound from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ops.lowbit.packed import Packed
from ops.spec import ContractError

ACTIVATION = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32 = (torch.float32,)
INT64 = (torch.int64,)


@dataclass
class Call:
    """One call under check: the operator, its arguments by name, the dimensions bound so far."""

    op: str
    arguments: Mapping[str, Any]
    sizes: dict[str, int] = field(default_factory=dict)

    def fail(self, what: str, value: object, limit: str) -> None:
        raise ContractError(
            f"{self.op}: {what} is {value}, allowed is {limit}; correct the caller, "
            "a kernel would run out of its bounds"
        )

    def product(self, expression: str) -> int:
        return math.prod(int(t) if t.isdigit() else self.sizes[t] for t in expression.split("*"))

    def dimension(self, what: str, expression: str, size: int) -> None:
        """Compare a dimension with an expression, binding the one name that is still free."""
        terms = expression.split("*")
        free = [t for t in terms if not t.isdigit() and t not in self.sizes]
        if free:
            known = self.product("*".join(t for t in terms if t != free[0]) or "1")
            self.sizes[free[0]] = size // known if known else 0
        if self.product(expression) != size:
            self.fail(what, size, f"{expression} = {self.product(expression)}")

    def shape(self, name: str, pattern: str) -> None:
        value = self.arguments[name]
        dims = pattern.split()
        shape = tuple(value.shape)
        if dims[0] == "...":
            dims, shape = dims[1:], shape[max(0, len(shape) - len(dims) + 1) :]
        if len(dims) != len(shape):
            self.fail(f"shape of {name}", tuple(value.shape), f"[{pattern}]")
        for index, (expression, size) in enumerate(zip(dims, shape, strict=True)):
            self.dimension(f"size {index} of {name} [{pattern}]", expression, size)

    def within(self, name: str, low: int, stop: int, value: Tensor | None = None) -> None:
        """All entries of an integer tensor lie in low..stop-1."""
        tensor = self.arguments[name] if value is None else value
        wrong = tensor[(tensor < low) | (tensor >= stop)]
        if wrong.numel():
            self.fail(f"a value of {name}", wrong[0].item(), f"{low}..{stop - 1}")


@dataclass(frozen=True)
class Contract:
    """Shapes, dtypes and index ranges of an operator, and what else it demands."""

    shapes: tuple[tuple[str, str], ...] = ()
    dtypes: tuple[tuple[str, tuple[torch.dtype, ...]], ...] = ()
    ranges: tuple[tuple[str, int, str], ...] = ()  # name, lowest, product that it stays below
    also: Callable[[Call], None] | None = None

    def check(self, op: str, arguments: Mapping[str, Any]) -> None:
        """Raise ContractError, naming operator and value, for the first demand not met."""
        integers = {k: v for k, v in arguments.items() if type(v) is int}
        call = Call(op, arguments, integers)
        for name, allowed in self.dtypes:
            value = arguments[name]
            if value is not None and value.dtype not in allowed:
                call.fail(f"dtype of {name}", value.dtype, " or ".join(map(str, allowed)))
        for name, pattern in self.shapes:
            if arguments[name] is not None:
                call.shape(name, pattern)
        for name, low, stop in self.ranges:
            call.within(name, low, call.product(stop))
        if self.also is not None:
            self.also(call)


def _all(dtypes: tuple[torch.dtype, ...], names: str) -> tuple[Any, ...]:
    return tuple((name, dtypes) for name in names.split())


def _shapes(**patterns: str) -> tuple[tuple[str, str], ...]:
    return tuple(patterns.items())


def _window_length(name: str) -> Callable[[Call], None]:
    def check(call: Call) -> None:
        expected = (call.sizes["K"] - 1) * call.sizes["dilation"]
        if call.sizes["W"] != expected:
            call.fail(f"length of {name}", call.sizes["W"], f"(K - 1) * dilation = {expected}")

    return check


def _inject_rows(call: Call) -> None:
    rank, streams = call.sizes["rank"], call.sizes["S"]
    if call.sizes["rows"] not in (rank, rank + streams):
        call.fail("rows of down_inject", call.sizes["rows"], f"{rank} or {rank + streams}")


def _kept_tokens(call: Call) -> None:
    call.within("counts", 0, call.sizes["Q"] + 1)


def _chunk_length(call: Call) -> None:
    if call.sizes["T"] < 1 or call.sizes["chunk"] < 1:
        call.fail("tokens, chunk", (call.sizes["T"], call.sizes["chunk"]), "at least 1 each")


def _visible_pages(call: Call, page_tokens: int) -> None:
    """Table entries of pages with a visible token exist in the pool; others may hold anything."""
    table, positions = call.arguments["page_table"], call.arguments["positions"]
    if positions.numel():
        first = torch.arange(table.shape[1], device=table.device) * page_tokens
        seen = table[first <= positions.amax(dim=1, keepdim=True)]
        call.within("page_table", 0, call.sizes["pages"], seen)


def _select(call: Call) -> None:
    _visible_pages(call, call.product("page_blocks*block_tokens"))


def _attention(call: Call) -> None:
    groups = call.arguments["kv_groups"]
    if len(groups) != call.sizes["nkv"] or sum(groups) != call.sizes["nq"]:
        limit = f"{call.sizes['nkv']} groups of {call.sizes['nq']} query heads together"
        call.fail("kv_groups", groups, limit)
    _visible_pages(call, call.sizes["page"])
    blocks, positions = call.arguments["block_ids"], call.arguments["positions"]
    if blocks is not None:
        call.within("block_ids", -1, call.product("P*page"))
        complete = (positions + 1) // call.sizes["block_tokens"]
        early = blocks[blocks >= complete[..., None]]
        if early.numel():
            call.fail("a value of block_ids", early[0].item(), "a complete block of its query")


def _top_k(call: Call) -> None:
    if not 1 <= call.sizes["top_k"] <= call.sizes["E"]:
        call.fail("top_k", call.sizes["top_k"], f"1..{call.sizes['E']} experts")


def _distinct_experts(call: Call) -> None:
    local = call.arguments["local"].sort(dim=-1).values
    twice = local[..., 1:][(local[..., 1:] == local[..., :-1]) & (local[..., 1:] >= 0)]
    if twice.numel():
        call.fail("an expert twice in a row of local", twice[0].item(), "once a token")


def _packed_linear(call: Call) -> None:
    _packed(call, "weight", "N K")


def _packed_experts(call: Call) -> None:
    _packed(call, "gate_up", "El 2*I H")
    _packed(call, "down", "El H I")
    call.within("local", -1, call.sizes["El"])
    _distinct_experts(call)


def _packed(call: Call, name: str, pattern: str) -> None:
    """The shape of a packed weight, and as many codes and scales as it needs."""
    weight: Packed = call.arguments[name]
    for index, (expression, size) in enumerate(zip(pattern.split(), weight.shape, strict=True)):
        call.dimension(f"size {index} of {name} [{pattern}]", expression, size)
    form, outer = weight.form, weight.shape[:-2]
    width = math.ceil(weight.shape[-1] * form.bits / 8)
    blocks = form.scale_counts(weight.shape, weight.stacked)
    for part, tensor, wanted in (
        ("codes", weight.codes, (*weight.shape[:-1], width)),
        ("scale", weight.scale, (*outer, *blocks)),
        ("zero", weight.zero, (*outer, *blocks)),
        ("whole", weight.whole, (*outer, weight.stacked)),
    ):
        if tensor is not None and tuple(tensor.shape) != wanted:
            call.fail(f"shape of {name}.{part}", tuple(tensor.shape), f"{wanted}")


def _ngram_heads(call: Call) -> None:
    order, heads, length = call.sizes["n"], call.sizes["h"], call.sizes["length"]
    if order < 2 or heads % (order - 1):
        call.fail("heads, order", (heads, order), "heads in equal parts for orders 2..n")
    if length < order - 1:
        call.fail("history", length, f"at least the context of {order - 1} tokens")


def _temperature(call: Call) -> None:
    temperature = call.arguments["temperature"]
    wrong = temperature[~(torch.isfinite(temperature) & (temperature >= 0))]
    if wrong.numel():
        call.fail("temperature", wrong[0].item(), "finite and not negative")


_DELTA_DTYPES = _all(ACTIVATION, "q k v") + _all(FLOAT32, "g beta") + _all(INT64, "key_head")
_DRAW_DTYPES = _all(FLOAT32, "temperature") + _all(INT64, "seed choice position")

CONTRACTS: dict[str, Contract] = {
    "unit_offset": Contract(dtypes=_all(ACTIVATION, "weight")),
    "rms_norm": Contract(
        _shapes(x="... d", scale="d"), _all(ACTIVATION, "x") + _all(FLOAT32, "scale")
    ),
    "grouped_rms_norm": Contract(
        _shapes(x="... S H", scale="S H"), _all(ACTIVATION, "x") + _all(FLOAT32, "scale")
    ),
    "gated_rms_norm": Contract(
        _shapes(x="... d", weight="d", gate="... d"),
        _all(ACTIVATION, "x gate") + _all(FLOAT32, "weight"),
    ),
    "rope_tables": Contract(dtypes=_all(INT64, "positions")),
    "apply_rope": Contract(
        _shapes(x="... heads d", cos="... rotary", sin="... rotary"),
        _all(ACTIVATION, "x cos sin"),
    ),
    "causal_conv_chunk": Contract(
        _shapes(x="T C", weight="C K", window="W C"),
        _all(ACTIVATION, "x weight window"),
        also=_window_length("window"),
    ),
    "causal_conv_step": Contract(
        _shapes(x="B C", weight="C K", windows="slots W C", slots="B"),
        _all(ACTIVATION, "x weight windows") + _all(INT64, "slots"),
        (("slots", 0, "slots"),),
        _window_length("windows"),
    ),
    "delta_gates": Contract(
        _shapes(a="N Hv", b="N Hv", a_log="Hv", dt_bias="Hv"),
        _all(ACTIVATION, "a b") + _all(FLOAT32, "a_log dt_bias"),
    ),
    "gated_delta_step": Contract(
        _shapes(
            q="B Hk dk",
            k="B Hk dk",
            v="B Hv dv",
            g="B Hv",
            beta="B Hv",
            key_head="Hv",
            states="slots Hv dk dv",
            slots="B",
        ),
        _DELTA_DTYPES + _all(FLOAT32, "states") + _all(INT64, "slots"),
        (("key_head", 0, "Hk"), ("slots", 0, "slots")),
    ),
    "gated_delta_chunk": Contract(
        _shapes(
            q="T Hk dk",
            k="T Hk dk",
            v="T Hv dv",
            g="T Hv",
            beta="T Hv",
            key_head="Hv",
            state="Hv dk dv",
        ),
        _DELTA_DTYPES + _all(FLOAT32, "state"),
        (("key_head", 0, "Hk"),),
        _chunk_length,
    ),
    "causal_conv_verify": Contract(
        _shapes(x="B Q C", weight="C K", windows="slots W C", slots="B"),
        _all(ACTIVATION, "x weight windows") + _all(INT64, "slots"),
        (("slots", 0, "slots"),),
        _window_length("windows"),
    ),
    "window_commit_": Contract(
        _shapes(x="B Q C", windows="slots W C", slots="B", counts="B"),
        _all((*ACTIVATION, *INT64), "x windows") + _all(INT64, "slots counts"),
        (("slots", 0, "slots"),),
        _kept_tokens,
    ),
    "gated_delta_verify": Contract(
        _shapes(
            q="B Q Hk dk",
            k="B Q Hk dk",
            v="B Q Hv dv",
            g="B Q Hv",
            beta="B Q Hv",
            key_head="Hv",
            states="slots Hv dk dv",
            slots="B",
        ),
        _DELTA_DTYPES + _all(FLOAT32, "states") + _all(INT64, "slots"),
        (("key_head", 0, "Hk"), ("slots", 0, "slots")),
    ),
    "gated_delta_commit_": Contract(
        _shapes(
            k="B Q Hk dk",
            v="B Q Hv dv",
            g="B Q Hv",
            beta="B Q Hv",
            key_head="Hv",
            states="slots Hv dk dv",
            slots="B",
            counts="B",
        ),
        _DELTA_DTYPES[1:] + _all(FLOAT32, "states") + _all(INT64, "slots counts"),
        (("key_head", 0, "Hk"), ("slots", 0, "slots")),
        _kept_tokens,
    ),
    "hyper_mix": Contract(
        _shapes(streams="T S H", scale="S H", down_inject="rows S*H", up="S*H rank"),
        _all(ACTIVATION, "streams down_inject up") + _all(FLOAT32, "scale"),
        also=_inject_rows,
    ),
    "hyper_inject_": Contract(
        _shapes(streams="T S H", inject="T S", y="T H"), _all(ACTIVATION, "streams inject y")
    ),
    "index_keys": Contract(
        _shapes(raw="N r dim", scale="dim", first_positions="N"),
        _all(ACTIVATION, "raw") + _all(FLOAT32, "scale") + _all(INT64, "first_positions"),
        also=lambda call: call.within("first_positions", 0, 1 << 62),
    ),
    "select_blocks": Contract(
        _shapes(
            query="B Q h dim",
            index_pool="pages page_blocks dim",
            page_table="B P",
            positions="B Q",
        ),
        _all(ACTIVATION, "query index_pool") + _all(INT64, "page_table positions"),
        (("positions", -1, "P*page_blocks*block_tokens"),),
        _select,
    ),
    "write_kv_": Contract(
        _shapes(
            k_pool="pages page nkv d",
            v_pool="pages page nkv d",
            slots="N",
            k="N nkv d",
            v="N nkv d",
        ),
        _all(ACTIVATION, "k_pool v_pool k v") + _all(INT64, "slots"),
        (("slots", 0, "pages*page"),),
    ),
    "paged_attention": Contract(
        _shapes(
            query="B Q nq d",
            k_pool="pages page nkv d",
            v_pool="pages page nkv d",
            page_table="B P",
            positions="B Q",
            block_ids="B Q chosen",
        ),
        _all(ACTIVATION, "query k_pool v_pool") + _all(INT64, "page_table positions block_ids"),
        (("positions", -1, "P*page"),),
        _attention,
    ),
    "route": Contract(_shapes(logits="T E"), _all(ACTIVATION, "logits"), also=_top_k),
    "moe_experts": Contract(
        _shapes(x="T H", weights="T k", local="T k", down="El H I", gate_up="El 2*I H"),
        _all(ACTIVATION, "x weights gate_up down") + _all(INT64, "local"),
        (("local", -1, "El"),),
        _distinct_experts,
    ),
    "linear": Contract(_shapes(x="... K", weight="N K"), _all(ACTIVATION, "x weight")),
    "gated_swiglu": Contract(
        _shapes(gate_up="T I2", gate="T one"), _all(ACTIVATION, "gate_up gate")
    ),
    "swiglu_mlp": Contract(
        _shapes(x="... H", down="H_out I", gate_up="2*I H"), _all(ACTIVATION, "x gate_up down")
    ),
    "packed_linear": Contract(_shapes(x="... K"), _all(ACTIVATION, "x"), also=_packed_linear),
    "packed_experts": Contract(
        _shapes(x="T H", weights="T k", local="T k"),
        _all(ACTIVATION, "x weights") + _all(INT64, "local"),
        also=_packed_experts,
    ),
    "packed_table_rows": Contract(
        _shapes(table="rows w", scale="one"),
        _all((torch.uint8,), "table") + _all(INT64, "ids"),
        also=lambda call: call.within("ids", 0, 1 << 62),
    ),
    "ngram_ids": Contract(
        _shapes(history="B length", multipliers="n", vocab_sizes="h", offsets="h"),
        _all(INT64, "history multipliers vocab_sizes offsets"),
        also=_ngram_heads,
    ),
    "ngram_gate": Contract(
        _shapes(
            embedding="T D",
            streams="T S H",
            key="S*H D",
            value="H D",
            norm_key="S H",
            norm_query="S H",
            norm_conv="S H",
        ),
        _all(ACTIVATION, "embedding streams key value")
        + _all(FLOAT32, "norm_key norm_query norm_conv"),
    ),
    "table_rows": Contract(
        _shapes(table="rows w"),
        _all(INT64, "ids"),
        also=lambda call: call.within("ids", 0, 1 << 62),
    ),
    "gumbel": Contract(
        _shapes(seed="B", choice="B", position="B"), _all(INT64, "seed choice position token_ids")
    ),
    "sample": Contract(
        _shapes(
            logits="B V",
            temperature="B",
            top_k="B",
            top_p="B",
            min_p="B",
            seed="B",
            choice="B",
            position="B",
        ),
        _DRAW_DTYPES + _all(FLOAT32, "top_p min_p") + _all(INT64, "top_k"),
        also=_temperature,
    ),
    "sample_local": Contract(
        _shapes(logits="B Vl", temperature="B", seed="B", choice="B", position="B"),
        _DRAW_DTYPES,
        also=_temperature,
    ),
    "greedy": Contract(_shapes(logits="B V"), _all(ACTIVATION, "logits")),
    "nonfinite_rows": Contract(_shapes(logits="B V"), _all(ACTIVATION, "logits")),
}
