"""What `nrank plan` advises and refuses: remedies are true of its own flags, bad flags end it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main
from placement.errors import ConfigError
from placement.formats import parse_format
from placement.headers import CheckpointHeaders
from placement.models.quantised import with_format
from placement.ownership import OwnershipRequest, choose_ownership
from placement.spec import ModelSpec

Loaded = tuple[ModelSpec, CheckpointHeaders]
Run = Callable[..., tuple[int, str, str]]
CONFIGS = (
    "GLM-5.3-Flash", "Qwen3.6-35B-A3B-FP8", "Qwen3.8-Flash-Next", "Qwen3.8-Flash-Next-FP8",
)  # fmt: skip
QUICK = (
    ("Qwen3.6-35B-A3B-FP8", 4), ("Qwen3.8-Flash-Next", 4),
    ("Qwen3.8-Flash-Next-FP8", 6),
)  # fmt: skip
CELLS = [
    pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow)
    for cell in product(CONFIGS, (4, 6))
]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def flags_of(way: list[dict[str, str]]) -> list[str]:
    """The flags that the texts of a remedy name in parentheses."""
    found = [re.search(r"\((--[a-z-]+) ([^ ,)]+)", change["text"]) for change in way]
    assert all(found)
    return [part for match in found if match is not None for part in match.groups()]


@pytest.mark.parametrize(("name", "ranks"), CELLS)
def test_every_remedy_fits_when_its_flags_are_given(
    plan: Run, config_path: Callable[[str], str], name: str, ranks: int
) -> None:
    asked = ("--model-config", config_path(name), "--chip", "310p3", "--ranks", ranks, "--json")
    code, out, err = plan(*asked)
    told: dict[str, Any] = json.loads(out)
    assert (code == 0) is told["fits"] is (not told["remedies"])
    for way in told["remedies"]:
        assert all(change["text"] in err for change in way)
        again, out, err_of_way = plan(*asked, *flags_of(way))
        assert again == 0, err_of_way
        assert json.loads(out)["fits"] is True


def test_a_chip_of_another_device_is_refused(plan: Run) -> None:
    code, out, err = plan("--chip", "310p3", "--device", "cpu")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "--chip 310p3 is a chip of --device npu, but --device cpu was given" in err
    assert plan("--chip", "310p3", "--device", "npu")[0] == 0


@pytest.mark.parametrize("last", [9, 99])
def test_a_format_for_layers_that_do_not_exist_is_refused(tiny: Loaded, last: int) -> None:
    """Eight layers and one of the draft head, which is layer 8."""
    words = f"names layer {last}, but .* has 8 layers and 1 of drafts: end the range at 8 at most"
    with pytest.raises(ConfigError, match=words):
        with_format(tiny[0], parse_format(f"w2:0-{last}"))
    with_format(tiny[0], parse_format("w2:0-8"))
    with_format(tiny[0], parse_format("w2"))


def test_copies_of_the_current_ownership_are_told_to_be_dropped(
    plan: Run, tiny: Loaded, tmp_path: Path
) -> None:
    layer = [[0, 1, 2, 3], [0, 4, 5, 6, 7], [0, 8, 9, 10], [11, 12, 13]]
    path = tmp_path / "current.json"
    path.write_text(json.dumps({"experts": [layer], "replicas": [{"0": [0, 1, 2]}]}))
    code, out, _ = plan("--ranks", 4, "--current", path)
    assert code == 0
    assert "its 2 copies of experts not kept" in out
    layer[1] = [4, 5, 6, 7]
    layer[2] = [8, 9, 10]
    chosen = choose_ownership(OwnershipRequest(current=[layer]), tiny[0], 4)
    assert "copies" not in chosen.reason
