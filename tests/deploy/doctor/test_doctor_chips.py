"""What sensors say of chips, from readings and from a program in npu-smi's place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor import sensors
from deploy.doctor.finding import Finding, Severity
from rank_worker.device_sensors.reading import CardReading, ChipReading, NodeReading

Errors = Callable[[list[Finding]], set[str]]
One = Callable[..., Finding]
GIB = 1 << 30
SAMPLES = Path(__file__).parents[2] / "rank_worker" / "sensors" / "npu_smi"
CHIP = ChipReading(
    npu_id=32768,
    chip_id=1,
    device_index=1,
    temperature_celsius=52.0,
    memory_used_bytes=int(1.6 * GIB),
    memory_total_bytes=43 * GIB,
    health="ok",
    error_codes=(),
    ecc_enabled=False,
    ecc_single_bit=0,
    ecc_double_bit=0,
    processes=(),
)
NAME = "card 32768 chip 1"
NUM_FILES = 4


class Scripted:
    """A source that always says the same."""

    def __init__(self, name: str, answer: NodeReading) -> None:
        self.name, self.answer = name, answer
        self.was_read = self.was_closed = False

    def read(self) -> NodeReading:
        self.was_read = True
        return self.answer

    def close(self) -> None:
        self.was_closed = True


def reading(*chips: ChipReading, error: str | None = None) -> NodeReading:
    """These chips, and healthy ones so that each device file of the stub has its chip."""
    others = range(len(chips), NUM_FILES) if chips else ()
    more = tuple(replace(CHIP, npu_id=place, device_index=place) for place in others)
    return NodeReading(0.0, 0.0, "npu-smi", (*chips, *more), (CardReading(32768),), error)


def test_a_healthy_chip_needs_nothing(stub: Any) -> None:
    findings = [f for f in stub.examine(reading=reading(CHIP)) if f.id.startswith("chips.")]
    assert {f.severity for f in findings} == {Severity.OK}
    names = {
        "chips.sensors",
        "chips.count",
        "chips.health",
        "chips.ecc",
        "chips.temperature",
        "chips.memory",
    }
    assert {f.id for f in findings} == names


@pytest.mark.parametrize(
    ("change", "name", "severity", "words"),
    [
        ({"health": "warning"}, "chips.health", Severity.WARNING, "warning"),
        ({"health": "alarm"}, "chips.health", Severity.ERROR, "alarm"),
        ({"health": "critical", "error_codes": ("80E01801",)}, "chips.health", Severity.ERROR,
         "80E01801"),
        ({"health": None}, "chips.health", Severity.ABSENT, "not told"),
        ({"ecc_enabled": True}, "chips.ecc", Severity.WARNING, "on, 0 corrected"),
        ({"ecc_single_bit": 3}, "chips.ecc", Severity.WARNING, "3 corrected"),
        ({"ecc_double_bit": 1}, "chips.ecc", Severity.ERROR, "1 uncorrected"),
        ({"ecc_enabled": None, "ecc_single_bit": None, "ecc_double_bit": None}, "chips.ecc",
         Severity.ABSENT, "not told"),
        ({"temperature_celsius": 85.0}, "chips.temperature", Severity.OK, "85"),
        ({"temperature_celsius": 86.0}, "chips.temperature", Severity.WARNING, "86"),
        ({"temperature_celsius": 94.0, "shutdown_celsius": 105.0}, "chips.temperature",
         Severity.ERROR, "limit is 105"),
        ({"temperature_celsius": None}, "chips.temperature", Severity.ABSENT, "not told"),
        ({"memory_used_bytes": 30 * GIB}, "chips.memory", Severity.WARNING, "nobody seen here"),
        ({"memory_used_bytes": None}, "chips.memory", Severity.ABSENT, "not told"),
    ],
)  # fmt: skip
def test_each_sign_has_its_severity(
    stub: Any, one: One, change: dict[str, Any], name: str, severity: Severity, words: str
) -> None:
    found = one(stub.examine(reading=reading(replace(CHIP, **change))), name, NAME)
    assert found.severity is severity
    assert words in found.found
    assert bool(found.remedy) is (severity is not Severity.OK)


@pytest.mark.parametrize(("num_chips", "words"), [(3, "fell off"), (5, "--device")])
def test_chips_and_device_files_that_differ_in_number_must_be_fixed(
    stub: Any, one: One, errors: Errors, num_chips: int, words: str
) -> None:
    chips = tuple(replace(CHIP, npu_id=at, device_index=at) for at in range(num_chips))
    findings = stub.examine(reading=replace(reading(CHIP), chips=chips))
    assert errors(findings) == {"chips.count"}
    found = one(findings, "chips.count")
    assert found.found == f"npu-smi tells of {num_chips} chips, /dev has {NUM_FILES}"
    assert words in found.remedy


def test_a_gpu_has_its_own_tool_and_loses_no_memory_to_ecc(stub: Any, one: One) -> None:
    chip = replace(CHIP, ecc_enabled=True, temperature_celsius=None)
    findings = stub.examine(reading=replace(reading(chip), source="nvml"))
    assert one(findings, "chips.ecc", NAME).severity is Severity.OK
    assert one(findings, "chips.temperature", NAME).remedy == "nvidia-smi -q -i 32768"


def test_who_holds_memory_is_named_and_left_alone(stub: Any, one: One, errors: Errors) -> None:
    stub.write("proc/4242/comm", "ray::RankWorker\n")
    chip = replace(CHIP, processes=((4242, 40 * GIB), (77, GIB)))
    findings = stub.examine(reading=reading(chip))
    found = one(findings, "chips.memory", NAME).found
    assert found == "pid 4242 (ray::RankWorker) 40.0 GiB, pid 77 (?) 1.0 GiB"
    assert not errors(findings)


def test_sensors_that_fail_are_told_with_their_words(stub: Any, one: One) -> None:
    findings = stub.examine(reading=reading(error="dcmi ... ret is -8020: end the container"))
    found = one(findings, "chips.sensors")
    assert found.severity is Severity.WARNING
    assert "-8020" in found.found


@pytest.fixture
def npu_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """npu_smi(sample): a program of that name prints that sample for `info`, and fails else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sensors, "run_directory", lambda: tmp_path)

    def put(sample: str) -> None:
        program = folder / "npu-smi"
        file = SAMPLES / f"{sample}.txt"
        assert file.is_file()
        program.write_text(f'#!/bin/sh\n[ "$*" = info ] && exec cat {file}\nexit 1\n')
        program.chmod(0o755)

    return put


