"""Saving and loading an executor's state, also with another number of workers.

::

    group "model"         parameters and buffers of every model, under the model's own names   (rank 0's)
    group "optimizer"     the tensors in the optimizers' states, by parameter name             (rank 0's)
    group "servers.<..>"  rows of each RemoteEmbedding, with state and stamps, as stored on the shards
    group "schedulers"    tensors that the schedulers hold
    group "rank<r>"       tensors of one worker: random number generators, loader positions, buffers that differ from
                          rank 0's
    state                 everything that is not a tensor, and which run saved it

Rank 0 writes; the state of single workers is gathered first. Parameters are identified by name, not by position.
Parameters on servers are in "model" and "optimizer" like others, so that a checkpoint can be loaded with any
``comm_mode``.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, Protocol, TypeVar, cast

import msgspec
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anabranch import checkpoint
from anabranch.autodiff.moved_parameter import MovedParameter, from_within
from anabranch.checkpoint import Checkpoint
from anabranch.checkpoint.reading import again
from anabranch.checkpoint.regular_file import Replaced
from anabranch.checkpoint.state import decode, encode
from anabranch.checkpoint.storage import Place
from anabranch.collectives import Workers
from anabranch.deadline import Deadline
from anabranch.errors import AnabranchError, CheckpointError, DeadlineExceeded
from anabranch.executor.loaders.loading import BoundLoader
from anabranch.executor.randomness import random_state, restore_random_state
from anabranch.executor.running.remote import RemotePart, ServedParameter
from anabranch.executor.running.runner import StepRunner
from anabranch.executor.saving.background_saves import BackgroundSaves, CheckpointContent, StartedSave
from anabranch.executor.saving.merged_stages import (
    StagePart,
    merge_optimizer_states,
    names_of,
    restrict,
    rows_of,
)
from anabranch.executor.saving.optimizer_states import by_parameter_name, by_position, load_uncast, parameter_names
from anabranch.executor.saving.program_values import restored, to_save
from anabranch.executor.saving.run_name import RunName
from anabranch.executor.steps import Step, TrainStep, distinct_models, parameters_of
from anabranch.parameter_server import RemoteEmbedding
from anabranch.pipeline import Pipe
from anabranch.tables import ParameterState, from_torch, to_torch

_log = logging.getLogger("anabranch.executor")

_FORMAT = 3


_T = TypeVar("_T")

_Ranks = Callable[[int], dict[str, Any]]
"""The saved state of the worker of a rank."""


class HasState(Protocol):
    """An object with saveable state: nested plain values and tensors."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state."""


