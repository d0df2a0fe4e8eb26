"""`nrank bench`: what is measured, in which order, what is printed, and when no rate is printed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.bench import measure as bench_measure
from deploy.bench.gains import Gains
from deploy.bench.origin import Ending, Origin
from deploy.bench.peer import TransformersPeer
from deploy.bench.report import Measured, Settings, print_report
from deploy.bench.workloads import (
    FULL,
    QUICK,
    Row,
    Run,
    Workload,
    make_workloads,
    usable_ids,
)
from placement.errors import ConfigError, NrankError

VOCAB, END = 4096, (1500, 4087)
WORKLOAD = Workload("decode-2x2+3", ((5, 6), (7, 8)), 3)
ANSWERS = ((1, 2, 3), (4, 5, 6))


@dataclass
class FakeSystem:
    """Answers every workload with `answers`; the calls of all systems go into one log."""

    name: str
    log: list[str]
    answers: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    ranks: int = 1

    def run(self, workload: Workload) -> Run:
        self.log.append(self.name)
        answer = self.answers.pop(0) if self.answers else ANSWERS
        return Run(answer, ttft_s=0.5, decode_s=0.25 * self.log.count(self.name))


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `nrank bench` in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["bench", *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_a_quick_run_ends_in_json_with_all_fields(
    bench: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    code, out, err = bench(
        "--quick", "--ranks", "1", "--repeats", "1", "--json", "--out", str(file)
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    table, _, line = out.rstrip("\n").rpartition("\n")
    found = json.loads(line)
    assert file.read_text() == line + "\n"
    assert (found["schema"], found["kind"]) == ("nrank-bench/1", "speed")
    assert set(found) >= {"commit", "machine", "load_average", "workloads"}
    assert found["commit"]
    assert len(found["load_average_end"]) == 3
    assert "hottest chip: no sensor" in table
    assert {found["max_celsius"], *(row["max_celsius"] for row in found["workloads"])} == {None}
    rows = [row["id"] for kind in ("drafts", "prefixes", "streams") for row in found["gains"][kind]]
    assert set(found["prompts"]) == {row["id"] for row in found["workloads"]} | set(rows)
    assert len(set(found["prompts"].values())) == len(found["prompts"])
    assert found["machine"]["cores"] >= 1
    assert len(found["load_average"]) == 3
    assert found["settings"]["dtype"] == "float32"
    assert found["settings"]["threads_per_rank"] == 1
    ids = ["decode-1x24+8", "decode-4x24+8", "prefill-24", "prefill-70"]
    rows = found["workloads"]
    assert [(r["id"], r["system"], r["ranks"]) for r in rows] == [
        (name, system, 1) for name in ids for system in ("transformers", "nrank")
    ]
    for row in rows:
        assert row["concurrency"] == (4 if row["id"].startswith("decode-4") else 1)
        rates = [row["prefill_tokens_per_s"], row["ttft_s"]]
        if row["id"].startswith("decode"):
            rates.append(row["decode_tokens_per_s"])
        else:
            assert row["decode_tokens_per_s"] is None
        for spread in rates:
            assert_spread(spread)
        check_split(row)
    for text in ("x transformers", "load average", *ids):
        assert text in table
    check_gains(found["gains"], table)
    code, out, err = bench("--compare", str(file), str(file))
    assert (code, err) == (0, "")
    assert "1 and 1 repeats: nothing is claimed below 3" in out


def check_split(row: dict[str, Any]) -> None:
    """Of the engine alone: one step makes the first token, each further one makes one more."""
    split = row["step_split"]
    if row["system"] != "nrank":
        assert split is None
        return
    assert split["steps"] == (8 if row["id"].startswith("decode") else 1)
    assert sum(split["parts_ms"].values()) == pytest.approx(split["step_ms"])
    assert 0 <= split["parts_ms"]["rest"] < 0.1 * split["step_ms"]
    assert {"attention", "recurrent", "experts", "sampling", "host"} < set(split["parts_ms"])


def check_gains(gains: dict[str, Any], table: str) -> None:
    names = ("counting", "retrieval", "prose", "noise", "random-ids")
    drafts = gains["drafts"]
    assert [row["id"] for row in drafts] == [f"{name}-{c}" for name in names for c in (1, 4)]
    for row in drafts:
        assert (row["ranks"], row["concurrency"]) == (1, row["prompts"])
        assert row["answer_tokens"] == 8 * row["prompts"]
        assert row["acceptance"] == row["accepted_tokens"] / row["draft_tokens"]
        for key in ("plain_tokens_per_s", "drafted_tokens_per_s", "speedup"):
            assert_spread(row[key])
    assert drafts[0]["acceptance"] > 0.9
    (prefix,) = gains["prefixes"]
    assert (prefix["prompt_tokens"], prefix["cached_tokens"]) == (140, 128)
    (stream,) = gains["streams"]
    assert (stream["id"], stream["prompt_tokens"]) == ("beside-540", 540)
    for key in ("cold_ttft_s", "warm_ttft_s", "speedup"):
        assert_spread(prefix[key])
    for key in ("alone_tokens_per_s", "beside_tokens_per_s", "share", "prefill_s"):
        assert_spread(stream[key])
    assert gains["left_out"] == []
    for text in ("2 drafts", "128 of 140", "decode_share 0.55", *(row["id"] for row in drafts)):
        assert text in table


def assert_spread(spread: dict[str, float]) -> None:
    assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_no_rate_is_printed_when_the_peer_makes_other_ids(
    bench: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TransformersPeer.run

    def wrong(self: TransformersPeer, workload: Workload) -> Run:
        run = honest(self, workload)
        first, *rest = run.token_ids
        changed = (*first[:2], (first[2] + 1) % VOCAB, *first[3:])
        return replace(run, token_ids=(changed, *rest))

    monkeypatch.setattr(TransformersPeer, "run", wrong)
    code, out, err = bench("--quick", "--ranks", "1", "--repeats", "1", "--json")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "decode-1x24+8" in err
    assert "from token 2 of request 0" in err


def test_systems_take_turns_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    systems = [FakeSystem("a", log), FakeSystem("b", log)]
    rows = bench_measure.measure(systems, [WORKLOAD], repeats=3)
    assert log == ["a", "b"] * 4
    assert [row.system for row in rows] == ["a", "b"]
    decode = rows[0].decode_tokens_per_s
    assert decode is not None
    assert (decode.median, decode.min, decode.max) == (4 / 0.75, 4 / 1.0, 4 / 0.5)
    assert rows[0].prefill_tokens_per_s.median == 4 / 0.5


@pytest.mark.parametrize(
    ("system", "call", "answer", "expected"),
    [
        (1, 0, ((1, 2, 3), (4, 9, 6)), "b with ranks=1 made other ids than a with ranks=1 from "),
        (1, 2, ((1, 2, 3), (4, 9, 6)), "token 1 of request 1"),
        (0, 3, ((7, 2, 3), (4, 5, 6)), "token 0 of request 0"),
        (1, 1, ((1, 2), (4, 5, 6)), "b made 2 tokens for request 0 where 3 were asked for"),
        (0, 0, ((1, 2), (4, 5, 6)), "made 2 tokens for request 0 where 3 were asked for"),
    ],
)
def test_any_run_with_other_ids_stops_the_bench(
    system: int, call: int, answer: tuple[tuple[int, ...], ...], expected: str
) -> None:
    log: list[str] = []
    systems = [FakeSystem("a", log), FakeSystem("b", log)]
    systems[system].answers = [ANSWERS] * call + [answer]
    with pytest.raises(NrankError, match=expected):
        bench_measure.measure(systems, [WORKLOAD], repeats=3)


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_prompts_are_fixed_distinct_and_free_of_special_ids(sizes: Any) -> None:
    usable = usable_ids(VOCAB, END)
    workloads = make_workloads(usable, sizes)
    assert workloads == make_workloads(usable, sizes)
    assert [w.concurrency for w in workloads] == [1, 4, 1, 1]
    assert [len(w.prompts[0]) for w in workloads] == [sizes.prompt] * 2 + list(sizes.prefills)
    assert len(set(workloads[1].prompts)) == 4
    used = {i for w in workloads for prompt in w.prompts for i in prompt}
    assert min(used) >= VOCAB // 4
    assert max(used) < VOCAB * 3 // 4
    assert not used & set(END)


def test_an_end_token_in_the_middle_of_the_vocabulary_is_left_out() -> None:
    ends = tuple(range(1024, 3071))
    workloads = make_workloads(usable_ids(VOCAB, ends), QUICK)
    assert {i for w in workloads for prompt in w.prompts for i in prompt} == {3071}
    with pytest.raises(ConfigError, match="a vocabulary of 1 leaves no ids"):
        usable_ids(1, ())


def test_the_peer_measures_again_when_the_answer_took_less_than_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([2.0, 1.0, 2.0, 5.0])
    monkeypatch.setattr(
        TransformersPeer, "_timed", lambda self, workload, count: (next(times), ANSWERS)
    )
    peer = object.__new__(TransformersPeer)
    assert peer.run(WORKLOAD) == Run(ANSWERS, ttft_s=2.0, decode_s=3.0)
    times = iter([2.0, 1.0] * 3)
    with pytest.raises(NrankError, match="took longer for 1 token than for 3"):
        peer.run(WORKLOAD)


def test_the_ratio_is_that_of_the_rate_a_workload_is_about(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefill = Workload("prefill-2", ((5, 6),), 1)
    peer, engine = FakeSystem("peer", []), FakeSystem("nrank", [], ranks=2)
    rows = [
        Row.of(WORKLOAD, peer, [Run(ANSWERS, 1.0, 8.0)]),
        Row.of(WORKLOAD, engine, [Run(ANSWERS, 1.0, 2.0)]),
        Row.of(prefill, peer, [Run(((1,),), 0.3)]),
        Row.of(prefill, engine, [Run(((1,),), 0.2)]),
    ]
    origin = Origin("abc", {"cpu": "some", "cores": 2}, (0.5, 1.0, 1.5))
    ending = Ending((2.0, 1.0, 1.5), 71.4)
    settings = Settings("/models/m", "abcd", "float32", 1, 1, 2, 0.5)
    print_report(Measured(origin, ending, settings, {}, rows, Gains()), "peer")
    out = capsys.readouterr().out
    starts = ("  decode-", "  prefill-")
    ratios = [line.split()[-1] for line in out.splitlines() if line.startswith(starts)]
    assert ratios == ["1.00", "4.00", "1.00", "1.50"]
    assert "m in float32, commit abc" in out
    assert "not scaling" in out
    assert (
        "load average 0.50, 1.00, 1.50 before, 2.00, 1.00, 1.50 after; hottest chip: 71 °C" in out
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ranks", "0"], "0 is below 1"),
        (["--ranks", "1,x"], "'x' is not a whole number"),
        (["--ranks", "2,2"], "'2,2' names a rank count twice"),
        (["--repeats", "0"], "0 is below 1"),
        (["--peer", "other"], "invalid choice"),
        (["--ops", "--against", "mtp=0"], "not allowed with argument"),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_models_that_can_not_be_measured_are_refused_in_one_line(
    bench: Callable[..., tuple[int, str, str]], embedded_model_dir: Path, tmp_path: Path
) -> None:
    code, _, err = bench("--model", str(tmp_path / "none"))
    assert (code, err.count("\n")) == (2, 1)
    code, _, err = bench("--ranks", "1,15")
    assert (code, err.count("\n")) == (2, 1)
    assert "14 experts" in err
    code, _, err = bench("--out", str(tmp_path / "none" / "file"))
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no folder" in err
    short = tmp_path / "short"
    shutil.copytree(embedded_model_dir, short)
    config = json.loads((short / "config.json").read_text())
    config["max_position_embeddings"] = 512
    (short / "config.json").write_text(json.dumps(config))
    code, out, err = bench("--model", str(short))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "needs a context of 1001 tokens" in err
    assert "has 512" in err
