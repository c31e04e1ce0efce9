"""Servers and directories that come back with their state, are there twice, or want the same folder."""

from __future__ import annotations

import copy
import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from expert_modules import adam, calling, expert_of, served
from torch import nn

from anabranch.checkpoint import generations
from anabranch.errors import BoundaryError, CheckpointError, NotFound, PeerLost
from anabranch.experts import (
    Directory,
    DirectoryServer,
    ExpertBackend,
    ExpertServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
    wire,
)
from anabranch.experts.server import expert_server
from anabranch.experts.server.persistence import Persistence
from anabranch.record.spans import on_fault_point
from anabranch.tensors import TensorSpec
from anabranch.transport import Client, pack
from anabranch.transport.frame import FailureFrame, Hello, ReplyHeader, RequestHeader, encode
from frame_reading import next_frame, wire_of
from programs import Programs
from toys import assert_same
from waiting import wait_until


def normed(seed: int = 0) -> ExpertBackend:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = adam(module)
    return expert_of(module, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))


def make(uid: str = "ffn.0") -> ExpertBackend:
    return expert_of(nn.Linear(4, 4), uid=uid)


def train(expert: RemoteExpert, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        expert(torch.randn(5, 4, generator=generator)).square().sum().backward()


def test_a_restarted_server_continues_as_if_uninterrupted(tmp_path: Path) -> None:
    whole, first, second = normed(), normed(), normed(seed=9)
    with calling(whole) as expert:
        train(expert, 3, seed=1)
        train(expert, 3, seed=2)
    with calling(first, checkpoint_dir=tmp_path) as expert:
        train(expert, 3, seed=1)
    with calling(second, checkpoint_dir=tmp_path) as expert:
        assert second.updates == 3
        train(expert, 3, seed=2)
    assert second.updates == 6
    assert_same(whole.module, second.module)
    rates = [backend.optimizer.param_groups[0]["lr"] for backend in (whole, second) if backend.optimizer]
    assert rates[0] == rates[1]


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
    backend = normed()
    x = torch.ones(2, 4)
    with served(backend, checkpoint_dir=tmp_path) as server:
        assert push(server, backend, 0, x).payload == pack(wire.GradientsHeader([True], 0))
    restarted = normed(seed=5)
    with served(restarted, checkpoint_dir=tmp_path) as server:
        after = copy.deepcopy(restarted.module)
        assert push(server, backend, 0, x).payload == wire.GONE
        assert restarted.updates == 1
        assert_same(restarted.module, after)
        push(server, backend, 1, x)
        assert restarted.updates == 2


def test_a_backward_without_rows_is_not_recorded_beside_those_of_the_devices_thread(tmp_path: Path) -> None:
    """The thread that reads recorded it while the device's thread recorded another: that one's caller got an error."""
    backend, x = normed(), torch.ones(2, 4)
    for one in (backend, normed(seed=5)):
        with served(one, checkpoint_dir=tmp_path) as server:
            assert push(server, backend, 0, x[:0]).payload == pack(wire.GradientsHeader([True], 0))
            push(server, backend, 1, x)
    assert one.updates == 1


def test_a_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    with calling(normed(), checkpoint_dir=tmp_path) as expert:
        train(expert, 1, seed=0)
    with (
        pytest.raises(CheckpointError, match=r"ffn\.0 belongs to another module"),
        served(make(), checkpoint_dir=tmp_path),
    ):
        pass


def test_copies_are_taken_between_batches_and_written_outside(tmp_path: Path) -> None:
    order: list[str] = []

    @contextmanager
    def paused() -> Iterator[None]:
        order.append("pause")
        yield
        order.append("go on")

    backend = normed()
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


# --- servers and directories that come back, are there twice, or want the same folder


def test_the_schema_of_a_server_restarted_with_another_is_requested_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"unix:{tmp_path}/experts"
    expert = RemoteExpert("ffn.0", endpoint)
    for _ in range(2):
        with served(make(), listen=endpoint):
            expert(torch.ones(2, 4)).sum().backward()
    with served(expert_of(nn.Linear(4, 6)), listen=endpoint):
        assert expert(torch.ones(2, 4)).shape == (2, 6)


def test_a_mixture_requests_the_changed_schema_of_a_restarted_expert(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"unix:{tmp_path}/experts"
    directory = Directory()
    mixture = RemoteMixtureOfExperts(4, [1], directory, "ffn", k_best=1, k_min=1)
    with served(make(), listen=endpoint, directory=directory):
        assert mixture(torch.ones(2, 4)).shape == (2, 4)
    rounded = expert_of(nn.Linear(4, 4), args_schema=[TensorSpec(4, compression="float16")])
    with served(rounded, listen=endpoint, directory=directory):
        with pytest.raises(BoundaryError, match="a different schema"):
            mixture(torch.ones(2, 4))
        assert mixture(torch.ones(2, 4)).shape == (2, 4)


def test_a_directory_that_lost_its_table_learns_it_again_from_the_servers(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    names = f"unix:{tmp_path}/names"
    with Client(retries=2) as client, ExitStack() as stack:
        directory = Directory(names)
        first = stack.enter_context(ExitStack())
        first.enter_context(DirectoryServer(names))
        stack.enter_context(served(make(), directory=names, ttl=0.3))

        def answers() -> bool:
            try:
                return RemoteExpert("ffn.0", directory, client=client)(torch.ones(1, 4)).shape == (1, 4)
            except NotFound:
                return False

        # Announced again and again, and on a busy machine perhaps forgotten in between.
        wait_until(answers)
        first.close()
        stack.enter_context(DirectoryServer(names))
        wait_until(lambda: directory.lookup(["ffn.0"]))
        wait_until(lambda: directory.active(["ffn"]) == {"ffn": [0]})
        wait_until(answers)


# --- an expert that another live server has announced already: the new server says so, and serves


def test_a_uid_that_another_live_server_announced_is_warned_of_once_and_served(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_server, "_GLANCE", 60.0)
    directory = Directory()
    with (
        served(make("ffn.0"), make("ffn.1"), directory=directory, ttl=3000.0) as first,
        served(make("ffn.0"), make("ffn.2"), directory=directory, ttl=3000.0) as second,
    ):
        wait_until(lambda: caplog.records)
        assert directory.lookup(["ffn.0"]) == {"ffn.0": second.endpoint}
        assert RemoteExpert("ffn.0", directory)(torch.ones(1, 4)).shape == (1, 4)
    (text,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert text.startswith(f"ffn.0 was listed at another live server, {first.endpoint}")
    assert "stop one of them" in text


def test_a_server_restarted_at_a_new_address_is_not_warned_of_its_old_one(
    caplog: pytest.LogCaptureFixture, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gone = f"unix:{tmp_path_factory.mktemp('gone')}/socket"
    with DirectoryServer() as names:
        names.directory.announce(["ffn.0"], gone, ttl=30.0)
        with (
            served(make("other.0")) as alive,  # answers, but has no such expert any more
            served(make("ffn.0"), make("ffn.1"), directory=names.endpoint) as server,
        ):
            server._warn_of_others({"ffn.0": gone, "ffn.1": alive.endpoint})
    assert not caplog.records


def test_ctrl_c_while_a_directory_does_not_answer_ends_the_server_and_the_program() -> None:
    class Pressed(Directory):
        def withdraw(self, uids: object, endpoint: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), served(make("ffn.0"), directory=Pressed()) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
    with pytest.raises(PeerLost):
        expert(torch.ones(1, 4))


# --- one server saves an expert in a directory: a second would overwrite the training of the first


def test_a_second_server_of_an_expert_in_one_directory_is_refused_and_the_first_serves_on(tmp_path: Path) -> None:
    first = make()
    with served(first, checkpoint_dir=tmp_path) as server:
        with (
            pytest.raises(CheckpointError, match=r"saves ffn\.0 here \(process \d+ on .*--checkpoint-dir"),
            served(make("ffn.1"), make(), checkpoint_dir=tmp_path),
        ):
            pass
        with served(make("ffn.1"), checkpoint_dir=tmp_path):  # nothing of the refused one stays behind
            RemoteExpert("ffn.0", server.endpoint)(torch.ones(1, 4)).sum().backward()
    second = make()
    with served(second, checkpoint_dir=tmp_path):  # the lock is held until the last state is saved, and no longer
        assert second.updates == 1
        assert torch.equal(second.module.weight, first.module.weight)


def test_a_directory_that_may_only_be_read_is_served_from_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(make(), checkpoint_dir=tmp_path) as server:
        RemoteExpert("ffn.0", server.endpoint)(torch.ones(1, 4)).sum().backward()
    plain = os.open

    def refused(path: str | Path, *arguments: int, **options: int) -> int:
        if Path(path).name == "lock":
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    first, second = make(), make()
    with served(first, checkpoint_dir=tmp_path), served(second, checkpoint_dir=tmp_path):
        assert first.updates == second.updates == 1
