"""The safetensors headers of a model directory: where every tensor lies, without its bytes.

Owns file checks (missing, truncated, overlapping, unindexed). Knows no model and reads no weight.
Format: 8 bytes little-endian header length, JSON, then data (huggingface/safetensors README).
"""

from __future__ import annotations

import errno
import gc
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeGuard

from placement.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
DUMP_KEY, DUMP_VERSION = "nrank_headers", 1
NOT_REGULAR = "is no regular file"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor on disk: `file` is a full path, `offset` the absolute byte of its start."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointHeaders:
    """All tensors of a model directory. `header_bytes` were read to learn this, nothing else."""

    model_dir: str
    tensors: Mapping[str, TensorHeader]
    header_bytes: int
    superseded: tuple[str, ...] = ()  # "file: tensor" present in a shard, not used by the index


@contextmanager
def without_collector() -> Iterator[None]:
    """A checkpoint of 150,000 tensors makes a million objects and no cycle; the cyclic collector
    would walk them again and again, which doubles the time that headers and specs take."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _DuplicateKeyError(ValueError):
    """A JSON object that names one key twice."""


@without_collector()
def read_headers(model_dir: str) -> CheckpointHeaders:
    """Headers of every shard. The index decides where a tensor is read from when there is one.

    Raises CheckpointError naming file and tensor for anything that a load would trip over later.
    """
    if not os.path.isdir(model_dir):
        raise CheckpointError(f"{model_dir}: no such model directory")
    config_path = os.path.join(model_dir, "config.json")
    if not os.path.exists(config_path):
        raise CheckpointError(f"{model_dir}: has no config.json, so it isn't a model directory")
    if not os.path.isfile(config_path):
        raise CheckpointError(f"{config_path}: can't be read ({NOT_REGULAR})")
    index_path = os.path.join(model_dir, INDEX_FILE)
    if os.path.exists(index_path):
        return _read_indexed(model_dir, _read_weight_map(index_path))
    files = sorted(name for name in os.listdir(model_dir) if name.endswith(".safetensors"))
    if not files:
        raise CheckpointError(
            f"{model_dir}: has no weights (neither {INDEX_FILE} nor a *.safetensors file)"
        )
    return _read_unindexed(model_dir, files)


def header_dump(headers: CheckpointHeaders) -> dict[str, Any]:
    """All that `read_header_dump` needs to give the same headers on a machine without the files.

    Tensors stand under their file, with absolute byte ranges, beside the file's size.
    """
    files: dict[str, dict[str, Any]] = {}
    for name, header in headers.tensors.items():
        base = os.path.basename(header.file)
        if base not in files:
            files[base] = {"bytes": _file_bytes(header.file), "tensors": {}}
        span = [header.offset, header.offset + header.nbytes]
        entry = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": span}
        files[base]["tensors"][name] = entry
    return {
        DUMP_KEY: DUMP_VERSION,
        "model_dir": headers.model_dir,
        "header_bytes": headers.header_bytes,
        "superseded": list(headers.superseded),
        "files": files,
    }


def _file_bytes(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error


@without_collector()
def read_header_dump(path: str) -> CheckpointHeaders:
    """Headers of a checkpoint that isn't here, as `header_dump` gave them; good for a plan.

    A plain JSON object of name -> {dtype, shape}, the form of one safetensors header, is read too;
    its `data_offsets` may be left out. Raises CheckpointError.
    """
    entries = read_json(path)
    if DUMP_KEY in entries:
        return _read_dump(path, entries)
    entries.pop("__metadata__", None)
    tensors: dict[str, TensorHeader] = {}
    at = 0
    for name, entry in entries.items():
        sized = {**entry, "data_offsets": _span_after(at, entry)} if _is_sized(entry) else entry
        tensors[name] = _tensor(path, name, sized, 0)
        at += tensors[name].nbytes
    return CheckpointHeaders(os.path.dirname(path), tensors, 0)


def _read_dump(path: str, dump: Mapping[str, Any]) -> CheckpointHeaders:
    if dump[DUMP_KEY] != DUMP_VERSION:
        raise CheckpointError(
            f"{path}: {DUMP_KEY} is version {dump[DUMP_KEY]!r}, this program reads {DUMP_VERSION}"
        )
    model_dir, files = dump.get("model_dir"), dump.get("files")
    superseded = dump.get("superseded")
    if (
        not isinstance(model_dir, str)
        or not isinstance(files, dict)
        or not files
        or not isinstance(superseded, list)
    ):
        raise CheckpointError(f"{path}: a dump of headers needs model_dir, files and superseded")
    tensors: dict[str, TensorHeader] = {}
    for file, content in files.items():
        found = _read_dumped_file(path, os.path.join(model_dir, file), content)
        twice = next(iter(found.keys() & tensors.keys()), None)
        if twice is not None:
            raise CheckpointError(f"{path}: {twice} is in two files, {file} is the second")
        tensors.update(found)
    read = dump.get("header_bytes")
    header_bytes = read if type(read) is int else 0
    return CheckpointHeaders(model_dir, tensors, header_bytes, tuple(superseded))


def _read_dumped_file(path: str, file: str, content: Any) -> dict[str, TensorHeader]:
    fields = content if isinstance(content, dict) else {}
    size, entries = fields.get("bytes"), fields.get("tensors")
    if type(size) is not int or not isinstance(entries, dict):
        raise CheckpointError(f"{path}: {file} needs bytes and tensors")
    tensors = {name: _tensor(file, name, entry, 0) for name, entry in entries.items()}
    _check_extents(file, tensors, size)
    return tensors


def _is_sized(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("dtype") in DTYPE_BITS
        and _is_counts(entry.get("shape"))
    )


def _span_after(start: int, entry: Mapping[str, Any]) -> list[int]:
    return [start, start + prod(entry["shape"]) * DTYPE_BITS[entry["dtype"]] // 8]


def require_regular(path: str) -> None:
    """OSError unless `path` is a file of bytes: to open a FIFO waits for a writer, for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, path)


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError for bad JSON, duplicate keys or another type."""
    try:
        require_regular(path)
        with open(path, encoding="utf-8") as file:
            return _parse_object(path, file.read())
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text (byte {error.start})") from error


def read_file_headers(
    path: str, weight_map: Mapping[str, str] | None = None
) -> tuple[dict[str, TensorHeader], int]:
    """Tensors of one safetensors file and the bytes read to learn them (8 + header).

    When the header can't be read, the error tells what `weight_map` (tensor -> file) has there.
    """
    try:
        raw, size = _read_header(path)
        entries = _parse_object(path, raw)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_indexed_there(path, weight_map or {})}") from error
    entries.pop("__metadata__", None)
    start = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, start) for name, entry in entries.items()}
    _check_extents(path, tensors, size)
    end = max((one.offset + one.nbytes for one in tensors.values()), default=start)
    if size > end:
        raise CheckpointError(
            f"{path}: file length is {size} bytes, by its header it is {end}; fetch it again"
        )
    return tensors, start


def _indexed_there(path: str, weight_map: Mapping[str, str]) -> str:
    file = os.path.basename(path)
    names = sorted(name for name, placed in weight_map.items() if placed == file)
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f" ({INDEX_FILE} has {names[0]}{more} in it)"


def _read_header(path: str) -> tuple[bytes, int]:
    """The JSON text of a safetensors file and the bytes of the whole file."""
    try:
        require_regular(path)
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: shard is missing; fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
    try:
        size = os.fstat(handle).st_size
        return _read_header_text(path, handle, size), size
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
    finally:
        os.close(handle)


def _read_header_text(path: str, handle: int, size: int) -> bytes:
    prefix = os.pread(handle, 8, 0)
    if prefix == b"version ":
        raise CheckpointError(f"{path}: is a Git LFS pointer, not weights; run `git lfs pull`")
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or 8 + length > size:
        raise CheckpointError(
            f"{path}: truncated or not safetensors: header ends at byte {8 + length}, "
            f"file has {size}; fetch it again"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {length} bytes, limit {MAX_HEADER_BYTES}")
    raw = os.pread(handle, length, 8)
    if len(raw) != length:
        raise CheckpointError(f"{path}: header has {length} bytes but only {len(raw)} were read")
    return raw


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return found


def _parse_object(path: str, text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique_object)
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{path}: names {error} twice") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: bad JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _is_counts(value: object, length: int | None = None) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        return False
    for item in value:  # noqa: SIM110 (twice as fast as all(), and called for every tensor)
        if type(item) is not int or item < 0:
            return False
    return True


def _tensor(path: str, name: str, entry: Any, start: int) -> TensorHeader:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _is_counts(shape) or not _is_counts(span, 2):
        raise CheckpointError(f"{path}: {name}: header entry needs dtype, shape and data_offsets")
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: {name}: unknown dtype {dtype}")
    nbytes = span[1] - span[0]
    bits = prod(shape) * DTYPE_BITS[dtype]
    if nbytes * 8 != bits:
        raise CheckpointError(
            f"{path}: {name}: {dtype} {shape} needs {bits // 8} bytes, header gives {nbytes}"
        )
    return TensorHeader(path, dtype, tuple(shape), start + span[0], nbytes)


def _check_extents(path: str, tensors: Mapping[str, TensorHeader], size: int) -> None:
    """No tensor ends behind the file's end and no two share a byte."""
    placed = sorted(
        ((header.offset, header.offset + header.nbytes, name) for name, header in tensors.items())
    )
    if not placed:
        return
    _, end, name = max(placed, key=lambda item: item[1])
    if end > size:
        raise CheckpointError(
            f"{path}: truncated: {name} ends at byte {end}, file has {size}; fetch it again"
        )
    filled = [item for item in placed if item[1] > item[0]]
    for (_, first_end, first), (second_start, _, second) in pairwise(filled):
        if second_start < first_end:
            raise CheckpointError(f"{path}: tensors {first} and {second} overlap")


