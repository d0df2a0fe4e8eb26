"""Answers to the byte: what the model says token by token, and what clients have to see of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.golden.scripted_checkpoint import THINK_CLOSE, THINK_OPEN, Piece, Script

THUMB = "👍".encode()  # 4 bytes
BROWN_THUMB = "👍🏽".encode()  # two characters of 4 bytes, shown as one
FAMILY = "👩‍👩‍👧".encode()  # 3 characters of 4 bytes, joiners of 3 between them


@dataclass(frozen=True)
class Case:
    """A script, a request for it, and what is seen: of /v1/completions `raw`, of chats the rest."""

    name: str
    pieces: tuple[Piece, ...]
    content: str
    tokens: int  # of the answer, the end token or those of a stop string with it
    reasoning: str = ""
    raw: str | None = None  # None: as `content`
    finish: str = "stop"
    opening: str = ""  # what the prompt ends with
    fields: dict[str, Any] = field(default_factory=dict)  # of the request

    @property
    def script(self) -> Script:
        return Script(f"<|{self.name}|>{self.opening}", self.pieces)

    @property
    def raw_text(self) -> str:
        return self.content if self.raw is None else self.raw


def text(*parts: str | bytes) -> tuple[bytes, ...]:
    """One token a part; none of them special."""
    return tuple(part.encode() if isinstance(part, str) else part for part in parts)


def cut(data: bytes, *sizes: int) -> tuple[bytes, ...]:
    """`data` in tokens of the given sizes."""
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    assert not data, "the sizes don't add up"
    return tuple(parts)


def word(index: int) -> str:
    return f"w{index} "


def stops(*strings: str, **more: Any) -> dict[str, Any]:
    return {"stop": list(strings), **more}


STOPS = (
    Case("four", text("So: ", "S", "T", "O", "P", " no"), "So: ", 5, fields=stops("STOP")),
    Case("two", text("one ST", "OP two", " no"), "one ", 2, fields=stops("STOP")),
    Case("alone", text("STOP", " no"), "", 1, fields=stops("STOP")),
    Case("overlap", text("aa", "a", "a", "b", "z"), "aa", 4, fields=stops("aab")),
    Case("fails", text("ab", "aba", "bx", "!"), "abababx!", 5, fields=stops("ababc")),
    Case("nested", text("xab", "cd", "!"), "xa", 2, fields=stops("abcd", "bc")),
    Case("longer", text("q wx", "yz", "!"), "q ", 2, fields=stops("yz", "wxyz")),
    Case("second", text("x ST", "AR", "T no"), "x ST", 3, fields=stops("STOP", "ART")),
    Case("turn", text("1", "\n", "2\n", "\n", "Us", "er:", " no"), "1\n2", 6,
         fields=stops("\n\nUser:")),
    Case("emoji-stop", (*text("ok "), *cut(BROWN_THUMB, 2, 2, 3, 1), *text("no")), "ok ", 5,
         fields=stops("👍🏽")),
    Case("half-stop", (*text("ok "), *cut(THUMB, 3, 1), *text("!")), "ok 👍!", 5,
         fields=stops("👍🏽")),
    Case("in-last", text("a", "ST", "OP no"), "a", 3, fields=stops("STOP", max_tokens=3)),
    Case("end-name", text("a", "b"), "ab", 3, fields=stops("<|im_end|>")),
    Case("before-byte", text("a", b"\xe4", "STOP"), "a\ufffd", 3, fields=stops("STOP")),
)  # fmt: skip
HELD_AT_THE_END = (
    Case("prefix", text("ends in ST", "O"), "ends in STO", 3, fields=stops("STOP")),
    Case("prefixes", text("a\n", "\nST", "\n"), "a\n\nST\n", 4, fields=stops("STOP", "\n\nX")),
    Case("prefix-half", text("ST", b"\xe4"), "ST\ufffd", 3, fields=stops("STOP")),
    Case("prefix-cut", text("a", "ST", "OP"), "aST", 2, finish="length",
         fields=stops("STOP", max_tokens=2)),
    Case("prefix-thought", text("<th", "ink>hm", "</thi", "nk>", "ok ST"), "ok ST", 6,
         reasoning="hm", raw="<think>hm</think>ok ST", fields=stops("STOP")),
    Case("prefix-in-thought", text("<think>h", "m ST"), "", 3,
         reasoning="hm ST", raw="<think>hm ST", fields=stops("STOP")),
)  # fmt: skip
CHARACTERS = (
    Case("one-three", cut(b"a" + THUMB + b"b", 1, 1, 3, 1), "a👍b", 5),
    Case("two-two", cut(b"a" + THUMB + b"b", 1, 2, 2, 1), "a👍b", 5),
    Case("bytes", cut(BROWN_THUMB, *[1] * 8), "👍🏽", 9),
    Case("joined", cut(FAMILY, 3, 3, 3, 3, 3, 3), FAMILY.decode(), 7),
    Case("cjk", cut("中文字".encode(), 1, 2, 2, 2, 2), "中文字", 6),
    Case("accent", cut("ne\u0301e\u0308".encode(), 1, 1, 1, 1, 2, 1), "ne\u0301e\u0308", 7),
    Case("mark", cut(b"\xef\xbb\xbfa", 2, 2), "\ufeffa", 3),
)
BROKEN = (
    Case("lone", text("a", b"\xe4", "bc", "d"), "a\ufffdbcd", 5),
    Case("lones", text("a", b"\xff", b"\x80", b"\xc0\xaf", "b"), "a\ufffd\ufffd\ufffd\ufffdb", 6),
    Case("restart", (b"\xf0\x9f", *cut(THUMB, 2, 2), b"!"), "\ufffd👍!", 5),
    Case("surrogate", (b"\xed\xa0", b"\x80", b"!"), "\ufffd\ufffd\ufffd!", 4),
    Case("ends-half", (b"x", *cut(THUMB[:3], 2, 1)), "x\ufffd", 4),
    Case("only-half", (THUMB[:1],), "\ufffd", 2),
    Case("many-half", (b"\xe4", b"\xe4\xb8", b"\xf0\x9f\x91"), "\ufffd\ufffd\ufffd", 4),
)
TAGS = (
    Case("special-tags", (THINK_OPEN, *text("wh", "y"), THINK_CLOSE, *text("yes")), "yes", 6,
         reasoning="why", raw="whyyes"),
    Case("split-tags", text("<", "think", ">\n", "why", "\n</", "th", "ink", ">\n\n", "yes"), "yes",
         10, reasoning="why", raw="<think>\nwhy\n</think>\n\nyes"),
    Case("opened", text("hm", "</thi", "nk>", "\n", "yes"), "yes", 6,
         reasoning="hm", raw="hm</think>\nyes", opening=THINK_OPEN),
    Case("closed", text("<think>as text</thi", "nk>"), "<think>as text</think>", 3,
         opening=THINK_CLOSE),
    Case("never-closed", text("<think>cut </thi"), "", 2,
         reasoning="cut </thi", raw="<think>cut </thi"),
    Case("no-tag", text("<th", "in"), "<thin", 3),
    Case("stop-in-thought", text("<think>a.", "ST", "OP</think>", "b"), "", 3,
         reasoning="a.", raw="<think>a.", fields=stops("STOP")),
    Case("stop-at-tag", text("<think>hm", "</th", "ink>", "b"), "", 3,
         reasoning="hm", raw="<think>hm", fields=stops("</think>")),
    Case("half-in-thought", text("<think>a", THUMB[:2], "</thi", "nk>b"), "b", 5,
         reasoning="a\ufffd", raw="<think>a\ufffd</think>b"),
)  # fmt: skip
MARKUP = (
    Case("tool", text("<tool_", 'call>\n{"name": "f", ', '"arguments": {}}', "\n</tool_call>"),
         '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', 5),
    Case("framing", text("data: [DONE]\n\n", "\r\n: x\r", '\x00"\\', "\x85\u2028\u2029", "\x1c"),
         'data: [DONE]\n\n\r\n: x\r\x00"\\\x85\u2028\u2029\x1c', 6),
)  # fmt: skip
CASES = {
    case.name: case for case in (*STOPS, *HELD_AT_THE_END, *CHARACTERS, *BROKEN, *TAGS, *MARKUP)
}

DRAFTS = 3  # a step, where there are any: a round gives up to four tokens
# The end token at every place of the first rounds, and as the very first token.
ENDS = tuple(
    Script(f"<|end-{count}|>", text(*map(word, range(count)))) for count in range(2 * DRAFTS + 4)
)
# Cut anywhere: inside characters, inside a stop that never completes, inside a round.
PARTS = Script(
    "<|parts|>",
    (
        *text("a", "ST", "O", "x"), *cut(THUMB, 1, 3), *text("b"), *cut("中文".encode(), 1, 3, 2),
        *text(b"\xe4", "c", "S"), *cut(FAMILY, 5, 4, 9), *text("end ST"),
    ),
)  # fmt: skip
PARTS_STOP = "STOP"
# The draft head's guesses of these places are wrong; the rest of them right.
MISSES = Script(
    "<|misses|>",
    text(*(f"{index}." for index in range(25))),
    frozenset({1, 4, 5, 11, 12, 13, 16, 21, 25}),
)
SCRIPTS = (*(case.script for case in CASES.values()), *ENDS, PARTS, MISSES)
