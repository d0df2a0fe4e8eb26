"""Board: a run of the GPQA job, from what the job itself exports while it lasts."""

from __future__ import annotations

from dashboards.panel import Board, Panel, Query, Variable
from dashboards.query import rate, ratio, series, total

RUN = Variable("run_id", "Run", "label_values(nrank_eval_info, run_id)")
SCOPE = 'run_id=~"$run_id"'


def _of(name: str) -> str:
    return series(name, scope=SCOPE)


PROGRESS = (
    Panel(
        "Run",
        "nrank_eval_info: model and data set.",
        "none",
        (Query(_of("nrank_eval_info")),),
        "table",
        height=5,
    ),
    Panel(
        "Done",
        "nrank_eval_answers, whatever they are, of nrank_eval_questions.",
        "percentunit",
        (
            Query(
                ratio(
                    total(_of("nrank_eval_answers"), "run_id"),
                    _of("nrank_eval_questions"),
                    "on (run_id)",
                ),
                "{{run_id}}",
            ),
        ),
        "stat",
        height=5,
    ),
    Panel(
        "Time",
        "nrank_eval_elapsed_seconds, and nrank_eval_remaining_seconds at the rate so far.",
        "s",
        (
            Query(_of("nrank_eval_elapsed_seconds"), "so far"),
            Query(_of("nrank_eval_remaining_seconds"), "still"),
        ),
        "stat",
        height=5,
    ),
    Panel(
        "Answers",
        "nrank_eval_answers: correct, wrong, no_answer, truncated, failed.",
        "none",
        (Query(total(_of("nrank_eval_answers"), "state"), "{{state}}"),),
        stacked=True,
        width=12,
    ),
    Panel(
        "Tokens a second",
        "nrank_eval_tokens_total.",
        "suffix: tok/s",
        (Query(total(rate("nrank_eval_tokens_total", scope=SCOPE), "kind"), "{{kind}}"),),
        width=12,
    ),
)
ACCURACY = (
    Panel(
        "Accuracy with its 95 % interval",
        "nrank_eval_accuracy_ratio and nrank_eval_accuracy_bound_ratio (Wilson): over the answers "
        "so far. Two runs on the same questions differ by chance by up to 6 points.",
        "percentunit",
        (
            Query(_of("nrank_eval_accuracy_ratio"), "{{run_id}} {{rule}}"),
            Query(_of("nrank_eval_accuracy_bound_ratio"), "{{run_id}} {{rule}} {{end}}"),
        ),
        width=24,
        height=12,
    ),
)
BOARD = Board(
    "nrank-evaluation",
    "nrank / GPQA run",
    "Progress, accuracy and rate of an evaluation.",
    (RUN,),
    (("Progress", PROGRESS), ("Accuracy", ACCURACY)),
    since="now-12h",
)
