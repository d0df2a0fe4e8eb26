"""`nrank serve` as a process, and what is left of its Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "deploy.cli", "serve"]


class Front:
    """A running `nrank serve` and what it printed."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []

    def read_to(self, part: str) -> str:
        """The first line with `part`; all lines up to it are kept."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if part in line:
                return self.lines[-1]
        raise AssertionError(f"ended without {part!r}: {self.lines}")

    def finish(self) -> int:
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        return self.process.wait(60)


def session_processes(token: Path, names: tuple[bytes, ...]) -> list[str]:
    """Live processes of this test's own Ray whose title starts with one of `names`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()[:120]
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if title.startswith(names) and str(token).encode() in environment:
            found.append(f"{pid} {title!r}")
    return found


@contextmanager
def served(overrides: dict[str, Any]) -> Iterator[str]:
    """The base URL of a server of its own Ray."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text("8" * 64)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(overrides))  # JSON is YAML
        front = Front("--config", str(path), "--port", "0")
        try:
            yield front.read_to("ready: ").partition("ready: ")[2].removesuffix("/v1")
            front.process.terminate()
            assert front.finish() == 0, front.lines
        except BaseException:
            print("\n".join(front.lines))
            raise
        finally:
            if front.process.poll() is None:
                front.process.kill()
