"""Steps whose gradients are not finite: refused, passed over, or, on a GPU, refused by the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, SequentialLR, StepLR

import anabranch as ab
from anabranch.executor.engines import gradients
from anabranch.executor.engines.gradients import LateCheck, all_finite, nonfinite_names
from plain_loop import mean_square
from toys import assert_near, assert_same, in_job, plain_step, step_of

ENGINES = ("tape", "graph")
TAPE_QUICKLY = ("tape", pytest.param("graph", marks=pytest.mark.slow))
NAN = float("nan")


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch_of(index: int, *, bad: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)
    if bad:
        x[0, 0] = NAN
    return {"x": x, "y": y}


def fail(*_: object) -> None:
    raise OSError("in a hook")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_is_not_finite_raises_and_updates_nothing(engine: Any) -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer), engine=engine) as executor:
        for index in range(5):
            executor.run(batch=batch_of(index))
        before = copy.deepcopy(model)
        with pytest.raises(ab.NonFinite, match=r"0\.weight, 0\.bias, 2\.weight, 2\.bias .* after 5 optimizer steps"):
            executor.run(batch=batch_of(5, bad=True))
        assert_same(model, before)
        assert [int(state["step"]) for state in optimizer.state.values()] == [5] * 4
        assert (executor.step, executor.statistics().skipped_steps) == (5, 0)
        executor.run(batch=batch_of(6))
        assert executor.engine() == engine


# Late: on a GPU nobody waits for the look at the gradients.

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])]
FUSED = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "momentum": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
}


class Listed(ExponentialLR):
    """A program's own: it adds to a list in place."""

    def get_lr(self) -> list[float | Tensor]:
        rates = super().get_lr()
        vars(self).setdefault("rates", []).append(rates)
        return rates


