"""`nrank bench --compare`: what is claimed of two files, what is refused, how one is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.bench.comparison import Verdict, compare_files, verdict_of
from deploy.bench.results import Better, write_result
from deploy.bench.workloads import Spread, StreamWorkload, Workload, fingerprints
from placement.errors import ConfigError

Compare = Callable[..., tuple[int, str, str]]
Change = Callable[[dict[str, Any]], object]


def spread(low: float, middle: float, high: float) -> dict[str, float]:
    return {"median": middle, "min": low, "max": high}


def row(**figures: Any) -> dict[str, Any]:
    return {"id": "decode-1", "system": "nrank", "ranks": 1, **figures}


def result(**changes: Any) -> dict[str, Any]:
    """Three rows: decode at 100 tok/s, a TTFT of 50 ms, and a stream's prefill of 2 s."""
    rows = [
        row(decode_tokens_per_s=spread(90, 100, 110), ttft_s=spread(0.04, 0.05, 0.06)),
        row(system="transformers", decode_tokens_per_s=spread(20, 21, 22)),
    ]
    return {
        "schema": "nrank-bench/1", "kind": "speed", "commit": "abc",
        "machine": {"cpu": "some", "cores": 2}, "load_average": [1, 1, 1],
        "load_average_end": [2, 1, 1], "max_celsius": None,
        "settings": {"model": "/m", "dtype": "float32", "repeats": 5, "drafts": 2},
        "prompts": {"decode-1": "11", "beside-4": "22"}, "workloads": rows,
        "gains": {
            "drafts": [], "prefixes": [], "left_out": [],
            "streams": [{"id": "beside-4", "ranks": 1, "prefill_s": spread(1.9, 2, 2.1)}],
        },
        **changes,
    }  # fmt: skip


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Run `nrank bench --compare` on two results: exit code, stdout, stderr."""

    def run(old: Any, new: Any) -> tuple[int, str, str]:
        for name, content in (("old", old), ("new", new)):
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
        code = cli.main(["bench", "--compare", str(tmp_path / "old"), str(tmp_path / "new")])
        return code, *capsys.readouterr()

    return run


def with_decode(low: float, middle: float, high: float) -> dict[str, Any]:
    changed = result()
    changed["workloads"][0]["decode_tokens_per_s"] = spread(low, middle, high)
    return changed


@pytest.mark.parametrize(
    ("new", "code", "verdict", "ratio"),
    [
        (with_decode(111, 120, 130), 0, "faster", "1.20"),
        (with_decode(70, 80, 89), 1, "slower", "0.80"),
        (with_decode(110, 120, 130), 0, "no claim", "1.20"),
        (with_decode(70, 80, 90), 0, "no claim", "0.80"),
        (with_decode(10, 80, 500), 0, "no claim", "0.80"),
    ],
)
def test_only_spreads_that_lie_apart_are_a_claim(
    compare: Compare, new: dict[str, Any], code: int, verdict: str, ratio: str
) -> None:
    found, out, err = compare(result(), new)
    assert (found, err) == (code, "")
    (line,) = (one for one in out.splitlines() if "decode_tokens" in one and " nrank " in one)
    assert line.split()[2:4] == ["decode_tokens_per_s", "1"]
    assert line.rstrip().endswith(verdict)
    assert f" {ratio} " in line
    assert "100 (90-110)" in line
    counts = [verdict == name for name in ("slower", "faster")]
    assert f"4 figures: {counts[0]:d} slower, {counts[1]:d} faster" in out


def test_less_time_is_faster() -> None:
    old, new = Spread(5, 4, 6), Spread(2, 1, 3)
    assert verdict_of(old, new, Better.LESS) is Verdict.FASTER
    assert verdict_of(new, old, Better.LESS) is Verdict.SLOWER
    assert verdict_of(old, new, Better.MORE) is Verdict.SLOWER
    assert verdict_of(new, old, Better.MORE) is Verdict.FASTER
    assert verdict_of(new, old, Better.NEITHER) is Verdict.CHANGED
    assert verdict_of(old, new, Better.NEITHER) is Verdict.CHANGED


def test_a_busy_machine_is_told(compare: Compare) -> None:
    busy = result(load_average=[0.5, 9, 9], load_average_end=[2.5, 9, 9])
    lines = compare(busy, result())[1].splitlines()
    (line,) = (line for line in lines if "the machine was busy" in line)
    assert line.startswith("the machine was busy: a load of 2.5 on 2 cores")
    assert lines[lines.index(line) - 1].startswith("old: ")


def test_a_slower_prefill_beside_a_stream_fails(compare: Compare) -> None:
    new = result()
    new["gains"]["streams"][0]["prefill_s"] = spread(3, 4, 5)
    code, out, _ = compare(result(), new)
    assert code == 1
    assert "1 slower" in out


def test_the_chance_of_a_false_alarm_is_told(tmp_path: Path) -> None:
    """Of 10 runs of equal speed, 5 of one file are the 5 slowest in 1 of 252 cases."""
    for name in ("old", "new"):
        (tmp_path / name).write_text(json.dumps(result()))
    found = compare_files(str(tmp_path / "old"), str(tmp_path / "new"))
    assert found.chance == 1 / 252


def test_pairs_and_operators_are_compared_too(compare: Compare) -> None:
    side = {"decode_tokens_per_s": None, "ttft_s": spread(1, 1, 1)}
    for kind, table, one in (
        ("against", "pairs", {"id": "w", "a": side, "b": side, "ttft_gain": spread(2, 2, 2)}),
        ("ops", "ops", {"id": "linear 1", "system": "x", "seconds": spread(1, 2, 3)}),
    ):
        same = result(kind=kind, workloads=[], gains={}, **{table: [one]})
        code, out, err = compare(same, same)
        assert (code, err) == (0, "")
        assert f"{3 if kind == 'against' else 1} figures: 0 slower, 0 faster" in out


def test_fewer_than_three_repeats_claim_nothing(compare: Compare) -> None:
    new = with_decode(1, 1, 1)
    new["settings"]["repeats"] = 2
    code, out, _ = compare(result(), new)
    assert code == 0
    assert "5 and 2 repeats: nothing is claimed below 3" in out
    assert "4 figures: 0 slower, 0 faster, 0 ratios changed, 4 without a claim" in out


def test_without_a_claim_no_false_alarm_is_expected(compare: Compare) -> None:
    one = result()
    one["settings"]["repeats"] = 1
    out = compare(one, one)[1]
    assert "4 without a claim as spreads overlap" in out
    assert "by chance" not in out


def test_the_expected_false_alarms_are_a_plain_number(compare: Compare) -> None:
    assert "; about 0.016 would be called slower by chance\n" in compare(result(), result())[1]
    rows = [row(id=f"w{n}", ttft_s=spread(1, 1, 1)) for n in range(600)]
    many = result(workloads=rows, gains={})
    many["settings"]["repeats"] = 3  # 1 of 20
    assert "; about 30 would be called slower by chance\n" in compare(many, many)[1]


def test_a_comparison_ends_in_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, out = (str(tmp_path / name) for name in ("old", "new", "out"))
    Path(old).write_text(json.dumps(result()))
    changed = with_decode(70, 80, 89)
    changed["workloads"][1]["decode_tokens_per_s"] = spread(0, 0, 0)
    Path(new).write_text(json.dumps(changed))
    assert cli.main(["bench", "--compare", old, new, "--json", "--out", out]) == 1
    line = capsys.readouterr().out.rstrip("\n").rpartition("\n")[2]
    assert Path(out).read_text() == line + "\n"
    found = json.loads(line)
    assert (found["kind"], found["old"], found["new"]) == ("comparison", old, new)
    assert (found["figures"][0]["verdict"], found["figures"][0]["ratio"]) == ("slower", 0.8)
    assert found["counts"]["slower"] == 2
    assert cli.main(["bench", "--compare", new, old, "--json"]) == 0
    back = json.loads(capsys.readouterr().out.rstrip("\n").rpartition("\n")[2])
    assert None in [figure["ratio"] for figure in back["figures"]]
    assert cli.main(["bench", "--compare", old, out]) == 2  # it is no result
    assert "is no whole result of nrank bench" in capsys.readouterr().err


def test_whatever_else_has_moved_is_listed(compare: Compare) -> None:
    new = result(commit="def", machine={"cpu": "other", "cores": 2}, max_celsius=66.0)
    new["settings"] |= {"drafts": 3, "model": "/elsewhere"}
    new["workloads"] = [*new["workloads"][:1], row(ranks=2, ttft_s=spread(1, 1, 1))]
    code, out, _ = compare(result(), new)
    assert code == 0
    for line in (
        "commit: abc -> def",
        "other machine: machine.cpu: some -> other",
        "settings.drafts: 2 -> 3",
        "in OLD only: decode-1 transformers x1",
        "in NEW only: decode-1 nrank x2",
    ):
        assert line in out.splitlines()
    assert "settings.model" not in out
    assert "new: other, 2 cores" in out
    assert "hottest chip: no sensor" in out
    assert "hottest chip: 66 °C" in out


def test_the_line_of_json_may_stand_below_a_table(compare: Compare) -> None:
    code, out, _ = compare("a table\n\n" + json.dumps(result()) + "\n\n", result())
    assert code == 0
    assert "4 figures" in out


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (result(kind="ops"), "is of the kind 'speed', "),
        (result(kind="other"), "'other' is not a valid Kind"),
        (result(schema="nrank-bench/2"), "has the schema 'nrank-bench/2', this nrank reads"),
        ({"workloads": []}, "has the schema None"),
        ([1], "has the schema None"),
        ("", "doesn't end in a line of JSON"),
        ("a table\n", "doesn't end in a line of JSON"),
        ("[" * 100_000, "doesn't end in a line of JSON"),
        (result(prompts={"decode-1": "11"}), "of different workloads: 1 are in one of them only"),
        (result(prompts={"decode-1": "11", "beside-4": "23"}), "beside-4 had other prompts in"),
        (result(settings={}), "is no whole result of nrank bench (KeyError: 'repeats')"),
        (result(workloads=[{"ranks": 1}]), "is no whole result of nrank bench (KeyError: 'id')"),
        (result(workloads=[row(ttft_s={"min": 1})]), "is no whole result of nrank bench"),
        (result(workloads=[row(ttft_s=spread("x", 1, 1))]), "is no whole result of nrank bench"),  # type: ignore[arg-type]
        (
            result(workloads=[row(ttft_s=spread(1, float("nan"), 1))]),
            "is no whole result of nrank bench (ValueError: median of ttft_s of decode-1 is nan)",
        ),
        (
            result(workloads=[row(ttft_s=spread(1, 1, float("inf")))]),
            "(ValueError: max of ttft_s of decode-1 is inf)",
        ),
        (result(workloads=[row(ttft_s=spread(1, 10**400, 1))]), "nrank bench (Overflow"),
        (result(settings={"repeats": -1}), "(ValueError: -1 repeats)"),
        (result(settings={"repeats": 10**9}), "(ValueError: 1000000000 repeats)"),
        (result(workloads=3), "is no whole result of nrank bench"),
        (result(load_average="x"), "is no whole result of nrank bench"),
        (result(workloads=[row(id="other", ttft_s=spread(1, 1, 1))], gains={}), "no row in common"),
    ],
)  # fmt: skip
def test_files_that_can_not_be_compared_are_refused_in_one_line(
    compare: Compare, new: Any, expected: str
) -> None:
    code, out, err = compare(result(), new)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


def test_a_path_without_a_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "none", tmp_path / "fifo"):
        assert cli.main(["bench", "--compare", str(path), str(path)]) == 2
        err = capsys.readouterr().err
        assert f"{path} can't be read" in err
        assert err.count("\n") == 1


def test_a_file_is_replaced_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_result(str(path), "first")
    assert path.read_text() == "first\n"
    assert path.stat().st_mode & 0o777 == 0o644

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="can't be written: No space left on device"):
            write_result(str(path), "second")
    assert [one.name for one in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "first\n"


def test_a_fingerprint_is_of_all_that_is_asked() -> None:
    workload = Workload("w", ((1, 2), (3, 4)), 5)
    found = fingerprints([workload, Workload("w", ((9, 9),), 5), Workload("v", ((1, 2),), 5)])
    assert set(found) == {"w", "v"}
    assert found["w"] == fingerprints([workload])["w"]
    others = (
        Workload("w", ((1, 2), (3, 5)), 5),
        Workload("w", ((1, 2, 3), (4,)), 5),
        Workload("w", ((1, 2), (3, 4)), 6),
        Workload("w", ((1, 2), (3, 4)), 5, (7,)),
        Workload("w", ((1, 2), (3, 4)), 5, in_turn=True),
        StreamWorkload("w", (1, 2), (3, 4), 5, 6),
    )
    assert len({found["w"], *(fingerprints([one])["w"] for one in others)}) == 1 + len(others)
