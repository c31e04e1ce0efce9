"""One shard and two clients through every fault at once, checked against a dict that forgets nothing.

Each client pushes -1 to a row of its own under lr 1, so a row is the number of that client's pushes that the shard
holds. Whatever happens, that number is what was acknowledged, less what ``RolledBack.lost`` told, exactly. And what the
shard holds is a beginning of all pushes in the order in which they were acknowledged: its step is their number, and a
row's version the place of its last one among them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mortal import HERE, SGD, SPEC

from anabranch.errors import CheckpointError, RemoteError, RolledBack
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.parameter_server.server.push_log import PREAMBLE_BYTES
from anabranch.testing import LossyTransport, MemoryTransport, faults

CLIENTS = st.integers(0, 1)
POINTS = st.sampled_from(["before_append", "mid_append", "after_append", "before_sync", "after_sync", "after_commit"])


class OneShard(RuleBasedStateMachine):
    """The shard, its clients, and what the clients were told."""

    @initialize(durability=st.sampled_from(["log", "checkpoint"]), seed=st.integers(0, 1000))
    def begin(self, durability: str, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="anabranch-test-"))
        self.network = MemoryTransport()
        self.durability = durability
        self.alive = False
        self.damaged = self.was_damaged = False
        self.order: list[int] = []  # whose push each step of the table is
        lossy = LossyTransport(drop=0.1, duplicate=0.1, seed=seed, transport=self.network)
        self.start()
        self.clients = [ParameterClient([HERE], transport=lossy, retries=100, timeout=60) for _ in range(2)]
        for client in self.clients:
            client.init_table(SPEC, SGD)
        self.server.checkpoint()  # no damage to a log takes the table itself
        self.begun = True
        self.pushed = [0, 0]  # acknowledged, less what was told lost
        self.maybe = [0, 0]  # pushes that were neither acknowledged nor refused
        self.seen = [0, 0]  # of those counted as pushed the ones that only a pull has shown: damage takes them unsaid
        self.steps = 0

    def make(self, **options: bool) -> ParameterServer:
        return ParameterServer(
            listen=HERE, transport=self.network, durability=self.durability, checkpoint_dir=self.folder,
            **options,
        )  # fmt: skip

    def start(self, **options: bool) -> None:
        self.server = self.make(**options).__enter__()
        self.alive = True
        if self.order:
            step, _ = self.held()
            assert step <= len(self.order)
            del self.order[step:]

    def die(self) -> None:
        """Without a drain, a checkpoint, or a word."""
        self.server.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        self.alive = False

    def held(self) -> tuple[int, list[tuple[int, int]]]:
        """The table's step, and the number of pushes and the version of each client's row."""
        snapshot = self.server._shard.snapshot()
        rows = {
            int(row): (int(one[0]), int(stamp) - 1)
            for piece in snapshot.rows
            for row, one, stamp in zip(piece.rows.ids, piece.rows.weights, piece.rows.stamps, strict=True)
        }
        return snapshot.state["tables"][0]["step"], [rows.get(client, (0, 0)) for client in range(2)]

    def settle(self, client: int) -> int:
        """The row of a client as it is now, once it has heard of whatever is lost."""
        while True:
            try:
                held = int(self.clients[client].sparse_pull("t", torch.tensor([client]))[0, 0])
            except RolledBack as told:
                self.pushed[client] -= told.lost
                nothing_lost = told.lost == 0
            else:
                break
            assert not nothing_lost
        found = held - self.pushed[client]
        assert -self.seen[client] * self.was_damaged <= found <= self.maybe[client]
        self.maybe[client] -= max(found, 0)
        self.seen[client] += found
        self.pushed[client] = held
        return held

    def up(self) -> bool:
        """Whether there is a shard to ask."""
        return self.alive

    def down(self) -> bool:
        """Whether there is none."""
        return not self.alive

    @precondition(up)
    @rule(client=CLIENTS, times=st.integers(1, 3))
    def push(self, client: int, times: int) -> None:
        for _ in range(times):
            try:
                self.clients[client].sparse_push("t", torch.tensor([client]), -torch.ones(1, 2))
            except RolledBack as told:
                self.pushed[client] -= told.lost
            else:
                self.pushed[client] += 1
                self.order.append(client)

    @precondition(up)
    @rule(client=CLIENTS)
    def pull(self, client: int) -> None:
        """Own writes are read, and versions never go back but with what is told."""
        before = self.pushed[client]
        assert self.settle(client) >= before or self.durability == "checkpoint" or self.was_damaged

    @precondition(up)
    @rule()
    def checkpoint(self) -> None:
        self.server.checkpoint()

    @precondition(up)
    @rule()
    def kill(self) -> None:
        self.die()

    @precondition(up)
    @rule(client=CLIENTS, point=POINTS)
    def kill_in_a_push(self, client: int, point: str) -> None:
        """The process dies at a point of the push; it is not acknowledged, and may be there or not."""
        self.settle(client)
        try:
            with faults.at(f"push_log.{point}") as fault:
                self.clients[client].sparse_push("t", torch.tensor([client]), -torch.ones(1, 2))
        except RemoteError:
            assert fault.struck
            self.maybe[client] += 1
            self.order.append(client)
            self.die()
        else:
            assert not fault.struck
            self.pushed[client] += 1
            self.order.append(client)

    @precondition(down)
    @rule()
    def restart(self) -> None:
        if self.damaged:
            with pytest.raises(CheckpointError, match="--repair"):
                self.make()
            self.start(repair=True)
            self.damaged = False
        else:
            self.start()

    @precondition(up)
    @rule()
    def a_second_server(self) -> None:
        with pytest.raises(CheckpointError, match="another server holds it"):
            self.make()

    @precondition(lambda self: not self.alive and not self.damaged)
    @rule(part=st.floats(0, 1, exclude_max=True), cut=st.booleans())
    def damage(self, part: float, cut: bool) -> None:
        """A bit of a record that was acknowledged, or all from there on."""
        paths = [path for path in self.folder.glob("shard-*/log-bodies-*") if path.stat().st_size > PREAMBLE_BYTES]
        if not paths:
            return
        path = max(paths)
        memory = bytearray(path.read_bytes())
        at = PREAMBLE_BYTES + int(part * (len(memory) - PREAMBLE_BYTES))
        if cut:
            path.write_bytes(memory[:at])
        else:
            memory[at] ^= 16
            path.write_bytes(memory)
        with tempfile.TemporaryDirectory() as aside:
            copy = Path(aside) / "copy"
            shutil.copytree(self.folder, copy)
            try:
                with ParameterServer(
                    transport=MemoryTransport(), durability=self.durability, checkpoint_dir=copy
                ):  # fmt: skip
                    pass
            except CheckpointError:
                self.damaged = self.was_damaged = True

    @precondition(lambda self: getattr(self, "begun", False) and self.alive)
    @invariant()
    def holds_pushes_in_their_order(self) -> None:
        places = [[place for place, whose in enumerate(self.order, 1) if whose == client] for client in range(2)]
        assert self.held() == (len(self.order), [(len(mine), max(mine, default=0)) for mine in places])

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        if not self.alive:
            self.restart()
        for client in range(2):
            self.settle(client)
            self.clients[client].close()
        self.die()
        shutil.rmtree(self.folder, ignore_errors=True)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        OneShard,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, database=None,
            phases=[Phase.generate],
        ),
    )  # fmt: skip


def test_acknowledged_pushes_are_present_or_reported_lost() -> None:
    run(8, 15)


@pytest.mark.slow
def test_acknowledged_pushes_are_present_or_reported_lost_through_many_faults() -> None:
    run(250, 40)
