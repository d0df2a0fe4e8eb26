"""JSON that a running server answers, asked for over HTTP. Standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from placement.errors import ConfigError

ANSWER_S = 15.0
MAX_BYTES = 64 << 20  # routing counts of 100 layers of 1,000 experts with 20 digits are 2 MiB


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def fetch_json(base_url: str, path: str, lacks: str, remedy: str) -> tuple[str, Any]:
    """The address asked and its JSON answer. ConfigError, in one line, when there is none.

    `base_url` with or without the `/v1` that OpenAI clients want. An error says that the address
    `lacks` something, and the remedy.
    """
    url = base_url.rstrip("/").removesuffix(path).removesuffix("/v1") + path
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
            return url, json.loads(response.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answered {error.code}: {_told(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"{url} gave no {lacks} ({reason}): {remedy}") from error


def _told(error: urllib.error.HTTPError) -> str:
    """The message of our error envelope, else the words that go with the status."""
    try:
        return str(json.loads(error.read(MAX_BYTES))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"{error.reason}; is this a running nrank server?"
