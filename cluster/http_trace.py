"""ASGI middleware: a request id on every response, one count per finished API request.

Owns the id and the endpoint label. Knows nothing of what a route does.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.client import EngineClient
from cluster.http_errors import STATUS_CLIENT_GONE

_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_UNCOUNTED = frozenset({"/health", "/ready", "/status", "/metrics", "/openapi.json"})


class HttpTrace:
    """Echoes a sane `x-request-id`, else makes one; probes and scrapes aren't counted.

    Not `tells_id`: a proxy in front answers with the id that it sent us.
    """

    def __init__(self, app: ASGIApp, engine: EngineClient, tells_id: bool) -> None:
        self._app = app
        self._engine = engine
        self._tells_id = tells_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {}).update(request_id=request_id, tells_id=self._tells_id)
        status = STATUS_CLIENT_GONE  # what it stays when no response starts

        async def traced_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._tells_id:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, traced_send)
        except Exception:
            status = 500  # the server's outermost layer answers it
            raise
        finally:
            endpoint = _endpoint(scope)
            if endpoint not in _UNCOUNTED:
                await self._engine.record_http(endpoint, status)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _endpoint(scope: Scope) -> str:
    """The route's template, so that the label has few values whatever paths are asked for."""
    path = getattr(scope.get("route"), "path", "other")
    return str(path) if scope["path"] != "/openapi.json" else "/openapi.json"
