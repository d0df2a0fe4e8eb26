"""One question to an OpenAI-compatible server: a streamed chat completion, once.

Owns the request's body, the reading of its stream, and which ways to fail there are. Trying again
is the caller's.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httpx

from deploy.gpqa.records import Header
from placement.errors import ConfigError

PATH = "/v1/chat/completions"
FIELDS = (
    "model", "messages", "stream", "stream_options", "max_tokens", "seed", "temperature", "top_p",
    "top_k",
)  # fmt: skip
CONNECT_S = 10.0
MAX_PAUSE_S = 300.0  # of what a server may ask for
_PASSING = (408, 409, 500, 502, 504)


class Cause(StrEnum):
    """Why a server takes nothing now."""

    BUSY = "busy"
    HELD = "held"
    GONE = "gone"


class AttemptFailed(Exception):
    """It may succeed next time: `reason` is printed, `detail` is the server's own text."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class Refused(AttemptFailed):
    """It won't succeed: the request itself is not taken (4xx)."""

    def __init__(self, reason: str, detail: str, is_for_all: bool) -> None:
        super().__init__(reason, detail)
        self.is_for_all = is_for_all  # no other question would be taken either


class Away(AttemptFailed):
    """Nothing was begun. `pause_s` is what the server asked for; None: it named no time."""

    def __init__(self, reason: str, detail: str, cause: Cause, pause_s: float | None) -> None:
        super().__init__(reason, detail)
        self.cause, self.pause_s = cause, pause_s


_WAITING = {  # codes of errors inside a stream
    "queue_full": Cause.BUSY,
    "held": Cause.HELD,
    "not_ready": Cause.GONE,
    "draining": Cause.GONE,
}


@dataclass
class Reply:
    """What came. Tokens are the server's count; times are of this machine's clocks."""

    started_at: float
    ended_at: float = 0.0
    ttft_s: float = 0.0
    id: str = ""
    finish_reason: str = ""
    reasoning: str = field(default="", repr=False)
    content: str = field(default="", repr=False)
    usage: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0  # drafts, like the next; 0 where the server counts none
    rejected_tokens: int = 0

    def count(self) -> None:
        """Reads `usage`. KeyError, TypeError and the like when it isn't one."""
        details = self.usage.get("completion_tokens_details") or {}
        self.prompt_tokens = int(self.usage["prompt_tokens"])
        self.completion_tokens = int(self.usage["completion_tokens"])
        self.reasoning_tokens = int(details.get("reasoning_tokens") or 0)
        self.accepted_tokens = int(details.get("accepted_prediction_tokens") or 0)
        self.rejected_tokens = int(details.get("rejected_prediction_tokens") or 0)


