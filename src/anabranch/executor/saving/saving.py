"""Saving and loading an executor's state, also with another number of workers.

::

    group "model"         parameters and buffers of every model, under the model's own names   (rank 0's)
    group "optimizer"     the tensors in the optimizers' states, by parameter name             (rank 0's)
    group "servers.<..>"  what is on servers, with state and stamps, as stored on the shards: streamed from there
    group "state"         the tensors in all other state: of schedulers, modules, the user's objects, and of each worker
                          its random number generators, loader positions, and buffers that differ from rank 0's
    state                 everything that is not a tensor: whose run it is and how many ranks saved it; "optimizers" and
                          "schedulers" by step; "ranks": of each its generators, loaders, counts, pipes and buffers;
                          "servers": what they say of their groups; "moved": the names of each parameter there; "extra":
                          modules' own state; "modes": what is frozen; "objects": the user's

Rank 0 writes; the state of single workers is gathered first. Parameters are identified by name, not by position.
What was saved from servers is loaded there as it is, where it lives there again, else put into model and optimizer; so
a checkpoint can be loaded with any ``comm_mode``. The ranks of one pipeline, a *row*, hold one model between them, and
a worker without stages is a row of its own.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anabranch import checkpoint
from anabranch.autodiff.moved_parameter import MovedParameter, Switch, from_within
from anabranch.checkpoint import Checkpoint
from anabranch.checkpoint.generations import Replaced
from anabranch.checkpoint.reading import again
from anabranch.checkpoint.state import encode
from anabranch.checkpoint.storage import Place, as_place
from anabranch.checkpoint.tensor_file import Blocks
from anabranch.collectives import Workers
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError, DeadlineExceeded
from anabranch.executor.exchange import exchange, pack, together, unpack
from anabranch.executor.loaders.loading import BoundLoader
from anabranch.executor.own_state import OwnState
from anabranch.executor.randomness import random_state, restore_random_state
from anabranch.executor.running.remote import RemotePart
from anabranch.executor.running.runner import StepRunner
from anabranch.executor.saving.background_saves import BackgroundSave, copied
from anabranch.executor.saving.exporting import export
from anabranch.executor.saving.optimizer_states import (
    OptimizerState,
    by_parameter_name,
    by_position,
    load_uncast,
    merge_stage,
    names_of,
    parameter_names,
    restored,
    to_save,
)
from anabranch.executor.saving.run_name import RunName
from anabranch.executor.spec import Spec
from anabranch.executor.steps import parameters_of
from anabranch.parameter_server import RemoteEmbedding
from anabranch.parameter_server.client.saved_tables import SavedTables, check, whole
from anabranch.pipeline import Pipe
from anabranch.pipeline.pipe import PipeRanks
from anabranch.tables import ParameterState, RowOptimizer, TableSpec, from_torch, to_torch

_log = logging.getLogger("anabranch.executor")

_FORMAT = 6
_ON_SERVERS = "on servers"  # in place of a parameter's state in its optimizer: its name there

_T = TypeVar("_T")


class Saver:
    """Saves and loads the state of one executor.

    Args:
        spec: of the executor.
        runners: of its training steps.
        workers: all ranks.
        stages: the number of them that hold one model between them.
        loaders: the loaders whose positions are saved.
        remote: the parameters on servers.
        own: the user's own objects.
    """

    def __init__(
        self,
        spec: Spec,
        runners: Mapping[str, StepRunner],
        workers: Workers | None,
        stages: int,
        loaders: Mapping[str, BoundLoader],
        remote: RemotePart | None,
        own: OwnState,
    ) -> None:
        self.loaders, self.remote = loaders, remote
        self._own = own
        self.saving: BackgroundSave | None = None
        self._steps, self._models = spec.training, spec.models
        self._runners = runners
        self._workers = None if workers is None or not workers.several else workers
        self._pipes = {prefix: model for prefix, model in self._models.items() if isinstance(model, Pipe)}
        self._parameters = {name: names_of(step.model) for name, step in self._steps.items()}
        self._stages, self._moved = stages, [] if remote is None else remote.moved
        self._call = "save"
        self._run = RunName(shared=workers is not None)
        self._check_encoding()

    @property
    def _rank(self) -> int:
        return 0 if self._workers is None else self._workers.rank

    @property
    def _size(self) -> int:
        return 1 if self._workers is None else self._workers.size

    @property
    def _row(self) -> int:
        return self._rank // self._stages

    def _check_encoding(self) -> None:
        """Raise ``ValueError`` for what a checkpoint cannot hold; an optimizer's own state is not there yet."""
        objects: dict[str, object] = {}
        for name in self._own:
            with suppress(Exception):  # one that needs the executor, or a first batch: the save says so
                objects[name] = self._own.of(name)
        optimizers, schedulers = self._optimizers({}), self._schedulers()
        state = {"optimizers": optimizers, "schedulers": schedulers, "extra": self._extra(), "objects": objects}
        try:
            encode(checkpoint.split(state)[0])
        except ValueError as error:
            raise ValueError(f"{error}; or give what holds it a state_dict() without it") from None

    # Saving.

    def save(self, path: Place, *, wait: bool = True) -> None:
        """Write a checkpoint, without ``wait`` in a thread; every worker calls it, and failures are raised on all."""
        began, step = time.monotonic(), self._steps_taken()
        self._begin("save")
        if self.saving is not None and self._workers is not None:  # of this call, which begins again
            self.saving.wait(Deadline.after(self._workers.timeout))
            self.saving = None
        for name, runner in self._runners.items():
            runner.check_window_closed(name)
        for runner in self._runners.values():
            runner.compare_workers()
        if self.remote is not None:
            self.remote.open()
            self.remote.settle()
        part = self._together(self._part, "could not read its part of the model")
        mine = {
            "random": random_state(),
            "loaders": {name: loader.state() for name, loader in self.loaders.items()},
            "counts": {name: runner.state() for name, runner in self._runners.items()},
            "pipes": {prefix: (pipe.seed, pipe.calls) for prefix, pipe in self._pipes.items()},
            "buffers": self._buffers() if self._row else {},
            "part": part if self._rank else None,
        }
        ranks = self._gather_at_first(mine)

        def begin() -> None:
            if self._rank or part is None:
                return
            groups, state = self._collected(part, ranks)
            if not wait:
                groups, state = copied(groups), copy.deepcopy(state)

            def write(saved: SavedTables | None) -> None:
                more = () if saved is None else ((f"servers.{name}", group) for name, group in saved.groups())
                checkpoint.write(path, groups, state, more=more, step=step, check_newest=self._run.check)

            def read_and_write() -> None:
                with ExitStack() as reading:
                    remote, saved = self.remote, None
                    if remote is not None:
                        # One moment of every shard: all workers have settled, and none goes on before this has begun.
                        saved = reading.enter_context(remote.client.collect(remote.served))
                        state["servers"] = saved.state
                    if wait:
                        write(saved)
                    else:  # before anybody knows that this call has ended
                        act = partial(_close_after, partial(write, saved), reading.pop_all())
                        self.saving = BackgroundSave(step, path, began, act)

            again(read_and_write)

        self._together(begin, f"could not save to {path}")
        if not wait and self._rank:
            self.saving = BackgroundSave(step, path, began, None)

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the state of ``model`` as it is without servers, from rank 0; every worker calls it.

        Raises:
            CheckpointError: it could not be written; on every worker.
        """
        state: dict[str, Any] = {}
        self.model_state(model, whole=False, into=state)
        self._together(lambda: None if self._rank else export(folder, state), f"could not write {folder}")

    def model_state(self, model: nn.Module, *, whole: bool, into: dict[str, Any]) -> None:
        """Read the state of ``model`` as it is without servers, on rank 0; every worker calls it.

        Args:
            model: one of the executor's.
            whole: a copy; else what is on servers is ``Blocks``.
            into: where the state goes; complete before any worker knows that all have it.

        Raises:
            CheckpointError: a rank could not read its part; on every worker.
        """
        self._begin("state_dict" if whole else "export")
        for runner in self._runners.values():
            runner.compare_workers()
        if self.remote is not None:
            self.remote.settle()
            exchange(self._workers, None, type(None), self._call)  # read once all have settled

        failed = "could not read the state of the model"
        state, served = self._together(lambda: self._entries(model), failed)
        if self._stages > 1:
            for part, names in self._gather_at_first([state, served] if self._rank else [{}, {}])[1 : self._stages]:
                state, served = state | part, served | names

        def complete() -> dict[str, Any]:
            """Add what is on servers, which rank 0 alone reads, whichever stage it belongs to."""
            if self._rank or self.remote is None:
                return {} if self._rank else state
            blocks = {table: self.remote.client.value_blocks(table) for table in served.values()}
            for name, table in served.items():
                ids, state[name] = blocks[table]
                if ids is not None:
                    state[f"{name.removesuffix('weight')}ids"] = ids
            return state

        def put() -> None:
            into.clear()
            into.update(_copied(complete()) if whole else complete())

        self._together(put, failed)

    def _entries(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
        """Return this rank's state of the model, and the tables and parameters on servers that belong in it."""
        state: dict[str, Any] = {} if self._row else model.state_dict()
        remote, prefix = self.remote, next(prefix for prefix, other in self._models.items() if other is model)
        if remote is None or self._row:
            return state, {}
        there = {name: moved.name for moved in remote.there for name in moved.names}
        served = {name: there[prefix + name] for name in state if prefix + name in there}
        for path, module in model.named_modules():
            if isinstance(module, RemoteEmbedding):
                here = f"{path}." if path else ""
                served[f"{here}weight"] = module.name
                state |= dict.fromkeys([f"{here}ids", f"{here}weight"][module.spec.rows is not None :])
        return state | dict.fromkeys(served), served

    def settle(self, deadline: Deadline) -> str:
        """Wait for the save in the background; return why it could not be written, the same on every worker.

        Raises:
            CheckpointError, DeadlineExceeded: it takes longer.
        """
        save = self.saving
        if save is None:
            return ""
        self._call = "finish_saves"
        mine = self._together(lambda: save.wait(deadline), "is still saving in the background")
        failure = exchange(self._workers, mine, str, self._call)[0]
        return failure and f"{save.path} of step {save.step} could not be saved in the background: {failure}"

    def writer_lost(self) -> None:
        """Forget the save in the background, which nobody writes any more; the one before it stands."""
        if self.saving is not None:
            _log.warning("rank 0 was lost, and may not have written the save of step %d", self.saving.step)
        self.saving = None

    def abandon(self, deadline: Deadline) -> None:
        """Wait for the save in the background without the other workers; log its failure."""
        try:
            failure = "" if self.saving is None else self.saving.wait(deadline)
        except DeadlineExceeded as error:
            failure = str(error)
        if failure:
            _log.warning("a checkpoint could not be saved in the background: %s", failure)

    def _steps_taken(self) -> int:
        return sum(runner.steps for runner in self._runners.values())

    def _part(self) -> dict[str, Any] | None:
        """Return this rank's part of the model; ``None`` of rows that are as the first."""
        if self._row:
            return None
        moved = {entry.name: list(entry.names) for entry in self._moved}
        served = {name for names in moved.values() for name in names}
        return {
            "model": {name: value for name, value in _tensors_of(self._models).items() if name not in served},
            "extra": self._extra(),
            "optimizers": self._optimizers({entry.parameter: {_ON_SERVERS: entry.name} for entry in self._moved}),
            "modes": self._modes(),
            "moved": moved,
        }

    def _collected(
        self, part: dict[str, Any], ranks: list[dict[str, Any]]
    ) -> tuple[dict[str, checkpoint.Group], dict[str, Any]]:
        """Return the tensors and the state of a checkpoint."""
        for stage in [rank.pop("part") for rank in ranks][1 : self._stages]:
            merge_stage(part["optimizers"], stage.pop("optimizers"))
            for key, values in stage.items():
                part[key] = {**values, **part[key]}
        model: dict[str, Tensor] = part.pop("model")
        for rank in ranks:
            rank["buffers"] = {
                name: value
                for name, value in rank["buffers"].items()
                if name not in model or not torch.equal(value, model[name].to(value.device))
            }
        whole = {
            **part,
            "format": _FORMAT,
            "run": self._run.state(),
            "workers": self._size,
            "stages": self._stages,
            "schedulers": self._schedulers(),
            "ranks": ranks,
            "servers": None,
            "objects": self._objects(),
        }
        state, tensors = checkpoint.split(whole)
        groups: dict[str, checkpoint.Group] = {
            "model": model,
            "optimizer": {name: tensor for name, tensor in tensors.items() if name.startswith("optimizers.")},
            "state": {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizers.")},
        }
        return groups, cast(dict[str, Any], state)

    def _optimizers(self, elsewhere: Mapping[Tensor, dict[str, object]]) -> dict[str, list[OptimizerState]]:
        states: dict[str, list[OptimizerState]] = {}
        for name, step in self._steps.items():
            named = [(one, parameter_names(one, self._parameters[name])) for one in step.optimizers]
            states[name] = [by_parameter_name(optimizer, names, elsewhere) for optimizer, names in named]
        return states

    def _schedulers(self) -> dict[str, list[dict[str, Any]]]:
        return {
            name: [{"kind": type(s).__qualname__, "state": to_save(s.state_dict())} for s in step.schedulers]
            for name, step in self._steps.items()
        }

    def _buffers(self) -> dict[str, Tensor]:
        parameters = {
            prefix + name
            for prefix, model in self._models.items()
            for name, _ in model.named_parameters(remove_duplicate=False)
        }
        return {name: value for name, value in _tensors_of(self._models).items() if name not in parameters}

    def _extra(self) -> dict[str, object]:
        """Return the models' state that is no tensor."""
        return {name: value for name, value in _model_state(self._models) if not isinstance(value, Tensor)}

    def _objects(self) -> dict[str, object]:
        return {name: self._own.of(name) for name in self._own}

    def _modes(self) -> dict[str, bool]:
        return {key: getattr(*switch) for key, switch in self._switches().items()}

    def _switches(self) -> dict[str, tuple[object, str]]:
        """Return what freezes a layer: an object and its attribute; no layers of a model wholly in eval mode."""
        switches: dict[str, tuple[object, str]] = {}
        for step, training in self._steps.items():
            for name, parameter in self._parameters[step].items():
                switches[f"{step}.{name}.requires_grad"] = parameter, "requires_grad"
            layers = dict(training.model.named_modules() if training.model.training else ())
            for prefix, pipe in [pair for pair in layers.items() if isinstance(pair[1], Pipe)]:
                layers |= {f"{prefix}.{name}".strip("."): one for name, one in PipeRanks(pipe).opened().items()}
            for name, layer in layers.items():
                switches[f"{step}.{name}.training"] = layer, "training"
        return switches

    # The state that all workers have alike, from one that is a step ahead.

    def dense_state(self, more: object) -> object:
        """Return it: parameters that are not on servers, optimizers, schedulers, the background save, and ``more``."""
        saving = None if self.saving is None else [self.saving.step, _name_of(self.saving.path)]
        return [self._parameters_here(), self._optimizers({}), self._schedulers(), saving, more]

    def _parameters_here(self) -> dict[str, dict[str, Tensor]]:
        there = {entry.parameter for entry in self._moved}
        return {
            name: {
                key: one for key, one in names_of(step.model).items() if one not in there and type(one) is not Switch
            }
            for name, step in self._steps.items()
        }

    @torch.inference_mode(False)
    def take_dense_state(self, state: Any) -> Any:
        """Put it in place of this worker's, and return the rest."""
        parameters, optimizers, schedulers, saving, more = state
        plans, scheduler_plans = self._plan_optimizers(optimizers), self._plan_schedulers(schedulers)
        with torch.no_grad():
            for name, here in self._parameters_here().items():
                for parameter_name, parameter in here.items():
                    parameter.copy_(parameters[name][parameter_name])
        _carry_out(plans, scheduler_plans)
        if saving is not None and self.saving is None:
            self.saving = BackgroundSave(saving[0], as_place(saving[1]), time.monotonic(), None)
        return more

    def newcomers_state(self) -> Any:
        """Return what a newcomer needs besides: all else that a checkpoint has of rank 0."""
        values = self._buffers() | self._extra()
        loaders = {name: loader.state() for name, loader in self.loaders.items() if loader.kind == "global"}
        calls = {prefix: pipe.calls for prefix, pipe in self._pipes.items()}
        return [values, loaders, self._objects(), self._modes(), calls, self._run.known()]

    @torch.inference_mode(False)
    def take_newcomers_state(self, state: Any) -> None:
        """Put it in place of this newcomer's."""
        values, loaders, objects, modes, calls, run = state
        self._load_models(values)
        for name, position in loaders.items():
            self.loaders[name].restore([position])
        self._load_objects(objects)
        self._restore_modes(modes, Path("the other workers' state"))
        for prefix, pipe in self._pipes.items():
            pipe.calls = calls[prefix]
        self._run.know(run)

    # What the workers tell one another.

    def _gather_at_first(self, mine: Any) -> list[Any]:
        if self._workers is None:
            return [mine]
        return [unpack(data) for data in self._workers.gather_bytes(pack(mine), operation=self._call)]

    def _together(self, act: Callable[[], _T], failed: str) -> _T:
        """If a generation was replaced while it was read, all raise that, to read the next one."""
        return together(self._workers, act, failed, self._call, CheckpointError, Replaced)

    def _begin(self, call: str) -> None:
        """Begin a call of the Executor's, which names it in messages and errors.

        Raises:
            BoundaryError: the others may be in the middle of a run, whose messages these would meet.
        """
        for runner in self._runners.values():
            runner.check_known(call)
        self._call = call

    # Loading.

    @torch.inference_mode(False)  # an optimizer's state outlives the caller's mode
    def load(self, path: Place, *, search: bool) -> bool:
        """Load the newest complete checkpoint in ``path``, or with ``search`` under it; ``False`` if there is none."""
        self._begin("load")
        if self.remote is not None:
            self.remote.tables.wait_until_quiet()  # before any worker replaces what is on the servers
        return again(lambda: self._load_newest(path, search=search))

    def _load_newest(self, path: Place, *, search: bool) -> bool:
        """Rank 0 chooses, so that all load the same generation even if another is being saved."""

        def choose() -> Checkpoint | None:
            if self._rank:
                return None
            return _newest(path) if search else checkpoint.read(path)

        chosen = self._together(choose, "could not choose a checkpoint")
        mine = None if chosen is None else (_name_of(chosen.path), chosen.generation)
        answer = exchange(self._workers, mine, tuple[str, int] | None, self._call)[0]  # type: ignore[arg-type]
        if answer is None:
            return False

        def plan() -> tuple[Checkpoint, Callable[[], None]]:
            source = chosen or checkpoint.read(answer[0], generation=answer[1])
            return source, self._plan(source)

        source, change = self._together(plan, "cannot load the checkpoint, so no rank loads it")
        change()
        self._run.take_over(source.state, source.written())  # by all: any of them may be rank 0 later
        return True

    def _plan(self, source: Checkpoint) -> Callable[[], None]:
        """Read and check everything; return a function that applies it and cannot fail because of the checkpoint."""
        state = _joined(source)
        same_ranks = (state["workers"], state["stages"]) == (self._size, self._stages)
        as_many_rows = state["workers"] // state["stages"] == self._size // self._stages
        firsts = state["ranks"][:: state["stages"]]
        row = firsts[self._row if as_many_rows else 0]
        values = {**source.tensors("model"), **state["extra"]}
        if same_ranks:
            values |= state["ranks"][self._rank]["buffers"]
        elsewhere = {prefix + name for prefix, pipe in self._pipes.items() for name in pipe.elsewhere}
        rules = self._saved_rules(state["optimizers"])
        as_saved = self._plan_served(source, state, values, elsewhere, rules)
        values = {name: value for name, value in values.items() if name not in elsewhere}
        there = {n: torch.empty(one.shape, dtype=one.dtype, device="meta") for one in self._moved for n in one.names}
        checkpoint.fit({**dict(_model_state(self._models)), **there}, values)
        self._check_objects(source, state["objects"])
        optimizers = self._plan_optimizers(state["optimizers"])
        replace = self._plan_remote(source, state, values, optimizers, as_saved, rules)
        schedulers = self._plan_schedulers(state["schedulers"])
        loaders = {
            name: [rank["loaders"][name] for rank in firsts] for name in self.loaders if name in firsts[0]["loaders"]
        }
        for name, positions in loaders.items():
            self.loaders[name].check(positions)
        for name in self.loaders.keys() - loaders.keys():
            _log.warning("%s has no position for the loader of %r, which starts from the beginning", source.path, name)

        for name in {name for one in self._moved if one.name in as_saved for name in one.names}:
            values.pop(name, None)  # the servers' own

        def change() -> None:
            self._load_objects(state["objects"])  # which may fail
            if self.remote is not None:
                self.remote.open("replace")
            self._load_models(values)
            self._restore_modes(state["modes"], source.path)
            _carry_out(optimizers, schedulers)
            for name, runner in self._runners.items():
                known = name in self.loaders and (state["workers"] == self._size or self.loaders[name].kind == "global")
                runner.restore(row["counts"][name], as_many_rows=as_many_rows, in_epoch=known)
            for prefix, (seed, calls) in row["pipes"].items():
                if (pipe := self._pipes.get(prefix)) is not None:
                    # Another number of pipelines starts new random streams.
                    pipe.seed, pipe.calls = seed if as_many_rows else pipe.seed, calls
            replace()
            for name, positions in loaders.items():
                self.loaders[name].restore(positions)
            if same_ranks and self._steps:
                restore_random_state(state["ranks"][self._rank]["random"])

        return change

    def _load_models(self, values: Mapping[str, Any]) -> None:
        """Load those of ``values`` that belong here."""
        with from_within():
            for prefix, model in self._models.items():
                here = [name for name, one in model.state_dict().items() if not isinstance(one, MovedParameter)]
                some = {name: values[prefix + name] for name in here if prefix + name in values}
                model.load_state_dict(some, strict=False)

    def _restore_modes(self, modes: dict[str, bool], path: Place) -> None:
        """Freeze and unfreeze parameters and layers as they were, and log by name what the script had set otherwise."""
        changed: list[str] = []
        for key, (target, attribute) in self._switches().items():
            if (value := modes.get(key, before := getattr(target, attribute))) is not before:
                setattr(target, attribute, value)
                changed.append(f"{key}={value}")
        if changed and self._row == 0:
            _log.warning("%s was saved with %s, other than this script has set it", path, ", ".join(changed))

    def _check_objects(self, source: Checkpoint, saved: Mapping[str, object]) -> None:
        if missing := self._own.keys() - saved.keys():
            raise CheckpointError(
                f"the checkpoint has no state called {sorted(missing)}, only {sorted(saved)}; give Executor(state=...) "
                "what was saved"
            )
        if (others := saved.keys() - self._own.keys()) and self._runners and self._rank == 0:
            warnings.warn(
                f"the checkpoint in {source.path} has state {sorted(others)} that this Executor was not given, "
                "and that its checkpoints will not have; give Executor(state=...) what was saved",
                stacklevel=13,  # where the script calls load or resume
            )

    def _load_objects(self, saved: Mapping[str, object]) -> None:
        for name, target in self._own.items():
            try:
                self._own.load(name, saved[name])
            except Exception as error:
                raise CheckpointError(
                    f"the object given as state={{{name!r}: ...}} ({type(target).__name__}) rejected its "
                    f"saved state: {type(error).__name__}: {error}"
                ) from error

    def _plan_optimizers(self, saved: Mapping[str, list[OptimizerState]]) -> list[tuple[Optimizer, dict[str, Any]]]:
        plans = []
        for name, what, entry, optimizer in self._matched(saved, "optimizer"):
            model = self._steps[name].model
            here = names_of(model) if isinstance(model, Pipe) and model.elsewhere else None
            names = parameter_names(optimizer, self._parameters[name])
            plans.append((optimizer, by_position(entry, optimizer, names, here, what)))
        return plans

    def _plan_schedulers(self, saved: Mapping[str, list[dict[str, Any]]]) -> list[tuple[LRScheduler, Any]]:
        plans: list[tuple[LRScheduler, Any]] = []
        for _, what, entry, scheduler in self._matched(saved, "scheduler"):
            here = scheduler.state_dict()
            places, tensors = checkpoint.split(entry["state"])
            devices = {key: tensor.device for key, tensor in checkpoint.split(to_save(here))[1].items()}
            there = {key: tensor.to(devices.get(key, "cpu")) for key, tensor in tensors.items()}
            plans.append((scheduler, restored(checkpoint.join(places, there), here, what, plans)))
        return plans

    def _matched(self, saved: Mapping[str, list[Any]], kind: str) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield each optimizer or scheduler: its step, its name in errors, its saved state, and itself."""
        if self._steps and saved.keys() != self._steps.keys():  # what only evaluates takes the model alone
            raise CheckpointError(f"the checkpoint has steps {sorted(saved)}, this Executor {sorted(self._steps)}")
        for name, step in self._steps.items():
            targets = step.optimizers if kind == "optimizer" else step.schedulers
            if len(saved[name]) != len(targets):
                raise CheckpointError(
                    f"the checkpoint has {len(saved[name])} {kind}s for step {name!r}, but this Executor has "
                    f"{len(targets)}"
                )
            for index, (entry, target) in enumerate(zip(saved[name], targets, strict=True)):
                what = f"{kind} {index} of {name!r}"
                if entry["kind"] != type(target).__qualname__:
                    raise CheckpointError(
                        f"{what} is {type(target).__qualname__}, but the checkpoint has {entry['kind']}; load with the "
                        f"{kind} that was saved"
                    )
                yield name, what, entry, target

    def _saved_rules(self, saved: Mapping[str, list[OptimizerState]]) -> dict[str, RowOptimizer]:
        """Return the settings that the optimizers of parameters on servers will have once theirs are loaded."""
        moved, rules = {one.parameter: one.name for one in self._moved}, dict[str, RowOptimizer]()
        for _, _, entry, optimizer in self._matched(saved, "optimizer"):
            for group, here in zip(entry["groups"], optimizer.param_groups, strict=False):
                if names := [moved[parameter] for parameter in here["params"] if parameter in moved]:
                    with suppress(ValueError):  # what does not fit is refused by name, where the states are planned
                        rules |= dict.fromkeys(names, RowOptimizer.of_group(optimizer, group))
        return rules

    def _plan_served(
        self,
        source: Checkpoint,
        state: dict[str, Any],
        values: dict[str, Any],
        elsewhere: set[str],
        rules: Mapping[str, RowOptimizer],
    ) -> set[str]:
        """Put what was saved from servers into the model's ``values`` and the optimizers' states; return the names of
        the tables that are on servers here, too, and are loaded there as they are.
        """
        moved, servers = state["moved"], state["servers"]
        here = {one.name: one for one in self._moved}
        as_saved = set()
        for entry in servers["tables"] if moved else ():
            one = here.get(entry["spec"]["name"])
            if one is not None and self.remote is not None and moved.get(one.name) == list(one.names):
                alike = RowOptimizer.from_dict(entry["rule"]).same_layout(rules.get(one.name, one.rule()))
                if alike and TableSpec.from_dict(entry["spec"]) == self.remote.spec(one):
                    as_saved.add(one.name)
                    meta = torch.empty(one.shape, dtype=one.dtype, device="meta")
                    values.update(dict.fromkeys(one.names, meta))
        others = {name for name in moved.keys() - as_saved if not elsewhere.issuperset(moved[name])}
        wholes = whole(servers, source.readers("servers."), others) if others else {}
        values.update((name, wholes[served][1].values) for served in others for name in moved[served])
        for entry in (entry for entries in state["optimizers"].values() for entry in entries):
            for name, own in list(entry["state"].items()):
                if _ON_SERVERS in own:
                    saved = wholes.get(str(own[_ON_SERVERS]))
                    del entry["state"][name]  # empty, it would end Adagrad's ``load_state_dict`` in a KeyError
                    if saved is not None and (in_torch := to_torch(*saved)):
                        entry["state"][name] = in_torch
        return as_saved

    def _plan_remote(
        self,
        source: Checkpoint,
        state: dict[str, Any],
        values: Mapping[str, Any],
        plans: list[tuple[Optimizer, dict[str, Any]]],
        as_saved: Collection[str],
        rules: Mapping[str, RowOptimizer],
    ) -> Callable[[], None]:
        """Take the states of parameters on servers out of the ``plans``; return a function that loads them there."""
        remote, servers = self.remote, state["servers"]
        names = [] if servers is None else [entry["spec"]["name"] for entry in servers["tables"]]
        tables = [name for name in names if name not in state["moved"]]
        mine = [] if remote is None else remote.embeddings
        if sorted(tables) != sorted(mine):
            raise CheckpointError(f"the checkpoint has the RemoteEmbeddings {tables}, but this model has {mine}")
        modules = (module for model in self._models.values() for module in model.modules())
        specs = {module.name: module.spec for module in modules if isinstance(module, RemoteEmbedding)}
        for entry in [] if servers is None else servers["tables"]:
            saved, here = TableSpec.from_dict(entry["spec"]), specs.get(entry["spec"]["name"])
            if here and (saved.rows, saved.width, saved.dtype) != (here.rows, here.width, here.dtype):
                raise CheckpointError(f"RemoteEmbedding {here.name} is {here}, but the checkpoint has {saved}")
        if remote is None:
            return lambda: None
        if servers is not None and self._rank == 0:
            check(servers, source.readers("servers."))
        states: dict[Tensor, ParameterState] = {}
        for optimizer, plan in plans:
            position = {parameter: index for index, parameter in enumerate(parameters_of(optimizer))}
            for moved in remote.moved:
                if moved.optimizer is optimizer and moved.name not in as_saved:
                    own = plan["state"].pop(position[moved.parameter], {})
                    try:
                        states[moved.parameter] = from_torch(
                            rules.get(moved.name, moved.rule()), values[moved.name], own
                        )
                    except ValueError as error:
                        raise CheckpointError(f"{moved.name}: {error}") from error

        def put(ranks: Collection[int], load: Callable[[], object]) -> None:
            """Let ``ranks`` load state into the servers while the others wait."""
            self._together(
                lambda: load() if self._rank in ranks else None, "could not load the checkpoint into the servers"
            )

        def replace() -> None:
            names = {*as_saved, *(() if self._rank else remote.embeddings)}
            put([0], lambda: remote.client.drop_some(remote.served))
            put(range(self._stages), lambda: remote.replace(states, servers, source.readers("servers."), names))
            remote.continue_from(self._steps_taken())

        return replace


def _carry_out(optimizers: list[tuple[Optimizer, dict[str, Any]]], schedulers: list[tuple[LRScheduler, Any]]) -> None:
    """Load the states of ``_plan_optimizers`` and ``_plan_schedulers``."""
    with from_within():
        for optimizer, plan in optimizers:
            load_uncast(optimizer, plan)
    for scheduler, state in schedulers:
        scheduler.load_state_dict(state)


def _model_state(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, object]]:
    for prefix, model in models.items():
        for name, value in model.state_dict().items():
            yield prefix + name, value


def _tensors_of(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {name: value for name, value in _model_state(models) if isinstance(value, Tensor)}


def _newest(path: Place) -> Checkpoint | None:
    """Return the newest checkpoint of an Executor in or under ``path``.

    Others under it, such as those that servers keep for themselves, are passed over. One in ``path`` itself is returned
    if there is no other, to be refused.
    """
    newest = checkpoint.read_newest(path, wanted=_of_an_executor)
    if newest is None or _of_an_executor(newest.state) or _name_of(newest.path) == _name_of(path):
        return newest
    return None


def _of_an_executor(state: object) -> bool:
    return isinstance(state, dict) and "format" in state


def _name_of(path: Place) -> str:
    return getattr(path, "url", str(path))


def _joined(source: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's state with its tensors in their places, but for those of the model and of the servers."""
    if not _of_an_executor(source.state) or source.state["format"] != _FORMAT:
        raise CheckpointError(f"the checkpoint in {source.path} was not saved by an Executor of this version")
    state: dict[str, Any] = checkpoint.join(source.state, source.tensors("optimizer") | source.tensors("state"))
    return state


def _close_after(write: Callable[[], object], reading: ExitStack) -> None:
    with reading:
        write()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy, tied where ``state`` is, with all rows of what is on servers."""
    wholes: dict[int, Tensor] = {}
    for value in state.values():
        if isinstance(value, Blocks) and id(value) not in wholes:
            wholes[id(value)] = value.whole()
    for name, value in state.items():
        if isinstance(value, Blocks) and value.dtype == torch.int64:  # ids of a dynamic vocabulary: ascending
            order = wholes[id(value)].argsort()
            for one in (value, state[f"{name[:-3]}weight"]):
                wholes[id(one)] = wholes[id(one)][order]
    return copy.deepcopy({name: wholes.get(id(value), value) for name, value in state.items()})
