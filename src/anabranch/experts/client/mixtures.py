"""The two mixtures: the best experts for each row, weighted by a softmax over those that answer, and a single best one
with a loss that keeps the experts evenly used.
"""

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
from anabranch.experts.client.gated_mixture import CallLimits, GatedMixture, check_fraction, scores_of
from anabranch.experts.directory import DirectoryLike
from anabranch.experts.schema import with_leading
from anabranch.tensors import Structure
from anabranch.transport import Client

__all__ = ["RemoteMixtureOfExperts", "RemoteSwitchMixtureOfExperts"]


class RemoteMixtureOfExperts(GatedMixture):
    """Calls the best experts of a grid for each row, and mixes the answers received.

    >>> from anabranch.experts import Directory, ExpertBackend, ExpertServer
    >>> from anabranch.tensors import TensorSpec
    >>> directory = Directory()
    >>> backends = [ExpertBackend(f"same.{i}", torch.nn.Identity(), args_schema=[TensorSpec(4)]) for i in range(3)]
    >>> with ExpertServer(backends, directory=directory):
    ...     mixture = RemoteMixtureOfExperts(4, [3], directory, "same", k_best=2)
    ...     torch.allclose(mixture(torch.ones(5, 4)), torch.ones(5, 4))
    True

    Args:
        in_features: of the gate: the last size of the input.
        grid_size: sizes of the grid; experts are called ``uid_prefix.i[.j...]`` with indices below them.
        directory: finds the experts: a ``Directory``, the endpoint of a ``DirectoryServer``, or the URL of a Redis.
        uid_prefix: of the experts' uids.
        k_best: experts called for each row.
        k_min: answers that each row needs, or ``BoundaryError`` is raised. Rows with fewer ask the next best experts
            before it is.
        forward_timeout: seconds for all of a forward, beam search included.
        timeout_after_k_min: seconds for which stragglers are waited for once every row has ``k_min`` answers; ``None``:
            as long as ``forward_timeout``.
        backward_k_min: gradients that each row needs (all of those that answered it, if they are fewer, leaving out
            those whose process has died since: the log ``anabranch.experts`` tells of them).
        backward_timeout: seconds for a backward.
        allow_zero_outputs: rows with fewer than ``k_min`` answers are mixed from the answers there are, zeros without
            any, instead of raising.
        detect_anomalies: treats an answer that holds NaN, Inf or a number above 1e18 (6e4 in float16) as missing.
        grid_dropout: in train mode each index of each dimension is left out of a call with this probability, so that
            other experts are tried too; a dimension that would lose all its indices keeps them.
        client: sends the requests; shared by the process's mixtures by default, with ``keys`` and ``insecure``.

    Raises:
        ValueError: a grid without sizes, counts that contradict each other, an invalid prefix or time.
        TypeError: a count, time or probability that is not a number.

    Called with an input of shape (rows, ..., in_features), and further arguments that the experts take, all with as
    many rows; returns what an expert returns. The gate is one ``nn.Linear``. Dimensions before those of the experts'
    first input are rows, and the outputs have them too: experts of ``TensorSpec(in_features)`` take (batch, sequence,
    in_features) and are chosen for each position. Experts of ``TensorSpec(None, in_features)`` are chosen for each
    sequence, by a gate that sees the mean over the dimensions between. In eval mode the experts run in eval mode, and
    under autocast floating inputs are cast to their dtypes.
    An expert that fails twice in a row is avoided for a while: forwards, backwards and stragglers that were cut off are
    counted apart. One whose schema is not that of most of those first called is left out, with a warning in the log
    ``anabranch.experts``; the next best is called. A mixture can be copied, and pickled if its directory
    can.

    Raises, when called: BoundaryError, if too few answer; SchemaError, for arguments that do not fit; NonFinite, if the
    gate's scores are not finite.

    Source: Ryabinin and Gusev, "Towards Crowdsourced Training of Large Neural Networks using Decentralized
    Mixture-of-Experts", 2020; product keys after Lample et al., 2019.
    """

    def __init__(
        self,
        in_features: int,
        grid_size: Sequence[int],
        directory: DirectoryLike | str,
        uid_prefix: str,
        *,
        k_best: int = 4,
        k_min: int = 1,
        forward_timeout: float = 30.0,
        timeout_after_k_min: float | None = None,
        backward_k_min: int = 1,
        backward_timeout: float = 30.0,
        allow_zero_outputs: bool = False,
        detect_anomalies: bool = True,
        grid_dropout: float = 0.0,
        client: Client | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        limits = CallLimits(
            k_best,
            k_min,
            forward_timeout,
            timeout_after_k_min,
            backward_k_min,
            backward_timeout,
            allow_zero_outputs,
            detect_anomalies,
        )
        super().__init__(
            in_features, grid_size, directory, uid_prefix, limits, grid_dropout, client, keys, insecure=insecure
        )

    def forward(self, x: Tensor, *args: Structure, **kwargs: Structure) -> Structure:
        """Return the mixture's output for ``x``."""
        if torch.compiler.is_dynamo_compiling() and self._schema is None:  # a compiler that is not this library's
            return cast(Structure, whole_calls.beside(self.forward, (x, *args), kwargs))
        leading = self._leading_sizes(x)
        gated = self._gate_logits(x, leading)
        schema, outputs = self._mixed(gated, (x, *args), kwargs)
        return schema.nest_outputs(with_leading(outputs, leading))


class RemoteSwitchMixtureOfExperts(GatedMixture):
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
        limits = CallLimits(
            1, k_min, forward_timeout, None, backward_k_min, backward_timeout, allow_zero_outputs, detect_anomalies
        )
        super().__init__(
            in_features, grid_size, directory, uid_prefix, limits, grid_dropout, client, keys, insecure=insecure
        )
        self.utilization_alpha = utilization_alpha
        self.jitter = jitter
        for dimension, size in enumerate(self.grid_size):
            self.register_buffer(f"utilization_{dimension}", torch.full((size,), 1.0 / size))

    def forward(self, x: Tensor, *args: Structure, **kwargs: Structure) -> tuple[Structure, Tensor]:
        """Return the output for ``x``, and the balancing loss."""
        if torch.compiler.is_dynamo_compiling() and self._schema is None:  # a compiler that is not this library's
            return cast("tuple[Structure, Tensor]", whole_calls.beside(self.forward, (x, *args), kwargs))
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
