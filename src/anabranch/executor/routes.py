"""The place of every parameter: decided once, from the mode and the model, and shown by ``Executor.routes()``.

::

    mode          tables that are only looked up      everything else
    None          here                                here
    AllReduce     workers                             workers
    Hybrid        servers, by row                     workers
    PS            servers, by row                     servers, whole
    (any)         what is frozen, in no optimizer, or shared by ranks of a Pipe: workers;
                  RemoteEmbedding: servers, by row
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from anabranch.autodiff.hooks import foreign_hooks
from anabranch.autodiff.moved_parameter import MovedParameter, Switch
from anabranch.choices import choice
from anabranch.executor.steps import Step, TrainStep, parameters_of
from anabranch.job import job
from anabranch.parameter_server import RemoteEmbedding, rule_of
from anabranch.pipeline import Pipe
from anabranch.pipeline.pipe import PipeRanks
from anabranch.tables import RowOptimizer

CommMode = Literal["AllReduce", "PS", "Hybrid"]
COMM_MODES: tuple[CommMode, ...] = ("AllReduce", "PS", "Hybrid")
"""The modes in which workers communicate."""
_log = logging.getLogger("anabranch.executor")
_SERVED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def comm_mode_of(
    word: str | None,
    steps: Mapping[str, Step],
    group: dist.ProcessGroup | None = None,
    routes: Mapping[str, str] | None = None,
) -> CommMode | None:
    """Return the mode that ``word`` names, in any case.

    Args:
        word: a mode; ``"auto"`` is ``None`` where one pipeline covers the workers, else ``"Hybrid"`` in a job with
            servers, else ``"AllReduce"`` with several workers.
        steps: of the Executor.
        group: the workers; by default those of torch.distributed, or of the job.
        routes: exceptions from the mode, which ``None`` cannot have.

    Raises:
        ValueError: it names none, or nobody said which ranks beside a pipeline across ranks are the same stage.
    """
    mode: CommMode | Literal["auto"] | None = choice("comm_mode", word, ("auto", None, *COMM_MODES))
    if mode is None and routes:
        raise ValueError("routes= makes exceptions from a comm_mode; give comm_mode='AllReduce', 'PS' or 'Hybrid'")
    if mode != "auto":
        return mode
    pipes = [step.model.process_group for step in steps.values() if isinstance(step.model, Pipe)]
    size = dist.get_world_size(group) if group is not None or dist.is_initialized() else job().world_size
    lines = [dist.get_world_size(line) for line in pipes if line is not None and group is None]
    if lines and size not in lines:
        raise ValueError(
            f"the Pipe has {lines[0]} of the job's {size} ranks, so others train the same stages: give the Executor "
            "process_group=grid.data_group, or comm_mode=None to train each pipeline alone"
        )
    chosen: CommMode | None = None if lines else "Hybrid" if job().servers else "AllReduce" if size > 1 else None
    if job().rank == 0:
        _log.info("comm_mode is %r (workers: %d, servers: %d)", chosen, size, len(job().servers))
    return chosen


class Place(StrEnum):
    """The place of one parameter, as ``Executor.routes()`` shows it."""

    HERE = "this process"
    WORKERS = "workers"
    ROWS = "servers, by row"
    WHOLE_TABLE = "servers, table read whole"
    WHOLE = "servers, whole"

    @property
    def served(self) -> bool:
        """True if it lives on the servers."""
        return self not in (Place.HERE, Place.WORKERS)


@dataclass(frozen=True, slots=True)
class ServedParameter:
    """A parameter of the model that is on the servers while the executor is open.

    Attributes:
        name: on the servers, and in the model.
        names: all that it has in the models' state, if several modules share it.
        parameter: the optimizer's parameter; a placeholder if the servers have the only copy.
        shape, dtype: of the whole.
        place: where it lives.
        rule: its optimizer's settings, read again at each call.
        optimizer: which that is.
        sparse: a table whose lookups have sparse gradients, in every module that holds it.
    """

    name: str
    names: Sequence[str]
    parameter: nn.Parameter
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place
    rule: Callable[[], RowOptimizer]
    optimizer: torch.optim.Optimizer
    sparse: bool


@dataclass(frozen=True, slots=True)
class Route:
    """One parameter: where it lives, and why. ``str`` of it is a line of the table.

    Attributes:
        parameter: its name in the model.
        shape: of the whole; a dynamic vocabulary has -1 rows.
        bytes: of its values; 0 for a dynamic vocabulary.
        place: where.
        why: the reason.
        ids: how the rows that a step looks up on servers are known before it begins.
    """

    parameter: str
    shape: tuple[int, ...]
    bytes: int
    place: Place
    why: str
    dtype: torch.dtype = field(default=torch.float32, repr=False, compare=False)
    tensor: nn.Parameter | None = field(default=None, repr=False, compare=False)
    served: ServedParameter | None = field(default=None, repr=False, compare=False)
    ids: str = ""

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """Its row of the printed table."""
        return self.parameter, str(self.shape), f"{self.bytes:,}", self.place.value, self.why, self.ids

    def __str__(self) -> str:
        return "  ".join(self.cells())


class Routes(tuple[Route, ...]):
    """All parameters' routes; ``str`` of them is a table."""

    __slots__ = ()

    def with_ids(self, rules: Mapping[str, str]) -> Routes:
        """Return these with the rule by which the ids of each table are known; ``rules`` has those that are."""
        return Routes(
            replace(route, ids=rules.get(route.parameter, "when looked up")) if route.place is Place.ROWS else route
            for route in self
        )

    def __str__(self) -> str:
        rows = [("parameter", "shape", "bytes", "where it lives", "why", "ids"), *(route.cells() for route in self)]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {size:>{widths[2]}}  {place:<{widths[3]}}  {why:<{widths[4]}}"
            f"  {ids}".rstrip()
            for name, shape, size, place, why, ids in rows
        )

    def at(self, *places: Place) -> list[Route]:
        """Those that live at one of ``places``."""
        return [route for route in self if route.place in places]

    @property
    def all_reduces(self) -> bool:
        """True if there are gradients that the workers sum among themselves."""
        return any(route.tensor is not None and route.tensor.requires_grad for route in self.at(Place.WORKERS))

    @property
    def served(self) -> bool:
        """True if anything lives on the servers."""
        return any(route.place.served for route in self)


