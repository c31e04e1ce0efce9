"""The code between a split model's modules runs at every call: whatever it reads is what it is then."""

from __future__ import annotations

import contextvars
import copy
import enum
import functools
import gc
from collections.abc import Callable

import numpy as np
import pipeline_ranks_job as job
import pytest
import torch
from pipeline_models import close
from split_models import CHANGES, Change, Child, Coded, Config, Reads, linears
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from anabranch.errors import CaptureError
from anabranch.pipeline import Pipe, split


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_two_calls_is_seen(change: Change, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "ALONE", True)
    monkeypatch.setattr(job, "WORLD", 2)
    contextvars.copy_context().run(job.changed_code, change)


def test_a_replaced_module_may_return_another_form_after_one_refusal(monkeypatch: pytest.MonkeyPatch):
    model = Reads()
    x = torch.randn(4, 3, dtype=torch.float64)
    parts = split(model, ["b"], example=x)
    with Pipe(parts, [1, 1], chunks=2) as pipe:
        pipe(x)
        monkeypatch.setattr(Child, "forward", lambda self, x: (x.double() @ self.weight).float())
        with pytest.raises(CaptureError, match="returned a different form of result"):
            pipe(x)
        assert not any(parameter.grad is not None for parameter in model.parameters())
        torch.testing.assert_close(pipe(x), model(x))


def test_modes_and_frozen_parameters_change_forms_without_a_refusal():
    def code(model: nn.Module, x: Tensor) -> Tensor:
        y, _ = model.a(x)
        return model.b(y * 2 if y.requires_grad else y)

    model = Coded(code, a=nn.GRU(3, 3, batch_first=True), b=nn.Linear(3, 3))
    x = torch.randn(2, 4, 3)
    pipe = Pipe(split(model, ["b"], example=x), [1, 1])
    for change in (lambda: None, lambda: model.a.requires_grad_(False), model.double, model.eval):
        change()
        x = x.to(model.b.weight.dtype)
        torch.testing.assert_close(pipe(x), model(x))


def test_strides_of_inputs_and_of_what_modules_return_of_them_are_seen():
    def code(model: nn.Module, x: Tensor) -> Tensor:
        x = model.same(x.as_strided((len(x), 4), x.stride()))
        return model.b(model.a(x * 2 if x.is_contiguous() else x))

    model = linears(code, same=nn.Identity())
    with Pipe(split(model, ["b"], example=torch.randn(6, 4)), [1, 1], chunks=2, checkpoint="never") as pipe:
        for x in (torch.randn(6, 4), torch.randn(4, 6).t(), torch.randn(6, 8)[:, ::2]):
            torch.testing.assert_close(pipe(x), model(x))


def wraps(between: Callable[[nn.Module, Tensor], Tensor]) -> Coded:
    """A layer, code between, and another one."""
    return linears(lambda model, x: model.b(between(model, model.a(x))), 3)


