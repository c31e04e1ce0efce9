"""Models cut at named submodules: the unsplit model's answers, or a refusal that names the line."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import (
    Computes,
    PopSecond,
    StashSecond,
    assert_same_buffers,
    assert_same_gradients,
    assert_trains_alike,
    close,
    reference,
)
from split_models import Coded, Language, linears
from torch import Tensor, nn
from torch.utils import checkpoint as recomputation

from anabranch.errors import CaptureError
from anabranch.pipeline import NoChunk, Pipe, split

IDS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 2], [0, 3, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]])


def assert_splits_alike(
    model: nn.Module, at: list[str], *inputs: Tensor, example: Tensor | None = None, **split_into: object
) -> None:
    """A call and its backward are the model's."""
    plain = reference(model)
    with Pipe(split(model, at, example=example), [1] * (len(at) + 1), chunks=2, **split_into) as pipe:
        y = pipe(*inputs)
        y.sum().backward()
    expected = plain(*inputs)
    expected.sum().backward()
    assert close(y, expected)
    assert_same_gradients(model, plain)


CUTS = [["h.1", "h.3"], ["h.0.mlp", "norm"], ["h.2", "head"]]
WAYS = [("GPipe", "always"), ("1F1B", "always"), ("1F1B", "never"), ("GPipe", "never")]


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "at"),
    [(*way, at) for way, at in zip(WAYS, [*CUTS, CUTS[0]], strict=True)],
    ids=str,
)
def test_a_split_model_is_the_model(schedule: str, checkpoint: str, at: list[str]):
    model = Language().double()
    plain = reference(model)
    parts = split(model, at)
    assert list(parts.state_dict()) == list(plain.state_dict())
    assert [parameter for part in parts for parameter in part.parameters()]
    extra = [torch.rand(5, 1, 1, dtype=torch.float64), torch.rand(5, 3, 4, dtype=torch.float64)]
    with Pipe(parts, [1, 1, 1], ["cpu"] * 3, checkpoint=checkpoint, schedule=schedule) as pipe:
        pairs = zip(pipe.named_parameters(), model.named_parameters(), strict=True)
        assert all(ours[0] == theirs[0] and ours[1] is theirs[1] for ours, theirs in pairs), "its optimizer's, too"
        pipe.load_state_dict(plain.state_dict())
        for chunks in (1, 3):
            pipe.chunks = chunks
            ours, theirs = ([tensor.clone().requires_grad_() for tensor in extra] for _ in range(2))
            y = pipe(IDS, mask=MASK, extra=ours, scale=0.5)
            y["logits"].square().sum().backward()
            expected = plain(IDS, mask=MASK, extra=theirs, scale=0.5)
            expected["logits"].square().sum().backward()
            assert close(y["logits"], expected["logits"])
            assert y["loss"] is None
            assert_same_gradients(pipe, plain)
            assert all(close(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))
            with torch.no_grad():
                assert close(pipe(IDS[:1], scale=2.0)["logits"], plain(IDS[:1], scale=2.0)["logits"])


def test_dropout_between_modules_follows_the_mode():
    model = Language(dropout=0.5).double()
    with Pipe(split(model, ["h.2"]), [1, 1], chunks=2, checkpoint="always") as pipe:
        first, second = (pipe(IDS)["logits"] for _ in range(2))
        assert not torch.equal(first, second)
        first.sum().backward()
        again = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        pipe.calls, pipe.checkpoint = 0, "never"
        pipe(IDS)["logits"].sum().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), again, strict=True)), "replayed"
        pipe.eval()
        assert close(pipe(IDS)["logits"], copy.deepcopy(model)(IDS)["logits"])
        pipe.train()
        assert not torch.equal(pipe(IDS)["logits"], pipe(IDS)["logits"])
        model.dropout = 0.0
        assert torch.equal(pipe(IDS)["logits"], pipe(IDS)["logits"]), "a plain value that has changed is seen"