def _read_weight_map(index_path: str) -> dict[str, str]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: has no weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or os.path.basename(file) != file:
            raise CheckpointError(f"{index_path}: {tensor}: {file!r} is no plain file name")
    return weight_map


def _read_indexed(model_dir: str, weight_map: Mapping[str, str]) -> CheckpointHeaders:
    shards: dict[str, dict[str, TensorHeader]] = {}
    header_bytes = 0
    for file in sorted(set(weight_map.values())):
        shards[file], read = read_file_headers(os.path.join(model_dir, file), weight_map)
        header_bytes += read
    tensors = {
        name: _indexed_tensor(model_dir, name, file, shards) for name, file in weight_map.items()
    }
    superseded = tuple(
        f"{file}: {name}"
        for file, entries in shards.items()
        for name in entries
        if weight_map.get(name) != file
    )
    return CheckpointHeaders(model_dir, tensors, header_bytes, superseded)


def _indexed_tensor(
    model_dir: str, name: str, file: str, shards: Mapping[str, Mapping[str, TensorHeader]]
) -> TensorHeader:
    if name in shards[file]:
        return shards[file][name]
    others = [other for other, entries in shards.items() if name in entries]
    hint = f"it is in {', '.join(others)}" if others else "no shard holds it"
    index_path = os.path.join(model_dir, INDEX_FILE)
    raise CheckpointError(f"{index_path}: {name} should be in {file}, but isn't ({hint})")


def _read_unindexed(model_dir: str, files: Iterable[str]) -> CheckpointHeaders:
    tensors: dict[str, TensorHeader] = {}
    header_bytes = 0
    for file in files:
        entries, read = read_file_headers(os.path.join(model_dir, file))
        header_bytes += read
        for name in entries.keys() & tensors.keys():
            first = os.path.basename(tensors[name].file)
            raise CheckpointError(
                f"{model_dir}: {name} is in both {first} and {file}, and no {INDEX_FILE} decides"
            )
        tensors.update(entries)
    return CheckpointHeaders(model_dir, tensors, header_bytes)
