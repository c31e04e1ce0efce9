"""A resumed run is the undisturbed one, bit for bit: its optimizers, schedules, frozen layers, buffers and epochs."""

from __future__ import annotations

import enum
import inspect
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import anabranch as ab
from toys import assert_same, in_job

MakeOptimizer = Callable[[Any], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(batch[0].to(dtype)).float(), batch[1])


class Program:
    """A script that trains; made anew, it is the restarted script."""

    def __init__(
        self, make: MakeOptimizer, schedule: MakeScheduler | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)
        self.model = nn.Sequential(*layers).to(dtype)
        parameters = [*self.model.parameters()]
        if make is torch.optim.Muon:
            parameters = [parameter for parameter in parameters if parameter.ndim == 2]
        self.optimizer = make(parameters)
        scheduler = None if schedule is None else schedule(self.optimizer)
        self.executor = ab.Executor(ab.TrainStep(self.model, loss, self.optimizer, scheduler=scheduler), engine="tape")

    def run(self, steps: range) -> list[float]:
        return [self.executor.run(batch=batch_of(step))["loss"].item() for step in steps]

    def types(self) -> list[list[object]]:
        states = self.optimizer.state_dict()["state"].values()
        return [[_type_of(value) for value in state.values()] for state in states]


def _type_of(value: object) -> object:
    return value.dtype if isinstance(value, Tensor) else type(value)


def assert_resumes(path: Path, *arguments: Any) -> Program:
    """A run that is saved after 3 steps ends as one that was not disturbed."""
    first = Program(*arguments)
    with first.executor:
        first.run(range(3))
        first.executor.save(path)
        expected = first.run(range(3, 7))
    (file,) = path.glob("model*.safetensors")
    assert safetensors.torch.load_file(file).keys() == first.model.state_dict().keys()  # the model's own names
    second = Program(*arguments)
    with second.executor:
        torch.manual_seed(1234)  # the generators come from the checkpoint, too
        second.executor.load(path)
        assert second.run(range(3, 7)) == expected, arguments
    assert_same(second.model, first.model)
    assert first.types() == second.types(), arguments
    return second


# Optimizers.


class MasterWeights(Optimizer):
    """Float32 copies of the weights, a counter of whole numbers and a name, as optimizers of bfloat16 models keep."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.003})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state |= {"master": weight.float(), "count": torch.zeros((), dtype=torch.int64), "rule": "sign"}
                    state["moments"] = [torch.zeros(2, dtype=torch.float64), {"half": torch.zeros(2).half()}]
                state["count"] += 2**24 + 1  # which bfloat16 and float32 cannot hold
                assert state["rule"] == "sign"
                state["master"] -= group["lr"] * weight.grad.float() * (state["count"] % 7)
                weight.copy_(state["master"])


def every_optimizer() -> list[MakeOptimizer]:
    """All of this PyTorch and ours, but for those that train other parameters, or with a closure."""
    classes = [value for value in vars(torch.optim).values() if inspect.isclass(value) and issubclass(value, Optimizer)]
    unlike = {Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    return [MasterWeights, ab.RowWiseAdagrad, ab.FTRL, *sorted(set(classes) - unlike, key=lambda one: one.__name__)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_every_optimizer_of_torch_keeps_the_types_of_its_state(tmp_path: Path, dtype: torch.dtype) -> None:
    assert len(every_optimizer()) > 12
    for number, make in enumerate(every_optimizer()):
        assert_resumes(tmp_path / f"{number}", make, None, dtype)


# Schedulers.


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


class Curious(LRScheduler):
    """Holds what people write into schedulers."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self.factor = factor  # code, which is the new program's
        self.phase = Phase.WARM
        self.phases = {Phase.WARM}
        self.starts: dict[Phase, int] = {}
        self.recent: deque[float] = deque(maxlen=2)
        self.table = np.linspace(1, 2, 9)
        self.folder = Path("runs") / "one"
        self.best: float | None = None
        self.weights = torch.arange(3.0)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        assert self.folder.name == "one"
        if self.last_epoch == 2:
            self.phase = Phase.MAIN
        self.phases.add(self.phase)
        self.starts.setdefault(self.phase, self.last_epoch)
        self.recent.append(self.last_epoch)
        self.best = np.float32(self.last_epoch)  # a class that the new scheduler has not seen yet
        self.weights += 1
        scale = self.factor(self.last_epoch) * self.table[self.last_epoch] * len(self.phases) + sum(self.recent)
        return [base * (float(scale) + float(self.weights.sum())) / 40 for base in self.base_lrs]


class Unsavable(Curious):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, float)
        self.folder = object()


class Warmup(LRScheduler):
    """A scheduler that holds the next, as a popular package has it."""

    def __init__(self, optimizer: Optimizer, after: LRScheduler) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch < 2:
            return [base * (self.last_epoch + 1) / 2 for base in self.base_lrs]
        self.after.step()
        return self.after.get_last_lr()  # type: ignore[return-value]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def with_tensor_rate(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.05))


SCHEDULERS: dict[str, MakeScheduler] = {
    "NumPy": lambda o: lr_scheduler.LambdaLR(o, lambda step: np.cos(step / 9)),
    "curious": lambda o: Curious(o, lambda step: 0.9**step),
    "warmup": lambda o: Warmup(o, lr_scheduler.CosineAnnealingLR(o, 9)),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.9**x),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.LambdaLR(o, lambda step: np.float32(0.9) ** step)], [4]
    ),
}


