"""PromQL made from the metrics table: a name or a label that the table lacks is an error.

Owns how each type of metric is asked for. Knows no board.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.metrics import JOB_METRICS, METRICS, MetricSpec, MetricType

TABLE: Mapping[str, MetricSpec] = {spec.name: spec for spec in (*METRICS, *JOB_METRICS)}
TARGET_LABELS = ("instance", "job")  # Prometheus puts them on every series
RANGE = "$__rate_interval"
EACH_INSTANCE = 'instance=~"$instance"'
_SUFFIXES = {
    MetricType.HISTOGRAM: ("bucket", "sum", "count"),
    MetricType.SUMMARY: ("sum", "count"),
}


# Steps with both kinds of rows and with compared decisions are outside graphs by design.
UNPLANNED_FALLBACK = 'reason=~"refused|rows|unsampled"'


def series(name: str, where: str = "", part: str = "", scope: str = EACH_INSTANCE) -> str:
    """A selector: `where` are further matchers, `part` the suffix of a histogram or summary.

    ValueError for a name, a label or a part that the table doesn't have.
    """
    spec = TABLE.get(name)
    if spec is None:
        raise ValueError(f"{name} is not in the metrics table")
    if (part or spec.type in _SUFFIXES) and part not in _SUFFIXES.get(spec.type, ()):
        raise ValueError(f"{name} is a {spec.type}: it has no part {part!r}")
    for matcher in filter(None, where.split(",")):
        label = matcher.partition("=")[0].rstrip("!")
        if label not in (*spec.labels, *TARGET_LABELS):
            raise ValueError(f"{name} has no label {label}; it has {', '.join(spec.labels)}")
    matchers = ",".join(filter(None, (scope, where)))
    return f"{name}{'_' + part if part else ''}{'{' + matchers + '}' if matchers else ''}"


def total(expression: str, *labels: str) -> str:
    """The sum, one for each value of `labels`."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} ({expression})"


def rate(name: str, where: str = "", part: str = "", scope: str = EACH_INSTANCE) -> str:
    """Increase a second of a counter, or of the sum or count of a histogram or summary."""
    spec = TABLE.get(name)
    if spec is not None and spec.type is MetricType.GAUGE:
        raise ValueError(f"{name} is a gauge: it has no rate")
    return f"rate({series(name, where, part, scope)}[{RANGE}])"


def quantile(q: float, name: str) -> str:
    return f"histogram_quantile({q:g}, {total(rate(name, part='bucket'), 'le')})"


def ratio(above: str, below: str, labels: str = "") -> str:
    """above / below where below isn't 0; `labels` as in `on (rank)`."""
    match = f" {labels}" if labels else ""
    return f"{above} /{match} ({below} > 0)"
