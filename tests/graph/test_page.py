"""The page that shows a graph: its content, that it loads nothing, and that a browser draws it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.graph import Graph, StepProgram, capture
from browser import needs_a_browser, seen


def step_graph(layers: int = 3) -> Graph:
    blocks = [layer for _ in range(layers) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())]
    model = nn.Sequential(*blocks)
    program = StepProgram(model, lambda m, x: m(x).square().mean(), [torch.optim.Adam(model.parameters(), fused=True)])
    program.run(torch.ones(8, 16))
    return program.graph


def data_of(page: Path) -> dict[str, list[dict[str, Any]]]:
    """What a page of a graph shows."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_page_holds_every_operation_with_module_shape_and_bytes_and_the_bytes_of_the_run(tmp_path: Path) -> None:
    graph = step_graph()
    graph.to_html(tmp_path / "graph.html")
    data, plan = data_of(tmp_path / "graph.html"), graph.memory_plan()
    nodes = data["nodes"]
    by_phase = {phase: [n for n in nodes if n["phase"] == phase] for phase in {n["phase"] for n in nodes}}
    operations = [n for phase in ("forward", "backward", "update") for n in by_phase[phase]]
    assert [n["name"] for n in operations] != []
    assert {n["name"] for n in operations} == {n.name for n in graph.nodes}
    assert len(by_phase["input"]) == len(graph.inputs)
    assert {"0", "1", "2"} <= {n["scope"] for n in by_phase["forward"]}
    assert {"0", "1", "2"} <= {n["scope"] for n in by_phase["backward"]}
    addmm = next(n for n in operations if n["label"] == "addmm")
    assert (addmm["shape"], addmm["bytes"], addmm["dtype"]) == ("8x16", 512, "float32")
    assert all(nodes[i]["name"] for n in nodes for i in n["inputs"])
    assert max(data["alive"]) == plan.peak_bytes  # type: ignore[type-var]
    assert len(data["makers"]) == len(data["alive"])
    assert {name for name in data["makers"] if name} <= plan.intervals.keys()


def test_a_copy_to_another_device_is_a_boundary(tmp_path: Path) -> None:
    capture(lambda x: x.to("meta"), torch.ones(2)).to_html(tmp_path / "graph.html")
    assert [n["boundary"] for n in data_of(tmp_path / "graph.html")["nodes"]] == ["", "cpu -> meta", ""]


def test_the_dot_form_has_every_operation_and_a_cluster_a_module() -> None:
    graph = step_graph(1)
    text = graph.to_dot()
    assert all(f'"{node.name}" [' in text for node in graph.nodes)
    assert 'label="0";' in text
    assert text.count("{") == text.count("}")


@pytest.mark.slow
@needs_a_browser
def test_a_browser_folds_a_thousand_operations_into_a_picture_and_opens_them(tmp_path: Path) -> None:
    graph = step_graph(60)
    assert len(graph.nodes) > 900
    graph.to_html(tmp_path / "graph.html")
    nodes = len(data_of(tmp_path / "graph.html")["nodes"])
    folded, opened = (seen(tmp_path / "graph.html", tmp_path, after) for after in ("#gelu", "#*"))
    assert "120 found" in folded
    assert f'data-nodes="{nodes}"' in folded
    boxes = [int(re.search(r'data-visible="(\d+)"', look)[1]) for look in (folded, opened)]  # type: ignore[index]
    assert boxes[0] < 400
    assert boxes[1] > nodes
