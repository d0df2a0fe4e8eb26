"""POST /admin/hold and /admin/resume: the orders that a hand may give to a gang.

Owns their bodies and answers. A hold by hand and one by the heat guard don't undo each other.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from cluster.admin_gate import AdminGate, peer_of
from cluster.client import EngineClient
from cluster.http_errors import HttpError
from cluster.protocol import HoldBody
from cluster.request_body import read_body
from cluster.validate import field_error, parse_json
from placement.errors import ClientError

_LOG = logging.getLogger("nrank.edge")

MAX_BODY_BYTES = 4096


class AdminRoutes:
    """One method a route; 403 for whom the gate refuses, in every state of the engine."""

    def __init__(self, engine: EngineClient, gate: AdminGate) -> None:
        self._engine = engine
        self._gate = gate

    async def hold(self, request: Request) -> Response:
        """Once more with another reason replaces the reason."""
        if refused := self._refuse(request):
            return refused
        reason = hold_reason(await read_body(request, MAX_BODY_BYTES))
        _LOG.warning("hold by hand: %s", reason)
        await self._engine.hold(reason)
        return await self._answer()

    async def resume(self, request: Request) -> Response:
        """Without a hold by hand it changes nothing."""
        if refused := self._refuse(request):
            return refused
        _LOG.warning("resume by hand")
        await self._engine.resume()
        return await self._answer()

    def _refuse(self, request: Request) -> Response | None:
        why = self._gate.refusal(request)
        if why is None:
            return None
        _LOG.warning("%s of %s is refused: %s", request.url.path, peer_of(request), why)
        return HttpError(403, f"POST {request.url.path}: {why}", "forbidden").response()

    async def _answer(self) -> Response:
        """What holds now: a gang stays on hold after a resume where heat wants it so."""
        status = await self._engine.status()
        heat = status.heat
        told: dict[str, Any] = {
            "state": status.state,
            "order": heat.order,
            "cause": heat.cause,
            "reason": heat.reason,
            "held_by_hand": heat.held_by_hand,
        }
        return JSONResponse(told)


def hold_reason(raw: bytes) -> str:
    """The reason in a body, in one line, or "by hand" where there is none. ClientError."""
    try:
        body = HoldBody.model_validate(parse_json(raw) if raw.strip() else {})
    except ValidationError as error:
        raise field_error(error) from error
    reason = " ".join(body.reason.split())
    if not reason.isprintable():
        raise ClientError(
            f"reason: control characters are not taken, got {reason!r:.80}",
            param="reason",
            code="invalid_value",
        )
    return reason or HoldBody().reason
