"""What is seen of a run while it goes on: the bar, the lines, and the series for Prometheus."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.metrics import JOB_METRICS
from deploy import eval_command
from deploy.gpqa import display
from deploy.gpqa.report import make_report
from deploy.gpqa.series import MetricsPort, RunSeries
from deploy.redrawn_line import RedrawnLine
from tests.deploy.gpqa.conftest import Run
from tests.deploy.gpqa.ledger_samples import FAILURE, answer, contents

ROOT = Path(__file__).parents[3]
REPORT = make_report(contents(answer("q1"), answer("q3", "A")))
DONE = make_report(contents(answer("q1"), questions=1))
TEXT = "2/4, right 1/2 = 50.0 % (9.5-90.5), truncated 0, failed 0, 20.0 tok/s, 1:01:01 left"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(RedrawnLine, "_columns", lambda self: 200)
    stream = Terminal()
    bar = display.Display(stream)
    bar.update(REPORT, 3661.0)
    bar.update(DONE, None)
    bar.close()
    first, second = stream.getvalue().split("\r")[1:]
    assert first == f"[############............] {TEXT}\x1b[K"
    assert second.startswith("[########################] 1/1")
    assert stream.getvalue().endswith("\x1b[K\n")


def test_a_log_has_a_line_now_and_then_and_the_last_one() -> None:
    now_s = [100.0]
    stream = io.StringIO()
    lines = display.Display(stream, lambda: now_s[0])
    lines.update(REPORT, 3661.0)
    lines.update(REPORT, None)
    now_s[0] += display.LINE_S
    lines.update(REPORT, None)
    lines.update(DONE, None)
    lines.close()
    assert [line.partition(",")[0] for line in stream.getvalue().splitlines()] == [
        *("2/4", "2/4", "1/1")
    ]
    assert stream.getvalue().startswith(TEXT)


def test_a_terminal_that_was_closed_ends_nothing() -> None:
    class Lost(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    lines = display.Display(Lost())
    lines.update(DONE, None)
    lines.close()


def test_every_series_of_the_table_is_exported() -> None:
    series = RunSeries()
    report = make_report(contents(answer("q1"), FAILURE, answer("q3", "A"), answer("q4", None)))
    with MetricsPort(series, 0) as port:
        assert httpx.get(port.url).text == ""
        series.update(report, 12.0)
        text = httpx.get(port.url).text
    for spec in JOB_METRICS:
        assert f"\n{spec.name}{{" in text
    assert 'nrank_eval_answers{run_id="r1",state="failed"} 1.0' in text
    assert 'nrank_eval_accuracy_ratio{rule="robust",run_id="r1"} 0.25' in text
    assert 'nrank_eval_tokens_total{kind="completion",run_id="r1"} 300.0' in text
    assert 'nrank_eval_remaining_seconds{run_id="r1"} 12.0' in text
    assert 'dataset="dddddddddddddddd",model_name="m",run_id="r1"} 1.0' in text


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_port_is_the_one_that_prometheus_is_told() -> None:
    config = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "nrank_eval")
    port = eval_command.METRICS_PORT
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]


def test_a_run_is_seen_on_its_port_while_it_lasts(run: Run, unused_port: int) -> None:
    seen: list[str] = []

    def before(number: int) -> None:
        if number == 11:
            seen.append(httpx.get(f"http://127.0.0.1:{unused_port}/metrics").text)

    run.server.before = before
    assert run("--concurrency", 1, "--metrics-port", unused_port) == 0
    assert run.err.startswith(f"metrics: http://127.0.0.1:{unused_port}/metrics\n")
    run_id = run.ledger.header.run_id
    assert f'nrank_eval_answers{{run_id="{run_id}",state="correct"}} 10.0' in seen[0]
    assert f'nrank_eval_questions{{run_id="{run_id}"}} 20.0' in seen[0]


def test_a_port_that_is_taken_is_named(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run("--metrics-port", port) == 2
    assert f"--metrics-port {port} on 127.0.0.1 can't be used" in run.err
    assert run("--metrics-port", 70000) == 2
    assert run.err.count("\n") == 1
