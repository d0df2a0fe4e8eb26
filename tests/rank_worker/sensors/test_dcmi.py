"""Readings through a stand-in for libdcmi.so that hangs, crashes, lacks symbols or devices."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rank_worker.device_sensors import dcmi, dcmi_library
from rank_worker.device_sensors.dcmi import DcmiSource
from rank_worker.device_sensors.dcmi_library import DcmiLibrary
from rank_worker.device_sensors.dcmi_reader import RARE_S, DcmiReader
from rank_worker.device_sensors.reading import CardReading, ChipReading
from rank_worker.device_sensors.smi_parser import REMEDIES
from tests.rank_worker.sensors.conftest import is_gone, wait_for

MIB = 1 << 20
SOURCE = Path(__file__).with_name("fake_dcmi.c")
ROOT = Path(__file__).parents[3]
FIRST = ChipReading(
    npu_id=2,
    chip_id=0,
    device_index=0,
    bus_id="0000:03:00.0",
    temperature_celsius=70,
    memory_used_bytes=4278 * MIB,
    memory_total_bytes=44278 * MIB,
    core_utilisation_ratio=0.81,
    bandwidth_utilisation_ratio=0.64,
    health="ok",
    error_codes=(),
    ecc_enabled=True,
    ecc_single_bit=4,
    ecc_double_bit=0,
    shutdown_celsius=105,
    processes=((4815, 38912 * MIB),),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("dcmi")

    def build(flag: str = "-DNEW") -> Path:
        path = folder / flag / "libdcmi.so"
        if not path.exists():
            path.parent.mkdir()
            command = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", flag, str(SOURCE), "-o", path]
            subprocess.run(command, check=True)
        return path

    return build


@pytest.fixture
def library(built: Callable[..., Path], compiler: str) -> Path:
    return built()


@pytest.fixture
def mood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells the library how to behave; empty is well."""
    path = tmp_path / "mood"
    path.write_text("")
    monkeypatch.setenv("FAKE_DCMI", str(path))
    return path


@pytest.fixture
def opened(library: Path, mood: Path) -> Iterator[Callable[..., DcmiSource]]:
    sources: list[DcmiSource] = []

    def make(timeout_s: float = 30.0, path: Path = library) -> DcmiSource:
        sources.append(DcmiSource(path, timeout_s, 30.0))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


def test_structures_have_the_sizes_of_c(library: Path) -> None:
    sizes = (ctypes.c_int * 7).in_dll(ctypes.CDLL(str(library)), "fake_sizes")
    ours = ("ChipInfo", "PcieInfo", "MemoryInfo", "HbmInfo", "EccInfo", "ProcessInfo", "SensorInfo")
    assert [ctypes.sizeof(getattr(dcmi_library, name)) for name in ours] == list(sizes)


def test_all_fields_of_all_chips(opened: Callable[..., DcmiSource]) -> None:
    reading = opened().read()
    assert (reading.error, reading.source) == (None, "dcmi")
    assert reading.chips[0] == FIRST
    assert [chip.key for chip in reading.chips] == [(2, 0), (2, 1), (5, 0), (5, 1)]
    assert [chip.device_index for chip in reading.chips] == [0, 1, 2, 3]
    assert [chip.health for chip in reading.chips] == ["ok", "warning", None, None]
    assert [chip.temperature_celsius for chip in reading.chips] == [70, 71, 70, None]
    assert reading.chips[1].error_codes == ("80E01801",)
    assert reading.chips[1].memory_total_bytes == 43693 * MIB
    assert reading.cards == (CardReading(2, 118.4, "310P3"), CardReading(5, 118.4, "310P3"))


def test_one_child_serves_all_readings(opened: Callable[..., DcmiSource]) -> None:
    source = opened()
    times = [source.read().monotonic_s for _ in range(5)]
    assert times == sorted(set(times))
    assert len(children()) == 1


def children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    own = [int(pid) for pid in text.split()]
    return [p for p in own if b"dcmi_child" in Path(f"/proc/{p}/cmdline").read_bytes()]


def test_an_older_library_lacks_fields_only(
    opened: Callable[..., DcmiSource], built: Callable[..., Path]
) -> None:
    reading = opened(path=built("-DOLD")).read()
    assert reading.error is None
    chip = reading.chips[0]
    absent = {"ecc_enabled", "ecc_single_bit", "ecc_double_bit", "shutdown_celsius"}
    assert {name for name in chip.__slots__ if getattr(chip, name) is None} == absent
    assert len(reading.chips) == 4