def plan_routes(
    steps: Mapping[str, Step],
    models: Mapping[str, nn.Module],
    mode: CommMode | None,
    overrides: Mapping[str, str] | None,
    *,
    use_sparse_pull: bool = True,
    caches: bool = False,
) -> Routes:
    """Decide the place of each parameter of ``models`` (by the prefix of its names).

    Raises:
        ValueError: a route of an unknown parameter or to an unknown place, a parameter or an optimizer that servers
            cannot run, or options that exclude one another; names it and the cure.
    """
    named = {
        f"{prefix}{name}": parameter
        for prefix, model in models.items()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    pipes = {prefix: model for prefix, model in models.items() if isinstance(model, Pipe)}
    tied = {parameter for pipe in pipes.values() for parameter in PipeRanks(pipe).tied()}
    traced = {parameter for pipe in pipes.values() if PipeRanks(pipe).opened() for parameter in pipe.parameters()}
    known = {*named, *(f"{prefix}{name}" for prefix, pipe in pipes.items() for name in pipe.elsewhere)}
    if unknown := [name for name in overrides or {} if name not in known]:
        raise ValueError(f"routes= names {unknown[0]!r}; the parameters are: {', '.join(named)}")
    chosen = {name: choice(f"the route of {name!r}", place, COMM_MODES) for name, place in (overrides or {}).items()}
    owners = _owners(steps)
    routes: list[Route] = []
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named.items():
        if type(parameter) is not Switch:  # what it stands for is not routed, or by another name
            names.setdefault(parameter, []).append(name)
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {parameter: [] for parameter in names}
    for module in dict.fromkeys(module for model in models.values() for module in model.modules()):
        for label, value in module._parameters.items():
            if value in uses:
                uses[value].append((module, label))
    for parameter, (name, *others) in names.items():  # models of several steps may share it: one place
        override = next((chosen[each] for each in (name, *others) if each in chosen), None)
        if isinstance(parameter, MovedParameter) and parameter in owners:
            parameter.refuse("a second Executor")
        users = uses[parameter]
        place, why = _place(name, parameter, users, mode, override, owned=parameter in owners, tied=parameter in tied)
        if place is Place.ROWS and not use_sparse_pull:
            if caches:
                raise ValueError("use_sparse_pull=False refreshes whole tables, which leaves nothing to cache=")
            place = Place.WHOLE_TABLE
        if place is Place.ROWS and parameter in traced:
            raise ValueError(
                f"{name} is a table of a model that split(at=...) cuts, whose code is traced with its parameters, but "
                "a table whose rows are on servers is not here; give split glue=, refresh the whole table with "
                f"use_sparse_pull=False, or {_on_workers(name)}"
            )
        served, shape, dtype = None, tuple(parameter.shape), parameter.dtype
        if place.served:
            _check_served(name, parameter, users)
            rule, optimizer = _rule(name, parameter, owners[parameter]), owners[parameter][0]
            sparse = all(getattr(module, "sparse", False) is True for module, _ in users)
            served = ServedParameter(name, (name, *others), parameter, shape, dtype, place, rule, optimizer, sparse)
        routes.append(Route(name, shape, parameter.nbytes, place, why, dtype, parameter, served))
    return Routes([*routes, *_remote_embeddings(steps, use_sparse_pull)])


def _on_workers(name: str) -> str:
    return f"keep it on the workers: routes={{{name!r}: 'AllReduce'}}"


def _owners(steps: Mapping[str, Step]) -> dict[nn.Parameter, list[torch.optim.Optimizer]]:
    """Return the optimizers that hold each parameter."""
    owners: dict[nn.Parameter, list[torch.optim.Optimizer]] = {}
    optimizers = [o for step in steps.values() if isinstance(step, TrainStep) for o in step.optimizers]
    for optimizer in dict.fromkeys(optimizers):
        for parameter in parameters_of(optimizer):
            owners.setdefault(parameter, []).append(optimizer)  # type: ignore[arg-type]
    return owners


def _place(
    name: str,
    parameter: nn.Parameter,
    users: Sequence[tuple[nn.Module, str]],
    mode: CommMode | None,
    override: CommMode | None,
    *,
    owned: bool,
    tied: bool,
) -> tuple[Place, str]:
    embedded = [isinstance(module, nn.Embedding | nn.EmbeddingBag) and label == "weight" for module, label in users]
    looked_up = all(embedded)
    if mode is None:
        return Place.HERE, "comm_mode=None"
    if not parameter.requires_grad:
        return Place.WORKERS, "frozen"
    if not owned:
        return Place.WORKERS, "no optimizer moves it"
    obstacle = "shared by stages on several ranks" if tied else ""
    if looked_up and not tied:
        hooked = "it has gradient hooks" if foreign_hooks(parameter) else ""
        obstacle = "it is an nn.Parameter of another class" if type(parameter) is not nn.Parameter else hooked
    why = "" if override is None else f"routes={{{name!r}: {override!r}}}"
    if (override or mode) == "AllReduce":
        return Place.WORKERS, why or "comm_mode='AllReduce'"
    if obstacle:
        if override is not None:
            raise ValueError(f"routes={{{name!r}: {override!r}}}: it stays on the workers ({obstacle}); leave it out")
        return Place.WORKERS, obstacle
    if looked_up:
        return Place.ROWS, why or f"an embedding's table under {mode}"
    if (override or mode) == "PS":
        return Place.WHOLE, why or "comm_mode='PS'"
    return Place.WORKERS, why or ("a table that is not only looked up" if any(embedded) else "dense under Hybrid")


def _check_served(name: str, parameter: nn.Parameter, users: Iterable[tuple[nn.Module, str]]) -> None:
    if parameter.dtype not in _SERVED:
        raise ValueError(
            f"{name} is {parameter.dtype}; servers hold float32, float64, bfloat16 and float16; use one of them, or "
            f"{_on_workers(name)}"
        )
    for module, _ in users:
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{name}: max_norm={module.max_norm} shrinks rows in place whenever they are looked up, which the "
                f"servers' copy would not see; leave it None, or with a single worker {_on_workers(name)}"
            )


