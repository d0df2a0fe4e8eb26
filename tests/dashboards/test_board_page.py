"""The page of a board, from a server that answers as Prometheus does, and from others."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from dashboards import board_page
from dashboards.board_page import Line, Window, line_name, panel_view, told

Answer = Callable[[str, float], Any]
PANEL = {
    "title": "Time", "description": "of a step", "gridPos": {"w": 8},
    "fieldConfig": {"defaults": {"unit": "s"}},
}  # fmt: skip


class Answers:
    """What was asked; `answer(query, end)` is the body of the next answers."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.asked: list[str] = []
        self.answer: Answer = lambda query, end: {"status": "success", "data": {"result": []}}

    def make(self, file: Path, name: str = "overview") -> str | None:
        flags = ["--board", name, "--prometheus", self.base_url, "--minutes", "2"]
        return board_page.main([*flags, "--out", str(file)])


@pytest.fixture
def answers() -> Iterator[Answers]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlparse(self.path)
            asked = parse_qs(url.query)
            found.asked.append(asked["query"][0])
            body = found.answer(asked["query"][0], float(asked["end"][0]))
            text = body if isinstance(body, str) else json.dumps(body)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Nothing goes to the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Answers(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join(30)
    server.server_close()


def one_series(query: str, end: float) -> Any:
    labels = {"__name__": "a", "state": "<i>serving</i>", "instance": "host:1"}
    values = [[end - 2, "1"], [end - 1, "NaN"], [end, "2.5"]]
    return {"status": "success", "data": {"result": [{"metric": labels, "values": values}]}}


@pytest.mark.parametrize("name", board_page.NAMES)
def test_every_panel_of_a_board_is_drawn_and_nothing_is_loaded(
    answers: Answers, tmp_path: Path, name: str
) -> None:
    answers.answer = one_series
    file = tmp_path / "page.html"
    assert answers.make(file, name) is None
    page = file.read_text()
    board = json.loads((board_page.FOLDER / f"grafana/nrank-{name}.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert page.count("<svg") == len(panels)
    assert page.count("<path") == len(answers.asked) == sum(len(p["targets"]) for p in panels)
    assert not [query for query in answers.asked if "$" in query]
    assert "<i>serving" not in page
    assert "http" not in page.replace("HTTP", "")
    assert "no data" not in page


def test_a_panel_without_data_says_so(answers: Answers, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert answers.make(file) is None
    assert file.read_text().count("no data") == file.read_text().count("<svg")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"status": "error", "error": "bad query"}, "bad query"),
        ({"status": "success"}, "does not answer as Prometheus does"),
        ("<html>", "does not answer as Prometheus does"),
        ([], "does not answer as Prometheus does"),
    ],
)
def test_an_answer_that_is_none_is_one_line_and_no_file(
    answers: Answers, tmp_path: Path, answer: Any, words: str
) -> None:
    answers.answer = lambda query, end: answer
    fault = answers.make(tmp_path / "page.html")
    assert fault is not None
    assert words in fault
    assert "\n" not in fault
    assert not list(tmp_path.iterdir())


def test_a_page_that_can_not_be_written_leaves_nothing(answers: Answers, tmp_path: Path) -> None:
    fault = answers.make(tmp_path)  # a folder
    assert fault is not None
    assert str(tmp_path) in fault
    assert not [*tmp_path.iterdir(), *tmp_path.parent.glob("*.new")]
    assert "No such file" in (answers.make(tmp_path / "gone" / "page.html") or "")


def test_what_is_no_file_is_not_replaced(answers: Answers, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert f"{pipe} is no file" in (answers.make(pipe) or "")
    assert pipe.is_fifo()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://[", "nothing"])
def test_no_prometheus_is_one_line(address: str, tmp_path: Path) -> None:
    flags = ["--board", "ranks", "--prometheus", address, "--out", str(tmp_path / "page.html")]
    fault = board_page.main(flags)
    assert fault is not None
    assert "--prometheus" in fault
    assert not list(tmp_path.iterdir())


def test_a_line_is_broken_where_values_are_missing_and_tells_when_it_ended() -> None:
    window = Window(0.0, 100.0)
    points = ((0.0, 1.0), (1.0, 2.0), (50.0, 2.0))
    (line,) = panel_view(PANEL, [Line("a", points)], window)["lines"]
    assert line["path"] == "M0.00 50.00h0.5L1.00 0.00M50.00 0.00h0.5"
    assert line["last"] == "2 s until 00:00:50"
    (line,) = panel_view(PANEL, [Line("a", ((100.0, 0.5),))], window)["lines"]
    assert line["last"] == "500 ms"


def test_names_and_units_are_as_grafana_tells_them() -> None:
    labels = {"__name__": "a", "rank": "1", "part": "host"}
    assert line_name("rank {{rank}} {{gone}}", labels) == "rank 1 "
    assert line_name("__auto", labels) == "part host, rank 1"
    assert line_name("__auto", {}) == "value"
    shown = {
        ("percentunit", 0.5): "50 %", ("bytes", 3 << 30): "3 GiB", ("Bps", 0.0): "0 B/s",
        ("celsius", 71.0): "71 °C", ("suffix: tok/s", 1234.5): "1,234 tok/s", ("none", 2.0): "2",
        ("ops", 0.25): "0.25 /s", ("s", 1.5): "1.5 s",
    }  # fmt: skip
    assert {told(value, unit) for unit, value in shown} == set(shown.values())
