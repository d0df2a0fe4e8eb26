"""Prometheus' own programs for tests: those on PATH, else Debian's package, kept in `.venv`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".venv" / "prometheus"
REMEDY = "install prometheus 2.42 or later, with promtool (Debian's package has both), on PATH"
LIMIT_S = 240


def program(name: str) -> Path:
    """`prometheus` or `promtool`; AssertionError with the remedy where it can't be had."""
    found = shutil.which(name)
    if found:
        return Path(found)
    if not (KEPT / "usr/bin" / name).exists():
        _unpack_package()
    return KEPT / "usr/bin" / name


def _unpack_package() -> None:
    """Needs no root and installs nothing: the package is unpacked into a folder."""
    missing = [tool for tool in ("apt-get", "dpkg-deb") if not shutil.which(tool)]
    assert not missing, f"{', '.join(missing)} not found: {REMEDY}"
    KEPT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT.parent) as name:
        folder = Path(name)
        if _run(["apt-get", "download", "prometheus"], folder).returncode:
            _download_with_own_lists(folder)
        (package,) = folder.glob("prometheus_*.deb")
        unpacked = folder / "unpacked"
        told = _run(["dpkg-deb", "-x", str(package), str(unpacked)], folder)
        assert not told.returncode, f"dpkg-deb failed: {told.stderr.strip()}; {REMEDY}"
        if not KEPT.exists():
            os.rename(unpacked, KEPT)


def _download_with_own_lists(folder: Path) -> None:
    """Where the system has no lists of packages, which only root may renew."""
    lists, cache = folder / "lists", folder / "cache"
    for made in (lists / "partial", cache / "archives/partial"):
        made.mkdir(parents=True)
    options = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={cache}"]
    for command in (["update"], ["download", "prometheus"]):
        told = _run(["apt-get", *options, *command], folder)
        assert not told.returncode, f"apt-get {command[0]} failed: {told.stderr[-300:]}; {REMEDY}"


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
