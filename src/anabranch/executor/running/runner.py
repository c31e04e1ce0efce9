"""Runs a training step on any engine: gradients summed over runs and workers, then clipped, then applied.

::

    engine: batch ─> loss ─────────────> gradient final ┐
    sinks:            └ totals on their way             ├> bucket ─> all_reduce ─> wait, divide, clip, optimizers
                                                        └> the servers' window ─> push ─> (norm) ─> vote ─> release

With one worker and no accumulation there is nothing to sum, and the engine runs the whole step. Parameters on servers
(``remote.py``) are read before forward and pushed after backward, in parallel with the buckets.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.autodiff.moved_parameter import Switch, from_within, parameters_here
from anabranch.choices import listed
from anabranch.collectives import GradientBuckets, Workers
from anabranch.errors import BoundaryError, NonFinite
from anabranch.executor.engines.engine import NOTHING, Engine, Fetch, StepOutput
from anabranch.executor.engines.gradients import LossScale, clip_scale, clip_values, elements, nonfinite_error
from anabranch.executor.exchange import exchange
from anabranch.executor.likeness import Drift
from anabranch.executor.loaders.leaf_ids import LeafIds
from anabranch.executor.running.remote import refusal_of
from anabranch.executor.running.window import RemoteWindow, Total, header, total_of
from anabranch.executor.steps import Step, TrainStep, parameters_of
from anabranch.graph.step.joint import accumulate
from anabranch.interrupts import releasing_interrupts
from anabranch.job import Job
from anabranch.tensors import Structure, count_rows
from anabranch.tensors.structures import identical


class StepRunner:
    """Runs one ``TrainStep``.

    Args:
        step: the step to run.
        engine: how its gradients are computed; its sinks are ``servers`` and ``buckets``.
        workers: the group to average over, of more than one; ``None`` trains alone.
        buckets: sum what is here over runs and workers.
        servers: the window of what of the step is on servers, if anything is.
        first: compares the workers' first batches and returns their rows, if there are several workers.
        drift: compares the workers' parameters, if they are to be compared.
        number: of the step among the executor's training steps, the same on all workers.
        ids: learns which rows a batch looks up, if there are tables on servers.
        between: called once the step has read its rows, while there is time to request the next step's.
    """

    def __init__(
        self,
        step: TrainStep,
        engine: Engine,
        workers: Workers | None,
        buckets: GradientBuckets,
        servers: Sequence[RemoteWindow],
        first: Callable[[float, Structure | None], Tensor | None] | None,
        drift: Drift | None,
        *,
        number: int,
        ids: LeafIds | None,
        between: Callable[[], None] | None,
    ) -> None:
        self.step, self.engine, self._buckets, self._servers = step, engine, buckets, servers
        self._number, self._first_batches, self._first = number, first, first
        self.ids, self._between = ids, between
        self._workers, self._drift = workers, drift
        self._rowless = None if workers is None else workers.rowless
        self.decided = 0  # windows that have ended, by a step or without one: the same on all workers that live on
        self.sums = 0.0, 0.0  # of the last run, over all workers: losses times rows, and rows
        self._returned: Mapping[str, Tensor] = {}  # by the loss of the run in progress
        self._alike_at = 0  # the step at which the parameters were last seen to be the same on all workers
        self.runs = 0
        self.steps = 0
        self.in_window = 0  # runs since the last optimizer step
        self._window_rows = 0.0
        self.mean_rows: float | None = None
        self._broken = False
        self._started = False
        optimizers = step.optimizers
        own = (one for one in optimizers if type(one).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(one))
        self._own_zero_grads = [one.zero_grad for one in own]
        self._optimized = [p for optimizer in step.optimizers for p in parameters_of(optimizer)]
        self._known = {*step.model.parameters(), *self._optimized}
        self._calls = 0  # failed ones too: a worker that caught its own error is one ahead of the others
        self.stop_seen = False  # a worker had asked to stop before the last run; the same on all workers
        self.newcomers, self.newcomers_seen = False, False  # they wait: this worker, or any before the last run, saw it
        self.skipped = 0
        self.scale = LossScale() if step.precision == "float16" else None
        self._error: Exception | None = None  # of the run in progress, on all workers
        self._failed: list[str] = []  # the class and text of the error with which the last window has ended on all
        self._clipped = 1.0  # the scale of the step's gradients
        self._closing = False
        self._aside: list[tuple[Tensor, Tensor]] = []
        self.epoch_runs: int | None = 0
        self._alone = self._workers is None and step.accumulate == 1 and not servers
        # Otherwise Python code runs between gradients and optimizers.
        self._whole = step.on_gradients is None and step.clip_grad_value is None and self.scale is None
        self._layout: tuple[bool, ...] | None = None  # which require a gradient
        self._loss_dtype: torch.dtype | None = None
        for window in servers if step.on_gradients is not None else ():
            if there := sorted(window.names):
                warnings.warn(
                    f"on_gradients gets no gradients of {listed(there)}: they go to the servers; keep a parameter here "
                    f"with routes={{{there[0]!r}: 'AllReduce'}}",
                    stacklevel=5,  # where the script makes the Executor
                )

    # Looked up at the first run, when tables have moved to the servers.

    @cached_property
    def _parameters(self) -> list[Tensor]:
        """The model's parameters that are here."""
        return list(parameters_here(self.step.model).values())

    @cached_property
    def _elsewhere(self) -> dict[Tensor, str]:
        """Stand-ins for the others, which may be frozen, and their names."""
        here = set(self._parameters)
        others: dict[Tensor, str] = {p: name for name, p in self.step.model.named_parameters() if type(p) is Switch}
        for servers in self._servers:
            others |= {one.parameter: one.name for one in servers.part.moved if one.parameter not in here}
            others |= {module.on_servers: module.name for module in servers.embeddings}
        return others

    @cached_property
    def _device(self) -> torch.device:
        return self._parameters[0].device if self._parameters else torch.device("cpu")  # some stages only pass on

    def _lay_out(self) -> None:
        """Lay the sinks out for the parameters that now require a gradient: at first, and when that has changed."""
        layout = tuple(map(operator.attrgetter("requires_grad"), (*self._parameters, *self._elsewhere)))
        if layout == self._layout:
            return
        if self._workers is not None:
            for servers in self._servers:
                servers.part.check_unchanged()  # before the others wait for what this worker alone would sum
            with self._in_step():  # unless all workers have frozen the same
                if self._layout is None:
                    self._compare_frozen()
                else:
                    # The others are told in a run without rows: they may know of nothing.
                    self._buckets.start_window()
                    self._start_run(None, 0.0, 0.0, refrozen=True)()
                    self._buckets.launch_rest()
                    self._compare_frozen()
                    self._buckets.finish(1.0)
        self._build(layout)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Do what all workers do together: one that fails in it does not know the state of the others any more."""
        self._broken = self._workers is not None
        yield
        self._broken = False

    def _compare_frozen(self) -> None:
        """Raise ``ValueError`` on all workers if they have not frozen the same parameters."""
        assert self._workers is not None
        names = {parameter: name for name, parameter in self.engine.parameters.items()} | self._elsewhere
        mine = [name for parameter, name in names.items() if parameter.requires_grad]
        sets = [set(one) for one in exchange(self._workers, mine, list[str], "comparison of frozen parameters")]
        if differing := sorted(sets[0].union(*sets) - sets[0].intersection(*sets)):
            raise ValueError(
                f"{', '.join(differing)} is frozen on some workers and not on others (requires_grad_): freeze and "
                "unfreeze the same parameters on all workers, between the same two steps"
            )

    def _build(self, layout: tuple[bool, ...]) -> None:
        self._layout = layout
        known = dict(zip(self._parameters, layout, strict=False))
        summed = {name: p for name, p in self.engine.parameters.items() if known.get(p, p.requires_grad)}
        for servers in self._servers:
            summed = servers.lay_out(summed)
            if summed and not servers.part.alone and self._workers is None:
                raise ValueError(
                    f"{', '.join(summed)} was frozen when the Executor was made and is not now; under this consistency "
                    "the workers do not sum gradients among themselves: make a new Executor"
                )
        with self._in_step():
            self._buckets.lay_out(summed, _sparse_tables(self.step))
        self.engine.lay_out()

    def run(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput:
        """One run on this worker's share of the batch, which has ``rows`` rows."""
        if fetch.names is not None:
            self.engine.check(fetch)
        if self._alone:
            if self._whole and rows > 0 and not fetch.wants_norm:
                ran = self._run_whole(batch, rows, fetch)
                if ran is not None:
                    return ran
            optimized = set(self._optimized)
            others = [p for p in self._parameters if p.grad is not None and p not in optimized]
            # Copies: the originals may be in the buckets.
            self._aside = [(p, p.grad.clone()) for p in others if p.grad is not None]
        elif fetch.wants_norm and self._servers and self.step.clip_grad_norm is None:
            raise ValueError(
                "fetch names 'grad_norm', which with parameters on servers is known only to a step that clips by it; "
                "give the TrainStep clip_grad_norm"
            )
        try:
            return self._run_in_parts(batch, rows, fetch)
        finally:
            self._put_back()

    def _run_in_parts(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput:
        """Run forward and backward; the gradients are summed or checked before the optimizers get them."""
        expected = {} if self.ids is None or not rows > 0 else self.ids.begin(batch)
        self._begin_run(rows, batch)
        for servers in self._servers:
            servers.part.begin(
                training=True,
                fresh=self.in_window == 0,
                expected=expected,
                between=self._between,
                keeps_reads=self.engine.reads_again,
                watches=self.ids is not None and self.ids.watching,
            )
        if not rows > 0:
            return cast(StepOutput, self._add_nothing(fetch, active=True))
        with self._window_kept_whole():
            ran, total = self._differentiate(batch, rows, fetch)
            self._end_run(total, fetch)
        if self.ids is not None:
            for servers in self._servers:
                self.ids.end(servers.part.tables.lookups or (), servers.part.tables.unexpected)
        self._raise_at_end()
        self._returned = {}
        return ran if self._workers is None else StepOutput(self._loss_of(total.loss, total.rows), ran.returned)

    def _differentiate(self, batch: Structure, rows: float, fetch: Fetch) -> tuple[StepOutput, Total]:
        weight = rows if self._averages else 1.0
        factor = self.mean_rows or weight
        seed = weight / factor if self.scale is None else weight / factor * self.scale.value
        started: list[Callable[[], Total]] = []
        with nullcontext() if self._rowless is None else self._rowless.bounded():
            ran = self.engine.differentiate(
                batch, rows, fetch, lambda loss: started.append(self._start_run(loss, weight, factor)), seed
            )
        self._loss_dtype, self._returned = ran.loss.dtype, ran.returned
        self._end_backward()
        return ran, started[0]()

    def run_idle(self, *, active: bool = False) -> StepOutput | None:
        """Return a run of a worker whose loader has ended: adds nothing; ``None`` when that is so on every worker."""
        self._begin_run(0.0)
        for servers in self._servers:
            servers.part.tables.begin(servers.part.clock)
        return self._add_nothing(None, active=active)

    def _add_nothing(self, fetch: Fetch | None, *, active: bool) -> StepOutput | None:
        with self._window_kept_whole(), nullcontext() if self._rowless is None else self._rowless.here():
            total = self._start_run(None, 0.0, 0.0, active=active)()
            if not total.active:
                return None
            self._end_backward()
            self._end_run(total, fetch)
        self._raise_at_end()
        return StepOutput(self._loss_of(total.loss, total.rows), {})

    @property
    def _averages(self) -> bool:
        """True if gradients are weighted by rows; the gradient of a single worker is unchanged, bit for bit."""
        return self.step.reduction == "mean" and (self._workers is not None or self.step.accumulate > 1)

    def _meet(self, rows: float, batch: Structure | None) -> None:
        """Exchange the rows before the first run: the mean that backward starts from is not known from an earlier one.

        Where an operation of the loss sums over the workers, a gradient that comes back from another worker has that
        worker's weight only if its backward started from it. So backward starts from rows / mean rows, and the sums
        are weighted by the mean: equal shards, as in the run before, start from exactly 1.
        """
        if self._first is None:
            return
        with self._in_step():
            counts = self._first(rows, batch)
        if counts is not None:
            self._first = None
            if self.step.reduction == "mean" and self.mean_rows is None:
                self.mean_rows = (counts.sum() / counts.count_nonzero()).item()

    def _end_backward(self) -> None:
        """Let the sinks go on with the run's gradients: the servers' are pushed while the workers' sums arrive."""
        self._buckets.take_rest()
        self._buckets.launch_rest()
        for servers in self._servers:
            servers.end_run()
            if self._closes_window() and not self._looks_first:
                servers.push()

    @property
    def _looks_first(self) -> bool:
        """True if all workers check that the gradients are finite before anything is pushed."""
        first = bool(self.step.skip_nonfinite) or self.engine.first_looks or not self._buckets.empty
        return self.step.skip_nonfinite is not None and first

    def _start_run(
        self, loss: Tensor | None, weight: float, factor: float, *, active: bool = True, refrozen: bool = False
    ) -> Callable[[], Total]:
        """Begin a run of the buckets, and return what waits for its totals.

        The buckets carry its header if they communicate now; else it goes ahead of them.

        Args:
            loss: of this worker.
            weight: the run's, in the mean over runs and workers.
            factor: what its gradients count, which is the weight but where backward started from another number than 1.
            active: whether the worker has a batch.
            refrozen: it only announces that other parameters are frozen here.
        """
        last = self._closes_window()
        for servers in self._servers if not refrozen else ():
            servers.start_run(weight, factor)
        call = 31 * self._calls + self._number  # of this step: no near call of another step has the same, modulo 1024
        flags = {"active": active, "stopping": self.engine.stopping, "refrozen": refrozen, "newcomers": self.newcomers}
        share = header(loss, weight, call, self._device, **flags)
        self._started = True  # before it is so: an interrupt may come between the first message and the next line
        rides = last and self._workers is not None and self._buckets.carries_header
        # The mean rows are the same on all workers and in a whole window: left to the divisor, they cost no pass.
        weight = factor / (self.mean_rows or 1.0)
        # What all rows are divided by, if the workers have as many in each run of the window as in the last one.
        divisor = (self.in_window + 1.0) * self._workers.size if self._averages and self._workers is not None else 1.0
        carried = share if rides else None
        self._buckets.start_run(weight, last=last, header=carried, step=self.runs, divisor=divisor)
        arrived = self._buckets.header if rides else self._buckets.send_header(share, step=call)
        return partial(total_of, arrived, call, self._workers)

    def compare_workers(self) -> None:
        """Raise ``WorkersDiffer`` if the workers' parameters differ by more than rounding; every worker calls it."""
        if self._drift is not None:
            with self._in_step():
                error = self._drift.find(self._alike_at, self.steps)
            if error is not None:
                raise error
            self._alike_at = self.steps

    @contextmanager
    def _window_kept_whole(self) -> Iterator[None]:
        """Discard the open window if the block fails after its run has started, so that no partial sums remain."""
        self._started = False
        pushes, steps = [servers.part.clock for servers in self._servers], self.steps
        try:
            yield
        except BaseException as error:
            for servers, clock in zip(self._servers, pushes, strict=True):
                servers.part.end_failed(clock, counted=self.steps != steps)
            if self._started:
                self._broken = self._workers is not None
                if self.in_window:
                    error.add_note(f"the {self.in_window} runs accumulated before this one are discarded with it")
                self.in_window = 0
            named = None if self._rowless is None else self._rowless.explain(error, self._calls)
            if named is not None:
                self._broken = True
                raise named from error
            raise

    def _run_whole(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput | None:
        """Run the whole step at once: without sinks nothing is summed."""
        self._follow_optimizers()
        if self._own_zero_grads:
            self._call_own_zero_grads()
        for parameter in self._optimized:
            parameter.grad = None
        engine = self.engine
        late = engine.late_check  # which optimizers heed, also those that a graph captures
        with releasing_interrupts(), NOTHING if late is None else late.heeded():
            ran = engine.step(batch, rows, fetch)
            if ran is None:
                return None
            self.runs += 1
            self.stop_seen = engine.stopping
            if engine.late_failed:
                self._uncount()
            if ran.nonfinite:
                self._pass_over(list(ran.nonfinite))
            else:
                self._step_schedulers()
        if self._error is not None:
            self._raise_at_end()
        return ran

    def _uncount(self) -> None:
        """Let the run end in an error: a step before it, which was counted, has updated nothing."""
        self.engine.late_failed = False
        self.steps -= 1
        self._error = nonfinite_error([], self.steps, late=True)

    def check_late(self) -> None:
        """Raise ``NonFinite`` if the last step turns out to have updated nothing, or did so in a run that failed."""
        if self.engine.settle():
            self._uncount()
        if self._alone:
            self._raise_at_end()

    def check_known(self, operation: str) -> None:
        """Raise ``BoundaryError`` if an earlier run ended where nobody knows what the others, or the servers, have.

        Raises:
            NonFinite: see ``check_late``; what is loaded replaces what such a step left.
        """
        if operation == "run":
            if self.engine.settle():
                self._uncount()
        else:
            with suppress(NonFinite) if operation == "load" else nullcontext():
                self.check_late()
        if self._broken:
            raise BoundaryError(
                "an earlier run failed in the middle of its communication, so this worker no longer knows the state "
                "of the others; restart the job from its last checkpoint",
                operation=operation,
                step=self.runs,
            )
        for servers in self._servers if operation != "load" else ():
            servers.part.check_whole()

    def _begin_run(self, rows: float, batch: Structure | None = None) -> None:
        self._calls += 1
        self.check_known("run")
        self._meet(rows, batch)
        self._clear_for_run()

    def _clear_for_run(self) -> None:
        """Start a window if none is open, and clear the gradients of the last run."""
        self._follow_optimizers()
        if self.in_window == 0:
            if self._own_zero_grads:
                self._call_own_zero_grads()
            self._lay_out()
            self._buckets.start_window()
            for servers in self._servers:
                servers.start_window()
            self._window_rows = 0.0
        # The window's sums are in the buckets; a .grad left from the last run would be added to them again.
        for parameter in self._parameters:
            parameter.grad = None

    def _follow_optimizers(self) -> None:
        """Take note of parameters that were given to an optimizer, or taken from it.

        Raises:
            ValueError: one that the model did not have.
        """
        now: list[Tensor] = []
        for optimizer in self.step.optimizers:
            for group in optimizer.param_groups:
                now += group["params"]
        if identical(now, self._optimized):
            return
        for optimizer in self.step.optimizers:
            for parameter in parameters_of(optimizer):
                if parameter not in self._known:
                    raise ValueError(
                        f"{type(optimizer).__name__} was given a parameter of shape {tuple(parameter.shape)} that the "
                        "model did not have when the Executor was made; make a new TrainStep and Executor"
                    )
        self._optimized = now

    def _check_thawed(self) -> None:
        """Raise ``ValueError`` for a parameter that was unfrozen in this run only."""
        assert self._layout is not None
        for parameter, laid_out in zip(self._parameters, self._layout, strict=False):
            if not laid_out and parameter.grad is not None:
                names = {value: name for name, value in self.engine.parameters.items()}
                raise ValueError(
                    f"{names[parameter]!r} was thawed (requires_grad) inside the loss or in an open accumulation "
                    "window; do it between two optimizer steps"
                )

    def _call_own_zero_grads(self) -> None:
        for zero_grad in self._own_zero_grads:
            zero_grad()
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._optimized):
            raise ValueError("zero_grad of an optimizer leaves gradients, to which no step adds; let it clear them")

    def _closes_window(self) -> bool:
        return self._closing or self.in_window + 1 == self.step.accumulate

    def _end_run(self, total: Total, fetch: Fetch | None) -> None:
        if total.refrozen:
            self._compare_frozen()
        self.stop_seen = self.stop_seen or total.stopping > 0
        self.newcomers_seen = self.newcomers_seen or total.newcomers > 0
        self.sums = total.loss, total.rows
        self._window_rows += total.rows
        self.runs += 1
        if not self._closes_window():
            self.in_window += 1
            return
        divisor = self._window_rows / (self.mean_rows or 1.0) if self._averages else 1.0
        # Without any rows the sums are zero or missing.
        self._buckets.finish(divisor or 1.0)
        self._check_thawed()
        self.in_window = 0
        if self.mean_rows is not None and total.rows:
            self.mean_rows = total.rows / total.with_rows
        if self._finish_window(fetch):
            with releasing_interrupts():
                for servers in self._servers:
                    if not servers.part.vote():
                        servers.part.decide(None)
                        self.decided += 1
                        self._failed = ["BoundaryError", _LOST_REFUSAL]
                        self._fail(servers.part.refusal())
                        return
                with from_within():
                    self.engine.update()
                for servers in self._servers:
                    servers.part.decide(self._clipped)
                self._step_schedulers()

    def _finish_window(self, fetch: Fetch | None) -> bool:
        """Prepare the window's gradients for the optimizers; return False if they should not step."""
        step, engine = self.step, self.engine
        bad: list[str] = []
        if self.scale is not None:
            self.scale.unscale(p.grad for p in self._parameters if p.grad is not None)
            bad = self._find_nonfinite()
            self.scale.update(overflow=bool(bad))
        self._put_back()
        if step.on_gradients is not None and not bad:
            step.on_gradients({name: p.grad for name, p in engine.parameters.items() if p.grad is not None})
        if step.skip_nonfinite is not None and (self.scale is None or step.on_gradients is not None):
            bad = bad or self._find_nonfinite()
        if bad:
            self._pass_over(bad)
        for servers in self._servers:
            if bad:
                servers.start_window()  # discard the pending push; where others wait for one, it is empty
            if self._looks_first and not (bad and servers.part.votes):
                servers.push()
        if bad:
            return False
        norm: Tensor | None = None
        if step.clip_grad_norm is not None:
            squares = [servers.squared_norm() for servers in self._servers]
            norm = engine.clip(step.clip_grad_norm, sum(squares) if squares else None)
            self._clipped = clip_scale(norm, step.clip_grad_norm).item() if self._servers else 1.0
        elif fetch is not None and fetch.wants_norm:
            norm = engine.norm()
        if step.clip_grad_value is not None:
            clip_values(elements(self._parameters), step.clip_grad_value)
        if fetch is not None:
            fetch.norm = norm
        return True

    def _put_back(self) -> None:
        """Add the run's gradients of parameters that no optimizer clears to their earlier ones."""
        for parameter, earlier in self._aside:
            new, parameter.grad = parameter.grad, earlier
            if new is not None:
                accumulate(parameter, new)
        self._aside = []

    def _find_nonfinite(self) -> list[str]:
        """Return the parameters whose gradients are not finite, the same on all workers."""
        across = self.engine.first_looks
        seen = self._buckets.finite and self._workers is not None and not across and self.step.on_gradients is None
        seen = seen and self.scale is None  # what was finite may not be once it is unscaled
        names = [] if seen else self.engine.nonfinite()
        for servers in self._servers if self.step.skip_nonfinite else ():
            names += servers.nonfinite()
            if self._workers is not None and not across:  # names are exchanged where there are any
                bad = torch.tensor([float(len(names))], device=self._device)
                if not self._workers.all_reduce(bad, operation="all_reduce of steps to skip", step=self.runs).item():
                    return []
            if self._workers is not None or across:
                names = sorted({name for (theirs,) in servers.part.gather([names]) for name in theirs})
        return names

    def _pass_over(self, names: list[str]) -> None:
        """Skip the step, or let it end in an error."""
        named, optimized = self.engine.parameters, set(self._optimized)
        for name in names:
            if name in named and named[name] not in optimized:
                named[name].grad = None  # no optimizer clears it, and it would make all later steps non-finite
        self.decided += 1
        if self.step.skip_nonfinite:
            self.skipped += 1
            self._failed = []
        else:
            self._fail(nonfinite_error(names, self.steps))

    def _fail(self, error: Exception) -> None:
        if self._error is not None:  # of the step before, see ``_uncount``
            error.add_note(f"before it, {self._error}")
        self._error, self._failed = error, [type(error).__name__, str(error)]

    def _raise_at_end(self) -> None:
        """Raise the error of the run, once every worker has ended it in the same way."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._drift is not None and self.steps - self._alike_at >= self._drift.every:
            self.compare_workers()

    def _step_schedulers(self) -> None:
        for scheduler in self.step.schedulers:
            scheduler.step()
        self.steps += 1
        self.decided += 1
        self._failed = []

    def _loss_of(self, loss: float, rows: float) -> Tensor:
        value = loss / rows if self.step.reduction == "mean" and rows else loss
        # Until a loss was seen the parameters' type: a worker may have no rows at first.
        dtype = self._loss_dtype or (self._parameters[0].dtype if self._parameters else torch.float32)
        return torch.tensor(value, dtype=dtype, device=self._device)

    @contextmanager
    def in_epoch(self, length: int | None) -> Iterator[None]:
        """Count the run of the block, which takes a loader's batch, in an epoch of ``length``; the last may flush."""
        last = length is not None and self.epoch_runs is not None and self.epoch_runs + 1 >= length
        self._closing = last and self.step.flush == "step"
        try:
            yield
            if last and self.step.flush == "drop" and self.in_window:
                self.in_window = 0
                self.decided += 1
        finally:
            self._closing = False
            if self.epoch_runs is not None:
                self.epoch_runs += 1

    def end_epoch(self) -> None:
        """Step with the open window, or discard it, according to the step's ``flush``."""
        self.epoch_runs = 0
        if self.in_window and self.step.flush == "step":
            self._closing = True
            try:
                self.run_idle(active=True)
            finally:
                self._closing = False
            self.runs -= 1  # it was not one of the caller's
        elif self.step.flush == "drop":
            self.in_window = 0

    def check_window_closed(self, name: str) -> None:
        """Raise ``RuntimeError`` if an accumulation window is open."""
        if self.in_window:
            left = self.step.accumulate - self.in_window
            raise RuntimeError(
                f"step {name!r} has run {self.in_window} of the {self.step.accumulate} runs that one optimizer step "
                f"accumulates, and a checkpoint is of an optimizer step; save after {left} more "
                f"(executor.stopping is true only there)"
            )

    # Another membership of the workers.

    def counts(self) -> dict[str, Any]:
        """Return all that a window changes of this object, in between two of them."""
        counts = self.state()  # taken before each window: no loop over names
        counts["decided"] = self.decided
        counts["ended"] = self.skipped, self.stop_seen, self.sums, self._failed
        counts["servers"] = [servers.part.progress() for servers in self._servers] if self._servers else []
        return counts

    def begin_again(self, counts: Mapping[str, Any]) -> None:
        """Go back to between two windows, or on to there, with workers that are others than before."""
        for servers, progress in zip(self._servers, counts["servers"], strict=True):
            servers.part.begin_again(*progress)
        self.restore(counts, as_many_rows=False, in_epoch=True)
        self.decided = counts["decided"]
        self.skipped, self.stop_seen, self.sums, self._failed = counts["ended"]
        if self._workers is not None:
            self._rowless = self._workers.rowless
        self._layout, self._broken, self._error = None, False, None  # the buckets are laid out anew
        self.newcomers = self.newcomers_seen = False

    def last_result(self) -> StepOutput:
        """Return the last run's output, or raise its error, also where another worker has had its totals."""
        if self._failed:
            raise refusal_of(*self._failed)
        returned, self._returned = self._returned, {}
        return StepOutput(self._loss_of(*self.sums), returned)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "runs": self.runs,
            "steps": self.steps,
            "mean_rows": self.mean_rows,
            "epoch_runs": self.epoch_runs,
            "loss_scale": self.scale and self.scale.state(),
        }

    def restore(self, state: Mapping[str, Any], *, as_many_rows: bool, in_epoch: bool) -> None:
        """Continue where another runner stood.

        Args:
            state: of that.
            as_many_rows: there are as many pipelines, else the mean is another: they exchange their rows again.
            in_epoch: the loader continues within its epoch, else how far it is shows at the next one.
        """
        self.mean_rows = state["mean_rows"] if self._workers is not None and as_many_rows else None
        if self._workers is not None and self.mean_rows is None:
            self._first = self._first_batches
        self.runs, self.steps, self._alike_at = state["runs"], state["steps"], state["steps"]
        self.epoch_runs = state["epoch_runs"] if in_epoch else None
        if self.scale is not None and state["loss_scale"]:
            self.scale.restore(state["loss_scale"])
        self._calls = 0  # on all workers: one of them may have been interrupted before it began a run
        self.in_window = 0


