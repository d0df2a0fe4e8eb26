"""A checkpoint of 1 GiB in a process of its own: what it takes of memory, and being killed.

And every format that the command knows, run by the engine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deploy.cli import main
from deploy.quantize.journal import JOURNAL, RECEIPTS
from placement.config import EngineConfig
from placement.errors import CheckpointError
from placement.formats import FORMATS
from placement.headers import read_headers
from placement.models.quantised import UNUSED_FORMATS
from rank_worker.launch import launch_engine
from rank_worker.messages import EngineRequest
from tests.deploy.quantize.conftest import Convert, files_of
from tests.golden.lowbit_checkpoint import Pair

GIB = 1 << 30
MIB = 1 << 20
LAYERS = 20
KILLS = 10
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def large(tiny_checkpoint: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 checkpoint of more than 1 GiB, a file a layer."""
    tiny: Any = tiny_checkpoint
    folder = tmp_path_factory.mktemp("large") / "model"
    folder.mkdir()
    sizes = tiny.HIDDEN, tiny.EXPERT_DIM, tiny.EXPERTS
    tiny.HIDDEN, tiny.EXPERT_DIM, tiny.EXPERTS = 512, 256, 70
    try:
        variant = tiny.Variant(layers=LAYERS, mtp=False)
        (folder / "config.json").write_text(json.dumps(tiny.config(variant)))
        shapes = {"top": dict(tiny._residual("model.hyper_connection_mixer", inject=False))}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            shapes["top"][name] = (tiny.VOCAB, tiny.HIDDEN)
        for n in range(LAYERS):
            is_attention = (n + 1) % tiny.ATTENTION_EVERY == 0
            shapes[str(n)] = dict(tiny._layer(f"model.layers.{n}", is_attention, n == 1))
        for part, named in shapes.items():
            made = {
                key: tensor.bfloat16().contiguous()
                for name, shape in named.items()
                for key, tensor in tiny._on_disk(variant, name, tiny.value(name, shape))
            }
            save_file(made, folder / f"part-{part}.safetensors")
    finally:
        tiny.HIDDEN, tiny.EXPERT_DIM, tiny.EXPERTS = sizes
    return folder


def start(model: Path, out: Path) -> subprocess.Popen[str]:
    """Its last line is its peak (not `ru_maxrss`, which has that of the parent before exec)."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom deploy.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
        "sys.exit(code)"
    )
    line = [sys.executable, "-c", program, "quantize", "--model", str(model)]
    line += ["--format", "w4g32", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_gibibyte_takes_little_memory_and_survives_being_killed(
    large: Path, tmp_path: Path
) -> None:
    """Killed at points drawn from a seed: while files are written, and in the check behind them."""
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > GIB
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began_s = time.monotonic()
    child = start(large, whole)
    said, _ = child.communicate()
    took_s = time.monotonic() - began_s
    assert child.returncode == 0
    peak_bytes = 1024 * int(said.split()[-1])
    print(f"peak {peak_bytes / MIB:.0f} MiB, {took_s:.0f} s")
    assert peak_bytes < 600 * MIB
    draw = random.Random(7)
    found = []
    for _ in range(KILLS):
        child = start(large, killed)
        time.sleep(draw.uniform(0.1, 0.4) * took_s)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        found.append(state(killed))
    print("after each kill:", found)
    assert len(set(found)) > 1, "every kill came at the same point"
    child = start(large, killed)
    child.communicate()
    assert child.returncode == 0
    assert files_of(killed) == files_of(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["nvfp4", "w8_sym"])
def test_a_large_matrix_takes_little_more_than_its_packed_size(tmp_path: Path, name: str) -> None:
    """As an output head: 146 MiB of 8-bit codes, 586 MiB of float32; in a process of its own."""
    values = torch.randn(20000, 2560).bfloat16().repeat(3, 1)
    save_file({"m.weight": values}, tmp_path / "m.safetensors")
    program = (
        "import re, sys\nfrom pathlib import Path\nimport torch\n"
        "from deploy.quantize.packing import pack_matrix\n"
        "from deploy.quantize.source import Matrix, Source\n"
        "from placement.formats import FORMATS\nfrom placement.headers import read_file_headers\n"
        "torch.set_num_threads(1)\n"
        "peak = lambda: int(re.search('VmHWM:(.*)kB', Path('/proc/self/status').read_text())[1])\n"
        "header = read_file_headers(sys.argv[1])[0]['m.weight']\n"
        "matrix, before = Matrix('m.weight', header.shape, header, header.offset), peak()\n"
        "with Source() as source:\n    pack_matrix(source, matrix, FORMATS[sys.argv[2]])\n"
        "print(1024 * (peak() - before))"
    )
    line = [sys.executable, "-c", program, str(tmp_path / "m.safetensors"), name]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True, timeout=500)
    codes = 60000 * 2560 * FORMATS[name].bits // 8
    print(f"{name}: {int(done.stdout) / MIB:.0f} MiB for {codes / MIB:.0f} of codes")
    assert int(done.stdout) < 2 * codes + 160 * MIB


def state(out: Path) -> str:
    """Nothing, what can be gone on with and not be loaded, or the whole model."""
    if not out.exists() or not list(out.iterdir()):
        return "nothing"
    if (out / RECEIPTS).exists() and not (out / JOURNAL).exists():
        return "whole"
    shards = len(list(out.glob("model-*.safetensors")))
    if not (out / "config.json").exists():
        with pytest.raises(CheckpointError):
            read_headers(str(out))
    return f"{shards} files"


RUN = [name for name, one in FORMATS.items() if name not in UNUSED_FORMATS and not one.is_plain]
# Ranges are of experts, and the heads of this model are no whole groups of 128.
DENSE = [name for name in RUN if FORMATS[name].group != 128]
CASES = [(name, False) for name in [*RUN, "w4b32:0,w2:1-2"]] + [(name, True) for name in DENSE]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dense"), CASES)
def test_every_format_is_loaded_planned_and_run(
    sources: Pair, converted: Convert, capsys: pytest.CaptureFixture[str], name: str, dense: bool
) -> None:
    folder = converted(sources.twin, name, name if dense else None)
    for command in (["inspect"], ["plan", "--ranks", "2"]):
        code = main([*command, "--model", str(folder), "--json"])
        said = json.loads(capsys.readouterr().out)
        if command == ["inspect"]:
            assert code == 0
            assert said["weight_formats"]
            assert not said["obstacles"]
            assert not said["remarks"]
    config = EngineConfig(
        str(folder), context_tokens=128, kv_pool_tokens=512, page_tokens=16, max_sequences=2
    )
    with launch_engine(config) as engine:
        request = EngineRequest("a", tuple(range(3, 40)), 6, ignore_eos=True)
        (result,) = engine.generate([request])
    assert len(result.token_ids) == 6
    assert not result.error
