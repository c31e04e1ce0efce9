"""The walks through the sources in docs/design.md lead to files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOPS = re.findall(r"^\|[^|]*\| `([\w/]+\.py)` \| `([\w.]+)` \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)


def test_there_are_walks() -> None:
    assert len(STOPS) > 20


@pytest.mark.parametrize(("file", "function"), STOPS)
def test_a_stop_of_a_walk_is_there(file: str, function: str) -> None:
    tree = ast.parse((ROOT / "src/anabranch" / file).read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    methods = {
        f"{node.name}.{inner.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, kinds)
    }
    assert function in names | methods