class Endpoint:
    """A server and how it is asked. Use as an async context manager."""

    def __init__(self, base_url: str, concurrency: int, timeout_s: float) -> None:
        """`base_url` with or without /v1. `timeout_s` bounds a whole answer, holds included."""
        self.base_url = server_url(base_url)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=concurrency + 1),
            # A proxy of the environment can't reach this machine's own address.
            trust_env=urlsplit(base_url).hostname not in ("127.0.0.1", "localhost", "::1"),
        )

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> httpx.Response:
        """A small answer of the server's own; httpx.HTTPError when there is none."""
        return await self._http.get(path, timeout=CONNECT_S)

    async def ask(self, header: Header, prompt: str) -> Reply:
        """The whole answer. Raises AttemptFailed, of which Refused and Away are kinds."""
        reply = Reply(time.time())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(_body(header, prompt), reply)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Away("can't connect", str(error), Cause.GONE, None) from None
        except TimeoutError:
            raise AttemptFailed(f"no whole answer within {self._timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise AttemptFailed(f"connection: {type(error).__name__}", str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise AttemptFailed("malformed answer", repr(error)) from None
        return reply

    async def _stream(self, body: dict[str, Any], reply: Reply) -> None:
        began_s = time.monotonic()
        async with self._http.stream("POST", PATH, json=body) as response:
            if response.status_code != 200:
                raise _failure(response, await response.aread())
            ended = False
            async for data in _events(response):
                if data == b"[DONE]":
                    ended = True
                elif _take(json.loads(data), reply) and not reply.ttft_s:
                    reply.ttft_s = time.monotonic() - began_s
        reply.ended_at = time.time()
        if not ended or not reply.finish_reason:
            raise AttemptFailed("the stream ended before the answer did")
        if not reply.usage:
            raise AttemptFailed("the answer has no usage")
        reply.count()


def server_url(base_url: str) -> str:
    """Without /v1 and slashes. ConfigError when it is no address of a server, or holds a password.

    The address is printed and stored.
    """
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, brackets that don't close
        usable = False
    if usable and "@" in parts.netloc:
        raise ConfigError(
            "--base-url holds a name or password, which would be stored; leave it out"
        )
    if not usable:
        raise ConfigError(f"--base-url {base_url} is no address; give one like http://host:8000")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def _body(header: Header, prompt: str) -> dict[str, Any]:
    """Of FIELDS those that are set."""
    body = {
        "model": header.model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": header.max_tokens,
        "seed": header.seed,
        "temperature": header.temperature,
        "top_p": header.top_p,
        "top_k": header.top_k,
    }
    return {name: value for name, value in body.items() if value is not None}


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Data of the stream's events. Lines end with a line feed alone: text may hold the others."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip()


def _take(event: dict[str, Any], reply: Reply) -> bool:
    """Whether it brought text."""
    if error := event.get("error"):
        raise _stream_failure(error)
    reply.id = str(event.get("id") or reply.id)
    reply.usage = event.get("usage") or reply.usage
    before = len(reply.reasoning) + len(reply.content)
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reply.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
        reply.content += delta.get("content") or ""
        reply.finish_reason = str(choice.get("finish_reason") or reply.finish_reason)
    return len(reply.reasoning) + len(reply.content) > before


def _stream_failure(error: Any) -> AttemptFailed:
    code = str(error.get("code") or "") if isinstance(error, dict) else ""
    if code in _WAITING:
        return Away(f"ended by the server ({code})", str(error), _WAITING[code], None)
    return AttemptFailed(f"ended by the server ({_word(code)})", str(error))


def _failure(response: httpx.Response, body: bytes) -> AttemptFailed:
    """Of an answer that is no stream. Its message may quote the prompt: its code is told, and the
    field that it names where that is one of ours.
    """
    detail = body.decode(errors="replace")
    code = field_name = ""
    try:
        error = json.loads(body)["error"]
        code = str(error["code"] or "")
        field_name = str(error.get("param") or "").partition("[")[0]
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # it says no more than its status
    status = response.status_code
    words = [_word(code)] if code else []
    words += [field_name] if field_name in FIELDS else []
    reason = f"HTTP {status}" + (f" ({': '.join(words)})" if words else "")
    if status in (429, 503):
        cause = Cause.BUSY if status == 429 else Cause.HELD if code == "held" else Cause.GONE
        return Away(reason, detail, cause, _pause_s(response))
    if status in _PASSING or status >= 500:
        return AttemptFailed(reason, detail)
    return Refused(reason, detail, is_for_all=status not in (400, 413, 422))


def _word(code: str) -> str:
    """A code is a word; a server that puts a sentence there is not quoted."""
    return code if code.replace("_", "").replace("-", "").isalnum() and len(code) < 64 else "error"


def _pause_s(response: httpx.Response) -> float | None:
    """Retry-After, in seconds or as a date; None when it says nothing that can be used."""
    told = response.headers.get("retry-after", "")
    try:
        pause_s = float(told)
    except ValueError:
        try:
            pause_s = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(pause_s, 0.0), MAX_PAUSE_S) if math.isfinite(pause_s) else None
