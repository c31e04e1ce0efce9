"""A shard's folder with bits flipped, files cut, emptied or removed: refused, or nothing is lost that is not told.

Two clients have pushed -1 to a row of their own under lr 1, so a row is the number of that client's pushes that the
shard holds. Each folder is as a kill has left it, in the middle of a push or between two.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from mortal import HERE, SGD, SPEC

from anabranch.errors import CheckpointError, NotFound, RolledBack
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.parameter_server.server.push_log import PREAMBLE_BYTES
from anabranch.testing import MemoryTransport, faults


class Pushed:
    """Folders of one shard as kills have left them, and what each of two clients knows to be acknowledged."""

    def __init__(self, folder: Path, durability: str, stack: ExitStack) -> None:
        self.network, self.durability = MemoryTransport(), durability
        self.clients = [
            stack.enter_context(ParameterClient([HERE], transport=self.network, timeout=60, retries=0))
            for _ in range(2)
        ]
        self.folders: list[Path] = []
        self._known: list[list[object]] = []
        self._rows: list[list[int]] = []
        server = self.serve(folder / "live")
        rows = [0, 0]
        with server:
            self.clients[0].init_table(SPEC, SGD)
            for step in range(12):
                for client in (0, 1):
                    self._push(client)
                    rows[client] += 1
                if step in (3, 8):
                    server.checkpoint()
                if step in (2, 3, 7, 11):
                    self._keep(folder, rows)
            point = "push_log.after_append" if durability == "log" else "transport.before_reply"
            with faults.at(point, action=lambda: self._keep(folder, rows)):
                self._push(0)

    def serve(self, folder: Path, **options: bool) -> ParameterServer:
        return ParameterServer(
            listen=HERE, transport=self.network, durability=self.durability, checkpoint_dir=folder, **options
        )  # fmt: skip

    def _push(self, client: int) -> None:
        self.clients[client].sparse_push("t", torch.tensor([client]), -torch.ones(1, 2))

    def _keep(self, folder: Path, rows: list[int]) -> None:
        self.folders.append(folder / str(len(self.folders)))
        shutil.copytree(folder / "live", self.folders[-1])
        self._known.append([copy.deepcopy(client.calls.acknowledged[HERE]) for client in self.clients])
        self._rows.append(list(rows))

    def look(self, which: int, folder: Path, *, repair: bool) -> str:
        """Start a shard from a copy of folder ``which``, which was damaged; checks what its clients see."""
        try:
            server = self.serve(folder, repair=repair)
        except CheckpointError:
            return "refused"
        with server:
            losses = 0
            for number, client in enumerate(self.clients):
                client.calls.acknowledged[HERE] = copy.deepcopy(self._known[which][number])  # type: ignore[assignment]
                lost = 0
                try:
                    row = self._row(number)
                except RolledBack as error:
                    lost = error.lost
                    row = self._row(number)
                unanswered = which == len(self.folders) - 1 and number == 0
                assert row + lost - self._rows[which][number] in ((0, 1) if unanswered else (0,))
                losses += lost
            self._push(1)
            assert self._row(1) == row + 1
        return "told" if losses else "whole"

    def _row(self, client: int) -> int:
        try:
            return int(self.clients[client].sparse_pull("t", torch.tensor([client]))[0, 0])
        except NotFound:  # a repair keeps the records before the damage, which may be all
            self.clients[client].init_table(SPEC, SGD)
            return 0


@pytest.fixture(params=["log", "checkpoint"])
def pushed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pushed]:
    with ExitStack() as stack:
        yield Pushed(tmp_path, request.param, stack)


def damage(folder: Path, draw: random.Random) -> str:
    """Damages one file of a shard's folder; returns how."""
    paths = sorted(path for path in folder.glob("shard-*/*") if path.name != ".lock")
    newest = max(path for path in paths if path.name.startswith("log-bodies") and path.stat().st_size > PREAMBLE_BYTES)
    wal = next(path for path in paths if path.name == "log.db-wal")
    path = draw.choice([*paths, newest, newest, wal, wal])
    size = path.stat().st_size
    near = draw.choice([size, 200, 40])
    way = draw.choice(["flip", "flip", "flip", "cut", "zero", "remove", "empty"])
    at = max(size - 1 - draw.randrange(near), 0) if near and size else 0
    memory = bytearray(path.read_bytes())
    if way == "remove":
        path.unlink()
    elif way == "empty" or not memory:
        path.write_bytes(b"")
    elif way == "cut":
        path.write_bytes(memory[:at])
    else:
        end = at + 1 if way == "flip" else min(at + 64, size)
        memory[at:end] = bytes([memory[at] ^ 1 << draw.randrange(8)]) if way == "flip" else bytes(end - at)
        path.write_bytes(memory)
    return f"{way} {path.name} at {at} of {size}"


def damaged_folders(pushed: Pushed, tmp_path: Path, seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        which = draw.randrange(len(pushed.folders))
        folder = tmp_path / "copy" / str(seed)
        shutil.copytree(pushed.folders[which], folder)
        how = damage(folder, draw)
        if draw.random() < 0.1:
            how += ", " + damage_again(folder, draw)
        try:
            outcome = pushed.look(which, folder, repair=False)
            outcomes[outcome] += 1
            if pushed.durability == "log":
                assert outcome != "told"
            if outcome == "refused":
                outcomes["repaired, " + pushed.look(which, folder, repair=True)] += 1
                with pushed.serve(folder):  # once and for all
                    pass
        except Exception as error:
            error.add_note(f"seed {seed}, folder {which}: {how}")
            raise
        shutil.rmtree(folder)
    return outcomes


def damage_again(folder: Path, draw: random.Random) -> str:
    """A second one, to a checkpoint: rows and bodies that are damaged at once may be those of one record."""
    path = draw.choice(sorted(folder.glob("shard-*/manifest-*")) or sorted(folder.glob("shard-*/log-bodies-*")))
    memory = bytearray(path.read_bytes())
    if memory:
        memory[draw.randrange(len(memory))] ^= 1
    path.write_bytes(memory)
    return f"flip {path.name}"


def test_a_damaged_folder_is_refused_or_nothing_is_lost_untold(pushed: Pushed, tmp_path: Path) -> None:
    outcomes = damaged_folders(pushed, tmp_path, range(30))
    assert outcomes["refused"] > 3
    assert outcomes["whole" if pushed.durability == "log" else "told"] > 3


@pytest.mark.slow
def test_a_thousand_damaged_folders_are_refused_or_lose_nothing_untold(pushed: Pushed, tmp_path: Path) -> None:
    outcomes = damaged_folders(pushed, tmp_path, range(1000, 1800 if pushed.durability == "log" else 1200))
    assert outcomes["refused"] > 15
    assert outcomes["whole" if pushed.durability == "log" else "told"] > 15
