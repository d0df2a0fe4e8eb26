"""What goes before a report leaves the machine, and what has to stay so that it is of use."""

from __future__ import annotations

import pytest

from deploy.redaction import REMOVED, Redactor

PLANTED = "x1Y2z3W4v5U6t7"  # stands where a secret stands

SECRET_TEXTS = [
    f"RAY_AUTH_TOKEN={PLANTED}",
    f"api_key: {PLANTED}",
    f'{{"hfToken": "{PLANTED}"}}',
    f"{{'client_secret': '{PLANTED}'}}",
    f'{{"api_key":"abc \\" {PLANTED}"}}',
    f"Authorization: Bearer {PLANTED}",
    f"authorization: Basic {PLANTED}==",
    f'Proxy-Authorization: Digest username="a", response="{PLANTED}"',
    f"headers={{'Authorization': 'Bearer {PLANTED}'}}",
    f"sent Bearer {PLANTED} to it",
    f"X-Api-Key: {PLANTED}",
    f"Cookie: a=b; session={PLANTED}",
    f"loading with hf_{PLANTED}",
    f"OpenAI sk-proj-{PLANTED}",
    f"cloned with ghp_{PLANTED}",
    f"aws AKIA{PLANTED}",
    f"http://anna:{PLANTED}@host/path",
    f"https://{PLANTED}@host:8000/v1",
    f"redis://:pa@ss/{PLANTED}@host",
    f"GET /v1/models?token={PLANTED}&x=1",
    f"?X-Amz-Signature={PLANTED}",
    f"password: two words {PLANTED}",
    f"DB_PASSWORD='{PLANTED}'",
    f"-----BEGIN RSA PRIVATE KEY-----\nabc\n{PLANTED}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{PLANTED}",
    f"{PLANTED}\n-----END PRIVATE KEY-----\nrest",
    f"eyJhbGciOi.{PLANTED}.abc",
    f'body {{"prompt": "my name is {PLANTED}"}}',
    f'{{"messages":[{{"role":"user","content":"{PLANTED}"}}]}}',
    f"EngineRequest(prompt_ids=(1, 2, '{PLANTED}'))",
    f"prompt: hello {PLANTED}",
    f"input_value='{PLANTED}', input_type=str",
]


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_secret_goes_wherever_it_stands(text: str) -> None:
    redactor = Redactor({})
    told = redactor.text(f"before\n{text}\nafter")
    assert PLANTED not in told
    assert REMOVED in told
    assert redactor.text(told) == told  # twice is once


USEFUL_TEXTS = [
    "context_tokens = 4096, max_tokens=64, prompt_tokens: 12",
    "KeyError: 'layers.3.mlp'",
    "linear_num_key_heads=16, num_key_value_heads: 2",
    "rank 1 step 7 phase decode: page 3 of 64",
    "http://127.0.0.1:8000/status answered 503: starting",
    "PanicException at ops/cpu/native.py:176 in nrank_moe",
    "tokenizers==0.22.1",
    "nrank: model a: 2 rank(s) on cpu",
]


@pytest.mark.parametrize("text", USEFUL_TEXTS)
def test_what_a_reader_needs_stays(text: str) -> None:
    assert Redactor({}).text(text) == text


def test_values_of_variables_and_token_files_go_from_all_text() -> None:
    environ = {
        "MY_API_KEY": PLANTED,
        "NRANK_HOME": "/srv/nrank",
        "SHORT_KEY": "abc",
        "PWD": "/home/anna",
        "RAY_AUTH_TOKEN_PATH": "/home/anna/token",
    }
    redactor = Redactor(environ, ["from/file+token\n"])
    assert redactor.text(f"said {PLANTED}, from/file+token.") == f"said {REMOVED}, {REMOVED}."
    assert redactor.text("url?x=from%2Ffile%2Btoken") == f"url?x={REMOVED}"
    kept = "/srv/nrank abc /home/anna/token"
    assert redactor.text(kept) == kept
    assert redactor.environ(environ) == {
        "MY_API_KEY": REMOVED,
        "NRANK_HOME": "/srv/nrank",
        "SHORT_KEY": REMOVED,
        "PWD": "/home/anna",
        "RAY_AUTH_TOKEN_PATH": REMOVED,
    }


def test_json_is_searched_at_every_depth() -> None:
    value = {
        "a": [{"auth": {"api_key": PLANTED, "token": [PLANTED]}}],
        "log_tail": [f"Authorization: Bearer {PLANTED}"],
        "prompt": {"any": PLANTED},
        f"hf_{PLANTED}": 1,
        "max_tokens": "64",
        "keys": 3,
        "tokens": [1, 2],
        "ok": None,
        "flag": True,
    }
    told = Redactor({}).json(value)
    assert PLANTED not in str(told)
    assert told["max_tokens"] == "64"
    assert (told["keys"], told["tokens"], told["ok"], told["flag"]) == (3, [1, 2], None, True)
