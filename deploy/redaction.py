"""Takes secrets and prompts out of text and JSON before it leaves the machine.

Owns the rules. When in doubt something is removed: a report with a hole is better than a leak.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

REMOVED = "<removed>"
MIN_CHARACTERS = 6  # a shorter value of a variable would take ordinary words out of the text
# Of a variable, a key or a header whose value is a secret.
_SECRET_NAME = re.compile(
    r"token|key|secret|passw|pwd|passphrase|credential|authorization|cookie|signature", re.I
)
# Names with one of these words that are none: units, classes of errors, parts of models.
_HARMLESS_NAME = re.compile(
    r"(tokens|keys|tokenizers?(_\w+)?|Error|keyboard\w*)$|key_(value_)?heads?", re.I
)
WORKING_DIRECTORY = ("PWD", "OLDPWD")  # of a shell
PLACES = ("_PATH", "_FILE", "_DIR")  # where a secret is, which texts may say
# Of a field that holds what a user wrote, or what the model answered.
PRIVATE = frozenset(
    {
        "prompt", "prompts", "prompt_ids", "messages", "content", "text", "input", "input_value",
        "token_ids", "reasoning", "reasoning_content", "arguments", "stop",
    }
)  # fmt: skip
_PRIVATE_IN_TEXT = re.compile(
    r"""(\b(?:prompts?|messages)\b["']?\s*[:=]|\b(?:"""
    + "|".join(sorted(PRIVATE, key=len, reverse=True))
    + r""")\b["']?\s*[:=]\s*(?=["'\[{(])).*""",
    re.I,
)
# Headers and passphrases may be of several words: everything to the end of the line goes.
_LINE = re.compile(
    r"""((?:authorization|cookie|api-key|passw\w*|passphrase)["']?\s*[:=])(?!\s*<removed>).*""",
    re.I,
)
_NAMED = re.compile(
    r"""(?P<name>[\w.-]*(?:token|key|secret|passw|pwd|passphrase|credential|authorization"""
    r"""|cookie|signature)[\w.-]*)(?P<between>["']?\s*[:=]\s*)"""
    r"""(?P<value>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|"""
    r"""(?:(?:bearer|basic|token|digest)\s+)?[^\s,;&"'}\])]+)""",
    re.I,
)
_SHAPES = (
    # A key whose end, or whose begin, was cut off goes as well.
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    re.compile(r"\A.*-----END [A-Z ]*PRIVATE KEY-----", re.S),
    re.compile(r"\b(?:bearer|basic)\s+[\w.~+/=-]{6,}", re.I),
    re.compile(r"\bhf_\w{6,}"),
    re.compile(r"\b(?:sk|pk|rk)-[\w-]{8,}"),
    re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abeoprs]-)[\w-]{8,}"),
    re.compile(r"\bAKIA\w{8,}"),
    re.compile(r"\beyJ[\w-]{6,}\.[\w-]+\.[\w-]*"),
)
_URL_LOGIN = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s\"'<>]*@", re.I)
_DIGITS = re.compile(r"[\d._-]+")


def is_secret_name(name: str) -> bool:
    """Whether a value under this name has to go."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def names_a_secret(variable: str) -> bool:
    """The same of an environment variable, where every doubt counts."""
    return bool(_SECRET_NAME.search(variable)) and variable not in WORKING_DIRECTORY


class Redactor:
    """Removes what looks like a secret, and the values that are known to be some."""

    def __init__(self, environ: Mapping[str, str], more: Iterable[str] = ()) -> None:
        """Values of variables that name a secret, and `more` (the content of token files)."""
        named = [
            value
            for name, value in environ.items()
            if names_a_secret(name) and not name.endswith(PLACES)
        ]
        values = {value.strip() for value in (*named, *more)}
        self._known = {
            form
            for value in values
            if len(value) >= MIN_CHARACTERS and not _DIGITS.fullmatch(value)
            for form in (value, quote(value, safe=""))
        }

    def text(self, text: str) -> str:
        # The longest first: one secret may be a part of another.
        for value in sorted(self._known, key=len, reverse=True):
            text = text.replace(value, REMOVED)
        for shape in _SHAPES:
            text = shape.sub(REMOVED, text)
        text = _URL_LOGIN.sub(rf"\1{REMOVED}@", text)
        text = _PRIVATE_IN_TEXT.sub(rf"\1 {REMOVED}", text)
        text = _LINE.sub(rf"\1 {REMOVED}", text)
        return _NAMED.sub(_without_value, text)

    def json(self, value: Any) -> Any:
        """The same JSON value without secrets, whatever is nested in it."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._field(str(key), v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {
            name: REMOVED if names_a_secret(name) else self.text(value)
            for name, value in sorted(environ.items())
        }

    def _field(self, name: str, value: Any) -> Any:
        if name.lower() in PRIVATE:
            return REMOVED
        if is_secret_name(name) and not isinstance(value, bool | int | float | None):
            return REMOVED
        return self.json(value)


def _without_value(found: re.Match[str]) -> str:
    name = found["name"]
    if not is_secret_name(name):
        return found[0]
    return f"{name}{found['between']}{REMOVED}"
