"""The conversion itself: file by file into an output directory, and what makes that whole.

Owns the order of things: shards, then tokenizer files, config and index, then the check of the
result, then the receipts. A directory without its index can't be loaded, and the same command goes
on with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deploy.quantize.config_file import quantised_config
from deploy.quantize.growth import Growth, check_growth
from deploy.quantize.journal import RECEIPTS, Journal
from deploy.quantize.packing import Receipt, pack_matrix
from deploy.quantize.recipe import Recipe
from deploy.quantize.shard_file import OutputError, ShardFile, write_file
from deploy.quantize.shards import Copy, Job, Shard, component_bytes, plan_shards
from deploy.quantize.source import TORCH_DTYPES, Source, not_finite, stamps
from placement.errors import CheckpointError, ConfigError
from placement.headers import INDEX_FILE, CheckpointHeaders, read_json
from placement.manifest import MANIFEST_FILE
from placement.models.registry import load_model_spec

VERSION = 1
CONFIG = "config.json"
SPARE_BYTES = 64 << 20  # beside the shards: index, receipts, tokenizer
LARGEST_COPIED = 64 << 20
COPIED = (".json", ".txt", ".jinja", ".model")  # tokenizer, chat template, generation config
OnProgress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


@dataclass(frozen=True)
class Calibration:
    """Tokens that the result is checked on, and where they come from."""

    token_ids: tuple[int, ...]
    origin: str


@dataclass(frozen=True)
class Outcome:
    """The receipts as they stand in the file."""

    receipts: dict[str, Any]
    was_complete: bool


class Conversion:
    """One model directory into another. CheckpointError or ConfigError before anything is made."""

    def __init__(self, model_dir: str, out: Path, recipe: Recipe) -> None:
        self.model_dir, self.out, self.recipe = model_dir, out, recipe
        self.spec, self.headers = load_model_spec(model_dir)
        self.stamps = stamps(self.headers)
        recipe.check(self.spec)
        self.shards = plan_shards(self.spec, self.headers, recipe)
        if not any(one for shard in self.shards for one in shard.jobs if not isinstance(one, Copy)):
            raise ConfigError(
                f"--format {recipe.experts.name} leaves {self.spec.name} as it is; name a format "
                "below 16 bits"
            )

    @property
    def jobs(self) -> list[Job]:
        return [job for shard in self.shards for job in shard.jobs]

    def run(self, calibration: Calibration | None, on_progress: OnProgress) -> Outcome:
        """`calibration` None: the model can't be run, so the result isn't checked."""
        self._require_place()
        self._require_space()
        with closing(Journal(self.out, self._asked(calibration), self.stamps)) as journal:
            if journal.is_complete:
                self._require_whole()
                return Outcome(read_json(str(self.out / RECEIPTS)), True)
            self._write_shards(journal, on_progress)
            self._require_unchanged()
            self._write_rest()
            growth = None
            if calibration is not None:
                growth = check_growth(
                    self.model_dir, str(self.out), torch.tensor(calibration.token_ids),
                    lambda layer, layers: on_progress("checking", layer, layers),
                )  # fmt: skip
            receipts = without_nan(self._receipts(journal, calibration, growth))
            write_file(self.out / RECEIPTS, json.dumps(receipts, indent=1) + "\n")
            journal.finish()
        return Outcome(receipts, False)

    def _asked(self, calibration: Calibration | None) -> dict[str, Any]:
        ids = "" if calibration is None else json.dumps(calibration.token_ids)
        return {
            "version": VERSION,
            "model": self.spec.name,
            "tensors_sha256": fingerprint(self.headers),
            "format": self.recipe.experts.name,
            "dense": None if self.recipe.dense is None else self.recipe.dense.name,
            "calibration_sha256": hashlib.sha256(ids.encode()).hexdigest()[:16] if ids else None,
        }

    def _require_place(self) -> None:
        try:
            is_model = os.path.realpath(self.out) == os.path.realpath(self.model_dir)
            os.stat(self.out)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"--out {self.out}: {error.strerror}; choose another folder"
            ) from None
        if is_model:
            raise ConfigError(f"--out {self.out} is the model itself; choose another folder")

    def _require_unchanged(self) -> None:
        now = stamps(self.headers)
        if changed := [file for file in now if now[file] != self.stamps[file]]:
            raise CheckpointError(
                f"{os.path.join(self.model_dir, changed[0])} was changed while it was read: remove "
                f"{self.out} and give the same command again"
            )

    def _require_space(self) -> None:
        """Before the folder is made. What whole files of an earlier run hold counts as there."""
        sizes = {shard.file: len(shard.header) + shard.data_bytes for shard in self.shards}
        needed = SPARE_BYTES + sum(
            size for file, size in sizes.items() if not _has_size(self.out / file, size)
        )
        place = self.out.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if free < needed:
            raise OutputError(
                f"{self.out} needs {needed:,} bytes, {place} has {free:,} free: make room for "
                f"{needed - free:,} more or choose another --out"
            )

    def _require_whole(self) -> None:
        """A complete directory that lost a file since, or has it cut, isn't gone on with."""
        sizes = {shard.file: len(shard.header) + shard.data_bytes for shard in self.shards}
        lost = [file for file, size in sizes.items() if not _has_size(self.out / file, size)]
        lost += [name for name in (CONFIG, INDEX_FILE) if not (self.out / name).is_file()]
        if lost:
            raise ConfigError(
                f"--out {self.out} was complete, but {lost[0]} is missing or of another length "
                "now: remove the folder and give the same command again"
            )
        made = (self.out / RECEIPTS).stat().st_mtime_ns
        if newer := [file for file, (_, changed) in self.stamps.items() if changed > made]:
            raise ConfigError(
                f"--out {self.out} was complete before {newer[0]} of the model was written: remove "
                "the folder and give the same command again"
            )

    def _write_shards(self, journal: Journal, on_progress: OnProgress) -> None:
        total = sum(shard.data_bytes for shard in self.shards)
        done = 0
        with Source() as source:
            for shard in self.shards:
                size = len(shard.header) + shard.data_bytes
                if shard.file not in journal.done or not _has_size(self.out / shard.file, size):
                    receipts = list[Receipt]()
                    with ShardFile(self.out, shard) as file:
                        at = done
                        for job in shard.jobs:
                            receipts += write_job(source, job, file)
                            at += sum(entry.nbytes for entry in job.entries)
                            on_progress(shard_text(shard), at, total)
                    journal.add(shard.file, receipts)
                done += shard.data_bytes

    def _write_rest(self) -> None:
        """All that makes a directory of shards a model; the index comes last."""
        for name in sorted(os.listdir(self.model_dir)):
            path = Path(self.model_dir, name)
            if is_copied(path):
                write_file(self.out / name, _small_file(path))
        config = quantised_config(read_json(os.path.join(self.model_dir, CONFIG)), self.jobs)
        write_file(self.out / CONFIG, json.dumps(config, indent=2) + "\n")
        weight_map = {entry.name: shard.file for shard in self.shards for entry in shard.entries}
        index = {
            "metadata": {"total_size": sum(shard.data_bytes for shard in self.shards)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_file(self.out / INDEX_FILE, json.dumps(index, indent=2) + "\n")

    def _receipts(
        self, journal: Journal, calibration: Calibration | None, growth: Growth | None
    ) -> dict[str, Any]:
        components = {
            name: {"before_bytes": before, "after_bytes": after}
            for name, (before, after) in component_bytes(self.jobs).items()
        }
        layers = {shard.group: list[Receipt]() for shard in self.shards}
        for shard in self.shards:
            layers[shard.group] += journal.done[shard.file]
        return {
            "asked": self._asked(calibration),
            "components": components,
            "matrices": {
                group: [asdict(one) for one in found] for group, found in layers.items() if found
            },
            "calibration": None
            if calibration is None
            else {"tokens": len(calibration.token_ids), "origin": calibration.origin},
            "growth": None if growth is None else asdict(growth),
        }


def write_job(source: Source, job: Job, file: ShardFile) -> Iterator[Receipt]:
    """Writes what a job makes; a receipt where something was packed."""
    if isinstance(job, Copy):
        for at, raw in source.chunks(job.name, job.header):
            file.write_part(job.name, at, raw)
        return
    if job.form.is_plain:
        (entry,) = job.entries
        rows = source.rows(job.matrix, 0, job.matrix.shape[0]).to(TORCH_DTYPES[entry.dtype])
        if not torch.isfinite(rows).all():
            raise not_finite(job.matrix.header.file, job.matrix.name)
        file.write(entry.name, rows)
        return
    tensors, receipt = pack_matrix(source, job.matrix, job.form)
    for name, tensor in tensors.items():
        file.write(name, tensor)
    yield receipt


def without_nan(value: Any) -> Any:
    """The same with null for a figure that is no finite number, which JSON hasn't."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_copied(path: Path) -> bool:
    """Files beside the weights that a model directory is used with; no model card, no digests."""
    if path.name in (CONFIG, INDEX_FILE, MANIFEST_FILE, RECEIPTS) or path.name.startswith("."):
        return False
    if not path.is_file() or path.stat().st_size > LARGEST_COPIED:
        return False
    return path.suffix in COPIED or path.name.startswith(("LICENSE", "LICENCE"))


def fingerprint(headers: CheckpointHeaders) -> str:
    """Of names, dtypes and places of all tensors; the weights themselves aren't read for it."""
    found = hashlib.sha256()
    for name, one in sorted(headers.tensors.items()):
        found.update(f"{name} {one.dtype} {one.shape} {os.path.basename(one.file)} ".encode())
        found.update(f"{one.offset}\n".encode())
    return found.hexdigest()[:16]


def shard_text(shard: Shard) -> str:
    return f"layer {shard.group}" if shard.group.isdecimal() else shard.group


def _small_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
