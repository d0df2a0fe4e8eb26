"""Findings as a person reads them: the worst first, good ones in a line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deploy.doctor.finding import Finding, Severity, must_fix

ORDER = (Severity.ERROR, Severity.WARNING, Severity.ABSENT, Severity.OK)
MARKS = {
    Severity.ERROR: "FIX ",
    Severity.WARNING: "warn",
    Severity.ABSENT: "?   ",
    Severity.OK: "ok  ",
}


def as_text(device: str, findings: Iterable[Finding]) -> list[str]:
    found = list(findings)
    ordered = [f for severity in ORDER for f in found if f.severity is severity]
    width = max((len(_name(finding)) for finding in ordered), default=0)
    lines = [line for finding in ordered for line in _lines(finding, width)]
    return [*lines, _sum(device, found)]


def _name(finding: Finding) -> str:
    return f"{finding.id} {finding.subject}".strip()


def _lines(finding: Finding, width: int) -> list[str]:
    first = f"{MARKS[finding.severity]} {_name(finding):{width}}  {finding.found}"
    if finding.severity is Severity.OK:
        return [first]
    source = f" ({finding.source})" if finding.source else ""
    more = {"expected": f"{finding.expected}{source}" if finding.expected else ""}
    more["remedy"] = finding.remedy
    return [first, *(f"{'':{width + 7}}{key}: {text}" for key, text in more.items() if text)]


def _sum(device: str, found: Sequence[Finding]) -> str:
    counts = {severity: sum(f.severity is severity for f in found) for severity in ORDER}
    warnings, unknown = counts[Severity.WARNING], counts[Severity.ABSENT]
    rest = f"{warnings} warnings, {unknown} unknown, {counts[Severity.OK]} ok"
    if not must_fix(found):
        return f"{device}: nothing has to be fixed; {rest}"
    return f"{device}: {counts[Severity.ERROR]} to fix, {rest}"
