"""Whether packing makes the residual grow: both checkpoints on the same text, layer by layer.

An early 2-bit checkpoint of a large model reached a residual of RMS 525 where its source stayed
small, and answered nonsense without any error. Both models are run plainly, as `nrank probe` does,
with one layer of each in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deploy.probe.plain_model import PlainModel, Routed

LAYER_BOUND = 1.25  # growth in one layer over that of the source
WHOLE_BOUND = 2.0  # RMS behind a layer over that of the source
DIGITS = 4


@dataclass(frozen=True)
class LayerGrowth:
    """RMS of the residual behind a layer in both models, each with its own residual before it.

    `growth` are the factors by which the layer raised them, 1 where there was nothing before it.
    """

    layer: int
    source_rms: float
    packed_rms: float
    source_growth: float
    packed_growth: float


@dataclass(frozen=True)
class Flag:
    """A layer that grows, and the expert that adds most of what is too much (-1: none does).

    Layer -1: the answers.
    """

    layer: int
    expert: int
    text: str


@dataclass(frozen=True)
class Growth:
    """`divergence`: mean KL divergence a token of the next-token distributions, in nats."""

    layers: tuple[LayerGrowth, ...]
    flags: tuple[Flag, ...]
    divergence: float


@torch.no_grad()
def check_growth(
    source_dir: str, packed_dir: str, token_ids: Tensor, on_layer: Callable[[int, int], None]
) -> Growth:
    """`token_ids` [T] of the calibration text."""
    source, packed = PlainModel(source_dir), PlainModel(packed_dir)
    streams = source.embed(token_ids), packed.embed(token_ids)
    rows, flags = list[LayerGrowth](), list[Flag]()
    layers = source.layers(), packed.layers()
    for _ in source.spec.layers:
        layer = next(layers[0]), next(layers[1])
        before = _rms(streams[0]), _rms(streams[1])
        on_layer(len(rows) + 1, len(source.spec.layers))
        entered = [one.inject_ngrams(s, token_ids) for one, s in zip(layer, streams, strict=True)]
        between = [one.mix(s).into(s) for one, s in zip(layer, entered, strict=True)]
        routed = [one.route(s) for one, s in zip(layer, between, strict=True)]
        streams = routed[0].into(between[0]), routed[1].into(between[1])
        after = _rms(streams[0]), _rms(streams[1])
        row = LayerGrowth(
            layer[0].spec.index, _rounded(after[0]), _rounded(after[1]),
            _rounded(_ratio(after[0], before[0], 1.0)), _rounded(_ratio(after[1], before[1], 1.0)),
        )  # fmt: skip
        if text := _too_much(row, rows):
            expert = _loudest(layer[0].route(between[1], routed[1].ids), routed[1])
            flags.append(Flag(row.layer, expert, text))
        rows.append(row)
        del layer, routed  # the next one is read with the room of this one
    divergence = _divergence(source.logits(streams[0]), packed.logits(streams[1]))
    if not flags and not math.isfinite(divergence):
        flags.append(Flag(-1, -1, "the answers of the two models can't be compared: logits aren't "
                          "finite"))  # fmt: skip
    return Growth(tuple(rows), tuple(flags), _rounded(divergence))


def _too_much(row: LayerGrowth, before: list[LayerGrowth]) -> str:
    """Why a layer is flagged, "" for one that isn't. What isn't finite is too much."""
    if not math.isfinite(row.packed_rms + row.source_rms):
        where = ("", " in both models")[not math.isfinite(row.source_rms)]
        return f"the RMS of the residual is beyond what float32 holds{where}"
    excess = _ratio(row.packed_growth, row.source_growth, math.inf)
    ratio = _ratio(row.packed_rms, row.source_rms, math.inf)
    last = _ratio(before[-1].packed_rms, before[-1].source_rms, math.inf) if before else 1.0
    if not excess <= LAYER_BOUND:
        return (
            f"raises the residual {row.packed_growth:.3g} times, {row.source_growth:.3g} times in "
            f"the source (bound {LAYER_BOUND:g} of that)"
        )
    if not ratio <= WHOLE_BOUND and last <= WHOLE_BOUND:
        return (
            f"the residual has RMS {row.packed_rms:.3g}, {row.source_rms:.3g} in the source "
            f"(bound {WHOLE_BOUND:g} times that)"
        )
    return ""


def _loudest(source: Routed, packed: Routed) -> int:
    """The expert whose outputs gained most energy by packing, for the same inputs; -1: none."""
    ids = packed.ids.flatten()
    gained = (packed.outputs.square().sum(-1) - source.outputs.square().sum(-1)).flatten()
    sums = torch.zeros(int(ids.max()) + 1).index_add_(0, ids, gained.nan_to_num(posinf=1e30))
    best = int(sums.argmax())
    return best if sums[best] > 0 else -1


def _divergence(source: Tensor, packed: Tensor) -> float:
    p, q = (torch.log_softmax(one.double(), dim=-1) for one in (source, packed))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def _ratio(value: float, base: float, of_nothing: float) -> float:
    """`of_nothing` for a base of 0 under a value that isn't."""
    return value / base if base else (of_nothing if value else 1.0)


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
