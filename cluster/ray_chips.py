"""Physical chips, as Ray and the sensors count them, and those that one process sees.

Ray gives each rank's process one chip by a variable that the device's library reads: what is chip 3
of the machine is chip 0 in there. Owns that mapping, and the switches that would undo it.
"""

from __future__ import annotations

from collections.abc import Mapping

from placement.errors import ConfigError

# By the resource that Ray schedules.
VISIBLE = {"NPU": "ASCEND_RT_VISIBLE_DEVICES", "GPU": "CUDA_VISIBLE_DEVICES"}
# Ray's switches against it. `ray job submit` sets those of its driver, and a process that passes
# its environment on would put every rank on chip 0.
SWITCHES = tuple(f"RAY_EXPERIMENTAL_NOSET_{name}" for name in VISIBLE.values())


def rank_environment() -> dict[str, str]:
    """What makes sure that a rank sees its own chip, whatever its parent was started with."""
    return dict.fromkeys(SWITCHES, "0")


def logical_chip(resource: str, physical: int, environ: Mapping[str, str]) -> int:
    """The index by which the device's library knows chip `physical` in a rank's process.

    ConfigError unless the process sees that chip and no other. Resources without such a variable
    have no library to ask: 0.
    """
    name = VISIBLE.get(resource)
    if name is None:
        return 0
    visible = environ.get(name)
    listed = visible.split(",") if visible else []
    if listed != [str(physical)]:
        told = f"{name}={visible}" if visible is not None else f"no {name}"
        raise ConfigError(
            f"Ray gave a rank {resource} {physical}, but its process has {told}; unset "
            f"RAY_EXPERIMENTAL_NOSET_{name} where Ray is started"
        )
    return listed.index(str(physical))
