"""``ShardSnapshot``: one moment of a shard, read while the shard goes on; ``Reading``: by a client, part by part."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.parameter_server.messages import SnapshotPart
from anabranch.tables.row_block import files
from anabranch.tables.snapshot import PIECE_BYTES, RowSnapshot


@dataclass(slots=True)
class ShardSnapshot:
    """One moment of a shard.

    Attributes:
        state: the tables and parameters, and of a whole shard the order of the workers, as plain values.
        groups: tensors of parameters, of steps that rows have missed, and of pushes that wait; they stay as they are.
        rows: of the tables.
    """

    state: dict[str, object]
    groups: dict[str, dict[str, Tensor]]
    rows: RowSnapshot

    def files(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield groups with the rows."""
        for number, tensors in enumerate(files(self.rows)):
            yield f"rows-{number}", tensors


class Reading:
    """A snapshot in parts, of which the last can be had again; none is larger than ``part_bytes``."""

    def __init__(self, snapshot: ShardSnapshot) -> None:
        self.state, self.rows = {**snapshot.state, "groups": len(snapshot.groups)}, snapshot.rows
        groups = [sum(tensor.nbytes for tensor in group.values()) for group in snapshot.groups.values()]
        self.part_bytes = max(PIECE_BYTES, *groups, 0)
        self._groups, self._lock = deque(snapshot.groups.items()), threading.Lock()
        self._number = -1
        self._last: tuple[SnapshotPart, list[Tensor]] | None = None

    def _next(self) -> tuple[SnapshotPart, list[Tensor]] | None:
        # No generator, which would be at its end after an error: then the next part would be none, and a part asked for
        # again would pass for the last.
        if self._groups:
            self.rows.touch()
            name, group = self._groups.popleft()
            return SnapshotPart(name), list(group.values())
        piece = next(self.rows, None)
        return None if piece is None else (SnapshotPart("", piece.tables, piece.counts), piece.rows.tensors())

    def part(self, number: int) -> tuple[SnapshotPart, list[Tensor]] | None:
        """Return part ``number``; ``None`` behind the last."""
        with self._lock:
            if number < self._number:
                raise SchemaError(f"part {number} of a snapshot was asked for behind part {self._number}")
            while self._number < number:
                self._last, self._number = self._next(), self._number + 1
            return self._last
