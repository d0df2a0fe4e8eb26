"""The kernels as other processors of this kind would have them built."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ops.cpu import library

REPLACED = """
import sys, pytest
from ops.cpu import library
kept = [flag for flag in library.FLAGS if not flag.startswith(sys.argv[1].split("=")[0] + "=")]
library.FLAGS = (*kept, sys.argv[1])
assert library.available(library.Capability("cpu")) is None
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "bits", sys.argv[2]]))
"""
TESTS = "tests/ops/test_cpu_variants.py"


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-mtune=znver3", "-mtune=intel", "-march=x86-64"])
def test_a_rows_bits_do_not_hang_on_the_processors_tuning(flag: str) -> None:
    """GCC leaves some additions unfused on AMD's processors; -march may not ask for what is not
    here, so the other way round is only shown for the least of all."""
    assert any(one.startswith("--param=avoid-fma-max-bits") for one in library.FLAGS)
    command = [sys.executable, "-c", REPLACED, flag, TESTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert " passed" in done.stdout
