"""A gang that answers one prompt with taps on: what every rank saw, layer by layer.

The gang is the one that serves: real processes, scheduler, caches and collectives. Files of a step
lie in a temporary folder; a tensor is read when it is asked for.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from deploy.chip_guard import guard_of
from deploy.prompts import Job
from placement.config import EngineConfig
from placement.errors import RankError
from placement.plan import Plan
from placement.prepare import prepare
from rank_worker.launch import OnProgress, RankMaker, launch_engine
from rank_worker.layer_tap import TappedRank
from rank_worker.messages import EngineRequest


@dataclass(frozen=True)
class Recording:
    """T tokens went through the gang: the prompt and what it answered, all but the last."""

    plan: Plan
    prompt_tokens: int
    token_ids: Tensor  # [T] int64
    files: tuple[tuple[Path, ...], ...]  # [rank][step]

    @property
    def ranks(self) -> range:
        return range(len(self.files))

    def find(self, rank: int, name: str) -> Tensor | None:
        """`name` of all steps in a row, [T, ...] as the rank had it; None where it has none."""
        found = [t for file in self.files[rank] if (t := _read(file, name)) is not None]
        return torch.cat(found) if found else None

    def read(self, rank: int, name: str) -> Tensor:
        """The same in float32; RankError where the rank wrote none."""
        found = self.find(rank, name)
        if found is None:
            raise RankError(f"rank {rank} did not come by {name}: its layers do other work", rank)
        return found.float()

    def digest(self, rank: int, name: str) -> str:
        """Equal where all bits of two ranks' `name` are."""
        found = self.find(rank, name)
        assert found is not None, name
        raw = found.contiguous().view(torch.uint8).numpy()
        return hashlib.sha256(raw.tobytes()).hexdigest()


def _read(file: Path, name: str) -> Tensor | None:
    with safe_open(file, "pt") as tensors:
        if name not in tensors.keys():  # noqa: SIM118 (it is no dict)
            return None
        found: Tensor = tensors.get_tensor(name)
        return found


@contextmanager
def recorded(
    config: EngineConfig,
    job: Job,
    on_progress: OnProgress | None = None,
    make_rank: RankMaker = TappedRank,
    started: Callable[[], None] = lambda: None,
) -> Iterator[Recording]:
    """Runs the prompt and the first tokens of an answer; the files go when this is left.

    Without drafts, reuse and graphs, so that each token goes through all layers once, and in
    Python: nobody hears what a graph replays. `started` is called when the gang is ready.
    """
    alone = replace(
        config, mtp=0, prefix_cache=False, max_sequences=1, graphs=False,
        context_tokens=len(job.prompt_ids) + job.max_tokens,
    )  # fmt: skip
    plan = prepare(alone).plan  # refused before a process is started
    with tempfile.TemporaryDirectory(prefix="nrank-probe-") as folder:
        maker = partial(make_rank, folder=folder)
        with launch_engine(alone, on_progress, guard_of(alone), maker) as engine:
            started()
            request = EngineRequest("probe", job.prompt_ids, job.max_tokens, ignore_eos=True)
            result = engine.generate([request])[0]
        files = tuple(
            tuple(sorted(Path(folder).glob(f"rank-{rank}-step-*.safetensors")))
            for rank in range(config.ranks)
        )
        ids = torch.tensor([*job.prompt_ids, *result.token_ids])
        made = Recording(plan, len(job.prompt_ids), ids, files)
        # An answer that broke off (logits that are no numbers) is just what is to be looked at.
        yield replace(made, token_ids=ids[: len(made.read(0, "0.mixer.in"))])
