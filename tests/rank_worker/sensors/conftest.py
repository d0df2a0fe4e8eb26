"""Recorded answers of npu-smi, and stand-ins for the program itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "npu_smi"


@pytest.fixture(scope="session")
def recorded() -> Callable[[str], str]:
    """The text of a recorded answer by its name."""
    return lambda name: (RECORDED / f"{name}.txt").read_text()
