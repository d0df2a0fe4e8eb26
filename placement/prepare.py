"""From a configuration to what a gang runs: the model, its headers and a plan that fits.

The one way in for all who run a model; every rank gets the same plan from the same files.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.config import EngineConfig
from placement.headers import CheckpointHeaders
from placement.models.registry import load_model_spec, require_runnable
from placement.ownership import OwnershipRequest
from placement.ownership_files import read_ownership
from placement.plan import Plan, PlanOptions, make_plan, require_fits
from placement.spec import ModelSpec


@dataclass(frozen=True)
class Prepared:
    spec: ModelSpec
    headers: CheckpointHeaders
    plan: Plan


def prepare(config: EngineConfig) -> Prepared:
    """Raises CheckpointError, ConfigError, or PlanError when the plan doesn't fit."""
    spec, headers = load_model_spec(config.model_dir)
    require_runnable(spec)
    options = PlanOptions(ownership=_ownership(config.ownership_file))
    plan = make_plan(config, spec, headers, options=options)
    require_fits(plan)
    return Prepared(spec, headers, plan)


def _ownership(path: str) -> OwnershipRequest:
    if not path:
        return OwnershipRequest()
    given = read_ownership(path)
    return OwnershipRequest(exact=given.layers, replicas=given.replicas)
