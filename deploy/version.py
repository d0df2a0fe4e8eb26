"""Which code runs: package versions and, in a checkout, the git revision. Standard library only."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

GIT_S = 5.0


def package_version(name: str) -> str:
    """The installed version of a distribution, or "" when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def git_revision() -> str:
    """The checkout's commit, or "" where this is no checkout or git is missing."""
    home = Path(__file__).resolve().parents[1]
    if not (home / ".git").exists():
        return ""
    command = ["git", "-C", str(home), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
