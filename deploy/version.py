"""Which code runs: package versions and, in a checkout, the git revision. Standard library only."""

from __future__ import annotations

import hashlib
import subprocess
from importlib import metadata
from pathlib import Path

GIT_S = 5.0
PACKAGES = ("placement", "ops", "rank_worker", "cluster", "deploy")


def package_version(name: str) -> str:
    """The installed version of a distribution, or "" when it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def git_revision() -> str:
    """The checkout's commit, or "" where this is no checkout or git is missing."""
    return _git("rev-parse", "--short=12", "HEAD").decode().strip()


def code_revision() -> str:
    """The commit, with a hash of what its packages differ by; without a checkout the version."""
    commit = git_revision()
    if not commit:
        return package_version("nrank")
    changes = _git("diff", "HEAD", "--", *PACKAGES)
    return f"{commit}+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit


def _git(*arguments: str) -> bytes:
    """What it prints; nothing where it can't."""
    home = Path(__file__).resolve().parents[1]
    if not (home / ".git").exists():
        return b""
    command = ["git", "-C", str(home), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout
