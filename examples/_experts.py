"""The feed-forward layer of a block as a mixture of experts in other processes of the job."""

from __future__ import annotations

from torch import Tensor, nn

import anabranch as ab
from anabranch.job import DirectoryLike

PREFIX = "feed_forward"
EXPERTS_A_PROCESS = 2
EXPERTS_A_ROW = 2


class Experts(nn.Module):
    """(B, T, D) -> (B, T, D): each position is a row of its own, answered by the two experts that its gate likes best.

    Only the gate lives here. The experts train themselves, on the gradients that come back to them. A row of which no
    expert answers, because their process has just died, gets zeros: in a residual layer it goes on as it came.
    """

    def __init__(self, width: int, directory: DirectoryLike, processes: int) -> None:
        super().__init__()
        self.count = processes * EXPERTS_A_PROCESS
        self.directory = directory
        self.mixture = ab.RemoteMixtureOfExperts(
            width, [self.count], directory, PREFIX, k_best=EXPERTS_A_ROW, allow_zero_outputs=True, backward_k_min=0
        )

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return self.mixture(hidden_BTD.flatten(0, 1)).unflatten(0, hidden_BTD.shape[:2])

    def missing(self) -> int:
        """Return how many of the experts are not in use now."""
        there = {f"{PREFIX}.{index}" for index in self.directory.active([PREFIX])[PREFIX]}
        return self.count - len(there - self.mixture.statistics().avoided)

    def in_use(self) -> str:
        """Return how many of the experts are in use, for the progress line."""
        return f"{self.count - self.missing()} of {self.count} experts"


def uids_of(process: int) -> list[str]:
    """Return the experts that a process serves.

    >>> uids_of(1)
    ['feed_forward.2', 'feed_forward.3']
    """
    first = process * EXPERTS_A_PROCESS
    return [f"{PREFIX}.{index}" for index in range(first, first + EXPERTS_A_PROCESS)]
