"""Chat messages as clients send them, made into what chat templates read.

Owns roles and content shapes. Knows nothing of sampling or of any template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from placement.errors import ClientError

ROLES = ("system", "developer", "user", "assistant", "tool")
_OPTIONAL_CONTENT_ROLES = ("assistant",)  # an answer cut inside its reasoning has none


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check and unify `messages`: text parts joined by a line break, developer read as system.

    Raises ClientError with `param` like `messages[2].content`.
    """
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in ROLES:
        raise ClientError(
            f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}", param=f"{where}.role"
        )
    result = {key: value for key, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content(where, role, message.get("content"))
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ClientError(
            f"{where}.tool_call_id is required for role tool", param=f"{where}.tool_call_id"
        )
    if calls := message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(where, calls)
    return result


def _content(where: str, role: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if content is None and role in _OPTIONAL_CONTENT_ROLES:
        return ""
    param = f"{where}.content"
    if not isinstance(content, list) or not content:
        raise ClientError(f"{param} must be a string or a list of text parts", param=param)
    return "\n".join(_part(f"{param}[{at}]", part) for at, part in enumerate(content))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise ClientError(
            f"{where} is of type {kind!r}; this model reads parts of type 'text' only", param=where
        )
    return text


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    """Earlier calls of the assistant; `arguments` comes as JSON text, templates want an object."""
    param = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise ClientError(f"{param} must be a list", param=param)
    result = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ClientError(f"{param} entries need function.name and arguments", param=param)
        arguments = _arguments(function.get("arguments"))
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _arguments(value: object) -> object:
    if not isinstance(value, str):
        return value if value is not None else {}
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value  # kept as text: the template shows it as it is
    return parsed if isinstance(parsed, dict) else value
