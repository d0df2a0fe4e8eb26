"""The library of C++ decode kernels: built on demand, loaded once, absent without a compiler.

Owns the build, its cache and the C signatures. What the kernels mean is `ops/cpu/native.py`'s.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from ops.spec import Capability

SOURCE = Path(__file__).with_name("kernels.cpp")  # includes the other ones beside it
# Native code for this machine's own CPU: the library never leaves it (see `_cache_key`). The math
# flags let loops vectorise; none of them assumes that values are finite. Without the parameter GCC
# fuses only some of the additions on AMD's processors, others in a kernel for one row than in that
# for several, and a row's bits would depend on its batch.
FLAGS = (
    "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
    "--param=avoid-fma-max-bits=0",
)  # fmt: skip
BUILD_TIMEOUT_S = 120

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "nrank_linear": (_POINTER, _INT) + (_POINTER,) * 2 + (_INT,) * 3,
    "nrank_hyper_mix": (_POINTER,) * 6 + (_INT,) * 5 + (_FLOAT,),
    "nrank_hyper_inject": (_POINTER,) * 3 + (_INT,) * 3,
    "nrank_conv_step": (_POINTER, _INT) + (_POINTER,) * 4 + (_INT,) * 4,
    "nrank_conv_verify": (_POINTER, _INT) + (_POINTER,) * 4 + (_INT,) * 5,
    "nrank_window_commit": (_POINTER, _INT) + (_POINTER,) * 3 + (_INT,) * 4,
    "nrank_delta_step": (_POINTER, _POINTER, _INT, _POINTER, _INT) + (_POINTER,) * 6 + (_INT,) * 5,
    "nrank_delta_verify": (_POINTER, _POINTER, _INT, _POINTER, _INT)
    + (_POINTER,) * 6
    + (_INT,) * 6,
    "nrank_delta_commit": (_POINTER, _INT, _POINTER, _INT) + (_POINTER,) * 6 + (_INT,) * 6,
    "nrank_delta_gates": (_POINTER, _POINTER, _INT) + (_POINTER,) * 4 + (_INT,) * 2,
    "nrank_gated_norm": (_POINTER,) * 3 + (_INT, _POINTER) + (_INT,) * 3 + (_FLOAT, ctypes.c_int),
    "nrank_rms_norm": (_POINTER, _INT, _INT) + (_POINTER,) * 2 + (_INT,) * 3 + (_FLOAT,),
    "nrank_gated_swiglu": (_POINTER, _INT, _POINTER, _INT, _POINTER) + (_INT,) * 2,
    "nrank_table_rows": (_POINTER,) * 3 + (_INT,) * 4,
    "nrank_ngram_ids": (_POINTER,) * 5 + (_INT,) * 6,
    "nrank_ngram_gate": (_POINTER,) * 9 + (_INT,) * 4 + (_FLOAT,),
    "nrank_route": (_POINTER, _INT) + (_POINTER,) * 2 + (_INT,) * 3 + (ctypes.c_int,),
    "nrank_moe": (_POINTER,) * 6 + (_INT,) * 4,
    "nrank_unpack": (_POINTER, _INT, _POINTER),
    "nrank_packed_linear": (_POINTER, _INT, _POINTER, _POINTER, _INT, ctypes.c_int),
    "nrank_packed_moe": (_POINTER,) * 6 + (_INT,) * 2 + (ctypes.c_int,),
    "nrank_rope_tables": (_POINTER,) * 4 + (_INT,) * 2,
    "nrank_rope": (_POINTER,) * 4 + (_INT,) * 4,
    "nrank_index_keys": (_POINTER,) * 5 + (_INT,) * 4 + (_FLOAT,),
    "nrank_select_blocks": (_POINTER,) * 3 + (_INT,) + (_POINTER,) * 2 + (_INT,) * 7,
    "nrank_attention": (_POINTER,) * 4 + (_INT,) + (_POINTER,) * 4 + (_INT,) * 9 + (_FLOAT,),
    "nrank_nonfinite_rows": (_POINTER, _INT, _POINTER) + (_INT,) * 2,
    "nrank_greedy": (_POINTER, _INT, _POINTER) + (_INT,) * 2,
    "nrank_sample": (_POINTER, _INT) + (_POINTER,) * 9 + (_INT,) * 3,
}


class BuildError(Exception):
    """Why there is no library, in one line."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels; BuildError when they can't be built here."""
    loaded = ctypes.CDLL(str(_built()))
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def available(capability: Capability) -> str | None:
    """None when the kernels can run, else the reason."""
    if capability.dtype != torch.float32:
        return "made for float32"
    try:
        library()
    except (BuildError, OSError) as error:
        return " ".join(str(error).split())
    return None


def _cache_key(compiler: str) -> str:
    """Names a build by source, flags, compiler and the CPU's features."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    cpu = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")][:1]
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.cpp")))
    parts = (sources, " ".join(FLAGS).encode(), version, "".join(cpu).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _built() -> Path:
    """The shared object, from the cache or freshly compiled into it."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler found: install g++ for faster decoding on CPU")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nrank"
    target = base / f"kernels-{_cache_key(compiler)}.so"
    if target.exists():
        return target
    try:
        base.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(suffix=".so", dir=base)
        os.close(descriptor)
    except OSError as error:
        raise BuildError(f"can't write {base}: {error.strerror}") from error
    partial = Path(name)
    try:
        _compile(compiler, partial)
        partial.chmod(0o755)
        partial.replace(target)  # whole or not at all, whichever rank comes first
    finally:
        partial.unlink(missing_ok=True)
    return target


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, *FLAGS, "-shared", "-fPIC", "-o", str(target), str(SOURCE)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}")
