"""Runs every variant of this device at a model's shapes and compares it with the reference.

The reference computes in fp32 on the host from the same rounded inputs. Knows operators by their
arguments only; what a model looks like is read from its spec.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ops.capability_file import OpResult
from ops.lowbit.pack import quantise, quantise_table
from ops.lowbit.packed import Packed
from ops.registry import REFERENCES, variants_of
from ops.spec import PASSED, PROBED, Implementation
from placement.formats import W4B32, W8_SYM
from placement.spec import GatedDeltaSpec, ModelSpec, MoeSpec, SparseAttentionSpec
from rank_worker.device import Device

TOKENS = 37  # no power of two, and more than one tile
PAGES, PAGE_TOKENS = 6, 64
MAX_EXPERTS = 16  # of a bank; each at full width
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 4e-2}
SAME_CHOICES = 0.98  # of ids: near equals may change places with the rounding


@dataclass(frozen=True)
class Inputs:
    """Random arguments of one number type, the same in every run."""

    dtype: torch.dtype
    generator: torch.Generator

    def values(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.dtype)

    def scale(self, *shape: int) -> Tensor:
        return 1 + 0.1 * torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)


def probe(device: Device, spec: ModelSpec, dtype: torch.dtype) -> dict[str, OpResult]:
    """Result of each variant that says it can run here, by its name."""
    capability = device.capability(dtype)
    inputs = Inputs(dtype, torch.Generator().manual_seed(1))
    cases = op_cases(spec, inputs)
    results = {}
    for variant in variants_of(capability.backend):
        own = (PROBED + variant.name, PASSED)  # what a variant may want to have been found before
        there = replace(capability, versions=(*capability.versions, own))
        mine = [case for name, case in cases.items() if name.split()[0] == variant.op]
        if mine and variant.requires(there) is None:
            told = [_probe_one(device, variant, case, dtype) for case in mine]
            results[variant.name] = max(told, key=lambda one: (not one.is_passed, one.error or 0.0))
    return results


def sizes_of(spec: ModelSpec) -> str:
    """Family, hidden size and a hash of what `op_cases` reads of a model."""
    parts = {repr(part) for layer in spec.layers for part in (layer.mixer, layer.channel)}
    read = repr((spec.hidden, spec.residual, spec.norm_eps, sorted(parts)))
    return f"{spec.family}/{spec.hidden}/{hashlib.sha256(read.encode()).hexdigest()[:8]}"


def _probe_one(
    device: Device, variant: Implementation, case: Sequence[Any], dtype: torch.dtype
) -> OpResult:
    host, chip = _copied(case), _copied(case)
    try:
        expected = _outcome(REFERENCES[variant.op].function, [_widened(x) for x in host])
        with device.building():
            placed = [_placed(device, x) for x in chip]
        found = [x.cpu() for x in _outcome(variant.function, placed)]
    except Exception as error:  # whatever a library raises is what is to be told
        cause = (str(error).splitlines() or [""])[0]
        return OpResult(variant.op, f"failed: {type(error).__name__}: {cause[:200]}")
    worst = max((_error(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    if worst <= TOLERANCE[dtype]:
        return OpResult(variant.op, PASSED, worst)
    return OpResult(variant.op, f"failed: off by {worst:.3g} of the largest value", worst)


def _copied(case: Sequence[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in case]


def _placed(device: Device, value: Any) -> Any:
    if isinstance(value, Packed):
        return value.to(device.place(value.codes).device)
    return device.place(value) if isinstance(value, Tensor) else value


def _widened(value: Any) -> Any:
    is_wide = not isinstance(value, Tensor) or not value.is_floating_point()
    return value if is_wide else value.float()


def _outcome(function: Callable[..., Any], arguments: list[Any]) -> list[Tensor]:
    """Tensors that a call returns; those that it writes where it returns none."""
    made = function(*arguments)
    if made is None:
        made = [x for x in arguments if isinstance(x, Tensor)]
    outputs = made if isinstance(made, tuple | list) else [made]
    return [x for x in outputs if isinstance(x, Tensor)]


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference by the largest value; infinite for another shape, a NaN or other ids."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        same = (found == expected).float().mean().item() if found.numel() else 1.0
        return 0.0 if same >= SAME_CHOICES else float("inf")
    if not found.numel():
        return 0.0
    difference = (found.float() - expected.float()).abs().amax()
    worst = (difference / expected.float().abs().amax().clamp_min(1e-6)).item()
    return worst if worst == worst else float("inf")


def op_cases(spec: ModelSpec, new: Inputs) -> dict[str, tuple[Any, ...]]:
    """Arguments by operator, of this model's sizes; a second word tells more of one operator."""
    hidden, streams, eps = spec.hidden, spec.residual.num_streams, spec.norm_eps
    rank = spec.residual.low_rank
    cases: dict[str, tuple[Any, ...]] = {
        "rms_norm": (new.values(TOKENS, hidden), new.scale(hidden), eps),
        "grouped_rms_norm": (
            new.values(TOKENS, streams, hidden), new.scale(streams, hidden), eps,
        ),
        "hyper_mix": (
            new.values(TOKENS, streams, hidden), new.scale(streams, hidden),
            new.values(rank + streams, streams * hidden, scale=0.02),
            new.values(streams * hidden, rank, scale=0.1), eps, rank,
        ),
    }  # fmt: skip
    for layer in spec.layers:
        if isinstance(layer.mixer, GatedDeltaSpec):
            cases.update(_delta_cases(layer.mixer, eps, new))
        elif isinstance(layer.mixer, SparseAttentionSpec):
            cases.update(_attention_cases(layer.mixer, eps, new))
        if isinstance(layer.channel, MoeSpec):
            cases.update(_expert_cases(layer.channel, hidden, new))
        if {"gated_delta_chunk", "paged_attention", "route"} <= set(cases):
            break
    return cases


