"""Graphs in files: the same bits, their own state, their gradients; values that a file cannot hold are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import anabranch as ab
from anabranch.cli.view import _page
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
    assert loaded.infer_shapes((9, 4))["output"] == ()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.to(torch.float64) * math.inf,
        lambda x: torch.zeros(3, dtype=torch.int32, device="cpu") + x[0, :3].to(torch.int32),
        lambda x: x.to(memory_format=torch.contiguous_format)[..., ::2].sum(dim=(0, 1), keepdim=True),
        lambda x: torch.view_as_real(torch.complex(x, x) * (1 + 2j)),
        lambda x: torch.where(x > 0, x, -1),
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


def test_weights_tied_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.two = nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(self.one(x))
            return y

    model, x = Tied(), torch.randn(2, 3)
    assert torch.equal(kept(ab.capture(model, x), tmp_path)(x), model(x))  # type: ignore[arg-type]


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


def described_in(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["graph"])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def sine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a graph of one operation on ``x``."""
    path = tmp_path_factory.mktemp("graphs") / "sine.safetensors"
    ab.capture(lambda x: x.sin(), torch.ones(2)).save(path)
    return path


def with_call(sine: Path, path: Path, target: str, *args: object) -> None:
    """Write the graph in ``sine`` to ``path`` with another call."""
    described = described_in(sine)
    (call,) = (one for one in described["nodes"] if "target" in one)
    call["target"], call["args"] = target, {"$tuple": [{"$tuple": list(args)}, {}]}
    save_file(load_file(sine), path, metadata={"graph": json.dumps(described)})


@pytest.mark.parametrize(
    "target",
    [
        "aten.embedding_dense_backward.default",
        "aten.max_pool2d_with_indices_backward.default",
        "aten.nll_loss_backward.default",
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten._embedding_bag_dense_backward.default",
        "aten.segment_reduce.default",
        "aten._segment_reduce_backward.default",
        "aten.native_layer_norm_backward.default",
        "aten.mkldnn_rnn_layer.default",
        "aten._fused_adam_.default",
        "aten._pack_padded_sequence.default",
        "aten._sparse_coo_tensor_unsafe.default",
        "aten._ctc_loss.default",
        "aten.from_file.default",
        "aten.set_.source_Storage",
        "aten.resize_.default",
        "prims.as_strided.default",
        "profiler._record_function_exit._RecordFunction",
    ],
)
def test_operators_that_trust_their_arguments_are_refused(target: str, sine: Path, tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    with_call(sine, path, target, {"$node": "x"})
    with pytest.raises(ab.CheckpointError, match=rf"a loaded graph may not call {target}.*ab\.gradients"):
        Graph.load(path)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("operator.pow", [7, 30_000_000]),
        ("operator.pow", [1 << 40, 60]),
        ("operator.pow", [7, {"$int": hex(1 << 80)}]),
        ("operator.mul", [[0], 1 << 40]),
        ("operator.mul", ["x", 1 << 40]),
        ("operator.mod", ["%9999999999d", 1]),
        ("operator.add", [(1 << 63) - 1, 1]),
        ("aten.add.Scalar", [{"$node": "x"}, {"$int": hex(1 << 80)}]),
        ("aten.add.Scalar", [{"$node": "x"}, {"$bytes": "YWI="}]),
    ],
)
def test_numbers_that_take_unbounded_time_or_memory_are_refused(
    target: str, args: list[object], sine: Path, tmp_path: Path
) -> None:
    path = tmp_path / "graph.safetensors"
    with_call(sine, path, target, *args)
    with pytest.raises(ab.CheckpointError, match=r"more than 64 bits|no number|no numbers|of type bytes"):
        Graph.load(path)


def test_a_graph_that_no_load_may_call_can_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    model = nn.Embedding(5, 3)
    forward = ab.capture(lambda ids: model(ids).sum(), torch.tensor([1, 2]))
    ab.gradients(forward, wrt=["weight"]).save(path)
    with pytest.raises(ab.CheckpointError, match="embedding_dense_backward"):
        Graph.load(path)
    assert "embedding_dense_backward" in _page(path)
    loaded = kept(forward, tmp_path)
    derived: Any = ab.gradients(loaded, wrt=["weight"])(torch.tensor([1, 2]))
    assert derived[-1].sum() == 6


def test_statistics_of_another_size_than_the_input_are_refused(sine: Path, tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    x, none = {"$node": "x"}, None
    args = [True, 0.1, 1e-5]
    with_call(sine, path, "aten.native_batch_norm.default", x, x, none, none, none, *args)
    with pytest.raises(ab.CheckpointError, match="does not fit its arguments"):
        Graph.load(path)
    model, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    ab.capture(model, x).save(path)
    tensors = load_file(path)
    tensors = {name: tensor[:1] if tensor.shape == (3,) else tensor for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"graph": json.dumps(described_in(path))})
    with pytest.raises(ab.CheckpointError, match="do not belong together"):
        Graph.load(path)


def test_attention_over_keys_of_another_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    key = torch.randn(2, 2, 3, 4)
    ab.capture(lambda x: nn.functional.scaled_dot_product_attention(x, key, key), torch.randn(2, 2, 5, 4)).save(path)
    assert "flash_attention" in str(described_in(path))
    Graph.load(path)
    described = described_in(path)
    for one in described["nodes"]:
        if "example" in one:
            one["example"][:2] = [8, 2, 5, 4], [40, 20, 4, 1]
    save_file(load_file(path), path, metadata={"graph": json.dumps(described)})
    with pytest.raises(ab.CheckpointError, match="do not belong together"):
        Graph.load(path)


def test_usual_models_and_gradients_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x = torch.randn(2, 5, 8)
    graph = ab.capture(lambda x: nn.functional.huber_loss(layer(x), x), x)
    torch.manual_seed(1)
    expected = graph(x)
    torch.manual_seed(1)
    assert torch.equal(kept(graph, tmp_path)(x), expected)  # type: ignore[arg-type]
    images = torch.randn(2, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.Conv2d(4, 2, 3), nn.Softmax(1))
    graph = ab.capture(lambda x: model(x).square().mean(), images)
    derived = ab.gradients(graph, wrt=["0.weight"])
    assert torch.equal(kept(derived, tmp_path)(images)[-1], derived(images)[-1])  # type: ignore[index]
