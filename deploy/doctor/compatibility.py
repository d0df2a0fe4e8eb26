"""Which versions go together, as data with their source. Knows nothing of how they are found.

A pair that nobody has published is a warning and no refusal: new releases appear faster than this
table.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.doctor.finding import Severity
from deploy.doctor.version_text import series, version_key

TABLE = "version table of the Ascend/pytorch releases"


@dataclass(frozen=True)
class Release:
    """One release of TorchNPU: the torch_npu wheels in it, and the CANN that they are built for."""

    product: str
    torch_npu: tuple[str, ...]
    cann: str


RELEASES = (
    Release("7.0.0", ("2.5.1", "2.4.0.post4", "2.3.1.post6"), "8.1.RC1"),
    Release("7.1.0", ("2.6.0", "2.5.1.post1", "2.1.0.post13"), "8.2.RC1"),
    Release("7.2.0", ("2.8.0", "2.7.1", "2.6.0.post3", "2.1.0.post17"), "8.3.RC1"),
    Release("7.3.0", ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"), "8.5.0"),
    Release("26.0.0", ("2.10.0", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"), "9.0.0"),
    Release("26.1.0", ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"), "9.1.0"),
    Release(
        "26.1.1",
        ("2.12.0.post2", "2.11.0.post2", "2.10.0.post6", "2.9.0.post8", "2.7.1.post10"),
        "9.1.0",
    ),
)
# Ran, by public report, on four Ascend 310P3; the table has no row for it yet.
REPORTED = {"2.13.0": "9.1.0"}
REPORT = "public report of torch_npu 2.13.0rc1 with CANN 9.1.0 on Atlas 300I Duo cards"
# Installing one of these puts something in the way of torch on the device.
FORBIDDEN = {
    "npu": {
        "triton": "no Triton compiler has a 310P target; its leftovers break the start "
        "(vllm-ascend documentation of the 310P)",
        "triton-ascend": "replaces the package `triton` and has no 310P target",
    }
}


@dataclass(frozen=True)
class Verdict:
    """How well two versions go together; `expected` and `source` belong to a Finding."""

    severity: Severity
    expected: str
    source: str


def judge_cann(torch_npu: str, cann: str) -> Verdict:
    """Whether this torch_npu runs on this CANN. Patch releases of a CANN series count as equal."""
    row = next((release for release in RELEASES if torch_npu in release.torch_npu), None)
    if row is not None:
        fits = series(cann) == series(row.cann)
        source = f"{TABLE}, {row.product}"
        return Verdict(Severity.OK if fits else Severity.ERROR, f"CANN {row.cann}", source)
    newest = max(RELEASES, key=lambda release: version_key(release.cann)).cann
    if not _is_newer(torch_npu):
        return Verdict(Severity.WARNING, "a torch_npu out of the table", TABLE)
    if version_key(series(cann)) < version_key(series(newest)):
        source = f"{TABLE}: torch_npu before it needs CANN {newest}"
        return Verdict(Severity.ERROR, f"CANN {newest} or later", source)
    reported = REPORTED.get(torch_npu)
    if reported is not None and series(reported) == series(cann):
        return Verdict(Severity.OK, f"CANN {reported}", REPORT)
    return Verdict(Severity.WARNING, "a pair out of the table", f"{TABLE}: newer than its last row")


def _is_newer(torch_npu: str) -> bool:
    known = (version_key(series(name)) for release in RELEASES for name in release.torch_npu)
    return version_key(series(torch_npu)) > max(known)