def schedule(optimizer: Optimizer) -> SequentialLR:
    """Of schedulers whose rates depend on the ones before."""
    return SequentialLR(optimizer, [Listed(optimizer, rate) for rate in (1.25, 0.5)], [5])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("optimizer", "clip", "engine"),
    [
        ("adam", None, "tape"),
        ("momentum", 0.1, "graph"),
        pytest.param("adam", None, "graph", marks=pytest.mark.slow),
        pytest.param("momentum", 0.1, "tape", marks=pytest.mark.slow),
    ],
)
def test_a_step_on_a_gpu_raises_in_the_next_call_and_updates_nothing(
    device: str, engine: Any, optimizer: str, clip: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Optimizers on a CPU pass over such a step, too: a GPU differs in what waits."""
    monkeypatch.setattr("anabranch.executor.engines.engine.LATE", {device})
    model, plain = model_of().to(device), model_of().to(device)
    mine, reference = map(FUSED[optimizer], (model, plain))
    scheduler, expected = map(schedule, (mine, reference))

    def batch(index: int, *, bad: bool = False) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in batch_of(index, bad=bad).items()}

    def run(*indices: int, bad: int | None = None) -> None:
        for index in indices:
            executor.run(batch=batch(index))
        if bad is not None:
            executor.run(batch=batch(bad, bad=True))

    def follow(*indices: int) -> None:
        for index in indices:
            plain_step(plain, loss_of, reference, batch(index), clip)
            expected.step()
        assert scheduler.get_last_lr() == expected.get_last_lr() == [mine.param_groups[0]["lr"]]
        assert [one.rates for one in scheduler._schedulers] == [one.rates for one in expected._schedulers]
        assert_same(model, plain)

    def raises(steps: int) -> Any:
        text = rf"^gradients held NaN or an infinity after {steps} optimizer steps; nothing was updated by them"
        return pytest.raises(ab.NonFinite, match=text)

    step = ab.TrainStep(model, loss_of, mine, scheduler=scheduler, clip_grad_norm=clip)
    look = ab.EvalStep(model, lambda model, batch: {"loss": loss_of(model, batch)})
    executor = ab.Executor({"default": step, "look": look}, engine=engine)
    with pytest.raises(ab.NonFinite, match=r"0\.weight, 0\.bias, 2\.weight, 2\.bias .* after 0 optimizer steps"):
        run(bad=0)  # a fused optimizer without state would keep what was in memory
    run(1, 2, 3, 4, bad=5)
    with raises(4):
        run(6)  # its own step is taken, with the rate that the scheduler had for the other
    follow(1, 2, 3, 4, 6)
    assert executor.step == 5
    run(7, bad=8)
    batches = iter([batch(0), batch(1)])
    for calls, evaluate in enumerate(
        (lambda: executor.run("look", batch(0)), lambda: executor.evaluate("look", batches)), 6
    ):
        with raises(calls):
            evaluate()
        assert evaluate()["loss"].isfinite()  # also of an iterator's batches
        if calls == 6:
            run(8, bad=9)
    follow(7, 8)
    run(bad=9)
    with raises(7):
        executor.save(tmp_path)
    executor.save(tmp_path)
    run(10, 11, bad=12)
    executor.load(tmp_path)  # which takes its place
    run(10, 11)
    follow(10, 11)
    assert executor.statistics().skipped_steps == 0
    run(bad=13)
    with raises(9):
        executor.close()
    follow()
    assert not hasattr(mine, "found_inf"), "the optimizer is the user's own again"


@pytest.fixture
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.executor.engines.engine.LATE", {"cpu"})


class Own(ExponentialLR):
    """A program's own: it changes the momentum, too, as ``OneCycleLR`` does but for some steps alike, and has its
    optimizer's groups at hand, and another scheduler.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.next = StepLR(optimizer, 3, 0.5)
        super().__init__(optimizer, 0.9)

    def get_lr(self) -> list[float | Tensor]:
        self.groups[0]["momentum"] = 0.5 if self.last_epoch in (3, 4, 6, 7) else 0.9
        return super().get_lr()

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch:
            self.next.step()


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("engine", TAPE_QUICKLY)
@pytest.mark.parametrize("bad", [2, 5])
def test_a_scheduler_goes_back_behind_a_late_step_with_all_that_it_has_and_changes(engine: Any, bad: int) -> None:
    """A graph of the new momentum is made in the next run, or was made before."""
    model, plain = model_of(), model_of()
    mine, reference = map(FUSED["momentum"], (model, plain))
    scheduler, expected = map(Own, (mine, reference))
    with ab.Executor(ab.TrainStep(model, loss_of, mine, scheduler=scheduler), engine=engine) as executor:
        for index in range(9):
            with pytest.raises(ab.NonFinite) if index == bad + 1 else nullcontext():
                executor.run(batch=batch_of(index, bad=index == bad))
            if index != bad:
                plain_step(plain, loss_of, reference, batch_of(index))
                expected.step()
                assert_same(model, plain)
                assert (scheduler.last_epoch, scheduler.next.last_epoch) == (expected.last_epoch,) * 2
    assert scheduler.groups[0] is mine.param_groups[0]


class WithParameters(ExponentialLR):
    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters = [*optimizer.param_groups[0]["params"]]
        super().__init__(optimizer, 0.9)


@pytest.mark.usefixtures("_late")
def test_a_late_step_leaves_a_rate_set_by_hand_and_the_schedulers_parameters() -> None:
    model = model_of()
    optimizer = FUSED["adam"](model)
    scheduler = WithParameters(optimizer)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer, scheduler=scheduler)) as executor:
        executor.run(batch=batch_of(0))
        executor.run(batch=batch_of(1, bad=True))
        optimizer.param_groups[0]["lr"] = 0.0
        with pytest.raises(ab.NonFinite):
            executor.run(batch=batch_of(2))
        assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.0)
    assert all(one is other for one, other in zip(scheduler.parameters, model.parameters(), strict=True))


