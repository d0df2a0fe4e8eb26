"""How many sequences, how long, what other ranks give, and changes that make a plan fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placement.capacity import Question, capacity, max_context, max_sequences, remedies, what_if
from placement.config import EngineConfig
from placement.formats import parse_format
from placement.headers import CheckpointHeaders
from placement.ledger import LedgerOptions, TablePlace, state_bytes
from placement.models.quantised import with_format
from placement.ownership import OwnershipRequest
from placement.partition import make_shares
from placement.plan import PlanOptions
from placement.spec import ModelSpec

Loaded = tuple[ModelSpec, CheckpointHeaders]
BASE = EngineConfig(model_dir="unused", ranks=2, context_tokens=4096, max_sequences=4)
MIB = 1 << 20
WINDOW = 262144
# Six running sequences, two drafts: 6 * 3 states; its own pool had 105, the rest held prefixes.
BOX = EngineConfig(
    model_dir="unused", device="npu", dtype="float16", mtp=2, max_sequences=6, step_tokens=2560
)
PREFIX_STATES = 105 - 6 * 3


def question(spec: ModelSpec, **changes: Any) -> Question:
    return Question(replace(BASE, **changes), spec)


def box(spec: ModelSpec, ranks: int, form: str = "w4g128_asym") -> Question:
    config = replace(BOX, ranks=ranks, prefix_cache=True)
    size = max(state_bytes(config, spec, share) for share in make_shares(spec, ranks))
    return Question(
        replace(config, prefix_bytes=PREFIX_STATES * size),
        with_format(spec, parse_format(form)),
        options=PlanOptions(ledger=LedgerOptions(TablePlace.HOST)),
    )


def test_sequences_are_as_many_as_fit_and_not_one_more(tiny: Loaded) -> None:
    asked = question(tiny[0], usable_bytes=600 * MIB)
    found = max_sequences(asked.sizing(), asked.config, 4096)
    assert found > 1
    for count, fits in ((found, True), (found + 1, False)):
        config = replace(asked.config, max_sequences=count, kv_pool_tokens=count * 4096)
        assert replace(asked, config=config).plan().fits is fits


def test_the_context_is_as_long_as_fits_and_not_one_page_more(tiny: Loaded) -> None:
    asked = question(tiny[0], usable_bytes=340 * MIB)
    found = max_context(asked.sizing(), asked.config, 4)
    assert found % 64 == 0
    assert 0 < found < tiny[0].max_context
    for tokens, fits in ((found, True), (found + 64, False)):
        config = replace(asked.config, context_tokens=tokens, kv_pool_tokens=4 * tokens)
        assert replace(asked, config=config).plan().fits is fits


def test_the_context_ends_at_the_limit_of_the_model(tiny: Loaded) -> None:
    asked = question(tiny[0], max_sequences=1)
    assert capacity(asked).context_tokens == tiny[0].max_context == 32768


def test_nothing_is_said_to_fit_where_weights_do_not(tiny: Loaded) -> None:
    found = capacity(question(tiny[0], usable_bytes=1 * MIB))
    assert (found.sequences, found.context_tokens) == (0, 0)


def test_shared_heads_cost_pages_on_every_rank_that_holds_them(tiny: Loaded) -> None:
    """Two K/V heads on 4 ranks: each head lies twice, so more ranks give no more than 2 do."""
    sizes = [question(tiny[0], ranks=ranks).plan().ranks[0].rows for ranks in (2, 4)]
    assert sizes[0]["kv_pages"] == sizes[1]["kv_pages"]


def test_windows_of_the_reference_box(real: Loaded) -> None:
    """Four 310P3: planners there gave 4.08 to 4.64 windows of 262,144 tokens; six: 6.13.

    W4 group-128 experts with zero points, n-gram table on the host, two drafts, fp16, 105
    recurrent states (6 sequences with 3 each, the rest of prefixes), steps of 2,560 tokens, 2 GiB
    reserve; draft experts in W4, too.
    """
    four, six = (box(real[0], ranks).plan() for ranks in (4, 6))
    assert 4.0 <= four.num_pages * 64 / WINDOW < 5.5
    assert capacity(box(real[0], 4)).sequences in (4, 5)
    assert six.full_sequences == 6
    assert 6 <= capacity(box(real[0], 6)).sequences <= 7
    assert {"chip profile", "one communicator", "n-gram table", "mtp 2"} <= {
        start for text in four.assumptions for start in
        ("chip profile", "one communicator", "n-gram table", "mtp 2") if text.startswith(start)
    }  # fmt: skip


def test_what_six_ranks_would_give(real: Loaded) -> None:
    now = box(real[0], 4)
    other = what_if(now, 6)
    assert other.plan.fits
    assert [len(rank.share.experts[0]) for rank in other.plan.ranks] == [86, 86, 85, 85, 85, 85]
    assert other.capacity.sequences > capacity(now).sequences
    assert other.moved_experts == 49 * 170  # only what the two new ranks hold, draft layer included


def test_what_if_keeps_balance_and_files(tiny: Loaded) -> None:
    counts = tuple(tuple(float(e + 1) for e in range(14)) for _ in range(8))
    exact = [[list(range(0, 14, 2)), list(range(1, 14, 2))]]
    for request in (OwnershipRequest(counts=counts), OwnershipRequest(exact=exact)):
        asked = Question(BASE, tiny[0], options=PlanOptions(ownership=request))
        other = what_if(asked, 3)
        assert other.plan.world_size == 3
        assert other.moved_experts >= 9 * 4  # the new rank's four experts in each layer


def kinds(found: list[tuple[Any, ...]]) -> list[list[str]]:
    return [[change.kind for change in way] for way in found]


def test_every_remedy_fits_when_it_is_tried(real: Loaded) -> None:
    asked = Question(replace(BOX, ranks=4), with_format(real[0], parse_format("w8_sym")))
    assert not asked.plan().fits
    found = remedies(asked)
    assert len(found) == 2
    for way in found:
        assert way[-1].after.plan().fits


def test_table_on_the_host_is_the_cheapest_remedy(real: Loaded) -> None:
    asked = Question(
        replace(BOX, ranks=4, mtp=0), with_format(real[0], parse_format("w4g128_asym"))
    )
    assert asked.plan().shortfall is not None
    found = remedies(asked)
    assert kinds(found)[0] == ["ngram_table"]
    assert "--ngram-table host" in found[0][0].text


def test_fewer_sequences_come_before_a_smaller_context(tiny: Loaded) -> None:
    """Many sequences whose states alone fill the chip."""
    roomy = question(tiny[0], max_sequences=200, ranks=1)
    needed = sum(roomy.sizing().rows(roomy.config, 64)[0].values())
    asked = question(tiny[0], max_sequences=200, ranks=1, usable_bytes=needed - 20 * MIB)
    found = remedies(asked)
    assert kinds(found)[0] == ["sequences"]  # the table of the tiny model is below 20 MiB
    sequences = found[0][0]
    count = sequences.after.config.max_sequences
    assert sequences.after.plan().fits
    config = replace(asked.config, max_sequences=count + 1)
    assert not replace(asked, config=config).plan().fits


def test_a_smaller_context_is_the_longest_that_fits(tiny: Loaded) -> None:
    roomy = question(tiny[0], context_tokens=32768, max_sequences=1, ranks=1)
    needed = roomy.plan().ranks[0].planned_bytes
    options = PlanOptions(ledger=LedgerOptions(TablePlace.HOST))
    config = replace(roomy.config, usable_bytes=needed - 20 * MIB)
    asked = Question(config, tiny[0], options=options)
    (first, *_) = remedies(asked)
    assert first[0].kind == "context"
    tokens = first[0].after.config.context_tokens
    longer = replace(config, context_tokens=tokens + 64)
    assert first[0].after.plan().fits
    assert not replace(asked, config=longer).plan().fits


def test_bf16_on_four_chips_needs_many_ranks_or_two_changes(real: Loaded) -> None:
    """225 GiB of experts and a table of 95 GiB in 170 GiB of memory."""
    asked = Question(replace(BOX, ranks=4, max_sequences=1), real[0])
    assert kinds(remedies(asked)) == [["ranks"], ["ngram_table", "format"]]


def test_an_exact_ownership_is_not_told_to_use_more_ranks(tiny: Loaded) -> None:
    exact = [[list(range(7)), list(range(7, 14))]]
    options = PlanOptions(ownership=OwnershipRequest(exact=exact))
    asked = Question(replace(BASE, usable_bytes=270 * MIB), tiny[0], options=options)
    assert not asked.plan().fits
    assert all(change.kind != "ranks" for way in remedies(asked) for change in way)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 14])
def test_any_rank_count_has_an_answer(tiny: Loaded, ranks: int) -> None:
    found = capacity(question(tiny[0], ranks=ranks))
    assert found.sequences >= 4
    assert found.context_tokens > 4096
