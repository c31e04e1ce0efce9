"""``Spec``: what an Executor runs and how, checked before anything is started, for all of its parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch import nn

from anabranch.checkpoint.generations import check_path
from anabranch.choices import choice
from anabranch.deadline import check_seconds
from anabranch.executor.routes import CommMode, Routes, comm_mode_of, plan_routes
from anabranch.executor.steps import Step, StepDescription, TrainStep, distinct_models, named_steps
from anabranch.parameter_server import Consistency
from anabranch.parameter_server.messages import Compression, check_compression
from anabranch.pipeline import Pipe
from anabranch.tables import Cache

EngineName: TypeAlias = Literal["tape", "graph"]
_ENGINES: tuple[EngineName, ...] = ("tape", "graph")

Served: TypeAlias = Literal["refuse", "adopt", "replace"]
"""The treatment of tables and parameters that servers have under an executor's names before it has trained."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The arguments of an Executor that its parts share, as its docstring has them.

    Attributes:
        models: every model and loss module once, by the prefix of its tensors' names.
        routes: the place of each parameter under ``comm_mode``, the mode in use.
    """

    steps: Mapping[str, Step]
    models: Mapping[str, nn.Module]
    comm_mode: CommMode | None
    routes: Routes
    consistency: Consistency = field(default_factory=lambda: Consistency.parse("bsp"))
    engine: EngineName = "tape"
    compile: bool = False
    cache: Cache | None = None
    row_compression: Compression | None = None
    prefetch: bool = True
    timeout: float = 600.0
    heartbeat: float = 1.0
    served: Served = "refuse"
    check_workers: int = 100

    @property
    def training(self) -> dict[str, TrainStep]:
        """The steps that train, by name."""
        return {name: step for name, step in self.steps.items() if isinstance(step, TrainStep)}

    def run_together(self, routes: Routes) -> bool:
        """Return True if workers wait for each other: not where they all-reduce nothing, and push without merging."""
        return self.consistency.merges or not routes.served or routes.all_reduces

    def check_served(self) -> None:
        """Raise ``ValueError`` for a training step that cannot run with parameters on servers."""
        for name, step in self.training.items():
            delays = self.cache is not None and self.cache.push_bound > 0
            clips = step.clip_grad_norm is not None
            refused = [
                (step.precision == "float16", "has precision='float16', but servers cannot unscale its gradients; use "
                 "precision='bfloat16' with parameters on servers"),
                (step.clip_grad_value is not None, "has clip_grad_value, but gradients averaged on servers cannot be "
                 "clipped here; use clip_grad_norm with parameters on servers"),
                (clips and not self.consistency.merges, f"clips gradients, but under {self.consistency.name!r} each "
                 "worker's push is applied as it arrives, so the step has no norm; use consistency='bsp', or no "
                 "clip_grad_norm"),
                (clips and delays, "clips gradients, but a cache with push_bound delays some of them, so the step has "
                 "no norm; use push_bound=0, or no clip_grad_norm"),
            ]  # fmt: skip
            for applies, why in refused:
                if applies:
                    raise ValueError(f"step {name!r} {why}")


def spec_of(
    steps: StepDescription | Mapping[str, StepDescription],
    comm_mode: str | None,
    group: dist.ProcessGroup | None,
    routes: Mapping[str, str] | None,
    *,
    use_sparse_pull: bool,
    consistency: str,
    **options: Any,
) -> Spec:
    """Check the arguments of an Executor; ``options`` are fields of ``Spec``.

    Raises:
        TypeError: names the argument, its value, and what is accepted.
        ValueError: a value that is not possible, or one beside another.
    """
    named = named_steps(steps)
    mode = comm_mode_of(comm_mode, named, group, routes)
    models, ordering = distinct_models(named), Consistency.parse(consistency)
    options["engine"] = choice("engine", options["engine"], _ENGINES)
    options["served"] = choice("served", options["served"], ("refuse", "adopt", "replace"))
    _check_options(**options)
    caches = options["cache"] is not None
    places = plan_routes(named, models, mode, routes, use_sparse_pull=use_sparse_pull, caches=caches)
    spec = Spec(named, models, mode, places, consistency=ordering, **options)
    _check_engine(spec)
    return spec


def _check_options(*, cache: object, check_workers: object, **others: Any) -> None:
    check_compression(others["row_compression"])
    check_seconds(timeout=others["timeout"], heartbeat=others["heartbeat"])
    if not isinstance(cache, Cache | None):
        raise TypeError(f"cache is an ab.Cache, such as ab.Cache(capacity=1000), or None, got {cache!r}")
    if isinstance(check_workers, bool) or not isinstance(check_workers, Integral):
        raise TypeError(f"check_workers is a number of steps, or 0 for never, got {check_workers!r}")
    if check_workers < 0:
        raise ValueError(f"check_workers is a number of steps, or 0 for never, got {check_workers!r}")


def _check_engine(spec: Spec) -> None:
    if spec.compile and spec.engine == "tape":
        raise ValueError("compile=True compiles the graph, but the engine is 'tape'; give engine='graph'")
    for name, step in spec.training.items():
        if isinstance(step.model, Pipe):
            continue
        if spec.engine == "tape" and step.activation_budget is not None:
            raise ValueError(
                f"step {name!r} has an activation_budget, which needs a graph, but the engine is 'tape'; give "
                "engine='graph', or checkpoint layers with torch.utils.checkpoint"
            )
        if spec.engine == "graph" and step.precision == "float16":
            raise ValueError(
                f"step {name!r} has precision='float16', whose loss is scaled on the tape, but engine='graph' was "
                "requested; use precision='bfloat16', or engine='tape'"
            )


# What belongs to one part alone.


def check_arguments(steps: Mapping[str, Step], *, seed: object, dataloaders: object, state: object) -> None:
    """Raise for an argument of the wrong kind, or a loader for a step that does not exist."""
    if not isinstance(seed, Integral | None):
        raise TypeError(f"seed is a whole number, or None, got {seed!r}")
    if not isinstance(dataloaders, Mapping | None):
        raise TypeError(f"dataloaders is a dict of loaders by the step's name, got {dataloaders!r}")
    if unknown := sorted({*(dataloaders or ())} - {*steps}):
        raise ValueError(f"no step is called {unknown[0]!r}; the steps are {sorted(steps)}")
    if not isinstance(state, Mapping | None):
        raise TypeError(f"state is a dict of objects by name, got {type(state).__name__}")
    for name in state or {}:
        if not isinstance(name, str):
            raise TypeError(f"the names in state are strings, got {name!r}")


def check_log_path(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the path of the file that ``record_loads`` appends to.

    Raises:
        ValueError: no file can be made there.
    """
    checked = None if path is None else check_path(path, "log_path")
    if checked is not None and not checked.parent.is_dir():
        raise ValueError(f"log_path={path!r} is in a directory that does not exist; create {checked.parent}")
    return checked