def _rule(name: str, parameter: nn.Parameter, optimizers: list[torch.optim.Optimizer]) -> Callable[[], RowOptimizer]:
    if len(optimizers) > 1:
        raise ValueError(
            f"{name} is held by {len(optimizers)} optimizers of different steps, but a parameter on the servers has "
            f"one; share one optimizer, or {_on_workers(name)}"
        )
    try:
        return rule_of(optimizers[0], parameter, name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; or {_on_workers(name)}") from None


def _remote_embeddings(steps: Mapping[str, Step], use_sparse_pull: bool) -> list[Route]:
    routes: dict[str, Route] = {}
    for step in steps.values():
        for module in step.model.modules():
            if not isinstance(module, RemoteEmbedding) or module.name in routes:
                continue
            if not use_sparse_pull:
                raise ValueError(
                    f"use_sparse_pull=False holds whole tables on the workers, and RemoteEmbedding {module.name!r} "
                    "is never whole on one; leave use_sparse_pull=True"
                )
            rows, width = module.spec.rows, module.spec.width
            size, shape = (rows or 0) * width * module.spec.dtype.itemsize, (-1 if rows is None else rows, width)
            routes[module.name] = Route(module.name, shape, size, Place.ROWS, "RemoteEmbedding", module.spec.dtype)
    return list(routes.values())
