"""A run's figures as Prometheus series on a small port of its own, while the run lasts.

The names stand in `cluster.metrics.JOB_METRICS`; here is what fills them. A figure that isn't known
has no series.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.registry import Collector

from cluster.metrics import JOB_METRICS, MetricType
from deploy.gpqa.report import Report
from placement.errors import ConfigError

HOST = "127.0.0.1"
POLL_S = 0.05  # how soon the port sees that the run is over
Sample = tuple[tuple[str, ...], float]  # label values after run_id, value


class RunSeries(Collector):
    """Of one run; shows what `update` last told."""

    def __init__(self) -> None:
        self._now: tuple[Report, float | None] | None = None

    def update(self, report: Report, remaining_s: float | None) -> None:
        self._now = (report, remaining_s)

    def collect(self) -> Iterator[Metric]:
        if self._now is None:
            return
        report, remaining_s = self._now
        samples = _samples(report, remaining_s)
        for spec in JOB_METRICS:
            make = CounterMetricFamily if spec.type is MetricType.COUNTER else GaugeMetricFamily
            family = make(spec.name, spec.help, labels=spec.labels)
            for labels, value in samples[spec.name]:
                family.add_metric([report.header.run_id, *labels], value)
            yield family


def _samples(report: Report, remaining_s: float | None) -> dict[str, list[Sample]]:
    header = report.header
    rules = {name: report.scores[name] for name in ("strict", "robust")}
    return {
        "nrank_eval_info": [((header.model, header.dataset_sha256[:16]), 1.0)],
        "nrank_eval_questions": [((), header.questions)],
        "nrank_eval_answers": [((state,), count) for state, count in report.states.items()],
        "nrank_eval_accuracy_ratio": [
            ((name,), score.ratio) for name, score in rules.items() if score.ratio is not None
        ],
        "nrank_eval_accuracy_bound_ratio": [
            ((name, end), bound)
            for name, score in rules.items()
            for end, bound in zip(("low", "high"), score.interval, strict=True)
        ],
        "nrank_eval_tokens_total": [
            (("prompt",), report.prompt_tokens),
            (("completion",), report.completion_tokens),
        ],
        "nrank_eval_elapsed_seconds": [((), report.speed.active_s)],
        "nrank_eval_remaining_seconds": [] if remaining_s is None else [((), remaining_s)],
    }


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line."""


class MetricsPort:
    """Serves `series` on this machine. Use as a context manager."""

    def __init__(self, series: RunSeries, port: int) -> None:
        """Port 0 takes a free one. ConfigError when it can't be had."""
        registry = CollectorRegistry()
        registry.register(series)
        try:
            self._server = make_server(
                HOST, port, make_wsgi_app(registry), ThreadingWSGIServer, _Quiet
            )
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--metrics-port {port} on {HOST} can't be used: {reason}; 0 takes a free one"
            ) from None
        self.url = f"http://{HOST}:{self._server.server_port}/metrics"
        serve = self._server.serve_forever
        self._thread = Thread(target=serve, args=(POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    def __enter__(self) -> MetricsPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