class Saver:
    """Saves and loads the state of one executor.

    Args:
        steps: of the executor.
        runners: of its training steps.
        workers: all ranks.
        stages: the number of them that hold one model between them.
        loaders: the loaders whose positions are saved.
        remote: the parameters on servers.
        objects: the user's own.
    """

    def __init__(
        self,
        steps: Mapping[str, Step],
        runners: Mapping[str, StepRunner],
        workers: Workers | None,
        stages: int,
        loaders: Mapping[str, BoundLoader],
        remote: RemotePart | None,
        objects: Mapping[str, HasState] | None = None,
    ) -> None:
        self.loaders, self.remote = loaders, remote
        self._objects = dict(objects or {})
        self._background: BackgroundSaves | None = None
        self._started_saves: list[StartedSave] = []
        self._steps = {name: step for name, step in steps.items() if isinstance(step, TrainStep)}
        self._runners = runners
        self._workers = workers
        self._models = distinct_models(steps)
        # By the names of now: other workers know no parameters that are added later.
        self._first_parameters = {name: names_of(step.model) for name, step in self._steps.items()}
        self._stages = stages
        self._run = RunName(shared=workers is not None)

    @property
    def _rank(self) -> int:
        return 0 if self._workers is None else self._workers.rank

    @property
    def _size(self) -> int:
        return 1 if self._workers is None else self._workers.size

    @property
    def _row(self) -> int:
        """This rank's index among those that hold the same part of the model."""
        return self._rank // self._stages

    def _parameters(self, step: str) -> dict[str, Tensor]:
        """Return a step's parameters by name; only a worker alone may add some after construction."""
        first = self._first_parameters[step]
        return first if self.remote is not None or self._size > 1 else first | names_of(self._steps[step].model)

    def _pipes(self) -> dict[str, Pipe]:
        return {prefix: model for prefix, model in self._models.items() if isinstance(model, Pipe)}

    # Saving.

    def save(self, path: Place, *, wait: bool = True) -> None:
        """Write a checkpoint, without ``wait`` in a thread; every worker calls it, and failures are raised on all."""
        began = time.monotonic()
        self._check_known("save")
        for name, runner in self._runners.items():
            runner.check_window_closed(name)
        for runner in self._runners.values():
            runner.compare_workers()
        if self.remote is not None:
            self.remote.open()
            self.remote.settle()
            if self._stages > 1:
                self._gather(b"")  # stages read their parts once all have settled
        mine: dict[str, object] = {"random": random_state(), "loaders": self._positions(), "counts": self._counts()}
        mine["pipes"] = {prefix: [pipe.seed, pipe.calls] for prefix, pipe in self._pipes().items()}
        mine["buffers"] = self._own_buffers()
        if self._row == 0 < self._rank:  # another stage's part of the model
            mine |= self._part()
        ranks = self._gather_at_first(_pack(mine))
        failure = ""
        if self._rank == 0:
            try:
                snapshot = self._collected(ranks)
                if wait:
                    snapshot.write(path, self._run.check)
                else:
                    snapshot = snapshot.copied()
                    self._background = self._background or BackgroundSaves()
                    self._background.begin(lambda: snapshot.write(path, self._run.check))
            except Exception as error:  # a server may be lost, the user's object may fail
                if self._size == 1:
                    raise
                failure = f"{type(error).__name__}: {error}"
        failure = self._gather(failure.encode())[0].decode()
        if failure:
            raise CheckpointError(f"rank 0 could not save to {path}: {failure}")
        if not wait:
            self._started_saves.append(StartedSave(self._steps_taken(), path, began))

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of the state of ``model`` as it is without servers, on rank 0; every worker calls it.

        Raises:
            CheckpointError: a rank could not read its part; on every worker.
        """
        self._check_known("state_dict")
        if self.remote is not None:
            self.remote.settle()
            self._gather(b"")  # read once all have settled
        state: dict[str, Any] = {}
        failure = ""
        if self._row == 0:  # the stages of one pipeline
            try:
                state = self._state_without_servers(model)
            except Exception as error:  # a server may be lost
                if self._size == 1:
                    raise
                failure = f"{type(error).__name__}: {error}"
        for rank, text in enumerate(self._gather(failure.encode())):
            if text:
                raise CheckpointError(f"rank {rank} could not read the state of the model: {text.decode()}")
        if self._stages > 1:
            for part in self._gather_at_first(_pack({} if self._rank == 0 else state))[1 : self._stages]:
                state |= cast("dict[str, Any]", _unpack(part))
        return state if self._rank == 0 else {}

    def _state_without_servers(self, model: nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = model.state_dict()
        remote, prefix = self.remote, next(prefix for prefix, other in self._models.items() if other is model)
        if remote is None:
            return copy.deepcopy(state)
        served = {name: moved for moved in remote.there for name in moved.names}
        served = {name: served[prefix + name] for name in state if prefix + name in served}
        state.update(dict.fromkeys(served))  # filled below; the order is the model's
        copied = copy.deepcopy(state)
        values = {
            moved.parameter: remote.client.read_values(moved.name)[1].to(moved.parameter.device)
            for moved in served.values()
        }
        copied.update({name: values[moved.parameter] for name, moved in served.items()})
        for path, module in model.named_modules():
            if isinstance(module, RemoteEmbedding):
                ids, rows = remote.client.read_values(module.name)
                here = f"{path}." if path else ""
                copied |= {f"{here}weight": rows} if ids is None else {f"{here}ids": ids, f"{here}weight": rows}
        return copied

    def settle(self, deadline: Deadline, *, leave: int = 0) -> tuple[list[StartedSave], str]:
        """Wait until at most ``leave`` of the started saves are unwritten; return the written ones, and the failures of
        others, the same on every worker.

        Raises:
            CheckpointError, DeadlineExceeded: they take longer.
        """
        if not self._started_saves:
            return [], ""
        ended: list[str] = []
        failed = ""
        if self._background is not None:
            try:
                ended = self._background.wait(leave, deadline)
            except DeadlineExceeded as error:
                if self._size == 1:
                    raise
                failed = str(error)
        answer = self._gather(msgspec.json.encode([failed, *ended]))[0]
        failed, *ended = msgspec.json.decode(answer, type=list[str])
        done, self._started_saves = self._started_saves[: len(ended)], self._started_saves[len(ended) :]
        if failed:
            raise CheckpointError(f"rank 0 is still saving in the background: {failed}")
        failures = [
            f"{started.path} of step {started.step} could not be saved in the background: {failure}"
            for started, failure in zip(done, ended, strict=True)
            if failure
        ]
        return [started for started, failure in zip(done, ended, strict=True) if not failure], "; ".join(failures)

    def close(self, deadline: Deadline) -> None:
        """Wait for all saves; log failures that were not reported yet."""
        if self._background is not None:
            for failure in self._background.close(deadline):
                _log.warning("a checkpoint could not be saved in the background: %s", failure)

    def _steps_taken(self) -> int:
        return sum(runner.steps for runner in self._runners.values())

    def _part(self) -> dict[str, object]:
        """Return this stage's part of the model, or the reason why it is not available."""
        try:
            kept = {} if self.remote is None else self.remote.read()
        except AnabranchError as error:  # a server may be lost
            return {"failure": f"{type(error).__name__}: {error}"}
        model = self._model_tensors() | self._remote_tensors(lambda moved: kept[moved.parameter].values)
        optimizers = self._optimizer_states(kept)
        return {"part": {"model": model, "extra": self._extra(), "optimizers": optimizers, "modes": self._modes()}}

    def _collected(self, ranks: list[bytes]) -> CheckpointContent:
        kept = {} if self.remote is None else self.remote.read()
        model, extra, optimizer_states = self._model_tensors(), self._extra(), self._optimizer_states(kept)
        modes = self._modes()
        everyone = [cast("dict[str, object]", _unpack(packed)) for packed in ranks]
        for rank, stage in enumerate(everyone[1 : self._stages], 1):
            if "failure" in stage:
                raise CheckpointError(f"rank {rank}: {stage['failure']}")
            part = cast(StagePart, stage.pop("part"))
            model, extra = {**part["model"], **model}, {**part.get("extra", {}), **extra}
            merge_optimizer_states(optimizer_states, part["optimizers"])
            modes |= part["modes"]
        optimizers, optimizer_tensors = checkpoint.split(optimizer_states)
        groups: dict[str, checkpoint.Group] = {
            "model": {**model, **self._remote_tensors(lambda moved: kept[moved.parameter].values)},
            "optimizer": optimizer_tensors,
        }
        schedulers, groups["schedulers"] = checkpoint.split(_scheduler_states(self._steps))
        saved_extra, groups["extra"] = checkpoint.split(extra)
        saved_objects, groups["objects"] = checkpoint.split({k: o.state_dict() for k, o in self._objects.items()})
        servers: object = None
        if self.remote is not None and self.remote.embeddings:
            servers, tables = self.remote.client.collect(self.remote.embeddings)
            groups |= {f"servers.{name}": tensors for name, tensors in tables.items()}
        rank_states = []
        for rank, mine in enumerate(everyone):
            state, tensors = checkpoint.split(mine)
            rank_states.append(state)
            if tensors:
                groups[f"rank{rank}"] = tensors
        state = {
            "format": _FORMAT,
            "run": self._run.state(),
            "workers": self._size,
            "stages": self._stages,
            "optimizers": optimizers,
            "schedulers": schedulers,
            "ranks": rank_states,
            "servers": servers,
            "extra": saved_extra,
            "modes": modes,
            "objects": saved_objects,
        }
        groups = {name: tensors for name, tensors in groups.items() if tensors or name in ("model", "optimizer")}
        return CheckpointContent(groups, state, self._steps_taken())

    def _model_tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in _model_state(self._models) if isinstance(value, Tensor)}

    def _own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are not those of the rank whose model is saved; every worker calls it."""
        if self._size == 1:
            return {}
        parameters = {
            prefix + name
            for prefix, model in self._models.items()
            for name, _ in model.named_parameters(remove_duplicate=False)
        }
        buffers = {
            name: value.detach().cpu().contiguous().clone()
            for name, value in _model_state(self._models)
            if isinstance(value, Tensor) and name not in parameters
        }
        hashes = {name: hashlib.blake2b(_bytes(value)).hexdigest() for name, value in buffers.items()}
        first = self._gather(msgspec.json.encode(hashes))[self._rank % self._stages]
        saved = msgspec.json.decode(first, type=dict[str, str])
        return {name: value for name, value in buffers.items() if hashes[name] != saved.get(name)}

    def _modes(self) -> dict[str, bool]:
        """Return which parameters require a gradient, and which layers of a model in training mode are in it."""
        return {key: getattr(target, attribute) for key, (target, attribute, _) in self._switches().items()}

    def _switches(self) -> dict[str, tuple[object, str, str]]:
        """Return what freezes a layer: an object, its attribute, its name; no layers of a model wholly in eval mode."""
        switches: dict[str, tuple[object, str, str]] = {}
        for step, training in self._steps.items():
            for name, parameter in self._parameters(step).items():
                switches[f"{step}.{name}.requires_grad"] = parameter, "requires_grad", name
            for name, layer in training.model.named_modules() if training.model.training else ():
                switches[f"{step}.{name}.training"] = layer, "training", name
        return switches

    def _extra(self) -> dict[str, object]:
        """Return the modules' extra state (``get_extra_state``)."""
        return {name: value for name, value in _model_state(self._models) if not isinstance(value, Tensor)}

    def _remote_tensors(self, value: Callable[[ServedParameter], Tensor]) -> dict[str, Tensor]:
        """Return the parameters on servers, one tensor for each name."""
        moved = [] if self.remote is None else self.remote.moved
        return {name: value(entry) for entry in moved for name in entry.names}

    def _optimizer_states(self, kept: Mapping[Tensor, ParameterState]) -> dict[str, list[object]]:
        moved = [] if self.remote is None else self.remote.moved
        elsewhere: dict[Tensor, dict[str, object]] = {
            entry.parameter: to_torch(entry.rule(), kept[entry.parameter]) for entry in moved
        }
        return _optimizer_states(self._steps, self._parameters, elsewhere)

    def _counts(self) -> dict[str, dict[str, object]]:
        """Return what every step has counted."""
        return {
            name: {
                "runs": runner.runs,
                "steps": runner.steps,
                "mean_rows": runner.mean_rows,
                "epoch_runs": runner.epoch_runs,
                "loss_scale": None if runner.scale is None else runner.scale.state(),
            }
            for name, runner in self._runners.items()
        }

    def _positions(self) -> dict[str, object]:
        return {name: loader.state() for name, loader in self.loaders.items()}

    def _gather(self, data: bytes) -> list[bytes]:
        if self._workers is None or self._size == 1:
            return [data]
        return self._workers.all_gather_bytes(data, operation="save")

    def _gather_at_first(self, data: bytes) -> list[bytes]:
        if self._workers is None or self._size == 1:
            return [data]
        return self._workers.gather_bytes(data, operation="save")

    def _check_known(self, operation: str) -> None:
        """Raise ``BoundaryError`` if the others may be in the middle of a run: these messages would meet its own."""
        for runner in self._runners.values():
            runner.check_known(operation)

    # Loading.

    def resume(self, path: Place) -> bool:
        """Load the newest complete checkpoint under ``path``; ``False`` if there is none."""
        return self._load_chosen(path, search=True)

    def load(self, path: Place) -> None:
        """Load the newest complete checkpoint in ``path``."""
        self._load_chosen(path, search=False)

    @torch.inference_mode(False)  # an optimizer's state outlives the caller's mode
    def _load_chosen(self, path: Place, *, search: bool) -> bool:
        self._check_known("load")
        if self.remote is not None:
            self.remote.tables.wait_until_quiet()  # before any worker replaces what is on the servers
        return again(lambda: self._load_newest(path, search=search))

    def _load_newest(self, path: Place, *, search: bool) -> bool:
        """Rank 0 chooses, so that all load the same generation even if another is being saved."""
        chosen: Checkpoint | None = None
        known: tuple[object, set[int]] | None = None
        answer: dict[str, object] = {}
        if self._rank == 0:
            try:
                chosen = _newest(path) if search else checkpoint.read(path)
            except CheckpointError as error:
                if self._size == 1:
                    raise
                answer = {"failure": str(error)}
            if chosen is not None:
                answer = {"path": _name_of(chosen.path), "generation": chosen.generation}
                known = chosen.state, chosen.written()
        answer = msgspec.json.decode(self._gather(msgspec.json.encode(answer))[0], type=dict[str, object])
        if "failure" in answer:
            raise CheckpointError(cast(str, answer["failure"]))
        if not answer:
            return False
        self._together(
            lambda: self._plan(
                chosen or checkpoint.read(cast(str, answer["path"]), generation=cast(int, answer["generation"]))
            )
        )()
        if known is not None:
            self._run.take_over(*known)
        return True

    def _together(self, plan: Callable[[], _T], failed: str = "cannot load the checkpoint, so no rank loads it") -> _T:
        """Return ``plan()`` if it succeeds on all workers; otherwise raise its error, or one that names the worker.

        If a generation was replaced while it was read, all raise that, to read the next one.
        """
        error: Exception | None = None
        try:
            planned = plan()
        except (AnabranchError, OSError) as caught:
            error = caught
        mine = None if error is None else (isinstance(error, Replaced), str(error))
        answers = map(msgspec.json.decode, self._gather(msgspec.json.encode(mine)))
        failures = [(rank, *answer) for rank, answer in enumerate(answers) if answer]
        if not failures:
            return planned
        rank, replaced, text = next((failure for failure in failures if not failure[1]), failures[0])
        if error is not None and isinstance(error, Replaced) is replaced:
            raise error
        raise (Replaced if replaced else CheckpointError)(f"rank {rank} {failed}: {text}")

    def _plan(self, found: Checkpoint) -> Callable[[], None]:
        """Read and check everything; return functions that apply it and cannot fail because of the checkpoint."""
        state = _checked_state(found)
        ranks = cache(partial(self._rank_state, found, state))  # read before anything is changed
        tensors = found.tensors("model")
        ranks(rows_of(state)[self._row if self._as_many_rows(state) else 0][0])
        same_ranks = (state["workers"], state["stages"]) == (self._size, self._stages)
        if same_ranks:
            tensors |= cast("dict[str, Tensor]", ranks(self._rank)["buffers"])
        for prefix, pipe in self._pipes().items():
            for name in pipe.elsewhere:
                tensors.pop(prefix + name, None)
        here = self._model_tensors()
        there = self._remote_tensors(lambda moved: torch.empty(moved.shape, dtype=moved.dtype, device="meta"))
        checkpoint.fit({**here, **there}, tensors)
        extra = self._plan_extra(found, state)
        load_objects = self._plan_objects(found, state)
        optimizer_tensors = found.tensors("optimizer")
        saved = cast("dict[str, list[object]]", checkpoint.join(state["optimizers"], optimizer_tensors))
        plans = self._plan_optimizers(saved)
        replace = self._plan_remote(found, state, tensors, plans)
        schedulers = self._plan_schedulers(checkpoint.join(state["schedulers"], _tensors(found, "schedulers")))
        loaders = self._positions_of(ranks, state)
        for name, positions in loaders.items():
            self.loaders[name].check(positions)
        for name in self.loaders.keys() - loaders.keys():
            _log.warning(
                "the checkpoint in %s has no position for the loader of %r, which starts from the beginning",
                found.path,
                name,
            )

        def change() -> None:
            load_objects()  # which may fail
            if self.remote is not None:
                self.remote.open("replace")
            with from_within():
                for prefix, model in self._models.items():
                    here = [name for name, value in model.state_dict().items() if not isinstance(value, MovedParameter)]
                    values = {**tensors, **extra}
                    model.load_state_dict({name: values[prefix + name] for name in here}, strict=False)
                self._restore_modes(cast("dict[str, bool]", state["modes"]), found.path)
                for optimizer, plan in plans:
                    load_uncast(optimizer, plan)
            for scheduler, saved_scheduler in schedulers:
                scheduler.load_state_dict(saved_scheduler)
            self._restore_counts(ranks, state)
            self._restore_pipes(ranks, state)
            replace()
            for name, positions in loaders.items():
                self.loaders[name].restore(positions)
            if same_ranks:
                restore_random_state(cast("dict[str, object]", ranks(self._rank)["random"]))

        return change

    def _restore_modes(self, modes: dict[str, bool], path: Place) -> None:
        """Freeze and unfreeze parameters and layers as they were, and log by name what the script had set otherwise."""
        changed: dict[str, list[str]] = {}
        for key, (target, attribute, name) in self._switches().items():
            if (value := modes.get(key, before := getattr(target, attribute))) is not before:
                setattr(target, attribute, value)
                changed.setdefault(f"{attribute}={value}", []).append(name)
        if changed and self._row == 0:
            told = "; ".join(f"{what} of {', '.join(names)}" for what, names in changed.items())
            _log.warning("the checkpoint in %s was saved with %s, other than this script has set it", path, told)

    def _plan_extra(self, found: Checkpoint, state: Mapping[str, object]) -> dict[str, object]:
        """Return the saved extra state of the modules."""
        saved = cast("dict[str, object]", checkpoint.join(state.get("extra", {}), _tensors(found, "extra")))
        elsewhere = {prefix + name for prefix, pipe in self._pipes().items() for name in pipe.elsewhere}
        here = self._extra()
        if saved.keys() - elsewhere != here.keys():
            raise CheckpointError(
                f"the checkpoint has extra state of {sorted(saved.keys() - elsewhere)}, but this model has "
                f"{sorted(here)}; load with the modules that were saved"
            )
        return saved

    def _plan_objects(self, found: Checkpoint, state: Mapping[str, object]) -> Callable[[], None]:
        """Read the states of the user's own objects; return functions that load them."""
        saved = cast("dict[str, object]", checkpoint.join(state.get("objects", {}), _tensors(found, "objects")))
        if missing := self._objects.keys() - saved.keys():
            raise CheckpointError(
                f"the checkpoint has no state called {sorted(missing)}, only {sorted(saved)}; give Executor(state=...) "
                "what was saved"
            )
        for name in saved.keys() - self._objects.keys():
            _log.warning("the checkpoint in %s has a state %r that this Executor was not given", found.path, name)

        def load() -> None:
            for name, target in self._objects.items():
                try:
                    target.load_state_dict(saved[name])
                except Exception as error:
                    raise CheckpointError(
                        f"the object given as state={{{name!r}: ...}} ({type(target).__name__}) rejected its "
                        f"saved state: {type(error).__name__}: {error}"
                    ) from error

        return load

    def _plan_optimizers(self, saved: dict[str, list[object]]) -> list[tuple[Optimizer, dict[str, object]]]:
        plans = []
        if saved.keys() != self._steps.keys():
            raise CheckpointError(
                f"the checkpoint has the steps {sorted(saved)}, but this Executor has {sorted(self._steps)}"
            )
        for name, step in self._steps.items():
            if len(saved[name]) != len(step.optimizers):
                raise CheckpointError(
                    f"the checkpoint has {len(saved[name])} optimizers for step {name!r}, but this Executor has "
                    f"{len(step.optimizers)}"
                )
            for index, optimizer in enumerate(step.optimizers):
                entry = restrict(cast("dict[str, object]", saved[name][index]), step.model)
                names = parameter_names(optimizer, self._parameters(name))
                plans.append((optimizer, by_position(entry, optimizer, names, f"optimizer {index} of {name!r}")))
        return plans

    def _plan_remote(
        self,
        found: Checkpoint,
        state: Mapping[str, object],
        tensors: Mapping[str, Tensor],
        plans: list[tuple[Optimizer, dict[str, object]]],
    ) -> Callable[[], None]:
        """Take the states of parameters on servers out of the ``plans``; return functions that load them there."""
        remote = self.remote
        servers = cast("dict[str, list[dict[str, dict[str, object]]]] | None", state.get("servers"))
        tables = {} if servers is None else {entry["spec"]["name"]: entry for entry in servers["tables"]}
        mine = [] if remote is None else remote.embeddings
        if sorted(tables) != sorted(mine):  # type: ignore[type-var]
            raise CheckpointError(f"the checkpoint has the RemoteEmbeddings {list(tables)}, but this model has {mine}")
        if remote is None:
            return lambda: None
        kept: dict[Tensor, ParameterState] = {}
        for optimizer, plan in plans:
            everyone = list(parameters_of(optimizer))
            states = cast("dict[int, dict[str, object]]", plan["state"])
            for moved in remote.moved:
                if moved.optimizer is not optimizer:
                    continue
                position = next(k for k, parameter in enumerate(everyone) if parameter is moved.parameter)
                try:
                    kept[moved.parameter] = from_torch(moved.rule(), tensors[moved.name], states.pop(position, {}))
                except ValueError as error:
                    raise CheckpointError(f"{moved.name}: {error}") from error

        def replace() -> None:
            groups = lambda group: found.tensors(f"servers.{group}")  # noqa: E731
            self._put_there([0], lambda: remote.replace_embeddings(servers or {}, groups))
            self._put_there(range(self._stages), lambda: remote.replace_moved(kept))
            remote.continue_from(sum(runner.steps for runner in self._runners.values()))

        return replace

    def _put_there(self, ranks: Collection[int], put: Callable[[], None]) -> None:
        """Let ``ranks`` load state into the servers while the others wait."""
        self._together(lambda: put() if self._rank in ranks else None, "could not load the checkpoint into the servers")

    def _plan_schedulers(
        self, saved: dict[str, list[dict[str, object]]]
    ) -> list[tuple[LRScheduler, dict[str, object]]]:
        plans: list[tuple[LRScheduler, Any]] = []
        for name, step in self._steps.items():
            if len(saved[name]) != len(step.schedulers):
                raise CheckpointError(
                    f"the checkpoint has {len(saved[name])} schedulers for step {name!r}, but this Executor has "
                    f"{len(step.schedulers)}"
                )
            for index, (entry, scheduler) in enumerate(zip(saved[name], step.schedulers, strict=True)):
                if entry["scheduler"] != type(scheduler).__qualname__:
                    raise CheckpointError(
                        f"scheduler {index} of {name!r} is {type(scheduler).__qualname__}, but the checkpoint has "
                        f"{entry['scheduler']}; load with the scheduler that was saved"
                    )
                here = scheduler.state_dict()
                places, tensors = checkpoint.split(entry["state"])
                devices = {key: tensor.device for key, tensor in checkpoint.split(to_save(here))[1].items()}
                there = {key: tensor.to(devices.get(key, "cpu")) for key, tensor in tensors.items()}
                what = f"scheduler {index} of {name!r}"
                plans.append((scheduler, restored(checkpoint.join(places, there), here, what, plans)))
        return plans

    def _rank_state(self, found: Checkpoint, state: dict[str, object], rank: int) -> dict[str, Any]:
        group = f"rank{rank}"
        tensors = found.tensors(group) if group in found.groups else {}
        return checkpoint.join(cast("list[object]", state["ranks"])[rank], tensors)  # type: ignore[no-any-return]

    def _positions_of(self, ranks: _Ranks, state: dict[str, object]) -> dict[str, list[object]]:
        """By loader, the position of each worker that saved."""
        if not self.loaders:
            return {}
        saved = [ranks(row[0])["loaders"] for row in rows_of(state)]
        return {name: [positions[name] for positions in saved] for name in self.loaders if name in saved[0]}

    def _as_many_rows(self, state: dict[str, object]) -> bool:
        return len(rows_of(state)) == self._size // self._stages

    def _restore_counts(self, ranks: _Ranks, state: dict[str, object]) -> None:
        alike = self._as_many_rows(state)
        row = rows_of(state)[self._row if alike else 0]
        saved = cast("dict[str, dict[str, Any]]", ranks(row[0])["counts"])
        for name, runner in self._runners.items():
            counts = saved[name]
            # With other workers the mean is another: they exchange their rows again.
            runner.restore(counts["runs"], counts["steps"], counts["mean_rows"] if alike else None)
            known = name in self.loaders and state["workers"] == self._size
            runner.epoch_runs = counts["epoch_runs"] if known else None  # until the next epoch
            if runner.scale is not None and counts["loss_scale"]:
                runner.scale.restore(counts["loss_scale"])

    def _restore_pipes(self, ranks: _Ranks, state: dict[str, object]) -> None:
        """Restore the pipes' random streams; another number of pipelines starts new streams."""
        as_many = self._as_many_rows(state)
        row = rows_of(state)[self._row if as_many else 0]
        saved = ranks(row[0]).get("pipes", {})
        for prefix, (seed, calls) in cast("dict[str, tuple[int, int]]", saved).items():
            pipe = self._models.get(prefix)
            if isinstance(pipe, Pipe):
                pipe.calls = calls
                if as_many:
                    pipe.seed = seed


