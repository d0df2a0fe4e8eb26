"""Routing counts of a running server."""

from __future__ import annotations

from typing import Any

from deploy.server_json import fetch_json

PATH = "/status/experts"


def fetch_counts(base_url: str) -> tuple[str, Any]:
    """The address asked and its JSON answer. ConfigError, in one line, when there is none."""
    remedy = "--counts needs a file or the base URL of a running nrank server"
    return fetch_json(base_url, PATH, "routing counts", remedy)
