"""Runs programs with the real torch_npu on pretend chips, each in a process of its own.

Collected only where torch_npu is installed, which is the environment of `make test-npu`. torch_npu
is never imported here. What runs is its host code and ours; no kernel does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 240.0

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch would load torch_npu itself
if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The stand-in libraries, built once for these sources and this torch_npu."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    key = hashlib.sha256(spec.origin.encode())
    for source in sorted((HERE / "standin").iterdir()):
        if source.is_file():
            key.update(source.read_bytes())
    folder = Path(sys.prefix) / "standin" / key.hexdigest()[:16]
    if not (folder / "done").exists():
        builder = HERE / "standin" / "build.py"
        subprocess.run([sys.executable, str(builder), str(folder)], check=True, timeout=LIMIT_S)
        (folder / "done").touch()
    return folder


def environment(libraries: Path, soc: str) -> dict[str, str]:
    """TASK_QUEUE_ENABLE=0: launches happen, and are logged, in the order of the calls."""
    wanted = {
        "LD_LIBRARY_PATH": str(libraries), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TASK_QUEUE_ENABLE": "0", "STANDIN_SOC": soc, "STANDIN_DEVICES": "4",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return {**os.environ, **wanted}


class Run:
    """One program; what it tells is in a file, as its output is a pipe of limited room."""

    def __init__(
        self, program: str, libraries: Path, soc: str, folder: Path, *arguments: str
    ) -> None:
        self._told = folder / f"{secrets.token_hex(4)}.json"
        command = [sys.executable, str(HERE / "programs" / program), *arguments, str(self._told)]
        self.process = subprocess.Popen(
            command, env=environment(libraries, soc), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def port(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().removeprefix("port ").strip()

    def answer(self) -> dict[str, Any]:
        _, errors = self.process.communicate(timeout=LIMIT_S)
        assert self._told.exists(), errors[-3000:]
        told: dict[str, Any] = json.loads(self._told.read_text())
        return told


Engines = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def engines(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """What each rank of a run of programs/engine.py told; equal runs are made once."""
    known: dict[str, list[dict[str, Any]]] = {}
    folder = tmp_path_factory.mktemp("told")

    def run(soc: str = "Ascend310P3", **options: Any) -> list[dict[str, Any]]:
        text = json.dumps(options, sort_keys=True)
        key = f"{soc} {text}"
        if key not in known:
            world_size = options.get("ranks", 1)
            ranks = [Run("engine.py", libraries, soc, folder, "0", "0", text)]
            try:
                port = ranks[0].port() if world_size > 1 else "0"
                ranks += [
                    Run("engine.py", libraries, soc, folder, str(rank), port, text)
                    for rank in range(1, world_size)
                ]
                known[key] = [rank.answer() for rank in ranks]
            finally:
                for rank in ranks:
                    rank.process.kill()
        return known[key]

    return run


@pytest.fixture(scope="session")
def program(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What another program of programs/ told."""
    folder = tmp_path_factory.mktemp("programs")

    def run(name: str, *arguments: str, soc: str = "Ascend310P3") -> dict[str, Any]:
        return Run(name, libraries, soc, folder, *arguments).answer()

    return run
