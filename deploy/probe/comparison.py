"""All layers of a recorded gang against the plain model: a row a layer, and what is flagged.

Three questions a layer: does each block do what the plain model does with the same input; do the
ranks hold the same residual; and is anything odd in itself (an expert far louder than its siblings,
a residual that grows at once), which a comparison with the same checkpoint can't tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from deploy.probe.blocks import LayerBlocks
from deploy.probe.findings import (
    BOUNDS,
    EXPERT_GAIN,
    FLOAT16_MAX,
    GROWTH,
    Bounds,
    Deviation,
    Finding,
)
from deploy.probe.plain_model import PlainLayer, PlainModel
from deploy.probe.recording import Recording
from placement.spec import Axis

OnLayer = Callable[[int, int], None]  # layers done, layers


@dataclass(frozen=True)
class LayerRow:
    """`rms` and `absmax` are of rank 0's residual behind the layer, `growth` is its RMS over that
    before the layer. `cosine` is with a run of the plain model from the tokens on, the least of all
    ranks; `part_errors` are by rank, of what it adds, with the gang's own input.
    """

    layer: int
    kind: str
    rms: float
    absmax: float
    growth: float
    cosine: float
    part_errors: tuple[float, ...]
    loudest_expert: int
    expert_gain: float  # of the loudest over the median of its siblings


@dataclass(frozen=True)
class ProbeReport:
    model: str
    plan_id: str
    dtype: str
    ranks: int
    prompt_tokens: int
    tokens: int
    rows: tuple[LayerRow, ...]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bounds": asdict(BOUNDS[self.dtype])}


def compare(recording: Recording, model_dir: str, on_layer: OnLayer) -> ProbeReport:
    """Reads the checkpoint once more, layer by layer."""
    plan, model = recording.plan, PlainModel(model_dir)
    work = _Comparison(recording, model, BOUNDS[plan.dtype])
    with torch.no_grad():
        for layer in model.layers():
            on_layer(layer.spec.index, len(model.spec.layers))
            work.take(layer)
        work.check_logits()
    return ProbeReport(
        plan.model, plan.plan_id, plan.dtype, len(recording.ranks), recording.prompt_tokens,
        len(recording.token_ids), tuple(work.rows), tuple(work.findings),
    )  # fmt: skip


class _Comparison:
    def __init__(self, recording: Recording, model: PlainModel, bounds: Bounds) -> None:
        self.recording, self.model, self.bounds = recording, model, bounds
        self.alone = model.embed(recording.token_ids)  # the plain model's own run
        self.streams: dict[int, Tensor] = dict.fromkeys(recording.ranks, self.alone)
        self.rows: list[LayerRow] = []
        self.findings: list[Finding] = []

    def take(self, layer: PlainLayer) -> None:
        blocks = LayerBlocks(self.recording, layer, self.bounds)
        before, after = self.streams, blocks.check(self.streams)
        self.alone = layer.inject_ngrams(self.alone, self.recording.token_ids)
        self.alone = layer.mix(self.alone).into(self.alone)
        self.alone = layer.route(self.alone).into(self.alone)
        gains = layer.expert_gains()
        loudest = int(gains.argmax())
        row = LayerRow(
            layer.spec.index, layer.spec.mixer_kind.value, _rms(after[0]),
            after[0].abs().max().item(), _rms(after[0]) / _rms(before[0]),
            min(Deviation.of(streams, self.alone).cosine for streams in after.values()),
            tuple(blocks.worst[rank] for rank in self.recording.ranks),
            loudest, (gains[loudest] / gains.median()).item(),
        )  # fmt: skip
        self.rows.append(row)
        self.findings += [*blocks.findings, *self._oddities(row, gains)]
        self.streams = after

    def _oddities(self, row: LayerRow, gains: Tensor) -> list[Finding]:
        found = []
        for expert in (~(gains <= EXPERT_GAIN * gains.median())).nonzero().flatten().tolist():
            text = (
                f"expert {expert} of the checkpoint is {gains[expert] / gains.median():.3g} times "
                f"as loud as the median of its layer (bound {EXPERT_GAIN:g})"
            )
            found += [
                Finding("loud_expert", row.layer, rank, text)
                for rank in self.recording.plan.replica_table[row.layer][expert]
            ]
        if row.layer and not row.growth <= GROWTH:  # the first one starts from the embedding
            text = f"the residual grows {row.growth:.3g} times in RMS (bound {GROWTH:g})"
            found.append(Finding("growth", row.layer, -1, text))
        if self.recording.plan.dtype == "float16" and not row.absmax <= FLOAT16_MAX / 2:
            text = f"the residual reaches {row.absmax:.0f}; float16 ends at {FLOAT16_MAX:.0f}"
            found.append(Finding("range", row.layer, -1, text))
        return found

    def check_logits(self) -> None:
        """Those that tokens were sampled from, each rank's part of the vocabulary."""
        known: dict[int, Tensor] = {}
        for rank, streams in self.streams.items():
            sampled = streams[self.recording.prompt_tokens - 1 :]
            if id(streams) not in known:
                known[id(streams)] = self.model.logits(sampled)
            first, last = self.recording.plan.ranks[rank].share.ranges[Axis.VOCAB]
            expected = known[id(streams)][:, first:last]
            found = Deviation.of(self.recording.read(rank, "logits"), expected)
            if found.exceeds(self.bounds.error):
                text = f"logits of tokens {first}-{last - 1} are wrong ({found})"
                self.findings.append(Finding("logits", -1, rank, text))


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
