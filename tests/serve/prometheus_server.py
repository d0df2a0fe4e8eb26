"""A real Prometheus that scrapes every second, with the alert rules of the repository."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.local_ray import check_port
from tests.dashboards.prometheus_tools import program

RULES = Path(__file__).parents[2] / "dashboards/prometheus/alerts.yml"
LIMIT_S = 120.0
Sample = dict[str, Any]


class Prometheus:
    """Asked over its HTTP API."""

    def __init__(self, base_url: str) -> None:
        self.http = httpx.Client(base_url=base_url, timeout=LIMIT_S)

    def query(self, expression: str) -> list[Sample]:
        """Samples now that are numbers; AssertionError for what Prometheus refuses."""
        answer = self.http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return [one for one in answer["data"]["result"] if one["value"][1] != "NaN"]

    def alerts(self) -> set[str]:
        """Names of those whose expression holds now, for long enough or not yet."""
        return {one["metric"]["alertname"] for one in self.query("ALERTS")}

    def firing(self) -> set[str]:
        found = self.query('ALERTS{alertstate="firing"}')
        return {one["metric"]["alertname"] for one in found}

    def is_ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """`targets`: job -> URL of its metrics."""
    config, log = folder / "prometheus.yml", folder / "log"
    urls = {job: httpx.URL(url) for job, url in targets.items()}
    scrapes = [
        {
            "job_name": job,
            "metrics_path": url.path,
            "static_configs": [{"targets": [f"{url.host}:{url.port}"]}],
        }
        for job, url in urls.items()
    ]
    often = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    content = {"global": often, "rule_files": [str(RULES)], "scrape_configs": scrapes}
    config.write_text(yaml.safe_dump(content))
    address = f"127.0.0.1:{check_port('127.0.0.1', 0)}"
    command = [str(program("prometheus")), f"--config.file={config}", "--log.level=warn"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        found = Prometheus(f"http://{address}")
        deadline_s = time.monotonic() + LIMIT_S
        while not found.is_ready():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        yield found
    finally:
        process.terminate()
        process.wait(30)
