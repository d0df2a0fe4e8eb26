"""A small OpenAI server that knows the answers, checks what it is sent, and fails when told to."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deploy.gpqa.dataset import Question

MODEL = "scripted"
FIELDS = {
    *("model", "messages", "stream", "stream_options", "max_tokens", "seed"),
    *("temperature", "top_p", "top_k"),
}
POLL_S = 0.01
LIMIT_S = 60.0
_OPTION = re.compile(r"^\(?([A-D])\) ", re.M)


@dataclass(frozen=True)
class Fault:
    """What one request gets instead of its answer."""

    status: int = 200
    code: str = ""
    param: str = ""
    retry_after: str = ""
    cut: str = ""  # reset, end, garbage, error: what happens after the first piece
    truncated: bool = False
    content: str | None = None
    reasoning: str = ""
    usage: Any = None


@dataclass
class ScriptedServer:
    """`asked` has every prompt that reached it, `answered` those that got a whole answer."""

    questions: Iterable[Question]
    model: str = MODEL
    plan_id: str = "plan-1"
    context_tokens: int = 32768
    metrics: deque[str] = field(default_factory=deque)  # one a look; the last one stays
    faults: deque[Fault] = field(default_factory=deque)
    before: Callable[[int], object] = lambda _: None  # called with the number of the request
    asked: list[dict[str, Any]] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    letter: str = ""  # always this one instead of the right one
    running: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        run = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True)
        run.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def find(self, prompt: str) -> tuple[Question, str]:
        """The question that a prompt asks, and the letter of its right option."""
        for question in self.questions:
            if question.text in prompt and all(text in prompt for text in question.options):
                options = prompt[prompt.index(question.text) + len(question.text) :]
                for found in _OPTION.finditer(options):
                    if options[found.end() :].partition("\n")[0] == question.options[0]:
                        return question, found[1]
        raise AssertionError("a prompt that asks none of the questions")

    def refusal(self, body: dict[str, Any]) -> str:
        """Why OpenAI's contract isn't kept; "" when it is."""
        if unknown := set(body) - FIELDS:
            return f"unknown {unknown}"
        if body["model"] != self.model:
            return "model"
        if not 0 <= body.get("temperature", 0) <= 2 or body["max_tokens"] < 1:
            return "range"
        (message,) = body["messages"]
        if message["role"] != "user" or not isinstance(message["content"], str):
            return "messages"
        return "" if body["stream"] and body["stream_options"]["include_usage"] else "stream"


def _handler(owner: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                entry = {"id": owner.model, "max_model_len": owner.context_tokens}
                self._json(200, {"data": [entry]})
            elif self.path == "/status":
                self._json(200, {"plan_id": owner.plan_id, "revision": "abc", "config_hash": "c"})
            elif self.path == "/metrics" and owner.metrics:
                text = owner.metrics.popleft() if len(owner.metrics) > 1 else owner.metrics[0]
                self._send(200, text.encode())
            else:
                self._json(404, {"error": {"message": "none", "code": "not_found"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with owner.lock:
                owner.asked.append(body)
                number = len(owner.asked)
                owner.running += 1
                owner.most_running = max(owner.most_running, owner.running)
                fault = owner.faults.popleft() if owner.faults else Fault()
            try:
                owner.before(number)
                if reason := owner.refusal(body):
                    fault = Fault(400, reason)
                with contextlib.suppress(OSError):  # a client that was killed
                    self._answer(body["messages"][0]["content"], fault)
            finally:
                with owner.lock:
                    owner.running -= 1

        def _answer(self, prompt: str, fault: Fault) -> None:
            if fault.status != 200:
                message = f"about: {prompt}"  # servers do quote prompts
                headers = {"retry-after": fault.retry_after} if fault.retry_after else {}
                error = {"error": {"message": message, "code": fault.code, "param": fault.param}}
                self._json(fault.status, error, headers)
                return
            question, letter = owner.find(prompt)
            text = f"Some thoughts.\n\nAnswer: {owner.letter or letter}"
            self._stream(text if fault.content is None else fault.content, fault)
            with owner.lock:
                owner.answered[question.id] += 1

        def _stream(self, text: str, fault: Fault) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(b": waiting\n\n")
            self._chunk({"role": "assistant", "content": ""})
            if fault.reasoning:
                self._chunk({"reasoning": fault.reasoning, "reasoning_content": fault.reasoning})
            half = len(text) // 2
            self._chunk({"content": text[:half]})
            if fault.cut:
                self._cut(fault)
                raise ConnectionAbortedError
            self._chunk({"content": text[half:]})
            self._chunk({}, "length" if fault.truncated else "stop")
            details = {"reasoning_tokens": 2, "accepted_prediction_tokens": 6}
            usage = {
                "prompt_tokens": 50,
                "completion_tokens": 10,
                "completion_tokens_details": {**details, "rejected_prediction_tokens": 2},
            }
            self._event({"id": "c-1", "choices": [], "usage": fault.usage or usage})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _cut(self, fault: Fault) -> None:
            if fault.cut == "garbage":
                self.wfile.write(b"data: {half\n\ndata: [DONE]\n\n")
            elif fault.cut == "error":
                self._event({"error": {"message": "about the prompt", "code": fault.code}})
            elif fault.cut == "reset":
                self.wfile.flush()
                off = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, off)
                self.connection.close()
            self.close_connection = True

        def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            self._event({"id": "c-1", "choices": [choice], "usage": None})

        def _event(self, value: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        def _json(
            self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None
        ) -> None:
            self._send(status, json.dumps(value).encode(), headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Tests print nothing."""

    return Handler
