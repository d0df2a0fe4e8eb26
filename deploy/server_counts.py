"""Routing counts of a running server, asked for over HTTP. Standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from placement.errors import ConfigError

PATH = "/status/experts"
ANSWER_S = 15.0
MAX_BYTES = 64 << 20  # 100 layers of 1,000 experts with 20 digits are 2 MiB


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def fetch_counts(base_url: str) -> tuple[str, Any]:
    """The address asked and its JSON answer. ConfigError, in one line, when there is none.

    `base_url` with or without the `/v1` that OpenAI clients want.
    """
    base = base_url.rstrip("/").removesuffix(PATH).removesuffix("/v1")
    url = base + PATH
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
            return url, json.loads(response.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answered {error.code}: {_told(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"{url} gave no routing counts ({reason}): --counts needs a file or the base URL of "
            "a running nrank server"
        ) from error


def _told(error: urllib.error.HTTPError) -> str:
    """The message of our error envelope, else the words that go with the status."""
    try:
        return str(json.loads(error.read(MAX_BYTES))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"{error.reason}; is this a running nrank server?"
