"""Boundaries: one operation, the same on the tape and in a graph, crossed exactly once a run whatever passes do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_page import data_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import anabranch as ab
from anabranch.autodiff.boundary import crossing
from anabranch.autodiff.boundary.crossing import Crossed, Form
from anabranch.autodiff.boundary.whole_calls import WholeCall
from anabranch.errors import CaptureError, DeadlineExceeded, SchemaError
from anabranch.graph import Graph, StepProgram, capture
from anabranch.graph.crossings import crossing_of
from anabranch.graph.passes import drop_dead_nodes


def cross(boundary, *inputs: Tensor) -> Sequence[Tensor]:
    """Cross a boundary that has a ``WholeCall``, which Dynamo leaves whole."""
    if torch.compiler.is_dynamo_compiling():
        return boundary.whole_call(*inputs)  # type: ignore[no-any-return]
    return crossing.cross(boundary, *inputs)


class Kept:
    """The state that one run keeps for its backward."""


class Scale:
    """``x * factor`` on the far side, which counts who came, and may fail."""

    kind = "fake"

    def __init__(self, name: str = "far", factor: float = 3.0, log: list[str] | None = None) -> None:
        self.name = name
        self.factor = factor
        self.log = [] if log is None else log
        self.fails = ""
        self.gives_nothing = False
        self.alias = False
        self.width: int | None = None
        self.kept: list[weakref.ref[Kept]] = []
        self.whole_call = WholeCall(self)

    def call_whole(self, x: Tensor) -> Sequence[Tensor]:
        return cross(self, x)

    def forms(self, inputs: Sequence[Tensor | None]) -> list[Form]:
        (x,) = inputs
        assert x is not None
        return [Form(tuple(x.shape), x.dtype, x.device), Form((2,), torch.int64, x.device, differentiable=False)]

    def forward(self, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        (x,) = inputs
        assert x is not None
        self.log.append(f"{self.name} forward")
        if self.fails == "forward":
            raise DeadlineExceeded("too late", peer=self.name, operation="forward")
        state = Kept()
        self.kept.append(weakref.ref(state))
        y = x if self.alias else x * self.factor
        return Crossed([y[:, : self.width], torch.tensor([1, 2])], state, [1])

    def backward(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
    ) -> list[Tensor | None]:
        assert isinstance(state, Kept)
        self.log.append(f"{self.name} backward")
        if self.fails == "backward":
            raise DeadlineExceeded("too late", peer=self.name, operation="backward")
        gradient, integers = gradients
        assert integers is None
        if self.gives_nothing or gradient is None:
            return [None]
        return [gradient if self.alias else gradient * self.factor]


def operations(graph: Graph) -> list[str]:
    return [node.operation for node in graph.nodes]


def crossings(graph: Graph) -> list[str]:
    return [found.__name__ for node in graph.fx.nodes if (found := crossing_of(node)) is not None]


class Model(nn.Module):
    def __init__(self, far: Scale) -> None:
        super().__init__()
        self.far = far
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.first(x))
        outer, _ = cross(self.far, inner)
        return self.second(torch.relu(outer) + inner)  # type: ignore[no-any-return]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def trained(engine: str, far: Scale, runs: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(far)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = ab.TrainStep(model, loss, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    with ab.Executor({"train": step}, engine=engine) as executor:  # type: ignore[arg-type]
        losses = [executor.run("train", torch.randn(5 if n % 2 else 3, 4))["loss"] for n in range(runs)]
        assert executor.engine("train") == engine
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("alias", [False, True])
def test_a_graph_crosses_as_the_tape_does(alias: bool) -> None:
    tape, graph = Scale(), Scale()
    tape.alias = graph.alias = alias
    assert all(map(torch.equal, trained("tape", tape), trained("graph", graph)))
    assert graph.log == tape.log == ["far forward", "far backward"] * 3


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("engine", ["tape", "graph"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_failure_on_the_far_side_is_the_callers_changes_nothing_and_leaves_nothing(engine: str, phase: str) -> None:
    far = Scale()
    model = Model(far)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    with ab.Executor({"train": ab.TrainStep(model, loss, optimizer)}, engine=engine) as executor:  # type: ignore[arg-type]
        for _ in range(2):
            executor.run("train", torch.randn(3, 4))
        before = [value.clone() for value in model.parameters()]
        steps = [state["step"].clone() for state in optimizer.state.values()]
        far.fails = phase
        with pytest.raises(DeadlineExceeded, match=f"too late .peer far, operation {phase}") as raised:
            executor.run("train", torch.randn(3, 4))
        assert not raised.value.__cause__
        assert all(map(torch.equal, before, model.parameters()))
        assert all(map(torch.equal, steps, (state["step"] for state in optimizer.state.values())))
        far.fails = ""
        del raised
        gc.collect()
        assert all(kept() is None for kept in far.kept)
        far.log.clear()
        executor.run("train", torch.randn(3, 4))
        assert far.log == ["far forward", "far backward"]


def test_large_parameters_are_not_updated_before_the_last_crossing() -> None:
    far = Scale()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1 << 15), nn.Linear(1 << 15, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    program = StepProgram(model, lambda m, x: m[2](m[1](cross(far, m[0](x))[0])).mean(), [optimizer])
    for _ in range(2):
        program.run(torch.randn(3, 4))
    names = operations(program.graph)
    first = min(index for index, name in enumerate(names) if "_fused_" in name or "_foreach_add_" in name)
    assert first > names.index("fake_backward")
    before = [value.clone() for value in model.parameters()]
    far.fails = "backward"
    with pytest.raises(DeadlineExceeded):
        program.run(torch.randn(3, 4))
    assert all(map(torch.equal, before, model.parameters()))


def test_crossings_stay_apart_alive_and_in_order() -> None:
    log: list[str] = []
    first, second = Scale("one", log=log), Scale("two", log=log)

    def fn(x: Tensor) -> Tensor:
        cross(second, x)  # nobody reads it
        return cross(first, x)[0] + cross(first, x)[0] + cross(second, x * 1)[0]  # type: ignore[no-any-return]

    graph = drop_dead_nodes(capture(fn, torch.ones(2, 2)))
    assert crossings(graph) == ["fake_forward"] * 4
    assert log == []  # nobody goes there while a graph is captured
    graph(torch.ones(2, 2))
    assert log == ["two forward", "one forward", "one forward", "two forward"]


def test_recomputation_never_crosses_twice() -> None:
    far = Scale()

    def fn(x: Tensor) -> Tensor:
        near = cross(far, torch.exp(x))[0]
        kept = [torch.sin(near * i) for i in range(1, 6)]
        return sum(k.sum() for k in reversed(kept))  # type: ignore[return-value]

    graph = capture(fn, torch.ones(100, 10))
    smaller = graph.recompute(graph.memory_plan().peak_bytes // 2)
    assert operations(smaller) != operations(graph)
    assert crossings(smaller) == ["fake_forward"]
    assert torch.equal(smaller(torch.ones(100, 10)), graph(torch.ones(100, 10)))  # type: ignore[arg-type]
    assert far.log == ["far forward"] * 2


def test_where_the_far_side_gives_no_gradient_a_graph_has_zeros() -> None:
    far = Scale()
    far.gives_nothing = True
    w = torch.ones(2, 2, requires_grad=True)
    graph = ab.gradients(capture(lambda x: cross(far, x)[0].sum(), torch.ones(2, 2)), wrt=["x"])
    assert torch.equal(graph(torch.ones(2, 2))[1], torch.zeros(2, 2))  # type: ignore[index]
    cross(far, w)[0].sum().backward()
    assert w.grad is None


def test_a_graph_with_a_boundary_is_differentiated_once_and_not_twice() -> None:
    far = Scale()
    graph = ab.gradients(capture(lambda x: cross(far, torch.sin(x))[0].sum(), torch.ones(2, 2)), wrt=["x"])
    x = torch.randn(2, 2)
    assert torch.equal(graph(x)[1], 3.0 * torch.cos(x))  # type: ignore[index]
    with pytest.raises(CaptureError, match="the gradient of fake far cannot be differentiated again"):
        ab.gradients(graph, outputs=["x.grad"], wrt=["x"])


def test_the_far_side_learns_even_if_no_input_wants_a_gradient() -> None:
    far = Scale()
    model = nn.Linear(4, 1)
    program = StepProgram(model, lambda m, x: m(cross(far, x)[0]).mean(), [torch.optim.SGD(model.parameters(), lr=0.1)])
    for _ in range(2):
        program.run(torch.randn(3, 4))
    assert far.log == ["far forward", "far backward"] * 2


def test_an_answer_of_another_form_than_the_graphs_is_refused() -> None:
    far = Scale()
    graph = capture(lambda x: cross(far, x)[0] * 2, torch.ones(2, 2))
    far.width = 1
    with pytest.raises(
        SchemaError, match=r"fake far returned output 0 as \(2, 1\) .*captured when it returned \(2, 2\)"
    ):
        graph(torch.ones(2, 2))


def test_inductor_is_not_given_a_boundary() -> None:
    model = Model(Scale())
    program = StepProgram(model, loss, [torch.optim.SGD(model.parameters(), lr=0.1)], compile=True)
    with pytest.raises(CaptureError, match="Inductor compiles no step that crosses to fake far; use compile=False"):
        program.run(torch.randn(3, 4))


def test_another_tracer_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(CaptureError, match="'far' is across a boundary"):
        cross(Scale(), torch.ones(2, 2))


def test_pages_and_drawings_show_boundaries_in_their_colour(tmp_path: Path) -> None:
    model = Model(Scale("ffn.3"))
    program = StepProgram(model, loss, [torch.optim.SGD(model.parameters(), lr=0.1)])
    program.run(torch.randn(3, 4))
    program.graph.to_html(tmp_path / "graph.html")
    nodes = [node for node in data_of(tmp_path / "graph.html")["nodes"] if node["boundary"]]
    assert [(node["label"], node["phase"], node["boundary"]) for node in nodes] == [
        ("fake_forward", "forward", "fake ffn.3"),
        ("fake_backward", "backward", "fake ffn.3"),
    ]
    coloured = [line for line in program.graph.to_dot().splitlines() if "fillcolor" in line]
    assert ["fake_forward" in coloured[0], "fake_backward" in coloured[1], len(coloured)] == [True, True, 2]
