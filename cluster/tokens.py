"""Text to token ids and back: tokenizer, chat template, incremental detokenisation.

Owns the model directory's tokenizer files. Knows nothing of requests or HTTP, and never imports
torch (transformers' own tokenizer classes do; its template renderer and `tokenizers` don't).
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.normalizers import NFC
from transformers.utils.chat_template_utils import render_jinja_template

from placement.errors import CheckpointError, ClientError
from placement.headers import require_regular

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_TEMPLATE_FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError,
)  # fmt: skip
_RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "messages", "conversations", "tools", "documents", "chat_template",
        "add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask",
    }
)  # fmt: skip


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE alphabet: printable bytes stand for themselves, the rest for U+0100 on.

    Source: GPT-2's `bytes_to_unicode`, the alphabet of every ByteLevel tokenizer.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): byte for byte in printable}
    chars.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return chars


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of each token id, and which ids are special or one of the two thinking tags."""

    token_bytes: tuple[bytes, ...]  # [vocab], b"" for an unused id
    special_ids: frozenset[int]
    think_ids: frozenset[int]

    def __len__(self) -> int:
        return len(self.token_bytes)


class Detokenizer:
    """Turns ids of one sequence into text as they come.

    The joined pieces and the final `flush()` equal the decoding of all ids at once: a character
    split over tokens waits for its last byte, a byte that can't be part of one becomes U+FFFD as
    soon as that is known. Special ids give no text; thinking tags do while `show_think_tags`.
    """

    def __init__(
        self, vocabulary: Vocabulary, skip_special: bool = True, show_think_tags: bool = False
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self.show_think_tags = show_think_tags
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; ids outside the vocabulary (padding rows) give none."""
        vocabulary = self._vocabulary
        if self._hides(token_id) or not 0 <= token_id < len(vocabulary):
            return ""
        return self._utf8.decode(vocabulary.token_bytes[token_id])

    def flush(self) -> str:
        """U+FFFD when the sequence ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _hides(self, token_id: int) -> bool:
        if self.show_think_tags and token_id in self._vocabulary.think_ids:
            return False
        return self._skip_special and token_id in self._vocabulary.special_ids


class Tokenizer:
    """Tokenizer and chat template of one model directory. Safe to share between threads."""

    def __init__(
        self, fast: FastTokenizer, vocabulary: Vocabulary, template: str, names: Mapping[str, str]
    ) -> None:
        self._fast = fast
        self._bytes_per_token = _bytes_per_token(fast, vocabulary)
        self._template = template
        self._special_names = dict(names)
        self.vocabulary = vocabulary

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of `model_dir`.

        Raises CheckpointError naming the file when one is missing, broken or of an unsupported
        kind, or holds a template that does not compile.
        """
        directory = Path(model_dir)
        fast = _read_fast(directory / "tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json") or {}
        template = _read_template(directory, config)
        return cls(fast, _vocabulary(fast), template, _special_names(config))

    @property
    def has_template(self) -> bool:
        return bool(self._template)

    @property
    def special_ids(self) -> frozenset[int]:
        return self.vocabulary.special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`; ClientError when it isn't valid Unicode.

        By the batch form, which leaves other threads their turn while it works.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ClientError(
                f"the text has an unpaired surrogate at position {error.start}; send valid Unicode"
            ) from error
        encoded = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoded[0].ids)

    def least_tokens(self, text: str) -> int:
        """How many tokens `text` has at least, told without tokenising it.

        No token covers more bytes than the longest one has. 0 where the text is changed first.
        """
        if not self._bytes_per_token or not is_normalized("NFC", text):
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._bytes_per_token)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of a whole sequence, the same that a Detokenizer gives piece by piece."""
        detokenizer = Detokenizer(self.vocabulary, skip_special)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt text of a chat; `options` reach the template as variables.

        Raises ClientError with the template's own message when it refuses the messages.
        """
        options = options or {}
        if reserved := sorted(_RESERVED_TEMPLATE_NAMES & set(options)):
            raise ClientError(
                f"chat_template_kwargs can't set {reserved[0]!r}; remove it",
                param="chat_template_kwargs",
            )
        if not self._template:
            raise ClientError(
                "this model has no chat template; use /v1/completions", code="no_chat"
            )
        try:
            rendered: Any = render_jinja_template(  # (texts, assistant spans)
                conversations=[[dict(message) for message in messages]],
                chat_template=self._template,
                add_generation_prompt=True,
                **{**self._special_names, **options},
            )
        except _TEMPLATE_FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ClientError(
                f"the chat template refused the messages: {reason}", param="messages"
            ) from error
        return str(rendered[0][0])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a chat prompt: the template writes all special tokens itself."""
        return self.encode(self.render(messages, options), add_special_tokens=False)


def _read_fast(path: Path) -> FastTokenizer:
    content = _read_json(path)
    if content is None:
        raise CheckpointError(f"{path} is missing; nrank reads tokenizers in that format only")
    _require_byte_level(path, content.get("decoder"))
    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower type
        raise CheckpointError(f"{path} is no tokenizer: {error}; copy the file again") from error


def _require_byte_level(path: Path, decoder: object) -> None:
    steps: list[object] = [decoder]
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        steps = decoder.get("decoders") or []
    kinds = [step.get("type") if isinstance(step, dict) else None for step in steps]
    if kinds != ["ByteLevel"]:
        raise CheckpointError(f"{path}: decoder {kinds} is not supported, only ByteLevel is")


def _vocabulary(fast: FastTokenizer) -> Vocabulary:
    """By id, as decoding looks them up: several ids may have one piece, and some ids have none."""
    byte_of = _byte_of_char()
    size = max(fast.get_vocab_size(), 1 + max(fast.get_vocab().values(), default=-1))
    pieces = [fast.id_to_token(index) or "" for index in range(size)]
    added = fast.get_added_tokens_decoder()
    return Vocabulary(
        token_bytes=tuple(_piece_bytes(piece, byte_of) for piece in pieces),
        special_ids=frozenset(index for index, token in added.items() if token.special),
        think_ids=frozenset(
            index for index, piece in enumerate(pieces) if piece in (THINK_OPEN, THINK_CLOSE)
        ),
    )


def _bytes_per_token(fast: FastTokenizer, vocabulary: Vocabulary) -> int:
    """The most bytes of a text in NFC that one token covers; 0 where there is no such number."""
    takes_space = any(one.lstrip or one.rstrip for one in fast.get_added_tokens_decoder().values())
    if takes_space or not isinstance(fast.normalizer, NFC | None):
        return 0
    return max(map(len, vocabulary.token_bytes), default=0)


def _piece_bytes(piece: str, byte_of: Mapping[str, int]) -> bytes:
    """As the ByteLevel decoder does: a piece with a character outside the alphabet is literal."""
    if all(char in byte_of for char in piece):
        return bytes(byte_of[char] for char in piece)
    return piece.encode("utf-8")


def _read_json(path: Path) -> dict[str, Any] | None:
    text = _read_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; copy the file again") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise CheckpointError(f"{path} must hold a JSON object, not {kind}; copy the file again")
    return value


def _read_text(path: Path) -> str | None:
    """The file's text, None when nothing of that name is there."""
    if not os.path.lexists(path):
        return None
    try:
        require_regular(str(path))
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror
        raise CheckpointError(f"{path} can't be read: {reason}; copy the file again") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} can't be read: {error}; copy the file again") from error


def _read_template(directory: Path, config: Mapping[str, Any]) -> str:
    """The chat template, compiled once; "" without one."""
    path = directory / "chat_template.jinja"
    template: Any = _read_text(path)
    if template is None:
        path = directory / "tokenizer_config.json"
        template = config.get("chat_template") or ""
    if isinstance(template, list):  # several named templates
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), "")
    if not isinstance(template, str):
        raise CheckpointError(f"{path}: the chat template must be text, not {template!r:.60}")
    _compile(path, template)
    return template


def _compile(path: Path, template: str) -> None:
    """The renderer compiles before it looks at conversations, and keeps what it compiled."""
    try:
        render_jinja_template(conversations=[], chat_template=template)
    except TemplateError as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise CheckpointError(
            f"{path}: the chat template does not compile: {error.message}{line}; correct it"
        ) from error


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Variables like `bos_token` that templates may use."""
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        if isinstance(value, dict):  # a serialised AddedToken
            value = value.get("content")
        if value:
            names[key] = str(value)
    return names
