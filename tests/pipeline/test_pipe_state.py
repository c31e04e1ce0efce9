"""What a stage keeps and changes: buffers, running statistics, modes, memory."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import (
    Computes,
    assert_same_gradients,
    changing_model,
    close,
    pop_columns,
    pop_same,
    reference,
    stash_columns,
    stash_same,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from anabranch import Pipe
from anabranch.pipeline import NoChunk
from anabranch.pipeline.pipe import PipeRanks
from anabranch.pipeline.pipe_call import make_head
from anabranch.pipeline.stage.deferred_batch_norm import DeferredBatchNorm
from anabranch.record.spans import Span, heard
from backward_threads import NotesThreads
from covering import pairwise
from waiting import wait_until


@pytest.mark.parametrize(
    ("momentum", "rows", "checkpoint", "schedule"),
    pairwise((0.1, None), (8, 7), ("always", "never"), ("GPipe", "Interleaved1F1B", "ZBV")),
)
def test_deferred_batch_norm_has_the_whole_batchs_statistics(
    momentum: float | None, rows: int, checkpoint: str, schedule: str
):
    plain = nn.Sequential(nn.BatchNorm1d(4, momentum=momentum), nn.Sequential(nn.Tanh())).double()
    model = reference(plain)
    split = {"chunks": 4, "checkpoint": checkpoint, "schedule": schedule}
    with Pipe(model, [1, 1], deferred_batch_norm=True, **split) as pipe:
        for n in (rows, 0, rows):
            x = torch.randn(n, 4, dtype=torch.float64) * 3 + 1
            if rows == 7:  # one microbatch of a single row cannot be normalised
                pipe.chunks = 3
            pipe(x).sum().backward()
            plain(x)
    for name, buffer in plain.named_buffers():
        assert close(dict(pipe.named_buffers())[name], buffer), name
    assert list(pipe.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    ("mean", "dtype"),
    [(0.0, torch.float32), (300.0, torch.float32), (-30000.0, torch.float32), (300.0, torch.float16),
     (0.0, torch.bfloat16)],
)  # fmt: skip
def test_the_deferred_variance_is_right_far_from_zero_and_in_half_precision(mean: float, dtype: torch.dtype):
    """Sums of squares of float16 would be infinite, and of 64 rows in bfloat16 they stop growing."""
    torch.manual_seed(0)
    x = (torch.randn(64, 4) * torch.tensor([0.5, 1.0, 2.0, 4.0]) + mean).to(dtype)
    plain = nn.BatchNorm1d(4, momentum=1.0)
    plain.double()(x.double())
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=1.0, dtype=dtype))
    with Pipe(model, [1], chunks=5, deferred_batch_norm=True) as pipe:
        pipe(x)
        eps = torch.finfo(dtype).eps
        assert pipe[0].running_mean.dtype == pipe[0].running_var.dtype == dtype
        torch.testing.assert_close(pipe[0].running_mean.double(), plain.running_mean, rtol=8 * eps, atol=8 * eps)
        torch.testing.assert_close(pipe[0].running_var.double(), plain.running_var, rtol=max(1e-3, eps), atol=0.0)
        assert torch.isfinite(pipe.eval()(x)).all()


def test_deferred_batch_norm_reaches_nested_modules_and_forgets_a_failed_step():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("three")
            return self.norm(x)

    model = nn.Sequential(Block(), nn.Identity())
    with Pipe(model, [1, 1], chunks=2, deferred_batch_norm=True) as pipe:
        assert isinstance(model[0].norm, DeferredBatchNorm)
        with pytest.raises(ValueError, match="three"):
            pipe(torch.randn(7, 2))
        pipe.chunks = 1
        x = torch.randn(8, 2)
        pipe(x)
    torch.testing.assert_close(model[0].norm.running_mean, 0.1 * x.mean(0))


class NormThenRelu(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def test_a_batch_norm_with_a_forward_of_its_own_is_not_replaced_but_named():
    model = nn.Sequential(nn.BatchNorm1d(4), NormThenRelu(4))
    with pytest.raises(ValueError, match="cannot replace '1': NormThenRelu has a forward of its own"):
        Pipe(model, [1, 1], deferred_batch_norm=True)
    assert type(model[0]) is nn.BatchNorm1d
    with Pipe(model, [1, 1]) as pipe:
        assert (pipe(torch.randn(6, 4)) >= 0).all()


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_first_layer_and_a_loss_may_change_the_batch_in_place(checkpoint: str, schedule: str):
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.sub_(1.0))

    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    plain = reference(model)
    x, target = torch.randn(2, 6, 3, dtype=torch.float64)
    leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = ((leaf + 0.0, target.clone()) for leaf in leaves)
    loss(plain(theirs[0]), theirs[1]).backward()
    with Pipe(model, [2, 1], chunks=3, checkpoint=checkpoint, schedule=schedule) as pipe:
        pipe.step(*ours, loss=loss)
        assert_same_gradients(pipe, plain)
        assert close(*(leaf.grad for leaf in leaves))
        pipe.zero_grad()
        loss(pipe(x.clone()), target.clone()).backward()
        assert_same_gradients(pipe, plain)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_change_of_the_batch_is_noticed_on_both_sides_of_the_pipe(checkpoint: str):
    w, x = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    with Pipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)), [2], chunks=2, checkpoint=checkpoint) as pipe:
        y = pipe(w.exp())  # saves its result for backward, which the first layer changes
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    with Pipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), [2], chunks=2, checkpoint=checkpoint) as pipe:
        y = pipe(x)
        x[3:] = 0.0
        with pytest.raises(RuntimeError, match="in place|inplace"):
            y.sum().backward()


def changing_a_view(stashed: slice, returned: slice) -> nn.Sequential:
    return nn.Sequential(stash_columns(stashed, returned), nn.ReLU(inplace=True), pop_columns()).double()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize(
    ("make", "balance"),
    [
        (changing_model, [2, 1, 2]),
        (lambda: changing_a_view(slice(0, 5), slice(4, 8)), [1, 1, 1]),
    ],
)
def test_an_in_place_change_of_a_value_that_is_also_used_elsewhere_is_refused(
    make: Callable[[], nn.Sequential], balance: list[int], checkpoint: str
):
    """Unsplit, it changes what is popped, and gradients flow through it; a stage's graph knows nothing of that."""
    model, x = make(), torch.randn(4, 4, dtype=torch.float64)
    refused = pytest.raises(RuntimeError, match="stage 1 changes its input in place, which is also sent to another")
    with Pipe(model, balance, chunks=2, checkpoint=checkpoint) as pipe, refused:
        pipe(x)
    plain = reference(model)
    with Pipe(model, [sum(balance)], chunks=2, checkpoint=checkpoint) as pipe:  # in one stage all is as it was
        pipe(x).sum().backward()
        plain(x).sum().backward()
        assert_same_gradients(pipe, plain)


