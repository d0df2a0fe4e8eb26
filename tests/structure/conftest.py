"""The product's source files, parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("placement", "ops", "rank_worker", "cluster", "deploy", "dashboards")


@dataclass(frozen=True)
class Module:
    """One source file: its path from the root and its syntax tree."""

    path: str
    tree: ast.Module
    num_lines: int

    @property
    def package(self) -> str:
        return self.path.partition("/")[0]

    def imports(self) -> set[str]:
        """Dotted names of everything imported, at any depth of the code."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}: relative import"
                assert node.module is not None
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        return names

    def start_imports(self) -> set[str]:
        """Dotted names imported when the module is: not in functions, not for types only."""
        names: set[str] = set()
        open_nodes: list[ast.AST] = list(self.tree.body)
        while open_nodes:
            node = open_nodes.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                open_nodes += node.orelse
                continue
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            open_nodes += ast.iter_child_nodes(node)
        return names

    def strings(self) -> list[tuple[int, str]]:
        """Line and value of every string constant but docstrings, f-string parts included."""
        docs = {
            id(node.body[0].value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        return [
            (node.lineno, node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docs
        ]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    found = []
    for package in PRODUCT:
        for file in sorted((ROOT / package).rglob("*.py")):
            text = file.read_text()
            path = file.relative_to(ROOT).as_posix()
            found.append(Module(path, ast.parse(text, path), text.count("\n")))
    assert {module.package for module in found} >= set(PRODUCT) - {"dashboards"}
    return found
