"""What a server tells of itself: which model under which plan, and its counters.

Owns the routes and metrics that are read for it. An nrank server tells all of it; of others only
/v1/models is needed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deploy.gpqa.endpoint import Endpoint
from deploy.gpqa.records import Counters
from placement.errors import ConfigError, NrankError

EAGER = "nrank_graph_eager_fallbacks_total"
BY_DESIGN = ("drafts", "check")  # no graph has drafts, or compares decisions


class ServerFailure(NrankError):
    """The server doesn't answer, or not like one (exit code 1)."""


@dataclass(frozen=True)
class ServerFacts:
    """`context_tokens` is 0 and a text is "" where the server doesn't tell."""

    model: str
    context_tokens: int
    plan_id: str = ""
    revision: str = ""
    config_hash: str = ""


async def read_facts(endpoint: Endpoint, model: str | None) -> ServerFacts:
    """Of `model`, or of the only one served. ConfigError when that isn't served."""
    models = await _json(endpoint, "/v1/models")
    try:
        served = {str(entry["id"]): entry for entry in models["data"]}
    except (KeyError, TypeError):
        raise ServerFailure(f"{endpoint.base_url}/v1/models lists no models") from None
    if model is None and len(served) == 1:
        model = next(iter(served))
    if model not in served:
        raise ConfigError(
            f"{endpoint.base_url} serves {', '.join(served) or 'nothing'}; name one of them with "
            f"--model"
        )
    try:
        status = await _json(endpoint, "/status")
    except ServerFailure:
        status = {}
    if not isinstance(status, dict):
        status = {}
    told = {name: str(status.get(name) or "") for name in ("plan_id", "revision", "config_hash")}
    context = served[model].get("max_model_len")
    return ServerFacts(model, context if isinstance(context, int) else 0, **told)


async def read_counters(endpoint: Endpoint) -> Counters | None:
    """The server's sums now; None when it has no /metrics that can be read."""
    try:
        response = await endpoint.get("/metrics")
        sums = _sums(response.text) if response.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return None
    if not sums:
        return None
    return Counters(
        time.time(),
        draft_tokens=sums.get("nrank_spec_decode_draft_tokens_total"),
        accepted_tokens=sums.get("nrank_spec_decode_accepted_tokens_total"),
        eager_fallbacks=sums.get(EAGER),
        held_s=sums.get("nrank_hold_seconds_total"),
    )


def _sums(text: str) -> Mapping[str, float]:
    """Sample name -> sum over its labels, without what is outside graphs by design."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == EAGER and sample.labels.get("reason") in BY_DESIGN:
                continue
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def _json(endpoint: Endpoint, path: str) -> Any:
    url = f"{endpoint.base_url}{path}"
    try:
        response = await endpoint.get(path)
    except httpx.HTTPError as error:
        raise ServerFailure(
            f"{url} doesn't answer ({type(error).__name__}); is the server running there?"
        ) from None
    if response.status_code != 200:
        raise ServerFailure(f"{url} answered {response.status_code}; is it an OpenAI server?")
    try:
        return response.json()
    except ValueError:
        raise ServerFailure(f"{url} answered no JSON; is it an OpenAI server?") from None