def test_an_input_that_every_microbatch_gets_whole_is_not_changed_in_place():
    class AddPosition(nn.Module):
        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return x + position.add_(1.0)

    x, position = torch.zeros(4, 3), torch.zeros(3)
    with Pipe(nn.Sequential(nn.Identity(), AddPosition()), [1, 1], chunks=2) as pipe:
        with pytest.raises(RuntimeError, match="stage 1 changes the input 'position' in place, .* or microbatch"):
            pipe(x, position=NoChunk(position))
        pipe.chunks = 1
        assert torch.equal(pipe(x, position=NoChunk(torch.zeros(3))), torch.ones(4, 3))


@pytest.mark.parametrize("schedule", ["GPipe", "ZB1P"])
def test_layers_run_on_the_batchs_rows_alone(schedule: str):
    """No trial runs, on made-up data or on the batch's: each layer sees each row once."""
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    layers = [Computes(lambda x, place=place: seen[place].append(x.detach().clone()) or x) for place in range(2)]
    with Pipe(nn.Sequential(*layers), [1, 1], chunks=3, schedule=schedule, checkpoint="never") as pipe:
        pipe.describe()
        for rows in (7, 2):
            x = torch.randn(rows, 2, requires_grad=True)
            pipe.step(x, x.detach(), loss=F.mse_loss)
            assert all(torch.equal(torch.cat(parts), x) for parts in seen.values())
            assert [len(parts) for parts in seen.values()] == [min(rows, 3)] * 2
            seen.update({0: [], 1: []})


SCALE = ContextVar("SCALE", default=1.0)


def modes() -> list[object]:
    """Those that a stage must have of its caller; of a backward the first two."""
    kept = [torch.is_autocast_enabled("cpu"), SCALE.get(), torch.empty(0).device.type]
    return [*kept, torch.is_grad_enabled(), torch.is_inference_mode_enabled()]


