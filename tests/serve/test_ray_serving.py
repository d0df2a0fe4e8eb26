"""The embedded model over Ray Serve: answers, parallel streams, disconnects, a full queue."""

from __future__ import annotations

import re

import pytest

from deploy import smoke_job
from deploy.config import ServeConfig

pytestmark = pytest.mark.ray

PROMPTS = ("The river", "A small engine", "Once upon a time", "Copper and tin")


def test_the_smoke_job_passes(healthy, capsys):
    assert smoke_job.main(["--base-url", healthy.base_url]) == 0
    assert '"completion_tokens": 8' in capsys.readouterr().out


def test_the_smoke_job_fails_where_nothing_answers(unused_port, capsys):
    assert smoke_job.main(["--base-url", f"http://127.0.0.1:{unused_port}"]) == 1
    assert f"127.0.0.1:{unused_port}" in capsys.readouterr().err


@pytest.fixture
def unused_port():
    from deploy.local_ray import check_port

    return check_port("127.0.0.1", 0)


def test_status_tells_two_ranks_on_two_chips(healthy):
    status = healthy.status()
    assert status["state"] == "serving"
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    chips = [rank["physical_chip"] for rank in status["ranks"]]
    assert len(set(chips)) == 2
    assert chips[0] // 2 == chips[1] // 2
    assert status["plan_id"]
    served = ServeConfig.model_validate(status["config"])
    assert served.ranks == 2
    assert served.config_hash == status["config_hash"]


def test_an_answer_has_one_request_id_the_clients_if_it_sent_one(healthy):
    own, body = {"x-request-id": "mine-1"}, healthy.body(PROMPTS[0], 2)
    for path in ("/health", "/v1/models", "/nowhere"):
        assert len(healthy.get(path).headers.get_list("x-request-id")) == 1
        answer = healthy.http.get(path, headers=own)
        assert answer.headers.get_list("x-request-id") == ["mine-1"]
    for more in ({}, {"stream": True}, {"temperature": -1}):
        answer = healthy.http.post("/v1/completions", json={**body, **more}, headers=own)
        assert answer.headers.get_list("x-request-id") == ["mine-1"]


def test_more_answers_than_are_ever_admitted_are_a_400(healthy):
    """max_sequences 3 and max_queue_requests 2."""
    answer = healthy.http.post("/v1/completions", json=healthy.body(PROMPTS[0], 2, n=6))
    assert answer.status_code == 400
    assert "n=6 is above the limit of 5" in answer.json()["error"]["message"]
    answer = healthy.http.post("/v1/completions", json=healthy.body(PROMPTS[0], 2, n=5))
    assert len(answer.json()["choices"]) == 5


def test_parallel_streams_equal_what_each_prompt_gives_alone(healthy):
    alone = [healthy.complete(prompt, 24) for prompt in PROMPTS]
    streams = [healthy.stream(prompt, 24) for prompt in PROMPTS]
    for stream, text in zip(streams, alone, strict=True):
        assert stream.join().ended_well
        assert stream.text == text


def test_a_disconnected_client_leaves_no_trace(healthy):
    for _ in range(3):
        healthy.stream(PROMPTS[0], 4000).wait_events(2).leave()
    healthy.until("free slots", lambda: slots(healthy) == (0, 0, 0))
    assert healthy.complete(PROMPTS[1], 8)
    healthy.until("free slots", lambda: slots(healthy) == (0, 0, 0))
    text = healthy.get("/metrics").text
    aborted = r'nrank_requests_aborted_total{model_name="tiny-flash-next",reason="cancelled"} [1-9]'
    assert re.search(aborted, text)


def slots(server):
    leader = server.status()["snapshots"][0]
    return leader["running"], leader["slots_used"], leader["pages_used"]


def test_a_full_queue_is_429_and_the_server_stays_ready(healthy):
    running = [healthy.stream(PROMPTS[0], 8000).wait_events(1) for _ in range(3)]
    waiting = [healthy.stream(PROMPTS[0], 8) for _ in range(2)]
    healthy.until("five admitted", lambda: admitted(healthy) == 5)
    refused = healthy.http.post("/v1/completions", json=healthy.body(PROMPTS[1], 4))
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "queue_full"
    assert healthy.get("/ready").status_code == 200
    for stream in running:
        stream.leave()
    assert all(stream.join().ended_well for stream in waiting)
    healthy.until("an empty server", lambda: admitted(healthy) == 0)


def admitted(server):
    status = server.status()
    return status["running"] + status["waiting"]
