"""`nrank generate`: the reference's ids, text and usage, with and without a tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.answers import Answer
from deploy.prompts import Job, ModelLimits
from placement.config import EngineConfig
from rank_worker.launch import GenerationResult
from rank_worker.messages import FinishReason

ROOT = Path(__file__).parents[2]
Generate = Callable[..., dict[str, Any]]
CHAT = "Count from 3 to 9."
COUNTED = "<think>\n\n</think>\n\n3 4 5 6 7 8 9"


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    """Run `nrank generate --json` in this process; the parsed answer."""

    def run(*arguments: object) -> dict[str, Any]:
        code = cli.main(["generate", "--json", *map(str, arguments)])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        found: dict[str, Any] = json.loads(captured.out)
        return found

    return run


def ids(token_ids: tuple[int, ...]) -> str:
    return ",".join(map(str, token_ids))


@pytest.mark.parametrize("length", [1, 65, 300])
def test_greedy_ids_are_those_of_the_reference(
    generate: Generate, golden: Callable[[str], Any], length: int
) -> None:
    case = golden("embedded").cases[length]
    answer = generate(
        "--prompt-ids",
        ids(case.prompt_ids),
        "--max-tokens",
        48,
        "--ignore-eos",
        "--prefill-chunk",
        100,
    )
    case.check_ids(answer["token_ids"])
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 48


def test_two_ranks_without_a_tokenizer_answer_like_the_reference(
    generate: Generate, golden: Callable[[str], Any], random_checkpoint: Callable[..., Path]
) -> None:
    case = golden("random-4").cases[64]
    answer = generate(
        "--model", random_checkpoint(layers=4), "--ranks", 2, "--prompt-ids", ids(case.prompt_ids),
        "--max-tokens", 48, "--ignore-eos",
    )  # fmt: skip
    case.check_ids(answer["token_ids"])
    assert answer["text"] is None
    assert len(answer["stats"]["bytes_read"]) == 2


def test_a_chat_is_answered_with_text_usage_and_rates(generate: Generate) -> None:
    answer = generate("--chat", CHAT, "--max-tokens", 40)
    assert answer["text"] == COUNTED
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"][-1] == 4089, "the end token is an id, but no text"
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(answer["token_ids"])
    assert usage["prompt_tokens"] == len(answer["prompt_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert set(answer["stats"]) >= {
        "decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s",
        "draft_tokens", "accepted_tokens", "cached_tokens", "bytes_read",
    }  # fmt: skip


def test_drafts_change_rates_and_nothing_else(generate: Generate) -> None:
    plain, drafting = (generate("--chat", CHAT, "--max-tokens", 40, "--mtp", k) for k in (0, 2))
    for key in ("prompt_ids", "token_ids", "text", "finish_reason"):
        assert drafting[key] == plain[key]
    none, some = (one["usage"].pop("completion_tokens_details") for one in (plain, drafting))
    assert drafting["usage"] == plain["usage"]
    assert set(none.values()) == {0}
    stats = drafting["stats"]
    assert some["accepted_prediction_tokens"] == stats["accepted_tokens"] > 0
    assert sum(some.values()) == stats["draft_tokens"]


def test_a_repeated_prompt_is_reported_as_cached(
    capsys: pytest.CaptureFixture[str], generate: Generate, tmp_path: Path
) -> None:
    """One sequence at a time, so that the second request finds what the first one left."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "One two three four five six."}\n' * 2)
    flags = ("--requests", path, "--max-tokens", 1, "--sequences", 1, "--page-tokens", 4)
    first, again = (result["usage"] for result in generate(*flags)["results"])
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert cached == (again["prompt_tokens"] - 1) // 4 * 4 > 0
    assert cli.main(["generate", *map(str, flags)]) == 0
    total = 2 * again["prompt_tokens"]
    assert f"nrank: {cached} of {total} prompt tokens were cached\n" in capsys.readouterr().err
    assert cli.main(["generate", *map(str, flags), "--prefix-cache", "off"]) == 0
    assert "cached" not in capsys.readouterr().err


