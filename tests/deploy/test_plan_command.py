"""`nrank plan` on the command line: what it answers, its files and flags, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main

REPO = Path(__file__).parents[2]
FLASH_NEXT = REPO / "tests" / "placement" / "configs" / "Qwen3.8-Flash-Next" / "config.json"
Run = Callable[..., tuple[int, str, str]]
BOX = (
    "--model-config", FLASH_NEXT, "--chip", "310p3", "--mtp", 2, "--sequences", 6,
    "--step-tokens", 2560, "--prefix-bytes", 87 * 29_048_848,  # as many states on four ranks
)  # fmt: skip
PEAK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "ray", "numpy", "transformers", "pydantic", "yaml"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from deploy.cli import main
code = main(sys.argv[1:])
status = open("/proc/self/status").read()  # ru_maxrss counts the parent's size before exec, too
print(status.split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main(["plan", *map(str, arguments)])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def answered(result: tuple[int, str, str], code: int = 0) -> dict[str, Any]:
    assert result[0] == code, result[2]
    return dict(json.loads(result[1]))


def test_a_chip_implies_its_device_and_dtype(plan: Run) -> None:
    told = answered(plan("--chip", "310p3", "--ranks", 2, "--json"))
    assert (told["device"], told["dtype"]) == ("npu", "float16")
    assert [rank["usable_bytes"] >> 20 for rank in told["ranks"]] == [44278, 43693]
    assert told["ranks"][0]["rows"]["graph"] > 0


def test_the_reference_profile_fits_with_its_table_on_the_host(plan: Run) -> None:
    told = answered(
        plan(*BOX, "--ranks", 4, "--format", "w4g128_asym", "--ngram-table", "host",
             "--what-if", 6, "--json")
    )  # fmt: skip
    assert told["fits"]
    assert told["formats"] == ["w4g128_asym"]
    assert told["host"] == {"ngram_table": "host", "table_bytes": 320001536 * 160 * 2}
    assert told["capacity"]["sequences_of_context"] in (4, 5)
    assert told["what_if"]["world_size"] == 6
    assert told["what_if"]["capacity"]["sequences_of_context"] in (6, 7)
    assert told["what_if"]["decode_step_s"] < told["estimate"]["decode_step_s"]
    assert told["estimate"]["busiest_rank_experts"] == pytest.approx(4.18, abs=0.01)


def test_a_plan_that_does_not_fit_says_what_would(plan: Run) -> None:
    arguments = (*BOX, "--ranks", 4, "--format", "w4g128_asym")
    code, out, err = plan(*arguments, "--json")
    told = answered((code, out, err), 3)
    short = told["shortfall"]
    assert f"rank {short['rank']} does not fit: {short['row']} needs {short['bytes']} bytes" in err
    assert err.count("\n") == 1
    first, second = told["remedies"]
    assert first[0]["kind"] == "ngram_table"
    for way in (first, second):
        for change in way:
            assert change["text"] in err
    again = answered(plan(*arguments, "--ngram-table", "host", "--json"))
    assert again["fits"]


def test_an_explanation_has_every_row_and_every_decision(plan: Run) -> None:
    code, out, _ = plan("--ranks", 3, "--mtp", 1, "--explain")
    assert code == 0
    reasons = out.split("the fullest:")[1]
    told = answered(plan("--ranks", 3, "--mtp", 1, "--json"))
    fullest = max(told["ranks"], key=lambda rank: rank["planned_bytes"])
    for row, nbytes in fullest["rows"].items():
        assert (f"  {row}: " in reasons) == (nbytes > 0), row
    for decision in ("experts: ", "pages: ", "context: ", "chips: ", "n-gram table: ",
                     "draft head: ", "kv_heads: "):  # fmt: skip
        assert f"  {decision}" in reasons


def test_text_for_people_answers_the_questions(plan: Run) -> None:
    code, out, _ = plan("--ranks", 2, "--context", 4096, "--sequences", 3, "--what-if", 4)
    assert code == 0
    assert "capacity: " in out
    assert "sequences of 4096 tokens, or 3 sequences of " in out
    assert "with 4 ranks: fits" in out


def test_ownership_goes_out_and_comes_back(plan: Run, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    hot = [[float((e + 1) ** 2) for e in range(14)] for _ in range(8)]
    counts.write_text(json.dumps({"stats": {"expert_counts": hot}}))
    balanced = answered(plan("--ranks", 4, "--counts", counts, "--json"))
    assert balanced["ownership"]["imbalance"] < 1.1
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(balanced))
    exact = answered(plan("--ranks", 4, "--ownership", file, "--json"))
    assert exact["plan_id"] == balanced["plan_id"]
    moved = answered(plan("--ranks", 5, "--current", file, "--counts", counts, "--json"))
    assert moved["ownership"]["moved_experts"] == len(moved["ownership"]["moves"]) > 0
    counts.write_text(json.dumps([[300.0, *[1.0] * 13]] * 8))
    copied = answered(plan("--ranks", 4, "--counts", counts, "--replicas-bytes", 1 << 20, "--json"))
    assert any(copied["replicas"])
    for layer, entries in enumerate(copied["replicas"]):
        for expert, ranks in entries.items():
            for rank in ranks:
                runs = copied["ranks"][rank]["experts"][layer]
                assert any(first <= int(expert) <= last for first, last in runs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ownership", "/no/where.json"], "can't read /no/where.json"),
        (["--counts", "/no/where.json"], "can't read /no/where.json"),
        (["--replicas-bytes", "5"], "without routing counts"),
        (["--ecc", "on"], "npu-smi"),
        (["--format", "w5"], "'w5' is unknown"),
        (["--format", "w2:9-12"], "layer 0"),
        (["--what-if", "15"], "14 experts"),
        (["--chip", "abacus"], "chip profile 'abacus'"),
        (["--prefix-bytes", "-1"], "-1"),
        (["--ngram-table", "disk"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(
    plan: Run, arguments: list[str], words: str
) -> None:
    code, out, err = plan(*arguments)
    assert code == 2, err
    assert words in err
    assert err.count("\n") == 1
    assert not out


def test_a_measured_total_stands_for_error_correction(plan: Run) -> None:
    told = answered(plan("--ecc", "on", "--usable-bytes", 40 << 30, "--json"))
    assert {rank["usable_bytes"] for rank in told["ranks"]} == {40 << 30}


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_the_real_size_needs_little_and_neither_torch_nor_ray() -> None:
    """512 experts in 48 layers on six ranks, with all answers, below 300 MiB."""
    arguments = [*map(str, BOX), "--ranks", "6", "--format", "w4g128", "--what-if", "4", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "plan", *arguments],
        cwd=REPO, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 6
    assert int(done.stderr.split()[-1]) < 300 * 1024
