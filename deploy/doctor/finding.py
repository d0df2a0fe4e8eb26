"""What `nrank doctor` tells of one thing that it looked at: the stable schema of `--json`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

SCHEMA = 1  # of the JSON object; fields are added, never renamed


class Severity(StrEnum):
    """`absent` is what could not be learnt: neither good nor bad."""

    ERROR = "error"  # must be fixed before the device can serve
    WARNING = "warning"
    ABSENT = "absent"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `id` names the check, `subject` what of several it looked at.

    `expected` is what a healthy machine has, `source` who says so, `remedy` what to do; a remedy
    comes with everything that is not ok.
    """

    id: str
    severity: Severity
    found: str
    expected: str = ""
    source: str = ""
    remedy: str = ""
    subject: str = ""


def must_fix(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def to_json(device: str, findings: Iterable[Finding]) -> dict[str, Any]:
    """What `--json` prints, in the order of the checks."""
    found = list(findings)
    return {
        "schema": SCHEMA,
        "device": device,
        "must_fix": len(must_fix(found)),
        "findings": [asdict(finding) for finding in found],
    }
