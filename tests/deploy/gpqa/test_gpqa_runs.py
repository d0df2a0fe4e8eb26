"""`nrank eval gpqa` against a server that answers, is away, breaks off and refuses."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest

from deploy.gpqa import evaluation
from deploy.gpqa.records import Answer, Counters, End, Failure, Session
from tests.deploy.gpqa.conftest import COUNT, Run
from tests.deploy.gpqa.scripted_server import Fault

TOLD = ("Which", "What is", "Who has")  # how the questions begin


def answers(run: Run) -> list[Answer]:
    return [record for record in run.ledger.records if isinstance(record, Answer)]


@pytest.mark.parametrize("preset", ["aisbench", "simple-evals", "lm-eval"])
def test_an_oracle_is_always_right(run: Run, preset: str) -> None:
    assert run("--preset", preset, "--concurrency", 3) == 0
    assert len({answer.id for answer in answers(run)}) == len(answers(run)) == COUNT
    assert "strict, as AISBench  20/20 = 100.0 % (83.9-100.0), above chance" in run.out
    assert run.server.most_running <= 3
    report = json.loads((run.folder / "report.json").read_text())
    assert report["complete"]
    assert report["scores"]["final"]["correct"] == COUNT
    assert set(report["domains"]) == {"Numbers", "Words", "Reading"}


def test_always_the_same_letter_is_chance(run: Run) -> None:
    run.server.letter = "B"
    assert run() == 0
    assert "5/20 = 25.0 % (11.2-46.9), not told from chance" in run.out


def test_a_done_run_asks_nothing_again(run: Run) -> None:
    assert run() == 0
    first = answers(run)
    assert run() == 0
    assert answers(run) == first
    assert len(run.server.asked) == COUNT
    assert "in 2 sessions" in run.out


def test_nothing_printed_holds_a_question(run: Run) -> None:
    run.server.faults.extend([Fault(400, "about the question"), Fault(500, "server_error")])
    assert run("--retries", 0) == 1
    assert not any(told in run.out + run.err for told in TOLD)
    assert "HTTP 400 (error)" in run.out
    assert any(isinstance(r, Failure) and "about" in r.detail for r in run.ledger.records)
    assert (run.folder / "ledger.jsonl").stat().st_mode & 0o077 == 0
    assert (run.folder / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(429, "queue_full", retry_after="0"),
        Fault(503, "not_ready"),
        Fault(503, "held", retry_after="Thu, 01 Jan 1970 00:00:00 GMT"),
        Fault(503, "draining", retry_after="nan"),
        Fault(cut="error", code="held"),
    ],
)
def test_a_server_that_takes_nothing_is_waited_for(run: Run, fault: Fault) -> None:
    run.server.faults.extend([fault] * 5)
    assert run("--concurrency", 1, "--retries", 0) == 0
    first = answers(run)[0]
    assert len(run.server.asked) == COUNT + 5
    assert first.attempts == 1
    assert first.waited_s > 0
    assert (first.held_s > 0) == (fault.code == "held")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(cut="reset"), "connection: ReadError"),
        (Fault(cut="end"), "the stream ended before the answer did"),
        (Fault(cut="garbage"), "malformed answer"),
        (Fault(usage=[1]), "malformed answer"),
        (Fault(usage={"prompt_tokens": 1, "completion_tokens": "x"}), "malformed answer"),
        (Fault(usage={"prompt_tokens": 1}), "malformed answer"),
        (Fault(cut="error", code="rank_failure"), "ended by the server (rank_failure)"),
        (Fault(500, "server_error"), "HTTP 500 (server_error)"),
    ],
)
def test_a_broken_answer_is_asked_for_again_as_before(run: Run, fault: Fault, reason: str) -> None:
    run.server.faults.extend([fault] * 3)
    assert run("--concurrency", 1, "--retries", 2) == 1
    assert f"by {reason}: made-3-1\n" in run.out
    assert run.server.asked[0] == run.server.asked[1] == run.server.asked[2]
    assert "1 of 20 questions have no answer" in run.err
    assert "19/20" in run.out  # a failed one is wrong, not left out

    run.server.faults.extend([fault] * 2)
    assert run("--concurrency", 1, "--retries", 2) == 0
    assert "19/20, right 19/19" in run.err  # before it was asked again, it is not settled
    assert answers(run)[-1].attempts == 3
    assert "20/20" in run.out
    assert "1 answers retried" in run.out


def test_an_answer_that_takes_too_long_is_asked_for_again(run: Run) -> None:
    release = threading.Event()
    run.server.before = lambda number: release.wait(60) if number == 1 else None
    try:
        assert run("--concurrency", 1, "--timeout", 0.3) == 0
    finally:
        release.set()
    assert answers(run)[0].attempts == 2


def test_a_refused_question_fails_alone(run: Run) -> None:
    run.server.faults.append(Fault(400, "context_length_exceeded"))
    assert run("--concurrency", 1) == 1
    assert len(run.server.asked) == COUNT
    assert "failed: 1 by HTTP 400 (context_length_exceeded): made-3-1\n" in run.out


def test_a_run_without_any_answer_has_no_score_and_the_reason_once(run: Run) -> None:
    run.server.faults.extend([Fault(400, "invalid_value", param="seed")] * COUNT)
    assert run("--concurrency", 1) == 1
    assert f"all {COUNT} questions; none was answered, so there is no score" in run.out
    assert run.out.count("HTTP 400") == 1
    assert f"failed: {COUNT} by HTTP 400 (invalid_value: seed): made-3-1, made-3-2," in run.out
    for text in ("%", "chance", "right"):
        assert text not in run.out + run.err
    assert run.command("report", "--out", run.folder) == 0
    assert "none was answered" in run.out


def test_a_field_that_is_none_of_ours_is_not_named(run: Run) -> None:
    question = next(iter(run.server.questions))
    run.server.faults.append(Fault(400, "invalid_value", param=question.options[0]))
    assert run("--concurrency", 1) == 1
    assert "by HTTP 400 (invalid_value): made-3-1\n" in run.out


def test_a_report_that_can_not_be_written_is_one_line_behind_the_report(run: Run) -> None:
    (run.folder / "report.json").mkdir(parents=True)
    assert run() == 1
    assert f"all {COUNT} questions" in run.out
    assert run.err.splitlines()[-1] == (
        f"nrank: {run.folder}/report.json can't be written: it is a folder; make room, the same "
        f"command asks nothing again"
    )
    assert {one.name for one in run.folder.iterdir()} == {"ledger.jsonl", "report.json"}


def test_a_fifo_is_no_dataset_and_no_ledger(run: Run) -> None:
    fifo = run.folder / "ledger.jsonl"
    run.folder.mkdir()
    os.mkfifo(fifo)
    for code in (run(), run("--data", fifo), run.command("report", "--out", run.folder)):
        assert code == 2
        assert run.err.rstrip("\n").endswith(("no regular file", "; give a run's --out", "written"))
        assert "is no regular file" in run.err
    assert run.server.asked == []


def test_what_no_question_would_get_ends_the_run(run: Run) -> None:
    run.server.faults.append(Fault(401, "invalid_api_key"))
    assert run("--concurrency", 1) == 1
    assert len(run.server.asked) == 1
    assert "takes no question: HTTP 401 (invalid_api_key)" in run.err
    assert run.ledger.records[-1].how == "failed"


def test_a_server_that_stays_away_ends_the_run_which_resumes(run: Run) -> None:
    run.server.faults.extend([Fault()] * 4 + [Fault(503, "not_ready")] * 3)
    assert run("--concurrency", 1, "--away", 0) == 1
    assert "took no question for 0 s (HTTP 503 (not_ready)); resume" in run.err
    assert len(answers(run)) == 4
    assert run("--concurrency", 1) == 0
    assert len(answers(run)) == COUNT
    assert set(run.server.answered.values()) == {1}


def test_a_dead_server_is_one_line(run: Run) -> None:
    run.server.close()
    assert run() == 1
    assert run.err.count("\n") == 1
    assert "doesn't answer (ConnectError)" in run.err
    assert not run.folder.exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_130_and_the_run_resumes(run: Run, signum: int) -> None:
    release = threading.Event()

    def before(number: int) -> None:
        if number == 6:
            signal.pthread_kill(threading.main_thread().ident or 0, signum)
            release.wait(60)

    run.server.before = before
    assert run("--concurrency", 2) == 130
    release.set()
    assert "the same command resumes the run" in run.err
    last = run.ledger.records[-1]
    assert isinstance(last, End)
    assert last.how == "interrupted"
    assert run() == 0
    assert sorted(answer.id for answer in answers(run)) == sorted(
        question.id for question in run.server.questions
    )


def test_truncated_and_letterless_answers_are_told_apart(run: Run) -> None:
    run.server.faults.extend(
        [
            Fault(content="", reasoning="it may be. Answer: D", truncated=True),  # key D
            Fault(content="Answer: C\nAnswer: C\nAnswer:", truncated=True),  # key C
            Fault(content="I can't tell."),
        ]
    )
    assert run("--concurrency", 1) == 0
    assert "robust extraction    18/20" in run.out
    assert "strict, as AISBench  19/20" in run.out  # credits the letter in unfinished reasoning
    assert "final answer only    17/20" in run.out
    assert "correct 17, wrong 0, no_answer 1, truncated 2, failed 0" in run.out
    first = answers(run)[0]
    assert (first.reasoning, first.text) == ("it may be. Answer: D", "")
    assert (first.strict, first.robust) == ("D", None)


def test_another_model_plan_or_preset_does_not_resume(run: Run) -> None:
    assert run("--limit", 5) == 0
    assert run("--limit", 5, "--preset", "lm-eval") == 2
    assert "preset aisbench -> lm-eval" in run.err
    assert run("--limit", 6) == 2
    assert "questions 5 -> 6" in run.err
    assert run("--limit", 5, "--seed", 1) == 2
    assert run("--limit", 5, "--temperature", 0.5) == 2
    run.server.plan_id = "plan-2"
    assert run("--limit", 5) == 2
    assert "plan_id plan-1 -> plan-2" in run.err
    run.server.plan_id, run.server.model = "plan-1", "other"
    assert run("--limit", 5) == 2
    assert "model scripted -> other" in run.err
    assert len(run.server.asked) == 5


def test_what_cannot_fit_or_is_not_served_is_said_at_once(run: Run) -> None:
    assert run("--max-tokens", 32768) == 2
    assert "--max-tokens 32768 leaves no room" in run.err
    assert run("--model", "none") == 2
    assert "serves scripted; name one of them with --model" in run.err
    assert not run.server.asked


def test_sampling_is_sent_as_the_header_says(run: Run) -> None:
    flags = ("--temperature", 0.6, "--top-p", 0.95, "--top-k", 10, "--seed", 7, "--limit", 1)
    assert run(*flags) == 0
    body = run.server.asked[0]
    sent = {name: body[name] for name in ("temperature", "top_p", "top_k", "seed", "max_tokens")}
    assert sent == {"temperature": 0.6, "top_p": 0.95, "top_k": 10, "seed": 7, "max_tokens": 8192}
    header = run.ledger.header
    assert (header.temperature, header.top_p, header.top_k, header.seed) == (0.6, 0.95, 10, 7)
    assert "top_k" not in _body_without(run)


def _body_without(run: Run) -> dict[str, object]:
    run.folder = run.folder.with_name("other")
    assert run("--limit", 1) == 0
    return run.server.asked[-1]


def test_counters_of_the_server_make_intervals(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'nrank_spec_decode_draft_tokens_total{{model_name="m"}} {0}\n'
        'nrank_spec_decode_accepted_tokens_total{{model_name="m"}} {1}\n'
        'nrank_graph_eager_fallbacks_total{{rank="0",reason="rows"}} {2}\n'
        'nrank_graph_eager_fallbacks_total{{rank="1",reason="rows"}} {2}\n'
        'nrank_graph_eager_fallbacks_total{{rank="1",reason="drafts"}} 7{2}\n'
        'nrank_hold_seconds_total{{cause="heat"}} {3}\n'
    )
    looks = [(10, 5, 0, 0), (50, 5, 1, 2), (90, 30, 1, 2), (20, 10, 1, 3)]
    run.server.metrics.extend(text.format(*look) for look in looks)
    came = threading.Event()
    monkeypatch.setattr(evaluation, "LOOK_S", 0.001)

    def before(number: int) -> None:
        if number == COUNT:  # the last answer waits until all looks but the final one were taken
            while len(run.server.metrics) > 1:
                came.wait(0.001)

    run.server.before = before
    assert run("--concurrency", 1) == 0
    marks = [record for record in run.ledger.records if isinstance(record, Counters)]
    assert [mark.draft_tokens for mark in marks][:4] == [10, 50, 90, 20]
    expected = (
        "acceptance 75.0 %; 1 of 3 intervals without any accepted; eager fallbacks 2; held 3.0"
    )
    assert expected in run.out


def test_a_session_says_who_asks(run: Run) -> None:
    assert run("--limit", 1, "--concurrency", 7) == 0
    session = run.ledger.records[0]
    assert isinstance(session, Session)
    assert (session.concurrency, session.base_url) == (7, run.server.base_url)
