"""The README's table of what is verified where is the one of docs/support.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def support(root: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((root / "docs" / "support.json").read_text())
    return told


def table(support: dict[str, Any]) -> list[str]:
    columns = support["columns"]
    lines = ["| | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in support["rows"]:
        cells = " | ".join(row[column] for column in columns)
        lines.append(f"| {row['feature']} | {cells} |")
    return lines


def test_the_readme_shows_the_table(root: Path, support: dict[str, Any]) -> None:
    text = (root / "README.md").read_text()
    section = text.split("## What is verified where\n", 1)[1].split("\n## ", 1)[0]
    shown = [line for line in section.splitlines() if line.startswith("|")]
    assert shown == table(support)


def test_each_row_has_evidence_that_exists(root: Path, support: dict[str, Any]) -> None:
    for row in support["rows"]:
        assert row["evidence"], row["feature"]
        assert [path for path in row["evidence"] if not (root / path).is_file()] == []
        assert set(row) == {"feature", "evidence", *support["columns"]}


def test_nothing_is_said_to_have_run_on_a_310p(support: dict[str, Any]) -> None:
    assert {row["npu_chip"] for row in support["rows"]} == {"no"}
