"""``Pipe``: a ``nn.Sequential`` split into stages, used like the original module.

The file is long because it is the whole interface of a pipe: a module's methods, a step's, the checks of user input,
and ``PipeRanks``, an Executor's operations; stages, schedules and messages are in other files.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, SupportsIndex, TypeAlias, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.autodiff.thread_modes import ThreadModes
from anabranch.choices import choice
from anabranch.deadline import check_seconds
from anabranch.job import job
from anabranch.pipeline.engine import StageEngine
from anabranch.pipeline.links.connection import Facts, RankConnection
from anabranch.pipeline.microbatch import Batch, microbatch_sizes, scatter
from anabranch.pipeline.parts.model_part import PartedModel
from anabranch.pipeline.parts.part_program import SplitCall
from anabranch.pipeline.parts.tracing import opened_by
from anabranch.pipeline.pipe_call import (
    Args,
    Loss,
    MakeHead,
    Named,
    PipeCall,
    Reduction,
    Tie,
    deliver,
    make_head,
    open_portal,
    refuse_hidden_gradients,
    with_keywords,
)
from anabranch.pipeline.schedule import PipeSchedules, Schedule
from anabranch.pipeline.stage import stage_placement
from anabranch.pipeline.stage.deferred_batch_norm import defer_batch_norms
from anabranch.pipeline.stage.packet import cloned
from anabranch.pipeline.stage.partition import Layer, flatten_layers, keywords_of, outline, refuse_changes, split_layers
from anabranch.pipeline.stage.skips import verify_skippables
from anabranch.pipeline.stage.stage import StagePlan, StageRun
from anabranch.tensors import Structure
from anabranch.tensors.dtypes import dtype_name, dtype_named

_LEFT_OUT = cast("dist.ProcessGroup", object())
"""An argument was not passed: no process group, not even ``None``, which ``dist.group.WORLD`` is before it is
initialised; or no target."""


def _count_workers() -> int:
    return dist.get_world_size() if dist.is_initialized() else job().workers


Checkpoint: TypeAlias = Literal["except_last", "always", "never"]
"""The microbatches that keep no activations and run forward again before backward."""


Output: TypeAlias = Literal["last", "all"]
"""The ranks on which a call returns the output: the last stage's, or all."""


_SETTINGS = frozenset({"calls", "checkpoint", "chunks", "elsewhere", "output", "process_group", "seed"})
"""Attributes of a pipe, whatever the names in its module."""


