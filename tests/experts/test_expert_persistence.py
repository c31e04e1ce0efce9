"""Experts come back from a crash with their state, and know which requests that state holds."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from expert_modules import calling
from torch import nn

from anabranch.checkpoint import generations
from anabranch.errors import CheckpointError
from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert, wire
from anabranch.experts.server.persistence import Persistence
from anabranch.record.fault_points import on_fault_point
from anabranch.tensors import TensorSpec
from anabranch.transport import Client, pack
from anabranch.transport.frame import FailureFrame, Hello, ReplyHeader, RequestHeader, encode
from frame_reading import next_frame, wire_of
from programs import Programs
from waiting import wait_until


def make(seed: int = 0, uid: str = "ffn.0") -> ExpertBackend:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return ExpertBackend(uid, module, optimizer, scheduler=scheduler, args_schema=[TensorSpec(4)])


def train(expert: RemoteExpert, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        expert(torch.randn(5, 4, generator=generator)).square().sum().backward()


def test_a_restarted_server_continues_as_if_uninterrupted(tmp_path: Path) -> None:
    whole, first, second = make(), make(), make(seed=9)
    with calling(whole) as expert:
        train(expert, 3, seed=1)
        train(expert, 3, seed=2)
    with ExpertServer([first], checkpoint_dir=tmp_path) as server:
        train(RemoteExpert("ffn.0", server.endpoint), 3, seed=1)
    with ExpertServer([second], checkpoint_dir=tmp_path) as server:
        assert second.updates == 3
        train(RemoteExpert("ffn.0", server.endpoint), 3, seed=2)
    assert second.updates == 6
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, second.module.state_dict()[name]), name
    assert second.optimizer is not None
    assert whole.optimizer is not None
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def push(server: ExpertServer, backend: ExpertBackend, sequence: int, x: torch.Tensor) -> ReplyHeader | FailureFrame:
    """Ask for a backward as one and the same client does, before its server's restart and after it."""
    header = RequestHeader(
        wire.BACKWARD,
        backend.uid,
        epoch=b"one and the same",
        sequence=sequence,
        seconds=60.0,
        schema=backend.schema.hash,
        payload=pack(wire.BackwardHeader([True], [wire.RequestPart(len(x), b"")], False, True)),
    )
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(server.endpoint.removeprefix("unix:"))
        sock.sendall(b"".join([*encode(Hello()), *encode(header, [x, x])]))
        wire_there = wire_of(sock)
        while not isinstance(answer := next_frame(wire_there).header, (ReplyHeader, FailureFrame)):
            pass
        return answer


def test_an_update_that_the_state_holds_is_not_applied_again_after_a_restart(tmp_path: Path) -> None:
    backend = make()
    x = torch.ones(2, 4)
    with ExpertServer([backend], checkpoint_dir=tmp_path) as server:
        assert push(server, backend, 0, x).payload == pack(wire.GradientsHeader([True], 0))
    restarted = make(seed=5)
    with ExpertServer([restarted], checkpoint_dir=tmp_path) as server:
        after = copy.deepcopy(restarted.module.state_dict())
        assert push(server, backend, 0, x).payload == wire.GONE
        assert restarted.updates == 1
        assert all(torch.equal(value, after[name]) for name, value in restarted.module.state_dict().items())
        push(server, backend, 1, x)
        assert restarted.updates == 2


def test_a_backward_without_rows_is_not_recorded_beside_those_of_the_devices_thread(tmp_path: Path) -> None:
    """The thread that reads recorded it while the device's thread recorded another: that one's caller got an error."""
    backend, x = make(), torch.ones(2, 4)
    for served in (backend, make(seed=5)):
        with ExpertServer([served], checkpoint_dir=tmp_path) as server:
            assert push(server, backend, 0, x[:0]).payload == pack(wire.GradientsHeader([True], 0))
            push(server, backend, 1, x)
    assert served.updates == 1


def test_a_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    with ExpertServer([make()], checkpoint_dir=tmp_path) as server:
        train(RemoteExpert("ffn.0", server.endpoint), 1, seed=0)
    other = ExpertBackend("ffn.0", nn.Linear(4, 4), args_schema=[TensorSpec(4)])
    with pytest.raises(CheckpointError, match=r"ffn\.0 belongs to another module"):
        ExpertServer([other], checkpoint_dir=tmp_path).__enter__()


def test_copies_are_taken_between_batches_and_written_outside(tmp_path: Path) -> None:
    order: list[str] = []

    @contextmanager
    def paused() -> Iterator[None]:
        order.append("pause")
        yield
        order.append("go on")

    backend = make()
    backend.updates = 1
    persistence = Persistence(tmp_path, {"ffn.0": backend}, paused=paused)
    with on_fault_point(lambda name: order.append(name) if name.startswith("experts") else None):
        persistence.save()
        persistence.save()
    # The second finds nothing that changed.
    assert order == ["pause", "go on", "experts.copied"]


PROGRAM = """
import sys, torch
from torch import nn
from anabranch.experts import ExpertBackend, ExpertServer
from anabranch.tensors import TensorSpec

module = nn.Linear(1, 1, bias=False)
nn.init.zeros_(module.weight)
backend = ExpertBackend("count.0", module, torch.optim.SGD(module.parameters(), lr=1.0), args_schema=[TensorSpec(1)])
with ExpertServer([backend], listen=sys.argv[1], checkpoint_dir=sys.argv[2], checkpoint_seconds=0.02):
    print(backend.updates, float(module.weight.detach()), flush=True)
    sys.stdin.read()
"""


def test_a_server_killed_during_a_save_recovers_completely(tmp_path: Path, programs: Programs) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    endpoint = f"unix:{folder}/socket"
    saved = tmp_path / "saved" / "count.0"
    known = 0
    for round_ in range(3):
        with programs.start(PROGRAM, endpoint, tmp_path / "saved") as process, Client() as client:
            updates, weight = process.stdout.readline().split()
            # The count and the parameter are of one moment.
            assert float(weight) == -float(updates)
            assert int(updates) >= known
            assert round_ == 0 or int(updates) > 0
            known = int(updates)
            expert = RemoteExpert("count.0", endpoint, client=client)
            before = newest(saved)

            def saves_twice(expert: RemoteExpert = expert, before: int = before) -> bool:
                expert(torch.ones(1, 1)).sum().backward()
                return newest(saved) >= before + 2

            wait_until(saves_twice)  # so it is killed while it saves, or between two savings
            process.kill()


def newest(directory: Path) -> int:
    """The number of the newest generation, 0 if there is none."""
    return max(generations.complete_generations(directory), default=0) if directory.exists() else 0