def test_modules_are_in_the_parts_in_which_an_example_or_the_names_have_them():
    model = linears(lambda m, x, y=None: m.b(m.a(x) if y is None else m.a(x) + y), names="a b unused")
    x = torch.randn(4, 4)
    for example in (None, x, (x,), {"x": x, "y": x}):
        parts = split(model, ["b"], example=example)
        with Pipe(parts, [1, 1], chunks=2) as pipe:
            torch.testing.assert_close(pipe(x, x), model(x, x))
            torch.testing.assert_close(pipe(y=NoChunk(x[:1]), x=x), model(x, x[:1]))
        assert list(parts.state_dict()) == list(model.state_dict())
        assert {name for part in parts for name in part.state_dict()} == {*model.state_dict()}, "unused ones too"
    reversed_names = wraps(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    reversed_names._modules = dict(reversed(reversed_names._modules.items()))
    with pytest.raises(CaptureError, match="'a' is used by part 0, but it is in part 1; split the model with example="):
        Pipe(split(reversed_names, ["b"]), [1, 1])(x)
    parts = split(reversed_names, ["b"], example=x)
    torch.testing.assert_close(Pipe(parts, [1, 1])(x), reversed_names(x))
    torch.testing.assert_close(parts(x), reversed_names(x))


def test_modes_between_modules_are_those_of_the_model():
    def guarded(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():  # where a view of a parameter requires gradients all the same
            kept = model.a(x) * 2 + model.b.weight.T[:1]
        with torch.autocast("cpu", enabled=False):
            return model.c(kept.float() @ torch.eye(3) + model.b(x).float())

    model = linears(guarded, 3, "a b c")
    plain = reference(model)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16), Pipe(split(model, ["c"], example=x), [1, 1], chunks=2) as pipe:
        y, expected = pipe(x), plain(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    expected.sum().backward()
    assert model.a.weight.grad is None
    torch.testing.assert_close(model.b.weight.grad, plain.b.weight.grad)


def test_code_that_reads_a_mode_is_traced_for_each():
    def doubles(model, x):
        x = x * 2 if torch.is_grad_enabled() else x
        return x * 3 if torch.is_autocast_enabled("cpu") else x

    model = Frame(doubles)
    x = torch.randn(4, 4)
    with Pipe(split(model, ["b"], example=x), [1, 1], chunks=2) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), model(x))
        with torch.inference_mode():
            torch.testing.assert_close(pipe(x), model(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(pipe(x), model(x))


def test_deferred_batch_norm_sees_the_whole_batch():
    model = wraps(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    plain = reference(model)
    x = torch.randn(6, 3, dtype=torch.float64)
    with Pipe(split(model, ["between"]), [1, 1], chunks=3, deferred_batch_norm=True, checkpoint="always") as pipe:
        pipe(x).sum().backward()
        assert list(pipe.state_dict()) == list(plain.state_dict())
    plain(x)
    assert_same_buffers(model, plain)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Changed(Reversed):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)


@pytest.mark.parametrize("function", [Reversed, Changed])
def test_functions_with_a_backward_of_their_own_stay_in_a_module(function: type[torch.autograd.Function]):
    with pytest.raises(CaptureError, match=r"calls \w+.apply.*own.*glue=|passes linear a tensor that comes from no"):
        split(Frame(lambda model, x: function.apply(x)), ["b"], example=torch.randn(4, 4))
    model = wraps(nn.Linear(4, 4), Computes(function.apply), nn.Linear(4, 4)).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    assert_splits_alike(model, ["b"], x, example=x, checkpoint="always")


class Counting(nn.Module):
    """Counts its calls in a buffer, between its modules."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.late = nn.Linear(3, 3), nn.Linear(3, 3), late
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.calls.add_(1)
        x = self.b(x * 1.0)
        return x * self.calls if self.late else x


def test_a_buffer_between_modules_is_changed_once_a_microbatch():
    model = Counting()
    parts = split(model, ["b"], example=torch.zeros(2, 3))
    assert model.calls == 0, "tracing leaves the model alone"
    with Pipe(parts, [1, 1], chunks=3, checkpoint="always") as pipe:
        pipe(torch.randn(3, 3)).sum().backward()
    assert model.calls == 3


def test_a_buffer_that_one_part_changes_is_not_read_in_another():
    model = Counting(late=True)
    parts = split(model, ["b"], example=torch.zeros(2, 3))
    with Pipe(parts, [1, 1], chunks=2) as pipe, pytest.raises(RuntimeError, match="calls, which several stages use"):
        pipe(torch.zeros(2, 3))


def test_an_example_tells_which_part_uses_a_tensor_of_the_model_itself():
    class Shifts(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.shift)

    x, devices = torch.zeros(2, 3), ["cpu", "meta"]
    with pytest.raises(RuntimeError, match="calls, which several stages use.*example="):
        Pipe(split(Counting(), ["b"]), [1, 1], chunks=2)(x)
    with pytest.raises(ValueError, match="shift is used by stages on cpu and meta.*example="):
        Pipe(split(Shifts(), ["b"]), [1, 1], devices=devices)
    Pipe(split(Shifts(), ["b"], example=x), [1, 1], devices=devices).close()


def test_skips_and_keywords_beside_the_parts():
    model = linears(lambda m, x, factor: m.pop(m.middle(m.stash(x, x.sin())), factor), 3, "middle", pop=PopSecond(),
                    stash=StashSecond())  # fmt: skip
    x, factor = torch.randn(2, 5, 3, dtype=torch.float64)
    assert_splits_alike(model.double(), ["middle", "pop"], x, factor, example=(x, factor), checkpoint="always")


# Refusals.


class Frame(nn.Module):
    """Two layers, and code between them that each test gives."""

    def __init__(self, between) -> None:
        super().__init__()
        self.a, self.b, self.c, self.bn = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        count = self.count
        self.kept, self.plain = None, torch.zeros(3)
        self.seen: list[Tensor] = []
        self.tick, self.norm = lambda: count.add_(1), lambda x: self.bn(x)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self, self.a(x)))


OUTSIDE, STATE = torch.zeros(3), torch.get_rng_state()
TRAINED = torch.ones(4, requires_grad=True)


def with_other_parameters(model: nn.Module, x: Tensor) -> Tensor:
    twice = {name: parameter * 2 for name, parameter in model.c.named_parameters()}
    return torch.func.functional_call(model.c, twice, (x,))


def with_an_attribute(model: nn.Module, x: Tensor) -> Tensor:
    model.c.scale = 2.0
    x = model.c(x)
    del model.c.scale
    return x


def in_a_view(model: nn.Module, x: Tensor) -> Tensor:
    OUTSIDE[0] = 1
    return x


FORWARD = r"test_split.py:\d+ \(forward\)"


def with_a_seed(model: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        return x * torch.rand(4)


def unseen(model: nn.Module, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        y = x * 2
    return model.c(y)


AT_A_CALL = r"\(.*test_split.py:\d+ \(with_\w+\)\)"
LINE = r"test_split.py:\d+ \(<lambda>\)"
SEEDS = r"seeds PyTorch's generator between its modules.*glue="
IN_PLACE = r"test_split.py:\d+ .* in place .*glue="
BETWEEN: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "a branch by values": (lambda m, x: x if x.sum() > 0 else -x, f"{LINE} depends on the values of a tensor"),
    "rows by values": (lambda m, x: x[x > 0].expand(4, 4), f"{LINE} depends on the values of a tensor"),
    "NumPy": (lambda m, x: torch.from_numpy(x.detach().numpy()), f"{LINE} depends on the values of a tensor"),
    "an attribute": (lambda m, x: setattr(m, "kept", x) or x, rf"{FORWARD}\) sets its attribute 'kept'"),
    "a list": (lambda m, x: m.seen.append(x) or x, "sets its attribute 'seen'"),
    "another buffer": (lambda m, x: setattr(m, "count", m.count + 1) or x, "sets its attribute 'count'"),
    "Python's generator": (lambda m, x: x * random.random(), rf"{FORWARD}\) draws random numbers from Python's"),
    "a reentrant checkpoint": (
        lambda m, x: recomputation.checkpoint(m.c, x, use_reentrant=True), f"{LINE} calls CheckpointFunction.apply",
    ),
    "a closure": (lambda m, x: m.c(x, lambda y: m.c(y)), f"{LINE} passes a function to"),
    "a trained tensor": (lambda m, x: x * TRAINED, f"{LINE} trains a tensor that is not a parameter"),
    "vmap": (lambda m, x: torch.vmap(torch.sin)(x), f"{LINE} runs inside a torch.func transform.*glue="),
    "a tensor of no function": (unseen, "test_split.py.* a tensor that comes from no PyTorch function.*glue="),
    "an operation without a form": (lambda m, x: torch.nested.nested_tensor([x])[0], rf"{LINE} cannot run.*glue="),
    "functional_call": (with_other_parameters, rf"'c' {AT_A_CALL} sets its attribute 'weight'.*glue="),
    "an attribute of a layer for one call": (with_an_attribute, rf"'c' {AT_A_CALL} sets its attribute 'scale'"),
    "a seed": (lambda m, x: torch.manual_seed(1) and x * torch.rand(4), SEEDS),
    "a seed put back": (with_a_seed, SEEDS),
    "a generator's state": (lambda m, x: torch.set_rng_state(STATE) or x, SEEDS),
    "a buffer in a closure": (lambda m, x: m.tick() * x, IN_PLACE),
    "a module in a closure": (lambda m, x: m.norm(x), IN_PLACE),
    "a plain tensor": (lambda m, x: m.plain.add_(1)[0] * x, IN_PLACE),
    "a view of a global": (in_a_view, IN_PLACE),
    "out=": (lambda m, x: torch.add(m.count, 1, out=OUTSIDE)[0] * x, IN_PLACE),
}  # fmt: skip


@pytest.mark.parametrize("name", BETWEEN)
def test_code_that_cannot_be_split_is_named(name: str):
    between, message = BETWEEN[name]
    model, x = Frame(between), torch.randn(4, 4)
    tensors, state = [model.plain, model.bn.num_batches_tracked, model.count, OUTSIDE], torch.get_rng_state()
    versions = [tensor._version for tensor in tensors]
    with pytest.raises(CaptureError, match=message):
        split(model, ["b"], example=x)
    assert [tensor._version for tensor in tensors] == versions, "and all is as it was"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("model", "at", "message"),
    [
        (Frame(lambda m, x: m.b(x)), ["b"], "'b' is called twice"),
        (Frame(lambda m, x: x), ["c"], "'c' is not called"),
        (Language(), ["h"], "'h' is a ModuleList, which is never called"),
        (Language(), ["h.9"], "no submodule 'h.9'"),
        (nn.Sequential(*(nn.Identity() for _ in range(11))), ["11"], r"it has \['0'.* '7'\] and 3 more"),
        (Language(), ["h.2", "h.1"], "not in execution order: 'h.1' runs before 'h.2'"),
        (Language(), ["h.1", "h.1"], "must name at least one submodule that starts a stage"),
        (Language(), [], "must name at least one submodule that starts a stage"),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_names_that_begin_no_stage_are_refused(model: nn.Module, at: list[str], message: str):
    example = torch.zeros(4, 4) if isinstance(model, Frame) else IDS
    with pytest.raises(ValueError, match=message):
        split(model, at, example=example)


def test_a_module_called_in_two_parts_is_refused():
    with pytest.raises(CaptureError, match=r"'a' is called by the parts \[0, 1\] \(.*test_split.py:\d+"):
        split(Frame(lambda m, x: m.a(m.c(x))), ["c"], example=torch.randn(4, 4))
    model = Frame(lambda m, x: m.two[0](m.c(m.two(x))))
    model.two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(
        CaptureError, match=r"'two.0' is called by the parts \[1\] \(.*\), but 'two', which contains it"
    ):
        split(model, ["c"], example=torch.randn(4, 4))
    model.between = lambda m, x: m.c(m.two[0](m.two(x)))
    x = torch.randn(4, 4, dtype=torch.float64)
    assert_splits_alike(model.double(), ["c"], x, example=x)
    model.two = nn.Sequential(nn.Tanh(), nn.ReLU())
    model.between = lambda m, x: m.two(m.c(m.two[0](m.two(x))))
    assert split(model, ["c"], example=x)[0].get_submodule("two") is model.two
    with pytest.raises(TypeError, match="at='h.1' is not a list"):
        split(Language(), "h.1")


def test_a_module_around_a_cut_has_no_hooks():
    model = Language()
    model.h[1].register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"'h.1' has hooks"):
        split(model, ["h.1.mlp"], example=IDS)
    parts = split(model, ["h.1"], example=IDS)
    for whole in (parts, model):
        hook = whole.register_forward_hook(lambda *_: None)
        with pytest.raises(TypeError, match="a model that was split has hooks that no stage runs"):
            Pipe(parts, [1, 1])
        hook.remove()
    Pipe(parts, [1, 1])


def test_a_child_called_model_is_found_by_its_name():
    whole = Coded(lambda m, x: m.model(x), model=wraps(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    parts = split(whole, ["model.b"])
    for one in (parts, Pipe(parts, [1, 1]), parts[1]):
        assert one.get_submodule("model.b") is whole.model.b


def test_a_module_reached_by_a_closure_is_the_models():
    model = Frame(lambda model, x: x).double()
    original = model.a
    model.between = lambda _, x: original(x)
    x = torch.randn(4, 4, dtype=torch.float64)
    with Pipe(split(model, ["b"], example=x), [1, 1], chunks=2) as pipe:
        pipe(x).square().sum().backward()
    ours = [parameter.grad.clone() for parameter in (*model.a.parameters(), *model.b.parameters())]
    model.zero_grad()
    model(x).square().sum().backward()
    theirs = [parameter.grad for parameter in (*model.a.parameters(), *model.b.parameters())]
    assert all(map(close, ours, theirs))


def test_a_call_with_another_control_flow_than_the_example_is_refused():
    def either(model: nn.Module, x: Tensor, late: bool = False, weight: bool = False) -> Tensor:
        x = model.a(model.b(x)) if late else model.b(model.a(x))
        return x @ model.a.weight if weight else x

    pipe = Pipe(split(linears(either, 2), ["b"], example=torch.zeros(1, 2)), [1, 1])
    with pytest.raises(CaptureError, match="'a' is used by part 1, but it is in part 0"):
        pipe(torch.zeros(1, 2), late=True)
    with pytest.raises(CaptureError, match=r"a.weight is used by part 1, but it is in part 0"):
        pipe(torch.zeros(1, 2), weight=True)


def test_views_that_part_at_a_cut_are_not_changed_in_place_after_it():
    def views(model: nn.Module, x: Tensor) -> Tensor:
        x = model.a(x)
        half = model.b(x[:, 1:3])
        half += 1.0
        return x

    parts = split(linears(views, names="a", b=nn.Identity()), ["b"], example=torch.zeros(2, 4))
    with Pipe(parts, [1, 1]) as pipe, pytest.raises(RuntimeError, match="changes its input in place, which is also"):
        pipe(torch.randn(2, 4))


def test_a_copy_of_the_parts_is_an_independent_model():
    parts = split(Language().double(), ["h.1"])
    other = copy.deepcopy(parts)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not Pipe(other, [1, 1])(IDS)["logits"].any()
    assert Pipe(parts, [1, 1])(IDS)["logits"].any()
    assert Pipe(parts, "size", ["cpu", "cpu"], sample=IDS).balance == [1, 1]


# Parts whose code is given.


class Chooses(nn.Module):
    """Goes the way that its values say."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.h = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return end(*self.h, self.b, start(self.a, x), scale=scale)


def start(a: nn.Module, x: Tensor) -> dict[str, Tensor]:
    y = a(x)
    return {"y": y if x.sum() > 0 else -y, "skip": x}


def end(
    first: nn.Module, second: nn.Module, b: nn.Module, value: dict[str, Tensor], *, scale: Tensor | float
) -> Tensor:
    return b(second(first(value["y"]))) * scale + value["skip"]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_parts_by_modules_and_given_code(checkpoint: str):
    model = Chooses().double()
    plain = reference(model)
    parts = split(model, glue=[(["a"], start), (["h.0", "h.1", "b"], end)])
    assert list(parts.state_dict()) == list(plain.state_dict())
    x = torch.randn(4, 4, dtype=torch.float64)
    ours, theirs = (torch.rand(4, 1, dtype=torch.float64).fill_(2.0).requires_grad_() for _ in range(2))
    with Pipe(parts, [1, 1], chunks=2, checkpoint=checkpoint) as pipe:
        y = pipe(x, scale=ours)
        y.square().sum().backward()
        expected = torch.cat([plain(rows, factors) for rows, factors in zip(x.chunk(2), theirs.chunk(2), strict=True)])
        expected.square().sum().backward()
        assert close(y, expected)
        assert close(ours.grad, theirs.grad)
        assert_same_gradients(pipe, plain)
        assert_same_buffers(pipe, plain)
        pipe.eval()
        assert close(parts(x, scale=3.0), plain.eval()(x, 3.0))


@pytest.mark.parametrize(
    ("glue", "error", "message"),
    [
        ([(["a"], start), (["h.0", "h.1"], end)], ValueError, r"leaves out \['b.weight', 'b.bias'\]"),
        ([(["a", "h"], start), (["h.1", "b"], end)], ValueError, "'h.1' in part 1 and 'h' in part 0"),
        ([(["a", "h.2"], start)], ValueError, "no submodule 'h.2'"),
        ([("a", start)], TypeError, "a list of pairs"),
        ([], TypeError, "a list of pairs"),
    ],
)
def test_given_code_that_does_not_fit_is_refused(glue, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        split(Chooses(), glue=glue)
    with pytest.raises(ValueError, match="leave out at="):
        split(Chooses(), ["b"], glue=glue)


def test_a_module_that_chooses_by_values_is_named():
    model = wraps(nn.Linear(4, 4), Computes(lambda x: x[x.abs() > 0].view(x.shape)), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=rf"the module 'between' at .*{LINE}.*glue="):
        split(model, ["b"], example=torch.randn(4, 4))


def wraps(a: nn.Module, between: nn.Module, b: nn.Module) -> Coded:
    return Coded(lambda m, x: m.b(m.between(m.a(x))), a=a, between=between, b=b)


class Convolved(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Skips that cross cuts in a list, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle, self.end = nn.Conv2d(1, 4, 3, padding=1), Convolved(8, 8), nn.Conv2d(4, 1, 1)
        self.down = nn.ModuleList([Convolved(4, 4), Convolved(4, 8)])
        self.up = nn.ModuleList([Convolved(16, 4), Convolved(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.start(x), []
        for layer in self.down:
            skips.append(layer(x))
            x = F.avg_pool2d(skips[-1], 2)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.end(x)


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "at"),
    [
        ("1F1B", "always", ["middle", "up.1"]),
        ("ZBV", "never", ["down.1", "middle", "up.1"]),
        ("ZB1P", "always", ["down.1", "up.0"]),
        ("GPipe", "except_last", ["down.0.conv", "up.0.norm"]),
    ],
)
def test_a_u_net_trains_and_evaluates_as_the_unsplit_one(schedule: str, checkpoint: str, at: list[str]):
    model = UNet().double()
    plain = copy.deepcopy(model)
    x, target = torch.randn(2, 7, 1, 8, 8, dtype=torch.float64)
    parts, balance = split(model, at, example=x), [1] * (len(at) + 1)
    options = {"chunks": 3, "schedule": schedule, "checkpoint": checkpoint}
    assert_trains_alike(parts, balance, x, target, plain=plain, **options)
    with Pipe(parts, balance, **options) as pipe, torch.no_grad():
        assert close(pipe.eval()(x), plain.eval()(x))
        assert not model.training
