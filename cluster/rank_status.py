"""One rank as /status shows it, put together from what it and its placement told.

Owns no state and asks nobody.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.client import RankStatus
from placement.plan import RankPlan
from rank_worker.device_sensors.reading import ChipReading
from rank_worker.messages import LoadProgress, RankIdentity, RankSnapshot


def rank_status(
    identity: RankIdentity,
    progress: LoadProgress,
    snapshot: RankSnapshot | None,
    heartbeat_age_s: float | None,
    plan: RankPlan,
    chip: ChipReading | None,
) -> RankStatus:
    """Measured bytes are those of all ledger rows once it runs, those read before."""
    status = RankStatus(
        rank=progress.rank,
        phase=progress.phase,
        pid=identity.pid,
        node=identity.node,
        physical_chip=identity.physical_chip,
        heartbeat_age_s=heartbeat_age_s,
        usable_bytes=plan.usable_bytes,
        planned_bytes=sum(plan.rows.values()),
        measured_bytes=progress.read_bytes,
        weights_planned_bytes=progress.planned_bytes,
        weights_read_bytes=progress.read_bytes,
        load_seconds=progress.seconds,
        planned_rows=dict(plan.rows),
        chip=chip,
    )
    return status if snapshot is None else _running(status, snapshot)


def _running(status: RankStatus, snapshot: RankSnapshot) -> RankStatus:
    return replace(
        status,
        step=snapshot.step,
        measured_bytes=sum(snapshot.memory_bytes.values()),
        weights_planned_bytes=snapshot.weights_planned_bytes,
        weights_read_bytes=snapshot.weights_read_bytes,
        load_seconds=snapshot.load_seconds,
        measured_rows=dict(snapshot.memory_bytes),
        cpus=snapshot.cpus,
    )
