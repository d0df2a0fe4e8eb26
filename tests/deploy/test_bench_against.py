"""`nrank bench --against`: order and pairing, cold and warm apart, refusals, one real run."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from deploy import cli
from deploy.bench.against import Pair, Rounds, abba, measure_pairs
from deploy.bench.against_report import MeasuredPairs, print_pairs
from deploy.bench.engine_system import EngineSystem
from deploy.bench.heat import ChipHeat, chip_heat
from deploy.bench.origin import Ending, Origin
from deploy.bench.sides import Sides, make_rounds, make_sides, parse
from deploy.bench.steps import StepTimes
from deploy.bench.workloads import QUICK, Run, Spread, Workload
from placement.config import EngineConfig
from placement.errors import ConfigError, NrankError
from rank_worker.device_sensors.reading import ChipReading, NodeReading

WORKLOAD = Workload("decode-2x2+3", ((5, 6), (7, 8)), 3)
ANSWERS = ((1, 2, 3), (4, 5, 6))
ROUNDS = Rounds([WORKLOAD] * 5)


@dataclass
class FakeSide:
    """Run n takes (1 + n) / speed seconds; `cached` and `answers` are those of its first runs."""

    name: str
    log: list[str]
    speed: float = 1.0
    ranks: int = 1
    cached: list[int] = field(default_factory=list)
    answers: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)

    def run(self, workload: Workload) -> Run:
        seconds = (1 + self.log.count(self.name)) / self.speed
        self.log.append(self.name)
        answer = self.answers.pop(0) if self.answers else ANSWERS
        cached = self.cached.pop(0) if self.cached else 0
        steps = StepTimes(2, 0.04 / self.speed, {"experts": 0.01})
        return Run(answer, seconds, 4 * seconds, cached, 8, 6, steps)


def pair(log: list[str]) -> Pair:
    """B takes half the time."""
    return Pair(FakeSide("A", log), FakeSide("B", log, speed=2.0))


def test_who_goes_first_is_turned_round_from_round_to_round() -> None:
    drawn = set()
    for name in ("decode-1", "decode-4", "prefill", "prefix", "counting"):
        warm_up, *counted = abba(name, 9)
        assert warm_up == "AB"
        for index in range(0, 8, 2):
            assert sorted(counted[index : index + 2]) == ["AB", "BA"]
        drawn.add(tuple(counted))
        assert abba(name, 9) == [warm_up, *counted]
    assert len(drawn) > 1


def test_gains_are_those_of_rounds_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    (row,) = measure_pairs(pair(log), [ROUNDS]).rows
    assert "".join(log) == "".join(abba(WORKLOAD.id, 5))
    assert row.orders == tuple(abba(WORKLOAD.id, 5)[1:])
    assert (row.a.ttft_s.median, row.b.ttft_s.median) == (3.5, 1.75)
    for gain in (row.decode_gain, row.ttft_gain):
        assert gain is not None
        assert (gain.min, gain.median, gain.max) == (2.0, 2.0, 2.0)
    rate = row.a.decode_tokens_per_s
    assert rate is not None
    assert (rate.min, rate.max) == (4 / (4 * 5), 4 / (4 * 2))
    assert (row.concurrency, row.prompts, row.prompt_tokens) == (2, 2, 4)
    assert (row.a.draft_tokens, row.a.accepted_tokens, row.a.acceptance) == (32, 24, 0.75)
    assert row.b.step_split is not None
    assert row.b.step_split.step_ms == pytest.approx(10)
    assert row.max_celsius is None


def test_a_gain_is_not_the_ratio_of_medians() -> None:
    """After the warm-up 1 s against 1 s, 10 against 2, 3 against 4."""
    turns = {"A": iter([1.0, 1.0, 10.0, 3.0]), "B": iter([1.0, 1.0, 2.0, 4.0])}

    @dataclass
    class Timed:
        name: str
        ranks: int = 1

        def run(self, workload: Workload) -> Run:
            seconds = next(turns[self.name])
            return Run(ANSWERS, seconds, seconds)

    both = Pair(Timed("A"), Timed("B"))
    (row,) = measure_pairs(both, [Rounds([WORKLOAD] * 4)]).rows
    assert (row.ttft_gain.min, row.ttft_gain.median, row.ttft_gain.max) == (0.75, 1.0, 5.0)
    assert row.decode_gain == row.ttft_gain


@pytest.mark.parametrize(
    ("speed", "rounds", "verdict"),
    [(2.0, 3, "B faster"), (0.5, 3, "A faster"), (1.0, 3, "neither"), (2.0, 2, "too few rounds")],
)
def test_who_is_faster_is_said_where_all_of_enough_rounds_agree(
    capsys: pytest.CaptureFixture[str], speed: float, rounds: int, verdict: str
) -> None:
    both = Pair(FakeSide("A", []), FakeSide("B", [], speed))
    pairs = measure_pairs(both, [Rounds([WORKLOAD] * (1 + rounds))])
    sides = Sides(EngineConfig("/m", mtp=2), EngineConfig("/m", mtp=0, prefix_cache=True))
    origin, ending = Origin("abc", {"cpu": "some", "cores": 2}, (1, 1, 1)), Ending((2, 1, 1))
    print_pairs(MeasuredPairs(origin, ending, sides, "x", 1, rounds, {}, pairs))
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if " decode tok/s " in line or " TTFT ms " in line]
    assert len(lines) == 2
    for line in lines:
        assert line.rstrip().endswith(verdict)
        assert f" {speed:.2f} ({speed:.2f}-{speed:.2f}) " in line
    assert "A: mtp=2, prefix_cache=off" in out
    assert "B: mtp=0, prefix_cache=on" in out
    for low, high in ((0.9, 3.0), (0.3, 1.1)):  # one round went the other way
        gain = Spread(speed, low, high)
        pairs.rows[0] = replace(pairs.rows[0], decode_gain=gain, ttft_gain=gain)
        print_pairs(MeasuredPairs(origin, ending, sides, "x", 1, rounds, {}, pairs))
        shown = capsys.readouterr().out
        assert "B faster" not in shown
        assert "A faster" not in shown


def test_cold_and_warm_runs_of_a_prompt_make_two_rows() -> None:
    log: list[str] = []
    both = Pair(FakeSide("A", log, cached=[0, 2] * 3), FakeSide("B", log))
    cold, warm = measure_pairs(both, [Rounds([WORKLOAD] * 3, has_again=True)]).rows
    assert (cold.id, warm.id) == ("decode-2x2+3", "decode-2x2+3-again")
    assert "".join(log) == "".join(side * 2 for order in abba(WORKLOAD.id, 3) for side in order)
    assert (cold.a.cached_tokens, warm.a.cached_tokens, warm.b.cached_tokens) == (0, 4, 0)
    assert (cold.a.ttft_s.min, cold.a.ttft_s.max) == (3, 5)
    assert (warm.a.ttft_s.min, warm.a.ttft_s.max) == (4, 6)


@pytest.mark.parametrize(
    ("cached", "again", "rows", "expected"),
    [
        ([0, 0, 2], False, [], "B found kept prefixes in 1 of 3 runs that had to be cold"),
        ([2], False, [], "B found kept prefixes in 1 of 3 runs that had to be cold"),
        ([0, 2, 0, 0, 0, 2], True, [""], "-again: B found kept prefixes in 2 of 3 runs only"),
    ],
)
def test_a_row_that_would_mix_cold_and_warm_is_left_out_with_a_line(
    cached: list[int], again: bool, rows: Sequence[str], expected: str
) -> None:
    both = Pair(FakeSide("A", []), FakeSide("B", [], cached=cached))
    found = measure_pairs(both, [Rounds([WORKLOAD] * 3, again)], ["x"])
    assert [row.id for row in found.rows] == [WORKLOAD.id + suffix for suffix in rows]
    assert found.left_out[0] == "x"
    assert expected in found.left_out[1]


WRONG = ((1, 9, 3), (4, 5, 6))


@pytest.mark.parametrize(("side", "call"), [("A", 0), ("A", 3), ("B", 0), ("B", 4)])
def test_other_ids_stop_it_unless_the_sides_may_differ(side: str, call: int) -> None:
    def both(has_same_ids: bool) -> Pair:
        sides = {
            name: FakeSide(name, [], answers=[ANSWERS] * call + [WRONG] if name == side else [])
            for name in "AB"
        }
        return Pair(sides["A"], sides["B"], has_same_ids)

    with pytest.raises(NrankError, match=r"made other ids than .* from token 1 of request 0"):
        measure_pairs(both(True), [ROUNDS])
    assert measure_pairs(both(False), [ROUNDS]).rows


def test_answers_that_end_at_once_have_no_decode_rate() -> None:
    both = Pair(
        FakeSide("A", [], answers=[((1,), (2,))] * 5), FakeSide("B", [], answers=[((1,), (2,))] * 5)
    )
    ends = Workload("text", WORKLOAD.prompts, 3, end_token_ids=(1, 2))
    (row,) = measure_pairs(both, [Rounds([ends] * 5)]).rows
    assert (row.decode_gain, row.a.decode_tokens_per_s) == (None, None)
    assert row.ttft_gain.median == 1.0


@pytest.mark.parametrize(
    ("base", "against", "expected"),
    [
        ("", "mpt=0", "--against: unknown field 'mpt'; did you mean 'mtp'?"),
        ("", "model_dir=x", "--against: unknown field 'model_dir'"),
        ("", "mtp", "--against: 'mtp' has to be FIELD=VALUE"),
        ("", "mtp=", "--against: 'mtp=' has to be FIELD=VALUE"),
        ("", "mtp=0,mtp=1", "--against: mtp is given twice"),
        ("", "mtp=9", "--against: mtp = '9': Input should be less than or equal to 4"),
        ("", "prefix_cache=maybe", "--against: prefix_cache = 'maybe': Input should be a valid b"),
        ("step_tokens=x", "mtp=0", "--base: step_tokens = 'x': Input should be a valid integer"),
        ("", "device=gpu", "--against: device = 'gpu': Input should be 'cpu', 'cuda' or 'npu'"),
        ("", "ranks=15", "14 experts"),
    ],
)
def test_a_configuration_that_can_not_be_run_is_refused_in_one_line(
    embedded_model_dir: Path, base: str, against: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_sides(str(embedded_model_dir), 1, base, against)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_b_is_a_with_the_change_and_a_is_what_the_server_runs(embedded_model_dir: Path) -> None:
    sides = make_sides(
        str(embedded_model_dir), 1, "step_tokens=96, mtp_auto=off", "mtp=0,prefix_cache=off,ranks=2"
    )
    assert (sides.a.mtp, sides.a.prefix_cache, sides.a.ranks) == (2, True, 1)
    assert (sides.a.step_tokens, sides.b.step_tokens) == (96, 96)
    assert (sides.a.mtp_auto, sides.b.mtp_auto) == (False, False)
    assert sides.differences == {
        "ranks": (1, 2), "mtp": (2, 0), "prefix_cache": (True, False),
    }  # fmt: skip
    assert parse("--base", " ") == {}


def test_a_default_context_is_told_as_what_it_is(embedded_model_dir: Path) -> None:
    sides = make_sides(str(embedded_model_dir), 1, "", "context_tokens=512")
    assert sides.differences == {"context_tokens": (0, 512)}
    assert [sides.value(side, "context_tokens") for side in (0, 1)] == [32768, 512]


def test_without_a_workload_that_fits_nothing_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(EngineSystem, "start", None)
    assert cli.main(["bench", "--against", "context_tokens=10", "--quick"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no workload fits the context of 10 tokens that both sides have" in err


def test_random_prompts_are_new_in_every_round_and_to_each_other(
    embedded_model_dir: Path,
) -> None:
    sides = make_sides(str(embedded_model_dir), 1, "context_tokens=512", "context_tokens=144")
    limits = sides.limits()
    assert limits.context_tokens == 144
    rounds, left_out = make_rounds(limits, QUICK, repeats=3)
    assert left_out == ["prefix-140: needs a context of 148 tokens, both sides have 144"]
    by_id = {one.id: one for one in rounds}
    assert list(by_id) == [
        "decode-1x24+8", "decode-4x24+8", "prefill-24", "prefill-70",
        "counting-1", "counting-4", "prose-1", "prose-4",
    ]  # fmt: skip
    fresh = [by_id[name] for name in list(by_id)[:4]]
    starts = [p[:8] for one in fresh for w in one.workloads for p in w.prompts]
    assert len(starts) == 4 * (1 + 4 + 1 + 1)
    assert len(set(starts)) == len(starts)
    assert make_rounds(limits, QUICK, repeats=3) == (rounds, left_out)


def test_a_quick_run_of_two_configurations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = cli.main(["bench", "--quick", "--repeats", "1", "--against", "mtp=0", "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    table, _, line = out.rstrip("\n").rpartition("\n")
    found = json.loads(line)
    assert (found["kind"], found["left_out"]) == ("against", [])
    settings = found["settings"]
    assert (settings["a"]["mtp"], settings["b"]["mtp"]) == (2, 0)
    rows = {row["id"]: row for row in found["pairs"]}
    assert set(found["prompts"]) == set(rows) - {"prefix-140-again"}
    for row in rows.values():
        assert row["ttft_gain"]["median"] > 0
        for side in (row["a"], row["b"]):
            split = side["step_split"]
            assert sum(split["parts_ms"].values()) == pytest.approx(split["step_ms"])
        assert (row["b"]["acceptance"], row["b"]["draft_tokens"]) == (None, 0)
    assert rows["counting-1"]["a"]["acceptance"] > 0.9
    assert rows["counting-1"]["a"]["step_split"]["steps"] == 4  # 8 tokens: 1, then rounds of 3
    assert rows["counting-1"]["b"]["step_split"]["steps"] == 8
    kept = [(row["a"]["cached_tokens"], row["b"]["cached_tokens"]) for row in rows.values()]
    assert kept.count((0, 0)) == len(rows) - 1
    assert rows["prefix-140-again"]["a"]["cached_tokens"] == 128
    for text in ("A: mtp=2", "B: mtp=0", "same greedy ids from both", "no sensor", *rows):
        assert text in table


def test_flags_that_do_not_go_together_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, expected in (
        (["--base", "mtp=0"], "--base is A of --against"),
        (["--against", "mtp=0", "--ranks", "1,2"], "--against takes one rank count, not 2"),
    ):
        assert cli.main(["bench", *arguments]) == 2
        err = capsys.readouterr().err
        assert expected in err
        assert err.count("\n") == 1


def reading(*celsius: float | None) -> NodeReading:
    chips = [
        ChipReading(0, index, index, temperature_celsius=value)
        for index, value in enumerate(celsius)
    ]
    return NodeReading(0.0, 0.0, "scripted", tuple(chips))


def test_heat_is_the_greatest_of_the_gangs_chips_since_it_was_asked_last() -> None:
    heat = ChipHeat(2)
    assert heat.take() is None
    for one in (reading(60.0, 71.0, 99.0), reading(None, 65.0), None, reading(None, None)):
        heat.look(one)
    assert heat.take() == 71.0
    heat.look(reading(None, None))
    assert heat.take() is None


class ScriptedPoller:
    """Hot from the second look on."""

    def __init__(self) -> None:
        self.looks, self.is_closed, self.seen = 0, False, threading.Event()

    def latest(self) -> NodeReading:
        self.looks += 1
        if self.looks > 2:
            self.seen.set()
        return reading(80.0 if self.looks > 1 else 50.0)

    def close(self) -> None:
        self.is_closed = True


def test_chips_are_looked_at_while_inside_and_a_cpu_has_none() -> None:
    poller = ScriptedPoller()
    with chip_heat("npu", 1, lambda: poller) as celsius:  # type: ignore[arg-type, return-value]
        assert poller.seen.wait(10)
        assert celsius() == 80.0
    assert poller.is_closed
    with chip_heat("cpu", 1, lambda: pytest.fail("a CPU has no sensor")) as celsius:
        assert celsius() is None