@pytest.mark.parametrize(
    ("word", "told", "timeout_s"),
    [("hang", "did not answer within 1 s", 1.0), ("crash", "by signal 11", 30.0)],
)
def test_a_library_that_hangs_or_crashes_costs_its_child(
    word: str, told: str, timeout_s: float, opened: Callable[..., DcmiSource], mood: Path
) -> None:
    source = opened(timeout_s)
    assert source.read().error is None
    (first,) = children()
    mood.write_text(word)
    reading = source.read()
    assert reading.chips == ()
    assert reading.error is not None
    assert told in reading.error
    assert is_gone(first)
    assert children() == []
    mood.write_text("")
    assert source.read().chips[0] == FIRST


def test_a_driver_that_is_not_loaded_is_told_until_it_is(
    opened: Callable[..., DcmiSource], mood: Path
) -> None:
    mood.write_text("none")
    source = opened()
    reading = source.read()
    assert reading.error == f"dcmi_init returned -8005; {REMEDIES['-8005']}"
    mood.write_text("")
    assert source.read().error is None


def test_a_card_that_does_not_answer_is_absent_not_cold(
    opened: Callable[..., DcmiSource], mood: Path
) -> None:
    source = opened()
    source.read()
    mood.write_text("away")
    reading = source.read()
    assert [chip.temperature_celsius for chip in reading.chips] == [70, 71, None, None]
    assert [card.power_watts for card in reading.cards] == [118.4, None]
    mood.write_text("lost")
    lost = source.read()
    assert lost.chips == ()
    assert lost.error is not None
    assert "4 chips and none tells its temperature" in lost.error


def test_a_file_that_is_no_library(opened: Callable[..., DcmiSource], tmp_path: Path) -> None:
    wrong = tmp_path / "libdcmi.so"
    wrong.write_text("text")
    error = opened(path=wrong).read().error
    assert error is not None
    assert "can't load" in error
    assert "file too short" in error


def test_refused_calls_rest_and_rare_ones_are_rare(library: Path, mood: Path) -> None:
    """In this process: it is known not to hang or crash here."""
    now = [0.0]
    refused = mood.with_name("mood.unsupported")
    reader = DcmiReader(DcmiLibrary(str(library), lambda: now[0]), lambda: now[0])
    for _ in range(10):
        assert reader.read().error is None
        now[0] += 1
    assert refused.read_text().split() == ["hbm"] * 4  # once a chip
    mood.write_text("lost")
    assert reader.read().error is not None
    mood.write_text("")
    chip = reader.read().chips[0]
    assert chip == FIRST  # what is asked rarely was kept
    now[0] += RARE_S
    mood.write_text("away")
    away = reader.read().chips[2]
    assert (away.ecc_enabled, away.processes, away.device_index) == (None, None, None)
    now[0] += dcmi_library.RETRY_S
    mood.write_text("")
    reader.read()
    assert refused.read_text().split() == ["hbm"] * 8


def test_calls_before_init_are_refused(library: Path, mood: Path) -> None:
    fresh = mood.with_name("libdcmi.so")
    fresh.write_bytes(library.read_bytes())  # a library that this process did not initialise yet
    out = ctypes.c_int()
    call = DcmiLibrary(str(fresh)).call
    assert call("dcmi_get_device_temperature", 2, 0, ctypes.byref(out)) == -8005


def test_the_child_ends_with_a_parent_that_is_killed(library: Path, mood: Path) -> None:
    """Though it hangs in the library, where it never reads that its stdin has ended."""
    code = (
        "import sys; from pathlib import Path; from rank_worker.device_sensors.dcmi import *; "
        "s = DcmiSource(Path(sys.argv[1]), 1000.0, 30.0); s.read(); "
        "print(s._child.pid, flush=True); Path(sys.argv[2]).write_text('hang'); s.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, library, mood], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_for(lambda: mood.read_text() == "hang")
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_for(lambda: is_gone(child))


def test_where_the_library_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcmi, "LIBRARIES", (str(tmp_path / "a"), str(tmp_path)))
    assert dcmi.find_library() is None
    (tmp_path / "libdcmi.so").touch()
    assert dcmi.find_library() == tmp_path / "libdcmi.so"
