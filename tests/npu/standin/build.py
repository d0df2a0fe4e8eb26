"""Builds stand-ins for the CANN libraries, so that the real torch_npu runs where no CANN is.

python build.py FOLDER writes the libraries into FOLDER; needs gcc, nm and an installed torch_npu,
which is read but not imported. They allocate host memory and count and log what is launched; they
compute nothing (see standin.c). What torch_npu links against is taken from its own symbol tables,
what it looks up by name from the strings of its library.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).parent / "standin.c"
SAME_AS_ACL = ("acl_op_compiler", "ge_runner", "graph", "runtime")  # found through libascendcl
EMPTY = ("cust_opapi", "atb", "acl_tdt_channel")
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")
OPERATOR = re.compile(r"aclnn[A-Z]\w+")
RUNTIME = re.compile(
    r"(acl(rt|op|mdl|prof|dump|sys|skt)?[A-Z][A-Za-z0-9]+|aclgrph[A-Z]\w+|rt[A-Z][A-Za-z0-9]+)"
)
COLLECTIVE = re.compile(r"[Hh]ccl[A-Z][A-Za-z0-9]+")
SIZES = ("WorkspaceSize", "CalculateSizeAndFormat")  # asked before a launch, no launch themselves
HANDLES = ["Scalar", "IntArray", "FloatArray", "BoolArray", "TensorList", "ScalarList"]
NOTHING = (
    "aclDestroyAclOpExecutor", "InitHugeMemThreadLocal", "UnInitHugeMemThreadLocal",
    "ReleaseHugeMem", "InitPTACacheThreadLocal", "SetPTAHashKey", "CanUsePTACache",
    "PTAGetExecCache",
)  # fmt: skip


def folder_of(package: str) -> Path:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{package} is not installed for this Python; run make test-npu")
    return Path(spec.submodule_search_locations[0])


def symbols(library: Path, flag: str) -> Iterator[tuple[str, str]]:
    """(type, name) of a library's dynamic symbols."""
    told = subprocess.run(["nm", "-D", flag, str(library)], capture_output=True, text=True)
    for line in told.stdout.splitlines():
        parts = line.split()
        if parts:
            yield (parts[-2] if len(parts) > 1 else "?"), parts[-1].partition("@")[0]


def linked_names(torch_npu: Path) -> set[str]:
    """What torch_npu's libraries want at load time and nobody on this machine offers."""
    own = [torch_npu / "lib" / f"lib{name}.so" for name in
           ("torch_npu", "tensorpipe", "npu_profiler", "op_plugin_atb")]  # fmt: skip
    own += torch_npu.glob("_C*.so")
    ask = [["gcc", f"-print-file-name={name}"] for name in SYSTEM]
    system = [Path(subprocess.check_output(a, text=True).strip()) for a in ask]
    offering = [*own, *(folder_of("torch") / "lib").glob("*.so*"), *system]
    known = {name for library in offering for _, name in symbols(library, "--defined-only")}
    return {
        name
        for library in own
        for kind, name in symbols(library, "--undefined-only")
        if kind not in "wv" and name not in known and not name.startswith(("Py", "_Py"))
    }


def named(words: Iterable[str], pattern: re.Pattern[str]) -> set[str]:
    return {word for word in words if pattern.fullmatch(word)}


def return_zero(names: Iterable[str]) -> str:
    """Assembler of functions that take anything and return 0."""
    lines = [".text"]
    for name in sorted(names):
        lines += [f".globl {name}", f".type {name},@function", f"{name}:", " xorl %eax, %eax"]
        lines += [" ret"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def operators(names: Iterable[str]) -> str:
    """C of libopapi: a launch is counted and logged, a handle is memory that nobody reads."""
    lines = ["#include <stdlib.h>", "void standin_launch(const char*);"]
    for name in sorted(names):
        body = "" if name.endswith(SIZES) else f'standin_launch("{name}");'
        lines.append(f"int {name}(void){{{body}return 0;}}")
    lines += [f"void*aclCreate{kind}(void){{return malloc(16);}}" for kind in HANDLES]
    lines += [f"int aclDestroy{kind}(void*p){{return 0;}}" for kind in [*HANDLES, "Tensor"]]
    lines += [f"int {name}(void){{return 0;}}" for name in NOTHING]
    return "\n".join([*lines, ""])


class Builder:
    """Compiles into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def library(self, name: str, *sources: Path, links: tuple[str, ...] = ()) -> Path:
        out = self.folder / f"lib{name}.so"
        command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-o", str(out), *map(str, sources)]
        command += [f"-Wl,-soname,lib{name}.so", f"-L{self.folder}", "-Wl,--no-as-needed"]
        subprocess.check_call([*command, *(f"-l{link}" for link in links), "-lpthread"])
        return out


def build(folder: Path, torch_npu: Path) -> None:
    builder = Builder(folder)
    blob = (torch_npu / "lib" / "libtorch_npu.so").read_bytes()
    found = re.findall(rb"(?<![A-Za-z0-9_])[A-Za-z][A-Za-z0-9_]{5,90}(?=\0)", blob)
    words = {word.decode() for word in found}
    probe = builder.library("probe", SOURCE)
    written = {name for _, name in symbols(probe, "--defined-only")}
    probe.unlink()
    collectives = {"H" + name[1:] for name in named(words, COLLECTIVE)}
    runtime = linked_names(torch_npu) | named(words, RUNTIME) | collectives
    rest = builder.write("rest.s", return_zero(runtime - written))
    builder.library("ascendcl", SOURCE, rest)
    empty = builder.write("empty.c", "")
    for name in (*SAME_AS_ACL, "hccl"):
        builder.library(name, empty, links=("ascendcl",))
    for name in EMPTY:
        builder.library(name, empty)
    source = builder.write("opapi.c", operators(named(words, OPERATOR)))
    builder.library("opapi", source, links=("ascendcl",))


if __name__ == "__main__":
    build(Path(sys.argv[1]), folder_of("torch_npu"))