def _model_state(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, object]]:
    for prefix, model in models.items():
        for name, value in model.state_dict().items():
            yield prefix + name, value


def _optimizer_states(
    steps: Mapping[str, TrainStep],
    parameters: Callable[[str], Mapping[str, Tensor]],
    elsewhere: Mapping[Tensor, dict[str, object]],
) -> dict[str, list[object]]:
    return {
        name: [
            by_parameter_name(optimizer, parameter_names(optimizer, parameters(name)), elsewhere)
            for optimizer in step.optimizers
        ]
        for name, step in steps.items()
    }


def _scheduler_states(steps: Mapping[str, TrainStep]) -> dict[str, list[dict[str, object]]]:
    return {
        name: [
            {"scheduler": type(scheduler).__qualname__, "state": to_save(scheduler.state_dict())}
            for scheduler in step.schedulers
        ]
        for name, step in steps.items()
    }


def check_encoding(
    steps: Mapping[str, TrainStep], models: Mapping[str, nn.Module], objects: Mapping[str, HasState]
) -> None:
    """Raise ``ValueError`` for what a checkpoint cannot hold; an optimizer's own state is not there yet."""
    states: dict[str, object] = {}
    for name, target in objects.items():
        with suppress(Exception):  # one that needs the executor, or a first batch: the save says so
            states[name] = target.state_dict()
    tried = {
        "optimizers": _optimizer_states(steps, lambda name: names_of(steps[name].model), {}),
        "schedulers": _scheduler_states(steps),
        "extra": {name: value for name, value in _model_state(models) if not isinstance(value, Tensor)},
        "objects": states,
    }
    state, _ = checkpoint.split(tried)
    try:
        encode(state)
    except ValueError as error:
        raise ValueError(f"{error}; or give what holds it a state_dict() without it") from None


