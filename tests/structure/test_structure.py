"""What may import what, how large a file may be, and where certain names may stand."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

MAY_IMPORT = {
    "placement": {"placement"},
    "ops": {"placement", "ops"},
    "rank_worker": {"placement", "ops", "rank_worker"},
    "cluster": {"placement", "ops", "rank_worker", "cluster"},
    "deploy": {"placement", "ops", "rank_worker", "cluster", "deploy"},
    "dashboards": {"cluster", "dashboards"},
}
MAX_LINES = 500
# Libraries of model families, not only those that an adapter exists for.
MODEL_TYPE = re.compile(r"qwen|glm|deepseek|llama|mixtral|mistral|kimi|gemma|gpt_oss", re.I)
DEVICE_NAME = re.compile(r"^(cpu|cuda|npu|nccl|hccl|mps|xpu)(:\d+)?$", re.I)
# Names a device may be chosen by (configuration and command line), and where devices live.
DEVICES_AT_HOME = re.compile(
    r"^(rank_worker/(device|comm)\w*\.py|ops/(?!reference/)\w+/.*"
    r"|placement/(config|topology)\.py|deploy/.*)$"
)
# Where a name is mapped to the resource that Ray schedules.
RESOURCE_NAMES = re.compile(r"^cluster/ray_\w+\.py$")


def test_imports_follow_the_order_of_packages(modules: list[Any]) -> None:
    ours = set(MAY_IMPORT)
    wrong = [
        (module.path, name)
        for module in modules
        for name in module.imports()
        if (top := name.partition(".")[0]) in ours and top not in MAY_IMPORT[module.package]
    ]
    assert not wrong


def test_dashboards_know_the_metrics_table_only(modules: list[Any]) -> None:
    wrong = [
        (module.path, name)
        for module in modules
        if module.package == "dashboards"
        for name in module.imports()
        if name.startswith("cluster") and not name.startswith("cluster.metrics")
    ]
    assert not wrong


def test_placement_needs_the_standard_library_only(modules: list[Any]) -> None:
    allowed = {*sys.stdlib_module_names, "placement"}
    wrong = [
        (module.path, name)
        for module in modules
        if module.package == "placement"
        for name in module.imports()
        if name.partition(".")[0] not in allowed
    ]
    assert not wrong


def test_ray_is_imported_at_the_edge_only(modules: list[Any]) -> None:
    wrong = [
        module.path
        for module in modules
        if any(name == "ray" or name.startswith("ray.") for name in module.imports())
        and not re.match(r"(cluster/ray_\w+\.py|deploy/)", module.path)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("start", "heavy"),
    [
        ("rank_worker.messages", {"torch", "ray", "numpy"}),
        ("cluster.ingress", {"torch", "ray"}),
        ("cluster.tokens", {"torch", "ray"}),
        ("deploy.cli", {"torch", "ray", "transformers", "pydantic", "numpy"}),
        ("deploy.config", {"torch", "ray", "transformers"}),
        ("rank_worker.launch", {"ray", "transformers", "pydantic", "fastapi"}),
    ],
)
def test_what_starts_light_pulls_nothing_heavy_in(
    modules: list[Any], start: str, heavy: set[str]
) -> None:
    by_name = {m.path.removesuffix(".py").replace("/", "."): m for m in modules}
    seen, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in seen:
            seen.add(name)
            waiting += by_name[name].start_imports()
            tops = {found.partition(".")[0] for found in by_name[name].start_imports()}
            assert not tops & heavy, name
    assert start in seen


def test_files_stay_readable(modules: list[Any]) -> None:
    assert not [(m.path, m.num_lines) for m in modules if m.num_lines > MAX_LINES]


def test_every_module_says_what_it_owns(modules: list[Any]) -> None:
    named = [m for m in modules if not m.path.endswith("__init__.py")]
    assert not [m.path for m in named if not ast.get_docstring(m.tree)]


def test_package_files_are_empty(modules: list[Any]) -> None:
    assert not [m.path for m in modules if m.path.endswith("__init__.py") and m.num_lines]


def test_tests_are_no_package(root: Path) -> None:
    files = [*(root / "tests").rglob("*.py")]
    assert not [f for f in files if f.name == "__init__.py"]
    names = [f.name for f in files if f.name.startswith("test_")]
    assert len(names) == len(set(names))


def test_packaging_and_type_checks_cover_the_same_folders(root: Path) -> None:
    config = tomllib.loads((root / "pyproject.toml").read_text())
    packaged = set(config["tool"]["setuptools"]["packages"])
    on_disk = {
        file.parent.relative_to(root).as_posix().replace("/", ".")
        for top in set(MAY_IMPORT) - {"dashboards"}
        for file in (root / top).rglob("__init__.py")
    }
    assert packaged == on_disk
    checked = set(config["tool"]["mypy"]["packages"])
    assert checked == {name for name in packaged if "." not in name}


def test_every_source_folder_is_a_package(modules: list[Any]) -> None:
    paths = {m.path for m in modules if m.package != "dashboards"}
    folders = {path.rpartition("/")[0] for path in paths}
    assert not [folder for folder in folders if f"{folder}/__init__.py" not in paths]


def test_model_types_are_named_by_adapters_only(modules: list[Any]) -> None:
    wrong = [
        (module.path, line, text)
        for module in modules
        if not module.path.startswith("placement/models/")
        for line, text in module.strings()
        if MODEL_TYPE.search(text)
    ]
    assert not wrong


def test_device_names_stay_with_the_device(modules: list[Any]) -> None:
    wrong = [
        (module.path, line, text)
        for module in modules
        if not DEVICES_AT_HOME.match(module.path) and not RESOURCE_NAMES.match(module.path)
        for line, text in module.strings()
        if DEVICE_NAME.match(text)
    ]
    assert not wrong


def test_device_libraries_are_used_where_the_device_lives(modules: list[Any]) -> None:
    home = re.compile(r"^(rank_worker/(device|comm)\w*\.py|ops/(?!reference/)\w+/.*|deploy/.*)$")
    wrong = [
        (module.path, node.lineno, node.attr)
        for module in modules
        if not home.match(module.path)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("cuda", "npu")
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    wrong += [
        (module.path, 0, name)
        for module in modules
        if not home.match(module.path)
        for name in module.imports()
        if name.startswith(("torch.cuda", "torch.npu", "torch_npu"))
    ]
    assert not wrong
