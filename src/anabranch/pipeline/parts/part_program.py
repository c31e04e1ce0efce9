"""The code between a model's modules as a list of instructions, cut into parts.

::

    inputs ──> part 0 ──> (values) ──> part 1 ──> (values) ──> part 2 ──> outputs

One part passes to the next the values that it, or any later part, still needs: the hidden state, and whatever else
crosses the cut. They are kept in slots, numbered in the order of creation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from anabranch.autodiff.thread_modes import ThreadModes
from anabranch.errors import CaptureError
from anabranch.pipeline.parts.trees import Tree, build, take_apart

__all__ = ["HeldTensor", "Instruction", "PartProgram", "Slot", "is_plain"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A value of an input or an earlier instruction."""

    index: int


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter, a buffer or another tensor of the model: the module's name and the attribute's."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call: of a module of the model, named, or of a function.

    Attributes:
        target: the module's name or the function.
        tree: the containers of its arguments.
        leaves: the arguments in them: ``Slot``, ``HeldTensor`` or a constant.
        out_tree: the containers of its result.
        out_leaves: the results in them: a ``Slot``, or the constant that it must be again.
        modes: the thread's modes, where they differ from those that the model was called in.
        place: the line of the model's code.
    """

    target: str | Callable[..., object]
    tree: Tree | None
    leaves: tuple[object, ...]
    out_tree: Tree | None
    out_leaves: tuple[object, ...]
    modes: ThreadModes | None
    place: str

    def __str__(self) -> str:
        name = self.target if isinstance(self.target, str) else getattr(self.target, "__qualname__", "function")
        return f"{_shown(self.out_leaves)} = {name}{_shown(self.leaves)}"


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def is_plain(value: object) -> bool:
    """Return True for values that are compared by value."""
    return isinstance(value, _PLAIN)


def _shown(leaves: Sequence[object]) -> str:
    """Return a string that is the same in every process."""
    return str(
        [leaf if is_plain(leaf) or isinstance(leaf, Slot | HeldTensor) else type(leaf).__name__ for leaf in leaves]
    )


@dataclass(slots=True)
class PartProgram:
    """A model's forward for inputs of one kind.

    Attributes:
        key: of the kind of inputs.
        inputs: the slots of the tensors in the inputs.
        parts: the instructions of each part.
        carried: for each part except the last the slots passed to the next.
        out_tree: the containers of the model's output.
        out_leaves: what is in them: ``Slot``, ``HeldTensor`` or a constant.
        device: where it was traced; a part on another device uses its own instead.
    """

    key: str
    inputs: tuple[int, ...]
    parts: tuple[tuple[Instruction, ...], ...]
    out_tree: Tree | None
    out_leaves: tuple[object, ...]
    device: torch.device
    carried: tuple[tuple[int, ...], ...] = field(init=False)
    token: str = field(init=False)

    def __post_init__(self) -> None:
        needed = {leaf.index for leaf in self.out_leaves if isinstance(leaf, Slot)}
        carried: list[tuple[int, ...]] = []
        for instructions in reversed(self.parts):
            for instruction in reversed(instructions):
                needed -= {leaf.index for leaf in instruction.out_leaves if isinstance(leaf, Slot)}
                needed |= {leaf.index for leaf in instruction.leaves if isinstance(leaf, Slot)}
            carried.append(tuple(sorted(needed)))
        self.carried = tuple(reversed(carried[:-1]))
        text = "\n".join(str(instruction) for part in self.parts for instruction in part)
        digest = hashlib.blake2b(f"{self.carried}{_shown(self.out_leaves)}{text}".encode(), digest_size=8).hexdigest()
        self.token = f"{self.key}:{digest}"

    def run(
        self,
        part: int,
        values: Sequence[object],
        modules: Mapping[str, Callable[..., object]],
        held: Callable[[HeldTensor], object],
    ) -> tuple[object, ...]:
        """Run one part on its values; return those for the next, or the tensors of the output."""
        last = part == len(self.parts) - 1
        here = next((value.device for value in values if isinstance(value, Tensor)), self.device)
        slots = dict(zip(self.carried[part - 1] if part else self.inputs, values, strict=True))

        def look_up(leaf: object) -> object:
            if isinstance(leaf, Slot):
                return slots[leaf.index]
            if isinstance(leaf, HeldTensor):
                return held(leaf)
            return here if isinstance(leaf, torch.device) and leaf == self.device else leaf

        for instruction in self.parts[part]:
            given = build(instruction.tree, iter([look_up(leaf) for leaf in instruction.leaves]))
            args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", given)
            target = modules[instruction.target] if isinstance(instruction.target, str) else instruction.target
            with nullcontext() if instruction.modes is None else instruction.modes.entered():
                _keep(instruction, target(*args, **kwargs), slots)
        if last:
            return tuple(look_up(leaf) for leaf in self.out_leaves if isinstance(leaf, Slot | HeldTensor))
        return tuple(slots[index] for index in self.carried[part])

    def constants(self) -> list[object]:
        """Return the containers of the model's output, and its values that are no tensors, to be compared."""
        return [
            str(self.out_tree),
            *("a tensor" if isinstance(leaf, Slot | HeldTensor) else leaf for leaf in self.out_leaves),
        ]

    def output(self, values: Sequence[object]) -> object:
        """Return the model's output from the values of the last part."""
        given = iter(values)
        leaves = [next(given) if isinstance(leaf, Slot | HeldTensor) else leaf for leaf in self.out_leaves]
        return build(self.out_tree, iter(leaves))


def _keep(instruction: Instruction, result: object, slots: dict[int, object]) -> None:
    if isinstance(result, Tensor) and instruction.out_tree is None:
        found: list[object] = [result]
        tree = None
    else:
        found = []
        tree = take_apart(result, found)
    if tree != instruction.out_tree or not all(map(_fits, instruction.out_leaves, found)):
        what = repr(instruction.target) if isinstance(instruction.target, str) else str(instruction.target)
        raise CaptureError(
            f"{what} returned a different result than when the model was traced ({instruction.place}); return the same "
            "structure and numbers for all tensor values, or do not cut around it"
        )
    for leaf, value in zip(instruction.out_leaves, found, strict=True):
        if isinstance(leaf, Slot):
            slots[leaf.index] = value


def _fits(expected: object, found: object) -> bool:
    if isinstance(expected, Slot):
        return isinstance(found, Tensor)
    return not isinstance(found, Tensor) and (not is_plain(expected) or expected == found)
