"""An error inside a step says on which rank, in which step and phase, and for which requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from placement.config import EngineConfig
from placement.errors import NrankError, RankError
from rank_worker.messages import EngineRequest
from rank_worker.rank import Rank
from rank_worker.slot_names import SlotNames
from rank_worker.step_plan import Admit, Opcode, Row, RowFlag, StepPlan

PATIENCE_S = 60.0
NAMES = ("first", "second")
Errors = dict[int, NrankError]
RunToEnd = Callable[..., Any]


class Bug(Exception):
    pass


def broken(*_: object, **__: object) -> None:
    raise Bug("on purpose")


@pytest.fixture
def run_with(random_checkpoint: Callable[..., Path]) -> RunToEnd:
    """Runs two requests on a gang of threads after `spoil`; the errors that ended its ranks."""

    @contextmanager
    def run(ranks: int, spoil: Callable[[list[Rank]], None], mtp: int = 2) -> Iterator[Errors]:
        config = EngineConfig(
            str(random_checkpoint(layers=4, mtp=True)), ranks=ranks, mtp=mtp, mtp_auto=False,
            page_tokens=16, context_tokens=128, max_sequences=3, step_timeout_s=1.0,
        )  # fmt: skip
        gang = [Rank(config, rank, ranks) for rank in range(ranks)]
        errors: Errors = {}
        port = gang[0].listen() if ranks > 1 else 0
        loaded = threading.Barrier(ranks + 1)

        def live(rank: Rank) -> None:
            try:
                rank.open(port)
                rank.load()
                loaded.wait(PATIENCE_S)
                loaded.wait(PATIENCE_S)
                rank.run()
            except NrankError as error:
                errors[rank.rank] = error
            finally:
                rank.close()

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in gang]
        for thread in threads:
            thread.start()
        loaded.wait(PATIENCE_S)
        spoil(gang)
        gang[0].submit([EngineRequest(n, (5, 6, 7, 8), 12, ignore_eos=True) for n in NAMES])
        loaded.wait(PATIENCE_S)
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a rank does not end"
        yield errors

    return run


def spoil_drafts(failing: int) -> Callable[[list[Rank]], None]:
    def spoil(gang: list[Rank]) -> None:
        drafter = gang[failing].runner.drafter  # type: ignore[union-attr]
        assert drafter is not None
        drafter.head.predict = broken  # type: ignore[method-assign,assignment]

    return spoil


def spoil_commit(failing: int) -> Callable[[list[Rank]], None]:
    """The state takes the accepted tokens of a verified round, and only of such a one."""

    def spoil(gang: list[Rank]) -> None:
        runner = gang[failing].runner
        assert runner is not None
        runner.model.commit = broken  # type: ignore[method-assign,assignment]

    return spoil


@pytest.mark.parametrize(
    ("ranks", "failing", "spoil", "step", "phase"),
    [
        (1, 0, spoil_drafts, 1, "draft"),
        (1, 0, spoil_commit, 2, "verify"),
        (2, 1, spoil_drafts, 1, "draft"),
        (2, 1, spoil_commit, 2, "verify"),
    ],
)
def test_rank_step_phase_and_requests_are_named(
    run_with: RunToEnd, ranks: int, failing: int, spoil: Any, step: int, phase: str
) -> None:
    with run_with(ranks, spoil(failing)) as errors:
        error = errors[failing]
        assert str(error) == (
            f"rank {failing} failed in step {step} (phase {phase}) of requests first, second: "
            "Bug: on purpose"
        )
        assert isinstance(error, RankError)
        assert (error.rank, error.step, error.phase) == (failing, step, phase)
        assert isinstance(error.__cause__, Bug)
    if ranks == 2:  # the other one waits for it in vain, and says in what
        left = errors[1 - failing]
        assert isinstance(left, RankError)
        assert left.step == step
        assert f"of requests {', '.join(NAMES)}" in str(left)


def test_a_step_without_drafts_is_a_phase_of_its_own(run_with: RunToEnd) -> None:
    def spoil(gang: list[Rank]) -> None:
        gang[0].runner.model.forward = broken  # type: ignore[union-attr,method-assign,assignment]

    with run_with(1, spoil, mtp=0) as errors:
        assert "step 1 (phase step) of requests first, second: Bug" in str(errors[0])


def test_what_was_leaked_ends_the_gang_under_its_own_name(run_with: RunToEnd) -> None:
    """A slot that nobody gives back is found when the gang is idle."""

    def spoil(gang: list[Rank]) -> None:
        scheduler = gang[0].scheduler
        assert scheduler is not None
        scheduler.free_slots.pop()

    with run_with(1, spoil) as errors:
        (error,) = errors.values()
    assert isinstance(error, RankError)
    assert error.phase == "integrity"
    assert "slots lost or doubled" in str(error)


def test_names_cross_as_words_and_many_are_cut() -> None:
    admits = tuple(Admit(slot, 0.0, 0, 1.0, 0.0, 0, 0) for slot in range(12))
    rows = tuple(Row(slot, 0, 1, RowFlag.NONE) for slot in range(12))
    told, heard = SlotNames(), SlotNames()
    running = [Running(slot, f"größe-{slot}") for slot in range(12)]
    heard.hear(admits, told.tell(admits, running))  # type: ignore[arg-type]
    plan = StepPlan(Opcode.STEP, 0, 1, rows=rows)
    assert told.text(plan) == heard.text(plan)
    assert heard.text(plan).endswith("größe-7 and 4 more")
    assert SlotNames().text(StepPlan(Opcode.STEP, 0, 1, rows=rows[3:4])) == "request in slot 3"


class Running:
    """What `tell` reads of a running sequence."""

    def __init__(self, slot: int, name: str) -> None:
        self.slot, self.request = slot, EngineRequest(name, (1,), 1)
