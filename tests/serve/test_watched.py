"""A real Prometheus watches a served gang: boards have data, alerts see what goes wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboards import board_page, overview
from dashboards.generate import BOARDS
from deploy.gpqa.report import make_report
from deploy.gpqa.series import MetricsPort, RunSeries
from tests.deploy.gpqa.ledger_samples import answer, contents
from tests.serve.browser import PHONE, chromium
from tests.serve.prometheus_server import Prometheus, prometheus
from tests.serve.scripted_sensor import ScriptedSensor

pytestmark = [pytest.mark.ray]

WINDOW = "60s"
# Only DCMI tells it, and npu-smi is what the chips here have.
NEVER_HERE = re.compile("nrank_chip_shutdown_celsius")


class Watched:
    """The server, its sensors, what watches it, and clients that never stop asking."""

    def __init__(self, server: Any, sensor: ScriptedSensor, watcher: Prometheus) -> None:
        self.server, self.sensor, self.watcher = server, sensor, watcher
        self._stop = threading.Event()
        self._clients = [threading.Thread(target=self._ask, args=(at,)) for at in range(2)]
        for client in self._clients:
            client.start()

    def _ask(self, at: int) -> None:
        """Whatever comes back: a gang that restarts refuses, and one at rest is slow."""
        turn = 0
        while not self._stop.is_set():
            turn += 1
            prompt = "The river " * 40 + f"of client {at}, for the {turn % 3} time"
            body = self.server.body(prompt, 24)
            answer = self.server.http.post("/v1/completions", json=body)
            if answer.status_code != 200:
                self._stop.wait(0.5)

    def close(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(120)

    def heat(self, celsius: float) -> None:
        self.sensor.heat(self.server.status()["ranks"][1]["physical_chip"], celsius)

    def wait_alert(self, name: str, fires: bool = False) -> None:
        seen = self.watcher.firing if fires else self.watcher.alerts
        self.server.until(name, lambda: name in seen())


def evaluation_series() -> RunSeries:
    """What `nrank eval gpqa` exports, two answers into its run."""
    series = RunSeries()
    series.update(make_report(contents(answer("q1"), answer("q2", "A"))), remaining_s=60.0)
    return series


@pytest.fixture(scope="module")
def watched(
    serve_port: int, sensor: ScriptedSensor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    from ray import serve

    from deploy.config import load_config
    from deploy.serve import application
    from tests.serve.conftest import Server, quiet

    sensor.set([50] * sensor.num_chips)
    config = load_config(
        overrides={
            "ranks": 2, "resource_name": "NPU", "port": serve_port, "sensors": "on",
            "silence_s": 3.0, "max_sequences": 2, "max_queue_requests": 1, "page_tokens": 16,
            "restart_backoff_s": 0.1, "restart_limit": 20, "step_timeout_s": 60.0,
        }
    )  # fmt: skip
    serve.run(application(config), name="watched", route_prefix="/watched", logging_config=quiet())
    server = Server(f"http://127.0.0.1:{serve_port}/watched")
    server.wait_ready()
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        MetricsPort(evaluation_series(), 0) as evaluation,
        prometheus(
            folder, {"nrank": f"{server.base_url}/metrics", "nrank_eval": evaluation.url}
        ) as watcher,
    ):
        found = Watched(server, sensor, watcher)
        server.until("a first scrape", lambda: bool(watcher.query("nrank_build_info")))
        yield found
        found.close()
    serve.delete("watched")


def test_alerts_see_what_really_goes_wrong(watched: Watched) -> None:
    """A hot chip, a hold, a cut, sensors that are silent, a killed rank, a full queue."""
    watched.server.until("a calm server", lambda: not watched.watcher.alerts())
    watched.heat(91)
    watched.wait_alert("NrankChipHot")
    watched.heat(95)
    watched.wait_alert("NrankHeld")
    watched.heat(97)
    watched.wait_alert("NrankCut", fires=True)
    watched.heat(60)
    watched.server.wait_ready()
    watched.sensor.fail("broken")
    watched.wait_alert("NrankSensorLost")
    watched.sensor.heal()
    watched.server.wait_ready()
    watched.server.kill_rank(1)
    watched.wait_alert("NrankRestarts", fires=True)
    watched.server.wait_ready()
    streams = [watched.server.stream("The river", 200) for _ in range(6)]
    watched.wait_alert("NrankQueueFull", fires=True)
    assert 429 in {stream.join().status_code for stream in streams}


def test_every_query_of_every_board_has_data(watched: Watched) -> None:
    """After a client that left, a request for nothing and a rank that died."""
    server = watched.server
    assert server.get("/nothing").status_code == 404
    before = server.status()["epoch"]
    server.kill_rank(0)
    server.until("a new gang", lambda: server.status()["epoch"] > before)
    server.wait_ready()
    missing = {
        query.expression: panel.title
        for board in BOARDS
        for _, panels in board.rows
        for panel in panels
        for query in panel.queries
        if not NEVER_HERE.search(query.expression)
    }
    assert len(missing) > 70

    def ask_again() -> bool:
        for expression in list(missing):
            if watched.watcher.query(ran(expression)):
                del missing[expression]
        return not missing

    try:
        server.until("data for every query", ask_again)
    except AssertionError:
        pytest.fail("no data for " + "; ".join(f"{title}: {q}" for q, title in missing.items()))


def test_the_overview_shows_live_data_in_a_browser(watched: Watched, tmp_path: Path) -> None:
    """Every panel has a line that is drawn; nothing is loaded, nothing is told to the console."""
    watched.server.wait_ready()
    told: list[str] = []
    asked: list[str] = []
    file = tmp_path / "overview.html"
    address = str(watched.watcher.http.base_url)
    panels = [panel.title for _, panels in overview.BOARD.rows for panel in panels]
    with chromium() as browser:
        page = browser.new_page(viewport=PHONE)  # type: ignore[arg-type]
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))

        def all_have_lines() -> bool:
            flags = ["--board", "overview", "--minutes", "5", "--prometheus", address]
            assert board_page.main([*flags, "--out", str(file)]) is None
            page.goto(file.as_uri())
            return page.locator(".panel:not(:has(path))").count() == 0

        watched.server.until("a line in every panel", all_have_lines)
        assert page.locator(".panel h3").all_inner_texts() == panels
        for panel in page.locator(".panel").all():
            widths = panel.locator("path").evaluate_all("all => all.map(p => p.getTotalLength())")
            assert max(widths) > 0
        assert page.locator(".panel", has_text="State").first.inner_text().count("serving") == 1
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert told == []
    assert {url for url in asked if not url.startswith("data:")} == {file.as_uri()}


def ran(expression: str) -> str:
    """As Grafana asks it, with every choice on "all"."""
    return re.sub(r"\$(instance|run_id)\b", ".*", expression.replace("$__rate_interval", WINDOW))
