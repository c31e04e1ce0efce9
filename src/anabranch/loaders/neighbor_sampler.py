"""``NeighborSampler``: batches of nodes with sampled neighbours, and theirs, from a graph in memory.

A node's sampled neighbours depend only on the node, the hop, the batch's number and the seed: not on the other nodes of
the batch, nor on the worker. So workers that each take a part of a batch's seeds together give the results of one.

W. Hamilton, R. Ying, J. Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import CheckpointError

__all__ = ["NeighborSampler", "SampledNodes"]

_Ints = NDArray[np.int64]
_Bits = NDArray[np.uint64]


class SampledNodes(NamedTuple):
    """A batch of a ``NeighborSampler``; everything is int64.

    Attributes:
        seeds: global ids, ``(S,)``.
        nodes: global ids of all nodes of the batch, each once, ``(V,)``: the seeds, then their sampled neighbours, then
            the neighbours of all these.
        blocks: ``(indptr, indices)`` for each fanout, in places of ``nodes``: the k-th of the nodes that were there
            before this hop shows ``indices[indptr[k] : indptr[k + 1]]``. The first block leads into the seeds.
    """

    seeds: Tensor
    nodes: Tensor
    blocks: tuple[tuple[Tensor, Tensor], ...]


class NeighborSampler:
    """Batches of seeds with sampled surroundings; an iterable of one epoch, another order each time.

    >>> indptr, indices = [0, 2, 4, 6, 8], [1, 3, 0, 2, 1, 3, 2, 0]
    >>> ring = NeighborSampler(indptr, indices, fanouts=[1, -1], batch_size=2)
    >>> batch = next(iter(ring))
    >>> len(batch.seeds), bool((batch.nodes[:2] == batch.seeds).all()), len(batch.blocks)
    (2, True, 2)
    >>> indptr, indices = batch.blocks[0]
    >>> indptr.tolist(), len(ring)
    ([0, 1, 2], 2)

    A layer takes the mean over a block's neighbours so, the last block first::

        for layer, (indptr, indices) in zip(layers, reversed(batch.blocks)):
            shown = torch.segment_reduce(hidden[indices], "mean", offsets=indptr, initial=0)
            hidden = layer(hidden[: len(indptr) - 1], shown)

    Nodes come as ids: their features are rows of an ``nn.Embedding``, of a ``RemoteEmbedding`` or of any tensor. As the
    sizes of a batch differ, a ``TrainStep`` takes ``rows=lambda batch: len(batch.seeds)``. ``state_dict`` is the
    position, with which an ``Executor`` resumes exactly.

    Args:
        indptr: the graph in compressed sparse rows: node v leads to ``indices[indptr[v] : indptr[v + 1]]``.
        indices: the neighbours, ids of nodes.
        fanouts: how many neighbours are sampled at each hop, without replacement; all of a node that has fewer; -1
            takes all.
        batch_size: seeds a batch, over all workers; the last of an epoch may have fewer.
        seeds: the nodes to begin from, each once; by default all.
        seed: of the order and the samples; the same one gives the same batches.
        rank: this worker's part of each batch.
        world_size: the number of workers that share the batches.

    Raises:
        ValueError, TypeError: what is not a graph, or an argument out of range; names it.
    """

    def __init__(
        self,
        indptr: Any,
        indices: Any,
        fanouts: Sequence[int],
        batch_size: int,
        seeds: Any = None,
        seed: int = 0,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._indptr, self._indices = _ints("indptr", indptr), _ints("indices", indices)
        _check_graph(self._indptr, self._indices)
        nodes = len(self._indptr) - 1
        self._seeds = np.arange(nodes) if seeds is None else _ints("seeds", seeds)
        _check_inside("seeds", self._seeds, nodes)
        if len(np.unique(self._seeds)) != len(self._seeds):
            raise ValueError("seeds contains a node twice; give each once")
        hops = _ints("fanouts", fanouts)
        if not ((hops > 0) | (hops == -1)).all():
            raise ValueError(f"fanouts are numbers of neighbours, each at least 1, or -1 for all, got {fanouts!r}")
        if not len(hops):
            raise ValueError("fanouts is empty; give the number of neighbours of each hop")
        self._batch_size, self._seed = _whole("batch_size", batch_size), _whole("seed", seed)
        if self._batch_size < 1:
            raise ValueError(f"batch_size is a number of seeds, at least 1, got {batch_size!r}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is from 0 to below world_size={world_size}, got {rank!r}")
        self._fanouts: list[int] = hops.tolist()
        self._rank, self._world_size = rank, world_size
        self._batches = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-len(self._seeds) // self._batch_size)

    def __iter__(self) -> Iterator[SampledNodes]:
        """Sample the rest of this epoch, or another epoch."""
        if not len(self):
            return
        epoch, first = divmod(self._batches, len(self))
        order = np.random.default_rng([self._seed % 2**64, epoch]).permutation(self._seeds)
        for number in range(first, len(self)):
            seeds = order[number * self._batch_size : (number + 1) * self._batch_size]
            self._batches += 1
            yield self.sample(np.array_split(seeds, self._world_size)[self._rank], key=self._batches)

    def sample(self, seeds: Any, *, key: int = 0) -> SampledNodes:
        """Return the surroundings of some nodes; the same ``key`` gives the same neighbours.

        Args:
            seeds: ids of nodes, each once.
            key: any whole number.
        """
        begun = _ints("seeds", seeds)
        _check_inside("seeds", begun, len(self._indptr) - 1)
        nodes, blocks = begun, []
        for hop, fanout in enumerate(self._fanouts):
            counts, found = self._neighbours(nodes, fanout, _mixed(np.uint64(key % 2**64), self._seed, hop))
            known = nodes
            nodes = np.concatenate([known, np.setdiff1d(found, known)])
            indptr = np.concatenate([[0], np.cumsum(counts)])
            blocks.append((torch.from_numpy(indptr), torch.from_numpy(_places(nodes, found))))
        return SampledNodes(torch.from_numpy(begun), torch.from_numpy(nodes), tuple(blocks))

    def _neighbours(self, nodes: _Ints, fanout: int, key: np.uint64) -> tuple[_Ints, _Ints]:
        """Return how many neighbours each node shows, and which, one node's after another's."""
        first = self._indptr[nodes]
        degrees = self._indptr[nodes + 1] - first
        counts = degrees if fanout == -1 else np.minimum(degrees, fanout)
        starts = np.cumsum(counts) - counts
        slots = np.arange(int(counts.sum())) - np.repeat(starts, counts)
        chosen = slots + np.repeat(first, counts)
        many = np.flatnonzero(degrees > counts)
        if len(many):
            where = starts[many][:, None] + np.arange(fanout)
            chosen[where] = first[many][:, None] + _subsets(degrees[many], fanout, nodes[many], key)
        return counts, self._indices[chosen]

    def state_dict(self) -> dict[str, int]:
        """Return the position: the batches taken over all epochs."""
        return {"batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position."""
        if not isinstance(state.get("batches"), int):
            raise CheckpointError(f"a NeighborSampler's state has a number of 'batches', got {state!r}")
        self._batches = state["batches"]


