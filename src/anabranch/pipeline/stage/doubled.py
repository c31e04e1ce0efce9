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

from torch import Tensor

from anabranch.pipeline.stage.overlaps import sharing_pairs
from anabranch.pipeline.stage.packet import Packet
from anabranch.tensors import Structure, flatten

__all__ = ["Watch", "mark_doubled"]


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


class Watch:
    """The tensors that one stage must not change, for one microbatch."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, Tensor, int]] = []

    def over(self, what: str, value: Structure, packet: Packet) -> None:
        """Watches the leaves of ``value`` that are marked in ``packet``; the stage made ``value`` of it."""
        if packet.doubled:
            leaves = flatten(value)[0]
            tensors = [leaves[index] for index in packet.doubled]
            self._watched += [(what, t, t._version) for t in tensors if isinstance(t, Tensor) and not t.is_inference()]

    def tensors(self) -> list[Tensor]:
        """Return the watched tensors."""
        return [tensor for _, tensor, _ in self._watched]

    def check(self, stage: int) -> None:
        """Raise ``RuntimeError`` if one of them has been changed."""
        for what, tensor, version in self._watched:
            if tensor._version != version:
                raise RuntimeError(
                    f"stage {stage} changes {what} in place, which is also sent to another stage or microbatch: the "
                    "unsplit module changes both, but a split one cannot; make the operation out of place, or stash a "
                    "clone"
                )
