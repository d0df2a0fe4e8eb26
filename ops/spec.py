"""What an operator's implementation is and needs, and the error of a broken contract.

Knows no operator by name: `ops/registry.py` has the table, `ops/contracts.py` the contracts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from placement.errors import NrankError

REFERENCE = "reference"
PROBED = "op:"  # component that tells how an implementation did on this machine, by its name
PASSED = "passed"


class ContractError(NrankError):
    """An operator called with, or registered for, something that it does not promise to handle."""


@dataclass(frozen=True)
class Capability:
    """What a rank's device can do; `versions` are (component, version) pairs."""

    backend: str
    soc: str = ""
    dtype: torch.dtype = torch.float32
    versions: tuple[tuple[str, str], ...] = ()

    def version(self, component: str) -> str | None:
        return dict(self.versions).get(component)


# None when the implementation can run there, else the reason why it can't, in a few words.
Requirement = Callable[[Capability], str | None]


def no_requirement(capability: Capability) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator; the highest priority that can run is taken."""

    op: str
    backend: str
    function: Callable[..., Any]
    priority: int = 0
    requires: Requirement = no_requirement

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__name__}"


@dataclass(frozen=True)
class Resolution:
    """The implementation taken for an operator and why each better one was not."""

    implementation: Implementation
    refused: tuple[tuple[str, str], ...] = ()  # (implementation name, reason)


@dataclass(frozen=True)
class OpInfo:
    """One operator of a running rank, as metrics show it."""

    op: str
    implementation: str
    backend: str
    fallback_reason: str  # empty when the first choice was taken
