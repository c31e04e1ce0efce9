"""Training runs in which something changes between two steps, made in the plain loop and by each engine, and compared.

A test builds a ``TrainingCase``: the parts of a training loop, and ``change(k)``, called with 1 before the step at
index ``CHANGES[0]`` and with 2 before that at ``CHANGES[1]``. ``engine="graph"`` has its graph before the first change,
so a graph that keeps using values from before a change gives other losses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anabranch as ab

STEPS = 9
ERROR = "an error"
CHANGES = (5, 7)


def nothing(k: int) -> None:
    """A change that changes nothing."""


@dataclasses.dataclass
class TrainingCase:
    """A training loop's parts; ``batch(i)`` is step i's, ``around()`` what surrounds it, ``seen()`` Python state."""

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    optimizer: Any
    change: Callable[[int], None] = nothing
    batch: Callable[[int], Any] | None = None
    scheduler: Any = None
    rows: Callable[[Any], float] | None = None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    seen: Callable[[], object] = lambda: None
    between: Callable[[dict[str, Tensor]], None] | None = None  # after every step, with its loss
    clip: float | None = None
    undo: Callable[[], object] = lambda: None  # of what the case changed for the whole process

    def optimizers(self) -> list[Any]:
        return list(self.optimizer) if isinstance(self.optimizer, Sequence) else [self.optimizer]

    def batch_of(self, i: int) -> Any:
        if self.batch is not None:
            return self.batch(i)
        return torch.linspace(-1, 1, 12).reshape(3, 4) + 0.1 * i

    def change_before(self, i: int) -> None:
        if i in CHANGES:
            self.change(CHANGES.index(i) + 1)


Build = Callable[[pytest.MonkeyPatch], TrainingCase]


@dataclasses.dataclass
class Outcome:
    """The outcome of a run: a loss or an error's type a step, the final state, the warnings, and the engine."""

    losses: list[object]
    state: dict[str, object]
    said: set[str]
    engines: list[str]
    refused_at: int | None = None
    refusal: str = ""
    by_itself: str = ""  # why the optimizers step outside the graph, if they do
    errors: list[str] = dataclasses.field(default_factory=list)


# Comparing.


@dataclasses.dataclass(frozen=True)
class Bits:
    """A tensor's type, shape and bits; shown by its first values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bits: bytes
    values: str = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return f"<{self.dtype} {self.shape} {self.values}>"


def frozen(value: object) -> object:
    """Return a comparable copy, tensors by their bits."""
    if isinstance(value, Tensor):
        plain = value.detach().as_subclass(Tensor)
        if plain.layout is not torch.strided:
            plain = (
                plain.to_dense()
                if plain.layout is torch.sparse_coo
                else torch.cat([t.flatten() for t in plain.unbind()])
            )
        flat = plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
        return Bits(
            plain.dtype, tuple(plain.shape), flat.view(torch.uint8).cpu().numpy().tobytes(), f"{flat[:4].tolist()}"
        )
    if isinstance(value, np.ndarray | np.generic):
        return repr(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): frozen(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(v) for v in value]
    if callable(value):
        return type(value).__name__
    return value


def random_state() -> object:
    devices = frozen(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return [frozen(torch.get_rng_state()), devices, repr(random.getstate()), repr(np.random.get_state())]


def state_of(case: TrainingCase) -> dict[str, object]:
    """Parameters, buffers, optimizers' state and groups, schedulers, random numbers and the watched values."""
    optimizers = []
    for optimizer in case.optimizers():
        try:
            optimizers.append(frozen(optimizer.state_dict()))
        except KeyError:  # state of parameters that are in no group any more
            optimizers.append(frozen(list(optimizer.state.values())))
    schedulers = case.scheduler if isinstance(case.scheduler, list) else [case.scheduler]
    return {
        "parameters": {n: frozen(p) for n, p in case.model.named_parameters(remove_duplicate=False)},
        "buffers": {n: frozen(b) for n, b in case.model.named_buffers(remove_duplicate=False)},
        "training": {n: m.training for n, m in case.model.named_modules()},
        "optimizers": optimizers,
        "schedulers": [getattr(s, "last_epoch", None) for s in schedulers],
        "random numbers": random_state(),
        "seen": frozen(case.seen()),
    }


def differences(got: dict[str, object], wanted: dict[str, object]) -> list[str]:
    """Return the differences, named down to the leaf."""
    found: list[str] = []

    def compare(path: str, one: object, other: object) -> None:
        if one == other:
            return
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            for key in one:
                compare(f"{path} {key}", one[key], other[key])
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            for i, (a, b) in enumerate(zip(one, other, strict=True)):
                compare(f"{path} {i}", a, b)
        else:
            found.append(f"{path}:\n     got {str(one)[:300]}\n  wanted {str(other)[:300]}")

    compare("", got, wanted)
    return found


# Running.


