"""A probe's report as a table: a line a layer, what each rank did, and what is flagged."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.probe.comparison import LayerRow, ProbeReport
from deploy.probe.findings import BOUNDS, FLOAT16_MAX

MOST_LINES = 20  # of findings; JSON has all
HEADER = (
    f"{'layer':>5}  {'mixer':16} {'rms':>9} {'absmax':>9} {'growth':>7} {'cosine':>9} "
    f"{'worst part':>18}  {'loudest expert':>14}  flags"
)


def report_lines(report: ProbeReport) -> Iterator[str]:
    yield (
        f"{report.model}, {report.ranks} ranks, {report.dtype}: {report.prompt_tokens} tokens of "
        f"prompt and {report.tokens - report.prompt_tokens} decode steps, plan {report.plan_id}"
    )
    yield HEADER
    for row in report.rows:
        yield _row(report, row)
    for rank in range(report.ranks):
        errors = [row.part_errors[rank] for row in report.rows]
        worst = max(range(len(errors)), key=lambda index: errors[index])
        flags = sum(finding.rank == rank for finding in report.findings)
        told = f"{flags} flagged" if flags else "as it should be"
        yield f"rank {rank}: worst part in layer {worst} (error {errors[worst]:.1e}), {told}"
    bounds = BOUNDS[report.dtype]
    if not report.findings:
        yield (
            f"nothing flagged: every part within {bounds.error:g} of the reference, the residual "
            "is the same on all ranks"
        )
        return
    count = len(report.findings)
    yield f"flagged: {count}, the first at {report.findings[0].line().partition(':')[0]}"
    for finding in report.findings[:MOST_LINES]:
        yield f"  {finding.line()}"
    if count > MOST_LINES:
        yield f"  and {count - MOST_LINES} more: see --json"


def _row(report: ProbeReport, row: LayerRow) -> str:
    rank = max(range(report.ranks), key=lambda r: row.part_errors[r])
    part = f"{row.part_errors[rank]:.1e} (rank {rank})"
    loudest = f"{row.expert_gain:.2f} (of {row.loudest_expert})"
    flags = [finding.kind for finding in report.findings if finding.layer == row.layer]
    absmax = f"{row.absmax:9.2f}" if row.absmax < FLOAT16_MAX else f"{row.absmax:9.1e}"
    return (
        f"{row.layer:5}  {row.kind:16} {row.rms:9.4f} {absmax} {row.growth:7.2f} {row.cosine:9.6f} "
        f"{part:>18}  {loudest:>14}  {' '.join(dict.fromkeys(flags))}"
    ).rstrip()