class Child(StepLR):
    """A program's own: it knows the scheduler that it is part of."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "parent"}


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("kind", [Child, StepLR])
def test_schedulers_that_hold_one_another_go_back_and_are_refused_if_their_states_do(kind: type[StepLR]) -> None:
    model = model_of()
    optimizer = FUSED["adam"](model)
    scheduler: Any = ExponentialLR(optimizer, 0.5)
    scheduler.child = kind(optimizer, 3)
    scheduler.child.parent = scheduler
    step = ab.TrainStep(model, loss_of, optimizer, scheduler=scheduler)
    if kind is StepLR:
        with pytest.raises(ValueError, match=r"holds itself: child is a StepLR .*state_dict\(\) without it"):
            ab.Executor(step)
        return
    with ab.Executor(step) as executor:
        for index in range(3):
            executor.run(batch=batch_of(index, bad=index == 2))
        with pytest.raises(ab.NonFinite):
            executor.run(batch=batch_of(3))
        assert scheduler.last_epoch == 3


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_late_step_whose_optimizer_was_first_captured_behind_a_norm_updates_nothing(engine: Any) -> None:
    model = model_of()
    with ab.Executor(ab.TrainStep(model, loss_of, FUSED["adam"](model)), engine=engine) as executor:
        for index in range(6):
            executor.run(batch=batch_of(index), fetch=["grad_norm"] if index < 3 else None)
        before = copy.deepcopy(model)
        executor.run(batch=batch_of(6, bad=True))
        assert_same(model, before)
        with pytest.raises(ab.NonFinite, match="after 6 optimizer steps"):
            executor.run(batch=batch_of(7), fetch=["grad_norm"])
        assert executor.step == 7


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("engine", TAPE_QUICKLY)
def test_a_checkpoint_of_an_optimizer_that_was_not_fused_makes_steps_wait(engine: Any, tmp_path: Path) -> None:
    model = model_of()
    with ab.Executor(step_of(model, torch.optim.Adam, loss_of)) as executor:
        executor.run(batch=batch_of(0))
        executor.save(tmp_path)
    with ab.Executor(ab.TrainStep(model, loss_of, FUSED["adam"](model)), engine=engine) as executor:
        for index in range(2):
            executor.run(batch=batch_of(index))
        executor.load(tmp_path)
        for index in range(1, 4):
            executor.run(batch=batch_of(index))
        with pytest.raises(ab.NonFinite, match=r"0\.weight, .* after 4 optimizer steps"):
            executor.run(batch=batch_of(4, bad=True))


@pytest.mark.usefixtures("_late")
def test_a_parameter_whose_first_step_is_not_finite_has_no_momentum_of_it() -> None:
    model = model_of()
    optimizer = SGD(model[0].parameters(), lr=0.01, momentum=0.9, fused=True)
    model[2].requires_grad_(False)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer)) as executor:
        for index in range(3):
            executor.run(batch=batch_of(index, bad=index == 2))
        optimizer.add_param_group({"params": [*model[2].requires_grad_().parameters()]})
        with pytest.raises(ab.NonFinite, match=r"2\.weight.* after 2 optimizer steps") as raised:
            executor.run(batch=batch_of(3, bad=True))
        assert "before it, gradients held NaN" in raised.value.__notes__[0]
        before = model[2].weight.detach().clone()
        executor.run(batch=batch_of(4))
        executor.run(batch=batch_of(5, bad=True))
        with pytest.raises(ab.NonFinite, match="^gradients held .* after 3 optimizer steps"):
            executor.run(batch=batch_of(6))
        assert executor.step == 4
        assert not torch.equal(before, model[2].weight)


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("fetch", [None, ["grad_norm"]])
def test_a_late_step_that_an_error_interrupts_was_none_and_one_before_is_raised(
    fetch: list[str] | None, tmp_path: Path
) -> None:
    model = model_of()
    optimizer = FUSED["adam"](model)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer)) as executor:
        for index in range(2):
            executor.run(batch=batch_of(index))
        hook = optimizer.register_step_pre_hook(fail)
        with pytest.raises(OSError, match="in a hook"):
            executor.run(batch=batch_of(2, bad=True))
        hook.remove()
        before = model[0].weight.detach().clone()
        executor.run(batch=batch_of(3))
        assert not torch.equal(before, model[0].weight)
        executor.run(batch=batch_of(4, bad=True))
        hook = model.register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="in a hook"):
            executor.run(batch=batch_of(5), fetch=fetch)
        hook.remove()
        with pytest.raises(ab.NonFinite, match="after 3 optimizer steps"):
            executor.save(tmp_path)
        executor.save(tmp_path)
        assert executor.step == 3


def test_a_late_look_that_is_refused_leaves_nothing_behind() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight, other], fused=True)
    weight.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    late, before = LateCheck([optimizer], torch.device("cpu")), weight.detach().clone()
    with late.heeded():
        assert not late.look([weight, other], [torch.full((2,), NAN), torch.ones(1).expand(2)])
        optimizer.step()
    assert not torch.equal(weight, before)
    assert not late.failed()


# Passed over.


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"clip_grad_norm": 0.1, "clip_grad_value": 0.01}])
def test_steps_that_are_not_finite_are_passed_over(engine: Any, options: dict[str, float]) -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain))
    step = ab.TrainStep(model, loss_of, optimizer, skip_nonfinite=True, **options)  # type: ignore[arg-type]
    with ab.Executor(step, engine=engine) as executor:
        for index in range(10):
            bad = index in (0, 4, 8)
            executor.run(batch=batch_of(index, bad=bad))
            if bad:
                continue
            reference.zero_grad()
            loss_of(plain, batch_of(index)).backward()  # type: ignore[no-untyped-call]
            if "clip_grad_norm" in options:
                nn.utils.clip_grad_norm_(plain.parameters(), options["clip_grad_norm"])
            if "clip_grad_value" in options:
                nn.utils.clip_grad_value_(plain.parameters(), options["clip_grad_value"])
            reference.step()
            assert_same(model, plain)
        assert (executor.step, executor.statistics().skipped_steps) == (7, 3)


def test_none_applies_nonfinite_gradients_as_a_plain_loop_does() -> None:
    model = model_of()
    with ab.Executor(step_of(model, loss=loss_of, skip_nonfinite=None)) as executor:
        executor.run(batch=batch_of(0, bad=True))
    assert all(bool(parameter.isnan().any()) for parameter in model.parameters())


def test_a_window_with_a_run_that_is_not_finite_is_passed_over_whole() -> None:
    model = model_of()
    with ab.Executor(step_of(model, loss=loss_of, accumulate=2, skip_nonfinite=True)) as executor:
        before = copy.deepcopy(model)
        executor.run(batch=batch_of(0, bad=True))
        executor.run(batch=batch_of(1))
        assert_same(model, before)
        executor.run(batch=batch_of(2))
        executor.run(batch=batch_of(3))
        assert (executor.step, executor.statistics().skipped_steps) == (1, 1)
        assert not torch.equal(before[0].weight, model[0].weight)


@pytest.mark.quick_cases(4)
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("skips", "clip"), [(False, None), (True, None), (True, 1.0)])
def test_nonfinite_values_do_not_stay_in_uncleared_gradients(engine: Any, skips: bool, clip: float | None) -> None:
    """Of parameters that no optimizer holds, thawed on the way: their step waits, also where others do not."""
    model = model_of()
    model[2].requires_grad_(False)
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01, fused=True)
    step = ab.TrainStep(model, loss_of, optimizer, skip_nonfinite=skips, clip_grad_norm=clip)
    with ab.Executor(step, engine=engine) as executor:
        for index in range(8):
            if index == 2:
                model[2].requires_grad_()
            with pytest.raises(ab.NonFinite, match=r"2\.weight") if index == 4 and not skips else nullcontext():
                executor.run(batch=batch_of(index, bad=index == 4))
        assert (executor.step, executor.statistics().skipped_steps) == (7, int(skips))
    for parameter in model.parameters():
        assert bool(parameter.isfinite().all() and parameter.grad.isfinite().all())


# With parameters on servers, and on several workers.


class Scaled(nn.Module):
    """Rows of a table, times numbers of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.table(batch["ids"]) * batch["x"])  # type: ignore[no-any-return]


