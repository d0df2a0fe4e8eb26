"""The scripted checkpoint and its servers, made once a session: no drafts, right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from placement.config import EngineConfig
from tests.cluster.scripted.cases import DRAFTS, SCRIPTS
from tests.cluster.scripted.gated_server import GatedServer
from tests.golden.scripted_checkpoint import ScriptedCheckpoint, scripted_checkpoint

DRAFTING = ("plain", "drafts", "bad-drafts")


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ScriptedCheckpoint]:
    """By the kind of drafting: "bad-drafts" has a draft head that is never right."""
    made: dict[bool, ScriptedCheckpoint] = {}

    def get(drafting: str) -> ScriptedCheckpoint:
        is_good = drafting != "bad-drafts"
        if is_good not in made:
            folder = tmp_path_factory.mktemp("scripted")
            made[is_good] = scripted_checkpoint(folder, SCRIPTS, drafts=is_good)
        return made[is_good]

    return get


@pytest.fixture(scope="session")
def checkpoint(checkpoint_of: Callable[[str], ScriptedCheckpoint]) -> ScriptedCheckpoint:
    return checkpoint_of("plain")


@pytest.fixture(scope="session")
def server_of(
    checkpoint_of: Callable[[str], ScriptedCheckpoint],
) -> Iterator[Callable[[str], GatedServer]]:
    """By the kind of drafting. Drafts are never given up, whatever they cost."""
    started: dict[str, GatedServer] = {}
    with ExitStack() as stack:

        def get(drafting: str) -> GatedServer:
            if drafting not in started:
                config = EngineConfig(
                    str(checkpoint_of(drafting).folder),
                    context_tokens=128,
                    max_sequences=24,
                    kv_pool_tokens=4096,
                    page_tokens=16,
                    mtp=0 if drafting == "plain" else DRAFTS,
                    mtp_auto=False,
                    check_interval_steps=1,
                    check_contracts=True,
                )
                started[drafting] = stack.enter_context(GatedServer(config))
            return started[drafting]

        yield get