class Notes(torch.autograd.Function):
    """The identity; notes the modes of its backward."""

    @staticmethod
    def forward(ctx, x: Tensor, seen: list[object]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(modes()[:2])
        return grad, None


AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("balance", [[2], [1, 1]], ids=["on the caller's thread", "on threads"])
@pytest.mark.parametrize(
    "mode", [AUTOCAST, torch.no_grad, torch.inference_mode, partial(torch.device, "meta")], ids=str
)
def test_modes_and_context_variables_are_the_callers_in_forward_again_and_backward(
    mode: Callable[[], contextlib.AbstractContextManager[object]], balance: list[int]
):
    """A second forward has those of the first; a backward on other threads would else be rounded otherwise."""
    forwards: list[object] = []
    backwards: list[object] = []
    model = nn.Sequential(nn.Linear(3, 3), Computes(lambda x: forwards.append(modes()) or Notes.apply(x, backwards)))
    x = torch.randn(4, 3)
    with Pipe(model, balance, chunks=2, checkpoint="always") as pipe:
        with mode():
            before = SCALE.set(2.0)
            y, here = pipe(x), modes()
            SCALE.reset(before)
        assert y.dtype == (torch.bfloat16 if mode is AUTOCAST else torch.float32)
        for around in (contextlib.nullcontext, AUTOCAST) if y.requires_grad else ():
            with around():
                before, there = SCALE.set(3.0), [around is AUTOCAST, 3.0]
                y.float().sum().backward(retain_graph=True)
                SCALE.reset(before)
            assert backwards == [there] * 2
            backwards.clear()
    assert forwards == [here] * (6 if y.requires_grad else 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_stages_keep_nothing(mode):
    inputs: list[StorageWeakRef] = []
    note = Computes(lambda x: inputs.append(StorageWeakRef(x.untyped_storage())) or x * 2)
    model = nn.Sequential(nn.Linear(4, 4), note, note)
    with Pipe(model, [2, 1], chunks=2, checkpoint="always") as pipe, mode():
        y = pipe(torch.randn(4, 4))
        result = pipe.step(torch.randn(4, 4), torch.randn(4, 4), loss=F.mse_loss)
    assert not y.requires_grad
    assert result.loss.ndim == 0
    assert model[0].weight.grad is None
    assert all(reference.expired() for reference in inputs)


@pytest.mark.parametrize("schedule", ["GPipe", "ZB1P"])
def test_stages_differentiate_on_their_own_threads_alone(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of a pipe's output waits on torch's thread of a device: the stages must not need it."""
    monkeypatch.setattr(NotesThreads, "seen", [])
    layers = [layer for _ in range(2) for layer in (nn.Linear(2, 2), Computes(NotesThreads.apply))]
    with Pipe(nn.Sequential(*layers), [2, 2], chunks=2, schedule=schedule, checkpoint="never") as pipe:
        pipe(torch.ones(4, 2)).sum().backward()
    assert NotesThreads.seen == [False] * 4


class Keeps(nn.Module):
    """Notes the memory of its results."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.function = function
        self.kept: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x)
        self.kept.append(StorageWeakRef(y.untyped_storage()))
        return y

    def alive(self) -> int:
        return sum(not reference.expired() for reference in self.kept)


def test_a_skip_is_freed_after_its_last_use_before_backward():
    keeps = Keeps(lambda x: x.detach() + 0.0)  # no gradient of what follows keeps it

    def look(x: Tensor) -> Tensor:
        wait_until(lambda: not keeps.alive())  # the popping stage's thread lets go a moment after it has sent
        return x

    model = nn.Sequential(nn.Linear(3, 3), keeps, stash_same(), nn.Tanh(), pop_same(), Computes(look))
    with Pipe(model, [3, 1, 1, 1], chunks=2, checkpoint="never") as pipe:
        pipe(torch.randn(4, 3))
    assert len(keeps.kept) == 2


def test_a_dropped_output_frees_the_activations():
    keeps = Keeps()
    with Pipe(nn.Sequential(nn.Linear(3, 3), keeps, nn.Tanh()), [2, 1], chunks=2, checkpoint="never") as pipe:
        y = pipe(torch.randn(4, 3))
        assert keeps.alive() == 2
        del y
        wait_until(lambda: not keeps.alive())  # a stage's thread lets go a moment later


def test_outputs_are_kept_only_where_somebody_wants_them():
    keeps = Keeps(lambda x: x * 2)
    alive: list[int] = []

    def count(span: Span) -> None:
        if span[0] == "backward" and span[6] and span[6]["stage"] == 1:
            alive.append(keeps.alive())

    x = torch.randn(4, 3)
    with (
        Pipe(nn.Sequential(nn.Linear(3, 3), keeps), [1, 1], chunks=4, schedule="1F1B", checkpoint="never") as pipe,
        heard(count),
    ):
        head = partial(make_head, loss=lambda y, t: (y - t).sum(), reduction="sum", weigh=None, keeps_outputs=False)
        PipeRanks(pipe).step((x,), {}, x, head=head, rows=4, word=None)
        assert max(alive) <= 1
        keeps.kept.clear()
        result = pipe.step(x, x, loss=lambda y, t: (y - t).sum(), reduction="sum")
        assert alive[-1] == 4
        kept = keeps.kept[:4]
        assert torch.equal(result.output, pipe(x))
        assert result.output is result.output
        assert all(reference.expired() for reference in kept), "put together, the parts are let go of"


def test_an_output_that_cannot_be_joined_raises_only_when_it_is_requested():
    x = torch.randn(4, 3)
    with Pipe(nn.Sequential(nn.Linear(3, 3), Computes(torch.sum)), [1, 1], chunks=2) as pipe:
        result = pipe.step(x, loss=lambda y, _: y, reduction="sum")
        torch.testing.assert_close(result.loss, pipe.module[0](x).sum().detach())
        with pytest.raises(ValueError, match="no rows to join microbatches along"):
            _ = result.output


def test_the_pipes_threads_end_with_it():
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    pipe(torch.randn(2, 2))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("anabranch-stage")]
    assert len(threads) == 2
    del pipe
    for thread in threads:
        thread.join(timeout=60.0)
        assert not thread.is_alive()


def test_a_copied_pipe_runs_on_its_own_threads():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.randn(4, 2)
    with Pipe(model, [1, 1], chunks=2) as pipe:
        y = pipe(x)
        with copy.deepcopy(pipe) as other:
            assert torch.equal(other(x), y)
            other(x).sum().backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
