"""The programs of one call of a split model: its code between the modules, run for each size of the microbatches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from anabranch.errors import CaptureError
from anabranch.pipeline.links.packet_codec import InputKind, describe, described
from anabranch.pipeline.microbatch import gather, open_whole
from anabranch.pipeline.parts.part_program import PartProgram
from anabranch.pipeline.parts.tracing import Signature, signature_of
from anabranch.tensors import Structure, flatten, unflatten

_Inputs = tuple[tuple[Structure, ...], dict[str, Structure]]


class SplitCall:
    """One call's programs, numbered; the values that one part passes to the next begin with the number.

    They belong to this call alone: the next one runs the code again.
    """

    def __init__(self, trace: Callable[[Sequence[Signature]], list[PartProgram]]) -> None:
        self._trace = trace
        self._programs: dict[Signature, PartProgram] = {}

    def add(self, signatures: Sequence[Signature]) -> list[PartProgram]:
        """Run the code for inputs of these forms."""
        new = [one for one in dict.fromkeys(signatures) if one not in self._programs]
        self._programs.update(zip(new, self._trace(new), strict=True))
        return [self._programs[one] for one in signatures]

    def prepare(
        self,
        args: tuple[Structure, ...],
        kwargs: Mapping[str, Structure],
        sizes: Sequence[int],
        *,
        records: bool,
        tells: bool,
    ) -> list[InputKind]:
        """Run the code for microbatches of these sizes; return the data that other ranks need to do the same."""
        inputs = [_microbatch(args, kwargs, size, records) for size in dict.fromkeys(sizes)]
        programs = self.add([signature_of(*one) for one in inputs])
        if not tells:
            return []
        return [(program.digest(), *describe(one)) for program, one in zip(programs, inputs, strict=True)]

    def learn(self, kinds: Sequence[InputKind], rank: int) -> None:
        """Run the code as the first stage's rank has.

        Raises:
            CaptureError: it takes another way on this one, number ``rank``.
        """
        inputs = [cast(_Inputs, described(spec, shapes, needs_grad)) for _, spec, shapes, needs_grad in kinds]
        programs = self.add([signature_of(*one) for one in inputs])
        for (digest, *_), program in zip(kinds, programs, strict=True):
            if program.digest() != digest:
                raise CaptureError(
                    f"the code between the modules calls something else on rank {rank} than on the first stage's rank: "
                    "their models differ in a mode, or in a number or a function that the code reads; use the same on "
                    "all of them"
                )

    def check(self) -> None:
        """Run the code once more, for one size: whatever it reads, it reads for each.

        Raises:
            CaptureError: it takes another way now, because a module changed what the code reads.
        """
        signature, program = next(iter(self._programs.items()))
        place = program.place_of_difference(self._trace([signature])[0])
        if place is not None:
            raise CaptureError(
                f"while the parts ran, a module changed what the code between the modules reads ({place}), so that "
                "a microbatch would see another one's; return it from the module"
            )

    def start(self, signature: Signature) -> tuple[int, PartProgram]:
        """Return the number of the program for inputs of this form, and the program."""
        return list(self._programs).index(signature), self._programs[signature]

    def program(self, number: object) -> PartProgram:
        """Return the program that an earlier part ran."""
        return list(self._programs.values())[cast(int, number)]

    def join(self, values: Sequence[Structure], sizes: Sequence[int]) -> Structure:
        """Return the value of the last part from those of microbatches of ``sizes`` rows."""
        numbers = [value[0] for value in values]
        gather([self.program(number).constants() for number in numbers], sizes, lists=True)
        return (numbers[0], *gather([value[1:] for value in values], sizes, lists=True))

    def output(self, value: object) -> object:
        """Return the model's output from the value of the last part."""
        number, *tensors = cast("tuple[object, ...]", value)
        return self.program(number).output(tensors)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let the parts that this thread runs belong to this call."""
        _current.call, before = self, _current.call
        try:
            yield
        finally:
            _current.call = before


class _Current(threading.local):
    call: SplitCall | None = None


_current = _Current()


def current_call() -> SplitCall | None:
    """Return the call that this thread runs parts of."""
    return _current.call


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
