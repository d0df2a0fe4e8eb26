"""Text to ids and back: pieces equal the whole, invalid bytes are replaced, torch stays out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from cluster.model_card import load_model_card
from cluster.tokens import Detokenizer, Tokenizer
from placement.errors import CheckpointError, ClientError

TEXT = "Plain, café, 中文字符, עִבְרִית, 👍🏽 👩‍👩‍👧 é\n\ttab"


def pieces(tokenizer: Tokenizer, ids: list[int] | tuple[int, ...]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.vocabulary)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 4095), max_size=40))
@settings(max_examples=300, deadline=None)
def test_joined_pieces_equal_the_librarys_decoding(
    tokenizer: Tokenizer, fast: FastTokenizer, ids: list[int]
) -> None:
    expected = fast.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == expected
    assert tokenizer.decode(ids, skip_special=False) == fast.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def fast(embedded_model_dir: Path) -> FastTokenizer:
    return FastTokenizer.from_file(str(embedded_model_dir / "tokenizer.json"))


def test_a_character_split_over_tokens_comes_whole(
    tokenizer: Tokenizer, byte_ids: Callable[[bytes], tuple[int, ...]]
) -> None:
    got = pieces(tokenizer, byte_ids(TEXT.encode()))
    assert "".join(got) == TEXT
    assert "\ufffd" not in "".join(got)
    assert [piece for piece in got if piece] == list(TEXT)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\xe4b", ["a", "", "\ufffdb", ""]),
        (b"\xe4\xe4a", ["", "\ufffd", "\ufffda", ""]),
        (b"\xff\xfe!", ["\ufffd", "\ufffd", "!", ""]),
        (b"x\xf0\x9f\x91", ["x", "", "", "", "\ufffd"]),
        (b"\xef\xbf\xbd.", ["", "", "\ufffd", ".", ""]),
    ],
)
def test_bytes_that_are_no_character_are_replaced_as_soon_as_known(
    tokenizer: Tokenizer,
    byte_ids: Callable[[bytes], tuple[int, ...]],
    data: bytes,
    expected: list[str],
) -> None:
    assert pieces(tokenizer, byte_ids(data)) == expected


def test_thinking_tags_show_only_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a</think>b<|im_end|>")
    shown = Detokenizer(tokenizer.vocabulary, show_think_tags=True)
    assert "".join(map(shown.push, ids)) == "<think>a</think>b"
    assert tokenizer.decode(ids) == "ab"


def test_padding_rows_of_the_vocabulary_give_no_text(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [65, 10**6, -1]) == [tokenizer.decode([65]), "", "", ""]


def test_ids_and_prompts_equal_transformers(tokenizer: Tokenizer, embedded_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(embedded_model_dir)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "<|im_end|> and more"},
    ]
    for options in ({}, {"enable_thinking": False}):
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **options
        )
        assert list(tokenizer.encode_chat(messages, options)) == expected
    assert list(tokenizer.encode(TEXT)) == reference.encode(TEXT)


def test_unpaired_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ClientError, match="unpaired surrogate at position 1"):
        tokenizer.encode("a\ud800")


def test_template_options_cannot_replace_the_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(ClientError, match="can't set 'tools'"):
        tokenizer.render([{"role": "user", "content": "x"}], {"tools": []})


def test_a_directory_without_a_usable_tokenizer_is_named(
    tmp_path: Path, embedded_model_dir: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    other = json.loads((embedded_model_dir / "tokenizer.json").read_text())
    other["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match="Metaspace"):
        Tokenizer.load(tmp_path)


@pytest.fixture
def copy(tmp_path: Path, embedded_model_dir: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (embedded_model_dir / name).is_file():
            (tmp_path / name).write_bytes((embedded_model_dir / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", b"{", r"tokenizer\.json is not valid JSON"),
        ("tokenizer.json", b"[]", r"tokenizer\.json must hold a JSON object"),
        ("tokenizer.json", b"\xff", r"tokenizer\.json can't be read"),
        ("tokenizer.json", b'{"decoder": {"type": "ByteLevel"}}', r"tokenizer\.json is no tok"),
        ("tokenizer.json", b'{"decoder": {"type": "Sequence"}}', r"tokenizer\.json: decoder"),
        ("chat_template.jinja", b"a\n{% for x in %}", r"chat_template\.jinja: .*in line 2"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja can't be read"),
    ],
)
def test_a_broken_file_is_named(copy: Path, name: str, content: bytes, expected: str) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        Tokenizer.load(copy)


@pytest.mark.parametrize(
    "template", ["{{ x", 3, [{"name": "default", "template": "{% if %}"}], [{"name": "default"}]]
)
def test_a_template_in_the_tokenizers_config_is_checked_too(copy: Path, template: object) -> None:
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: the chat template"):
        Tokenizer.load(copy)


@pytest.mark.parametrize(
    ("content", "expected"),
    [('{"temperature": "hot"}', "temperature must be"), ('{"eos_token_id": ["a"]}', "eos_token")],
)
def test_sampling_defaults_that_cannot_be_are_named(
    tmp_path: Path, embedded_model_dir: Path, content: str, expected: str
) -> None:
    (tmp_path / "config.json").write_bytes((embedded_model_dir / "config.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=expected):
        load_model_card(tmp_path, "m", 0)


def test_a_model_without_template_has_no_chat(tmp_path: Path, embedded_model_dir: Path) -> None:
    source = embedded_model_dir / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    plain = Tokenizer.load(tmp_path)
    assert not plain.has_template
    with pytest.raises(ClientError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "x"}])


def test_the_edge_imports_neither_torch_nor_ray(embedded_model_dir: Path) -> None:
    code = (
        "import sys; from cluster.ingress import make_app; from cluster.metrics import METRICS; "
        "from cluster.tokens import Tokenizer; "
        f"Tokenizer.load({str(embedded_model_dir)!r}).encode_chat([{{'role': 'user', "
        "'content': 'hi'}]); print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
