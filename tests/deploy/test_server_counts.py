"""`nrank plan --counts URL`: what a server answers, and each way in which it does not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy import cli

LAYERS, EXPERTS = 8, 14
POLL_S = 0.01  # how soon a server sees that it has to end
HOT = [[100] * 2 + [1] * (EXPERTS - 2)] * LAYERS
Serve = Callable[[int, bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(status, body) -> base URL of a server that answers so to /status/experts alone."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == "/status/experts" else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Tests print nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/status/experts"])
def test_counts_of_a_server_balance_as_those_of_a_file(
    serve: Serve, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.dumps({"layers": HOT})
    file = tmp_path / "counts.json"
    file.write_text(body)
    found = []
    for source in (serve(200, body.encode()) + suffix, str(file)):
        assert cli.main(["plan", "--ranks", "2", "--json", "--counts", source]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert cli.main(["plan", "--ranks", "2", "--json"]) == 0
    assert found[0]["ranks"] != json.loads(capsys.readouterr().out)["ranks"]


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (503, b'{"error": {"message": "the engine is starting: loading"}}', "answered 503: the en"),
        (404, b"<html>", "answered 404: Not Found; is this a running nrank server?"),
        (500, b'{"error": "x"}', "answered 500: Internal Server Error; is this"),
        (200, b"hello", "gave no routing counts (Expecting value"),
        (200, b"\xff\xfe\x00", "gave no routing counts ("),
        (200, b'{"layers": []}', "counts have 0 layers, tiny-flash-next needs [layer][expert]"),
        (200, b'{"layers": 3}', "counts have no list of layers"),
        (200, json.dumps({"layers": [[1] * 13] * LAYERS}).encode(), "layer 0 have 13 entries"),
    ],
)
def test_a_bad_answer_is_one_line_with_its_address(
    serve: Serve, status: int, body: bytes, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = serve(status, body)
    assert cli.main(["plan", "--ranks", "2", "--counts", base]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert f"{base}/status/experts" in captured.err
    assert told in captured.err


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:  # bound and not listening: nobody else takes the port
        held.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert cli.main(["plan", "--counts", base]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "refused" in told
    assert "--counts needs a file or the base URL of a running nrank server" in told


@pytest.mark.parametrize("url", ["http://", "http://[::1", "https://no host/"])
def test_an_address_that_is_none_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--counts", url]) == 2
    assert capsys.readouterr().err.count("\n") == 1
