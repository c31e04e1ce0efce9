"""Graphs in files: the same bits, their own state, their gradients; values that a file cannot hold are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_boundaries import Scale
from torch import Tensor, nn

import anabranch as ab
from anabranch.graph import Graph


def kept(graph: Graph, tmp_path: Path) -> Graph:
    graph.save(tmp_path / "graph.safetensors")
    return Graph.load(tmp_path / "graph.safetensors")


def test_a_module_with_buffers_random_numbers_and_a_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
    )

    def fn(batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        logits = model(batch["x"]) * scale
        return {"logits": logits, "parts": [logits.sum(), (logits.max(1).values, None)]}

    batch = {"x": torch.randn(5, 2, 6, 6)}
    graph = ab.capture(fn, batch, 2.0)
    loaded = kept(graph, tmp_path)
    assert loaded.inputs == graph.inputs
    assert loaded.outputs == graph.outputs
    assert [node.operation for node in loaded.nodes] == [node.operation for node in graph.nodes]
    assert loaded.memory_plan().peak_bytes == graph.memory_plan().peak_bytes
    for scale in (2.0, 0.5):
        torch.manual_seed(1)
        expected: Any = graph(batch, scale)
        torch.manual_seed(1)
        found: Any = loaded(batch, scale)
        assert torch.equal(found["logits"], expected["logits"])
        assert torch.equal(found["parts"][1][0], expected["parts"][1][0])
        assert found["parts"][1][1] is None
    bound = {binding.name: binding.bound for binding in loaded.bindings}
    assert torch.equal(bound["1.running_mean"], model[1].running_mean)  # type: ignore[arg-type]
    assert bound["1.running_mean"] is not model[1].running_mean
    assert isinstance(bound["0.weight"], nn.Parameter)


def test_gradients_and_recomputation_of_a_loaded_graph(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(6, 4)
    graph = ab.capture(lambda x: model(x).square().mean(), x)
    loaded = kept(graph, tmp_path)
    wanted = [name for name in graph.inputs if name.endswith("weight")]
    expected: Any = ab.gradients(graph, wrt=wanted)(x)
    derived = ab.gradients(loaded, wrt=wanted)
    for found in (derived(x), kept(derived, tmp_path)(x)):
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))  # type: ignore[call-overload]
    assert loaded.infer_shapes((6, 4))["output"] == ()
    with pytest.raises(ValueError, match="knows no shapes but its own"):
        loaded.infer_shapes((9, 4))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.to(torch.float64) * math.inf,
        lambda x: torch.zeros(3, dtype=torch.int32, device="cpu") + x[0, :3].to(torch.int32),
        lambda x: x.to(memory_format=torch.contiguous_format)[..., ::2].sum(dim=(0, 1), keepdim=True),
        lambda x: torch.view_as_real(torch.complex(x, x) * (1 + 2j)),
        lambda x: (x.sort(dim=1)[1], x.shape[0], "text", None),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    ],
)
def test_operations_and_arguments(fn: Any, tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    graph = ab.capture(fn, x)
    expected, found = graph(x), kept(graph, tmp_path)(x)
    for one, two in zip(*(v if isinstance(v, tuple) else (v,) for v in (expected, found)), strict=True):
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two


def test_state_that_shares_memory_is_refused(tmp_path: Path) -> None:
    whole = torch.ones(4)
    first, last = whole[:2], whole[2:]

    def fn(x: Tensor) -> Tensor:
        return x * first + last

    with pytest.raises(ValueError, match="share memory"):
        ab.capture(fn, torch.ones(2)).save(tmp_path / "graph")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_a_graph_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    with pytest.raises(FileNotFoundError):
        Graph.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ab.CheckpointError, match="does not hold a complete graph"):
        Graph.load(path)
    ab.capture(lambda x: x.sin(), torch.ones(2)).save(path)
    data = path.read_bytes()
    for cut in range(0, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:cut])
        with pytest.raises(ab.CheckpointError):
            Graph.load(path)
    path.write_bytes(data.replace(b"aten.sin.default", b"aten.nix.default"))
    with pytest.raises(ab.CheckpointError, match=r"no operator 'aten.nix.default' is registered"):
        Graph.load(path)
    path.write_bytes(data.replace(b"aten.sin.default", b"aten.add.Tensor "))
    with pytest.raises(ab.CheckpointError):
        Graph.load(path)


def test_a_number_read_out_of_a_tensor_cannot_be_saved(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 1), torch.ones(2, 3)
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.Adam(model.parameters()))
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(3):
            executor.run(batch=x)
        with pytest.raises(ValueError, match="reads a number out of a tensor"):
            executor.graph().save(tmp_path / "step")
    assert not list(tmp_path.iterdir())


def test_what_belongs_to_this_process_cannot_be_saved(tmp_path: Path) -> None:
    far = Scale()
    with pytest.raises(ValueError, match="belongs to this process"):
        ab.capture(lambda x: far.call_whole(x)[0].sum(), torch.ones(2, 2)).save(tmp_path / "graph")
