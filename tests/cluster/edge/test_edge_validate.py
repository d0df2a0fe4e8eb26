"""What a body may say: defaults, limits, refusals that name the field, context arithmetic."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.model_card import ModelCard, SamplingDefaults, load_model_card
from cluster.protocol import IGNORED_FIELDS, UNSUPPORTED_FIELDS, ChatBody, CompletionBody
from cluster.reasoning import Section
from cluster.tokens import Tokenizer
from cluster.validate import parse_json, valid_chat, valid_completion
from placement.errors import CheckpointError, ClientError, ErrorKind

MODEL = "tiny-flash-next"
USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi there"}


def refusal(body: dict[str, Any], card: ModelCard, tokenizer: Tokenizer) -> ClientError:
    validate = valid_chat if "messages" in body else valid_completion
    with pytest.raises(ClientError) as caught:
        validate(parse_json(json.dumps(body).encode()), card, tokenizer)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("n", 0),
        ("n", 65),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_completion_tokens", 0),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", 1),
        ("priority", "1"),
        ("priority", 0.5),
        ("priority", True),
        ("priority", [1]),
        ("priority", 2**63),
        ("messages", []),
        ("messages", "hi"),
        ("chat_template_kwargs", {"messages": []}),
        ("logprobs", 1),
        ("top_logprobs", 2),
        ("top_logprobs", 21),
        ("logit_bias", {"1": 5}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.2),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("best_of", 2),
        ("min_tokens", 3),
    ],
)
def test_a_bad_value_is_refused_by_name(
    card: ModelCard, tokenizer: Tokenizer, field: str, value: object
) -> None:
    error = refusal({**CHAT, field: value}, card, tokenizer)
    assert error.param == field
    assert field in str(error)


@pytest.mark.parametrize(("field", "value"), [("suffix", "x"), ("top_logprobs", 2)])
def test_completion_only_features_are_refused_by_name(
    card: ModelCard, tokenizer: Tokenizer, field: str, value: object
) -> None:
    error = refusal({**TEXT, field: value}, card, tokenizer)
    assert (error.param, error.code) == (field, "unsupported_parameter")


def test_off_values_nulls_and_ignored_fields_change_nothing(
    card: ModelCard, tokenizer: Tokenizer
) -> None:
    off = {
        "logprobs": False,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "best_of": 1,
        "echo": False,
        "repetition_penalty": 1.0,
    }
    extra = dict.fromkeys(IGNORED_FIELDS, "x")
    supported = set(ChatBody.model_fields) - {"model", "messages"}
    nulls = dict.fromkeys(supported | set(UNSUPPORTED_FIELDS) - set(off))
    plain = valid_chat({**CHAT, "seed": 1}, card, tokenizer)
    raw = parse_json(json.dumps({**CHAT, **nulls, **off, **extra, "seed": 1}).encode())
    assert valid_chat(raw, card, tokenizer) == plain


@pytest.mark.parametrize("body", [CHAT, {**TEXT, "prompt": ["a", "b"]}])
@pytest.mark.parametrize(("given", "expected"), [({}, 0), ({"priority": -3}, -3)])
def test_every_choice_has_the_priority_of_its_request(
    card: ModelCard,
    tokenizer: Tokenizer,
    body: dict[str, Any],
    given: dict[str, int],
    expected: int,
) -> None:
    validate = valid_chat if "messages" in body else valid_completion
    valid = validate({**body, **given, "n": 2}, card, tokenizer)
    made = [valid.engine_request("r", choice, 1.0) for choice in range(valid.num_choices)]
    assert {one.priority for one in made} == {expected}


def test_fields_without_effect_are_documented() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    section = readme.partition("Without effect are only")[2].partition(". ")[0]
    assert set(re.findall(r"`(\w+)`", section)) == IGNORED_FIELDS


def test_every_known_field_has_one_fate() -> None:
    working = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    assert not working & IGNORED_FIELDS
    everywhere = set(ChatBody.model_fields) & set(CompletionBody.model_fields)
    assert not everywhere & set(UNSUPPORTED_FIELDS)
    assert working & set(UNSUPPORTED_FIELDS) == {"echo", "top_logprobs"}, "of one route only"
    assert not IGNORED_FIELDS & set(UNSUPPORTED_FIELDS)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b'"x"', b'{"model": NaN}', b"\xff\xfe", b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ClientError, match="body") as caught:
        parse_json(body)
    assert caught.value.code == "invalid_json"


def test_the_model_is_checked_before_anything_else(card: ModelCard, tokenizer: Tokenizer) -> None:
    error = refusal({"model": "gpt-9", "messages": [], "n": 0}, card, tokenizer)
    assert (error.kind, error.param) == (ErrorKind.NOT_FOUND, "model")
    assert refusal({"messages": [USER]}, card, tokenizer).param == "model"


@pytest.mark.parametrize(
    ("prompt", "counts"),
    [
        ("hi there", 1),
        (["hi", "there", "hi"], 3),
        ([1, 2, 3], 1),
        ([[1], [2, 3]], 2),
    ],
)
def test_the_four_shapes_of_a_prompt(
    card: ModelCard, tokenizer: Tokenizer, prompt: Any, counts: int
) -> None:
    valid = valid_completion({**TEXT, "prompt": prompt}, card, tokenizer)
    assert len(valid.prompts) == counts
    assert all(item.token_ids and item.section is None for item in valid.prompts)


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "a"], [4096], [-1], [True], {"a": 1}, 5])
def test_other_prompts_are_refused(card: ModelCard, tokenizer: Tokenizer, prompt: Any) -> None:
    assert refusal({**TEXT, "prompt": prompt}, card, tokenizer).param == "prompt"


def test_choices_of_many_prompts_are_bounded(card: ModelCard, tokenizer: Tokenizer) -> None:
    error = refusal({**TEXT, "prompt": ["a"] * 33, "n": 2}, card, tokenizer)
    assert error.param == "n"
    assert "64" in str(error)


def test_the_context_holds_prompt_and_answer(card: ModelCard, tokenizer: Tokenizer) -> None:
    limit = card.context_tokens
    fits = valid_completion({**TEXT, "prompt": [5] * (limit - 1)}, card, tokenizer)
    assert fits.max_tokens == (1,)
    for length in (limit, limit + 1):
        error = refusal({**TEXT, "prompt": [5] * length}, card, tokenizer)
        assert error.kind is ErrorKind.CONTEXT_LENGTH
        assert str(length) in str(error)
        assert str(limit) in str(error)
    exact = valid_completion({**TEXT, "prompt": [5] * 6, "max_tokens": limit - 6}, card, tokenizer)
    assert exact.max_tokens == (limit - 6,)
    error = refusal({**TEXT, "prompt": [5] * 6, "max_tokens": limit - 5}, card, tokenizer)
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "max_tokens")


def test_max_completion_tokens_wins(card: ModelCard, tokenizer: Tokenizer) -> None:
    body = {**CHAT, "max_tokens": 3, "max_completion_tokens": 7}
    assert valid_chat(body, card, tokenizer).max_tokens == (7,)
    assert valid_chat({**CHAT, "max_tokens": 3}, card, tokenizer).max_tokens == (3,)


def test_unnamed_sampling_comes_from_generation_config(
    card: ModelCard, tokenizer: Tokenizer
) -> None:
    plain = valid_chat(CHAT, card, tokenizer).sampling
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (0.7, 20, 0.8, 0.0)
    body = {**CHAT, "temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1}
    named = valid_chat(body, card, tokenizer).sampling
    assert (named.temperature, named.top_k, named.top_p, named.min_p) == (0, 0, 0.5, 0.1)


def test_seeds_are_kept_or_drawn_and_choices_share_them(
    card: ModelCard, tokenizer: Tokenizer
) -> None:
    drawn = {valid_chat(CHAT, card, tokenizer).sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 2**63 for seed in drawn)
    valid = valid_completion({**TEXT, "prompt": ["a", "b"], "n": 2, "seed": 7}, card, tokenizer)
    requests = [valid.engine_request("r", index, 1.0) for index in range(4)]
    assert {request.sampling.seed for request in requests} == {7}
    assert [request.sampling.choice for request in requests] == [0, 1, 0, 1]
    assert len({request.request_id for request in requests}) == 4
    assert requests[0].prompt_ids == requests[1].prompt_ids != requests[2].prompt_ids


def test_end_tokens_are_the_models_unless_ignored(card: ModelCard, tokenizer: Tokenizer) -> None:
    body = {**CHAT, "stop_token_ids": [9]}
    assert valid_chat(body, card, tokenizer).end_token_ids == (9, 4089, 4087)
    ignoring = valid_chat({**body, "ignore_eos": True}, card, tokenizer)
    assert ignoring.end_token_ids == (9,)
    asked = ignoring.engine_request("r", 0, 0.0)
    assert asked.stop_token_ids == (9,)
    assert not asked.ignore_eos, "the engine would pass over the request's own stop tokens, too"


def test_thinking_can_be_switched_off_in_both_places(card: ModelCard, tokenizer: Tokenizer) -> None:
    def section(**fields: Any) -> Section | None:
        return valid_chat({**CHAT, **fields}, card, tokenizer).prompts[0].section

    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    assert section() is Section.UNDECIDED
    assert section(**off) is Section.CONTENT
    assert section(chat_template_kwargs=off) is Section.CONTENT
    assert section(**off, chat_template_kwargs=on) is Section.UNDECIDED


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "bot", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls"),
        (["hi"], "messages[0]"),
    ],
)
def test_a_bad_message_is_refused_by_place(
    card: ModelCard, tokenizer: Tokenizer, messages: list[Any], param: str
) -> None:
    assert refusal({"model": MODEL, "messages": messages}, card, tokenizer).param == param


def test_parts_are_joined_and_developer_is_system(card: ModelCard, tokenizer: Tokenizer) -> None:
    def ids(messages: list[Any]) -> tuple[int, ...]:
        valid = valid_chat({"model": MODEL, "messages": messages}, card, tokenizer)
        return valid.prompts[0].token_ids

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ids([{"role": "user", "content": parts}]) == ids([{"role": "user", "content": "a\nb"}])
    developer = ids([{"role": "developer", "content": "s"}, USER])
    assert developer == ids([{"role": "system", "content": "s"}, USER])
    cut_answer = {"role": "assistant", "content": None, "reasoning": "hm"}
    assert ids([USER, cut_answer, USER])


def test_earlier_tool_calls_reach_the_template(card: ModelCard, tokenizer: Tokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    valid = valid_chat({"model": MODEL, "messages": messages}, card, tokenizer)
    text = tokenizer.decode(valid.prompts[0].token_ids, skip_special=False)
    assert '{"name": "f", "arguments": {"x": 1}}' in text
    assert "<tool_response>\n42" in text


def test_a_templates_own_refusal_is_the_clients_error(
    tmp_path: Path, embedded_model_dir: Path, card: ModelCard
) -> None:
    source = embedded_model_dir / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    (tmp_path / "chat_template.jinja").write_text(template)
    strict = Tokenizer.load(tmp_path)
    body = {"model": MODEL, "messages": [{"role": "system", "content": "s"}]}
    error = refusal(body, card, strict)
    assert error.param == "messages"
    assert "user first" in str(error)


def test_greedy_generation_config_means_temperature_zero(
    tmp_path: Path, embedded_model_dir: Path
) -> None:
    (tmp_path / "config.json").write_bytes((embedded_model_dir / "config.json").read_bytes())
    assert load_model_card(tmp_path, "m", 0).defaults == SamplingDefaults()
    assert load_model_card(tmp_path, "m", 0).eos_token_ids == (4087,)
    generation = {"do_sample": False, "temperature": 0.7, "top_k": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    card = load_model_card(tmp_path, "m", 0)
    assert card.defaults == replace(SamplingDefaults(), temperature=0.0, top_k=5)
    assert card.context_tokens == 32768


def test_a_config_without_limits_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: can't be read"):
        load_model_card(tmp_path, "m", 0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        load_model_card(tmp_path, "m", 0)
