"""Serve applications of nrank: `deploy.serve:app`, `deploy.serve:build`, and `nrank serve`.

Owns the wiring of configuration to deployments. `app` reads the YAML file that NRANK_CONFIG
names, or serves the embedded model.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from ray.serve import Application

from cluster.admin_gate import AdminGate, read_token
from cluster.coordinator import CoordinatorSettings
from cluster.engine_metrics import BuildInfo
from cluster.ingress import EdgeSettings
from cluster.protocol import MAX_CHOICES
from cluster.ray_coordinator import coordinator_deployment
from cluster.ray_ingress import ingress_deployment
from cluster.supervisor import RestartPolicy
from cluster.thermal_guard import HeatLimits
from deploy.certify.binding import binding_of
from deploy.config import ServeConfig, load_config
from deploy.version import git_revision, package_version
from placement.evidence import Claim, read_evidence

RESOURCES = {"cpu": "nrank_chip", "cuda": "GPU", "npu": "NPU"}


def resource_of(config: ServeConfig) -> str:
    """What each rank asks Ray for: one of it."""
    return config.resource_name or RESOURCES[config.device]


def heat_limits(config: ServeConfig) -> HeatLimits | None:
    """None where no sensors are asked: on a CPU, unless they are asked for."""
    if config.sensors == "off" or (config.sensors == "auto" and config.device == "cpu"):
        return None
    names = {field.name for field in fields(HeatLimits)}
    return HeatLimits(**{name: getattr(config, name) for name in names})


def settings_of(config: ServeConfig) -> CoordinatorSettings:
    build = BuildInfo(
        package_version("nrank"), git_revision(), config.device, package_version("torch")
    )
    return CoordinatorSettings(
        max_queue_requests=config.max_queue_requests,
        drain_timeout_s=config.drain_timeout_s,
        request_timeout_s=config.request_timeout_s,
        restart=RestartPolicy(config.restart_limit, config.restart_backoff_s),
        heat=heat_limits(config),
        model_id=config.model_name,
        config_hash=config.config_hash,
        config=config.resolved().model_dump(),
        build=build,
        claim=claim_of(config),
    )


def claim_of(config: ServeConfig) -> Claim | None:
    """ConfigError for an evidence file that is none."""
    if not config.evidence_file:
        return None
    return Claim(read_evidence(config.evidence_file), binding_of(config.engine()))


def admin_gate(config: ServeConfig) -> AdminGate:
    """ConfigError for a token file that is of no use."""
    if not config.admin_token_file:
        return AdminGate()
    read_token(config.admin_token_file)
    return AdminGate(os.path.abspath(config.admin_token_file))


def application(config: ServeConfig) -> Application:
    """Ingress and coordinator of a resolved configuration."""
    engine = config.engine()
    coordinator = coordinator_deployment(engine, settings_of(config), resource_of(config))
    return ingress_deployment(  # type: ignore[no-any-return]
        coordinator,
        config.model,
        config.model_name,
        config.context_tokens,
        EdgeSettings(
            comment_interval_s=config.sse_comment_interval_s,
            max_choices=min(MAX_CHOICES, config.max_sequences + config.max_queue_requests),
            admin=admin_gate(config),
        ),
        config.ingress_replicas,
        config.drain_timeout_s,
    )


def build(args: dict[str, Any]) -> Application:
    """Serve's builder: `args` holds the keys of a config file, or `config` with its path."""
    values = dict(args)
    path = values.pop("config", None)
    return application(load_config(path, values))


def serve_foreground(config: ServeConfig) -> int:
    """Runs the server until a signal; returns the exit code. Raises NrankError before that."""
    from deploy.foreground import Foreground

    return Foreground(config).run()


def __getattr__(name: str) -> Application:
    # Made when asked for: importing this module must not need a model.
    if name == "app":
        return build({"config": os.environ.get("NRANK_CONFIG")})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
