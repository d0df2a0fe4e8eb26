"""Passes over scripted gangs: what is certified with one fault, and what is left after a kill."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.certify.certification import GANGS
from deploy.certify.evidence_file import EvidenceFile
from deploy.certify.gangs import gang_starter
from deploy.certify.progress import found_at, table
from placement.config import EngineConfig
from placement.errors import ConfigError, NrankError
from placement.evidence import Claim, Evidence, Pass, Verdict, read_evidence
from tests.deploy.certify.scripted_gang import (
    BINDING,
    LENGTHS,
    SEQUENCES,
    Killed,
    Script,
    certify,
    scripted,
)

SHORT, LONG = LENGTHS
NUM_CELLS = 4 * SEQUENCES * len(LENGTHS)  # four passes; more sequences than depths


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "evidence.json"


@pytest.fixture
def script() -> Script:
    return scripted()


def test_all_passes_certify_the_longest_length(path: Path, script: Script) -> None:
    evidence = certify(path, script)
    assert evidence.certified_tokens == LONG
    assert evidence == read_evidence(str(path))
    assert len(evidence.cells) == NUM_CELLS == evidence.asked.num_cells
    assert {
        (c.prompt_tokens < c.length, c.completed_tokens - c.length) for c in evidence.cells
    } == {(True, 0)}
    assert script.gangs == 3  # grid and reuse share one, restart and fill have their own
    assert json.loads(path.read_text())["summary"]["certified_tokens"] == LONG
    assert list(table(evidence))[-1] == f"certified: {LONG} tokens"


@pytest.mark.parametrize("fault", ["wrong", "other", "short", "error"])
@pytest.mark.parametrize("stage", list(Pass))
def test_a_fault_in_one_pass_of_one_needle_ends_what_is_certified(
    path: Path, script: Script, stage: Pass, fault: str
) -> None:
    script.faults = {(stage, LONG, 1): fault}
    evidence = certify(path, script)
    if stage is Pass.GRID and fault == "other":  # right, but nothing later is the same
        assert evidence.limit_reason == f"reuse at {LONG} tokens failed"
    else:
        assert evidence.verdict(stage, LONG) is Verdict.FAILED
    assert evidence.certified_tokens == SHORT
    script.faults = {(stage, SHORT, 1): fault}
    assert certify(path, script, overwrite=True).certified_tokens == 0


def test_a_fill_has_to_be_right_with_kept_prefixes_too(path: Path, script: Script) -> None:
    script.faults = {(Pass.FILL, LONG, 2): "again"}
    evidence = certify(path, script)
    assert evidence.limit_reason == f"fill at {LONG} tokens failed"
    assert [cell.index for cell in evidence.cells if not cell.passed] == [2]


def test_overwriting_begins_anew(path: Path, script: Script) -> None:
    certify(path, script)
    first = len(script.ran)
    certify(path, script, overwrite=True)
    assert len(script.ran) == 2 * first


def test_a_dropped_needle_is_told_by_its_depth(path: Path, script: Script) -> None:
    script.faults = {(Pass.GRID, LONG, 1): "wrong"}  # the second depth's
    evidence = certify(path, script)
    assert found_at(evidence, SHORT) == "all"
    assert found_at(evidence, LONG) == "0, 100"
    (failed,) = (cell for cell in evidence.cells if not cell.passed and cell.stage is Pass.GRID)
    assert (failed.depth, failed.reason) == (50, f"answered {_said(failed.reason)!r}")


def _said(reason: str) -> str:
    said = reason.removeprefix("answered ").strip("'")
    assert " is " in said
    return said


@pytest.mark.parametrize(("reuses", "fault"), [(True, "cold"), (False, "hot")])
def test_reuse_has_to_be_what_the_gang_claims(
    path: Path, script: Script, reuses: bool, fault: str
) -> None:
    script.reuses = reuses
    script.faults = {(Pass.REUSE, SHORT, 0): fault}
    evidence = certify(path, script)
    assert evidence.limit_reason == f"reuse at {SHORT} tokens failed"
    script.faults = {}
    assert certify(path, script, overwrite=True).certified_tokens == LONG


def test_a_pool_that_does_not_hold_all_at_once_is_told(path: Path, script: Script) -> None:
    script.preempts, script.holds = 3, 2
    evidence = certify(path, script)
    fill, grid = evidence.of(Pass.FILL, SHORT), evidence.of(Pass.GRID, SHORT)
    assert {(c.at_once, c.preemptions) for c in fill} == {(2, 6)}  # of both rounds
    assert {(c.at_once, c.preemptions) for c in grid} == {(1, 0)}
    assert evidence.certified_tokens == LONG  # all finished, with the same ids
    assert [line[-7:] for line in table(evidence)][:2] == ["at once", " 2 of 4"]
    script.holds, script.pages = 9, 6  # preempted ones look as if they ran
    evidence = certify(path, script, overwrite=True)
    assert [evidence.of(Pass.FILL, length)[0].at_once for length in LENGTHS] == [2, 1]


def test_what_was_not_run_certifies_nothing(path: Path, script: Script) -> None:
    whole = certify(path, script)
    for stage in Pass:
        kept = [c for c in whole.cells if c.stage is not stage or c.key == (stage, SHORT, 0)]
        part = replace(whole, cells=tuple(kept))
        assert part.certified_tokens == 0
        assert part.limit_reason == f"{stage} at {SHORT} tokens was not run whole"
    longest = tuple(c for c in whole.cells if c.length == LONG)
    assert replace(whole, cells=longest).certified_tokens == 0


def test_killed_anywhere_it_goes_on_behind_what_is_finished(path: Path, script: Script) -> None:
    uninterrupted = certify(path, script)
    path.unlink()
    stream, kept = random.Random(7), Evidence("model", BINDING, uninterrupted.asked)
    for _ in range(40):
        script.ends_after = stream.randint(0, 6)
        try:
            certify(path, script)
        except Killed:
            found = read_evidence(str(path))
            assert found.cells[: len(kept.cells)] == kept.cells
            kept = found
        else:
            break
    final = read_evidence(str(path))
    assert final.is_complete
    assert final.certified_tokens == LONG
    assert {c.key: c for c in final.cells} == {c.key: c for c in uninterrupted.cells}


def test_finished_cells_are_not_run_again(path: Path, script: Script) -> None:
    script.faults = {(Pass.GRID, SHORT, 2): "wrong"}
    script.ends_after = 11
    with pytest.raises(Killed):
        certify(path, script)
    done = {cell.key for cell in read_evidence(str(path)).cells}
    script.ran, script.ends_after = [], -1
    evidence = certify(path, script)
    warmed = {key for key in script.ran if key in done}
    assert not {key for key in warmed if key[0] is not Pass.REUSE}
    ran, gangs = len(script.ran), script.gangs
    assert certify(path, script) == evidence
    assert (len(script.ran), script.gangs) == (ran, gangs)  # nothing is left: no gang starts


@pytest.mark.parametrize("name", ["plan_id", "engine_hash", "checkpoint", "revision"])
def test_a_file_of_something_else_is_refused(path: Path, script: Script, name: str) -> None:
    certify(path, script)
    before = path.read_bytes()
    other = replace(BINDING, **{name: "new"})
    with pytest.raises(ConfigError, match=f"{name} was .*, is new; choose another --out"):
        certify(path, script, binding=other)
    assert path.read_bytes() == before
    assert certify(path, script, True, other).binding == other


def test_other_lengths_are_another_certification(path: Path, script: Script) -> None:
    certify(path, script)
    with pytest.raises(ConfigError, match="lengths was 150,300, is 150; choose"):
        certify(path, script, lengths=(SHORT,))


def test_one_process_at_a_time_writes(path: Path, script: Script) -> None:
    evidence = certify(path, script)
    file = EvidenceFile(path, replace(evidence, cells=()))
    with pytest.raises(ConfigError, match="is written by another process"):
        certify(path, script)
    file.close()
    assert certify(path, script) == evidence


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(
    path: Path, script: Script, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    script.ends_after = 3
    with pytest.raises(Killed):
        certify(path, script)
    before = path.read_bytes()
    monkeypatch.setattr(f"os.{call}", full)
    script.ends_after = -1
    with pytest.raises(NrankError, match="No space left on device; make room"):
        certify(path, script)
    assert path.read_bytes() == before


def test_a_claim_holds_only_where_nothing_changed(path: Path, script: Script) -> None:
    evidence = certify(path, script)
    here = replace(BINDING, plan_id="")
    assert Claim(evidence, here).standing("plan") == (LONG, "")
    tokens, warning = Claim(evidence, replace(here, revision="new")).standing("other")
    assert tokens == 0
    assert warning == (
        f"the evidence certified {LONG} tokens, but since then plan_id was plan, is other; "
        "revision was revision, is new: run nrank certify again"
    )
    part = replace(evidence, cells=evidence.cells[:3])
    assert Claim(part, here).standing("plan") == (
        0, f"the evidence certifies no length: grid at {SHORT} tokens was not run whole",
    )  # fmt: skip


def test_prompts_of_a_fill_do_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first answers would end before the last prompt was read."""
    used: list[EngineConfig] = []

    @contextmanager
    def launch(config: EngineConfig, *_: object) -> Iterator[None]:
        used.append(config)
        yield

    monkeypatch.setattr("deploy.certify.gangs.launch_engine", launch)
    start = gang_starter(EngineConfig("model"), lambda: None)
    for stages in GANGS:
        with start(stages):
            pass
    assert [config.decode_share for config in used] == [0.55, 0.55, 0.0]