@contextlib.contextmanager
def collected_warnings() -> Iterator[set[str]]:
    """Collect the block's warnings and its log records of at least WARNING."""
    said: set[str] = set()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.add(f"log: {record.getMessage()}")

    ear = Ear(logging.WARNING)
    logging.getLogger().addHandler(ear)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
            said |= {f"{type(w.message).__name__}: {w.message}" for w in caught}
    finally:
        logging.getLogger().removeHandler(ear)


def plain_step(case: TrainingCase, batch: Any) -> dict[str, Tensor]:
    """Take one step of the plain loop, which every engine must equal."""
    with case.around():
        for optimizer in case.optimizers():
            optimizer.zero_grad()
        result = case.loss(case.model, batch)
        loss, extras = result if isinstance(result, tuple) else (getattr(result, "loss", result), {})
        loss.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(case.model.parameters(), case.clip)
        for optimizer in case.optimizers():
            optimizer.step()
        if case.scheduler is not None:
            for scheduler in case.scheduler if isinstance(case.scheduler, list) else [case.scheduler]:
                scheduler.step()
    return {"loss": loss.detach()} | {name: value.detach() for name, value in extras.items()}


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def run(build: Build, engine: str | None) -> Outcome:
    """Run nine steps with ``engine``, or in the plain loop, which also takes the steps that engine="graph" refuses."""
    seed()
    with collected_warnings() as said, pytest.MonkeyPatch.context() as patch:
        case = build(patch)
        case.model.train()
        try:
            outcome = _steps(case, engine)
            outcome.state = state_of(case)
        finally:
            case.undo()
    outcome.said = said
    return outcome


def train_step(case: TrainingCase) -> ab.TrainStep:
    return ab.TrainStep(
        case.model, case.loss, case.optimizer, scheduler=case.scheduler, clip_grad_norm=case.clip, rows=case.rows
    )


def why_by_itself(executor: ab.Executor, name: str = "default") -> str:
    """Return the reason why the optimizers of a step that runs as a graph step outside of it; empty if they do not."""
    engine: Any = executor._runners[name].engine
    refused = engine._program.refused_update if executor.engine(name) == "graph" else None
    return "" if refused is None else str(refused)


def _steps(case: TrainingCase, engine: str | None) -> Outcome:
    outcome = Outcome([], {}, set(), [])
    with contextlib.ExitStack() as stack:
        executor = None
        if engine is not None:
            executor = stack.enter_context(ab.Executor({"train": train_step(case)}, engine=engine))  # type: ignore[arg-type]
        for i in range(STEPS):
            case.change_before(i)
            batch = case.batch_of(i)
            before = state_of(case) if engine == "graph" and executor is not None else {}
            try:
                if executor is None:
                    out = plain_step(case, batch)
                else:
                    with case.around():
                        out = executor.run("train", batch)
            except ab.CaptureError as error:
                if engine != "graph":
                    raise
                # The rest in the plain loop, on what the refusal left: nothing may have happened.
                outcome.refused_at, outcome.refusal = i, str(error)
                left = differences(state_of(case), before)
                assert not left, "a refused step changed " + "\n".join(left)
                stack.close()
                executor = None
                try:
                    out = plain_step(case, batch)
                except Exception as error:  # noqa: BLE001 - an error of the case is an outcome
                    outcome.losses.append(ERROR)
                    outcome.errors.append(f"step {i}: {type(error).__name__}: {error}")
                    continue
            except Exception as error:  # noqa: BLE001 - an error of the case is an outcome
                outcome.losses.append(ERROR)
                outcome.errors.append(f"step {i}: {type(error).__name__}: {error}")
                continue
            outcome.engines.append(executor.engine("train") if executor is not None else "plain")
            outcome.by_itself = why_by_itself(executor, "train") if executor is not None else ""
            outcome.losses.append(frozen(out["loss"]) if len(out) == 1 else frozen(out))
            if case.between is not None:
                case.between(out)
    return outcome


def check(build: Build, engine: str, wanted: Outcome | None = None) -> Outcome:
    """Assert that ``engine`` gives the results of the plain loop, without warnings unless it is "graph"."""
    if wanted is None:
        wanted = run(build, None)
    got = run(build, engine)
    wrong = []
    if got.losses != wanted.losses:
        wrong.append(f"losses:\n     got {got.losses}\n  wanted {wanted.losses}\n" + "\n".join(got.errors))
    wrong += differences(got.state, wanted.state)
    if engine != "graph" and got.said - wanted.said:
        wrong.append(f"said {got.said - wanted.said}")
    assert not wrong, f"engine={engine!r}, in use {got.engines}, differs in " + "\n".join(wrong)
    return got


# Small models.


def linear(*sizes: int) -> nn.Module:
    return nn.Linear(*(sizes or (4, 3)))


def sgd(model: nn.Module, **keywords: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1} | keywords))


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()
