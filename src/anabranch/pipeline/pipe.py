"""``Pipe``: a ``nn.Sequential`` split into stages, used like the module it was."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from anabranch.pipeline.ambient import Ambient
from anabranch.pipeline.call import Call, Inputs, deliver, open_portal
from anabranch.pipeline.deferred_batch_norm import defer_batch_norms
from anabranch.pipeline.local import LocalEngine
from anabranch.pipeline.microbatch import count_batch_rows, microbatch_sizes, scatter
from anabranch.pipeline.orders import default_ranks, make_schedule
from anabranch.pipeline.partition import Layer, Route, flatten_layers, route_skips, shared_skips, split_layers
from anabranch.pipeline.random_streams import refuse_undrawable
from anabranch.pipeline.schedule import Lowered, Schedule
from anabranch.pipeline.skips import verify_skippables
from anabranch.pipeline.stage import OUTSIDE, Head, Plan, Stage, StageRun
from anabranch.tensors import Structure, map_structure

__all__ = ["Checkpoint", "Loss", "Pipe", "Reduction", "StepResult"]

Checkpoint: TypeAlias = Literal["except_last", "always", "never"]
"""Which microbatches keep no activations and run forward again before backward."""

Reduction: TypeAlias = Literal["mean", "sum"]
"""What the loss is over the rows it gets."""

Loss: TypeAlias = Callable[[Structure, Structure], Tensor]
"""From output and target to one number."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a scheduled step found; ``None`` on ranks without the last stage.

    Attributes:
        loss: the whole batch's loss, a tensor of no dimensions, without a graph.
        output: the model's output for the whole batch, without a graph.
    """

    loss: Tensor | None
    output: Structure


class Pipe(nn.Module):
    """A ``nn.Sequential`` split into stages that run at once, on microbatches of the batch.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x, target = torch.randn(6, 4), torch.randn(6, 2)
    >>> with Pipe(model, balance=[2, 1], chunks=3) as pipe:
    ...     y = pipe(x)
    ...     y.sum().backward()
    ...     result = pipe.step(x, target, loss=torch.nn.functional.mse_loss)
    >>> y.shape, result.loss.shape
    (torch.Size([6, 2]), torch.Size([]))

    Gradients are those of the unsplit module. The module's layers stay the module's own: parameters, names in state
    dicts, ``train`` and ``eval`` are shared with it.

    Args:
        module: the layers; nested ``nn.Sequential`` count as the layers inside.
        balance: how many children of ``module`` (or flattened layers) each stage has.
        devices: the device of each stage, or rank of the schedule; CPU may be named several times, and is by default.
        chunks: the most microbatches to cut a batch into.
        checkpoint: which microbatches run forward twice, to keep no activations in between.
        schedule: a schedule's name, or one made by ``make_schedule``.
        deferred_batch_norm: let running statistics of BatchNorm be the whole batch's.
        seed: of the random numbers drawn in stages; ``torch.initial_seed()`` by default.
        timeout: seconds that a call may take before it ends with ``DeadlineExceeded``.

    Raises:
        TypeError: ``module`` is no ``nn.Sequential``.
        SkipError: its skips do not match.
        ValueError: balance, devices, chunks or schedule do not fit; says what would.

    Source: GPipe (Huang et al., 2019); torchgpipe (Kim et al., 2020).
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        devices: Sequence[torch.device | str] | None = None,
        chunks: int = 1,
        checkpoint: Checkpoint = "except_last",
        schedule: str | Schedule = "GPipe",
        deferred_batch_norm: bool = False,
        *,
        seed: int | None = None,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        _check_choices(chunks, checkpoint)
        layers = flatten_layers(module)
        verify_skippables(module)
        if deferred_batch_norm:
            defer_batch_norms(module)
            layers = flatten_layers(module)
        self._split = split_layers(module, layers, balance)
        self._schedules = _Schedules(schedule, len(self._split), None if devices is None else len(devices))
        self._stages = _place(self._split, self._schedules.rank_of, devices)
        self.chunks = chunks
        self.checkpoint = checkpoint
        self._adopt(module)
        self._seed = torch.initial_seed() if seed is None else seed
        self._steps = 0
        self._engine = LocalEngine(self._schedules.rank_of, timeout)

    def _adopt(self, module: nn.Module) -> None:
        # The children are the module's own, under the same names, so that names know nothing of the pipe. Past
        # nn.Module's attributes: there the module would become one more child.
        self.__dict__["_module"] = module
        self.__dict__["_modules"] = module._modules

    @property
    def module(self) -> nn.Module:
        """The layers of this process: all of them."""
        return self.__dict__["_module"]  # type: ignore[no-any-return]

    def forward(self, x: Structure, **inputs: Structure) -> Structure:
        """The module's output for ``x``, differentiable; its backward runs the schedule's backward half.

        Args:
            x: tensors in any nesting that agree in rows (dim 0).
            inputs: keyword inputs, each for all layers whose ``forward`` has a parameter of that name; cut into
                microbatches like ``x``.

        Raises:
            ValueError: tensors that disagree in rows, or a keyword that no layer takes.
            BaseException: whatever a stage raises, with a note of stage, microbatch and phase.
        """
        call = self._call(x, inputs, head=None)
        if call.differentiable:
            return open_portal(call)
        return call.forward()[0]

    def step(
        self,
        x: Structure,
        target: Structure = None,
        *,
        loss: Loss,
        reduction: Reduction = "mean",
        **inputs: Structure,
    ) -> StepResult:
        """One scheduled forward and backward; gradients accumulate as by ``loss(...).backward()``.

        Args:
            x: as for calling the pipe.
            target: what ``loss`` gets beside the output, cut into microbatches along its rows.
            loss: from output and target to one number. A module's parameters are trained too.
            reduction: whether that number is a mean over rows, so that microbatches weigh by theirs, or a sum.
            inputs: keyword inputs, as for calling the pipe.

        Raises:
            ValueError: as for calling the pipe, or rows of ``target`` that are not those of ``x``.
            BaseException: whatever a stage raises; no gradient has accumulated then.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is 'mean' or 'sum', got {reduction!r}")
        call = self._call(x, inputs, head=(loss, target, reduction))
        if not call.records:
            output, _ = call.forward()
        else:
            output, grads = call.step()
            deliver(call.leaves, grads)
        return StepResult(call.loss(), output)

    def _call(self, x: Structure, inputs: Mapping[str, Structure], head: _HeadParts | None) -> Call:
        rows = count_batch_rows(x, "the batch")
        sizes = microbatch_sizes(rows, self.chunks)
        for name, value in inputs.items():
            _check_rows(value, rows, f"the keyword input {name!r}")
        m = len(sizes)
        recompute = _recomputed(self.checkpoint, len(self._stages), m)
        plan = Plan(Ambient.take(), self._seed, self._steps, m, recompute, self._schedules.splits_backward)
        self._steps += 1
        stages = [_with_keywords(stage, inputs) for stage in self._stages]
        taken = {name for stage in stages for names in stage.keywords.values() for name in names}
        for name in inputs:
            if name not in taken:
                raise ValueError(
                    f"no layer's forward has a parameter named {name!r}; layers take keyword inputs by name"
                )
        last = len(stages) - 1
        runs = {
            stage.index: StageRun(stage, plan, _make_head(head, sizes, rows, stage) if head and j == last else None)
            for j, stage in enumerate(stages)
        }
        lowered = self._lowered(m, recompute if plan.records else frozenset())
        return Call(self._engine, runs, lowered.actions, Inputs(x, inputs, sizes), plan.records)

    def _lowered(self, m: int, recompute: frozenset[tuple[int, int]]) -> Lowered:
        skips = [(stage.index, target) for stage in self._stages for target in stage.targets if target != OUTSIDE]
        return self._schedules.of(m).with_transfers(skips, recompute)

    def close(self) -> None:
        """Ends the worker threads. The pipe stays usable: the next call starts new ones."""
        self._engine.close()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_HeadParts: TypeAlias = tuple[Loss, Structure, Reduction]


def _check_choices(chunks: int, checkpoint: str) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks is the number of microbatches, at least 1, got {chunks!r}")
    if checkpoint not in ("except_last", "always", "never"):
        raise ValueError(f"checkpoint is 'except_last', 'always' or 'never', got {checkpoint!r}")


class _Schedules:
    """The schedule of a pipe, for each number of microbatches that its batches make."""

    def __init__(self, given: str | Schedule, stages: int, ranks: int | None) -> None:
        name = given if isinstance(given, str) else given.name
        self._given = None if isinstance(given, str) else given
        if self._given is not None:
            if self._given.stages != stages:
                raise ValueError(f"the schedule is for {self._given.stages} stages, the balance makes {stages}")
            wanted = self._given.ranks
        elif ranks is None or name not in ("Interleaved1F1B", "ZBV"):
            wanted = default_ranks(name, stages)
        else:
            wanted = ranks
        if ranks is not None and ranks < wanted:
            raise ValueError(
                f"{stages} stages under {name} take {wanted} devices, got {ranks}; name more (CPU may be named "
                "several times), or make the balance shorter"
            )
        self._make = partial(make_schedule, name, stages, ranks=wanted)
        self._made: dict[int, Schedule] = {}
        first = self._given or self._make(1)
        self.rank_of = first.rank_of
        self.splits_backward = first.splits_backward

    def of(self, m: int) -> Schedule:
        if self._given is not None and self._given.microbatches == m:
            return self._given
        if m not in self._made:
            self._made[m] = self._make(m)
        return self._made[m]


def _place(
    split: Sequence[Sequence[Layer]], rank_of: Sequence[int], devices: Sequence[torch.device | str] | None
) -> list[Stage]:
    places = _default_devices(split, max(rank_of) + 1) if devices is None else [torch.device(name) for name in devices]
    routes, shared = route_skips(split), shared_skips(split)
    stages = []
    for j, layers in enumerate(split):
        device = places[rank_of[j]]
        for layer in layers:
            refuse_undrawable(layer.name, layer.module, device)
            layer.module.to(device)
        sources: dict[int, tuple[Route, ...]] = {source: names for (source, k), names in routes.items() if k == j}
        targets: dict[int, tuple[Route, ...]] = {target: names for (k, target), names in routes.items() if k == j}
        if j == 0:
            sources[OUTSIDE] = (None,)
        if j == len(split) - 1:
            targets[OUTSIDE] = (None,)
        stages.append(Stage(j, tuple(layers), device, sources, targets, shared))
    return stages


def _default_devices(split: Sequence[Sequence[Layer]], count: int) -> list[torch.device]:
    tensors = (tensor for layers in split for layer in layers for tensor in layer.module.parameters())
    if next((tensor.is_cuda for tensor in tensors), False):
        available = torch.cuda.device_count()
        if available < count:
            raise ValueError(f"{count} stages need {count} CUDA devices, there are {available}; name devices= to share")
        return [torch.device("cuda", index) for index in range(count)]
    return [torch.device("cpu")] * count


def _recomputed(checkpoint: Checkpoint, n: int, m: int) -> frozenset[tuple[int, int]]:
    last = {"always": m, "except_last": m - 1, "never": 0}[checkpoint]
    return frozenset((j, i) for j in range(n) for i in range(last))


def _with_keywords(stage: Stage, inputs: Iterable[str]) -> Stage:
    keywords = {layer.name: _keywords_of(layer.module, inputs) for layer in stage.layers} if inputs else {}
    names = dict.fromkeys(name for taken in keywords.values() for name in taken)
    if not names:
        return stage
    outside = (*stage.sources.get(OUTSIDE, ()), *names)
    return dataclasses.replace(stage, sources={**stage.sources, OUTSIDE: outside}, keywords=keywords)


def _keywords_of(module: nn.Module, inputs: Iterable[str]) -> tuple[str, ...]:
    parameters = list(inspect.signature(module.forward).parameters)[1:]
    return tuple(name for name in inputs if name in parameters)


def _check_rows(value: Structure, rows: int, what: str) -> None:
    found = count_batch_rows(value, what)
    if found != rows:
        raise ValueError(f"{what} has {found} rows, the batch {rows}; they are cut into the same microbatches")


def _make_head(parts: _HeadParts, sizes: Sequence[int], rows: int, stage: Stage) -> Head:
    loss, target, reduction = parts
    if target is not None:
        _check_rows(target, rows, "the target")
    on_device = map_structure(lambda leaf: leaf.to(stage.device) if isinstance(leaf, Tensor) else leaf, target)
    weights = [size / rows if reduction == "mean" and rows else 1.0 for size in sizes]
    return Head(loss, scatter(on_device, sizes), weights)
