"""``Planner``: plans of an executor's steps under any mode, from measurements of all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from anabranch.autodiff.moved_parameter import MovedParameter
from anabranch.executor.plan.costs import RowsHeld, StepFacts, plan_of
from anabranch.executor.plan.machine_profile import Profile
from anabranch.executor.plan.measuring import RowKind, measure
from anabranch.executor.plan.pipe_survey import survey_pipe
from anabranch.executor.plan.step_plan import Plan
from anabranch.executor.plan.step_survey import StepSurvey, survey_step
from anabranch.executor.routes import CommMode, Place, Route, Routes
from anabranch.executor.running.loss_module import ModelWithLoss, model_of
from anabranch.executor.running.step_runs import rows_of
from anabranch.executor.steps import TrainStep, parameters_of
from anabranch.parameter_server import RemoteEmbedding, users_of
from anabranch.pipeline import Pipe
from anabranch.tables import Family, RowOptimizer
from anabranch.tensors import Compression, Structure

if TYPE_CHECKING:
    from anabranch.collectives import Workers

__all__ = ["Planner"]

_Mode = TypeVar("_Mode", bound=CommMode | None)


class _Measured(msgspec.Struct):
    """The measurements of one worker, as the others get them."""

    profile: Profile
    survey: StepSurvey | None


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans; every worker calls ``plans`` at the same place.

    Attributes:
        models: of the executor, by the prefix of their tensors' names.
        workers: of the job; ``None`` is alone.
        servers: the number of them.
        compression: of rows on their way.
        timeout: seconds that a wait may last.
        caches: rows are cached here, so fewer of them cross than are looked up.
    """

    models: Mapping[str, nn.Module]
    workers: Workers | None
    servers: int
    compression: Compression | None
    timeout: float
    caches: bool = False

    def plans(
        self,
        name: str,
        step: TrainStep,
        batch: Structure | None,
        routes: Mapping[_Mode, Routes],
    ) -> dict[_Mode, Plan]:
        """Return a plan of ``step`` for each mode.

        Args:
            name: the step's.
            step: which.
            batch: this worker's; ``None`` if none has been seen.
            routes: by mode, where its parameters would live.
        """
        with nullcontext() if self.workers is None else _uncounted(self.workers):
            surveys, profile = self._measured(step, batch, [route for found in routes.values() for route in found])
        rank = 0 if self.workers is None else self.workers.rank
        return {
            mode: plan_of(
                mode, self._holdings(step, found), self._facts(name, step), profile, surveys, rank, servers=self.servers
            )
            for mode, found in routes.items()
        }

    def _measured(
        self, step: TrainStep, batch: Structure | None, everything: Sequence[Route]
    ) -> tuple[Sequence[StepSurvey | None], Profile]:
        """Return every worker's observations, in the order of ranks, and rank 0's profile."""
        if self.workers is not None:
            self.workers.barrier(operation="plan")
        tables: dict[Tensor, str] = {
            route.tensor: route.parameter
            for route in everything
            if route.tensor is not None and not isinstance(route.tensor, MovedParameter) and self._looked_up(route)
        }
        survey = None
        if batch is not None and rows_of(step, batch):
            pipe = step.model
            survey = survey_pipe(step, pipe, batch) if isinstance(pipe, Pipe) else survey_step(step, batch, tables)
        device = next((p.device for p in step.model.parameters()), torch.device("cpu"))
        row_kind, whole = self._served_kinds(step, everything, survey)
        profile = measure(step.optimizers, device, self.workers, row_kind, whole, timeout=self.timeout)
        if self.workers is None:
            return [survey], profile
        texts = self.workers.all_gather_bytes(msgspec.json.encode(_Measured(profile, survey)), operation="plan")
        everyone = [msgspec.json.decode(text, type=_Measured) for text in texts]
        return [measured.survey for measured in everyone], everyone[0].profile

    def _served_kinds(
        self, step: TrainStep, routes: Sequence[Route], survey: StepSurvey | None
    ) -> tuple[RowKind | None, RowOptimizer | None]:
        """Return the kind of the table that is requested most, and the optimizer of parameters that are read whole."""
        tables: list[tuple[int, RowKind]] = []
        whole: RowOptimizer | None = None
        for route in routes:
            rule = self._rule(step, route)
            if not route.place.served or rule is None:
                continue
            if route.place is Place.WHOLE:
                whole = whole or rule
                continue
            spec = None if route.tensor is not None else self._embedding(route).spec
            dtype = route.tensor.dtype if route.tensor is not None else spec.dtype  # type: ignore[union-attr]
            read = survey.tables[route.parameter].read if survey is not None and route.parameter in survey.tables else 0
            quiet = rule.moves_quiet_rows and not self._sparse(route) and rule.family is not Family.SPARSE_ADAM
            tables.append((read * route.shape[1], RowKind(route.shape[1], dtype, rule, every_row_moves=quiet)))
        return max(tables, key=lambda found: found[0])[1] if tables else None, whole

    def _rule(self, step: TrainStep, route: Route) -> RowOptimizer | None:
        if route.rule is not None:
            return route.rule()
        if route.tensor is None:
            own = self._embedding(route).rule
            return own() if own is not None else RowOptimizer.from_torch(step.optimizers[0])
        return None

    def _embedding(self, route: Route) -> RemoteEmbedding:
        modules = [module for model in self.models.values() for module in model.modules()]
        return next(m for m in modules if isinstance(m, RemoteEmbedding) and m.name == route.parameter)

    def _users(self, route: Route) -> list[nn.Module]:
        assert route.tensor is not None
        return [module for module, _ in users_of(route.tensor, self.models.values())]

    def _looked_up(self, route: Route) -> bool:
        """Return True for a table that no module uses otherwise."""
        if route.place is Place.ROWS or route.tensor is None:
            return True
        users = self._users(route)
        return bool(users) and all(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in users)

    def _sparse(self, route: Route) -> bool:
        if route.tensor is None:
            return True
        users = self._users(route)
        return bool(users) and all(getattr(module, "sparse", False) is True for module in users)

    def _holdings(self, step: TrainStep, routes: Routes) -> list[RowsHeld]:
        owners = {p: type(optimizer).__name__ for optimizer in step.optimizers for p in parameters_of(optimizer)}
        own = {model_of(step.model), *([step.model.loss] if isinstance(step.model, ModelWithLoss) else [])}
        prefixes = tuple(prefix for prefix, model in self.models.items() if model in own)
        modules, held = set(step.model.modules()), set(step.model.parameters())
        found = []
        for route in routes:
            tensor = route.tensor
            if tensor is None:
                module = self._embedding(route)
                facts = (route.parameter, route.shape, module.spec.dtype, route.place)
                if module in modules:
                    found.append(RowsHeld(*facts, looked_up=True, sparse=True))
            elif tensor in held or (route.place is Place.ROWS and route.parameter.startswith(prefixes)):
                found.append(
                    RowsHeld(
                        route.parameter,
                        route.shape,
                        tensor.dtype,
                        route.place,
                        tensor,
                        trained=tensor.requires_grad,
                        looked_up=self._looked_up(route),
                        sparse=self._sparse(route),
                        optimizer=owners.get(tensor),
                    )
                )
        return found

    def _facts(self, name: str, step: TrainStep) -> StepFacts:
        alone = self.workers is None or self.workers.size == 1
        return StepFacts(
            name,
            accumulate=step.accumulate,
            mean=step.reduction == "mean" and not (alone and step.accumulate == 1),
            looks_for_nan=step.skip_nonfinite is not None,
            skips_together=bool(step.skip_nonfinite) and not alone,
            clips=step.clip_grad_norm is not None,
            compression=self.compression,
            caches=self.caches,
        )


@contextmanager
def _uncounted(workers: Workers) -> Iterator[None]:
    """Leave the workers' counts unchanged: planning is not a step."""
    counts = workers.bytes_sent, workers.wait_seconds
    try:
        yield
    finally:
        workers.bytes_sent, workers.wait_seconds = counts
