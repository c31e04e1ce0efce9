"""``PipeRanks``: an Executor's operations on all ranks of a pipe, beside a module's calls and steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anabranch.pipeline.pipe import Pipe
from anabranch.pipeline.pipe_call import Args, MakeHead, Named, deliver
from anabranch.tensors import Structure
from anabranch.tensors.dtypes import dtype_name, dtype_named


class PipeRanks:
    """The ranks of ``pipe``."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def step(
        self, args: Args, inputs: Named, target: Structure, *, head: MakeHead, rows: int, word: object
    ) -> tuple[Tensor, list[object]]:
        """``Pipe.step`` for coordinated callers: every rank gets the loss, on the device of its last stage, and the
        ``word`` of each, in the order of ranks.

        Args:
            args: positional inputs, as for ``Pipe.step``.
            inputs: keyword inputs, as for ``Pipe.step``.
            target: as for ``Pipe.step``.
            head: ``make_head`` with the loss.
            rows: the number of rows that this rank's caller expects.
            word: a plain value for the others' callers.

        Raises:
            ValueError: as for ``Pipe.step``, or ranks that disagree in rows.
            BaseException: as for ``Pipe.step``.
        """
        with self._pipe._turn("step"):
            call = self._pipe._call(args, inputs, target, head, rows)
            _, grads = call.step()
            mine = call.loss()
            note = [None if mine is None else [mine.item(), dtype_name(mine.dtype)], word]
            notes = self._pipe._engine.share("note", note)
        if call.plan.records:
            deliver(call.leaves, grads)  # may take turns of its own: the inputs may be results of the pipe
        if mine is None:
            number, dtype = next(note[0] for note in notes if note[0] is not None)
            mine = torch.tensor(number, dtype=dtype_named(dtype), device=self._pipe.devices[-1])
        return mine, [note[1] for note in notes]

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all stages' gradients, as of one vector, the same on every rank; every rank calls it."""
        return self._pipe._grad_norm(norm_type)

    def first_names(self) -> Mapping[Tensor, str]:
        """Return this process's parameters and their names in the unsplit module; a tied one has its first name
        there.
        """
        return self._pipe._first_names()

    @property
    def is_traced(self) -> bool:
        """True if its stages run code that was traced from a model: parameters must be tensors with values here."""
        return self._pipe._source is not None

    def tied(self) -> frozenset[Tensor]:
        """Return this process's parameters that stages on other ranks use too."""
        return frozenset(parameter for _, parameter, _ in self._pipe._ties)

    def align_ties(self) -> None:
        """Give a parameter shared by several ranks the gradient of the first of them; all ranks call it."""
        with self._pipe._engine.turn("align_ties", self._pipe.calls) as turn:
            for index, parameter, ranks in self._pipe._ties:
                parameter.grad = turn.share(index, parameter.grad, ranks)[0]
