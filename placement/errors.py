"""The error tree. Every message is one line: what, the limit, the value, the remedy."""

from __future__ import annotations

from enum import StrEnum


class ErrorKind(StrEnum):
    """Stable names of failures, the same in HTTP bodies and in metric labels."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH = "context_length"
    NOT_FOUND = "not_found"
    UNAUTHORIZED = "unauthorized"
    QUEUE_FULL = "queue_full"
    NOT_READY = "not_ready"
    DRAINING = "draining"
    HELD = "held"
    RANK_FAILURE = "rank_failure"
    NON_FINITE = "non_finite"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


class NrankError(Exception):
    """Base of all errors that a user is meant to read."""


class ConfigError(NrankError):
    """A flag or a config key that can't be used (exit code 2)."""


class ClientError(NrankError):
    """A request that can't be served as asked (4xx); `param` names the field."""

    def __init__(
        self,
        message: str,
        kind: ErrorKind = ErrorKind.INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param
        self.code = code


class CheckpointError(NrankError):
    """A model directory that can't be loaded; the message names file and tensor (exit code 2)."""


class PlanError(NrankError):
    """A plan that doesn't fit: ledger row and missing bytes (exit code 3)."""

    def __init__(self, message: str, rank: int = 0, row: str = "", missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.row = row
        self.missing_bytes = missing_bytes


class RankError(NrankError):
    """A rank that failed: rank, step and phase (exit code 1)."""

    def __init__(self, message: str, rank: int = -1, step: int = -1, phase: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.phase = phase


class PeerError(RankError):
    """A rank waited for its peers in vain; `rank` is who tells it, not who is to blame."""
