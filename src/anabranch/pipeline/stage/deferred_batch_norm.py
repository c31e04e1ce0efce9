"""BatchNorm whose running statistics are the whole batch's, although it sees one microbatch after the other.

Each microbatch is normalised by its own mean and variance, because later rows are not known yet. For the running
statistics, sums over the microbatches are kept, and applied once per step, as by one forward of the whole batch.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["DeferredBatchNorm", "defer_batch_norms"]


class DeferredBatchNorm(_BatchNorm):
    """Replaces a BatchNorm of any dimension; shares its parameters and buffers.

    >>> norm = DeferredBatchNorm.of(nn.BatchNorm1d(2))
    >>> _ = norm(torch.zeros(2, 2)), norm(torch.full((2, 2), 2.0))
    >>> norm.commit()
    >>> norm.running_mean  # a tenth of the way to the mean over all four rows
    tensor([0.1000, 0.1000])

    Source: deferred batch normalisation of torchgpipe (Kim et al., 2020).
    """

    recomputing: bool

    @classmethod
    def of(cls, norm: _BatchNorm) -> DeferredBatchNorm:
        """Return the replacement of ``norm``."""
        deferred = cls.__new__(cls)
        deferred.__dict__.update(norm.__dict__)
        deferred.recomputing = False
        deferred.forget()
        return deferred

    def forget(self) -> None:
        """Drop the sums of the microbatches so far."""
        self._count = 0
        self._sum: Tensor | None = None
        self._sum_of_squares: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalises ``input`` by its own statistics, and adds them to the sums; in eval mode by the running ones."""
        if not (self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)
        if not self.recomputing:
            self._add(input.detach())
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.ndim < 2:
            raise ValueError(f"BatchNorm takes at least (rows, channels), got {tuple(input.shape)}")

    def _add(self, x: Tensor) -> None:
        x = x.to(cast(Tensor, self.running_mean).dtype)
        dims = [dim for dim in range(x.ndim) if dim != 1]
        sums, squares = x.sum(dims), (x * x).sum(dims)
        self._count += x.numel() // x.shape[1]
        self._sum = sums if self._sum is None else self._sum + sums
        self._sum_of_squares = squares if self._sum_of_squares is None else self._sum_of_squares + squares

    @torch.no_grad()
    def commit(self) -> None:
        """Apply the statistics of all microbatches since the last commit to the running ones."""
        if self._sum is None or self._sum_of_squares is None:
            return
        running_mean, running_var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        tracked = cast(Tensor, self.num_batches_tracked)
        tracked += 1
        momentum = 1.0 / float(tracked) if self.momentum is None else self.momentum
        mean = self._sum / self._count
        var = (self._sum_of_squares / self._count - mean * mean) * (self._count / max(self._count - 1, 1))
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        running_var.mul_(1 - momentum).add_(var, alpha=momentum)
        self.forget()


def defer_batch_norms(module: nn.Module) -> None:
    """Replace every BatchNorm inside ``module`` that keeps running statistics by a ``DeferredBatchNorm``."""
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if not isinstance(child, _BatchNorm) or isinstance(child, nn.SyncBatchNorm | DeferredBatchNorm):
                continue
            if child.track_running_stats:
                parent._modules[name] = DeferredBatchNorm.of(child)
