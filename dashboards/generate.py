"""Writes the boards and the alert rules: `python -m dashboards.generate`.

Owns where they lie. `grafana/*.json` and `prometheus/alerts.yml` are never edited by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from dashboards import evaluation, overview, ranks, speculation
from dashboards.alerts import rules

ROOT = Path(__file__).parent
BOARDS = (overview.BOARD, ranks.BOARD, speculation.BOARD, evaluation.BOARD)
HEAD = "# Made by `python -m dashboards.generate` from dashboards/alerts.py.\n"


def files() -> Mapping[Path, str]:
    """Path -> content of everything that is generated."""
    made = {
        ROOT / "grafana" / f"{board.uid}.json": json.dumps(board.to_json(), indent=1) + "\n"
        for board in BOARDS
    }
    text = yaml.safe_dump(rules(), sort_keys=False, width=1000, allow_unicode=True)
    made[ROOT / "prometheus" / "alerts.yml"] = HEAD + text
    return made


def main() -> None:
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT.parent))


if __name__ == "__main__":
    main()