def _delta_cases(spec: GatedDeltaSpec, eps: float, new: Inputs) -> dict[str, tuple[Any, ...]]:
    heads, keys = spec.num_value_heads, spec.num_key_heads
    values = (TOKENS, heads, spec.value_dim)
    gate = (new.scale(spec.value_dim), new.values(*values), eps, spec.gate_activation)
    return {
        "gated_rms_norm": (new.values(*values), *gate),
        "gated_delta_chunk": (
            new.values(TOKENS, keys, spec.key_dim), new.values(TOKENS, keys, spec.key_dim),
            new.values(*values), -0.2 * new.uniform(TOKENS, heads), new.uniform(TOKENS, heads),
            torch.arange(heads) // (heads // keys),
            0.1 * torch.randn(heads, spec.key_dim, spec.value_dim, generator=new.generator),
        ),
    }  # fmt: skip


def _attention_cases(
    spec: SparseAttentionSpec, eps: float, new: Inputs
) -> dict[str, tuple[Any, ...]]:
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    pools = [new.values(PAGES, PAGE_TOKENS, kv_heads, dim) for _ in range(2)]
    table = torch.randperm(PAGES, generator=new.generator)[None]
    positions = (PAGES * PAGE_TOKENS - TOKENS + torch.arange(TOKENS))[None]
    index = new.values(PAGES, PAGE_TOKENS // spec.block_tokens, spec.index_dim)
    angles = new.uniform(TOKENS, spec.rotary_dim // 2).repeat(1, 2)
    written = [new.values(TOKENS, kv_heads, dim) for _ in range(2)]
    slots = torch.randperm(PAGES * PAGE_TOKENS, generator=new.generator)[:TOKENS]
    return {
        "apply_rope": (
            new.values(TOKENS, heads, dim), angles.cos().to(new.dtype), angles.sin().to(new.dtype),
        ),
        "index_keys": (
            new.values(TOKENS, spec.block_tokens, spec.index_dim), new.scale(spec.index_dim), eps,
            torch.arange(TOKENS) * spec.block_tokens, spec.rotary_dim, spec.rope_theta,
        ),
        "write_kv_": (*(pool.clone() for pool in pools), slots, *written),
        "select_blocks": (
            new.values(1, TOKENS, spec.index_heads, spec.index_dim), index, table, positions,
            spec.block_tokens, spec.max_blocks,
        ),
        "paged_attention": (
            new.values(1, TOKENS, heads, dim), *pools, table, positions, None, spec.block_tokens,
            (heads // kv_heads,) * kv_heads, dim**-0.5,
        ),
    }  # fmt: skip


def _expert_cases(spec: MoeSpec, hidden: int, new: Inputs) -> dict[str, tuple[Any, ...]]:
    experts, inner, top_k = min(spec.num_experts, MAX_EXPERTS), spec.intermediate, spec.top_k
    local = new.uniform(TOKENS, 2 * MAX_EXPERTS).argsort(dim=1)[:, :top_k]
    routes = (
        new.values(TOKENS, hidden), new.uniform(TOKENS, top_k).to(new.dtype),
        torch.where(local < experts, local, -1),
    )  # fmt: skip
    banks = (
        new.values(experts, 2 * inner, hidden, scale=hidden**-0.5),
        new.values(experts, hidden, inner, scale=inner**-0.5),
    )
    form = W8_SYM if hidden % W4B32.group or inner % W4B32.group else W4B32
    codes, scale = quantise_table(new.values(TOKENS, hidden))
    return {
        "route": (new.values(TOKENS, spec.num_experts), top_k, spec.normalise_top_k),
        "gated_swiglu": (new.values(TOKENS, 2 * inner), new.values(TOKENS, 1)),
        "swiglu_mlp": (
            new.values(TOKENS, hidden), new.values(2 * inner, hidden, scale=hidden**-0.5),
            new.values(hidden, inner, scale=inner**-0.5),
        ),
        "moe_experts": (*routes, *banks),
        "packed_experts": (*routes, *(quantise(bank, form) for bank in banks), False),
        "packed_experts int8": (*routes, *(quantise(bank, W8_SYM) for bank in banks), True),
        "packed_linear": (routes[0], quantise(banks[0][0], form), False),
        "packed_linear int8": (routes[0], quantise(banks[0][0], W8_SYM), True),
        "packed_table_rows": (
            codes.view(torch.uint8), scale, local.clamp_max(TOKENS - 1), 0, new.dtype,
        ),
    }  # fmt: skip
