"""Ranks without Ray share the heat guard's word with their launcher."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from placement.config import EngineConfig
from rank_worker.guard_word import Order
from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest, LoadProgress


def test_an_order_reaches_the_loads_of_all_ranks(embedded_model_dir: Path) -> None:
    seen: list[Sequence[LoadProgress]] = []

    def listen(ranks: Sequence[LoadProgress]) -> None:
        if all(one.phase == "loading" for one in ranks):
            seen.append(ranks)
            if len(seen) == 3:
                engine.rank0.obey(Order.RUN)

    engine = Engine(EngineConfig(str(embedded_model_dir), ranks=3, context_tokens=512), listen)
    engine.rank0.obey(Order.HOLD)
    limit = threading.Timer(100, engine.rank0.obey, [Order.RUN])
    limit.start()
    try:
        engine.start()
        assert len(seen) >= 3
        assert [[one.read_bytes for one in ranks] for ranks in seen[:3]] == [[0, 0, 0]] * 3
        (answer,) = engine.generate([EngineRequest("a", (1, 2), 2, ignore_eos=True)])
        assert len(answer.token_ids) == 2
    finally:
        limit.cancel()
        engine.rank0.obey(Order.RUN)
        engine.close()
