"""A machine in a directory: two cards with a driver, CANN and packages that fit together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.doctor import checks
from deploy.doctor.checks import Question, run_checks
from deploy.doctor.finding import Finding, Severity
from deploy.doctor.imports import check_imports
from deploy.doctor.machine import Machine
from rank_worker.device_sensors.reading import NodeReading

DRIVER_FILE = "usr/local/Ascend/driver/version.info"
FIRMWARE_FILE = "usr/local/Ascend/firmware/version.info"
CANN_HOME = "usr/local/Ascend/cann-9.1.0"
DRIVER = """\
Version=25.5.1
ascendhal_version=7.35.23
Innerversion=V100R001C23SPC001B101
compatible_version=[V100R001C18],[V100R001C19],[V100R001C23]
compatible_version_fw=[7.0.0,7.8.99]
package_version=25.5.1
"""
FIRMWARE = """\
Version=7.8.0.6.201
firmware_version=1.0
package_version=25.5.1
compatible_version_drv=[23.0.rc1,23.0.rc1.],[25.0,25.0.],[25.5,25.5.]
"""
INSTALL = """\
UserName=HwHiAiUser
Driver_Install_Path_Param=/usr/local/Ascend
Driver_Install_Status=complete
Firmware_Install_Path_Param=/usr/local/Ascend
Firmware_Install_Status=complete
"""
TOOLKIT = """\
package_name=Ascend-cann-toolkit
version=9.1.0
innerversion=V100R001C25SPC001B231
compatible_version=[V100R001C18],[V100R001C23],[V100R001C25]
"""
VERSION_CFG = """\
# version: 1.0
runtime_running_version=[9.1.0.1.231:9.1.0]
compiler_running_version=[9.1.0.1.231:9.1.0]
hccl_running_version=[9.1.0.1.231:9.1.0]
opp_running_version=[9.1.0.1.231:9.1.0]
opp_kernel_running_version=[9.1.0.1.231:9.1.0]
opp_kernel_upgrade_version=[9.0.0.1.1:9.0.0]
"""
MEMINFO = "MemTotal:       131072000 kB\nMemFree: 1 kB\nMemAvailable:   {available} kB\n"
TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout\n"
NRANK = """\
Metadata-Version: 2.1
Name: nrank
Version: 0.1.0
Requires-Python: >=3.11
Requires-Dist: torch==2.13.0
Requires-Dist: ray[serve]<2.61,>=2.60
Requires-Dist: torch_npu==2.13.0; extra == "npu"
"""
PACKAGES = {
    "torch": "2.13.0",
    "torch_npu": "2.13.0",
    "ray": "2.60.0",
    "transformers": "5.24.0",
    "safetensors": "0.8.0",
}
CARDS = ("0000:01:00.0", "0000:41:00.0")
LINK = {
    "vendor": "0x19e5",
    "class": "0x120000",
    "current_link_width": "16",
    "max_link_width": "16",
    "current_link_speed": "16.0 GT/s PCIe",
    "max_link_speed": "16.0 GT/s PCIe",
}


@dataclass
class Stub:
    """The machine's root and its packages; tests change files, variables and who asks."""

    root: Path
    packages: Path
    environ: dict[str, str] = field(default_factory=dict)
    uid: int = 0
    groups: frozenset[int] = frozenset({0})

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def install(self, name: str, version: str, requires: str = "", code: str = "") -> None:
        """A distribution with its metadata and a module with this code."""
        for old in self.packages.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        info = self.packages / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text + (f"Requires-Dist: {requires}\n" if requires else ""))
        module = self.packages / name
        module.mkdir(exist_ok=True)
        (module / "__init__.py").write_text(code)

    def uninstall(self, name: str) -> None:
        for path in (*self.packages.glob(f"{name}-*.dist-info"), self.packages / name):
            shutil.rmtree(path)

    def machine(self) -> Machine:
        return Machine(self.root, dict(self.environ), (str(self.packages),), self.uid, self.groups)

    def examine(
        self, device: str = "npu", reading: NodeReading | None = None, model: str = "/models/a"
    ) -> list[Finding]:
        return list(run_checks(Question(self.machine(), device, model, lambda: reading)))


@pytest.fixture
def loading_stub(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """The same machine, whose packages are also imported, each in a process of its own."""
    monkeypatch.setattr(checks, "check_imports", check_imports)
    return stub


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A healthy machine for --device npu: nothing has to be fixed. No process is started."""
    monkeypatch.setattr(checks, "check_imports", lambda *_: ())
    made = Stub(tmp_path / "root", tmp_path / "site-packages")
    for name, version in PACKAGES.items():
        made.install(name, version)
    info = made.packages / "nrank-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(NRANK)
    files = {
        DRIVER_FILE: DRIVER,
        FIRMWARE_FILE: FIRMWARE,
        "etc/ascend_install.info": INSTALL,
        "etc/group": "root:x:0:\nHwHiAiUser:x:1000:\n",
        f"{CANN_HOME}/version.cfg": VERSION_CFG,
        f"{CANN_HOME}/x86_64-linux/ascend_toolkit_install.info": TOOLKIT,
        "proc/meminfo": MEMINFO.format(available=120_000_000),
        "proc/net/tcp": TCP,
        "proc/self/mounts": "/dev/nvme0n1p1 / ext4 rw 0 0\n",
        "tmp/.keep": "",
        "dev/shm/.keep": "",
        **{f"dev/davinci{index}": "" for index in range(4)},
        **{f"dev/{name}": "" for name in ("davinci_manager", "devmm_svm", "hisi_hdc")},
        **{
            f"sys/bus/pci/devices/{card}/{name}": f"{value}\n"
            for card in CARDS
            for name, value in LINK.items()
        },
    }
    for name, text in files.items():
        made.write(name, text)
    os.symlink("cann-9.1.0", made.root / "usr/local/Ascend/cann")
    made.environ = {
        "ASCEND_HOME_PATH": "/usr/local/Ascend/cann",
        "LD_LIBRARY_PATH": "/usr/local/Ascend/cann/lib64",
        "HOME": "/root",
        "PATH": os.environ["PATH"],
    }
    return made


@pytest.fixture
def errors() -> Callable[[list[Finding]], set[str]]:
    """Ids, with subject, of what must be fixed."""
    return lambda findings: {
        f"{finding.id} {finding.subject}".strip()
        for finding in findings
        if finding.severity is Severity.ERROR
    }


@pytest.fixture
def one() -> Callable[..., Finding]:
    """The only finding of an id (and subject)."""

    def pick(findings: list[Finding], name: str, subject: str = "") -> Finding:
        found = [f for f in findings if f.id == name and subject in ("", f.subject)]
        assert len(found) == 1, found
        return found[0]

    return pick