def _bytes(value: Tensor) -> bytes:
    return f"{value.dtype} {tuple(value.shape)} ".encode() + value.view(-1).view(torch.uint8).numpy().tobytes()


def _tensors(found: Checkpoint, group: str) -> Mapping[str, Tensor]:
    return found.tensors(group) if group in found.groups else {}


def _newest(path: Place) -> Checkpoint | None:
    """Return the newest checkpoint of an Executor in or under ``path``.

    Others under it, such as those that servers keep for themselves, are passed over. One in ``path`` itself is returned
    if there is no other, to be refused.
    """
    found = checkpoint.read_newest(path, wanted=_of_an_executor)
    if found is None or _of_an_executor(found.state) or _name_of(found.path) == _name_of(path):
        return found
    return None


def _of_an_executor(state: object) -> bool:
    return isinstance(state, dict) and "format" in state


def _name_of(path: Place) -> str:
    return getattr(path, "url", str(path))


def _checked_state(found: Checkpoint) -> dict[str, object]:
    state = found.state
    if not isinstance(state, dict) or state.get("format") != _FORMAT or not {"model", "optimizer"} <= set(found.groups):
        raise CheckpointError(f"the checkpoint in {found.path} was not saved by an Executor of this version")
    return state


# A worker's own state on its way to rank 0.


def _pack(structure: object) -> bytes:
    tensors: list[Tensor] = []
    text = msgspec.json.encode(encode(structure, tensors)).decode()
    # Cloned: tied tensors share memory, which the format refuses.
    numbered = {str(number): tensor.clone().contiguous() for number, tensor in enumerate(tensors)}
    return safetensors.torch.save(numbered, metadata={"state": text})


def _unpack(data: bytes) -> object:
    numbered = safetensors.torch.load(data)  # the format's own reader, lengths and bytes: nothing is unpickled
    header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")], type=dict[str, object])
    text = cast("dict[str, str]", header["__metadata__"])["state"]
    return decode(msgspec.json.decode(text), [numbered[str(number)] for number in range(len(numbered))])
