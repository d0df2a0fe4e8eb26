"""The body of an HTTP request, read up to a limit."""

from __future__ import annotations

from fastapi import Request

from cluster.http_errors import BodyTooLarge


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge before more than the limit is held."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(limit_bytes, int(declared))
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_bytes:
            raise BodyTooLarge(limit_bytes)
    return bytes(body)
