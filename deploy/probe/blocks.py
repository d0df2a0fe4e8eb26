"""One layer of a gang, block by block, against the plain model fed with the gang's own input.

So an error shows where it is made and not in all layers behind it, and at the rank that makes it:
what a rank hands to a reduction is compared with its own share of heads, experts and shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from deploy.probe.findings import EXPLAINED, Bounds, Deviation, Finding
from deploy.probe.plain_model import Heads, PlainLayer, Routed
from deploy.probe.recording import Recording
from placement.spec import Axis, GatedDeltaSpec
from rank_worker.moe import local_experts

T = TypeVar("T")


@dataclass
class LayerBlocks:
    """Findings of one layer, and the worst error of what each rank handed to a reduction."""

    recording: Recording
    layer: PlainLayer
    bounds: Bounds
    findings: list[Finding] = field(default_factory=list)
    worst: dict[int, float] = field(default_factory=dict)  # by rank

    @property
    def index(self) -> int:
        return self.layer.spec.index

    def check(self, before: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """`before` are each rank's streams [T, S, H] at the entry; returns those at the end.

        The same object where ranks have the same bits.
        """
        entered = self._streams("mixer.in")
        self._check_entry(before, entered)
        heads = self._decided(entered, "mixer.blocks", self.layer.mix)
        for rank in self.recording.ranks:
            self._check_mixer(rank, heads[rank])
        between = self._streams("channel.in")
        self._check_residual("mixer", entered, between, {r: h.inject for r, h in heads.items()})
        routed = self._decided(between, "channel.ids", self.layer.route)
        for rank in self.recording.ranks:
            self._check_channel(rank, routed[rank])
        after = self._streams("channel.out")
        self._check_residual("channel", between, after, {r: h.inject for r, h in routed.items()})
        return after

    def _streams(self, name: str) -> dict[int, Tensor]:
        """By rank, one object for all ranks with the same bits."""
        known: dict[str, Tensor] = {}
        found: dict[int, Tensor] = {}
        for rank in self.recording.ranks:
            digest = self.recording.digest(rank, f"{self.index}.{name}")
            if digest not in known:
                known[digest] = self.recording.read(rank, f"{self.index}.{name}")
            found[rank] = known[digest]
        return found

    def _decided(
        self, streams: Mapping[int, Tensor], name: str,
        work: Callable[[Tensor, Tensor | None], T],
    ) -> dict[int, T]:  # fmt: skip
        """`work` by rank, with what the rank decided; once for ranks that are all alike."""
        done: dict[tuple[int, bytes], T] = {}
        found: dict[int, T] = {}
        for rank, tensor in streams.items():
            decided = self.recording.find(rank, f"{self.index}.{name}")
            key = id(tensor), b"" if decided is None else decided.numpy().tobytes()
            if key not in done:
                done[key] = work(tensor, decided)
            found[rank] = done[key]
        return found

    def _share(self, rank: int, axis: Axis) -> tuple[int, int]:
        return self.recording.plan.ranks[rank].share.ranges[axis]

    def _flag(self, kind: str, rank: int, text: str) -> None:
        self.findings.append(Finding(kind, self.index, rank, text))

    def _check_entry(self, before: Mapping[int, Tensor], entered: Mapping[int, Tensor]) -> None:
        """What enters the layer is what left the one before, with n-grams where it has some."""
        ids = self.recording.token_ids
        expected = _by_input(before, lambda streams: self.layer.inject_ngrams(streams, ids))
        is_first = self.index == 0
        for rank in self.recording.ranks:
            was = before[rank] if self.layer.spec.ngram else torch.zeros_like(before[rank])
            found = Deviation.of(entered[rank] - was, expected[rank] - was)
            if found.exceeds(self.bounds.error):
                what = "the token embedding" if is_first else "the n-gram embedding"
                self._flag("entry", rank, f"{what} is another one ({found})")

    def _check_mixer(self, rank: int, heads: Heads) -> None:
        """The first of gates, heads and output that is wrong is told."""
        is_delta = isinstance(self.layer.spec.mixer, GatedDeltaSpec)
        first, last = self._share(rank, Axis.VALUE_HEADS if is_delta else Axis.QUERY_HEADS)
        part = self.recording.read(rank, f"{self.index}.mixer.part")
        found = Deviation.of(part, heads.part(first, last))
        self._note_worst(rank, found)
        if heads.other_blocks > self.bounds.routes * len(part):
            text = f"{heads.other_blocks} of {len(part)} tokens see other blocks of the context"
            self._flag("blocks", rank, text)
        expected = {"g": heads.g, "beta": heads.beta, "heads": heads.out}
        names = {
            "g": "the decay (gate vectors A_log, dt_bias)",
            "beta": "the write strength beta", "heads": "the output",
        }  # fmt: skip
        for name, whole in expected.items():
            got = self.recording.find(rank, f"{self.index}.mixer.{name}")
            if whole is None or got is None:
                continue
            wrong = self._wrong_heads(got.float(), whole[:, first:last])
            if wrong:
                named = spans([first + head for head in wrong])
                worst = max(wrong.values(), key=lambda deviation: deviation.error)
                self._flag(name, rank, f"{names[name]} of heads {named} is wrong ({worst})")
                return
        if found.exceeds(self.bounds.error):
            self._flag("mixer", rank, f"its heads {first}-{last - 1} add something else ({found})")

    def _wrong_heads(self, got: Tensor, expected: Tensor) -> dict[int, Deviation]:
        """By head as this rank counts; tensors are [T, heads, ...]."""
        each = {h: Deviation.of(got[:, h], expected[:, h]) for h in range(expected.shape[1])}
        return {h: found for h, found in each.items() if found.exceeds(self.bounds.error)}

    def _check_channel(self, rank: int, routed: Routed) -> None:
        differing = (routed.ids.sort().values != routed.own_ids.sort().values).any(dim=1)
        if differing.float().mean() > self.bounds.routes:
            count = int(differing.sum())
            self._flag("routes", rank, f"{count} of {len(differing)} tokens go to other experts")
        causes = dict(self._shares_of(rank, routed))
        expected = torch.stack([*causes.values()]).sum(dim=0)
        got = self.recording.read(rank, f"{self.index}.channel.part")
        found = Deviation.of(got, expected)
        self._note_worst(rank, found)
        if found.exceeds(self.bounds.error):
            self._flag(*self._cause(rank, got - expected, causes, found))

    def _shares_of(self, rank: int, routed: Routed) -> Iterator[tuple[str, Tensor]]:
        """What each expert of `rank` adds [T, H], and its slice of the shared expert."""
        plan = self.recording.plan
        holders = plan.replica_table[self.index]
        table = local_experts(plan.ranks[rank].share, holders, self.index)
        turn = torch.arange(len(routed.ids)) % len(table)
        is_own = table[turn].gather(1, routed.ids) >= 0
        for expert in sorted(set(routed.ids[is_own].tolist())):
            mine = is_own & (routed.ids == expert)
            yield f"expert {expert}", (routed.outputs * mine[..., None]).sum(dim=1)
        yield "shared", routed.shared_part(*self._share(rank, Axis.SHARED_FFN))

    def _cause(
        self, rank: int, error: Tensor, causes: Mapping[str, Tensor], found: Deviation
    ) -> tuple[str, int, str]:
        """Kind, rank and words for an error [T, H] of what a rank's channel adds.

        It is laid to one expert when a multiple of what that adds explains nearly all of it.
        """
        whole, best, name, factor = error.square().sum().item(), 0.0, "", 0.0
        for cause, adds in causes.items():
            size, along = adds.square().sum().item(), (error * adds).sum().item()
            explained = along * along / (size * whole) if size and whole else 0.0
            if explained > best:
                best, name, factor = explained, cause, 1 + along / size
        if best < EXPLAINED:
            return "channel", rank, f"its experts add something else ({found})"
        if name != "shared":
            return "expert", rank, f"{name} is {factor:.3g} times what it should be ({found})"
        if abs(factor) < 1 - EXPLAINED:
            return "shared", rank, f"the shared expert's part is not in the reduction ({found})"
        text = f"the shared expert's part is {factor:.3g} times what it should be ({found})"
        return "shared", rank, text

    def _check_residual(
        self, block: str, before: Mapping[int, Tensor], after: Mapping[int, Tensor],
        inject: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        """From equal streams: all ranks add the sum of what they handed over, and stay equal."""
        if len(_groups(before)) > 1:
            return  # they were told apart where it began
        ranks, was = self.recording.ranks, before[0]
        groups = _groups(after)
        if len(groups) > 1:
            told = " | ".join(spans(group) for group in groups)
            self._flag("ranks", -1, f"residuals of ranks {told} differ behind the {block}")
        name = f"{self.index}.{block}.part"
        total = torch.stack([self.recording.read(rank, name) for rank in ranks]).sum(dim=0)
        expected = inject[0][:, :, None] * total[:, None, :]
        for group in groups:
            found = Deviation.of(after[group[0]] - was, expected)
            if found.exceeds(self.bounds.error):
                for rank in group:
                    text = f"adds something else than the sum over ranks to the residual ({found})"
                    self._flag("sum", rank, f"the {block} {text}")

    def _note_worst(self, rank: int, found: Deviation) -> None:
        self.worst[rank] = max(self.worst.get(rank, 0.0), found.error)


def _by_input(inputs: Mapping[int, Tensor], work: Callable[[Tensor], T]) -> dict[int, T]:
    """`work` of each rank's input, done once for ranks that share the object."""
    done: dict[int, T] = {}
    for tensor in inputs.values():
        if id(tensor) not in done:
            done[id(tensor)] = work(tensor)
    return {rank: done[id(tensor)] for rank, tensor in inputs.items()}


def _groups(streams: Mapping[int, Tensor]) -> list[list[int]]:
    """Ranks with the same bits."""
    groups: dict[int, list[int]] = {}
    for rank, tensor in streams.items():
        groups.setdefault(id(tensor), []).append(rank)
    return list(groups.values())


def spans(numbers: list[int]) -> str:
    """ "0-2, 5" of [0, 1, 2, 5]."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        runs.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(runs)
