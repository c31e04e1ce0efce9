"""``RemoteMixtureOfExperts``: the best experts for each row, weighted by a softmax over those that answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from anabranch.autodiff.boundary import whole_calls
from anabranch.experts.client.mixture.expert_caller import CallLimits
from anabranch.experts.client.mixture.gated_mixture import GatedMixture, make_finder
from anabranch.experts.directory import DirectoryLike
from anabranch.experts.schema import with_leading
from anabranch.tensors import Structure
from anabranch.transport import Client

__all__ = ["RemoteMixtureOfExperts"]


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
        k_min: answers that each row needs, or ``BoundaryError`` is raised. Rows that lost their experts with a process
            ask the next best ones before it is.
        forward_timeout: seconds for all of a forward, beam search included.
        timeout_after_k_min: seconds for which stragglers are waited for once every row has ``k_min`` answers; ``None``:
            as long as ``forward_timeout``.
        backward_k_min: gradients that each row needs (all of those that answered it, if they are fewer, leaving out
            those whose process has died since: the log ``anabranch.experts`` tells of them).
        backward_timeout: seconds for a backward.
        allow_zero_outputs: rows with fewer than ``k_min`` answers are mixed from the answers there are, zeros without
            any, instead of raising.
        detect_anomalies: treats an answer that holds NaN or Inf as missing.
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
    An expert that fails twice in a row is avoided for a while. A mixture can be copied, and pickled if its directory
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
            k_min,
            forward_timeout,
            timeout_after_k_min,
            backward_k_min,
            backward_timeout,
            allow_zero_outputs,
            detect_anomalies,
        )
        super().__init__(
            in_features,
            grid_size,
            uid_prefix,
            k_best,
            limits,
            grid_dropout,
            lambda: make_finder(directory, client, keys, insecure=insecure),
        )

    def forward(self, x: Tensor, *args: Structure, **kwargs: Structure) -> Structure:
        """Return the mixture's output for ``x``."""
        if torch.compiler.is_dynamo_compiling() and self._schema is None:  # a compiler that is not this library's
            return cast(Structure, whole_calls.beside(self.forward, (x, *args), kwargs))
        leading = self._leading_sizes(x)
        gated = self._gate_logits(x, leading)
        schema, outputs = self._mixed(gated, (x, *args), kwargs)
        return schema.nest_outputs(with_leading(outputs, leading))
