"""Gangs of a certification: the engine of this machine without Ray or HTTP, guarded from heat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from deploy.certify.certification import Gang
from deploy.chip_guard import guard_of
from deploy.load_display import LoadDisplay, is_terminal
from placement.config import EngineConfig
from placement.evidence import Pass
from rank_worker.launch import Engine, GenerationResult, launch_engine
from rank_worker.messages import EngineRequest


@dataclass(frozen=True)
class LaunchedGang:
    engine: Engine

    def generate(self, requests: Sequence[EngineRequest]) -> list[GenerationResult]:
        return self.engine.generate(requests)

    def preemptions(self) -> int:
        return self.engine.rank0.snapshot().preemptions


def gang_starter(
    config: EngineConfig, before_output: Callable[[], None]
) -> Callable[[Sequence[Pass]], AbstractContextManager[Gang]]:
    """On a terminal the load is shown; `before_output` comes first.

    Where all sequences are to be whole at once, prompts have no need to wait for answers: with the
    server's `decode_share` the first answers would end before the last prompt was read.
    """

    @contextmanager
    def start(stages: Sequence[Pass]) -> Iterator[Gang]:
        before_output()
        share = 0.0 if Pass.FILL in stages else config.decode_share
        used = replace(config, decode_share=share)
        display = LoadDisplay(sys.stderr) if is_terminal(sys.stderr) else None
        with launch_engine(used, display.update if display else None, guard_of(used)) as engine:
            if display is not None:
                display.clear()
            yield LaunchedGang(engine)

    return start
