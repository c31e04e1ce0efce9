"""A training step's gradients for the servers: summed over the runs of its window, then pushed at once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anabranch.executor.engines.gradients import nonfinite_names
from anabranch.executor.running.remote import RemotePart
from anabranch.executor.steps import TrainStep
from anabranch.parameter_server import RemoteEmbedding, merge_rows
from anabranch.parameter_server.client.parameter_client import REFUSALS

_UNSENT = (*REFUSALS, TypeError, ValueError)
"""Errors of a push that left the servers as they were, but for one that some shards refused, which the client knows."""


class RemoteWindow:
    """The gradients of one training step's window that go to the servers.

    Attributes:
        parameters: those that the window takes the gradients of, by the names that the engine has for them.
    """

    def __init__(self, part: RemotePart, step: TrainStep) -> None:
        self.part = part
        self._step, self._clips = step, step.clip_grad_norm is not None
        mine = set(step.model.parameters())
        self._names = {tensor: name for tensor, name in part.whole_parameters.items() if tensor in mine}
        self.parameters: Mapping[str, Tensor] = {}
        self.embeddings = [module for module in step.model.modules() if isinstance(module, RemoteEmbedding)]
        self._weight = self._factor = 1.0
        # Other steps' optimizers move these, so that this step's gradients of them go nowhere, as in the plain loop.
        self._foreign = {moved.name for moved in part.moved if moved.optimizer not in step.optimizers}
        if self._foreign and step.clip_grad_norm is not None:
            name = min(self._foreign)
            raise ValueError(
                f"a step clips by the norm of all gradients, but that of {name}, which another step's optimizer "
                f"moves, is on the servers; keep it on the workers: routes={{{name!r}: 'AllReduce'}}"
            )
        self.start_window()

    def lay_out(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take the gradients of those ``parameters`` that belong on the servers; return the others."""
        self.parameters = {name: tensor for name, tensor in parameters.items() if tensor in self._names}
        return {name: tensor for name, tensor in parameters.items() if tensor not in self._names}

    def start_window(self) -> None:
        """Begins a new sum."""
        self._total = 0.0
        self._dense: dict[str, Tensor] = {}
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def start_run(self, weight: float, factor: float) -> None:
        """Start a run of this ``weight`` whose gradients, times ``factor``, are summed to a mean over that weight."""
        self._weight = weight
        # A window of one run sums nothing: its gradients are sent as the mean that they are.
        self._factor = factor if self._step.accumulate > 1 else factor / (weight or 1.0)

    def ready(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a final gradient of a copy."""
        name = self._names[parameter]
        if name in self._foreign:
            return
        gradient = gradient if self._factor == 1.0 else gradient * self._factor
        self._dense[name] = self._dense[name] + gradient if name in self._dense else gradient

    def end_run(self) -> None:
        """Take the looked-up tables' gradients after backward."""
        self._total += self._weight
        frozen = {moved.name for moved in self.part.moved if not moved.parameter.requires_grad}  # since the lookup, too
        frozen |= {module.name for module in self.embeddings if not module.on_servers.requires_grad}
        frozen -= {module.name for module in self.embeddings if module.on_servers.requires_grad}  # of another copy
        for name, (ids, grads) in self.part.tables.take().items():
            if name in frozen or name in self._foreign:
                continue
            self._rows.setdefault(name, []).append((ids, grads if self._factor == 1.0 else grads * self._factor))
        for parameter in self._names:
            parameter.grad = None

    def push(self) -> None:
        """Send the window's gradients; with clipping they wait for ``release``."""
        self.part.torn = self.part.clock
        try:
            self._push()
        except _UNSENT:
            self.part.torn = None
            raise
        if not self._clips:
            self.part.torn = None

    def _push(self) -> None:
        mean = self._step.reduction == "mean"
        divisor = self._total if mean and self._step.accumulate > 1 and self._total else 1.0
        if mean:  # every stage of a pipeline pushes with the weight of its rows, so they count once for each
            divisor /= self.part.stages
        given = {name: parts[0] if len(parts) == 1 else merge_rows(parts) for name, parts in self._rows.items()}
        dense = self._dense
        if divisor != 1.0:
            given = {name: (ids, grads / divisor) for name, (ids, grads) in given.items()}
            dense = {name: gradient / divisor for name, gradient in dense.items()}
        self.part.tables.push(
            self._total if mean else 1.0,
            mean=mean,
            hold=self._clips,
            given=given,
            beside=self.part.whole.beside(dense),
        )
        self.start_window()
        self.part.clock += 1

    def nonfinite(self) -> list[str]:
        """Return the names of gradients with NaN or an infinity in the open window."""
        rows = [(name, grads) for name, parts in self._rows.items() for _, grads in parts]
        return nonfinite_names([*self._dense.items(), *rows], own=False)

    @property
    def names(self) -> set[str]:
        """The parameters whose gradients this window may hold."""
        return {*self._names.values(), *self.part.rows}

    def squared_norm(self) -> float:
        """Return the sum of squares of the gradients just pushed, of all workers together."""
        return self.part.client.squared_norm(self.part.clock - 1)

    def release(self, scale: float) -> None:
        """Apply the gradients just pushed, times ``scale``."""
        self.part.client.release(self.part.clock - 1, scale)
        self.part.torn = None
