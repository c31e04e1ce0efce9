"""A stage that raises ends the call with its own exception, wherever it happens; the pipe works afterwards."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import Computes
from torch import Tensor, nn

from anabranch import DeadlineExceeded, Pipe
from anabranch.pipeline import make_schedule
from anabranch.pipeline.engine import StageEngine
from anabranch.record.spans import on_fault_point


def model_and_batch() -> tuple[nn.Sequential, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    return model, torch.randn(4, 3), torch.randn(4, 3)


class Waits:
    """Lets a stage wait in a microbatch until the caller has the error, and knows whether it went on before that."""

    def __init__(self) -> None:
        self.begun, self.release, self.gone_on = (threading.Event() for _ in range(3))
        self.active = True

    def __call__(self, x: Tensor) -> Tensor:
        if self.active:
            self.begun.set()
            self.release.wait(30.0)
            self.gone_on.set()
        return x

    def end(self) -> None:
        assert not self.gone_on.is_set()
        self.active = False
        self.release.set()


def test_after_a_failure_no_other_stage_starts_anything():
    """Stage 0 is in its second microbatch when stage 1 fails, and goes on only after the caller has the error."""
    begun: list[tuple[object, ...]] = []
    waits = Waits()

    def fail(x: Tensor) -> Tensor:
        assert waits.begun.wait(30.0)
        raise ValueError("first")

    def note(place: str) -> None:
        _, _, stage, microbatch = place.split(".")
        begun.append((int(stage), int(microbatch)))

    layers = Computes(lambda x: waits(x) if len(begun) > 1 else x), Computes(fail)
    with Pipe(nn.Sequential(*layers), [1, 1], chunks=8) as pipe, on_fault_point(note):
        with pytest.raises(ValueError, match="first"):
            pipe(torch.randn(8, 2))
        waits.end()
    assert sorted(begun) == [(0, 0), (0, 1), (1, 0)]


def fails(x: Tensor) -> Tensor:
    raise ValueError("in the other stage")


def is_interrupted(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does: it reaches the thread that waits for the call
    return x


def is_interrupted_unheard(x: Tensor) -> Tensor:
    time.sleep(0.1)
    _thread.interrupt_main()  # wakes nobody, as a signal does that came just before the caller fell asleep
    return x


@pytest.mark.parametrize(
    ("cause", "error"),
    [(fails, ValueError), (is_interrupted, KeyboardInterrupt), (is_interrupted_unheard, KeyboardInterrupt)],
    ids=lambda value: value.__name__,
)
def test_a_stage_that_cannot_be_stopped_does_not_delay_an_error_or_interrupt_and_the_pipe_works_afterwards(
    cause: Callable[[Tensor], Tensor], error: type[BaseException]
):
    waits, calls = Waits(), []

    def first(x: Tensor) -> Tensor:
        calls.append(x)
        return cause(x) if len(calls) == 2 and waits.begun.wait(30.0) else x

    with Pipe(nn.Sequential(Computes(first), Computes(waits)), [1, 1], chunks=2, timeout=300.0) as pipe:
        with pytest.raises(error):
            pipe(torch.randn(4, 2))
        waits.end()
        x = torch.randn(4, 2)
        assert torch.equal(pipe(x), x)


@pytest.mark.parametrize("balance", [[1, 1], [2]], ids=["on threads", "on the caller's"])
@pytest.mark.parametrize("place", ["layer", "loss", "rows="])
def test_a_pipe_called_by_itself_is_refused_at_once_and_works_afterwards(place: str, balance: list[int]):
    again = place == "layer"

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target if place == "rows=" else pipe(target))

    layer, (x, target) = Computes(lambda x: pipe(x) if again else x), torch.randn(2, 4, 3)
    with Pipe(nn.Sequential(nn.Linear(3, 3), layer), balance, chunks=2, timeout=300.0) as pipe:
        with pytest.raises(RuntimeError, match="a layer, the loss or rows= of a pipe starts a forward of"):
            pipe.step(x, target, loss=loss, rows=(lambda x, target: pipe(x).sum()) if place == "rows=" else None)
        again = False
        assert pipe.step(x, target, loss=F.mse_loss).loss > 0


def test_calls_of_several_threads_take_turns():
    model, x, target = model_and_batch()
    with Pipe(model, [1, 1, 1, 1], chunks=2, schedule="1F1B", timeout=200.0) as pipe, ThreadPoolExecutor(2) as threads:
        pipe.step(x, target, loss=F.mse_loss)
        once = [parameter.grad.clone() for parameter in pipe.parameters()]

        def train() -> None:
            for _ in range(3):
                pipe.step(x, target, loss=F.mse_loss)

        for trained in [threads.submit(train) for _ in range(2)]:
            trained.result(200.0)
        for grad, parameter in zip(once, pipe.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, 7 * grad)


def test_a_thread_waits_for_anothers_turn_until_its_deadline():
    engine = StageEngine((0, 1), timeout=0.01)

    def ask() -> None:
        with engine.turn("step", 1):
            pass

    with ThreadPoolExecutor(1) as thread, engine.turn("forward", 0):
        asked = thread.submit(ask)
        with pytest.raises(DeadlineExceeded, match="another thread that uses the pipe"):
            asked.result(200.0)
    with engine.turn("forward", 2):
        pass


@pytest.mark.parametrize(
    ("stuck", "message"),
    [
        (0, r"peer stage 0, operation pipeline RF1.0<0, step 7, after [0-9]"),
        (1, r"peer the pipeline's workers, operation pipeline step, step 7"),
    ],
)
def test_a_call_past_its_deadline_ends_with_an_error_that_says_so(stuck: int, message: str):
    waits = Waits()
    layers = [nn.Identity(), nn.Identity()]
    layers[stuck] = Computes(waits)
    with Pipe(nn.Sequential(*layers), [1, 1], timeout=2.0) as pipe:
        pipe.calls = 7
        with pytest.raises(DeadlineExceeded, match=message):
            pipe(torch.randn(2, 2))
        waits.end()
        pipe._engine._timeout = 60.0
        assert pipe(torch.ones(2, 2)).shape == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"balance": [1, 1]}, ValueError, r"balance=\[1, 1\] sums to 2, but the module has 4 children with 4 layers"),
        ({"balance": [5, -1]}, ValueError, "at least 1 layer"),
        ({"devices": ["cpu"]}, ValueError, "2 stages under GPipe need 2 devices, got 1"),
        ({"schedule": "2F2B"}, ValueError, "schedule is 'GPipe', '1F1B', .* got '2F2B'"),
        ({"schedule": "ZBV", "balance": [1, 1, 2]}, ValueError, "3 stages do not fit on 1 ranks"),
        ({"balance": 4}, TypeError, "balance=4 is not a list of the layers of each stage"),
        ({"balance": [2.0, 2.0]}, TypeError, r"balance=\[2.0, 2.0\] is not a list"),
        ({"devices": "cpu"}, TypeError, r"got 'cpu'; use \['cpu', ...\]"),
        ({"schedule": None}, TypeError, "or a Schedule from make_schedule, got None"),
        ({"schedule": make_schedule("GPipe", 3, 2)}, ValueError, "for 3 stages, but the balance makes 2"),
        (
            {"schedule": make_schedule("GPipe", 2, 2).recomputing({(1, 0)})},
            ValueError,
            r"has R1.0, but .* by checkpoint=; make the schedule without R actions",
        ),
        (
            {"schedule": "Interleaved1F1B", "devices": ["cpu"] * 3},
            ValueError,
            r"2 stages do not fit on 3 ranks: .* use one of \[1, 2\] ranks",
        ),
        ({"timeout": 0}, ValueError, "timeout is a finite number of seconds above 0, got 0"),
        ({"seed": "abc"}, TypeError, "seed is a whole number, got 'abc'"),
        ({"process_group": -100}, ValueError, "this process is not a rank of process_group="),
        ({"module": nn.Linear(2, 2)}, TypeError, "splits a nn.Sequential, got Linear"),
        ({"module": nn.Sequential()}, ValueError, "empty"),
    ],
)
def test_bad_arguments_are_refused_naming_value_and_cure(arguments: dict, error: type[Exception], message: str):
    module, _, _ = model_and_batch()
    with pytest.raises(error, match=message):
        Pipe(**{"module": module, "balance": [2, 2], **arguments})


@pytest.mark.parametrize(("name", "value"), [("chunks", 0), ("chunks", 2.5), ("checkpoint", "sometimes")])
def test_attributes_are_checked_where_they_are_set(name: str, value: object):
    module, x, _ = model_and_batch()
    with Pipe(module, [2, 2], chunks=2) as pipe:
        with pytest.raises(ValueError, match=f"{name} is .*got {value!r}"):
            setattr(pipe, name, value)
        assert pipe(x).shape == (4, 3)


def test_the_same_layer_twice_is_refused_unless_it_has_no_state():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'0' and '1' are the same Linear"):
        Pipe(nn.Sequential(layer, layer), [1, 1])
    relu = nn.ReLU()
    with Pipe(nn.Sequential(relu, relu), [1, 1]) as pipe:
        assert pipe(torch.ones(2)).shape == (2,)
