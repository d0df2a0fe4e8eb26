"""The HTTP edge as a Serve deployment: the FastAPI app of `cluster.ingress` over a remote gang.

Owns nothing but the wiring; the replica loads its own tokenizer and model card.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.ingress import EdgeSettings, make_app
from cluster.model_card import load_model_card
from cluster.ray_coordinator import HEALTH_CHECKS, RemoteEngine
from cluster.tokens import Tokenizer


def check_edge(model_dir: str, model_id: str, context_tokens: int) -> None:
    """CheckpointError for files that a replica could not start with."""
    load_model_card(model_dir, model_id, int(time.time()), context_tokens)
    Tokenizer.load(model_dir)


# Set where Serve puts HAProxy in front: all peers are then its own.
HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"


class IngressReplica:
    """Builds the app where it runs: a tokenizer does not travel."""

    def __init__(
        self,
        coordinator: DeploymentHandle[Any],
        model_dir: str,
        model_id: str,
        context_tokens: int,
        settings: EdgeSettings,
    ) -> None:
        card = load_model_card(model_dir, model_id, int(time.time()), context_tokens)
        sees_peers = os.environ.get(HAPROXY_VARIABLE, "0") != "1"
        admin = replace(settings.admin, sees_peers=sees_peers)
        # Serve's proxy adds the request's id to all answers, and passes on who the caller is.
        settings = replace(settings, tells_request_id=False, admin=admin)
        self._app = make_app(RemoteEngine(coordinator), card, Tokenizer.load(model_dir), settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


def ingress_deployment(
    coordinator: Any,
    model_dir: str,
    model_id: str,
    context_tokens: int,
    settings: EdgeSettings,
    replicas: int,
    drain_timeout_s: float,
) -> Any:
    """The bound deployment, the application's entry."""
    options: dict[str, Any] = {
        "name": "Ingress",
        "num_replicas": replicas,
        "max_ongoing_requests": 1_000_000,
        "ray_actor_options": {"num_cpus": 0},
        **HEALTH_CHECKS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": drain_timeout_s + 10.0,
    }
    deployment = serve.deployment(**options)(serve.ingress()(IngressReplica))
    return deployment.bind(coordinator, model_dir, model_id, context_tokens, settings)
