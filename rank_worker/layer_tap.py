"""What a rank's layers see and hand on in each step, written down for `nrank probe`.

A tap changes nothing that is computed: it gives every layer its own copy of the rank's operators,
which note what goes through them, and hears what the layer driver hands to its reductions. Only a
`TappedRank` has one.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from ops.registry import OpSet
from placement.config import EngineConfig
from placement.spec import SparseAttentionSpec
from rank_worker.comm import Comm
from rank_worker.guard_word import GuardWord
from rank_worker.model import Layer, Model
from rank_worker.rank import Rank
from rank_worker.runner import Runner
from rank_worker.step_logprobs import StepLogprobs
from rank_worker.step_plan import StepPlan

# Operators whose result is a head's output, [..., heads, dim]; the chunk form gives a state, too.
HEAD_OPS = ("gated_delta_step", "gated_delta_chunk", "paged_attention")
ALL_BLOCKS = -2  # in "L.mixer.blocks": the query saw all, nothing was selected


class LayerTap:
    """Tensors of one step by name, T rows each:

    "L.mixer.in", "L.channel.in", "L.channel.out" are the streams [T, S, H]; "L.mixer.part" and
    "L.channel.part" what the rank hands to the reductions [T, H]; "L.mixer.heads" the heads' output
    [T, heads, dim], "L.mixer.g" and "L.mixer.beta" their gates [T, heads]; "L.mixer.blocks" the
    selected blocks of tokens [T, most blocks], filled up with -1, and "L.channel.ids" the chosen
    experts [T, k]. A rank without heads has no tensors of them.
    """

    def __init__(self, model: Model) -> None:
        self._noted: dict[str, Tensor] = {}
        self._half = ""  # whose reduction comes next
        model.comm = cast(Comm, _HeardComm(model.comm, self._hear_part))
        for layer, at in zip(model.layers, model.spec.layers, strict=True):
            self._attach(layer, at.index)
            if isinstance(at.mixer, SparseAttentionSpec):
                self._attach_blocks(layer, at.index, at.mixer.max_blocks)

    def take(self) -> dict[str, Tensor]:
        """What was noted since the last call, on the host."""
        noted, self._noted, self._half = self._noted, {}, ""
        return {name: tensor.cpu() for name, tensor in noted.items()}

    def _attach(self, layer: Layer, index: int) -> None:
        mixer, channel = f"{index}.mixer", f"{index}.channel"
        ops = layer.mixer.ops
        layer.mixer_site.ops = _with(ops, hyper_mix=self._entering(mixer, ops.hyper_mix))
        heads = {op: self._after(f"{mixer}.heads", getattr(ops, op)) for op in HEAD_OPS}
        gates = self._gates(mixer, ops.delta_gates)
        layer.mixer.ops = _with(ops, delta_gates=gates, **heads)
        layer.channel_site.ops = _with(
            ops,
            hyper_mix=self._entering(channel, ops.hyper_mix),
            hyper_inject_=self._after(f"{channel}.out", ops.hyper_inject_),
        )
        layer.channel.ops = _with(ops, route=self._routes(channel, ops.route))

    def _attach_blocks(self, layer: Layer, index: int, most: int) -> None:
        op = layer.mixer.ops.paged_attention

        def heard(*arguments: Any) -> Tensor:
            queries, blocks = arguments[0].shape[:2], arguments[5]
            if blocks is None:
                blocks = torch.full((*queries, most), ALL_BLOCKS)
            padded = pad(blocks, (0, most - blocks.shape[-1]), value=-1)
            self._note(f"{index}.mixer.blocks", padded.flatten(0, 1))
            out: Tensor = op(*arguments)
            return out

        layer.mixer.ops = _with(layer.mixer.ops, paged_attention=heard)

    def _note(self, name: str, tensor: Tensor) -> None:
        self._noted[name] = tensor.detach().clone(memory_format=torch.contiguous_format)

    def _hear_part(self, x: Tensor) -> None:
        """The first reduction of a half is that of its block's partial sum."""
        if self._half:
            self._note(f"{self._half}.part", x)
            self._half = ""

    def _entering(self, half: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def heard(streams: Tensor, *arguments: Any) -> Any:
            self._note(f"{half}.in", streams)
            self._half = half
            return op(streams, *arguments)

        return heard

    def _after(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*arguments: Any, **named: Any) -> Any:
            result = op(*arguments, **named)
            out = result[0] if isinstance(result, tuple) else result
            self._note(name, out.flatten(0, -3) if name.endswith("heads") else out)
            return result

        return heard

    def _gates(self, half: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*arguments: Any) -> Any:
            g, beta = op(*arguments)
            self._note(f"{half}.g", g)
            self._note(f"{half}.beta", beta)
            return g, beta

        return heard

    def _routes(self, half: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*arguments: Any) -> Any:
            weights, ids = op(*arguments)
            self._note(f"{half}.ids", ids)
            return weights, ids

        return heard


class _HeardComm:
    """A rank's collectives; `hear` gets what goes into each sum."""

    def __init__(self, comm: Comm, hear: Callable[[Tensor], None]) -> None:
        self._comm, self._hear = comm, hear

    def all_reduce_(self, x: Tensor) -> Tensor:
        self._hear(x)
        return self._comm.all_reduce_(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def _with(ops: OpSet, **heard: Callable[..., Any]) -> OpSet:
    """A copy of `ops` with some operators replaced."""
    changed = copy(ops)
    for name, function in heard.items():
        setattr(changed, name, function)
    return changed


def step_file(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank-{rank}-step-{step:06d}.safetensors"


class TappedRank(Rank):
    """Writes a file a step into `folder`, with the step's logits of its vocabulary ("logits")."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        world_size: int,
        word: GuardWord | None = None,
        *,
        folder: str,
    ) -> None:
        super().__init__(config, rank, world_size, word=word)
        self._folder = Path(folder)
        self._tap: LayerTap | None = None

    def load(self) -> None:
        """As any rank, warm-up included; then the tap is put on."""
        super().load()
        assert self.runner is not None
        self.runner.logits_log = []
        self._tap = LayerTap(self.runner.model)

    def _execute(self, runner: Runner, plan: StepPlan) -> tuple[list[list[int]], StepLogprobs]:
        done = super()._execute(runner, plan)
        assert self._tap is not None
        assert runner.logits_log is not None
        tensors = self._tap.take()
        tensors["logits"] = torch.cat(runner.logits_log).cpu().contiguous()
        runner.logits_log.clear()
        save_file(tensors, step_file(self._folder, self.rank, plan.step))
        return done
