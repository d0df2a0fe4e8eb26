"""What a report holds, part by part; a part that can't be had says why and stops no other.

Owns what is collected. Takes no secrets out: `deploy/redaction.py` does, of everything.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deploy.config import ServeConfig
from deploy.doctor.finding import to_json
from deploy.doctor_command import examine
from deploy.rank_logs import find_rank_logs
from deploy.server_json import fetch_json
from deploy.version import git_revision, package_version
from placement.errors import NrankError

STATUS = "/status"
# Variables that change how nrank, Ray, torch or the device's runtime behave.
VARIABLES = re.compile(
    r"(NRANK|RAY|ASCEND|HCCL|NCCL|CUDA|TORCH|PYTORCH|TASK_QUEUE|OMP|MKL|HF|TRANSFORMERS)_\w+"
    r"|LD_LIBRARY_PATH|PATH|PYTHONPATH|VIRTUAL_ENV"
)


@dataclass
class Parts:
    """File name in the archive -> content; what is missing and why."""

    files: dict[str, Any] = field(default_factory=dict)  # str, or what goes out as JSON
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Any]) -> None:
        try:
            self.files[name] = make()
        except (NrankError, OSError) as error:
            self.missing[name] = " ".join(str(error).split())


def collect(given: ServeConfig, url: str) -> Parts:
    """Everything, of the server that answers at `url`; without one, of the configuration given."""
    parts = Parts()
    parts.add("status.json", lambda: fetch_status(url))
    status = parts.files.get("status.json", {})
    config = served_config(status) or given
    parts.add("versions.json", versions)
    parts.add("environment.json", lambda: environment(os.environ))
    parts.add("config.json", lambda: resolved(config, status))
    parts.add("plan.json", lambda: plan(config, status))
    parts.add("doctor.json", lambda: doctor(config))
    logs = list(find_rank_logs(frozenset(pids_of(status))))
    for log in logs:
        parts.files[f"logs/{log.name}"] = log.text
    if not logs:
        parts.missing["logs"] = "no rank of this machine has left a log in Ray's directories"
    parts.files["report.json"] = {
        "schema": 1,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "server": url,
        "missing": parts.missing,
    }
    return parts


def fetch_status(url: str) -> dict[str, Any]:
    _, found = fetch_json(url, STATUS, "status", "start the server, or name it with --url")
    return found if isinstance(found, dict) else {"answer": found}


def versions() -> dict[str, Any]:
    pairs = {(d.name, str(d.version)) for d in metadata.distributions() if d.name}
    return {
        "nrank": package_version("nrank"),
        "revision": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": [{"name": name, "version": version} for name, version in sorted(pairs)],
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if VARIABLES.fullmatch(name)}


def served_config(status: Mapping[str, Any]) -> ServeConfig | None:
    """The server's own; None for one of another version, whose keys are not ours."""
    try:
        return ServeConfig.model_validate(status.get("config") or None)
    except ValidationError:
        return None


def resolved(config: ServeConfig, status: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, and whether it is that of the server."""
    served = status.get("config_hash")
    return {
        "hash": config.config_hash,
        "server_hash": served,
        "same_as_server": served == config.config_hash if served else None,
        "config": config.resolved().model_dump(),
    }


def plan(config: ServeConfig, status: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of that configuration; one that doesn't fit has it, too."""
    from placement.models.registry import load_model_spec
    from placement.ownership import OwnershipRequest
    from placement.ownership_files import read_ownership
    from placement.plan import PlanOptions, make_plan

    engine = config.engine()
    spec, headers = load_model_spec(engine.model_dir)
    ownership = OwnershipRequest()
    if engine.ownership_file:
        given = read_ownership(engine.ownership_file)
        ownership = OwnershipRequest(exact=given.layers, replicas=given.replicas)
    made = make_plan(engine, spec, headers, options=PlanOptions(ownership=ownership))
    return {"server_plan_id": status.get("plan_id"), **made.to_json()}


def doctor(config: ServeConfig) -> dict[str, Any]:
    full = config.resolved()
    return to_json(full.device, examine(full.device, str(Path(full.model))))


def pids_of(status: Mapping[str, Any]) -> Iterator[int]:
    """Of the ranks that the server told."""
    ranks = status.get("ranks")
    for rank in ranks if isinstance(ranks, list) else []:
        pid = rank.get("pid") if isinstance(rank, dict) else None
        if isinstance(pid, int) and pid > 0:
            yield pid
