"""The walks through the sources in docs/design.md lead to files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOPS = re.findall(r"^\|[^|]*\| `([\w/]+\.py)` \| `([\w.]+)` \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)


def test_every_stop_of_the_walks_is_there() -> None:
    assert len(STOPS) > 20
    kinds = (ast.FunctionDef, ast.ClassDef)
    for file, function in STOPS:
        tree = ast.parse((ROOT / "src/anabranch" / file).read_text())
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        names = {node.name for node in nodes}
        names |= {f"{node.name}.{inner.name}" for node in nodes for inner in node.body if isinstance(inner, kinds)}
        assert function in names, (file, function)