def test_dense_gradients_that_are_not_finite_keep_rows_from_being_pushed() -> None:
    def batch(index: int) -> dict[str, Tensor]:
        return {"ids": torch.tensor([0, 5, 5, index]), "x": torch.ones(4, 3) * (index + 1)}

    model, other = Scaled(), Scaled()
    with ab.Executor(step_of(model, lr=0.01), comm_mode="Hybrid") as executor:
        executor.run(batch=batch(0))
        hook = model.head.bias.register_hook(lambda gradient: gradient * NAN)
        with pytest.raises(ab.NonFinite, match=r"gradients of head\.bias hold"):
            executor.run(batch=batch(1))
        hook.remove()
        executor.run(batch=batch(2))
    plain = SGD(other.parameters(), lr=0.01)
    for index in (0, 2):
        plain_step(other, mean_square, plain, batch(index))
    assert_near(model, other, 1e-6)


def passing_over(ways: list[list[str]]) -> dict[str, Any]:
    """Rank 1 spoils steps 1 and 4 of each mode and engine."""
    rank = ab.job().rank

    def run(executor: ab.Executor, index: int, bad: bool) -> float:
        x = torch.ones(2, 3) * (index + 1 + rank)
        if bad and rank == 1:
            x[0, 0] = NAN
        return executor.run(batch={"ids": torch.tensor([rank, 5]), "x": x})["loss"].item()  # type: ignore[union-attr]

    modes = {}
    for mode, engine in ways:
        step = step_of(Scaled(), lr=0.01, skip_nonfinite=True)
        with ab.Executor(step, mode, engine=engine, served="replace") as executor:  # type: ignore[arg-type]
            for index in range(6):
                run(executor, index, index in (1, 4))
            loss = run(executor, 0, False)
            modes[f"{mode} {engine}"] = [executor.statistics().skipped_steps, executor.step, round(loss, 5)]
    with ab.Executor(step_of(Scaled(), lr=0.01), "AllReduce") as executor:
        run(executor, 0, False)
        with pytest.raises(ab.NonFinite, match="the gradients of table.weight, head.weight, head.bias hold"):
            run(executor, 1, True)
        run(executor, 2, False)
        assert executor.step == 2
    return modes


