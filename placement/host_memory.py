"""Memory of the machine that this process runs on. Knows no plan."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMIT = "/sys/fs/cgroup/memory.max"  # of the container, where there is one


def machine_bytes(limit_file: str = CGROUP_LIMIT) -> int:
    """Physical memory, or less where a container may not have all of it."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path(limit_file).read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
