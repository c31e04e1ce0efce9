"""Functions captured as graphs: names, results, and refusals that name the line."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from anabranch.autodiff import GradManager
from anabranch.autodiff.hooks import hooks_of_step
from anabranch.errors import CaptureError, SchemaError
from anabranch.graph import StepProgram, capture, gradients
from anabranch.graph.step.bound_state import OptimizerGroups


def test_inputs_are_named_after_parameters_and_nested_leaves_by_path() -> None:
    def fn(x: Tensor, batch: dict[str, Tensor], scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        return x + batch["ids"], {"scaled": x * scale}

    graph = capture(fn, torch.ones(2), {"ids": torch.ones(2)}, 2.0)
    assert graph.inputs == ["x", "batch.ids", "scale"]
    assert graph.outputs == ["output.0", "output.1.scaled"]
    graph = capture(lambda first, *rest: first + sum(rest), *[torch.ones(1)] * 3)
    assert (graph.inputs, graph.outputs) == (["first", "rest.0", "rest.1"], ["output"])


def test_the_state_of_modules_is_bound_under_its_qualified_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    graph = capture(lambda x: model(x), torch.randn(5, 3))
    assert graph.inputs == ["x", *dict(model.named_parameters()), *dict(model.named_buffers())]
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    weight = torch.randn(2)
    graph = capture(lambda x: two(one(x * weight)), torch.randn(5, 2))
    assert graph.inputs == ["x", "one.weight", "one.bias", "two.weight", "two.bias", "weight"]
    weight.fill_(0)
    assert torch.equal(graph(torch.randn(5, 2)), two(one(torch.zeros(5, 2))))


def test_state_is_current_and_updated_in_place() -> None:
    model = nn.BatchNorm1d(3)
    plain = nn.BatchNorm1d(3)
    graph = capture(model, torch.randn(4, 3))
    assert torch.equal(model.running_mean, torch.zeros(3))  # type: ignore[arg-type]
    x = torch.randn(4, 3)
    assert torch.equal(graph(x), plain(x))
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_a_buffer_that_the_forward_rebinds_is_updated_by_a_step_and_refused_by_capture() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
            return x - self.mean

    model, plain = Average(), Average()
    for each in (model, plain):
        each.weight = nn.Parameter(torch.ones(2))
    program = StepProgram(model, lambda m, x: (m(x) * m.weight).sum(), [torch.optim.SGD(model.parameters(), lr=0.0)])
    for _ in range(3):
        x = torch.randn(3, 2)
        assert torch.equal(program.run(x)["loss"], (plain(x) * plain.weight).sum().detach())
    assert torch.equal(model.mean, plain.mean)
    with pytest.raises(CaptureError, match="side effects happened"):
        capture(model, torch.ones(3, 2))


@dataclasses.dataclass
class Scaled:
    x: Tensor
    scale: Any


def test_inputs_and_outputs_may_be_dataclasses() -> None:
    def fn(batch: Scaled) -> Scaled:
        return Scaled(batch.x * batch.scale, {"sum": batch.x.sum()})

    graph = capture(fn, Scaled(torch.ones(2), 2.0))
    assert (graph.inputs, graph.outputs) == (["batch.x", "batch.scale"], ["output.x", "output.scale.sum"])
    found = graph(Scaled(torch.ones(2), 3.0))
    assert type(found) is Scaled
    assert torch.equal(found.x, torch.full((2,), 3.0))


def test_a_float_may_differ_from_call_to_call_and_an_int_may_not() -> None:
    graph = capture(lambda x, scale, dim: x.sum(dim) * scale**2, torch.ones(2, 3), 1.5, 0)
    x = torch.randn(2, 3)
    assert torch.equal(graph(x, 2.5, 0), x.sum(0) * 2.5**2)
    with pytest.raises(SchemaError, match="dim: the graph was captured for 0, got 1"):
        graph(x, 2.5, 1)


COMPLEX = torch.ones(3, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ((torch.ones(3, 2), COMPLEX, 1.0), r"x: the graph was captured for \(2, 3\) .* got \(3, 2\)"),
        (("no", COMPLEX, 1.0), "x: expected a tensor, got str"),
        ((torch.ones(2, 3), COMPLEX.conj(), 1.0), r"z: .* got a conjugate.*resolve_conj\(\)"),
        ((torch.ones(2, 3), COMPLEX, "no"), "scale: expected a number, got str"),
    ],
)
def test_a_call_with_something_else_names_the_input_and_both(argument: tuple[Any, ...], message: str) -> None:
    graph = capture(lambda x, z, scale: (x + z.imag) * scale, torch.ones(2, 3), COMPLEX, 2.0)
    with pytest.raises(SchemaError, match=message):
        graph(*argument)


@pytest.mark.parametrize("value", ["text", None, object()])
def test_an_example_that_is_neither_tensor_nor_number_is_named(value: object) -> None:
    with pytest.raises(TypeError, match=r"batch\.key is a .* neither a tensor nor a number"):
        capture(lambda batch: batch["x"], {"x": torch.ones(1), "key": value})


seen: list[object] = []


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def read(x: Tensor) -> Tensor:
    return x * x.sum().item()


def keep(x: Tensor) -> Tensor:
    seen.append(x.shape)
    return x + 1


def choose(x: Tensor) -> Tensor:
    return x[x > 0]


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Remembering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last


def line_in(function: Callable[..., object], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + offset}"


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (branch, re.escape(line_in(branch, "if x.sum()"))),
    "item": (read, re.escape(line_in(read, ".item()"))),
    "choose": (choose, re.escape(line_in(choose, "x[x > 0]"))),
    "list": (keep, "side effects happened.*seen"),
    "counter": (Counting(), "side effects happened.*function"),
    "attribute": (Remembering(), "side effects happened.*function"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_code_that_a_graph_would_not_repeat_is_refused_with_its_line_and_does_nothing(kind: str) -> None:
    function, message = REFUSED[kind]
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        capture(function, torch.ones(3))
    assert seen == []
    assert not vars(function).get("calls")
    assert "last" not in vars(function)


def double(gradient: Tensor) -> Tensor:
    return 2 * gradient


def node_of(model: nn.Module) -> Any:
    """The node that accumulates a gradient, which lives as long as the model."""
    node = vars(model)["node"] = get_gradient_edge(model.bias).node  # type: ignore[arg-type]
    return node


HOOKS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "of a parameter": (
        lambda model, optimizer: model.weight.register_hook(double),
        rf"{re.escape(line_in(double, 'def double'))}: 'weight' has a gradient hook",
    ),
    "of a node": (
        lambda model, optimizer: node_of(model).register_hook(lambda *_: None),
        "the AccumulateGrad node of 'bias' has a hook",
    ),
    "before a node": (
        lambda model, optimizer: node_of(model).register_prehook(lambda *_: None),
        "the AccumulateGrad node of 'bias' has a hook",
    ),
    "of a step": (lambda model, optimizer: optimizer.register_step_post_hook(double), "SGD has a step hook"),
    "of a module": (lambda model, optimizer: model.register_full_backward_hook(double), "has a backward hook"),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_a_graph_would_not_call_is_refused_as_soon_as_it_is_set(hook: str) -> None:
    register, message = HOOKS[hook]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    program = StepProgram(model, lambda m, x: m(x).sum(), [optimizer])
    program.run(torch.ones(1, 2))
    handle = register(model, optimizer)
    with pytest.raises(CaptureError, match=message):
        program.run(torch.ones(1, 2))
    if hook == "of a module":
        with pytest.raises(CaptureError, match=message):
            capture(model, torch.ones(1, 2))
    handle.remove()
    program.run(torch.ones(1, 2))


def test_the_counter_of_a_scheduler_is_no_hook_where_dynamo_has_wrapped_the_step_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does at the first capture of a process, for some optimizers: a second run of theirs was refused."""
    own = getattr(torch.optim.RAdam.step, "_torchdynamo_orig_callable", torch.optim.RAdam.step)
    monkeypatch.setattr(torch.optim.RAdam, "step", own)
    optimizer = torch.optim.RAdam(nn.Linear(2, 2).parameters())  # which wraps it, too, if it is the first
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    monkeypatch.setattr(torch.optim.RAdam, "step", torch._dynamo.disable(torch.optim.RAdam.step))
    assert hooks_of_step(optimizer) == []


