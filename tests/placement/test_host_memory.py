"""What ranks put beside their chips: compared with this machine's memory where they run on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from placement.capacity import Question, remedies
from placement.config import EngineConfig
from placement.errors import PlanError
from placement.headers import CheckpointHeaders
from placement.host_memory import machine_bytes
from placement.ledger import LedgerOptions, TablePlace
from placement.plan import HOST_ROW, Plan, PlanOptions, require_fits
from placement.spec import ModelSpec

Loaded = tuple[ModelSpec, CheckpointHeaders]
SetMemory = Callable[[int], None]
BASE = EngineConfig(
    "unused", ranks=2, context_tokens=4096, max_sequences=4, prefix_cache=True, kv_pool_tokens=4096
)
MIB = 1 << 20


def asked(spec: ModelSpec, table: TablePlace = TablePlace.DEVICE, **changes: Any) -> Question:
    options = PlanOptions(ledger=LedgerOptions(table))
    return Question(replace(BASE, **changes), spec, options=options)


def text_of(plan: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        require_fits(plan)
    return str(caught.value)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SetMemory:
    """Sets what the machine is said to have."""
    return lambda nbytes: monkeypatch.setattr("placement.plan.machine_bytes", lambda: nbytes)


def test_a_container_may_have_less_than_the_machine(tmp_path: Path) -> None:
    physical = machine_bytes(str(tmp_path / "none"))
    assert physical >= 256 * MIB
    for text, expected in (("1048576\n", MIB), ("max\n", physical), (f"{1 << 60}\n", physical)):
        (tmp_path / "memory.max").write_text(text)
        assert machine_bytes(str(tmp_path / "memory.max")) == expected


def test_states_of_all_ranks_and_the_table_have_to_fit_together(
    tiny: Loaded, memory: SetMemory
) -> None:
    plan = asked(tiny[0], TablePlace.HOST).plan()
    states, table = 2 * plan.prefix.host_bytes, plan.host_table_bytes
    assert plan.host_bytes == states + table
    assert min(states, table) > 0
    memory(states + table)
    assert asked(tiny[0], TablePlace.HOST).plan().fits
    memory(states + table - 1)
    short = asked(tiny[0], TablePlace.HOST).plan()
    assert short.shortfall is not None
    assert (short.shortfall.row, short.shortfall.bytes) == (HOST_ROW, 1)
    assert short.plan_id == plan.plan_id, "a plan is the same on every machine"
    assert f"1 bytes more than it has ({states + table} planned)" in text_of(short)
    assert "lower prefix_host_bytes" in text_of(short)
    for place in (TablePlace.DEVICE, TablePlace.MMAP):  # the latter is page cache
        assert asked(tiny[0], place).plan().fits
    assert asked(tiny[0], TablePlace.HOST, prefix_cache=False).plan().fits


def test_a_chip_that_is_too_small_is_told_before_the_machine(
    tiny: Loaded, memory: SetMemory
) -> None:
    memory(0)
    plan = asked(tiny[0], usable_bytes=MIB).plan()
    assert plan.shortfall is not None
    assert plan.shortfall.row != HOST_ROW


def test_the_memory_of_another_box_is_not_compared_but_told(
    tiny: Loaded, memory: SetMemory
) -> None:
    memory(0)
    plan = asked(tiny[0], TablePlace.HOST, device="npu", dtype="float16").plan()
    assert plan.fits
    (told,) = (text for text in plan.assumptions if text.startswith("host memory:"))
    assert str(2 * plan.prefix.host_bytes) in told
    here = asked(tiny[0], prefix_cache=False).plan()
    assert not any(text.startswith("host memory:") for text in here.assumptions)


def test_fewer_states_on_the_host_are_a_remedy_of_its_own(tiny: Loaded, memory: SetMemory) -> None:
    roomy = asked(tiny[0]).plan().prefix
    memory(2 * 5 * roomy.state_bytes)
    question = asked(tiny[0])
    first = remedies(question)[0][0]
    assert first.kind == "prefix_cache"
    assert f"(--prefix-host-bytes {5 * roomy.state_bytes})" in first.text
    fitting = first.after.plan()
    assert fitting.fits
    assert (fitting.prefix.host, fitting.prefix.device) == (5, roomy.device)
    more = asked(tiny[0], prefix_host_bytes=6 * roomy.state_bytes)
    assert not more.plan().fits


def test_fewer_states_on_the_chips_are_a_remedy_when_they_alone_help(tiny: Loaded) -> None:
    """Room for all but what five of the states take."""
    roomy = asked(tiny[0]).plan()
    states, size = roomy.prefix.device, roomy.prefix.state_bytes
    fullest = max(rank.planned_bytes for rank in roomy.ranks)
    question = asked(tiny[0], TablePlace.HOST, usable_bytes=fullest - 5 * size)
    needed = max(rank.planned_bytes for rank in question.plan().ranks)
    question = replace(
        question, config=replace(question.config, usable_bytes=needed - 5 * size + size // 2)
    )
    assert not question.plan().fits
    first = remedies(question)[0][0]
    assert first.kind == "prefix_cache"
    left = first.after.plan()
    assert left.fits
    assert 0 < left.prefix.device == states - 5
    assert f"{left.prefix.device} states of prefixes on each chip instead of {states}" in first.text
    config = replace(question.config, prefix_bytes=(left.prefix.device + 1) * size)
    assert not replace(question, config=config).plan().fits


def test_the_command_ends_with_3_and_its_remedy_fits(
    memory: SetMemory, capsys: pytest.CaptureFixture[str]
) -> None:
    memory(8 * MIB)
    flags = ["plan", "--ranks", "2", "--sequences", "64", "--context", "1024", "--json"]
    assert main(flags) == 3
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["shortfall"]["row"] == HOST_ROW
    assert err.startswith("nrank: this machine does not fit: ")
    assert err.count("\n") == 1
    (change, *_) = told["remedies"][0]
    assert change["text"] in err
    flag, value = change["text"].partition("(")[2].rstrip(")").split()
    assert main([*flags, flag, value]) == 0
