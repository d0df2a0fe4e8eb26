"""A plan becomes flattened tensors: tokens, positions, cache slots, tables and sample rows."""

from __future__ import annotations

import pytest
import torch

from rank_worker.batch import BatchBuilder, StepBatch
from rank_worker.step_plan import Opcode, PageUpdate, Row, RowFlag, StepPlan

SAMPLE, PREFILL = RowFlag.SAMPLE, RowFlag.PREFILL
PAGE = 4


@pytest.fixture
def builder() -> BatchBuilder:
    """Slots 0 and 2 hold sequences of 5 and 9 tokens on scattered pages."""
    builder = BatchBuilder(num_slots=3, max_pages=6, page_tokens=PAGE)
    for slot, pages in ((0, (7, 3)), (2, (5, 1, 6))):
        for index, page in enumerate(pages):
            builder.page_tables[slot, index] = page
    builder.last_tokens[:] = torch.tensor([70, 71, 72])
    return builder


def step(rows: tuple[Row, ...], tokens: tuple[int, ...] = (), **options: object) -> StepPlan:
    return StepPlan(Opcode.STEP, 0, 1, rows=rows, token_ids=tokens, **options)  # type: ignore[arg-type]


def mixed(builder: BatchBuilder) -> StepBatch:
    updates = (PageUpdate(1, 0, 2), PageUpdate(1, 1, 4))
    rows = (
        Row(2, 9, 1, SAMPLE),
        Row(0, 4, 1, SAMPLE),
        Row(1, 2, 3, PREFILL),
    )
    return builder.build(step(rows, (10, 11, 12), page_updates=updates))


def test_decode_rows_take_their_slots_last_token(builder: BatchBuilder) -> None:
    batch = mixed(builder)
    assert batch.token_ids.tolist() == [72, 70, 10, 11, 12]
    assert batch.positions.tolist() == [9, 4, 2, 3, 4]
    (group,) = batch.groups
    assert (group.begin, group.end, group.width, group.is_draft) == (0, 2, 1, False)
    assert group.slots.tolist() == [2, 0]
    assert group.starts == (9, 4)
    assert group.positions.tolist() == [[9], [4]]
    assert batch.num_tokens == 5


def test_cache_slots_follow_the_page_tables(builder: BatchBuilder) -> None:
    batch = mixed(builder)
    assert batch.kv_slots.tolist() == [6 * PAGE + 1, 3 * PAGE, 2 * PAGE + 2, 2 * PAGE + 3, 4 * PAGE]


def test_tables_cover_the_longest_row_and_no_more(builder: BatchBuilder) -> None:
    batch = mixed(builder)
    assert batch.groups[0].tables.tolist() == [[5, 1, 6], [7, 3, 0]]
    (row,) = batch.prefill
    assert (row.slot, row.start, row.begin, row.end, row.num_pages) == (1, 2, 2, 5, 2)
    assert batch.table_of(row).tolist() == [[2, 4]]


def test_only_rows_that_end_their_sequence_are_sampled(builder: BatchBuilder) -> None:
    batch = mixed(builder)
    assert batch.sample_rows.tolist() == [0, 1]
    assert batch.sample_slots.tolist() == list(batch.sample_slots_host) == [2, 0]
    assert batch.sample_positions.tolist() == [10, 5]
    assert not batch.all_sampled


def test_the_last_token_of_a_prefill_row_is_sampled(builder: BatchBuilder) -> None:
    rows = (Row(0, 4, 1, SAMPLE), Row(1, 0, 3, PREFILL | SAMPLE), Row(2, 0, 2, PREFILL | SAMPLE))
    batch = builder.build(step(rows, (1, 2, 3, 4, 5)))
    assert batch.sample_rows.tolist() == [0, 3, 5]
    assert batch.sample_positions.tolist() == [5, 3, 2]
    assert not batch.all_sampled


def test_a_pure_decode_batch_samples_all_its_rows(builder: BatchBuilder) -> None:
    batch = builder.build(step((Row(0, 4, 1, SAMPLE), Row(2, 8, 1, SAMPLE))))
    assert batch.all_sampled
    assert batch.prefill == ()
    assert batch.token_ids.tolist() == [70, 72]


def test_a_chunk_that_ends_inside_the_prompt_samples_nothing(builder: BatchBuilder) -> None:
    batch = builder.build(step((Row(1, 0, 3, PREFILL),), (1, 2, 3)))
    assert batch.sample_rows.shape == (0,)
    assert batch.sample_slots_host == ()
    assert batch.groups == ()
    assert not batch.all_sampled


def test_one_token_of_prefill_is_not_a_decode_row(builder: BatchBuilder) -> None:
    batch = builder.build(step((Row(1, 0, 1, PREFILL | SAMPLE),), (33,)))
    assert batch.groups == ()
    assert batch.token_ids.tolist() == [33], "from the plan, not the slot's last token"
    assert batch.all_sampled


def test_page_updates_stay_for_later_steps(builder: BatchBuilder) -> None:
    mixed(builder)
    batch = builder.build(step((Row(1, 5, 1, SAMPLE),)))
    assert batch.kv_slots.tolist() == [4 * PAGE + 1]


def test_decisions_are_noted_in_check_steps_only(builder: BatchBuilder) -> None:
    rows = (Row(0, 4, 1, SAMPLE),)
    quiet = builder.build(step(rows))
    quiet.note_decision(torch.tensor([1]))
    assert quiet.decisions is None
    loud = builder.build(step(rows, check=True))
    for ids in ([3, 5], [5, 3], [3, 5, 0, 1]):
        loud.note_decision(torch.tensor(ids))
    assert loud.decisions is not None
    sums = [int(d) for d in loud.decisions]
    assert len(set(sums)) == 3, "the order of ids counts"


def test_decode_rows_after_prefill_are_a_fault_of_the_plan(builder: BatchBuilder) -> None:
    with pytest.raises(AssertionError, match="decode rows come first"):
        builder.build(step((Row(1, 0, 1, PREFILL), Row(0, 4, 1, SAMPLE)), (1,)))