def test_a_session_attached_to_the_parameters_is_allowed() -> None:
    model = nn.Linear(2, 2)
    manager = GradManager().attach(model.parameters())
    with manager:
        manager.backward(model(torch.ones(1, 2)).sum())
    program = StepProgram(model, lambda m, x: m(x).sum(), [torch.optim.SGD(model.parameters())])
    program.run(torch.ones(1, 2))


def test_a_forward_hook_is_captured_unless_it_changes_python_state() -> None:
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda _m, _a, output: output * 2)
    x = torch.randn(1, 2)
    assert torch.equal(capture(model, x)(x), model(x))
    handle.remove()
    outputs: list[object] = []
    model.register_forward_hook(lambda _m, _a, output: outputs.append(output))
    with pytest.raises(CaptureError, match="side effects happened"):
        capture(model, x)
    assert outputs == []


def test_numbers_of_groups_that_name_their_parameters_are_read_without_work() -> None:
    """Each step reads them; ``read`` returns the same object where nothing was to be looked at again."""
    model = nn.Linear(2, 2)
    contents = OptimizerGroups([torch.optim.Adam(model.named_parameters(), lr=0.1)])
    assert contents.read() is contents.read()


def test_a_cycling_momentum_is_refused_before_it_makes_a_graph_a_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    program = StepProgram(model, lambda m, x: m(x).sum(), [optimizer])

    def cycle() -> None:
        for step in range(20):
            optimizer.param_groups[0]["momentum"] = 0.5 + 0.01 * step
            program.run(torch.ones(1, 2))

    with pytest.raises(CaptureError, match="cycle_momentum=False"):
        cycle()


def test_lazy_conjugates_are_refused() -> None:
    kept = COMPLEX.conj()
    with pytest.raises(CaptureError, match=r"kept is a conjugate.*resolve_conj\(\)"):
        capture(lambda x: x + kept.imag, torch.ones(3))


class Holder:
    """As a trainer: no module itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x).sum()  # type: ignore[no-any-return]

    loss = __call__


def test_a_graph_says_if_its_modules_hold_other_tensors_than_it_was_captured_with(tmp_path: Path) -> None:
    changes: dict[str, Callable[[Any], object]] = {
        "0.weight": lambda model: model.load_state_dict(model.state_dict(), assign=True),
        "0": lambda model: model.__setitem__(0, nn.Linear(3, 3)),
        "1.running_mean": lambda model: model.double(),
    }
    x = torch.ones(2, 3)
    for name, change in changes.items():
        replaced = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
        holder = Holder(replaced)
        graphs = [capture(holder.loss if name == "0" else holder, x)]
        graphs.append(gradients(graphs[0], wrt=["0.weight"]))
        change(replaced)
        for graph in graphs:
            with pytest.raises(CaptureError, match=f"^{name} was replaced after the capture"):
                graph(x)
        with pytest.raises(CaptureError, match="was replaced"):
            graphs[0].save(tmp_path / "graph.safetensors")
