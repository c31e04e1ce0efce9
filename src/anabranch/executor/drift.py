"""``Drift``: notices workers whose all-reduced or frozen parameters have become different while they train.

::

    every 100 steps    checksums with the header of a run ── all equal ──────────────────────────> nothing
    before a save      checksums by themselves              └ differ ─> compared one by one ─┬───> WorkersDiffer
                                                      all within rounding: rank 0's are sent ┘

A checksum travels as digits and their squares, which a sum over the workers compares: W times the sum of the squares is
the square of the sum only where all are equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import msgspec
import torch
from torch import Tensor

from anabranch.choices import listed
from anabranch.collectives import Workers
from anabranch.errors import WorkersDiffer
from anabranch.executor.likeness import optimizer_lines, send_first
from anabranch.executor.routes import Place, Routes
from anabranch.executor.steps import Step, TrainStep
from anabranch.liveness.group import rank_names

__all__ = ["DIGITS", "Drift", "checksum", "digits_differ", "distance"]

_log = logging.getLogger("anabranch.executor")

_DIGITS, _BASE_BITS = 5, 6  # squares of 4,000 workers' digits are summed exactly in float32
DIGITS = 2 * _DIGITS
_BLOCK = 1 << 16  # elements whose products fit in the processor's cache
_ROUNDING = 1e-6  # of a tensor's largest number: processors of different kinds round differently


class Drift:
    """Compares the parameters that are the same on all workers, unless something writes them on one of them.

    Args:
        workers: those that have the same parameters.
        everyone: they, or all ranks of parallel pipelines, each of whose stages has parameters of its own.
        steps: whose optimizers are compared where parameters differ.
        routes: says which parameters are all-reduced or frozen.
        every: so many optimizer steps lie between two checks.
    """

    def __init__(
        self,
        workers: Workers,
        everyone: Workers,
        steps: Mapping[str, Step],
        routes: Callable[[], Routes],
        every: int,
    ) -> None:
        self._workers, self._everyone = workers, everyone
        self._steps, self._routes, self.every = steps, routes, every
        self._warned = False

    def _parameters(self) -> dict[Tensor, str]:
        routes = self._routes()
        kept = routes.at(Place.WORKERS) if routes.all_reduces else []
        trained = {p for step in self._steps.values() if isinstance(step, TrainStep) for p in step.model.parameters()}
        return {route.tensor: route.parameter for route in kept if route.tensor is not None and route.tensor in trained}

    def digits(self) -> list[float]:
        """Return this worker's checksum as the header of a run carries it."""
        number = checksum(self._parameters())
        digits = [
            float(number >> place & (1 << _BASE_BITS) - 1) for place in range(0, _DIGITS * _BASE_BITS, _BASE_BITS)
        ]
        return [*digits, *(digit * digit for digit in digits)]

    def differs_anywhere(self, here: bool) -> bool:
        """Return True on all ranks if workers differ in any stage."""
        if self._everyone is self._workers:
            return here
        return any(self._everyone.all_gather_bytes(b"x" if here else b"", operation="comparison of parameters"))

    def check(self, first: int, last: int) -> None:
        """Compare at once; every worker calls it.

        Raises:
            WorkersDiffer: as ``settle``.
        """
        mine = checksum(self._parameters()).to_bytes(8, "little")
        everyone = self._workers.all_gather_bytes(mine, operation="comparison of parameters")
        if self.differs_anywhere(len(set(everyone)) > 1):
            self.settle(first, last)

    def settle(self, first: int, last: int) -> None:
        """Compare parameters, optimizer states and groups one by one; send rank 0's where only rounding differs.

        Args:
            first: the step at which they were last known to be equal.
            last: the step at which they were not.

        Raises:
            WorkersDiffer: on all workers.
        """
        names = self._parameters()
        states, lines = self._optimizer_states(names)
        # With shapes and types, as tensors of others cannot be sent.
        kinds = [f"{name} {tuple(parameter.shape)} {parameter.dtype}" for parameter, name in names.items()]
        models = self._workers.all_gather_bytes("\n".join(kinds).encode(), operation="comparison of parameters")
        texts = self._workers.all_gather_bytes("\n".join(lines).encode(), operation="comparison of optimizers")
        unlike = _unlike([text.decode().split("\n") for text in texts], self._workers.ranks)
        # A worker's model may have another parameter in place of one: only what all have can be compared.
        owned = [set(filter(None, text.decode().split("\n"))) for text in models]
        missing = sorted({kind.rsplit(" (", 1)[0] for kind in owned[0].union(*owned) - owned[0].intersection(*owned)})
        names = {parameter: name for parameter, name in names.items() if name not in missing}
        # Where no line differs, all workers have the same states.
        compared = {name: parameter.detach() for parameter, name in names.items()}
        compared |= {} if unlike or missing else states
        distances = torch.tensor(
            [self._distance_from_first(tensor) for tensor in compared.values()], dtype=torch.float64, device="cpu"
        )
        table = self._workers.all_gather(distances, operation="comparison of parameters").t().tolist()
        rows = dict(zip(compared, table, strict=True))
        unlike += [name for name in states if max(rows.get(name, [0.0])) > _ROUNDING]
        least = _ROUNDING if any(max(rows[name]) > _ROUNDING for name in names.values()) else 0.0
        drifted = [name for name in names.values() if max(rows[name]) > least] if least or unlike else []
        ranks = [
            rank for name in drifted for rank, far in zip(self._workers.ranks, rows[name], strict=True) if far > least
        ]
        ranks += [rank for rank, one in zip(self._workers.ranks, owned, strict=True) if one != owned[0]]
        report = msgspec.json.encode([missing + drifted, ranks, unlike])
        reports = self._everyone.all_gather_bytes(report, operation="comparison of parameters")
        stages = [msgspec.json.decode(text, type=tuple[list[str], list[int], list[str]]) for text in reports]
        drifted = list(dict.fromkeys(name for names, _, _ in stages for name in names))
        unlike = list(dict.fromkeys(line for _, _, lines in stages for line in lines))
        if drifted or unlike:
            ranks = sorted({rank for _, ranks, _ in stages for rank in ranks})
            raise _workers_differ(drifted, ranks, unlike, (first, last))
        send_first(self._workers, compared.values())
        if not self._warned and self._workers.rank == 0:
            _log.warning(
                "the workers' parameters differed by rounding at step %d, as on processors of different kinds; rank "
                "0's were sent again, as they will be from now on without a word",
                last,
            )
        self._warned = True

    def _optimizer_states(self, names: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors in the states of the parameters in ``names``, and lines of text about all else."""
        tensors: dict[str, Tensor] = {}
        lines = list(optimizer_lines(self._steps, names))
        optimizers = [o for step in self._steps.values() if isinstance(step, TrainStep) for o in step.optimizers]
        for parameter, state in ((p, s) for optimizer in optimizers for p, s in optimizer.state.items() if p in names):
            for key, value in state.items() if isinstance(state, Mapping) else ():
                label = f"{key} of {names[parameter]}"
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    tensors[label] = value.detach()
                    lines.append(f"{label}: {tuple(value.shape)} {value.dtype}")
                elif isinstance(value, bool | int | float | str | None):
                    lines.append(f"{label}: {value!r}")
        return dict(sorted(tensors.items())), sorted(lines)

    def _distance_from_first(self, tensor: Tensor) -> float:
        """Return the distance of a tensor from rank 0's."""
        first = tensor.clone(memory_format=torch.contiguous_format)
        self._workers.broadcast([first], operation="comparison of parameters")
        return distance(tensor, first)


def _unlike(everyone: Sequence[Sequence[str]], ranks: Sequence[int]) -> list[str]:
    """Return the lines that other workers have in place of the first one's."""
    first = set(everyone[0])
    return [
        f"{listed(sorted(first - set(lines)))} (rank {ranks[0]}), {listed(sorted(set(lines) - first))} (rank {rank})"
        for rank, lines in zip(ranks, everyone, strict=True)
        if set(lines) != first
    ]


def _workers_differ(
    parameters: Sequence[str], ranks: Sequence[int], optimizers: Sequence[str], steps: tuple[int, int]
) -> WorkersDiffer:
    also = f"; so do their optimizers: {'; '.join(optimizers)}" if optimizers else ""
    return WorkersDiffer(
        f"{listed(parameters)} on {rank_names(ranks)} differ from rank 0's at step {steps[1]}, and did not at step "
        f"{steps[0]}{also}. Something writes them on one worker, or differently on each: a forward that writes "
        "parameters, an optimizer in a hook, load_state_dict or a learning rate on one rank, a scheduler that follows "
        "each worker's own metric, random numbers in on_gradients. Do the same on all workers, or make what each "
        "worker owns a buffer, and continue from the last checkpoint",
        parameters=tuple(parameters),
        ranks=tuple(ranks),
        steps=steps,
    )


def digits_differ(sums: Sequence[float], workers: int) -> bool:
    """Return True if the digits whose sums over the ``workers`` are given are not the same on all."""
    return any(
        workers * squares != total * total for total, squares in zip(sums[:_DIGITS], sums[_DIGITS:], strict=True)
    )


# Checksums.


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number of 30 bits that depends on every bit of the tensors and on its place.

    A multilinear hash: the bits as whole numbers, times fixed random ones, summed modulo 2**64, so that the order of
    the sum does not matter. ``torch.hash_tensor`` is a third of the time, but an exclusive or: filling a tensor of even
    size with one number, or changing two places, leaves it as it was.
    """
    parts = [_digest(_whole_numbers(tensor)).cpu() for tensor in tensors if tensor.layout is torch.strided]
    return int(_digest(torch.stack(parts)).item()) >> 34 & (1 << 30) - 1 if parts else 0


def _whole_numbers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(kinds[tensor.itemsize])


def _digest(numbers: Tensor) -> Tensor:
    factors = _factors(numbers.device)
    sums = [(part * factors[: len(part)]).sum() for part in torch.split(numbers, _BLOCK)]
    return sums[0] if len(sums) == 1 else _digest(torch.stack(sums))


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator, device="cpu") | 1).to(device)


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, as a part of the largest number of both; NaN equals NaN.

    >>> distance(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    differs = (one != other) & ~((one != one) & (other != other))
    if not bool(differs.any()):
        return 0.0
    if not one.is_complex():
        one, other = one.double(), other.double()
    apart = (one[differs] - other[differs]).abs().max() / torch.stack([one.abs().max(), other.abs().max()]).max()
    return float(apart) if bool(torch.isfinite(apart)) else float("inf")
