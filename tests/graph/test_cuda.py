"""Graphs on CUDA: copies beside the computation, recorded replay; as much as can be is tested without one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_boundaries import Scale
from torch import Tensor, nn

from anabranch.graph import StepProgram, capture
from anabranch.graph.run import cuda_graphs
from plain_loop import mean_square
from toys import plain_step

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_replayed_program_copies_in_and_out_and_follows_moved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def record(program: Any, inputs: Sequence[Tensor]) -> Any:
        """As a CUDA graph: the program, run again on the recorded inputs into the recorded results."""
        results = tuple(torch.empty(0) for _ in range(3))
        made.append(results)

        def again() -> None:
            for mine, value in zip(results, program.run(*inputs), strict=True):
                mine.set_(value)

        return again, results

    monkeypatch.setattr(cuda_graphs, "_record", record)
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
    assert len(made) == 1
    weight.data = torch.full((3,), 5.0)
    assert torch.equal(program.run(torch.ones(3))[0], torch.full((3,), 5.0))  # type: ignore[arg-type]
    for _ in range(4):
        assert torch.equal(program.run(torch.ones(3))[0], torch.full((3,), 5.0))  # type: ignore[arg-type]
    assert len(made) == 2


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


def test_a_failed_recording_gives_its_stream_and_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives back the memory of a recording that was ended, and of no other."""
    did: list[str] = []

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
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: did.append(f"close {device} {pool}"))
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: did.append(f"release {device} {pool}"))
    monkeypatch.setattr(cuda_graphs, "_BROKEN", kept := [])
    with pytest.raises(torch.OutOfMemoryError):
        cuda_graphs._record(cuda_graphs.Program("", fail), [])
    assert did == ["stream", "close 1 (0, 7)", "release 1 (0, 7)"]
    assert len(kept) == 1


def test_programs_on_a_cpu_or_with_python_calls_are_not_recorded() -> None:
    assert not cuda_graphs.can_replay(capture(lambda x: x * 2, torch.ones(3)))
    far = Scale()
    assert not cuda_graphs.can_replay(capture(lambda x: far.call_whole(x)[0], torch.ones(2, 2)))


# On a device.


def train(graph: bool, steps: int = 8, move: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    program = StepProgram(model, mean_square, [optimizer])
    batches = [torch.randn(6 if step % 4 else 3, 8, device="cuda") for step in range(3 * steps)]
    losses = []
    for step, x in enumerate(batches):
        if step == move:
            model[0].weight.data = model[0].weight.data.clone()
        losses.append(program.run(x)["loss"] if graph else plain_step(model, mean_square, optimizer, x))
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


def noisy(graph: bool) -> list[Tensor]:
    """The losses of a model with Dropout, whose step waits for the device to look at what ``inv`` says."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.3))
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator))
    model = model.cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return torch.linalg.inv(y.T @ y + torch.eye(8, device="cuda")).square().mean()

    program, losses = StepProgram(model, loss, [optimizer]), []
    for _ in range(12):
        x = torch.randn(6, 8, generator=generator).cuda()
        losses.append(program.run(x)["loss"] if graph else plain_step(model, loss, optimizer, x))
    return [value.detach().cpu() for value in losses]  # type: ignore[union-attr]


@pytest.mark.cuda
@NO_CUDA
def test_a_step_that_waits_for_the_device_leaves_streams_and_random_numbers_as_they_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.cuda.manual_seed(1)
    plain = [*noisy(False), torch.rand(3, device="cuda").cpu()]
    torch.cuda.manual_seed(1)
    with caplog.at_level(logging.INFO, logger="anabranch"):
        graph = [*noisy(True), torch.rand(3, device="cuda").cpu()]
    assert all(map(torch.equal, graph, plain))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert [text for text in caplog.messages if "cannot be a CUDA graph" in text]