def _subsets(sizes: _Ints, count: int, nodes: _Ints, key: np.uint64) -> _Ints:
    """Return ``count`` different numbers below each of ``sizes``, every such set with the same chance.

    R. Floyd's algorithm, for all rows at once. J. Bentley, R. Floyd, "A Sample of Brilliance", 1987.
    """
    found = np.empty((len(sizes), count), np.int64)
    for k in range(count):
        top = sizes - count + k
        drawn = (_hashed(nodes.astype(np.uint64), key + np.uint64(k)) % (top + 1).astype(np.uint64)).astype(np.int64)
        taken = (found[:, :k] == drawn[:, None]).any(1)
        found[:, k] = np.where(taken, top, drawn)
    return found


def _hashed(values: _Bits, key: np.uint64) -> _Bits:
    """Return 64 bits for each value and a key (the finisher of SplitMix64, twice)."""
    with np.errstate(over="ignore"):
        return _scrambled(_scrambled(values) ^ (key * np.uint64(0x9E3779B97F4A7C15)))


def _scrambled(bits: _Bits) -> _Bits:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _mixed(*numbers: Any) -> np.uint64:
    mixed = np.zeros(1, np.uint64)
    for number in numbers:
        mixed = _hashed(mixed + np.uint64(int(number) % 2**64), np.uint64(1))
    return np.uint64(mixed[0])


def _places(nodes: _Ints, wanted: _Ints) -> _Ints:
    """Return the place of each of ``wanted`` among distinct ``nodes``."""
    order = np.argsort(nodes)
    return order[np.searchsorted(nodes[order], wanted)]


def _whole(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a whole number, got {value!r}") from None


def _ints(name: str, values: Any) -> _Ints:
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"{name} is a list of whole numbers, got an array of {array.dtype} with shape {array.shape}")
    return array.astype(np.int64)


def _check_graph(indptr: _Ints, indices: _Ints) -> None:
    if not len(indptr) or indptr[0] != 0 or (np.diff(indptr) < 0).any() or indptr[-1] != len(indices):
        raise ValueError(
            f"indptr begins with 0, never falls and ends with the number of indices, {len(indices)}; got "
            f"{indptr[:3].tolist()} ... {indptr[-1:].tolist()}"
        )
    _check_inside("indices", indices, len(indptr) - 1)


def _check_inside(name: str, ids: _Ints, nodes: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < nodes:
        raise ValueError(f"{name} are ids of {nodes} nodes, 0 to {nodes - 1}; got {ids.min()} to {ids.max()}")
