"""Graphs on CUDA: copies beside the computation, recorded replay; as much as can be is tested without one."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_boundaries import Recorded, cross

import anabranch as ab
from anabranch.autodiff.boundary.crossing import Form
from anabranch.graph import Graph, StepProgram, capture
from anabranch.graph.crossings import crossing_of
from anabranch.graph.dynamo.undisturbed import random_states_untouched
from anabranch.graph.run import cuda_graphs
from anabranch.graph.run.copy_streams import copy_beside_compute, crosses_from_cuda, launch_before_crossings

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def doubled() -> Recorded:
    def forms(inputs: Sequence[Tensor | None]) -> list[Form]:
        return [Form(tuple(x.shape), x.dtype, x.device) for x in inputs if x is not None]

    def far(entry: Tensor | None, x: Tensor) -> list[Tensor]:
        return [(x.cpu() * 2).to(x.device)]  # as a far side does: main memory and back

    return Recorded("example", "doubled", far, forms)


def branching(device: str = "cpu") -> tuple[Graph, Tensor]:
    """A branch that does not need the answer stands behind the crossing, and so does what does."""
    far = doubled()
    state = torch.zeros(4, 4, device=device)

    def fn(x: Tensor) -> Tensor:
        inner = torch.tanh(x)
        answer = cross(far, inner)[0]
        own = torch.sin(inner) @ x
        state.add_(1)
        noise = torch.rand_like(x)
        return answer.exp() + own + state + noise + cross(far, answer)[0]

    return capture(fn, torch.ones(4, 4, device=device)), torch.randn(4, 4, device=device)


def names(graph: Graph) -> list[str]:
    return [
        found.__name__ if (found := crossing_of(node)) is not None else getattr(node.target, "__name__", "")
        for node in graph.fx.nodes
        if node.op == "call_function"
    ]


def run_twice(graph: Graph, x: Tensor) -> list[Tensor]:
    for binding in graph.bindings:
        if binding.bound is not None:
            binding.bound.zero_()
    torch.manual_seed(0)
    return [graph(x), graph(x)]  # type: ignore[list-item]


@pytest.mark.parametrize("improve", [launch_before_crossings, copy_beside_compute])
def test_the_passes_for_crossings_change_no_bit(improve: Callable[[Graph], Graph]) -> None:
    graph, x = branching()
    expected, before = run_twice(graph, x), names(graph)
    found = run_twice(improve(graph), x)
    assert all(map(torch.equal, found, expected))
    assert names(graph) == before


def test_operations_independent_of_an_answer_are_launched_before_it() -> None:
    graph, _ = branching()
    order = names(launch_before_crossings(graph))
    first = order.index("example_forward")
    assert {"sin.default", "mm.default"} <= set(order[:first])
    assert {"exp.default", "rand_like.default", "add_.Tensor"} <= set(order[first:])


def test_an_event_marks_where_crossing_values_are_ready() -> None:
    graph, _ = branching()
    order = names(copy_beside_compute(launch_before_crossings(graph)))
    assert order.index("_note_ready") == order.index("tanh.default") + 1
    assert order.count("_note_ready") == order.count("example_forward") == 2
    assert not crosses_from_cuda(graph), "a program of a CPU has none of this"


class Recording:
    """Stands for a CUDA graph: the program, run again on the recorded inputs into the recorded results."""

    made = 0

    def __init__(self, program: Any, inputs: Sequence[Tensor]) -> None:
        Recording.made += 1
        self.results = tuple(torch.empty(0) for _ in range(3))

        def again() -> None:
            for mine, value in zip(self.results, program.run(*inputs), strict=True):
                mine.set_(value)  # type: ignore[call-overload]

        self.again = again


def test_a_replayed_program_copies_in_and_out_and_follows_moved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(program: Any, inputs: Sequence[Tensor]) -> Any:
        recording = Recording(program, inputs)
        return recording.again, recording.results

    monkeypatch.setattr(cuda_graphs, "_record", record)
    monkeypatch.setattr(Recording, "made", 0)
    weight = torch.full((3,), 2.0)
    graph = capture(lambda x: (x * weight, x + 1, (x * weight).sum()), torch.ones(3))
    program = cuda_graphs.Replayed(graph.program(), graph, [False, True, False])
    kept = []
    for step in range(6):
        x = torch.full((3,), float(step))
        product, lent, total = program.run(x)
        assert torch.equal(product, x * 2)  # type: ignore[arg-type]
        assert torch.equal(lent, x + 1)  # type: ignore[arg-type]
        kept.append((product, x * 2, total))
    assert all(torch.equal(mine, expected) for mine, expected, _ in kept), "what is not lent is the caller's"
    assert Recording.made == 1
    weight.data = torch.full((3,), 5.0)
    assert torch.equal(program.run(torch.ones(3))[0], torch.full((3,), 5.0))  # type: ignore[arg-type]
    for _ in range(4):
        assert torch.equal(program.run(torch.ones(3))[0], torch.full((3,), 5.0))  # type: ignore[arg-type]
    assert Recording.made == 2


def test_a_program_that_cannot_be_recorded_still_runs_and_logs_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs, "_record", refuse)
    graph = capture(lambda x: x * 2, torch.ones(3))
    program = cuda_graphs.Replayed(graph.program(), graph, [False])
    with caplog.at_level(logging.INFO, logger="anabranch"):
        found = [program.run(torch.ones(3))[0] for _ in range(8)]
    (said,) = [record.getMessage() for record in caplog.records if record.name == "anabranch"]
    assert "cannot be a CUDA graph" in said
    assert "operation not permitted when stream is capt" in said
    assert all(torch.equal(each, torch.full((3,), 2.0)) for each in found)  # type: ignore[arg-type]


def test_what_waits_for_the_device_is_never_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_graphs, "_record", lambda *_: pytest.fail("recorded"))
    graph = capture(lambda x: torch.linalg.inv(x) * 2, torch.eye(3))
    with caplog.at_level(logging.INFO, logger="anabranch"):
        program = cuda_graphs.Replayed(graph.program(), graph, [False])
        assert all(torch.equal(program.run(torch.eye(3))[0], torch.eye(3) * 2) for _ in range(8))  # type: ignore[arg-type]
    (said,) = [record.getMessage() for record in caplog.records if record.name == "anabranch"]
    assert "_linalg_check_errors waits for the device" in said


@pytest.mark.parametrize("ended", [True, False])
def test_a_failed_recording_gives_its_stream_back_and_its_memory_once(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch gives back the memory of a recording that was ended, and of no other; giving it back twice aborts."""
    did: list[str] = []

    def close(device: int, pool: tuple[int, int]) -> None:
        if ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        did.append(f"close {device} {pool}")

    def fail(*_: Tensor) -> tuple[object, ...]:
        raise torch.OutOfMemoryError("example")

    stream = SimpleNamespace(device_index=1)
    for name, value in {
        "CUDAGraph": SimpleNamespace,
        "current_stream": lambda: stream,
        "graph_pool_handle": lambda: (0, 7),
        "graph": lambda *_, **__: contextlib.nullcontext(),
        "set_stream": lambda given: did.append("stream" if given is stream else "other"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", close)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: did.append(f"release {device} {pool}"))
    monkeypatch.setattr(cuda_graphs, "_BROKEN", kept := [])
    with pytest.raises(torch.OutOfMemoryError):
        cuda_graphs._record(cuda_graphs.Program("", fail), [])
    assert did == (["stream"] if ended else ["stream", "close 1 (0, 7)", "release 1 (0, 7)"])
    assert len(kept) == (not ended)


def test_one_thread_of_a_process_records_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on, made = threading.Event(), threading.Event(), []

    def record(program: Any, inputs: Sequence[Tensor]) -> Any:
        made.append(threading.current_thread().name)
        inside.set()
        assert go_on.wait(60)
        results = program.run(*inputs)
        return lambda: results[0].copy_(inputs[0] * 2), results

    def run(times: int) -> None:
        graph = capture(lambda x: x * 2, torch.ones(3))
        program = cuda_graphs.Replayed(graph.program(), graph, [False])
        for step in range(times):
            assert torch.equal(program.run(torch.full((3,), step + 1.0))[0], torch.full((3,), 2 * (step + 1.0)))  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_graphs, "_record", record)
    first = threading.Thread(target=run, args=(6,), name="first")
    first.start()
    assert inside.wait(60)
    run(8)
    assert made == ["first"], "it did not wait for the other, nor record beside it"
    go_on.set()
    first.join(60)
    run(8)
    assert made == ["first", threading.current_thread().name]


def test_programs_on_a_cpu_or_with_python_calls_are_not_recorded() -> None:
    assert not cuda_graphs.can_replay(capture(lambda x: x * 2, torch.ones(3)))
    assert not cuda_graphs.can_replay(branching()[0])


def test_a_capture_does_not_set_a_random_state_that_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting it makes cuDNN's dropout start anew; PyTorch's tracer does so after each trace."""
    state, told = torch.tensor([1, 2], dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device="cuda": told.append(state.tolist()))
    with random_states_untouched():
        torch.cuda.set_rng_state(torch.tensor([1, 2], dtype=torch.uint8))
        torch.cuda.set_rng_state(torch.tensor([1, 3], dtype=torch.uint8))
        other = threading.Thread(target=torch.cuda.set_rng_state, args=(state,))  # a user's own, elsewhere
        other.start()
        other.join(60)
    torch.cuda.set_rng_state(state)
    assert told == [[1, 3], [1, 2], [1, 2]]


# On a device.


def train(graph: bool, steps: int = 8, move: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    program = StepProgram(model, lambda m, x: m(x).square().mean(), [optimizer])
    batches = [torch.randn(6 if step % 4 else 3, 8, device="cuda") for step in range(3 * steps)]
    losses = []
    for step, x in enumerate(batches):
        if step == move:
            model[0].weight.data = model[0].weight.data.clone()
        if graph:
            losses.append(program.run(x)["loss"])
        else:
            optimizer.zero_grad()
            losses.append(model(x).square().mean())
            losses[-1].backward()
            optimizer.step()
        scheduler.step()
    return [*losses, *model.state_dict().values(), torch.cuda.get_rng_state()]  # type: ignore[list-item]


@pytest.mark.cuda
@NO_CUDA
@pytest.mark.parametrize("move", [None, 15])
def test_replayed_steps_are_the_plain_loop_bit_for_bit(move: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings: list[object] = []
    real = cuda_graphs._record
    monkeypatch.setattr(cuda_graphs, "_record", lambda *given: recordings.append(given) or real(*given))
    for mine, plain in zip(train(True, move=move), train(False, move=move), strict=True):
        assert torch.equal(mine, plain)
    assert len(recordings) >= 2, "both kinds of batches were recorded"


@pytest.mark.cuda
@NO_CUDA
def test_crossings_from_a_device_give_the_same_bits_beside_the_computation() -> None:
    graph, x = branching("cuda")
    assert crosses_from_cuda(graph)
    assert "_note_ready" in graph.code
    for mine, plain in zip(run_twice(graph, x), run_twice(branching("cuda")[0], x), strict=True):
        assert torch.equal(mine, plain)
    far = doubled()
    model = nn.Linear(4, 4).cuda()
    program = StepProgram(
        model, lambda m, x: cross(far, m(x))[0].square().sum(), [torch.optim.SGD(model.parameters(), lr=0.01)]
    )
    twin = nn.Linear(4, 4).cuda()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for _ in range(5):
        found = program.run(x)["loss"]
        optimizer.zero_grad()
        loss = (twin(x) * 2).square().sum()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(found, loss.detach())


def noisy(waits: bool, graph: bool, seed: int = 0, steps: int = 12) -> list[Tensor]:
    """The losses of a model with Dropout, whose step waits for the device to look at what ``inv`` says, or does not."""
    generator = torch.Generator().manual_seed(seed)
    weights = nn.Linear(8, 8).requires_grad_(False)
    for value in weights.parameters():
        value.copy_(torch.randn(value.shape, generator=generator))
    model = nn.Sequential(weights, nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.3 if waits else 0.0)).cuda()
    with torch.no_grad():
        model[2].weight.copy_(torch.eye(8))
        model[2].bias.zero_()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return (torch.linalg.inv(y.T @ y + torch.eye(8, device="cuda")) if waits else y).square().mean()

    program, losses = StepProgram(model, loss, [optimizer]), []
    for _ in range(steps):
        x = torch.randn(6, 8, generator=generator).cuda()
        if graph:
            losses.append(program.run(x)["loss"])
        else:
            optimizer.zero_grad()
            losses.append(loss(model, x))
            losses[-1].backward()
            optimizer.step()
    return [value.detach().cpu() for value in losses]  # type: ignore[union-attr]


@pytest.mark.cuda
@NO_CUDA
@pytest.mark.parametrize("known", [True, False])
def test_a_step_that_waits_for_the_device_leaves_streams_and_random_numbers_as_they_were(
    known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not known:
        monkeypatch.setattr(cuda_graphs, "_WAITING", frozenset())
    torch.cuda.manual_seed(1)
    wanted = [*noisy(True, False), torch.rand(3, device="cuda").cpu()]
    torch.cuda.manual_seed(1)
    with caplog.at_level(logging.INFO, logger="anabranch"):
        found = [*noisy(True, True), torch.rand(3, device="cuda").cpu()]
    assert all(map(torch.equal, found, wanted))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert [text for text in caplog.messages if "cannot be a CUDA graph" in text]


@pytest.mark.cuda
@NO_CUDA
def test_threads_that_train_at_the_same_time_each_have_the_plain_loops_losses() -> None:
    wanted = [noisy(False, False, seed, 40) for seed in range(4)]
    found: dict[int, list[Tensor]] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: noisy(False, True, seed, 40)}))
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed, losses in enumerate(wanted):
        assert all(map(torch.equal, found[seed], losses))


@pytest.mark.cuda
@NO_CUDA
def test_an_lstm_with_dropout_draws_the_plain_loops_numbers_after_a_capture_was_tried() -> None:
    def losses(engine: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.LSTM(4, 4, num_layers=2, dropout=0.5).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.randn(5, 3, 4, device="cuda") for _ in range(8)]
        step = ab.TrainStep(model, lambda model, x: model(x)[0].square().mean(), optimizer)
        found: list[Tensor] = []
        torch.manual_seed(1)
        if engine:
            with ab.Executor(step, engine="graph") as executor:
                found = [executor.run(batch=batch)["loss"] for batch in batches]
                assert executor.engine() == "tape"
            return found
        for batch in batches:
            optimizer.zero_grad()
            found.append(model(batch)[0].square().mean())
            found[-1].backward()
            optimizer.step()
        return found

    assert all(map(torch.equal, losses(True), losses(False)))
