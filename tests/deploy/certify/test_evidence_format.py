"""Evidence files that are none, and ones that were changed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placement.errors import ConfigError
from placement.evidence import read_evidence
from tests.deploy.certify.scripted_gang import certify, scripted


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("evidence") / "e.json"
    certify(path, scripted())
    return dict(json.loads(path.read_text()))


def _cell(key: str, value: object, index: int = 0) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["cells"][index].__setitem__(key, value)


def _asked(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["asked"].__setitem__(key, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.pop("binding"),
        lambda found: found.pop("cells"),
        lambda found: found.update(version=2),
        lambda found: found.update(cells={}),
        lambda found: found.update(cells=[1]),
        lambda found: found["cells"].append(found["cells"][0]),
        lambda found: found["binding"].update(host="x"),
        lambda found: found["binding"].pop("revision"),
        _asked("lengths", []),
        _asked("lengths", [300, 150]),
        _asked("depths", []),
        _asked("depths", "0"),
        _asked("sequences", 0),
        _asked("sequences", True),
        _cell("stage", "soak"),
        _cell("length", 77),
        _cell("index", 9),
        _cell("passed", 1),
        _cell("seconds", "fast"),
        _cell("completed_tokens", 100),
        _cell("depth", 50),
        _cell("got", "else"),  # what the other passes had to equal
        _cell("got", "else", index=1),
    ],
)
def test_what_is_no_evidence_is_refused_in_one_line(
    good: dict[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    found = json.loads(json.dumps(good))
    change(found)
    path = tmp_path / "e.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"is no evidence file of this version: .+") as caught:
        read_evidence(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b"null", b"[" * 100_000])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "e.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is no evidence file"):
        read_evidence(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file or directory"):
        read_evidence(str(tmp_path / "none.json"))


def test_the_summary_is_not_trusted(good: dict[str, Any], tmp_path: Path) -> None:
    found = json.loads(json.dumps(good))
    found["cells"] = found["cells"][:5]
    path = tmp_path / "e.json"
    path.write_text(json.dumps(found))
    assert found["summary"]["certified_tokens"] > 0
    assert read_evidence(str(path)).certified_tokens == 0