WAYS = list(product(("AllReduce", "Hybrid", "PS"), ("tape", "graph")))


@pytest.mark.parametrize("ways", [WAYS[:4:3] + WAYS[4:5], pytest.param(WAYS, marks=pytest.mark.slow)])
def test_all_workers_pass_over_the_same_steps(ways: list[tuple[str, str]]) -> None:
    one, two = in_job(passing_over, 2, ways, servers=1)
    assert one == two
    first, *others = one.values()
    assert first[:2] == [2, 5]
    assert others == [first] * (len(ways) - 1)


# Which gradients are finite; numbers too large to be summed are.

LARGE = 1 << 16
KINDS: dict[str, Callable[[float], Tensor]] = {
    "small": lambda value: torch.full((3,), value),
    "large": lambda value: torch.full((LARGE,), value),
    "column": lambda value: torch.full((LARGE, 2), value)[:, 0],
    "half": lambda value: torch.full((3,), value, dtype=torch.float16),
    "double": lambda value: torch.full((3,), value, dtype=torch.float64),
    "complex": lambda value: torch.full((3,), value, dtype=torch.complex64),
    "sparse": lambda value: torch.sparse_coo_tensor(torch.tensor([[1]]), torch.full((1, 2), value), (3, 2)),
    "expanded": lambda value: torch.full((1,), value).expand(3),
    "overlapping": lambda value: torch.full((6,), value).as_strided((3, 4), (1, 1)),
    "recorded": lambda value: torch.ones(3, requires_grad=True) * value,
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("first", KINDS)
def test_gradients_of_several_kinds_are_looked_at_together(first: str) -> None:
    good = {kind: KINDS[kind](1.0) for kind in (first, *KINDS)}
    assert all_finite([*good.values()])
    for kind in KINDS:
        assert nonfinite_names({**good, kind: KINDS[kind](NAN)}.items()) == [kind]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["large", "small", "column"])
def test_one_value_in_any_gradient_is_seen(name: str, value: float, own: bool) -> None:
    several = {kind: KINDS[kind](1.0) for kind in ("large", "small", "column")}
    several[name][1] = value
    several[name][-1] = -value  # which does not cancel it
    assert nonfinite_names(several.items(), own=own) == [name]
    several[name].fill_(torch.finfo(torch.float32).max)  # the sum overflows
    assert nonfinite_names(several.items(), own=own) == []


def test_gradients_of_one_kind_take_one_call_under_any_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_sums_finite", None)
    gradients._scratch.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert all_finite([torch.ones(3), torch.ones(2, dtype=torch.float32)])
        assert not all_finite([torch.ones(3), torch.full((2,), NAN)])
        assert LateCheck([], torch.device("cpu"))._bad.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
