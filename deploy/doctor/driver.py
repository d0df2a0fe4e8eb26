"""The NPU driver and the firmware of its cards, by the files that their packages leave."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.doctor.cann import BASE, find_cann
from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine
from deploy.doctor.version_text import groups, key_values, what_lacks, within

INSTALL_FILE = "/etc/ascend_install.info"
SERIES_CHARACTERS = 11  # of V100R001C23 in V100R001C23SPC001B101


def check_driver(machine: Machine) -> Iterator[Finding]:
    install = key_values(machine.read(INSTALL_FILE) or "")
    driver_file, firmware_file = version_files(install)
    driver_text = machine.read(driver_file)
    driver = key_values(driver_text or "")
    firmware_text = machine.read(firmware_file)
    firmware = key_values(firmware_text or "")
    yield _driver(driver, driver_text, driver_file)
    if install:
        yield _install(install)
    lack = what_lacks(firmware_text, firmware_file)
    yield _firmware(driver, firmware, lack, driver_file, firmware_file)
    if driver:
        yield from _driver_of_cann(machine, driver)


def version_files(install: dict[str, str]) -> tuple[str, str]:
    """Of driver and firmware."""
    places = (install.get(f"{part}_Install_Path_Param") or BASE for part in ("Driver", "Firmware"))
    driver, firmware = places
    return f"{driver}/driver/version.info", f"{firmware}/firmware/version.info"


def _driver(driver: dict[str, str], text: str | None, file: str) -> Finding:
    version = driver.get("Version", "")
    if version:
        return Finding("driver.version", Severity.OK, version, "", file)
    return Finding(
        id="driver.version",
        severity=Severity.ERROR,
        found=what_lacks(text, file),
        expected="the Ascend driver",
        source="the driver's package",
        remedy="install the driver of the card; in a container mount /usr/local/Ascend/driver",
    )


def _install(install: dict[str, str]) -> Finding:
    status = {
        part: install.get(f"{part}_Install_Status", "unknown") for part in ("Driver", "Firmware")
    }
    told = ", ".join(f"{part.lower()} {state}" for part, state in status.items())
    done = status["Driver"] == "complete"
    return Finding(
        id="driver.install",
        severity=Severity.OK if done else Severity.ERROR,
        found=told,
        expected="driver complete",
        source=INSTALL_FILE,
        remedy="" if done else "install the driver again and reboot; see /var/log/ascend_seclog",
    )


def _firmware(
    driver: dict[str, str],
    firmware: dict[str, str],
    lack: str,
    driver_file: str,
    firmware_file: str,
) -> Finding:
    version = firmware.get("Version", "")
    if not version:
        return Finding(
            id="firmware.version",
            severity=Severity.ABSENT,
            found=lack,
            expected="a firmware that the driver lists",
            source=driver_file,
            remedy="look on the host: containers seldom see this file",
        )
    wanted = driver.get("compatible_version_fw", "")
    if wanted and not within(version, groups(wanted)):
        return _mismatch(version, driver.get("Version", ""), f"firmware {wanted}", driver_file)
    accepted = firmware.get("compatible_version_drv", "")
    driver_version = driver.get("Version", "")
    if accepted and driver_version and not within(driver_version, groups(accepted)):
        return _mismatch(version, driver_version, f"driver {accepted}", firmware_file)
    known = Severity.OK if (wanted or accepted) and driver_version else Severity.ABSENT
    remedy = "" if known is Severity.OK else "compare both with the release notes of the driver"
    expected = f"firmware {wanted}" if wanted else ""
    return Finding("firmware.version", known, version, expected, driver_file, remedy)


def _mismatch(firmware: str, driver: str, expected: str, source: str) -> Finding:
    return Finding(
        id="firmware.version",
        severity=Severity.ERROR,
        found=f"firmware {firmware} with driver {driver or 'unknown'}",
        expected=expected,
        source=source,
        remedy="install driver and firmware of one release, firmware first, then reboot",
    )


def _driver_of_cann(machine: Machine, driver: dict[str, str]) -> Iterator[Finding]:
    """A warning only: the lists name releases by an inner number, and are not always complete."""
    cann = find_cann(machine)
    listed = groups(cann.info.get("compatible_version", "")) if cann is not None else []
    inner = driver.get("Innerversion", "")[:SERIES_CHARACTERS]
    if cann is None or not listed or not inner:
        return
    own = cann.info.get("innerversion", "")[:SERIES_CHARACTERS]
    fits = [inner] in listed or [own] in groups(driver.get("compatible_version", ""))
    yield Finding(
        id="driver.cann",
        severity=Severity.OK if fits else Severity.WARNING,
        found=f"driver {inner}, CANN {cann.version} ({own})",
        expected="a driver out of " + ", ".join(part[0] for part in listed),
        source=f"compatible_version in {cann.home}",
        remedy="" if fits else "update the driver to one that this CANN lists",
    )
