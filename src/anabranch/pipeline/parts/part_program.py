"""The code between a model's modules as a list of instructions, cut into parts.

::

    inputs ──> part 0 ──> (values) ──> part 1 ──> (values) ──> part 2 ──> outputs

One part passes to the next the values that it, or any later part, still needs: the hidden state, and whatever else
crosses the cut. They are kept in slots, numbered in the order of creation.

The programs belong to one call, which has one for each size of its microbatches; the next call runs the code again.
"""

from __future__ import annotations

import enum
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import msgspec
import torch
from optree import PyTreeSpec
from torch import Tensor, nn

from anabranch.autodiff.thread_modes import ThreadModes
from anabranch.errors import CaptureError
from anabranch.pipeline.microbatch import gather, open_whole
from anabranch.tensors import Structure, flatten, unflatten


class TensorForm(msgspec.Struct, frozen=True):  # not a dataclass, which would be a container in structures
    """The facts that code between modules may read of a tensor before it has values; ``stride`` of inputs only.

    The strides of a module's results are those of a run without memory: a kernel may choose others.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor, *, strided: bool = False) -> TensorForm:
        """Return the form of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.stride() if strided else None)


@dataclass(frozen=True, slots=True)
class Signature:
    """The containers of ``(args, kwargs)``, and in them forms of tensors and plain values."""

    tree: PyTreeSpec
    leaves: tuple[object, ...]


def signature_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Signature:
    """Return the form of these inputs.

    Raises:
        TypeError: a sparse tensor, which the code between the modules would take for a dense one.
    """
    leaves, tree = flatten((tuple(args), dict(kwargs)))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise TypeError(f"a {leaf.layout} tensor cannot be an input of a split model; make it dense")
    return Signature(tree, forms_of(leaves))


