"""Versions that fit and versions that don't, told apart by the files that packages leave."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor import imports
from deploy.doctor.compatibility import RELEASES, judge_cann
from deploy.doctor.finding import Finding, Severity
from deploy.doctor.packages import check_python
from deploy.doctor.version_text import groups, version_key, within

Errors = Callable[[list[Finding]], set[str]]
One = Callable[..., Finding]
DRIVER = "usr/local/Ascend/driver/version.info"
FIRMWARE = "usr/local/Ascend/firmware/version.info"
CANN = "usr/local/Ascend/cann-9.1.0"


def test_a_machine_whose_parts_fit_has_nothing_to_fix(loading_stub: Any, errors: Errors) -> None:
    findings = loading_stub.examine()
    assert not errors(findings)
    others = {f.id for f in findings if f.severity is not Severity.OK}
    assert others == {"chips.sensors"}  # there is none in a loading_stub


def test_every_finding_that_is_not_ok_says_what_to_do(stub: Any) -> None:
    stub.root.rename(stub.root.with_name("elsewhere"))
    findings = stub.examine()
    assert not [f for f in findings if f.severity is not Severity.OK and not f.remedy]
    assert not [f for f in findings if "\n" in f"{f.found}{f.expected}{f.source}{f.remedy}"]


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (DRIVER, "[7.0.0,7.8.99]", "[6.0.0,6.9.99]", {"firmware.version"}),
        (FIRMWARE, "Version=7.8.0.6.201", "Version=7.9.0.1.2", {"firmware.version"}),
        (FIRMWARE, ",[25.5,25.5.]", "", {"firmware.version"}),
        (FIRMWARE, "Version=7.8.0.6.201", "Version=7.8.1.0.5", set()),
        (DRIVER, "Version=25.5.1", "Version=25.5.2", set()),
        (DRIVER, "Version=25.5.1", "Version=26.0.rc1", {"firmware.version"}),
        ("etc/ascend_install.info", "Driver_Install_Status=complete",
         "Driver_Install_Status=failed", {"driver.install"}),
        (f"{CANN}/version.cfg", "opp_kernel_running_version=[9.1.0.1.231:9.1.0]\n", "",
         {"cann.kernels"}),
        (f"{CANN}/version.cfg", "opp_kernel_running_version=[9.1.0.1.231:9.1.0]",
         "opp_kernel_running_version=[9.0.0.1.1:9.0.0]", {"cann.kernels"}),
        (f"{CANN}/version.cfg", "hccl_running_version=[9.1.0.1.231:9.1.0]",
         "hccl_running_version=[8.5.0.1.1:8.5.0]", {"cann.kernels"}),
        (f"{CANN}/version.cfg", "9.1.0", "8.5.0", {"cann.version"}),
    ],
)  # fmt: skip
def test_files_that_fit_and_files_that_conflict(
    stub: Any, errors: Errors, file: str, old: str, new: str, expected: set[str]
) -> None:
    stub.edit(file, old, new)
    assert errors(stub.examine()) == expected


def test_a_driver_that_cann_does_not_list_is_a_warning(stub: Any, one: One) -> None:
    assert one(stub.examine(), "driver.cann").severity is Severity.OK
    stub.edit(DRIVER, "V100R001C23", "V100R001C11")
    found = one(stub.examine(), "driver.cann")
    assert found.severity is Severity.WARNING
    assert "V100R001C11" in found.found


@pytest.mark.parametrize(
    ("torch_npu", "cann", "severity"),
    [
        ("2.10.0.post4", "9.1.0", Severity.OK),
        ("2.10.0.post4", "9.1.1", Severity.OK),
        ("2.10.0.post4", "9.0.0", Severity.ERROR),
        ("2.6.0", "8.2.RC1", Severity.OK),
        ("2.6.0", "9.1.0", Severity.ERROR),
        ("2.13.0", "9.1.0", Severity.OK),
        ("2.13.0", "9.2.0", Severity.WARNING),
        ("2.13.0", "8.5.0", Severity.ERROR),
        ("2.14.0", "9.1.0", Severity.WARNING),
        ("2.3.0", "8.0.RC1", Severity.WARNING),
    ],
)
def test_a_pair_out_of_the_table_is_no_conflict_unless_it_is_too_old(
    torch_npu: str, cann: str, severity: Severity
) -> None:
    assert judge_cann(torch_npu, cann).severity is severity


def test_a_wheel_stands_in_one_row_of_the_table() -> None:
    wheels = [wheel for release in RELEASES for wheel in release.torch_npu]
    assert len(wheels) == len(set(wheels))


def test_torch_npu_needs_the_torch_that_it_was_built_for(
    stub: Any, errors: Errors, one: One
) -> None:
    stub.install("torch_npu", "2.10.0.post4", "torch==2.10.0.*")
    assert errors(stub.examine()) == {"torch_npu.torch"}
    stub.install("torch", "2.10.0+cpu")
    findings = stub.examine()
    assert not errors(findings)
    # nrank's own pin is another: told, and no obstacle to the pair that fits this CANN
    assert one(findings, "packages.version", "torch").severity is Severity.WARNING
    stub.install("torch_npu", "2.10.0.post4")  # metadata that name no torch
    assert not errors(stub.examine())
    stub.install("torch", "2.9.1")
    assert one(stub.examine(), "torch_npu.torch").expected == "torch==2.10.*"


def test_a_package_of_another_version_than_ours_has_to_be_fixed(
    stub: Any, errors: Errors, one: One
) -> None:
    stub.install("ray", "2.55.0")
    stub.uninstall("safetensors")
    findings = stub.examine()
    assert errors(findings) == {"packages.version ray", "packages.version safetensors"}
    assert one(findings, "packages.version", "ray").expected == "ray<2.61,>=2.60"


def test_what_the_loader_said_is_kept(loading_stub: Any, errors: Errors, one: One) -> None:
    told = "libatb.so: cannot open shared object file: No such file or directory"
    loading_stub.install("torch_npu", "2.13.0", code=f"raise OSError({told!r})")
    findings = loading_stub.examine()
    assert errors(findings) == {"packages.import torch_npu"}
    assert told in one(findings, "packages.import", "torch_npu").found
    loading_stub.install("torch_npu", "2.13.0", code="import os; os.kill(os.getpid(), 11)")
    assert "SIGSEGV" in one(loading_stub.examine(), "packages.import", "torch_npu").found


def test_an_import_that_hangs_is_ended_and_no_error(
    loading_stub: Any, errors: Errors, one: One, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "pid"
    os.mkfifo(tmp_path / "never")
    code = f"import os; open({str(started)!r}, 'w').write(str(os.getpid())); "
    loading_stub.install("torch_npu", "2.13.0", code=code + f"open({str(tmp_path / 'never')!r})")
    monkeypatch.setattr(imports, "MODULES", {"npu": ("torch_npu",)})
    communicate = subprocess.Popen.communicate

    def limited(process: Any, *_: Any, timeout: float | None = None) -> Any:
        """The limit counts from the moment that the import hangs, however busy the machine is."""
        while timeout is not None and not (started.exists() and started.read_text()):
            assert process.poll() is None
        return communicate(process, timeout=timeout and 0.01)

    monkeypatch.setattr(subprocess.Popen, "communicate", limited)
    findings = loading_stub.examine()
    assert not errors(findings)
    assert "did not end" in one(findings, "packages.import", "torch_npu").found
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_torch_npu_without_cann_is_named_as_what_breaks_torch(loading_stub: Any, one: One) -> None:
    loading_stub.install("torch", "2.13.0", code="raise RuntimeError('Failed to load: torch_npu')")
    found = one(loading_stub.examine("cpu"), "packages.import", "torch")
    assert found.severity is Severity.ERROR
    assert "torch_npu" in found.remedy


def test_a_forbidden_package_is_named_with_its_place(stub: Any, errors: Errors, one: One) -> None:
    stub.install("triton", "3.2.0")
    findings = stub.examine()
    assert errors(findings) == {"packages.forbidden triton"}
    assert one(findings, "packages.forbidden").found == f"{stub.packages}/triton"
    for path in stub.packages.glob("triton-*.dist-info/METADATA"):
        path.unlink()  # a leftover that pip no longer knows
    assert errors(stub.examine()) == {"packages.forbidden triton"}
    assert not errors(stub.examine("cpu"))


def test_a_forbidden_package_is_found_under_another_folder(stub: Any, errors: Errors) -> None:
    info = stub.packages / "triton_ascend-3.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton-ascend\nVersion: 3.2.0\n")
    assert errors(stub.examine()) == {"packages.forbidden triton-ascend"}


@pytest.mark.parametrize(
    ("version", "severity"),
    [("3.10.9", Severity.ERROR), ("3.11.0", Severity.OK), ("3.15.1", Severity.WARNING)],
)
def test_python_is_held_to_what_nrank_and_the_wheels_need(
    stub: Any, version: str, severity: Severity
) -> None:
    (found,) = check_python(stub.machine(), version)
    assert found.severity is severity


def test_cann_is_found_where_the_environment_says(stub: Any, errors: Errors, one: One) -> None:
    os.rename(stub.root / CANN, stub.root / "opt")
    assert errors(stub.examine()) == {"cann.version"}
    stub.environ["ASCEND_HOME_PATH"] = "/opt"
    stub.environ["LD_LIBRARY_PATH"] = "/opt/lib64"
    findings = stub.examine()
    assert not errors(findings)
    assert "9.1.0 in /opt" in one(findings, "cann.version").found


def test_a_shell_without_set_env_is_told_so(stub: Any, errors: Errors, one: One) -> None:
    del stub.environ["ASCEND_HOME_PATH"]
    findings = stub.examine()
    assert errors(findings) == {"cann.environment"}
    assert "set_env.sh" in one(findings, "cann.environment").remedy
    stub.environ["ASCEND_HOME_PATH"] = "/no/where"
    assert errors(stub.examine()) == {"cann.environment"}


def test_operator_packages_are_held_to_the_chip(stub: Any, errors: Errors, one: One) -> None:
    vendor = f"{CANN}/opp/vendors/customize"
    stub.write(f"{vendor}/op_impl/ai_core/tbe/config/ascend310p/aic-ops-info.json", "{}")
    stub.write(f"{vendor}/version.info", "Version=1.2\n")
    found = one(stub.examine(), "operators.custom", "customize")
    assert found.severity is Severity.OK
    assert "version 1.2" in found.found
    config = stub.root / vendor / "op_impl/ai_core/tbe/config"
    (config / "ascend310p").rename(config / "ascend910b")
    assert one(stub.examine(), "operators.custom").severity is Severity.WARNING
    stub.environ["ASCEND_CUSTOM_OPP_PATH"] = "/opt/ops"
    assert errors(stub.examine()) == {"operators.custom ops"}


def test_ranges_and_orders_of_versions() -> None:
    names = ["23.0.rc1", "23.0.rc2", "23.0.1", "25.0", "25.0.1", "25.5"]
    assert sorted(names, key=version_key) == names
    assert groups("[a,b],[c]") == [["a", "b"], ["c"]]
    ranges = groups("[23.0.rc1,23.0.rc1.],[25.0,25.0.]")
    inside = [name for name in names if within(name, ranges)]
    assert inside == ["23.0.rc1", "25.0", "25.0.1"]


LONG = "".join(f"{name}{'9' * 5000}{end}\n" for name, end in (
    ("Version: 2.", ""), ("Version=", ""), ("Version=1.", ""), ("compatible_version_fw=[1,", "]"),
    ("compatible_version_drv=[", ",3]"), ("runtime_running_version=[1:", ".1]"), ("version=", ".1"),
    ("MemTotal: ", " kB"), ("MemAvailable: ", " kB"),
))  # fmt: skip


@pytest.mark.parametrize("text", ["", "\0\xff", "Version", "Version: a b", "Version=\n=\n[", LONG])
def test_broken_version_files_never_stop_the_doctor(stub: Any, text: str) -> None:
    for name in (DRIVER, FIRMWARE, "etc/ascend_install.info", f"{CANN}/version.cfg",
                 f"{CANN}/x86_64-linux/ascend_toolkit_install.info", "proc/meminfo",
                 "proc/net/tcp", "proc/self/mounts", "etc/group",
                 "sys/fs/cgroup/memory.max"):  # fmt: skip
        stub.write(name, text)
    for name in ("torch", "torch_npu", "ray"):
        (metadata,) = stub.packages.glob(f"{name}-*.dist-info/METADATA")
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\n{text}", encoding="utf-8")
    assert {f.id for f in stub.examine()} >= {"driver.version", "cann.version", "memory.host"}


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file_is_called_empty_and_a_missing_one_missing(
    stub: Any, one: One, text: str
) -> None:
    for file, name in ((DRIVER, "driver.version"), (FIRMWARE, "firmware.version")):
        stub.write(file, text)
        assert one(stub.examine(), name).found == f"/{file} is empty"
        stub.write(file, "Vers")
        assert one(stub.examine(), name).found == f"no version in /{file}"
        stub.remove(file)
        assert one(stub.examine(), name).found == f"no /{file}"


def test_a_fifo_in_place_of_a_file_is_no_file(stub: Any, errors: Errors) -> None:
    stub.remove(DRIVER)
    os.mkfifo(stub.root / DRIVER)
    assert errors(stub.examine()) == {"driver.version"}
