"""Which letter an answer names, by two rules.

`strict` is AISBench's (GPQA_Simple_Eval_postprocess), for comparison with figures made by it.
`robust` reads what people write (bold, brackets, boxes, sentences, Chinese) and credits nothing
that was never finished. Neither falls back to any letter somewhere. Pure functions of text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

VERSION = 1  # a change of either rule makes another score: ledgers tell it

MACRO_DEPTH = 3
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_STRICT = re.compile(r"ANSWER\s*:\s*([A-D])", re.I)

_MACRO = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|mathtt)\s*\{([^{}]*)\}")
_EMPHASIS = re.compile(r"\*+|`+|__|~~")
_BLANKS = re.compile(r"\s+")
_WORD = r"\b(?:answer|option|choice)\b"
_LINK = (
    r"(?:[\s\"'\u201d)\]}]*(?:[:=]+>?|-*>)"  # answer: B, "answer": "B", <answer>B, answer => B
    r"|\s+(?:is|(?:would|should|must|will)\s+be)\b(?:\s+(?:therefore|thus|then|hence|clearly))?\s*:?"
    r"|[ \t]*\n)"  # a heading, the letter below
)
_CHINESE = r"(?<!不)(?:答案|选择|选)\s*(?:应为|应是|是|为)?\s*[:=]?|选项\s*(?:是|为|:)"
_OPENING = r"(?:[\s\"'\u201c\u2018(\[{$]|\\boxed\s*\{|\\[(\[])*"
_LETTER = r"([A-Da-d])(?![A-Za-z0-9_'\u2019=]|-\w)"  # no word, no formula, no D-glucose
_NAMED = re.compile(
    rf"(?:{_WORD}{_LINK}|{_CHINESE}){_OPENING}(?:(?:option|choice)\b{_OPENING})?{_LETTER}",
    re.I,
)
_BOXED = re.compile(r"\\boxed\s*\{[\s(\[\"'$]*([A-Da-d])[\s)\]\"'$.]*\}")
_CLOSERS = r"[)\]}\"'\u201d\u2019$.,:;。!\\]*"
_ENDS_LINE = re.compile(rf"{_CLOSERS}\s*?(?:\n|$)")
_LABELS = re.compile(r"[)\].:]")
_ANSWER = re.compile(r"answer|答案", re.I)
_SECOND = re.compile(
    rf"{_CLOSERS}\s*(?:,|/|&|(?i:\band\b|\bor\b)|和|或|、){_OPENING}(?:(?:option|choice)\s+)?"
    rf"[A-D](?![A-Za-z0-9_'\u2019=]|-\w)"
)
_LONE = re.compile(rf"[\s(\[\"'\u201c$]*([A-Da-d]){_CLOSERS}\s*")


def full_text(reasoning: str, content: str) -> str:
    """What the model wrote, for servers that split reasoning off: without content unclosed."""
    if not reasoning:
        return content
    return f"{THINK_OPEN}{reasoning}{THINK_CLOSE if content else ''}{content}"


def strict(text: str) -> str | None:
    """The last "answer: X" in the case it was written in; lower case never equals a key.

    Behind the end of reasoning where that was reached, else anywhere, as AISBench reads it.
    """
    found = _STRICT.findall(_behind_reasoning(text))
    return found[-1] if found else None


def robust(text: str) -> str | None:
    """The last letter A-D that the final answer names; None when it names none, or several."""
    answer = _behind_reasoning(text)
    if THINK_OPEN in answer:
        return None
    answer = _plain(answer)
    named = sorted(_mentions(answer), key=lambda mention: mention[0])
    if named:
        return named[-1][1]
    lone = _LONE.fullmatch(answer.strip().rpartition("\n")[2])
    return lone[1].upper() if lone else None


def _behind_reasoning(text: str) -> str:
    return text.rpartition(THINK_CLOSE)[2]


def _plain(text: str) -> str:
    """Compatibility forms folded (full-width and bold letters), marks and text macros removed.

    Blanks become one: a model that loops writes thousands, which patterns would try in all ways.
    """
    text = _EMPHASIS.sub("", unicodedata.normalize("NFKC", text))
    for _ in range(MACRO_DEPTH):
        text = _MACRO.sub(r"\1", text)
    return _BLANKS.sub(lambda run: "\n" if "\n" in run[0] else " ", text)


def _mentions(text: str) -> Iterator[tuple[int, str | None]]:
    """Position and letter of each; None is a mention of several letters."""
    for found in _NAMED.finditer(text):
        if _counts(text, found):
            several = _SECOND.match(text, found.end())
            yield found.start(1), None if several else found[1].upper()
    for found in _BOXED.finditer(text):
        yield found.start(1), found[1].upper()


def _counts(text: str, found: re.Match[str]) -> bool:
    """A lower-case letter ends its line; so does one below its marker, or "answer" labels it.

    Else it is an article, the first word of a sentence, or the first of the options in a list.
    """
    ends_line = _ENDS_LINE.match(text, found.end()) is not None
    if found[1].islower():
        return ends_line
    if ends_line or "\n" not in found[0]:
        return True
    return bool(_ANSWER.match(found[0]) and _LABELS.match(text, found.end()))
