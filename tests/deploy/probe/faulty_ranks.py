"""Ranks with a fault of their own, which `nrank probe` has to find. They pickle to processes."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from placement.spec import Axis, GatedDeltaSpec
from rank_worker.gated_delta import GatedDeltaMixer
from rank_worker.layer_tap import TappedRank
from rank_worker.model import Layer, Model

FIRST_WRONG_HEAD = 32  # a copy by blocks of 32 that forgets the rest


class FaultyRank(TappedRank):
    """Breaks the loaded model of the ranks `faulty`, in layer `layer`."""

    def __init__(
        self, *arguments: Any, faulty: tuple[int, ...], layer: int = 1, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self.faulty, self.layer = faulty, layer

    def load(self) -> None:
        super().load()
        assert self.runner is not None
        if self.rank in self.faulty:
            with torch.inference_mode():
                self.spoil(self.runner.model, self.runner.model.layers[self.layer])

    def spoil(self, model: Model, layer: Layer) -> None:
        raise NotImplementedError

    def first(self, axis: Axis) -> int:
        assert self.plan is not None
        return self.plan.ranks[self.rank].share.ranges[axis][0]


class WrongGates(FaultyRank):
    """The decay of value heads 32 to 47 is that of an empty vector, in models with 48 of them."""

    def spoil(self, model: Model, layer: Layer) -> None:
        mixer, spec = layer.mixer, model.spec.layers[self.layer].mixer
        assert isinstance(mixer, GatedDeltaMixer)
        assert isinstance(spec, GatedDeltaSpec)
        if spec.num_value_heads == 48:
            kept = max(0, FIRST_WRONG_HEAD - self.first(Axis.VALUE_HEADS))
            mixer.a_log = mixer.a_log.clone()
            mixer.a_log[kept:] = 0


class UnreducedShared(FaultyRank):
    """The shared expert's part is added behind the reduction of the routed experts' parts."""

    def spoil(self, model: Model, layer: Layer) -> None:
        channel, site, withheld = layer.channel, layer.channel_site, list[Tensor]()
        swiglu, inject = channel.ops.gated_swiglu, site.ops.hyper_inject_
        channel.ops, site.ops = copy(channel.ops), copy(site.ops)

        def without(gate_up: Tensor, gate: Tensor) -> Tensor:
            shared: Tensor = swiglu(gate_up, gate)
            withheld.append(channel.shared_down(shared))
            return torch.zeros_like(shared)

        def with_own(streams: Tensor, weights: Tensor, y: Tensor) -> Tensor:
            out: Tensor = inject(streams, weights, y + withheld.pop())
            return out

        channel.ops.gated_swiglu = without  # type: ignore[method-assign]
        site.ops.hyper_inject_ = with_own  # type: ignore[method-assign]


class LoudExpert(FaultyRank):
    """The rank's first expert is eight times too loud in its memory; the checkpoint is whole."""

    def spoil(self, model: Model, layer: Layer) -> None:
        bank = layer.channel.experts.down
        assert isinstance(bank, Tensor)
        bank[0] *= 8


class OtherRouter(FaultyRank):
    """Two experts' rows of the router are exchanged."""

    def spoil(self, model: Model, layer: Layer) -> None:
        weight = layer.channel.in_proj.weights[0]
        assert isinstance(weight, Tensor)
        weight[:2] = weight[:2].flip(0)


class OtherNgrams(FaultyRank):
    def spoil(self, model: Model, layer: Layer) -> None:
        assert layer.ngram is not None
        layer.ngram.table *= 1.5


class OtherHead(FaultyRank):
    def spoil(self, model: Model, layer: Layer) -> None:
        weight = model.head.weights[0]
        assert isinstance(weight, Tensor)
        weight *= 1.1


class OwnSum(FaultyRank):
    """The rank's own residual gets a little less than the sum over ranks."""

    def spoil(self, model: Model, layer: Layer) -> None:
        site, inject = layer.mixer_site, layer.mixer_site.ops.hyper_inject_
        site.ops = copy(site.ops)

        def less(streams: Tensor, weights: Tensor, y: Tensor) -> Tensor:
            out: Tensor = inject(streams, weights, 0.99 * y)
            return out

        site.ops.hyper_inject_ = less  # type: ignore[method-assign]


class NoNumbers(FaultyRank):
    """Its part of the channel overflows."""

    def spoil(self, model: Model, layer: Layer) -> None:
        weight = layer.channel.shared_down.weights[0]
        assert isinstance(weight, Tensor)
        weight[0] = float("inf")
