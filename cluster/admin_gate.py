"""Who may give orders over HTTP: whoever holds the token, or, without one, this very machine.

Owns that rule and how a token file is read. Knows no order.
"""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from fastapi import Request

from placement.errors import ConfigError
from placement.headers import require_regular

_LOG = logging.getLogger("nrank.edge")

MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
# What proxies add; X-Forwarded-* stands for itself. Then the peer is the proxy, not the caller.
_FORWARDING = frozenset(
    {"forwarded", "via", "x-real-ip", "x-client-ip", "x-original-for", "true-client-ip"}
    | {"cf-connecting-ip", "x-cluster-client-ip", "x-envoy-external-address"}
)


def read_token(path: str) -> bytes:
    """The token in a file, blanks around it left out. ConfigError, which never tells the token."""
    remedy = "write one with `openssl rand -hex 32`"
    try:
        require_regular(path)
        with Path(path).open("rb") as file:
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"can't read admin_token_file {path}: {error.strerror}; {remedy}"
        ) from error
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise ConfigError(
            f"admin_token_file {path} holds a token of {len(token)} bytes, needed are "
            f"{MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}; {remedy}"
        )
    return token


@dataclass(frozen=True)
class AdminGate:
    """Where there is a token file everybody needs its token. Without one the caller must sit on
    this machine: a loopback peer, no sign of a proxy, no browser (whose pages come from anywhere).

    The file is read at each order, so that a new token needs no restart. Not `sees_peers`: a proxy
    hides them, and without a token nobody may.
    """

    token_file: str = ""
    sees_peers: bool = True

    def refusal(self, request: Request) -> str | None:
        """Why this caller may not, in one line; None for one who may."""
        if self.token_file:
            return self._refuse_token(request)
        if self.sees_peers and _is_local(request):
            return None
        return (
            "orders are taken from this machine only, without a proxy or a browser, not from "
            f"{peer_of(request)}; set admin_token_file to take them from elsewhere with "
            "`Authorization: Bearer TOKEN`"
        )

    def _refuse_token(self, request: Request) -> str | None:
        try:
            token = read_token(self.token_file)
        except ConfigError as error:
            _LOG.error("no order is taken: %s", error)
            return "the server can't read its admin_token_file; its log says why"
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token):
            return None
        return "orders need `Authorization: Bearer TOKEN` with the token of admin_token_file"


def peer_of(request: Request) -> str:
    """The address at the other end of the connection."""
    return request.client.host if request.client is not None else "an unknown peer"


def _is_local(request: Request) -> bool:
    names = request.headers.keys()
    if any(name in _FORWARDING or name.startswith("x-forwarded-") for name in names):
        return False
    if "origin" in names or "sec-fetch-site" in names:
        return False
    try:
        peer = ip_address(peer_of(request))
    except ValueError:
        return False
    mapped = peer.ipv4_mapped if isinstance(peer, IPv6Address) else None
    return (mapped or peer).is_loopback
