"""The kinds of inputs of a call's microbatches, sent to all ranks, so that each creates the same programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from anabranch.pipeline.links.packet_codec import InputKind, describe, described
from anabranch.pipeline.microbatch import open_whole
from anabranch.pipeline.parts.signature import signature_of
from anabranch.pipeline.parts.split import SplitSource
from anabranch.tensors import Structure, flatten, unflatten

__all__ = ["learn", "prepare"]

_Inputs = tuple[tuple[Structure, ...], dict[str, Structure]]


def prepare(
    source: SplitSource,
    args: tuple[Structure, ...],
    kwargs: Mapping[str, Structure],
    sizes: Sequence[int],
    *,
    records: bool,
    tells: bool,
) -> list[InputKind]:
    """Create the programs for microbatches of these sizes; return the data that other ranks need to do the same."""
    kinds: list[InputKind] = []
    for size in dict.fromkeys(sizes):
        inputs = _microbatch(args, kwargs, size, records)
        signature = signature_of(*inputs)
        program = source.pinned[signature] = source.prepare(signature)
        if tells:
            kinds.append((program.key, *describe(inputs)))
    return kinds


def learn(source: SplitSource, kinds: Sequence[InputKind]) -> None:
    """Create the programs that the first stage's rank has created."""
    for key, spec, shapes, needs_grad in kinds:
        args, kwargs = cast(_Inputs, described(spec, shapes, needs_grad))
        source.prepare(signature_of(args, kwargs), key)


def _microbatch(args: tuple[Structure, ...], kwargs: Mapping[str, Structure], size: int, records: bool) -> _Inputs:
    """Return meta inputs like those of a microbatch of ``size`` rows."""
    opened, whole = open_whole((args, dict(kwargs)))
    leaves, treedef = flatten(opened)
    for index, (leaf, is_whole) in enumerate(zip(leaves, whole, strict=True)):
        if isinstance(leaf, Tensor):
            shape = leaf.shape if is_whole else (size, *leaf.shape[1:])
            needs_grad = leaf.requires_grad and records
            leaves[index] = torch.empty(shape, dtype=leaf.dtype, device="meta", requires_grad=needs_grad)
    return cast(_Inputs, unflatten(treedef, leaves))
