"""/admin/hold and /admin/resume: what they do, and for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cluster.admin_gate import AdminGate, read_token
from cluster.client import EngineState, EngineStatus, HeatStatus, NotServing
from cluster.ingress import EdgeSettings, make_app
from cluster.model_card import ModelCard
from cluster.tokens import Tokenizer
from placement.errors import ConfigError

TOKEN = "5" * 64
FORWARDING = (
    "X-Forwarded-For",
    "X-Forwarded-Proto",
    "X-Forwarded-Anything",
    "Forwarded",
    "Via",
    "X-Real-IP",
    "X-Client-IP",
    "CF-Connecting-IP",
    "True-Client-IP",
    "X-Envoy-External-Address",
)
ORDERS = ("/admin/hold", "/admin/resume")
Caller = Callable[..., TestClient]


@pytest.fixture
def caller(engine: Any, card: ModelCard, tokenizer: Tokenizer) -> Caller:
    """A client of the given address, of an app with the given gate."""

    def make(peer: str = "127.0.0.1", gate: AdminGate | None = None) -> TestClient:
        app = make_app(engine, card, tokenizer, EdgeSettings(admin=gate or AdminGate()))
        return TestClient(app, raise_server_exceptions=False, client=(peer, 50000))

    return make


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.fixture(autouse=True)
def _obedient(engine: Any) -> None:
    """The scripted engine notes orders and tells them in its status."""
    engine.orders = []

    async def hold(reason: str) -> None:
        engine.orders.append(reason)
        heat = HeatStatus("hold", "hand", reason, held_by_hand=True)
        engine.state = replace(engine.state, state=EngineState.HOLD, ready=False, heat=heat)

    async def resume() -> None:
        engine.orders.append(None)
        engine.state = EngineStatus(EngineState.SERVING, True)

    engine.hold, engine.resume = hold, resume


def test_a_hold_and_its_end_with_what_holds_then(caller: Caller, engine: Any) -> None:
    client = caller()
    held = client.post("/admin/hold", json={"reason": "  a card\nis changed "})
    assert held.status_code == 200
    assert held.json() == {
        "state": "hold",
        "order": "hold",
        "cause": "hand",
        "reason": "a card is changed",
        "held_by_hand": True,
    }
    resumed = client.post("/admin/resume")
    assert (resumed.status_code, resumed.json()["order"]) == (200, "run")
    assert engine.orders == ["a card is changed", None]


def test_a_resume_does_not_hide_what_heat_still_holds(caller: Caller, engine: Any) -> None:
    async def stay() -> None:
        heat = HeatStatus("hold", "heat", "chip 2.0 (rank 0) is at 95 °C")
        engine.state = EngineStatus(EngineState.HOLD, False, heat=heat)

    engine.resume = stay
    answer = caller().post("/admin/resume").json()
    assert (answer["state"], answer["cause"], answer["held_by_hand"]) == ("hold", "heat", False)


@pytest.mark.parametrize("body", [b"", b" ", b"{}", b'{"reason": null}', b'{"reason": " \\n"}'])
def test_a_hold_without_a_reason_is_one_by_hand(caller: Caller, engine: Any, body: bytes) -> None:
    """An empty reason would end the hold instead."""
    assert caller().post("/admin/hold", content=body).status_code == 200
    assert engine.orders == ["by hand"]


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"reason": 7}', 400, "reason: input should be a valid string, got 7"),
        (b'{"why": "x"}', 400, "why: extra inputs are not permitted"),
        (b'{"reason": "%s"}' % (b"x" * 201), 400, "at most 200 characters"),
        (b'{"reason": "\\u001b[2J"}', 400, "control characters"),
        (b" " * 5000, 413, "the limit is 4096 bytes"),
    ],
)
def test_bad_bodies_hold_nothing(
    caller: Caller, engine: Any, body: bytes, code: int, told: str
) -> None:
    answer = caller().post("/admin/hold", content=body)
    assert answer.status_code == code
    message = answer.json()["error"]["message"]
    assert told in message
    assert "\n" not in message
    assert engine.orders == []


def check_refused(client: TestClient, engine: Any, told: str, **headers: str) -> None:
    for path in ORDERS:
        answer = client.post(path, headers=headers)
        assert answer.status_code == 403, headers
        error = answer.json()["error"]
        assert error["code"] == "forbidden"
        assert error["message"].startswith(f"POST {path}: ")
        assert told in error["message"]
        assert "\n" not in error["message"]
        assert TOKEN not in answer.text
    assert engine.orders == []


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_callers_on_this_machine_need_no_token(caller: Caller, peer: str) -> None:
    assert caller(peer).post("/admin/hold").status_code == 200


@pytest.mark.parametrize(
    "peer", ["10.0.0.7", "192.0.2.1", "2001:db8::1", "::ffff:10.0.0.7", "localhost", ""]
)
def test_others_are_refused(caller: Caller, engine: Any, peer: str) -> None:
    check_refused(caller(peer), engine, "set admin_token_file")


@pytest.mark.parametrize(
    "name",
    FORWARDING,
)
def test_whoever_comes_through_a_proxy_is_refused(caller: Caller, engine: Any, name: str) -> None:
    check_refused(caller(), engine, "without a proxy", **{name: "127.0.0.1"})


@pytest.mark.parametrize("name", ["Origin", "Sec-Fetch-Site"])
def test_a_page_in_a_browser_on_this_machine_is_refused(
    caller: Caller, engine: Any, name: str
) -> None:
    check_refused(caller(), engine, "or a browser", **{name: "null"})


def test_behind_a_proxy_that_hides_peers_nobody_is_local(caller: Caller, engine: Any) -> None:
    check_refused(caller(gate=AdminGate(sees_peers=False)), engine, "set admin_token_file")


def test_the_token_opens_to_anyone_and_is_asked_of_everyone(
    caller: Caller, engine: Any, token_file: Path
) -> None:
    gate = AdminGate(str(token_file), sees_peers=False)
    for given in (
        "",
        "Bearer",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}5",
        f"Basic {TOKEN}",
        TOKEN,
    ):
        check_refused(caller(gate=gate), engine, "need `Authorization", Authorization=given)
    headers = {"Authorization": f"bearer {TOKEN}", "X-Forwarded-For": "192.0.2.1"}
    assert caller("10.0.0.7", gate).post("/admin/hold", headers=headers).status_code == 200


def test_a_new_token_counts_at_once_and_a_lost_one_opens_nothing(
    caller: Caller, engine: Any, token_file: Path
) -> None:
    client = caller(gate=AdminGate(str(token_file)))
    token_file.write_text("6" * 64)
    assert client.post("/admin/hold", headers={"Authorization": "Bearer " + "6" * 64}).is_success
    engine.orders.clear()
    for text in ("", "\n", "short"):
        token_file.write_text(text)
        check_refused(client, engine, "its log says why", Authorization=f"Bearer {text}")
    token_file.unlink()
    check_refused(client, engine, "its log says why", Authorization=f"Bearer {TOKEN}")


@pytest.mark.parametrize("text", [None, "", "short\n", "x" * 5000])
def test_a_token_file_of_no_use(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"admin_token_file .*/token.*openssl") as caught:
        read_token(str(path))
    assert "short" not in str(caught.value)


def test_a_coordinator_that_does_not_answer(caller: Caller, engine: Any) -> None:
    async def gone(reason: str) -> None:
        raise NotServing("the coordinator did not answer within 10 s")

    engine.hold = gone
    assert caller().post("/admin/hold").status_code == 503


def test_orders_are_posts(caller: Caller) -> None:
    for path in ORDERS:
        assert caller().get(path).status_code == 405
