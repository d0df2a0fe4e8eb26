"""Devices, links, memory, disks, ports and variables of machines in a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.config import ServeConfig
from deploy.doctor.finding import Finding, Severity
from deploy.doctor.ports import PORTS
from deploy.doctor.storage import mount_of

Errors = Callable[[list[Finding]], set[str]]
One = Callable[..., Finding]
CARD = "sys/bus/pci/devices/0000:01:00.0"
LISTEN = "   0: 0100007F:{port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {inode} 1 0 100 0 0 10 0\n"
GIB = 1 << 30


def test_an_empty_machine_needs_exactly_what_it_lacks(stub: Any, errors: Errors) -> None:
    for name in ("usr", "etc", "sys", "proc"):
        stub.remove(name)
    for path in (stub.root / "dev").glob("*"):
        stub.remove(f"dev/{path.name}")
    for name in ("torch_npu", "torch"):
        stub.uninstall(name)
    stub.environ = {}
    expected = {"packages.version torch", "packages.version torch_npu", "driver.version"}
    assert errors(stub.examine()) == expected | {"cann.version", "devices.files"}
    assert errors(stub.examine("cpu")) == {"packages.version torch"}


@pytest.mark.parametrize("name", ["davinci_manager", "devmm_svm", "hisi_hdc"])
def test_a_shared_device_file_that_a_container_lacks_is_named(
    stub: Any, errors: Errors, one: One, name: str
) -> None:
    stub.remove(f"dev/{name}")
    findings = stub.examine()
    assert errors(findings) == {"devices.files"}
    assert f"/dev/{name}" in one(findings, "devices.files").found
    assert "--device" in one(findings, "devices.files").remedy


def test_a_machine_without_chips_is_told_whether_cards_are_there(stub: Any, one: One) -> None:
    for index in range(4):
        stub.remove(f"dev/davinci{index}")
    found = one(stub.examine(), "devices.files")
    assert "2 cards on PCI" in found.found
    assert "load the driver" in found.remedy
    stub.remove("sys/bus/pci")
    assert "--device cpu" in one(stub.examine(), "devices.files").remedy


def test_only_those_whom_the_files_admit_may_use_the_chips(
    stub: Any, errors: Errors, one: One
) -> None:
    for path in (stub.root / "dev").iterdir():
        if path.is_file():
            path.chmod(0o660)
    own = os.stat(stub.root / "dev/davinci0")
    stub.uid, stub.groups = own.st_uid + 1000, frozenset({own.st_gid + 1})
    stub.write("etc/group", f"HwHiAiUser:x:{own.st_gid}:\n")
    findings = stub.examine()
    assert errors(findings) == {"devices.permissions"}
    assert "usermod -aG HwHiAiUser" in one(findings, "devices.permissions").remedy
    stub.groups = frozenset({own.st_gid})
    assert not errors(stub.examine())
    (stub.root / "dev/davinci2").chmod(0o640)
    assert "davinci2" in one(stub.examine(), "devices.permissions").found


@pytest.mark.parametrize(
    ("listed", "severity"),
    [
        ("0,1,2,3", Severity.OK),
        ("4,6", Severity.OK),  # numbers of the host, in a container
        ("", Severity.ERROR),
        ("NoDevFiles", Severity.ERROR),
        ("0,1,2,3,4", Severity.ERROR),
        ("a", Severity.ERROR),
    ],
)
def test_a_list_of_visible_chips_is_held_to_those_there(
    stub: Any, one: One, listed: str, severity: Severity
) -> None:
    assert one(stub.examine(), "ray.chips").found == "Ray will find 4 NPU"
    stub.environ["ASCEND_RT_VISIBLE_DEVICES"] = listed
    assert one(stub.examine(), "ray.chips").severity is severity


@pytest.mark.parametrize(
    ("file", "text", "severity"),
    [
        ("current_link_width", "8", Severity.WARNING),
        ("current_link_speed", "8.0 GT/s PCIe", Severity.WARNING),
        ("current_link_width", "0", Severity.ABSENT),
        ("current_link_speed", "Unknown", Severity.ABSENT),
        ("vendor", "0x19e5", Severity.OK),
    ],
)
def test_a_link_that_is_slower_than_the_card_is_named(
    stub: Any, one: One, file: str, text: str, severity: Severity
) -> None:
    stub.write(f"{CARD}/{file}", f"{text}\n")
    assert one(stub.examine(), "pcie.link", "0000:01:00.0").severity is severity
    assert one(stub.examine(), "pcie.link", "0000:41:00.0").severity is Severity.OK


def test_other_functions_of_the_vendor_are_no_cards(stub: Any) -> None:
    stub.write(f"{CARD}/class", "0x020000\n")  # a network adapter
    links = [f.subject for f in stub.examine() if f.id == "pcie.link"]
    assert links == ["0000:41:00.0"]


@pytest.mark.parametrize(
    ("device", "available_gib", "severity"),
    [
        ("cpu", 100, Severity.OK),
        ("cpu", 30, Severity.ERROR),
        ("npu", 30, Severity.WARNING),
        ("npu", 2, Severity.ERROR),
    ],
)
def test_memory_is_held_to_the_checkpoint(
    stub: Any, one: One, tmp_path: Path, device: str, available_gib: int, severity: Severity
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(40 * GIB)
    stub.edit("proc/meminfo", "120000000", str(available_gib << 20))
    found = one(stub.examine(device, model=str(tmp_path)), "memory.host")
    assert found.severity is severity
    assert "checkpoint 40.0 GiB" in found.found


@pytest.mark.parametrize(
    ("limit", "usage"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_memory_is_what_the_container_has(stub: Any, one: One, limit: str, usage: str) -> None:
    stub.write(f"sys/fs/cgroup/{limit}", f"{8 * GIB}\n")
    stub.write(f"sys/fs/cgroup/{usage}", f"{2 * GIB}\n")
    assert one(stub.examine(), "memory.host").found.startswith("6.0 of 8.0 GiB free")
    stub.write(f"sys/fs/cgroup/{limit}", "max\n")
    assert " of 125.0 GiB" in one(stub.examine(), "memory.host").found


@pytest.mark.parametrize("kind", ["nfs4", "tmpfs", "9p"])
def test_a_slow_place_of_the_checkpoint_is_named(stub: Any, one: One, kind: str) -> None:
    assert one(stub.examine(), "disk.model").severity is Severity.OK
    stub.write("proc/self/mounts", f"/dev/sda1 / ext4 rw 0 0\nhost:/x /models {kind} rw 0 0\n")
    found = one(stub.examine(), "disk.model")
    assert found.severity is Severity.WARNING
    assert kind in found.found
    assert one(stub.examine(model="/modelset"), "disk.model").severity is Severity.OK


def test_a_rotating_disk_is_named(stub: Any, one: One) -> None:
    number = os.stat(stub.root).st_dev
    (stub.root / "models/a").mkdir(parents=True)
    node = f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    stub.write(f"{node}/queue/rotational", "1\n")
    assert "a rotating disk" in one(stub.examine(), "disk.model").found
    disk = (stub.root / node).rename(stub.root / "sys/vda")
    os.symlink(disk, stub.root / node)  # a virtual disk says so whatever it is
    assert one(stub.examine(), "disk.model").severity is Severity.OK


def test_the_innermost_mount_counts(stub: Any) -> None:
    stub.write("proc/self/mounts", "a / ext4\nb /data xfs\nc /data/my\\040models nfs\nshort\n")
    machine = stub.machine()
    kinds = [mount_of(machine, p)[1] for p in ("/x", "/data", "/data/my models/m", "/data2")]
    assert kinds == ["ext4", "xfs", "nfs", "ext4"]


def test_a_place_for_sessions_that_is_missing_has_to_be_fixed(stub: Any, errors: Errors) -> None:
    stub.environ["RAY_TMPDIR"] = "/no/where"
    assert errors(stub.examine()) == {"disk.temp"}


def test_who_holds_a_port_is_named(stub: Any, errors: Errors, one: One) -> None:
    text = (stub.root / "proc/net/tcp").read_text()
    stub.write("proc/net/tcp", text + LISTEN.format(port=8000, inode=77))
    stub.write("proc/net/tcp6", text + LISTEN.format(port=52365, inode=88))
    stub.write("proc/4242/comm", "uvicorn\n")
    (stub.root / "proc/4242/fd").mkdir()
    os.symlink("socket:[77]", stub.root / "proc/4242/fd/3")
    findings = stub.examine()
    assert one(findings, "ports.free", "8000").found == "held by uvicorn (pid 4242)"
    assert "another user" in one(findings, "ports.free", "52365").found
    assert one(findings, "ports.free", "6379").severity is Severity.OK
    assert not errors(findings)


def test_the_ports_are_those_that_a_start_takes() -> None:
    assert next(iter(PORTS)) == ServeConfig().port


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ASCEND_GLOBAL_LOG_LEVEL", "0"),
        ("ASCEND_GLOBAL_LOG_LEVEL", "loud"),
        ("ASCEND_SLOG_PRINT_TO_STDOUT", "1"),
        ("TASK_QUEUE_ENABLE", "2"),
        ("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "1"),
    ],
)
def test_variables_that_harm_are_named(stub: Any, name: str, value: str) -> None:
    def named() -> list[Finding]:
        return [f for f in stub.examine() if f.remedy.startswith(f"unset {name}")]

    assert not named()
    stub.environ[name] = value
    (found,) = named()
    assert found.severity is Severity.WARNING


def test_a_token_that_others_can_read_is_named(stub: Any, one: One) -> None:
    token = stub.write("root/.ray/auth_token", "secret-of-this-test")
    token.chmod(0o644)
    found = one(stub.examine(), "ray.token")
    assert found.severity is Severity.WARNING
    assert found.remedy == "chmod 600 /root/.ray/auth_token"
    assert "secret" not in found.found
    token.chmod(0o600)
    assert one(stub.examine(), "ray.token").severity is Severity.OK
    stub.environ["RAY_AUTH_MODE"] = "disabled"
    assert one(stub.examine(), "ray.token").severity is Severity.WARNING
