"""Typed access to a `config.json`: every bad key ends in one line that names it and its value.

Owns no default of any model; an adapter states them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.errors import CheckpointError

_REQUIRED = object()


def bad_key(key: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(f"config.json: {key} = {value!r}, supported: {wanted}")


class ConfigReader:
    """A view of one JSON object; a key that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise CheckpointError(f"config.json: required key {key} is missing")
        return value

    def whole(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._value(key, default)
        if type(value) is not int or value < least:
            raise bad_key(key, value, f"a whole number >= {least}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive finite number."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise bad_key(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise bad_key(key, value, "true or false")
        return value

    def text(self, key: str, default: Any, allowed: tuple[str, ...]) -> str:
        value = self._value(key, default)
        if value not in allowed:
            raise bad_key(key, value, " or ".join(allowed))
        return str(value)

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """One id or a list of ids below `vocab`; empty when the key is absent."""
        value = self._values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for item in ids:
            if type(item) is not int or not 0 <= item < vocab:
                raise bad_key(key, value, f"token ids below vocab_size {vocab}")
        return tuple(ids)

    def section(self, key: str) -> ConfigReader:
        """A nested object; an empty one when the key is absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise bad_key(key, value, "an object")
        return ConfigReader(value or {})