def test_requests_run_together_and_answer_in_order(generate: Generate, tmp_path: Path) -> None:
    prompt = generate("--chat", CHAT, "--max-tokens", 1)["prompt_ids"]
    lines = [
        {"prompt_ids": prompt},
        {"prompt": "The sum is", "max_tokens": 3, "ignore_eos": True},
        {"prompt_ids": prompt, "stop": ["6"], "max_tokens": 30},
        {"prompt_ids": prompt, "temperature": 0.9, "seed": 5},
        {"prompt_ids": prompt, "temperature": 0.9, "seed": 5},
        {"prompt_ids": prompt, "temperature": 0.9},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    answer = generate("--requests", path, "--max-tokens", 40)
    results = answer["results"]
    assert [len(r["prompt_ids"]) for r in results][2:] == [len(prompt)] * 4
    assert results[0]["text"] == COUNTED
    assert len(results[1]["token_ids"]) == 3
    assert results[2]["text"] == COUNTED[: COUNTED.index("6")]
    assert results[2]["finish_reason"] == "stop"
    assert results[3]["token_ids"] == results[4]["token_ids"]
    assert results[3]["seed"] == 5
    assert results[5]["seed"] >= 0, "a drawn seed is reported"
    assert "seed" not in results[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2 must be a JSON object, found a list"),
        ('{"prompt": "a", "prompt_ids": [1]}', "line 2 needs either prompt or prompt_ids"),
        ("{}", "line 2 needs either prompt or prompt_ids"),
        ('{"prompt": 3}', "line 2: prompt must be a string, found 3"),
        ('{"prompt_ids": [1.5]}', "line 2: prompt_ids must be a list of whole numbers"),
        ('{"prompt_ids": [true]}', "line 2: prompt_ids must be a list of whole numbers"),
        ('{"prompt_ids": false}', "line 2: prompt_ids must be a list of whole numbers"),
        ('{"prompt_ids": [1], "stop": [1, null]}', "line 2: stop must be a string or a list of"),
        ('{"prompt_ids": [1], "stop": [["a"]]}', 'list of strings, found [["a"]]'),
        ('{"prompt_ids": [1], "stop": {"a": 1}}', "line 2: stop must be a string or a list of"),
        ('{"prompt_ids": [1], "stop": ["a", ""]}', "line 2 has an empty stop string"),
        ('{"prompt_ids": [1], "seed": 1.5}', "line 2: seed must be a whole number, found 1.5"),
        ('{"prompt_ids": [1], "temperature": "0"}', 'temperature must be a number, found "0"'),
        ('{"prompt_ids": [1], "temperature": NaN}', "line 2 has temperature nan"),
        ('{"prompt_ids": [1], "ignore_eos": 1}', "line 2: ignore_eos must be true or false"),
        ('{"prompt_ids": []}', "line 2"),
        (
            '{"prompt_ids": [1], "max_tokens": true}',
            "max_tokens must be a whole number, found true",
        ),
        ('{"prompt_ids": [1], "max_token": 3}', "line 2: unknown key 'max_token'"),
        ('{"prompt_ids": [1], "max_tokens": 40000}', "line 2 has 1 tokens and asks for 40000"),
        ('{"prompt_ids": [9999]}', "line 2 has token id 9999"),
    ],
)
def test_a_bad_request_names_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, expected: str
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt_ids": [1]}\n' + line)
    assert cli.main(["generate", "--requests", str(path)]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flags", [("--chat", "hi"), ("--prompt-ids", "5,6")])
@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{}"), ("chat_template.jinja", "{% for x in %}")]
)
def test_a_broken_tokenizer_or_template_is_refused_before_the_engine_starts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    embedded_model_dir: Path,
    flags: tuple[str, str],
    name: str,
    content: str,
) -> None:
    for path in embedded_model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).write_text(content)
    monkeypatch.setattr("rank_worker.launch.launch_engine", None)  # a start would be an error
    assert cli.main(["generate", "--model", str(tmp_path), *flags]) == 2
    err = capsys.readouterr().err
    assert name in err
    assert err.count("\n") == 1


def test_ids_in_and_out_need_neither_ray_nor_a_tokenizer() -> None:
    blocked = ["ray", "transformers", "tokenizers", "jinja2", "pydantic", "fastapi", "yaml", "rich"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        "from deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["generate", "--prompt-ids", "5,6", "--max-tokens", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"] is None
    assert len(answer["token_ids"]) == 2


@pytest.fixture(scope="module")
def limits(embedded_model_dir: Path) -> ModelLimits:
    return ModelLimits.read(EngineConfig(model_dir=str(embedded_model_dir)))


def answer_to(limits: ModelLimits, text: str, stop: tuple[str, ...]) -> Answer:
    token_ids = limits.tokenizer.encode(text)
    job = Job((1,), 64, 0.0, None, stop, False)
    result = GenerationResult("r", token_ids, FinishReason.LENGTH, 1, 0, 0, 0, 0.1, 0.2)
    return Answer.make(job, result, limits)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("one two three", ("four",), "one two three"),
        ("one two three", (" threefold",), "one two three"),
        ("Zürich 日本語 🙂 end", ("🙂",), "Zürich 日本語 "),
        ("aXbYc", ("bY",), "aX"),
    ],
)
def test_text_ends_before_the_first_stop_string(
    limits: ModelLimits, text: str, stop: tuple[str, ...], expected: str
) -> None:
    answer = answer_to(limits, text, stop)
    assert answer.text == expected
    matched = expected != text
    assert answer.finish_reason == ("stop" if matched else "length")
    whole = limits.tokenizer.decode(answer.token_ids)
    assert whole.startswith(expected)
    assert any(s in whole for s in stop) == matched, "ids end with the token that completed it"


def test_a_failed_request_is_printed_and_fails_the_command(
    limits: ModelLimits, capsys: pytest.CaptureFixture[str]
) -> None:
    from deploy.generate_command import report_errors

    result = GenerationResult(
        "request-0", (), FinishReason.ERROR, 1, 0, 0, 0, 0.0, 0.0, "logits were not finite"
    )
    answer = Answer.make(Job((1,), 64, 0.0, None, (), False), result, limits)
    assert answer.to_json()["error"] == "logits were not finite"
    assert answer.to_json()["finish_reason"] == "error"
    assert report_errors([answer]) == 1
    assert capsys.readouterr().err == "nrank: request-0: logits were not finite\n"
