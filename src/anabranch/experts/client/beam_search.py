"""The best experts of a grid for each row, found dimension by dimension among the announced ones.

An expert's score is the sum of its coordinates' scores, so the best ones have prefixes among the best prefixes: keeping
``k`` prefixes per dimension finds the ``k`` best experts of a full grid. The directory is asked once per dimension, for
all rows together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.experts.directory import DirectoryLike

__all__ = ["Choices", "beam_search"]


@dataclass(frozen=True, slots=True)
class Choices:
    """The experts chosen for each row.

    Attributes:
        uids: the chosen experts, each once.
        slots: of shape (rows, k): an index into ``uids``, best first; -1 where there are fewer than k.
        coordinates: of shape (rows, k, dimensions): the indices in the experts' uids; 0 where ``slots`` is -1.
    """

    uids: list[str]
    slots: NDArray[np.int64]
    coordinates: NDArray[np.int64]

    def with_rows_of(self, other: Choices, which: NDArray[np.bool_]) -> Choices:
        """Return these choices with those of ``other`` for the rows that are true in ``which``."""
        place = {uid: slot for slot, uid in enumerate(dict.fromkeys([*self.uids, *other.uids]))}
        width = max(self.slots.shape[1], other.slots.shape[1])
        mine, theirs = self._widened(width), other._widened(width)
        translated = np.array([*(place[uid] for uid in other.uids), -1])[theirs.slots]
        slots = np.where(which[:, None], translated, mine.slots)
        return Choices([*place], slots, np.where(which[:, None, None], theirs.coordinates, mine.coordinates))

    def _widened(self, width: int) -> Choices:
        missing = width - self.slots.shape[1]
        slots = np.pad(self.slots, ((0, 0), (0, missing)), constant_values=-1)
        return Choices(self.uids, slots, np.pad(self.coordinates, ((0, 0), (0, missing), (0, 0))))


def beam_search(
    directory: DirectoryLike,
    uid_prefix: str,
    scores: Sequence[NDArray[np.float64]],
    k: int,
    avoid: Collection[str] = (),
    kept: Sequence[NDArray[np.bool_]] | None = None,
) -> Choices:
    """Return the ``k`` best experts for each row.

    >>> from anabranch.experts import Directory
    >>> directory = Directory()
    >>> directory.announce(["ffn.0.0", "ffn.0.1", "ffn.1.1"], "unix:/run/experts", ttl=30.0)
    >>> found = beam_search(directory, "ffn", [np.array([[0.0, 1.0]]), np.array([[5.0, 0.0]])], k=2)
    >>> [found.uids[slot] for slot in found.slots[0]]
    ['ffn.0.0', 'ffn.1.1']

    Args:
        directory: finds the announced experts.
        uid_prefix: of all uids.
        scores: for each dimension of the grid, of shape (rows, size of the dimension).
        k: experts a row.
        avoid: uids not to choose.
        kept: for each dimension the indices that may be chosen; ``None``: all.
    """
    rows = len(scores[0])
    prefixes = [uid_prefix]
    # Of each row's beams: the prefix, the score so far (-inf where there is none), the indices so far.
    beam_RK = np.zeros((rows, 1), dtype=np.int64)
    score_RK = np.zeros((rows, 1))
    coordinates_RKD = np.zeros((rows, 1, 0), dtype=np.int64)
    for dimension, grid_RG in enumerate(scores):
        size = grid_RG.shape[1]
        last = dimension == len(scores) - 1
        # Each avoided expert may rule out one prefix that is better than those of the experts to be found.
        width = k if last else k + len(avoid)
        known_PG = _known(directory, prefixes, size, avoid if last else ())
        if kept is not None:
            known_PG &= kept[dimension]
        candidate_RKG = np.where(known_PG[beam_RK], score_RK[:, :, None] + grid_RG[:, None, :], -np.inf)
        flat = candidate_RKG.reshape(rows, beam_RK.shape[1] * size)
        best = np.argsort(-flat, axis=1, kind="stable")[:, :width]
        score_RK = np.take_along_axis(flat, best, axis=1)
        parent, index = best // size, best % size
        there = np.isfinite(score_RK)
        index = np.where(there, index, 0)
        coordinates_RKD = np.concatenate(
            [np.take_along_axis(coordinates_RKD, parent[:, :, None], axis=1), index[:, :, None]], axis=2
        )
        keys = np.take_along_axis(beam_RK, parent, axis=1) * size + index
        distinct, inverse = np.unique(keys[there], return_inverse=True)
        prefixes = [f"{prefixes[key // size]}.{key % size}" for key in distinct.tolist()]
        beam_RK = np.zeros_like(keys)
        beam_RK[there] = inverse
        if not prefixes:
            break
    if not prefixes:
        shape = (rows, k)
        return Choices([], np.full(shape, -1), np.zeros((*shape, len(scores)), dtype=np.int64))
    return Choices(prefixes, np.where(np.isfinite(score_RK), beam_RK, -1), coordinates_RKD)


def _known(directory: DirectoryLike, prefixes: Sequence[str], size: int, avoid: Collection[str]) -> NDArray[np.bool_]:
    active = directory.active(prefixes)
    known = np.zeros((len(prefixes), size), dtype=np.bool_)
    for position, prefix in enumerate(prefixes):
        known[position, [index for index in active.get(prefix, ()) if index < size]] = True
    positions = {prefix: position for position, prefix in enumerate(prefixes)}
    for uid in avoid:
        prefix, _, last = uid.rpartition(".")
        if prefix in positions and int(last) < size:
            known[positions[prefix], int(last)] = False
    return known