_LOST_REFUSAL = "the push of a worker that is lost since was refused, and nothing was applied"


def rows_of(step: Step, batch: Structure) -> float:
    """Return the weight of a batch.

    Raises:
        ValueError: its tensors disagree in rows, or ``rows(batch)`` gave no number of at least 0.
    """
    rows = float(count_rows(batch) if step.rows is None else step.rows(batch))
    if not 0 <= rows < float("inf"):
        raise ValueError(f"rows(batch) gave {rows!r}; the weight of a batch is a finite number of at least 0")
    return rows


ShareOf: TypeAlias = Callable[[Job], Structure]
"""A batch as a function: returns the share of the worker that the job says."""


_FUNCTIONS = (FunctionType, MethodType, partial)


def is_share(batch: object) -> TypeGuard[ShareOf]:
    """Return True for a batch as a function; objects that can be called, as PyTorch Geometric's graphs, are data."""
    return isinstance(batch, _FUNCTIONS)


def _sparse_tables(step: TrainStep) -> list[str]:
    """Return the parameters whose gradients are sparse."""
    found = {
        module.weight
        for module in step.model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    for optimizer in step.optimizers:
        if isinstance(optimizer, torch.optim.SparseAdam):  # which takes no others
            found.update(parameter for group in optimizer.param_groups for parameter in group["params"])
    return [name for name, parameter in parameters_here(step.model).items() if parameter in found]