@dataclass
class StepResult:
    """Results of a scheduled step; ``None`` on ranks without the last stage.

    Attributes:
        loss: the whole batch's loss, a tensor of no dimensions, without a graph.
        output: the model's output for the whole batch, without a graph; joined when it is first read.
    """

    loss: Tensor | None
    _outputs: list[Structure]
    _join: Callable[[list[Structure]], Structure]

    @cached_property
    def output(self) -> Structure:
        joined = self._join(self._outputs) if self._outputs else None
        self._outputs = []  # not before: what cannot be joined is an error each time
        return joined


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

    Gradients are those of the unsplit module. The layers still belong to the module: parameters, names in state
    dicts, ``train`` and ``eval`` are shared with it.

    Args:
        module: the layers; nested ``nn.Sequential`` count as the layers inside.
        balance: the number of children of ``module`` (or flattened layers) in each stage; or ``"time"`` or ``"size"``:
            found from ``sample`` by ``balance_by_time`` or ``balance_by_size``.
        devices: the device of each stage, or rank of the schedule; CPU may be named several times, and is by default.
        chunks: the most microbatches to cut a batch into.
        checkpoint: the microbatches that run forward twice, to keep no activations in between.
        schedule: a schedule's name, or one made by ``make_schedule``.
        process_group: the ranks to run on, one process each, in place of devices; making the pipe is then a collective.
            Every rank makes the same calls; ``x`` is read on the first stage's rank, targets on the last one's. In
            ``module`` the parameters of other ranks are placeholders from then on. Left out: this process alone.
        heartbeat: seconds between two checks of ranks that are waited for.
        deferred_batch_norm: make the running statistics of BatchNorm those of the whole batch; not of a subclass with
            a forward of its own (``SyncBatchNorm`` too), which is refused.
        output: across ranks the rank on which ``pipe(x)`` returns the output: ``"last"`` (the last stage's) or
            ``"all"``.
        sample: a batch of the size of a microbatch, for ``balance="time"`` and ``"size"``.
        seed: of the random numbers drawn in stages; ``torch.initial_seed()`` by default.
        timeout: seconds that a call may take before it ends with ``DeadlineExceeded``.

    Attributes:
        chunks: may be changed between calls.
        checkpoint: may be changed between calls.
        output: may be changed between calls, on all ranks.
        calls: the number of calls so far; the next one's position in the random stream. Set it when training resumes.
        seed: of the random stream; the one of the first stage's rank counts.
        process_group: its ranks, ``None`` in one process.
        elsewhere: the names in the unsplit module's state dict that are on other ranks only.

    Raises:
        TypeError: ``module`` is not a ``nn.Sequential``.
        SkipError: its skips do not match.
        ValueError: balance, devices, chunks or schedule do not fit; the message names values that would.

    Source: GPipe (Huang et al., 2019); torchgpipe (Kim et al., 2020).
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | Literal["time", "size"],
        devices: Sequence[torch.device | str] | None = None,
        chunks: int = 1,
        checkpoint: Checkpoint = "except_last",
        schedule: str | Schedule = "GPipe",
        deferred_batch_norm: bool = False,
        output: Output = "last",
        process_group: dist.ProcessGroup | None = _LEFT_OUT,
        *,
        sample: Structure = None,
        seed: int | None = None,
        timeout: float = 1800.0,
        heartbeat: float = 1.0,
    ) -> None:
        super().__init__()
        check_seconds(timeout=timeout, heartbeat=heartbeat)
        if process_group is None and _count_workers() > 1:
            raise ValueError(
                f"process_group=None in a job of {_count_workers()} workers, each of which would train alone: call "
                "torch.distributed.init_process_group before, or leave process_group out for a pipe in this process"
            )
        self._left_out = process_group is _LEFT_OUT
        process_group = None if self._left_out else process_group
        self.chunks, self.checkpoint, self.output = chunks, checkpoint, output
        layers = flatten_layers(module)
        verify_skippables(nn.ModuleList(module.parts()) if isinstance(module, PartedModel) else module)
        if deferred_batch_norm:
            defer_batch_norms(module)
            layers = flatten_layers(module)
        places = stage_placement.count_places(devices, process_group)
        if isinstance(balance, str):
            balance = stage_placement.find_balance(balance, module, sample, schedule, places, process_group)
        split = split_layers(module, layers, balance)
        self._schedules = PipeSchedules(schedule, len(split), places, exactly=process_group is not None)
        rank_of = self._schedules.rank_of
        rank = None if process_group is None else dist.get_rank(process_group)
        self._here = [j for j in range(len(split)) if rank in (None, rank_of[j])]
        self._stages = stage_placement.place_stages(split, rank_of, devices, self._here)
        self._source = module.split_source if isinstance(module, PartedModel) else None
        self.process_group = process_group
        self._adopt(
            module if process_group is None else stage_placement.part_of(module, [split[j] for j in self._here])
        )
        roots: list[nn.Module] = [module, module.unsplit if isinstance(module, PartedModel) else module, self.module]
        self._roots = list(dict.fromkeys(roots))
        self._inside = {child for layer in layers for child in layer.module.modules()}.intersection(module.modules())
        here = set(self.parameters())
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        self._others = {parameter: name for parameter, name in self._names.items() if parameter not in here}
        self._outlines = [outline(root, self._inside) for root in self._roots]
        self.elsewhere = frozenset(module.state_dict(keep_vars=True)) - frozenset(self.state_dict(keep_vars=True))
        if not isinstance(seed, SupportsIndex | None):
            raise TypeError(f"seed is a whole number, got {seed!r}")
        self.seed = torch.initial_seed() if seed is None else operator.index(seed)
        self.calls = 0
        self._plans: dict[tuple[int, str], tuple[Schedule, frozenset[tuple[int, int]]]] = {}
        self._anchor = None if process_group is None else torch.empty(0, requires_grad=True, device="cpu")
        self._ties: list[Tie] = []
        connection = None
        if process_group is not None:
            likeness = stage_placement.describe_split(split, self._schedules, self._here)
            connection = RankConnection(process_group, heartbeat, likeness)
        self._engine = StageEngine(rank_of, timeout, connection)
        if process_group is not None:
            self._ties = stage_placement.find_ties(split, rank_of, process_group)
            stage_placement.leave_to_others(split, rank_of, self._others, process_group)

    def __setattr__(self, name: str, value: object) -> None:
        # Bypasses nn.Module's, which would confuse these with a child or tensor of the module with such a name.
        if name in ("checkpoint", "output"):
            value = choice(name, value, get_args(Checkpoint if name == "checkpoint" else Output))
        elif name == "chunks" and (value is True or not isinstance(value, SupportsIndex) or operator.index(value) < 1):
            raise ValueError(f"chunks is the number of microbatches, at least 1, got {value!r}")
        if name in _SETTINGS:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)  # type: ignore[arg-type]

    def _adopt(self, module: nn.Module) -> None:
        # The children are the module's own, under the same names, so that names do not mention the pipe. Set past
        # nn.Module's attributes, which would register the module as one more child.
        self.__dict__["_module"] = module
        for kind in ("_modules", "_parameters", "_buffers", "training"):
            self.__dict__[kind] = module.__dict__[kind]

    @property
    def module(self) -> nn.Module:
        """The layers of this process: all of them, or those of this rank's stages under their own names."""
        return self.__dict__["_module"]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        """Return the number of layers of this process: of all of them, or of those of this rank's stages."""
        return len(self._layers_here())

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer of this process; the layers inside nested ``nn.Sequential`` count, as in ``balance``.

        >>> inner = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))
        >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 4), inner), [1, 2])
        >>> pipe[-1], len(pipe), pipe.balance
        (Linear(in_features=4, out_features=2, bias=True), 3, [1, 2])

        Raises:
            IndexError: there are fewer layers here.
        """
        return self._layers_here()[index].module

    def __iter__(self) -> Iterator[nn.Module]:
        """Return the layers of this process, in the order they run."""
        return (layer.module for layer in self._layers_here())

    def _layers_here(self) -> list[Layer]:
        return [layer for j in self._here for layer in self._stages[j].layers]

    def extra_repr(self) -> str:
        """Return the assignment of layers, and the order of the work."""
        return f"balance={self.balance}, schedule={self._schedules.name!r}, chunks={self.chunks}"

    @property
    def balance(self) -> list[int]:
        """The number of layers in each stage, on all ranks."""
        return [len(stage.layers) for stage in self._stages]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage of this process."""
        return [self._stages[j].device for j in self._here]

    @property
    def output_rank(self) -> int:
        """The rank, in the process group, of the last stage; 0 in one process."""
        return 0 if self.process_group is None else self._schedules.rank_of[-1]

    def forward(self, *args: Structure, **inputs: Structure) -> Structure:
        """Return the module's output, differentiable; its backward runs the schedule's backward half.

        >>> class Scale(nn.Module):
        ...     def forward(self, x, factor=None):
        ...         return x * factor
        >>> pipe = Pipe(nn.Sequential(nn.Bilinear(2, 3, 4), Scale()), [1, 1], chunks=2)
        >>> pipe(torch.ones(6, 2), torch.ones(6, 3), factor=2.0).shape
        torch.Size([6, 4])

        Args:
            args: positional inputs of the first layer: tensors in any nesting, cut into microbatches along their rows
                (dim 0), on which they agree. Numbers, strings, ``None``, tensors of no dimensions and what ``NoChunk``
                wraps go to every microbatch. Read on the first stage's rank.
            inputs: keyword inputs, each for all layers whose ``forward`` has a parameter of that name; cut like
                ``args``. Across ranks every rank passes those that its layers take, the first one all of them.

        Raises:
            TypeError: a keyword that no layer takes.
            ValueError: tensors that disagree in rows, or none to cut.
            BaseException: any exception of a stage, with a note of stage, microbatch and phase.
        """
        with self._turn("forward"):
            call = self._call(args, inputs)
            if call.differentiable:
                self._warn_if_alone(5)  # forward, and two calls inside torch, are between
                outputs = open_portal(call)
            else:
                outputs, _ = call.forward()
            if call.has_output or call.output_rank is not None:
                output = call.output(outputs)
                refuse_hidden_gradients(output)
            else:
                output = outputs[0] if outputs else torch.empty(0, device="cpu")
            call.check()
            return output

    def train(self, mode: bool = True) -> Pipe:
        """Set the mode of the layers, and of the model that was split into them, whose code may read it."""
        if isinstance(self._roots[0], PartedModel):
            self._roots[0].train(mode)
        super().train(mode)
        return self

    def step(
        self,
        *args: Structure,
        target: Structure = _LEFT_OUT,
        loss: Loss,
        reduction: Reduction = "mean",
        rows: Callable[..., float | Tensor] | None = None,
        **inputs: Structure,
    ) -> StepResult:
        """One scheduled forward and backward; gradients accumulate as by ``loss(...).backward()``.

        >>> pipe = Pipe(nn.Sequential(nn.Bilinear(2, 3, 1), nn.Tanh()), [1, 1], chunks=2)
        >>> x, y, target = torch.ones(6, 2), torch.ones(6, 3), torch.ones(6, 1)
        >>> pipe.step(x, y, target, loss=nn.functional.mse_loss).output.shape
        torch.Size([6, 1])

        Args:
            args: positional inputs, as for calling the pipe, and if there are several the target last, unless
                ``target=`` names it.
            target: the loss's second argument, split into microbatches like the inputs; may be ``None``.
            loss: from output and target to one number. A module's parameters are trained too.
            reduction: ``"mean"`` if that number is a mean over rows (microbatches weigh by theirs), or ``"sum"``.
            rows: ``rows(*args, target)``, called on the last stage's rank with each microbatch of its positional inputs
                and target, returns what that mean is over, such as the number of tokens that are not padding; 0 leaves
                the microbatch out.
            inputs: keyword inputs, as for calling the pipe.

        Raises:
            TypeError: as for calling the pipe.
            ValueError: as for calling the pipe, or if the rows of ``target`` differ from those of the inputs, or
                ``rows`` is given for sums.
            BaseException: any exception of a stage; no gradient has accumulated then.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is 'mean' or 'sum', got {reduction!r}")
        if reduction == "sum" and rows is not None:
            raise ValueError("rows= weighs the means of microbatches, and reduction='sum' adds sums up; leave one out")
        self._warn_if_alone(3)
        with self._turn("step"):
            if target is _LEFT_OUT:
                args, target = (args[:-1], args[-1]) if len(args) > 1 else (args, None)
            batch = *args, target
            weigh = None if rows is None else lambda sizes: [rows(*part) for part in scatter(batch, sizes)]
            head = partial(make_head, loss=loss, reduction=reduction, weigh=weigh)
            call = self._call(args, inputs, target, head)
            outputs, grads = call.step()
        # Only after every rank has done its part: a step that fails on any rank leaves no gradient.
        if call.plan.records:
            deliver(call.leaves, grads)
        return StepResult(call.loss(), outputs, call.output)

    def _warn_if_alone(self, stacklevel: int) -> None:
        """Warn once that other workers have pipes of their own, whose gradients an Executor would share."""
        if self._left_out and _count_workers() > 1:
            warnings.warn(
                f"this Pipe is in one of {_count_workers()} workers without process_group=, so each worker trains a "
                "model of its own; pass process_group= for stages in several workers, or train it in an Executor",
                stacklevel=stacklevel,
            )
        self._left_out = False

    @contextmanager
    def _turn(self, operation: str) -> Iterator[None]:
        """Take a turn that runs the layers forward."""
        with self._engine.turn(operation, self.calls):
            try:
                yield
            except BaseException:
                if self._source is not None:
                    self._source.forms.clear()  # one of them may be another's now
                raise

    def _call(
        self, args: Args, inputs: Named, target: Structure = None, head: MakeHead | None = None, rows: int | None = None
    ) -> PipeCall:
        for root, before in zip(self._roots, self._outlines, strict=True):
            refuse_changes(before, outline(root, self._inside))
        if isinstance(self._roots[0], PartedModel):
            self._roots[0].refresh()
        modes = ThreadModes.take()
        split = None if self._source is None else SplitCall(self._source.trace)
        # Inputs are read on the first stage's rank alone, and the target on the last one's.
        last = len(self._stages) - 1
        batch = Batch(args if 0 in self._here else (), inputs, target if last in self._here else None)
        records = modes.grad and not modes.inference
        facts = self._engine.agree(lambda: self._facts(batch, args, inputs, records, split))
        self.calls = facts.step + 1
        if split is not None and 0 not in self._here:
            split.learn(facts.kinds, facts.sizes, dist.get_rank())
        if rows not in (None, sum(facts.sizes)):
            theirs = f"the first stage's batch has {sum(facts.sizes)} rows"
            raise ValueError(f"{theirs}, this rank's {rows}; the ranks of a pipeline take the same batch")
        named = inputs or facts.keywords
        taken = self._keywords_taken(facts, batch, len(args) if 0 in self._here else 0) if named else {}
        schedule, recompute = self._planned(len(facts.sizes), self.checkpoint if records else "never")
        outside = batch.memory() if recompute else ()
        splits = self._schedules.splits_backward
        plan = StagePlan(modes, facts.seed, facts.step, facts.sizes, recompute, splits, records, outside, split)
        if records != facts.records:
            raise ValueError("some ranks call the pipe with gradients and some without; call it in one mode on all")
        if self.output != facts.output:
            raise ValueError(f"pipe.output is {facts.output!r} on the first stage's rank and {self.output!r} here")
        runs = {}
        for j in self._here:
            stage = with_keywords(self._stages[j], taken) if taken else self._stages[j]
            end = head if j == last else None
            loss = None if end is None else end(batch.target, facts.sizes, stage.device, self.module)
            runs[j] = StageRun(stage, plan, loss)
        if self._others and records:
            here = set(self.parameters())
            untied = [p for _, p, _ in self._ties if p.requires_grad and p not in here]
            for changed in [*here.intersection(self._others), *untied]:
                raise ValueError(f"{self._names[changed]} was tied or untied after Pipe(...); make a new Pipe")
        to_all = self.output == "all" and head is None and self.process_group is not None
        output_rank = self.output_rank if to_all else None
        return PipeCall(self._engine, runs, schedule.actions, batch, plan, self._ties, self._anchor, output_rank)

    def _facts(self, batch: Batch, args: Args, inputs: Named, records: bool, split: SplitCall | None) -> Facts:
        sizes = microbatch_sizes(batch.rows(), operator.index(self.chunks))
        kinds: list[tuple[str, Structure]] = []
        if split is not None:
            taken = keywords_of(self._stages[0].layers[0], inputs, len(args))
            mine = args, {name: inputs[name] for name in taken}
            kinds = split.prepare(mine, sizes, records=records, tells=self.process_group is not None)
        return Facts(self.calls, self.seed % 2**64, sizes, records, self.output, sorted(inputs), kinds)

    def _keywords_taken(self, facts: Facts, batch: Batch, args: int) -> dict[str, tuple[str, ...]]:
        """Return for each layer the keyword inputs that it takes, those of this process checked."""
        inputs = {name: part for name, part in batch.inputs.items() if name is not None}
        layers = [layer for stage in self._stages for layer in stage.layers]
        names = dict.fromkeys([*inputs, *facts.keywords])
        taken = {layer.name: keywords_of(layer, names, 1 if i else args) for i, layer in enumerate(layers)}
        for name, part in inputs.items():
            if not any(name in names for names in taken.values()):
                first = f"the first layer, {type(layers[0].module).__name__}, got {args} inputs by position"
                raise TypeError(f"no layer's forward has a parameter named {name!r}; {first}")
            part.check_rows(sum(facts.sizes))
            trained = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in part.leaves)
            if facts.records and trained and len(self._here) < len(self._stages):
                raise ValueError(
                    f"{part.what} requires gradients, which do not cross between ranks to a keyword: pass it "
                    "positionally to the first layer, and stash it there for later ones, or detach it"
                )
            if name not in facts.keywords:
                raise ValueError(f"{part.what} is missing on the first stage's rank: pass it there too")
        for layer in self._layers_here():
            for name in taken[layer.name]:
                if name not in inputs:
                    raise ValueError(f"layer {layer.name!r} takes the keyword input {name!r}: pass it on its rank too")
        return taken

    def _planned(self, m: int, checkpoint: Checkpoint) -> tuple[Schedule, frozenset[tuple[int, int]]]:
        """Return the schedule for ``m`` microbatches, and the stages and microbatches that run forward again."""
        if (m, checkpoint) not in self._plans:
            last = {"always": m, "except_last": m - 1, "never": 0}[checkpoint]
            recompute = frozenset((stage.index, i) for stage in self._stages for i in range(last))
            self._plans[m, checkpoint] = self._schedules.of(m).recomputing(recompute), recompute
        return self._plans[m, checkpoint]

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, *, elsewhere: float | None = None) -> Tensor:
        """Scale all stages' gradients so that their norm, as one vector, is at most ``max_norm``.

        Across ranks every rank calls it. A tied parameter counts once, as in the unsplit module.

        Args:
            max_norm: the largest norm that all gradients may have together.
            norm_type: of the norm.
            elsewhere: the sum of squares of further gradients that are on no rank; with the 2-norm only.

        Returns:
            The norm before, a tensor of no dimensions, the same on every rank.
        """
        total = PipeRanks(self).grad_norm(norm_type)
        if elsewhere is not None:
            total = (total.double().square() + elsewhere).sqrt()
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for value in _gradients(self).values():
            value.mul_(scale.to(value.device))
        return total

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
        """Return the optimizer's state of each of this process's parameters, by the parameter's name in the unsplit
        module.

        It fits any other split: ``load_optimizer_state_dict`` takes the parts for its own parameters.
        """
        states = {id(parameter): state for parameter, state in optimizer.state.items()}
        return {name: dict(states[id(p)]) for p, name in PipeRanks(self).first_names().items() if id(p) in states}

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Mapping[str, object]]
    ) -> None:
        """Load the state from ``optimizer_state_dict``, of this or another split, into ``optimizer``.

        Raises:
            ValueError: a trained parameter whose state is missing while others have one.
        """
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        mine = {name: p for p, name in PipeRanks(self).first_names().items() if id(p) in trained}
        missing = [name for name in mine if name not in state_dict]
        if state_dict and missing:
            raise ValueError(f"the optimizer's state of {missing} is missing; merge the states of all ranks that saved")
        for name, parameter in mine.items():
            if name in state_dict:
                optimizer.state[parameter] = cloned(dict(state_dict[name]))

    def describe(self) -> str:
        """Return a table of the stages: layers, parameters, and of the last call the times, boundary bytes and
        skips.
        """
        what = f"{self._schedules.name}, at most {self.chunks} microbatches, checkpoint {self.checkpoint}"
        title = f"{what}; times and bytes of the last call, bytes a microbatch"
        return stage_placement.describe(self._stages, self._schedules.rank_of, self._engine.observed, title)

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load this rank's part of ``state_dict``; names on other ranks are left out."""
        mine = {name: value for name, value in state_dict.items() if name not in self.elsewhere}
        return super().load_state_dict(mine, strict, assign)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the worker threads. In one process the pipe stays usable: the next call starts new ones."""
        self._engine.close()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class PipeRanks:
    """An Executor's operations on all ranks of ``pipe``, beside a module's calls and steps."""

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
        pipe = self._pipe
        with pipe._engine.turn("clip_grad_norm", pipe.calls) as turn:
            elsewhere = {id(parameter) for _, parameter, ranks in pipe._ties if ranks[0] != turn.rank}
            values = [value for p, value in _gradients(pipe).items() if id(p) not in elsewhere]
            norms = [torch.linalg.vector_norm(value, norm_type).cpu() for value in values]
            shares = turn.share("norms", torch.stack(norms) if norms else torch.zeros(0, device="cpu"))
        # The norm of all parameters' norms, in their order: bit for bit the norm of the unsplit module.
        parts = [cast(Tensor, share) for share in shares if share.numel()]
        return torch.linalg.vector_norm(torch.cat(parts), norm_type) if parts else torch.zeros((), device="cpu")

    def first_names(self) -> Mapping[Tensor, str]:
        """Return this process's parameters and their names in the unsplit module; a tied one has its first name
        there.
        """
        here = set(self._pipe.parameters())
        named = self._pipe._roots[0].named_parameters()
        return {parameter: name for name, parameter in named if parameter in here}

    def join_executor(self) -> None:
        """Do not warn that each worker trains alone: the Executor shares the gradients."""
        self._pipe._left_out = False

    @property
    def bytes_sent(self) -> int:
        """The bytes of tensors that this rank has sent to others; 0 in one process."""
        return self._pipe._engine.bytes_sent

    @property
    def submodules(self) -> frozenset[str]:
        """The qualified names of all modules in the unsplit one."""
        return frozenset(name for name, _ in self._pipe._roots[0].named_modules() if name)

    def modules(self) -> list[nn.Module]:
        """Return the modules whose modes ``train`` sets; some of a split model are in no stage here."""
        return [module for root in (self._pipe, *self._pipe._roots) for module in root.modules()]

    def opened(self) -> dict[str, nn.Module]:
        """Return the modules around the cuts of a split model, by name: its code reads their modes.

        There are none of other models. What such a part runs was traced: parameters must be tensors with values here.
        """
        source = self._pipe._source
        return {} if source is None else {path: source.model.get_submodule(path) for path in opened_by(source.at)}

    def tied(self) -> frozenset[Tensor]:
        """Return this process's parameters that stages on other ranks use too."""
        return frozenset(parameter for _, parameter, _ in self._pipe._ties)

    def align_ties(self) -> None:
        """Give a parameter shared by several ranks the gradient of the first of them; all ranks call it."""
        with self._pipe._engine.turn("align_ties", self._pipe.calls) as turn:
            for index, parameter, ranks in self._pipe._ties:
                parameter.grad = turn.share(index, parameter.grad, ranks)[0]


def _gradients(pipe: Pipe) -> dict[Tensor, Tensor]:
    """Return the numbers in each ``.grad``, to read and to scale in place; a sparse one's rows, duplicates merged."""
    grads: dict[Tensor, Tensor] = {}
    for parameter in parameters_here(pipe).values():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        if parameter.grad is not None:
            grads[parameter] = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
    return grads
