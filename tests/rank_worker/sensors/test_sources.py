"""Which sources a machine has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rank_worker.device_sensors import dcmi, node_lock, smi_program
from rank_worker.device_sensors.sources import find_sources, open_poller
from tests.rank_worker.sensors.conftest import FakeSmi, wait_for
from tests.rank_worker.sensors.test_nvml import FakeNvml


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any driver."""
    monkeypatch.setattr(dcmi, "LIBRARIES", ())
    monkeypatch.setattr(smi_program, "PLACES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(node_lock, "TEMPORARY", tmp_path)


@pytest.mark.usefixtures("bare")
def test_without_a_driver_the_reading_says_so() -> None:
    poller = open_poller()
    try:
        wait_for(lambda: poller.latest() is not None)
        reading = poller.latest()
        assert reading is not None
        assert (reading.source, reading.chips) == (None, ())
        assert reading.error is not None
        assert "install the driver" in reading.error
    finally:
        poller.close()


@pytest.mark.usefixtures("bare")
def test_the_library_is_better_than_the_program(
    smi: FakeSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    (smi.folder / "libdcmi.so").touch()
    smi.runs("true")
    monkeypatch.setattr(dcmi, "LIBRARIES", (str(smi.folder),))
    monkeypatch.setattr(smi_program, "PLACES", (str(smi.folder),))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert [s.name for s in find_sources(smi.folder)] == ["dcmi", "npu-smi", "nvml"]
    assert smi.calls() == []
