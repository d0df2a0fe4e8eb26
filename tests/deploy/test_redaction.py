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
    f"nrank serve --token {PLANTED} --port 80",
    f"run --api-key '{PLANTED}'",
    f"cmd -secret  {PLANTED}",
    f"argv ['--hf-token', '{PLANTED}', '--port', '80']",
    f'argv ["--password", "{PLANTED}"]',
    f"uses token {PLANTED} from the file",
    f"the token is {PLANTED}.",
    f"hf_token {PLANTED}==",
    f"API key {PLANTED}",
    f"password is {PLANTED}",
    f"the Password was two words {PLANTED}",
    f"password {PLANTED}",
    f"mysql -u root -p{PLANTED} db",
    f"mysqldump -p{PLANTED}",
    f"sshpass -p {PLANTED} ssh host",
    f"redis-cli -h host -a {PLANTED}",
    f"curl -s -u anna:{PLANTED} http://host",
    f"https://host/a?se=2026&sig={PLANTED}%3D&x=1",
    f"https://host/a?sig={PLANTED}",
    f"AIza{PLANTED}",
    "ASIA" + PLANTED,
]


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_secret_goes_wherever_it_stands(text: str) -> None:
    redactor = Redactor({})
    told = redactor.text(f"before\n{text}\nafter")
    assert PLANTED not in told
    assert REMOVED in told
    assert redactor.text(told) == told  # twice is once


def test_a_short_slack_token_goes() -> None:
    assert Redactor({}).text("with xoxb-1a") == f"with {REMOVED}"


def test_the_value_of_an_option_goes_from_a_list_of_arguments() -> None:
    argv = ["serve", "--token", PLANTED, "--max-tokens", "64", "--port", "80"]
    assert Redactor({}).json(argv) == [REMOVED if one == PLANTED else one for one in argv]


USEFUL_TEXTS = [
    "context_tokens = 4096, max_tokens=64, prompt_tokens: 12",
    "KeyError: 'layers.3.mlp'",
    "linear_num_key_heads=16, num_key_value_heads: 2",
    "rank 1 step 7 phase decode: page 3 of 64",
    "http://127.0.0.1:8000/status answered 503: starting",
    "PanicException at ops/cpu/native.py:176 in nrank_moe",
    "tokenizers==0.22.1",
    "nrank: model a: 2 rank(s) on cpu",
    "2 prompts, tokens 512, token 17 of 512, 12 tokens a second",
    "--max-tokens 512 --page-tokens 16 --tokenizer /models/a --tokenizer-dir /b",
    "max_tokens 64, per token 0.031 s, one token at position 3",
    "the token is missing, the password is not set, password is required",
    "missing key model.layers.3.mlp.gate.weight in model-00001-of-00002.safetensors",
    "token budget of a step, next token 4711 of request cmpl-12ab",
    "mysql -P 3306, nrank serve -p 8000, curl -s http://127.0.0.1:8000/status?rank=1",
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


@pytest.mark.timeout(60)
def test_a_long_word_takes_no_long_time() -> None:
    """What was encoded without a blank, as logs of broken requests have it: minutes before."""
    text = "a" * 50_000
    assert Redactor({}).text(text) == text
