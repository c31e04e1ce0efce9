"""``RemoteSwitchMixtureOfExperts``: the best expert for each row, and a loss that keeps the experts evenly used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from anabranch.autodiff.boundary import whole_calls
from anabranch.autodiff.boundary.crossing import Form
from anabranch.experts.client.beam_search import Choices
from anabranch.experts.client.mixture import RemoteMixtureOfExperts, check_fraction, scores_of
from anabranch.experts.directory import DirectoryLike
from anabranch.experts.schema import with_leading
from anabranch.tensors import Structure
from anabranch.transport import Client

__all__ = ["RemoteSwitchMixtureOfExperts"]


class RemoteSwitchMixtureOfExperts(RemoteMixtureOfExperts):
    """Calls the best expert of a grid for each row, and keeps the experts evenly used.

    >>> from anabranch.experts import Directory, ExpertBackend, ExpertServer
    >>> from anabranch.tensors import TensorSpec
    >>> directory = Directory()
    >>> backends = [ExpertBackend(f"same.{i}", torch.nn.Identity(), args_schema=[TensorSpec(4)]) for i in range(3)]
    >>> with ExpertServer(backends, directory=directory):
    ...     mixture = RemoteSwitchMixtureOfExperts(4, [3], directory, "same")
    ...     output, balancing_loss = mixture(torch.ones(5, 4))
    >>> output.shape, balancing_loss.shape
    (torch.Size([5, 4]), torch.Size([]))

    A row's output is its expert's, times the expert's probability: the product over dimensions of the softmax of the
    gate's scores, which is how the gate learns. The balancing loss is, for each dimension, the size times the sum over
    indices of mean probability times utilisation, averaged over dimensions: 1 when all are used evenly, more otherwise.
    Add a small multiple of it to the training loss.

    Arguments not listed here are as for ``RemoteMixtureOfExperts``.

    Args:
        k_min: 1: every row's expert must answer; 0: rows whose expert does not are zeros, if ``allow_zero_outputs``.
        backward_k_min: 1: every gradient must come back.
        allow_zero_outputs: rows without an answer are zeros instead of raising.
        utilization_alpha: weight of the past in the moving mean of utilisation.
        jitter: in train mode the gate's input is multiplied by numbers drawn evenly from 1 - jitter to 1 + jitter.

    Raises:
        ValueError: as ``RemoteMixtureOfExperts``; a weight outside [0, 1) or a jitter outside [0, 1).

    Returns a pair: what an expert returns, and the balancing loss.

    Source: Fedus, Zoph and Shazeer, "Switch Transformers", 2021.
    """

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        directory: DirectoryLike | str,
        uid_prefix: str,
        *,
        k_min: int = 0,
        forward_timeout: float = 30.0,
        backward_k_min: int = 0,
        backward_timeout: float = 30.0,
        allow_zero_outputs: bool = True,
        detect_anomalies: bool = True,
        utilization_alpha: float = 0.9,
        jitter: float = 1e-2,
        grid_dropout: float = 0.0,
        client: Client | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        for name, value in (("utilization_alpha", utilization_alpha), ("jitter", jitter)):
            check_fraction(name, value)
        super().__init__(
            in_features,
            grid_size,
            directory,
            uid_prefix,
            k_best=1,
            k_min=k_min,
            forward_timeout=forward_timeout,
            backward_k_min=backward_k_min,
            backward_timeout=backward_timeout,
            allow_zero_outputs=allow_zero_outputs,
            detect_anomalies=detect_anomalies,
            grid_dropout=grid_dropout,
            client=client,
            keys=keys,
            insecure=insecure,
        )
        self.utilization_alpha = utilization_alpha
        self.jitter = jitter
        for dimension, size in enumerate(self.grid_size):
            self.register_buffer(f"utilization_{dimension}", torch.full((size,), 1.0 / size))

    def forward(self, x: Tensor, *args: Structure, **kwargs: Structure) -> tuple[Structure, Tensor]:
        """Return the output for ``x``, and the balancing loss."""
        if torch.compiler.is_dynamo_compiling() and self._schema is None:  # a compiler that is not this library's
            return cast(
                "tuple[Structure, Tensor]",
                whole_calls.beside(RemoteSwitchMixtureOfExperts.forward, (self, x, *args), kwargs),
            )
        leading = self._leading_sizes(x)
        gated = self._gate_logits(x, leading)
        grids = len(self.grid_size)
        schema, outputs = self._mixed(gated, (x, *args), kwargs)
        loss = self._balancing_loss(torch.split(gated, list(self.grid_size), dim=-1), outputs[-grids:])
        return schema.nest_outputs(with_leading(outputs[:-grids], leading)), loss

    def _prepare_gate_input(self, x: Tensor) -> Tensor:
        if self.training and self.jitter:
            return x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)
        return x

    def _weights(self, scores: Sequence[Tensor], choices: Choices, present: Tensor) -> Tensor:
        return scores_of([grid.log_softmax(dim=-1) for grid in scores], choices).exp() * present

    def _extra_forms(self, device: torch.device) -> list[Form]:
        return [Form((n + 1,), self.gate.weight.dtype, device, differentiable=False) for n in self.grid_size]

    def _extra_outputs(self, choices: Choices, gated: Tensor) -> list[Tensor]:
        """For each dimension the share of rows of each index, then 1 if there were any rows."""
        taken = choices.slots[:, 0] >= 0
        shares = []
        for dimension, size in enumerate(self.grid_size):
            counts = np.bincount(choices.coordinates[taken, 0, dimension], minlength=size)
            share = np.append(counts / max(counts.sum(), 1), float(taken.any()))
            shares.append(torch.from_numpy(share).to(gated.device, self.gate.weight.dtype))
        return shares

    def _balancing_loss(self, scores: Sequence[Tensor], shares: Sequence[Tensor]) -> Tensor:
        losses: list[Tensor] = []
        for dimension, (grid, share) in enumerate(zip(scores, shares, strict=True)):
            utilization = cast(Tensor, getattr(self, f"utilization_{dimension}"))
            if self.training:
                given = share.to(utilization)
                now = (utilization * self.utilization_alpha).add(given[:-1], alpha=1 - self.utilization_alpha)
                with torch.no_grad():
                    utilization.copy_(torch.where(given[-1] > 0, now, utilization))
            # The mean over no rows is NaN.
            mean = grid.softmax(dim=-1).mean(0) if len(grid) else grid.sum(0)
            losses.append(grid.shape[1] * (mean * utilization).sum())
        return torch.stack(losses).mean()
