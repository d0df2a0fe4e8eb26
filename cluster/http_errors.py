"""Errors as HTTP answers: status, OpenAI's envelope with its four keys, retry headers.

Owns the table from error kind to status. Every failure of every route, unknown paths and server
faults included, leaves through here. Knows nothing of what the routes do.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from cluster.client import NotServing
from placement.errors import ClientError, ErrorKind, NrankError

_LOG = logging.getLogger("nrank.edge")

STATUS_CLIENT_GONE = 499  # nginx's number for "client closed the connection"; never on the wire

_STATUS: dict[ErrorKind, int] = {
    ErrorKind.INVALID_REQUEST: 400,
    ErrorKind.CONTEXT_LENGTH: 400,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.UNAUTHORIZED: 401,
    ErrorKind.QUEUE_FULL: 429,
    ErrorKind.NOT_READY: 503,
    ErrorKind.DRAINING: 503,
    ErrorKind.HELD: 503,
    ErrorKind.RANK_FAILURE: 503,
    ErrorKind.NON_FINITE: 500,
    ErrorKind.DEADLINE: 504,
    ErrorKind.CANCELLED: STATUS_CLIENT_GONE,
}
_CODE: dict[ErrorKind, str] = {  # OpenAI's word where it has one, else the kind itself
    ErrorKind.CONTEXT_LENGTH: "context_length_exceeded",
    ErrorKind.NOT_FOUND: "model_not_found",
    ErrorKind.UNAUTHORIZED: "invalid_api_key",
}
MAX_TEXT = 1000  # characters of a message or the name of a parameter
_RETRY_AFTER_S: dict[int, float] = {429: 1.0, 503: 5.0}  # when the engine names no time


class BodyTooLarge(ClientError):
    """A request body above the limit (413)."""

    def __init__(self, limit_bytes: int, declared_bytes: int | None = None) -> None:
        size = f"{declared_bytes} bytes" if declared_bytes is not None else "larger"
        super().__init__(
            f"the request body is {size}, the limit is {limit_bytes} bytes; send a smaller one",
            code="payload_too_large",
        )


@dataclass(frozen=True)
class HttpError:
    """An error ready to send, as a response or as the last event of a stream."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": _sendable(self.message),
                "type": self._type(),
                "param": self.param and _sendable(self.param),
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["x-should-retry"] = "true"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)

    def _type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


def _sendable(text: str) -> str:
    """`text` as one line of UTF-8, shortened in its middle: a message may quote what a client sent.

    Both ends of a message are kept, since the remedy stands last.
    """
    cut = len(text) - MAX_TEXT
    if cut > 0:
        text = f"{text[: MAX_TEXT // 2]} ... {text[-(MAX_TEXT // 2) :]}"
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def http_error(error: Exception) -> HttpError:
    """The table's answer to `error`; anything unknown is a 500 that tells no details."""
    if isinstance(error, BodyTooLarge):
        return HttpError(413, str(error), error.code or "", error.param)
    if isinstance(error, ClientError):
        code = error.code or _CODE.get(error.kind, error.kind.value)
        return _of_kind(error.kind, str(error), code, error.param, None)
    if isinstance(error, NotServing):
        code = _CODE.get(error.kind, error.kind.value)
        return _of_kind(error.kind, str(error), code, None, error.retry_after_s)
    return HttpError(500, "internal error; the server log has the details", "server_error")


def log_server_error(error: Exception, request_id: str) -> None:
    """A traceback for faults of ours; expected refusals are not logged as errors."""
    if not isinstance(error, (ClientError, NotServing)):
        _LOG.error("request %s failed", request_id, exc_info=error)


def install_error_handlers(app: FastAPI) -> None:
    """All exceptions that leave a route, and the framework's own 404 and 405."""
    app.add_exception_handler(NrankError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_error)


def _of_kind(
    kind: ErrorKind, message: str, code: str, param: str | None, retry_after_s: float | None
) -> HttpError:
    status = _STATUS[kind]
    default = _RETRY_AFTER_S.get(status)
    retry = retry_after_s if retry_after_s is not None and default is not None else default
    return HttpError(status, message, code, param, retry)


async def _on_error(request: Request, error: Exception) -> Response:
    request_id = getattr(request.state, "request_id", "-")
    log_server_error(error, request_id)
    response = http_error(error).response()
    if getattr(request.state, "tells_id", False):  # outside of what adds it to other answers
        response.headers["x-request-id"] = request_id
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = HttpError(error.status_code, message, code).response()
    response.headers.update(error.headers or {})
    return response


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=STATUS_CLIENT_GONE)
