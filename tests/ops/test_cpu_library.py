"""The kernel library: built once, shared by ranks, and missed without harm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ops.cpu import library
from ops.registry import OpSet
from ops.spec import Capability

TWO_BUILDERS = """
import os
from ops.cpu.library import library

children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if library() else 1)
    children.append(pid)
print(*(os.waitpid(pid, 0)[1] == 0 for pid in children))
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and no library loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library.cache_clear()
    yield tmp_path
    library.library.cache_clear()


def implementation(op: str) -> str:
    return next(i.implementation for i in OpSet(Capability("cpu")).op_info() if i.op == op)


def test_a_build_is_kept_and_found_again(fresh: Path) -> None:
    assert library.available(Capability("cpu")) is None
    built = list(fresh.glob("nrank/*.so"))
    assert len(built) == 1
    before = built[0].stat().st_mtime_ns
    library.library.cache_clear()
    assert implementation("moe_experts") == "ops.cpu.native.moe_experts"
    assert list(fresh.glob("nrank/*")) == built
    assert built[0].stat().st_mtime_ns == before


def test_without_a_compiler_torch_takes_over(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler" in (library.available(Capability("cpu")) or "")
    assert implementation("moe_experts") == "ops.cpu.torch_variants.moe_experts"
    assert implementation("apply_rope") == "ops.reference.rope.apply_rope"


def test_a_failing_compiler_is_told_and_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-no-such-flag"))
    reason = library.available(Capability("cpu")) or ""
    assert "failed" in reason
    assert "\n" not in reason
    assert not list(fresh.glob("nrank/*"))


def test_an_unwritable_cache_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "nrank").write_text("a file where the folder should be")
    assert "can't write" in (library.available(Capability("cpu")) or "")


def test_other_dtypes_do_not_build(fresh: Path) -> None:
    assert library.available(Capability("cpu", dtype=torch.bfloat16)) == "made for float32"
    assert not list(fresh.glob("nrank/*"))


@pytest.mark.slow
def test_processes_that_build_at_once_both_get_it(fresh: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_BUILDERS],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["True", "True"]
    assert len(list(fresh.glob("nrank/*"))) == 1
