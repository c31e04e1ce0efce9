"""``PipeRanks``: an Executor's operations on all ranks of a pipe, beside a module's calls and steps."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from anabranch.pipeline.description import StageCosts, costs_of
from anabranch.pipeline.microbatch import microbatch_sizes
from anabranch.pipeline.pipe import Pipe
from anabranch.pipeline.pipe_call import Args, MakeHead, Named, deliver
from anabranch.pipeline.schedule.schedule import PHASES, Action, Simulation, simulate
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

    def every_layer(self) -> Iterator[nn.Module]:
        """Return the layers of all ranks, in the order they run; those of others have no values here."""
        return (layer.module for stage in self._pipe._stages for layer in stage.layers)

    def costs(self) -> list[StageCosts]:
        """Return what each stage took in the last call, on whichever rank it is."""
        return costs_of(self._pipe._stages, self._pipe._schedules.rank_of, self._pipe._engine.observed)

    def simulated(self, rows: int) -> Simulation:
        """Return the schedule of a step with ``rows`` rows, with the stages' times of the last call.

        What crosses between stages takes no time there, and no rank has less of a processor because others compute.
        """
        m = self.microbatches(rows)
        seconds = self._pipe._engine.observed.seconds
        lowered, _ = self._pipe._lowered(m, self._pipe.checkpoint)
        times = Counter((action.stage, action.kind) for actions in lowered.actions for action in actions)

        def cost(action: Action) -> float:
            if not action.kind.computes:
                return 0.0
            return seconds.get((action.stage, PHASES[action.kind]), 0.0) / times[action.stage, action.kind]

        return simulate(lowered, cost)

    def microbatches(self, rows: int) -> int:
        """Return how many a batch of ``rows`` rows is cut into."""
        return len(microbatch_sizes(rows, operator.index(self._pipe.chunks)))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let the calls of the block leave no trace in ``calls`` and ``bytes_sent``: they only look."""
        calls, sent = self._pipe.calls, self._pipe.bytes_sent
        try:
            yield
        finally:
            self._pipe.calls = calls
            self._pipe._engine.bytes_sent = sent
