"""The step plan as words: nothing is lost on the way, and nothing foreign is taken for a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import RankError
from rank_worker import comm_gloo, comm_shm, comm_store
from rank_worker.step_plan import (
    VERSION,
    Admit,
    Opcode,
    PageUpdate,
    Row,
    RowFlag,
    StepPlan,
    decode,
    encode,
)  # fmt: skip

WORD = st.integers(0, 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
ADMITS = st.builds(
    Admit, slot=WORD, temperature=FLOAT32, top_k=WORD, top_p=FLOAT32, min_p=FLOAT32,
    seed=st.integers(0, 2**64 - 1), choice=WORD,
)  # fmt: skip
ROWS = st.builds(
    Row, slot=WORD, start=WORD, count=WORD,
    flags=st.sampled_from([RowFlag.NONE, RowFlag.PREFILL, RowFlag.SAMPLE, RowFlag(3)]),
)  # fmt: skip


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=5).map(tuple)


PLANS = st.builds(
    StepPlan, opcode=st.sampled_from(Opcode), epoch=WORD, step=WORD, check=st.booleans(),
    admits=lists(ADMITS), page_updates=lists(st.builds(PageUpdate, WORD, WORD, WORD)),
    rows=lists(ROWS), token_ids=lists(WORD),
)  # fmt: skip
EXAMPLE = StepPlan(
    Opcode.STEP, 3, 9, True, (Admit(1, 0.5, 7, 0.75, 0.25, 2**63 + 5, 2),),
    (PageUpdate(1, 0, 4), PageUpdate(1, 1, 5)),
    (Row(0, 8, 1, RowFlag.SAMPLE), Row(1, 0, 3, RowFlag.PREFILL | RowFlag.SAMPLE)), (7, 8, 9),
)  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PLANS)
def test_a_plan_survives_its_encoding(plan: StepPlan) -> None:
    words = encode(plan)
    assert words.dtype == np.int32
    decoded = decode(words)
    assert decoded == plan
    assert all(type(row.flags) is RowFlag for row in decoded.rows)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_keep_all_64_bits(seed: int) -> None:
    plan = StepPlan(Opcode.STEP, 0, 1, admits=(Admit(0, 1.0, 0, 1.0, 0.0, seed, 0),))
    assert decode(encode(plan)).admits[0].seed == seed


def test_floats_arrive_as_the_nearest_float32() -> None:
    plan = StepPlan(Opcode.STEP, 0, 1, admits=(Admit(0, 0.7, 0, 0.95, 1e-3, 0, 0),))
    (admit,) = decode(encode(plan)).admits
    assert (admit.temperature, admit.top_p, admit.min_p) == (
        float(np.float32(0.7)), float(np.float32(0.95)), float(np.float32(1e-3)),
    )  # fmt: skip


def test_a_plan_of_another_version_is_refused() -> None:
    words = encode(EXAMPLE)
    words[0] = VERSION + 1
    with pytest.raises(RankError, match=f"step plan version {VERSION + 1}, not {VERSION}"):
        decode(words)


def test_a_plan_cut_anywhere_is_refused() -> None:
    words = encode(EXAMPLE)
    for size in range(len(words)):
        with pytest.raises(RankError, match="step plan"):
            decode(words[:size])
    with pytest.raises(RankError, match=f"of {len(words) + 1} words, not {len(words)}"):
        decode(np.append(words, np.int32(0)))


@pytest.mark.parametrize("field", [5, 6, 7, 8])
def test_wrong_counts_are_refused(field: int) -> None:
    for value in (-1, 1000):
        words = encode(EXAMPLE)
        words[field] = value
        with pytest.raises(RankError, match="words, not"):
            decode(words)


@pytest.mark.parametrize("open_comm", [comm_shm.open_shm, comm_gloo.open_gloo])
def test_plans_of_any_size_reach_the_other_ranks(open_comm: Callable[..., Any]) -> None:
    """Smaller than, equal to and above one frame of the control group, small ones in between."""
    spare = comm_gloo.FRAME_WORDS - 1 - len(encode(StepPlan(Opcode.STEP, 1, 0)))
    plans = [
        StepPlan(Opcode.STEP, 1, size, token_ids=tuple(range(size)))
        for size in (0, spare, spare + 1, 4096, 1, 100_000)
    ] + [EXAMPLE, StepPlan(Opcode.STOP, 1, 0)]
    store, port = comm_store.listen("127.0.0.1", 30)
    received: list[StepPlan] = []

    def run(rank: int) -> None:
        own = store if rank == 0 else None
        comm = open_comm(comm_store.join(rank, 2, "127.0.0.1", port, 30, own), 30)
        for plan in plans:
            if rank == 0:
                comm.send_plan(encode(plan))
            else:
                received.append(decode(comm.receive_plan()))
        comm.barrier()
        comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert received == plans
