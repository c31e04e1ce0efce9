"""BatchNorm whose running statistics are the whole batch's, although it sees one microbatch after the other.

Each microbatch is normalised by its own mean and variance, because later rows are not known yet. For the running
statistics, those of the microbatches are merged, and applied once per step, as by one forward of the whole batch.
"""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class DeferredBatchNorm(_BatchNorm):
    """Replaces a BatchNorm of any dimension, with torch's forward; shares its parameters and buffers.

    >>> norm = DeferredBatchNorm.of(nn.BatchNorm1d(2))
    >>> _ = norm(torch.zeros(2, 2)), norm(torch.full((2, 2), 2.0))
    >>> norm.commit()
    >>> norm.running_mean  # a tenth of the way to the mean over all four rows
    tensor([0.1000, 0.1000])

    Source: deferred batch normalisation of torchgpipe (Kim et al., 2020); variances merged as by Chan et al., 1979.
    """

    @classmethod
    def of(cls, norm: _BatchNorm) -> DeferredBatchNorm:
        """Return the replacement of ``norm``."""
        deferred = cls.__new__(cls)
        deferred.__dict__.update(norm.__dict__)
        deferred.forget()
        return deferred

    def forget(self) -> None:
        """Drop the statistics of the microbatches so far."""
        self._count = 0
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None  # of the deviations from the mean, summed

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise ``input`` by its own statistics, and keep them; in eval mode by the running ones."""
        if not (self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)
        self._add(input.detach())
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.ndim < 2:
            raise ValueError(f"BatchNorm takes at least (rows, channels), got {tuple(input.shape)}")

    def _add(self, x: Tensor) -> None:
        # In 32 bits at least; and not by sums of squares, which cancel where the mean is far from 0.
        x = x.to(torch.promote_types(cast(Tensor, self.running_mean).dtype, torch.float32))
        dims = [dim for dim in range(x.ndim) if dim != 1]
        count = x.numel() // x.shape[1]
        if self._mean is None or self._squares is None:
            self._mean = self._squares = x.new_zeros(x.shape[1])
        if not count:
            return
        var, mean = torch.var_mean(x, dims, correction=0)
        before, self._count = self._count, self._count + count
        moved = mean - self._mean
        self._mean = self._mean + moved * (count / self._count)
        self._squares = self._squares + var * count + moved * moved * (before * count / self._count)

    @torch.no_grad()
    def commit(self) -> None:
        """Apply the statistics of all microbatches since the last commit to the running ones."""
        if self._mean is None or self._squares is None:
            return
        running_mean, running_var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        tracked = cast(Tensor, self.num_batches_tracked)
        tracked += 1
        if self._count:
            momentum = 1.0 / float(tracked) if self.momentum is None else self.momentum
            running_mean.mul_(1 - momentum).add_(self._mean, alpha=momentum)
            running_var.mul_(1 - momentum).add_(self._squares / max(self._count - 1, 1), alpha=momentum)
        self.forget()


def defer_batch_norms(module: nn.Module) -> None:
    """Replace every BatchNorm inside ``module`` that keeps running statistics by a ``DeferredBatchNorm``.

    Raises:
        ValueError: one has a forward of its own, which the replacement would lose; none has been replaced.
    """
    for name, norm in module.named_modules():
        if _is_to_defer(norm) and getattr(norm.forward, "__func__", None) is not _BatchNorm.forward:
            what = f"deferred_batch_norm=True cannot replace {name!r}: {type(norm).__name__} has a forward of its own"
            raise ValueError(f"{what}; make it a plain BatchNorm followed by a module for the rest")
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if _is_to_defer(child):
                parent._modules[name] = DeferredBatchNorm.of(child)


def _is_to_defer(module: nn.Module | None) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and not isinstance(module, DeferredBatchNorm) and module.track_running_stats