def test_the_doctor_reads_npu_smi_by_itself(
    stub: Any, errors: Errors, npu_smi: Callable[[str], None]
) -> None:
    npu_smi("info_300iduo_two_cards_idle")
    findings = stub.examine(reading=sensors.read_sensors("npu"))
    assert not errors(findings)
    assert len({f.subject for f in findings if f.id == "chips.temperature"}) == 4
    npu_smi("info_300iduo_alarm_unknown")
    findings = stub.examine(reading=sensors.read_sensors("npu"))
    assert {name.partition(" ")[0] for name in errors(findings)} >= {"chips.health"}


def test_a_machine_without_a_tool_has_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "find_sources", lambda _: [])
    assert sensors.read_sensors("npu") is None


def test_a_source_that_fails_leaves_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(*sources: Scripted) -> NodeReading | None:
        monkeypatch.setattr(sensors, "find_sources", lambda _: list(sources))
        found = sensors.read_sensors("npu")
        assert not [source.name for source in sources if source.was_read and not source.was_closed]
        return found

    broken = Scripted("dcmi", reading(error="the library crashed"))
    works = Scripted("npu-smi", reading(CHIP))
    other = Scripted("nvml", reading(CHIP))
    assert use(broken, works, other) == works.answer
    failed = use(broken, Scripted("npu-smi", reading()), other)
    assert failed is not None
    assert failed.error == "the library crashed; also: npu-smi found no chip"
    assert use(other) is None
    assert not other.was_read
