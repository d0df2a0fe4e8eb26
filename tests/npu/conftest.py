"""Runs programs with the real torch_npu on pretend chips, each in a process of its own.

Collected only where torch_npu is installed, which is the environment of `make test-npu`. torch_npu
is never imported here. What runs is its host code and ours; no kernel does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
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


def start(program: str, libraries: Path, soc: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "programs" / program), *arguments]
    return subprocess.Popen(
        command, env=environment(libraries, soc), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON object on the last line that a program prints."""
    out, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors[-3000:]
    lines = out.splitlines()
    assert lines, errors[-3000:]
    assert lines[-1].startswith("{"), f"{lines[-1]}\n{errors[-3000:]}"
    told: dict[str, Any] = json.loads(lines[-1])
    return told


Engines = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def engines(libraries: Path) -> Engines:
    """What each rank of a run of programs/engine.py told; equal runs are made once."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(soc: str = "Ascend310P3", **options: Any) -> list[dict[str, Any]]:
        text = json.dumps(options, sort_keys=True)
        key = f"{soc} {text}"
        if key not in known:
            ranks = [start("engine.py", libraries, soc, "0", "0", text)]
            port = "0"
            if options.get("ranks", 1) > 1:
                assert ranks[0].stdout is not None
                for line in ranks[0].stdout:
                    if line.startswith("port "):
                        port = line.split()[1]
                        break
            others = range(1, options.get("ranks", 1))
            ranks += [start("engine.py", libraries, soc, str(r), port, text) for r in others]
            try:
                known[key] = [answer(rank) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
        return known[key]

    return run


@pytest.fixture(scope="session")
def program(libraries: Path) -> Callable[..., dict[str, Any]]:
    """What another program of programs/ told."""

    def run(name: str, *arguments: str, soc: str = "Ascend310P3") -> dict[str, Any]:
        return answer(start(name, libraries, soc, *arguments))

    return run