@pytest.mark.parametrize("make", [sgd, with_tensor_rate], ids=["float", "tensor"])
def test_every_schedule_goes_on(tmp_path: Path, make: MakeOptimizer) -> None:
    for name, schedule in SCHEDULERS.items():
        if make is with_tensor_rate and name == "CyclicLR":
            continue  # needs an optimizer with momentum
        resumed = assert_resumes(tmp_path / name, make, schedule).executor._steps["default"]
        if name == "curious":
            found = resumed.schedulers[0]  # type: ignore[union-attr]
            assert isinstance(found, Curious)
            assert found.phases == {Phase.WARM, Phase.MAIN}
            assert found.starts == {Phase.WARM: 0, Phase.MAIN: 2}
            assert type(found.best) is np.float32


def test_what_no_checkpoint_holds_is_refused_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"schedulers\.default\.0\.state\.folder is a builtins\.object.*state_dict"):
        Program(sgd, Unsavable)

    class InPhase(nn.Linear):
        def get_extra_state(self) -> object:
            return {"phase": Phase.WARM}

    model = InPhase(2, 1)
    with pytest.raises(ValueError, match=r"extra\._extra_state\.phase.*Phase.*state_dict"):
        ab.Executor({"default": ab.TrainStep(model, lambda m, x: m(x).sum(), sgd(model.parameters()))})


def test_an_enum_that_the_new_scheduler_does_not_have_is_named(tmp_path: Path) -> None:
    first, second = Program(sgd, lambda o: Curious(o, float)), Program(sgd, lambda o: Curious(o, float))
    scheduler: Any = second.executor._steps["default"].schedulers[0]  # type: ignore[union-attr]
    scheduler.phase, scheduler.phases, scheduler.starts = "warm", {1}, {}
    with first.executor, second.executor:
        first.executor.save(tmp_path)
        second.optimizer.param_groups[0]["lr"] = 7.0
        with pytest.raises(ab.CheckpointError, match=r"scheduler 0 of 'default' .* at phase .*enum Phase.*'warm'"):
            second.executor.load(tmp_path)
        assert second.optimizer.param_groups[0]["lr"] == 7.0


# Frozen layers and layers in eval mode.


@pytest.mark.parametrize("engine", ["tape", pytest.param("graph", marks=pytest.mark.slow)])
def test_a_layer_that_was_unfrozen_stays_so_and_it_is_said(
    tmp_path: Path, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> tuple[nn.Module, ab.Executor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        model[0].requires_grad_(False)
        step = ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.05))
        return model, ab.Executor(step, engine=engine)

    def losses(executor: ab.Executor, steps: range) -> list[float]:
        return [executor.run(batch=batch_of(step))["loss"].item() for step in steps]

    model, executor = build()
    with executor:
        losses(executor, range(2))
        model[0].requires_grad_(True)
        model[1].eval()
        losses(executor, range(2, 3))
        executor.save(tmp_path / "training")
        expected = losses(executor, range(3, 6))
        executor.load(tmp_path / "training")  # as this run has set it: nothing to say
        model.eval()  # by hand, for a moment
        executor.save(tmp_path / "evaluating")
    assert not told(caplog)
    model, executor = build()
    with executor:
        executor.load(tmp_path / "training")
        assert losses(executor, range(3, 6)) == expected
    assert told(caplog) == [
        "default.0.weight.requires_grad=True, default.0.bias.requires_grad=True, default.1.training=False, other than "
        "this script has set it"
    ]
    model, executor = build()
    with executor:
        executor.load(tmp_path / "evaluating")
        assert all(layer.training for layer in model.modules())


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage().partition("was saved with ")[2] for record in caplog.records]
    return [words for words in messages if words]  # a slow capture is said, too


# Buffers.


def with_own_buffers(path: str) -> list[Any]:
    """What each worker has in its buffers when it starts and when it ends: two of them start twice."""
    rank, seen = ab.job().rank, list[Any]()
    for start in (0, 2) if ab.job().world_size == 2 else (2,):
        torch.manual_seed(0)
        layers = [nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.0), nn.Linear(3, 1)]
        model = nn.Sequential(*layers).double()
        model.register_buffer("order", torch.tensor([float(start or rank), float(start or 1 - rank)]).bfloat16())
        step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor(step, comm_mode="AllReduce") as executor:
            executor.resume(path)
            seen.append([layers[1].running_mean.tolist(), model.order.tolist()])  # type: ignore[union-attr, operator]
            for index in range(start, 4):
                generator = torch.Generator().manual_seed(10 * index + rank)
                executor.run(batch=torch.randn(4, 2, generator=generator).double())
                if index == 1:
                    executor.save(path)
        seen.append([layers[1].running_mean.tolist(), model.order.tolist()])  # type: ignore[union-attr, operator]
    return seen


def test_workers_go_on_with_their_own_buffers_and_another_number_of_them_with_rank_0s(tmp_path: Path) -> None:
    results = in_job(with_own_buffers, 2, str(tmp_path))
    for rank, (_, ended, loaded, resumed) in enumerate(results):
        assert loaded[1] == [float(rank), float(1 - rank)]
        assert resumed == ended
    assert results[0][1][0] != results[1][1][0]
    own = [name for name in ab.checkpoint.read(tmp_path).tensors("state") if name.startswith("ranks.1.buffers.")]
    # None that are equal.
    assert sorted(name.removeprefix("ranks.1.buffers.") for name in own) == ["1.running_mean", "1.running_var", "order"]
    assert with_own_buffers(str(tmp_path))[0] == results[0][2]
