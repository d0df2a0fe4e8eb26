"""The PCIe links of the cards, as the kernel tells them: ranks exchange everything over these."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploy.doctor.device_files import PCI, cards
from deploy.doctor.finding import Finding, Severity
from deploy.doctor.machine import Machine


def check_pcie(machine: Machine, device: str) -> Iterator[Finding]:
    for address in cards(machine, device):
        yield _link(machine, address)


def _link(machine: Machine, address: str) -> Finding:
    width, speed, most_wide, most_fast = (
        _number(machine.read(f"{PCI}/{address}/{name}"))
        for name in (
            "current_link_width", "current_link_speed", "max_link_width", "max_link_speed",
        )
    )  # fmt: skip
    if width is None or speed is None:
        return Finding(
            "pcie.link", Severity.ABSENT, "the kernel does not tell", "", PCI,
            f"sudo lspci -vv -s {address}", address,
        )  # fmt: skip
    slow = width < (most_wide or width) or speed < (most_fast or speed)
    return Finding(
        id="pcie.link",
        subject=address,
        severity=Severity.WARNING if slow else Severity.OK,
        found=f"x{width:g} at {speed:g} GT/s",
        expected=f"x{most_wide or width:g} at {most_fast or speed:g} GT/s",
        source="the card's own maximum, by the kernel",
        remedy="look under load (an idle link may rest); then another slot, riser or BIOS setting"
        if slow
        else "",
    )


def _number(text: str | None) -> float | None:
    """`16.0 GT/s PCIe` -> 16; 0 and 255 lanes are what a link tells that is down."""
    found = re.match(r"\s*(\d+(\.\d+)?)", text or "")
    number = float(found[1]) if found else 0.0
    return number if 0 < number < 255 else None