class Loud(nn.Module):
    """Prints, reads a number, and takes a branch by it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.numbers: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():  # by the first guess
            raise ValueError("not a number")
        self.numbers.append(x.abs().max().item())
        print(f"largest {self.numbers[-1]:.3f}")
        return self.linear(x) * (2.0 if x.sum() > 0 else 1.0)


def test_a_module_between_cuts_is_the_users_own_python(capsys: pytest.CaptureFixture[str]):
    model = wraps(lambda model, x: torch.relu(model.loud(x)))
    model.loud = Loud()
    outputs: list[Tensor] = []
    model.loud.register_forward_hook(lambda module, args, output: outputs.append(output.detach().numpy()))
    x = torch.randn(4, 3)
    parts = split(model, ["b"], example=x)
    assert not outputs
    with Pipe(parts, [1, 1], chunks=4, checkpoint="never") as pipe:
        capsys.readouterr()
        pipe(x)
        pipe(x).sum().backward()
        assert len(outputs) == len(model.loud.numbers) == 8
        printed = capsys.readouterr().out.splitlines()
        assert printed[-8:] == [f"largest {number:.3f}" for number in model.loud.numbers]
    expected = torch.cat([model.loud(model.a(row)) for row in x.split(1)]).detach()
    torch.testing.assert_close(torch.from_numpy(np.concatenate(outputs[:4])), expected)


def test_an_error_with_every_guess_says_what_was_guessed():
    class Shapes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(int(x[0, 0].item()), 7)

    with pytest.raises(RuntimeError, match="is invalid for input of size 12") as told:
        split(nn.Sequential(nn.Linear(3, 3), Shapes()), ["1"], example=torch.ones(4, 3))
    assert "'1' ran without values" in told.value.__notes__[0]


def test_a_sparse_input_is_refused_before_it_is_taken_for_a_dense_one():
    model = wraps(lambda model, x: x * 2 if x.is_sparse else x)
    with pytest.raises(TypeError, match=r"sparse_coo tensor cannot be an input of a split model; make it dense"):
        Pipe(split(model, ["b"]), [1, 1])(torch.eye(3).to_sparse())


def test_a_compiled_module_stays_whole():
    model, x = wraps(lambda model, x: model.compiled(x)), torch.randn(4, 3)
    model.compiled = torch.compile(nn.Linear(3, 3), backend="eager")
    with Pipe(split(model, ["b"], example=x), [2], chunks=2) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(x), model(x))


def reads_behind(model: nn.Module, x: Tensor) -> Tensor:
    """The code between the modules reads what one of them left behind."""
    x = model.block(x)
    if model.what == "number":
        x = x * model.block.count
    elif model.what == "tensor" and model.block.aux is not None:
        x = x + model.block.aux
    elif model.what == "a size":
        x = x * model.block.count if len(x) == 1 else x
    elif model.what == "an attribute":
        x = (x.mT if model.block.count > 1 else x.T).mT
    elif model.what in CONSTANTS:
        x = model.take(x, CONSTANTS[model.what][model.block.count > 1])
    elif model.what:
        x = x * ONES[model.what == "other"] * ONES[0] * ONES[model.block.count > 1]
    return x


ONES = torch.ones(2, 3).unbind()


class Alike(enum.Enum):
    A, B = 1, 2

    def __str__(self) -> str:
        return "Alike"


def times(n: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x * n


CONSTANTS: dict[str, tuple[object, object]] = {
    "a dtype": (torch.float32, torch.float64),
    "a function": (torch.relu, torch.tanh),
    "an enum that prints all alike": (Alike.A, Alike.B),
    "a module": (enum, functools),
    "what a function closes over": tuple(map(times, (1, 2))),
    "a default": tuple(lambda x, n=n: x * n for n in (1, 2)),
    "a lambda": (
        lambda x: x,
        lambda x: x * 2,
    ),
}


class Takes(nn.Module):
    """Takes a constant of the code."""

    def forward(self, x: Tensor, constant: object) -> Tensor:
        return x


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.aux = 1, None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.aux = x.detach() * 2
        return x


@pytest.mark.parametrize("what", ["number", "tensor", "one", "other", "a size", "an attribute", *CONSTANTS])
def test_what_a_module_leaves_behind_for_the_code_is_refused(what: str):
    model = wraps(reads_behind)
    model.block, model.take, model.what = Counts(), Takes(), ""
    x = torch.randn(3, 3)
    parts = split(model, ["b"], example=x)
    model.what = what
    with Pipe(parts, [1, 1], chunks=2) as pipe:
        for call in (lambda: pipe(x), lambda: pipe.step(x, loss=lambda output, _: output.sum())):
            model.block.count = 1
            with pytest.raises(CaptureError, match=r"\w+.py:\d+ \((reads_behind|forward|<lambda>)\).*glue="):
                call()
        assert not any(parameter.grad is not None for parameter in model.parameters())
        model.what = ""
        torch.testing.assert_close(pipe(x), model(x))


def test_a_view_of_a_buffer_that_crosses_a_cut_is_a_copy():
    def views(model: nn.Module, x: Tensor) -> Tensor:
        x = model.a(x)
        model.calls.add_(1)
        view = model.calls.view(1, 1)
        return model.b(x) * view

    model = linears(views, 3, calls=torch.zeros(1)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 3, dtype=torch.float64)
    with Pipe(split(model, ["b"], example=x), [1, 1], chunks=8) as pipe:
        for _ in range(3):
            assert close(pipe(x), torch.cat([plain(row) for row in x.split(1)]))


def test_a_module_that_changes_a_plain_tensor_does_so_once_a_call():
    class Ticks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.calls.add_(1)

    model, x = nn.Sequential(nn.Linear(3, 3), Ticks(), nn.Linear(3, 3)), torch.randn(4, 3)
    parts = split(model, ["2"], example=x)
    assert model[1].calls == model[1].calls._version == 0
    Pipe(parts, [1, 1])(x)
    assert model[1].calls == 1


def test_a_module_that_stays_whole_may_seed():
    class Seeds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(torch.initial_seed() + 1)
            return x * torch.rand(3)

    model, x = nn.Sequential(Seeds(), nn.Linear(3, 3)), torch.ones(2, 3)
    state = torch.get_rng_state()
    parts = split(model, ["1"], example=x)
    assert torch.equal(torch.get_rng_state(), state)
    Pipe(parts, [1, 1])(x)


MASKS: dict[object, object] = {}


def by_dict(n: int) -> Tensor:
    if n not in MASKS:
        MASKS[n] = torch.ones(n, n).tril()
    return MASKS[n]


@functools.lru_cache(4)
def by_lru_cache(n: int) -> Tensor:
    return torch.ones(n, n).tril()


@functools.cache
def of_pairs(n: int) -> tuple[Tensor, list[Tensor]]:
    return torch.ones(n, n).tril(), [torch.ones(n)]


def by_class(n: int) -> Tensor:
    if Config.mask is None:
        Config.mask = torch.ones(n, n).tril()
    return Config.mask


def forget_masks() -> None:
    global MASK
    MASK = Config.mask = None
    MASKS.clear()
    by_lru_cache.cache_clear()
    of_pairs.cache_clear()


MASK: Tensor | None = None


def by_global_statement(n: int) -> Tensor:
    global MASK
    if MASK is None:
        MASK = torch.ones(n, n).tril()
    return MASK


def with_mask(mask: Callable[[int], Tensor]) -> Coded:
    return wraps(lambda model, x: mask(x.shape[1]) @ x)


MEMOS = [by_dict, by_lru_cache, lambda n: of_pairs(n)[0], by_class, by_global_statement]


def tensors_without_memory() -> set[int]:
    assert gc.get_freeze_count(), "what was frozen, as it is before a fork, is frozen again behind a refused trace"
    gc.unfreeze()
    gc.collect()
    left = {id(one) for one in gc.get_objects() if type(one) is FakeTensor}
    gc.freeze()
    return left


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mask", MEMOS)
def test_a_mask_kept_outside_the_model_is_refused_and_taken_out_there_and_kept_by_a_whole_module_a_real_one(
    mask: Callable[[int], Tensor],
):
    forget_masks()
    before = tensors_without_memory()
    model, x = with_mask(mask), torch.randn(4, 2, 3)
    with pytest.raises(CaptureError, match=r"test_code_between_modules.py:\d+ .* kept outside the model .* call the"):
        split(model, ["b"], example=x)
    assert tensors_without_memory() <= before
    expected = model(x)
    parts = split(model, ["b"], example=x)
    forget_masks()
    with Pipe(parts, [1, 1], chunks=2) as pipe:
        with pytest.raises(CaptureError, match="kept outside the model"):
            pipe(x)
        assert tensors_without_memory() <= before
        assert torch.equal(model(x), expected)
        torch.testing.assert_close(pipe(x), expected)
    forget_masks()
    model = nn.Sequential(model, nn.Linear(3, 3))
    parts = split(model, ["1"], example=x)
    assert tensors_without_memory() <= before
    with Pipe(parts, [1, 1], chunks=2) as pipe:
        y = pipe(x)
        assert tensors_without_memory() <= before
        forget_masks()
        torch.testing.assert_close(y, model(x))
    forget_masks()


def test_a_refused_trace_leaves_nothing_without_memory_behind():
    seen: list[Tensor] = []

    def keeps(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x)
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        split(wraps(keeps), ["b"], example=torch.randn(4, 3))
    assert not seen
