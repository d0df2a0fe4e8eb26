"""Gangs for the engine tests, started once a session and shared by its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from placement.config import EngineConfig
from rank_worker.launch import Engine, launch_engine


@pytest.fixture(scope="session")
def engine_of(
    embedded_model_dir: Path, random_checkpoint: Callable[..., Path]
) -> Iterator[Callable[..., Engine]]:
    """engine_of("embedded" | "random-8", ranks=N, **config): every step is checked."""
    started: dict[Any, Engine] = {}
    with ExitStack() as stack:

        def get(model: str, ranks: int = 1, **config: Any) -> Engine:
            key = (model, ranks, tuple(sorted(config.items())))
            if key not in started:
                folder = embedded_model_dir if model == "embedded" else random_checkpoint(layers=8)
                settings: dict[str, Any] = {
                    "page_tokens": 16,
                    "context_tokens": 2048,
                    "kv_pool_tokens": 16384,
                    "check_interval_steps": 1,
                    "check_contracts": True,
                    "step_timeout_s": 60.0,
                }
                made = EngineConfig(str(folder), ranks=ranks, **{**settings, **config})
                started[key] = stack.enter_context(launch_engine(made))
            return started[key]

        yield get
