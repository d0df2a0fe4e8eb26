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
    r"""(?<![\w.-])(?P<name>[\w.-]*(?:token|key|secret|passw|pwd|passphrase|credential|authorization"""
    r"""|cookie|signature)[\w.-]*)(?P<between>["']?\s*[:=]\s*)"""
    r"""(?P<value>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|"""
    r"""(?:(?:bearer|basic|token|digest)\s+)?[^\s,;&"'}\])]+)""",
    re.I,
)
# `--token X`, and `'--token', 'X'` of a list of arguments.
_FLAG = re.compile(r"""--?[a-z][\w-]*""", re.I)
_AFTER_FLAG = re.compile(
    r"""(?<![\w-])(?P<name>--?[a-z][\w-]*)(?P<between>["']?(?:[ \t]*,[ \t]*|[ \t]+))"""
    r"""(?P<value>(?!-)(?:"[^"]*"|'[^']*'|[^\s,;"'}\])]+))""",
    re.I,
)
# `token X`, `token is X`: only what is no word and no number, for texts often speak of tokens.
_AFTER_NAME = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]*(?:token|secret|credentials?|"""
    r"""(?:api|access|secret|private)[ _-]?key))"""
    r"""(?P<between>[ \t]+(?:(?:is|was)[ \t]+)?["']?)"""
    r"""(?P<value>(?:(?=[^\s"']*[0-9])(?=[^\s"']*[a-z])[\w.~+/-]{6,}|[\w.~+/-]{20,})=*)"""
    r"""(?![\w=(\[])""",
    re.I,
)
# After a password's name anything with a digit; after `is` all that isn't said of passwords.
_PASSWORD = re.compile(r"""((?:passw\w*|passphrase)[ \t]+["']?)(?=\S*\d)\S{4,}""", re.I)
_PASSWORD_IS = re.compile(
    r"""((?:passw\w*|passphrase|pwd)[ \t]+(?:is|was)[ \t]+)(?!<removed>|(?:not|never"""
    r"""|missing|wrong|required|needed|invalid|incorrect|empty|unset|set|absent|expired|too)\b).*""",
    re.I,
)
# Programs whose short option takes a password.
_COMMAND = re.compile(
    r"""(\b(?:(?:mysql|mariadb)[\w-]*[ \t](?:.*?[ \t])??-p|sshpass[ \t]+-p[ \t]*"""
    r"""|(?:docker|podman)[ \t]+login[ \t](?:.*?[ \t])??-p[ \t]*"""
    r"""|redis-cli[ \t](?:.*?[ \t])??-a[ \t]*|ldap\w+[ \t](?:.*?[ \t])??-w[ \t]*"""
    r"""|curl[ \t](?:.*?[ \t])??-u[ \t]*))(?:"[^"\n]*"|'[^'\n]*'|[^\s"']+)"""
)
_PARAMETER = re.compile(r"""([?&](?:sig|sign|auth|jwt|sid|code|pass)=)[^\s&#"'<>]+""", re.I)
_SHAPES = (
    # A key whose end, or whose begin, was cut off goes as well.
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    re.compile(r"\A.*-----END [A-Z ]*PRIVATE KEY-----", re.S),
    re.compile(r"\b(?:bearer|basic)\s+[\w.~+/=-]{6,}", re.I),
    re.compile(r"\bhf_\w{6,}"),
    re.compile(r"\b(?:sk|pk|rk)-[\w-]{8,}"),
    re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-)[\w-]{8,}"),
    re.compile(r"\b(?:xox[a-z]|xapp)-[\w-]+"),
    re.compile(r"\bA(?:KI|SI)A\w{8,}"),
    re.compile(r"\bAIza[\w-]{8,}"),
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
        text = _PARAMETER.sub(rf"\1{REMOVED}", text)
        text = _COMMAND.sub(rf"\1{REMOVED}", text)
        text = _PASSWORD_IS.sub(rf"\1{REMOVED}", text)
        text = _PASSWORD.sub(rf"\1{REMOVED}", text)
        for named in (_NAMED, _AFTER_FLAG, _AFTER_NAME):
            text = named.sub(_without_value, text)
        return text

    def json(self, value: Any) -> Any:
        """The same JSON value without secrets, whatever is nested in it."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._field(str(key), v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [
                REMOVED if isinstance(item, str) and _takes_a_secret(before) else self.json(item)
                for before, item in zip([None, *value], value, strict=False)
            ]
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


def _takes_a_secret(argument: Any) -> bool:
    """Whether this is an option of a command line whose value has to go."""
    is_flag = isinstance(argument, str) and _FLAG.fullmatch(argument)
    return bool(is_flag) and is_secret_name(argument.replace("-", "_"))


def _without_value(found: re.Match[str]) -> str:
    name = found["name"]
    if not is_secret_name(name.replace("-", "_") if name.startswith("-") else name):
        return found[0]
    return f"{name}{found['between']}{REMOVED}"