def forms_of(leaves: Iterable[object]) -> tuple[object, ...]:
    """Return the forms of tensors, strides too, and other leaves as they are."""
    return tuple(TensorForm.of(leaf, strided=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves)


@dataclass(frozen=True, slots=True)
class Slot:
    """A value of an input or an earlier instruction."""

    index: int
    form: TensorForm


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or a buffer of the model: the module's name and the attribute's."""

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
    tree: PyTreeSpec
    leaves: tuple[object, ...]
    out_tree: PyTreeSpec
    out_leaves: tuple[object, ...]
    modes: ThreadModes | None
    place: str

    def __str__(self) -> str:
        called = f"{_shown([self.target])}{self.tree}{_shown(self.leaves)}"
        return f"{_shown(self.out_leaves)} = {called} {self.out_tree} {self.modes}"


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def is_plain(value: object) -> bool:
    """Return True for values that are compared by value."""
    return isinstance(value, _PLAIN)


def _shown(leaves: Sequence[object]) -> str:
    """Return a string that is the same in every process."""
    return ", ".join(map(_shown_one, leaves))


_AS_TEXT = (range, slice, Slot, HeldTensor, torch.Size, torch.dtype, torch.layout, torch.memory_format)


def _shown_one(leaf: object) -> str:
    if is_plain(leaf):
        return repr(leaf)
    if isinstance(leaf, enum.Enum):  # its class may print its members in another way
        return f"{type(leaf).__qualname__}.{leaf.name}"
    if isinstance(leaf, _AS_TEXT):
        return str(leaf)
    of = getattr(getattr(leaf, "__self__", None), "__name__", "")  # x.T and x.mT are both called __get__
    name = getattr(leaf, "__qualname__", None) or getattr(leaf, "__name__", type(leaf).__name__)
    line = getattr(getattr(leaf, "__code__", None), "co_firstlineno", "")  # every lambda has the same name
    cells = [cell.cell_contents for cell in getattr(leaf, "__closure__", None) or ()]
    constants = [one for one in (*cells, *(getattr(leaf, "__defaults__", None) or ())) if is_plain(one)]
    return f"{of} {name} {line} {constants or ''}"


@dataclass(slots=True)
class PartProgram:
    """A model's forward for inputs of one form.

    Attributes:
        inputs: the slots of the tensors in the inputs.
        parts: the instructions of each part.
        carried: for each part except the last the slots passed to the next.
        out_tree: the containers of the model's output.
        out_leaves: what is in them: ``Slot``, ``HeldTensor`` or a constant.
        device: where it was traced; a part on another device uses its own instead.
        loose: tensors that belong to no module, which its code reads, and their versions, by their ids.
    """

    inputs: tuple[Slot, ...]
    parts: tuple[tuple[Instruction, ...], ...]
    out_tree: PyTreeSpec
    out_leaves: tuple[object, ...]
    device: torch.device
    loose: dict[int, tuple[Tensor, int]]
    carried: tuple[tuple[Slot, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        needed = {leaf for leaf in self.out_leaves if isinstance(leaf, Slot)}
        carried: list[tuple[Slot, ...]] = []
        for instructions in reversed(self.parts):
            for instruction in reversed(instructions):
                needed -= {leaf for leaf in instruction.out_leaves if isinstance(leaf, Slot)}
                needed |= {leaf for leaf in instruction.leaves if isinstance(leaf, Slot)}
            carried.append(tuple(sorted(needed, key=lambda slot: slot.index)))
        self.carried = tuple(reversed(carried[:-1]))

    def _steps(self) -> list[tuple[str, list[tuple[int, int]], str]]:
        """Return of each instruction, and of the output, a string that is the same in every process, the ids and
        versions of the loose tensors that it reads, and its place.
        """
        code = [(f"{n} {one}", one.leaves, one.place) for n, part in enumerate(self.parts) for one in part]
        code.append((f"{self.out_tree}{_shown(self.out_leaves)}", self.out_leaves, "the model's output"))
        loose = self.loose
        return [
            (text, [(id(leaf), loose[id(leaf)][1]) for leaf in leaves if isinstance(leaf, Tensor)], place)
            for text, leaves, place in code
        ]

    def uses(self) -> dict[str | HeldTensor, list[int]]:
        """Return for each module called, and each parameter and buffer read, the parts that do."""
        uses: dict[str | HeldTensor, list[int]] = {}
        for part, instructions in enumerate(self.parts):
            output = self.out_leaves if part == len(self.parts) - 1 else ()
            modules = [one.target for one in instructions if isinstance(one.target, str)]
            leaves = [leaf for one in instructions for leaf in one.leaves]
            tensors = [leaf for leaf in (*leaves, *output) if isinstance(leaf, HeldTensor)]
            names: list[str | HeldTensor] = [*modules, *tensors]
            for name in dict.fromkeys(names):
                uses.setdefault(name, []).append(part)
        return uses

    def digest(self) -> str:
        """Return a short string that differs for another program."""
        text = "\n".join(line for line, _, _ in self._steps())
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def place_of_difference(self, other: PartProgram) -> str | None:
        """Return the line of the model's code at which ``other`` takes another way or reads another loose tensor."""
        pairs = zip(self._steps(), other._steps(), strict=False)  # the last one is the output, like no other
        return next((mine[2] for mine, its in pairs if mine[:2] != its[:2]), None)

    def run(
        self, part: int, values: Sequence[object], model: nn.Module, held: Callable[[HeldTensor], object]
    ) -> tuple[object, ...]:
        """Run one part on its values; return those for the next, or the tensors of the output."""
        last = part == len(self.parts) - 1
        here = next((value.device for value in values if isinstance(value, Tensor)), self.device)
        slots = dict(zip(self.carried[part - 1] if part else self.inputs, values, strict=True))

        def look_up(leaf: object) -> object:
            if isinstance(leaf, Slot):
                return slots[leaf]
            if isinstance(leaf, HeldTensor):
                return held(leaf)
            return here if isinstance(leaf, torch.device) and leaf == self.device else leaf

        for instruction in self.parts[part]:
            args, kwargs = unflatten(instruction.tree, [look_up(leaf) for leaf in instruction.leaves])
            target = instruction.target
            call = model.get_submodule(target) if isinstance(target, str) else target
            with nullcontext() if instruction.modes is None else instruction.modes.entered():
                _keep(instruction, call(*args, **kwargs), slots)
        if last:
            return tuple(look_up(leaf) for leaf in self.out_leaves if isinstance(leaf, Slot | HeldTensor))
        return tuple(slots[slot] for slot in self.carried[part])

    def constants(self) -> list[object]:
        """Return the containers of the model's output, and its values that are no tensors, to be compared."""
        leaves = ["a tensor" if isinstance(leaf, Slot | HeldTensor) else leaf for leaf in self.out_leaves]
        return [str(self.out_tree), *leaves]

    def output(self, values: Sequence[object]) -> object:
        """Return the model's output from the values of the last part."""
        tensors = iter(values)
        leaves = [next(tensors) if isinstance(leaf, Slot | HeldTensor) else leaf for leaf in self.out_leaves]
        return unflatten(self.out_tree, leaves)


def _keep(instruction: Instruction, result: object, slots: dict[Slot, object]) -> None:
    leaves, tree = flatten(result)
    by_module = isinstance(instruction.target, str)
    pairs = list(zip(instruction.out_leaves, leaves, strict=False))
    if tree != instruction.out_tree or not all(_fits(*pair, whole=by_module) for pair in pairs):
        what = repr(instruction.target) if by_module else str(instruction.target)
        raise CaptureError(
            f"{what} returned a different form of result than when the code around it ran ({instruction.place}); call "
            "again if its code was replaced, else return the same containers, shapes and dtypes for all values of "
            "tensors, or give the code of the parts as glue="
        )
    slots.update((leaf, value) for leaf, value in pairs if isinstance(leaf, Slot))


def _fits(expected: object, result: object, whole: bool) -> bool:
    if isinstance(expected, Slot):
        return isinstance(result, Tensor) and (not whole or TensorForm.of(result) == expected.form)
    return not isinstance(result, Tensor) and (not is_plain(expected) or expected == result)


class SplitCall:
    """One call's programs, by the rows of the microbatches that they are for."""

    def __init__(self, trace: Callable[[Sequence[Signature]], list[PartProgram]]) -> None:
        self._trace = trace
        self._programs: dict[int, PartProgram] = {}
        self._signatures: list[Signature] = []

    def add(self, forms: Mapping[int, Signature]) -> list[PartProgram]:
        """Run the code for inputs of these forms, by the rows of the microbatches that have them."""
        self._signatures = list(forms.values())
        programs = self._trace(self._signatures)
        self._programs = dict(zip(forms, programs, strict=True))
        return programs

    def prepare(
        self, inputs: Structure, sizes: Sequence[int], *, records: bool, tells: bool
    ) -> list[tuple[str, Structure]]:
        """Run the code for microbatches of these sizes; return the data that other ranks need to do the same."""
        opened, whole = open_whole(inputs)
        signature = signature_of(*cast("tuple[tuple[object, ...], dict[str, object]]", opened))
        forms: dict[int, Signature] = {}
        for size in sizes:
            leaves = list(signature.leaves)
            for index, (leaf, is_whole) in enumerate(zip(signature.leaves, whole, strict=True)):
                if isinstance(leaf, TensorForm):
                    shape = leaf.shape if is_whole else (size, *leaf.shape[1:])
                    leaves[index] = TensorForm(shape, leaf.dtype, leaf.requires_grad and records, leaf.stride)
            forms[size] = Signature(signature.tree, tuple(leaves))
        pairs = zip(self.add(forms), self._signatures, strict=True)
        return [(program.digest(), unflatten(form.tree, form.leaves)) for program, form in pairs] if tells else []

    def learn(self, kinds: Sequence[tuple[str, Structure]], sizes: Sequence[int], rank: int) -> None:
        """Run the code as the first stage's rank has.

        Raises:
            CaptureError: it takes another way on this one, number ``rank``.
        """
        inputs = [flatten(structure) for _, structure in kinds]
        forms = [Signature(tree, tuple(leaves)) for leaves, tree in inputs]
        programs = self.add(dict(zip(dict.fromkeys(sizes), forms, strict=True)))
        for (digest, _), program in zip(kinds, programs, strict=True):
            if program.digest() != digest:
                raise CaptureError(
                    f"the code between the modules calls something else on rank {rank} than on the first stage's rank: "
                    "their models differ in a mode, a number or a function that it reads; use the same on all of them"
                )

    def check(self) -> None:
        """Run the code once more, for each size of microbatch.

        Raises:
            CaptureError: it takes another way now, because a module changed what the code reads.
        """
        for program, after in zip(self._programs.values(), self._trace(self._signatures), strict=True):
            if (place := program.place_of_difference(after)) is not None:
                raise CaptureError(
                    f"while the parts ran, a module changed what the code between the modules reads ({place}): a "
                    "microbatch would see another one's; return it from the module, or give the code as glue="
                )

    def join(self, values: Sequence[Structure], sizes: Sequence[int]) -> Structure:
        """Return the model's output from the values of the last part for microbatches of ``sizes`` rows."""
        programs = [self._programs[size] for size in sizes]
        gather([program.constants() for program in programs], sizes, lists=True)
        return programs[0].output(cast("tuple[object, ...]", gather(values, sizes, lists=True)))

    @contextmanager
    def current(self, size: int) -> Iterator[None]:
        """Let the parts that this thread runs be those for a microbatch of this size."""
        _current.program, before = self._programs[size], _current.program
        try:
            yield
        finally:
            _current.program = before


class _Current(threading.local):
    program: PartProgram | None = None


_current = _Current()


def current_program() -> PartProgram | None:
    """Return the program that this thread runs parts of."""
    return _current.program
