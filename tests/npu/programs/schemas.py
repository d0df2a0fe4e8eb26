"""python schemas.py NAMESPACE:NAME ... FILE: schemas of operators in the installed torch_npu."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch_npu  # noqa: F401

found = {}
for argument in sys.argv[1:-1]:
    namespace, name = argument.split(":")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found[argument] = [] if packet is None else [str(s) for s in packet._schemas.values()]
Path(sys.argv[-1]).write_text(json.dumps(found))
os._exit(0)
