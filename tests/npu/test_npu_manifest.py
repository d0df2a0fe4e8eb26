"""The manifest says what torch_npu has, and nothing of torch_npu is called outside it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops.npu.library import NpuLibrary
from ops.npu.manifest import MANIFEST, Evidence
from ops.spec import ContractError

ROOT = Path(__file__).parents[2]
PRODUCT = ("placement", "ops", "rank_worker", "cluster", "deploy")
IMPORTERS = {
    "ops/npu/library.py",  # operators
    "rank_worker/device_npu.py",  # the runtime
    "rank_worker/comm_device.py",  # process groups
}


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    files = [path for top in PRODUCT for path in sorted((ROOT / top).rglob("*.py"))]
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in files]


def operator_names(tree: ast.Module) -> set[str]:
    """Attributes that are named like torch_npu's operators, or taken from the library."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        is_npu = node.attr.startswith(("npu_", "_npu_")) and not node.attr.startswith("npu_id")
        taken = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "library.library()"
        if is_npu or taken:
            names.add(node.attr)
    return names


def test_schemas_are_those_of_the_installed_torch_npu(
    program: Callable[..., dict[str, Any]],
) -> None:
    wanted = {f"{call.namespace}:{name}": call.schema for name, call in MANIFEST.items()}
    live = program("schemas.py", *wanted)
    assert {name: schema for name, schema in wanted.items() if schema not in live[name]} == {}


def test_every_operator_called_is_in_the_manifest_and_no_other() -> None:
    called = set().union(*(operator_names(tree) for _, tree in sources()))
    unused = {name for name, call in MANIFEST.items() if Evidence.SCHEMA in call.evidence}
    assert called - {"npu_smi", "npu_ids"} == set(MANIFEST) - unused - {"get_npu_format"}


def test_the_check_sees_a_call_of_another_operator() -> None:
    tree = ast.parse("from ops.npu import library\nlibrary.library().npu_mm_all_reduce_base(x)")
    assert operator_names(tree) - set(MANIFEST) == {"npu_mm_all_reduce_base"}


def test_torch_npu_is_imported_in_three_places_and_late() -> None:
    for path, tree in sources():
        texts, imported, reached = set(), set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.Attribute):
                reached.add(node.attr)
        loads = any(name.split(".")[0] == "torch_npu" for name in imported)
        loads |= "torch_npu" in texts and "import_module" in reached
        assert path in IMPORTERS or not (loads or "atb" in reached), path
        early = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in early if "torch_npu" in ast.unparse(node)], path


def test_an_operator_outside_the_manifest_is_refused() -> None:
    with pytest.raises(ContractError, match=r"npu_ffn is not in ops/npu/manifest\.py"):
        NpuLibrary(lambda namespace: None).npu_ffn  # noqa: B018


def test_an_operator_that_is_known_by_its_schema_alone_is_not_called() -> None:
    with pytest.raises(ContractError, match=r"_npu_paged_attention is in .*schema alone"):
        NpuLibrary(lambda namespace: None)._npu_paged_attention  # noqa: B018


def test_atb_is_entered_for_its_schemas() -> None:
    atb = {name: call for name, call in MANIFEST.items() if call.namespace == "atb"}
    assert {"_npu_reshape_and_cache", "_npu_paged_attention", "_npu_flash_attention"} <= set(atb)
    assert all(Evidence.SCHEMA in call.evidence for call in atb.values())


def test_each_entry_says_why_it_is_believed_to_run() -> None:
    for name, call in MANIFEST.items():
        assert call.name == name
        assert call.schema.startswith(f"{call.namespace}::{name}(")
        assert call.evidence
        assert Evidence.OTHER_CHIPS not in call.evidence, f"{name} is not for 310P"
