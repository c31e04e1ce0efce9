"""Tensors that leave a stage by two routes: no stage that receives one may change it in place.

::

    stage 0   x ── stash "long" ───────────────────────> stage 2   pops x, or x changed by stage 1?
              └───────────────> stage 1   relu_(x) ────>

In the unsplit module a change in place reaches both routes, and so do gradients. A stage's graph knows only one route,
and on another rank the two are not even the same memory. So the sending stage marks these tensors, views of one another
too, the marks are kept when a stage passes one on, and a stage that changes one gets an error. The same holds for what
every microbatch gets whole: a layer would change it for the microbatches after this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from anabranch.pipeline.stage.packet import Packet


def mark_doubled(outputs: Mapping[int, Sequence[Packet]], known: Sequence[Tensor]) -> dict[int, list[Packet]]:
    """Return the packets for each target, tensors marked that share memory with another of them or with a ``known``
    one.
    """
    leaves = [leaf for packets in outputs.values() for packet in packets for leaf in packet.leaves]
    doubled = {place for pair in sharing_pairs([*leaves, *known]) for place in pair if place < len(leaves)}
    if not doubled:
        return {target: list(packets) for target, packets in outputs.items()}
    places = iter(range(len(leaves)))
    return {target: [_marked(packet, doubled, places) for packet in packets] for target, packets in outputs.items()}


def _marked(packet: Packet, doubled: Collection[int], places: Iterator[int]) -> Packet:
    where = [index for index, place in zip(range(len(packet.leaves)), places, strict=False) if place in doubled]
    return dataclasses.replace(packet, doubled=tuple(where))


Watched: TypeAlias = tuple[str, Tensor, int]
"""A tensor that a stage must not change, by the name it has in errors, and its version."""


def check_unchanged(watched: Sequence[Watched], stage: int) -> None:
    """Raise ``RuntimeError`` if one of them has been changed."""
    for what, tensor, version in watched:
        if tensor._version != version:
            raise RuntimeError(
                f"stage {stage} changes {what} in place, which is also sent to another stage or microbatch: the "
                "unsplit module changes both, but a split one cannot; make the operation out of place, or stash a "
                "clone"
            )


_MOST_WORK = 10_000
"""Steps in which NumPy may look for an element that two tensors share; without an answer they count as sharing."""


def sharing_pairs(leaves: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Return the places, the lower one first, of every two dense tensors in ``leaves`` that share memory.

    Views of one tensor do, unless their elements lie beside each other: the halves of ``x.chunk(2, dim=1)`` interleave
    without sharing an element, so their ranges of addresses do not decide.

    >>> x = torch.zeros(4, 6)
    >>> list(sharing_pairs([*x.chunk(2, dim=1), "text", x[:, 2:]]))
    [(0, 3), (1, 3)]
    """
    if len(leaves) < 2:
        return
    ranges = [(*found, place) for place, leaf in enumerate(leaves) if (found := _range(leaf)) is not None]
    reaching: list[tuple[int, int]] = []
    for start, end, place in sorted(ranges):
        reaching = [(until, other) for until, other in reaching if until > start]
        for _, other in reaching:
            if _share(leaves[place], leaves[other]):
                yield min(place, other), max(place, other)
        reaching.append((end, place))


def _range(leaf: object) -> tuple[int, int] | None:
    """Return the addresses of its first element and after its last; ``None`` for a leaf without such memory."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return None
    shape, start = leaf.shape, leaf.data_ptr()
    if not start or 0 in shape:
        return None
    last = sum((size - 1) * stride for size, stride in zip(shape, leaf.stride(), strict=True))
    return start, start + (last + 1) * leaf.itemsize


def _share(one: object, other: object) -> bool:
    try:
        return np.shares_memory(
            np.asarray(_Layout(one)),
            np.asarray(_Layout(other)),
            max_work=_MOST_WORK,  # type: ignore[arg-type] # NumPy's types name only its two special values
        )
    except np.exceptions.TooHardError:
        return True


class _Layout:
    """The places of a tensor's elements, for NumPy, which does not read them: they may be on any device."""

    def __init__(self, tensor: object) -> None:
        assert isinstance(tensor, Tensor)
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
        }
