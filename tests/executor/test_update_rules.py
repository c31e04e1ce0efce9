"""What stands between gradients and optimizers: checks, scales, clipping by value, callbacks, short windows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import anabranch as ab
from anabranch.executor.engines import gradients
from anabranch.executor.engines.gradients import LateCheck, all_finite, nonfinite_names
from anabranch.graph.step import step_state
from anabranch.graph.step.bound_state import BoundState
from plain_loop import TrainingCase, check
from toys import assert_same, plain_step

ENGINES = ("tape", "graph")


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch_of(index: int, *, bad: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)
    if bad:
        x[0, 0] = float("nan")
    return {"x": x, "y": y}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_is_not_finite_raises_and_updates_nothing(engine: Any) -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer), engine=engine) as executor:
        for index in range(5):
            executor.run(batch=batch_of(index))
        before = state_of(model)
        with pytest.raises(ab.NonFinite, match=r"0\.weight, 0\.bias, 2\.weight, 2\.bias .* after 5 optimizer steps"):
            executor.run(batch=batch_of(5, bad=True))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert [int(state["step"]) for state in optimizer.state.values()] == [5] * 4
        assert (executor.step, executor.statistics().skipped_steps) == (5, 0)
        executor.run(batch=batch_of(6))
        assert executor.engine() == ("tape" if engine == "tape" else "graph")


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])]
FUSED = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "momentum": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
}


class Listed(torch.optim.lr_scheduler.ExponentialLR):
    """A program's own: it adds to a list in place."""

    def get_lr(self) -> list[float | Tensor]:
        rates = super().get_lr()
        vars(self).setdefault("rates", []).append(rates)
        return rates


def schedule(optimizer: Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
    """Of schedulers whose rates depend on the ones before."""
    grow, shrink = (Listed(optimizer, rate) for rate in (1.25, 0.5))
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [grow, shrink], [5])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("optimizer", "clip"), [("adam", None), ("momentum", 0.1)])
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

    def follow(*indices: int) -> None:
        for index in indices:
            plain_step(plain, loss_of, reference, batch(index), clip)
            expected.step()
        assert scheduler.get_last_lr() == expected.get_last_lr() == [mine.param_groups[0]["lr"]]
        assert [one.rates for one in scheduler._schedulers] == [one.rates for one in expected._schedulers]
        assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))

    text = r"^gradients held NaN or an infinity after {} optimizer steps; nothing was updated by them"
    executor = ab.Executor(ab.TrainStep(model, loss_of, mine, scheduler=scheduler, clip_grad_norm=clip), engine=engine)
    with pytest.raises(ab.NonFinite, match=r"0\.weight, 0\.bias, 2\.weight, 2\.bias .* after 0 optimizer steps"):
        executor.run(batch=batch(0, bad=True))  # a fused optimizer without state would keep what was in memory
    for index in range(1, 5):
        executor.run(batch=batch(index))
    executor.run(batch=batch(5, bad=True))
    with pytest.raises(ab.NonFinite, match=text.format(4)):
        executor.run(batch=batch(6))  # its own step is taken, with the rate that the scheduler had for the other
    follow(1, 2, 3, 4, 6)
    assert executor.step == 5
    for index in (7, 8):
        executor.run(batch=batch(index))
    follow(7, 8)
    executor.run(batch=batch(9, bad=True))
    with pytest.raises(ab.NonFinite, match=text.format(7)):
        executor.save(tmp_path)
    executor.save(tmp_path)
    for index in (10, 11):
        executor.run(batch=batch(index))
    executor.run(batch=batch(12, bad=True))
    executor.load(tmp_path)  # which takes its place
    for index in (10, 11):
        executor.run(batch=batch(index))
    follow(10, 11)
    assert executor.statistics().skipped_steps == 0
    executor.run(batch=batch(13, bad=True))
    with pytest.raises(ab.NonFinite, match=text.format(9)):
        executor.close()
    follow()
    assert not hasattr(mine, "found_inf"), "the optimizer is the user's own again"


@pytest.fixture
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.executor.engines.engine.LATE", {"cpu"})


class Own(torch.optim.lr_scheduler.ExponentialLR):
    """A program's own: it changes the momentum, too, as ``OneCycleLR`` does but for some steps alike, and has its
    optimizer's groups at hand, and another scheduler.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = optimizer.param_groups
        self.next = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        super().__init__(optimizer, 0.9)

    def get_lr(self) -> list[float | Tensor]:
        self.groups[0]["momentum"] = 0.5 if self.last_epoch in (3, 4, 6, 7) else 0.9
        return super().get_lr()

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch:
            self.next.step()


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("engine", ENGINES)
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


class Child(torch.optim.lr_scheduler.StepLR):
    """A program's own: it knows the scheduler that it is part of."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "parent"}


@pytest.mark.usefixtures("_late")
def test_schedulers_that_hold_one_another_go_back_and_are_refused_if_their_states_do() -> None:
    for kind in (Child, torch.optim.lr_scheduler.StepLR):
        model = model_of()
        optimizer = FUSED["adam"](model)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scheduler.child = kind(optimizer, 3)
        scheduler.child.parent = scheduler
        step = ab.TrainStep(model, loss_of, optimizer, scheduler=scheduler)
        if kind is not Child:
            with pytest.raises(ValueError, match=r"holds itself: child is a StepLR .*state_dict\(\) without it"):
                ab.Executor(step)
            continue
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
        before = state_of(model)
        executor.run(batch=batch_of(6, bad=True))
        assert all(map(torch.equal, model.state_dict().values(), before.values()))
        with pytest.raises(ab.NonFinite, match="after 6 optimizer steps"):
            executor.run(batch=batch_of(7), fetch=["grad_norm"])
        assert executor.step == 7


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_of_an_optimizer_that_was_not_fused_makes_steps_wait(engine: Any, tmp_path: Path) -> None:
    model = model_of()
    with ab.Executor(ab.TrainStep(model, loss_of, torch.optim.Adam(model.parameters())), engine=engine) as executor:
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
    optimizer = SGD(model[0].parameters(), lr=0.01, momentum=0.9, fused=True)  # type: ignore[index]
    model[2].requires_grad_(False)  # type: ignore[index]
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer)) as executor:
        for index in range(2):
            executor.run(batch=batch_of(index))
        executor.run(batch=batch_of(2, bad=True))
        optimizer.add_param_group({"params": [*model[2].requires_grad_().parameters()]})  # type: ignore[index]
        with pytest.raises(ab.NonFinite, match=r"2\.weight.* after 2 optimizer steps") as raised:
            executor.run(batch=batch_of(3, bad=True))
        assert "before it, gradients held NaN" in raised.value.__notes__[0]
        before = state_of(model)
        executor.run(batch=batch_of(4))
        executor.run(batch=batch_of(5, bad=True))
        with pytest.raises(ab.NonFinite, match="^gradients held .* after 3 optimizer steps"):
            executor.run(batch=batch_of(6))
        assert executor.step == 4
        assert not torch.equal(before["2.weight"], model.state_dict()["2.weight"])


@pytest.mark.usefixtures("_late")
def test_a_late_step_that_an_error_interrupts_was_none() -> None:
    model = model_of()
    optimizer = FUSED["adam"](model)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer)) as executor:
        for index in range(2):
            executor.run(batch=batch_of(index))

        def fail(*_: object) -> None:
            raise OSError("in a hook")

        hook = optimizer.register_step_pre_hook(fail)
        with pytest.raises(OSError, match="in a hook"):
            executor.run(batch=batch_of(2, bad=True))
        hook.remove()
        before = state_of(model)
        executor.run(batch=batch_of(3))
        assert executor.step == 3
        assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("fetch", [None, ["grad_norm"]])
def test_a_late_step_is_raised_by_a_save_behind_a_run_that_failed(fetch: list[str] | None, tmp_path: Path) -> None:
    model = model_of()

    def fail(*_: object) -> None:
        raise OSError("in a hook")

    with ab.Executor(ab.TrainStep(model, loss_of, FUSED["adam"](model)), engine="tape") as executor:
        for index in range(3):
            executor.run(batch=batch_of(index, bad=index == 2))
        hook = model.register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="in a hook"):
            executor.run(batch=batch_of(3), fetch=fetch)
        hook.remove()
        with pytest.raises(ab.NonFinite, match="after 2 optimizer steps"):
            executor.save(tmp_path)
        executor.save(tmp_path)
        assert executor.step == 2


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_late_step_is_raised_by_an_evaluation(engine: Any) -> None:
    model = model_of()
    step = ab.TrainStep(model, loss_of, FUSED["adam"](model))
    validate = ab.EvalStep(model, lambda model, batch: {"loss": loss_of(model, batch)})
    batches = iter([batch_of(0), batch_of(1)])
    with ab.Executor({"train": step, "validate": validate}, engine=engine) as executor:
        for count, evaluate in enumerate(
            [partial(executor.run, "validate", batch_of(0)), partial(executor.evaluate, "validate", batches)], 1
        ):
            executor.run("train", batch=batch_of(0))
            executor.run("train", batch=batch_of(1, bad=True))
            with pytest.raises(ab.NonFinite, match=f"after {count} optimizer steps"):
                evaluate()
            assert evaluate()["loss"].isfinite()  # also of an iterator's batches
        assert executor.step == 2


def test_a_late_look_at_parameters_that_it_knows_hashes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    parameters = [*model.parameters()]
    optimizer = torch.optim.Adam(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    late = LateCheck([optimizer], torch.device("cpu"))
    with late.heeded():
        assert late.look(parameters, parameters)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "__hash__", None)
            assert late.look(parameters, parameters)
        del optimizer.state[parameters[1]]
        assert not late.look(parameters, parameters)
        assert late.look(parameters[2:], parameters[2:])


def test_a_late_look_that_is_refused_leaves_nothing_behind() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight, other], fused=True)
    weight.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    late, before = LateCheck([optimizer], torch.device("cpu")), weight.detach().clone()
    with late.heeded():
        assert not late.look([weight, other], [torch.full((2,), torch.nan), torch.ones(1).expand(2)])
        optimizer.step()
    assert not torch.equal(weight, before)
    assert not late.failed()


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
    step = ab.TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), skip_nonfinite=None)
    with ab.Executor(step) as executor:
        executor.run(batch=batch_of(0, bad=True))
    assert all(bool(parameter.isnan().any()) for parameter in model.parameters())


def test_a_window_with_a_run_that_is_not_finite_is_passed_over_whole() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer, accumulate=2, skip_nonfinite=True)) as executor:
        before = state_of(model)
        executor.run(batch=batch_of(0, bad=True))
        executor.run(batch=batch_of(1))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        executor.run(batch=batch_of(2))
        executor.run(batch=batch_of(3))
        assert (executor.step, executor.statistics().skipped_steps) == (1, 1)
        assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])


# float16 and bfloat16


def test_float16_steps_as_grad_scaler_does() -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain))
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    step = ab.TrainStep(model, loss_of, optimizer, precision=torch.float16, clip_grad_norm=1.0)
    with ab.Executor(step) as executor:
        for index in range(8):
            batch = batch_of(index)
            if index == 3:
                batch["y"] = batch["y"] * 1e3  # times the scale, more than float16 holds
            found = executor.run(batch=batch)["loss"]
            reference.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                expected = loss_of(plain, batch)
            scaler.scale(expected).backward()
            scaler.unscale_(reference)
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            scaler.step(reference)
            scaler.update()
            assert found == expected.detach()
            assert_same(model, plain)
        assert scaler.get_scale() == 16384.0  # two steps overflowed
        assert (executor.step, executor.statistics().skipped_steps) == (6, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_computes_under_autocast(engine: Any) -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain))
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer, precision="bfloat16"), engine=engine) as executor:
        for index in range(6):
            executor.run(batch=batch_of(index))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                plain_step(plain, loss_of, reference, batch_of(index))
            assert_same(model, plain)
        assert executor.engine() == ("tape" if engine == "tape" else "graph")


# Callbacks, norms


@pytest.mark.parametrize("engine", ENGINES)
def test_on_gradients_sees_averaged_gradients_before_clipping_and_may_change_them(engine: Any) -> None:
    seen: list[dict[str, Tensor]] = []

    def halve(gradients: dict[str, Tensor]) -> None:
        seen.append({name: gradient.clone() for name, gradient in gradients.items()})
        for gradient in gradients.values():
            gradient.mul_(0.5)

    model, plain = model_of(), model_of()
    optimizer, reference = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain))
    step = ab.TrainStep(model, loss_of, optimizer, accumulate=2, on_gradients=halve, clip_grad_norm=0.05)
    with ab.Executor(step, engine=engine) as executor:
        for index in range(8):
            results = executor.run(batch=batch_of(index), fetch=["grad_norm"])
            (loss_of(plain, batch_of(index)) * 6).backward()  # type: ignore[no-untyped-call]
            if index % 2 == 0:
                assert results["grad_norm"] is None
                continue
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                parameter.grad /= 12
                torch.testing.assert_close(seen[-1][name], parameter.grad)
                parameter.grad.mul_(0.5)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            torch.testing.assert_close(results["grad_norm"], norm)
            reference.step()
            reference.zero_grad()
            for one, two in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, two)
        assert len(seen) == 4


REPLACEMENTS: dict[str, Callable[[Optimizer], object]] = {
    "no state": lambda optimizer: optimizer.state.clear(),
    "its own state": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "betas": lambda optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "another group": lambda optimizer: optimizer.param_groups.__setitem__(0, dict(optimizer.param_groups[0], lr=0.1)),
}


@pytest.mark.parametrize("when", ["in on_gradients", "before", "before a batch of another kind"])
@pytest.mark.parametrize("what", REPLACEMENTS)
def test_an_optimizer_may_change_at_any_time_where_steps_are_taken_in_parts(what: str, when: str) -> None:
    """As those of several workers are: backward does not look at optimizers, and the update does."""
    model, plain = model_of(), model_of()
    optimizer, reference = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, plain))
    index, change = 0, REPLACEMENTS[what]

    def on_gradients(_: object) -> None:
        if index == 3 and when == "in on_gradients":
            change(optimizer)

    with ab.Executor(ab.TrainStep(model, loss_of, optimizer, on_gradients=on_gradients), engine="graph") as executor:
        for index in range(7):
            size = 3 if index >= 3 and "another kind" in when else 6
            batch = {name: value[:size] for name, value in batch_of(index).items()}
            if index == 3:
                change(reference)
                if when != "in on_gradients":
                    change(optimizer)
            executor.run(batch=batch)
            plain_step(plain, loss_of, reference, batch)
            assert_same(model, plain)


def test_a_graph_step_in_parts_looks_at_its_optimizers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def note(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: [looks.append(name), function(*args)][1])

    note(BoundState, "_now")
    note(step_state, "has_state")
    model = model_of()
    step = ab.TrainStep(model, loss_of, torch.optim.Adam(model.parameters()), on_gradients=lambda gradients: None)
    with ab.Executor(step, engine="graph") as executor:
        for index in range(4):
            executor.run(batch=batch_of(index))
        looks.clear()
        for index in range(4):
            executor.run(batch=batch_of(index))
    assert looks == ["_now"] * 4


# The end of an epoch


class Loader:
    """Five batches an epoch; with or without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([batch_of(index) for index in range(5)])


class SizedLoader(Loader):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("flush", ["keep", "step", "drop"])
def test_a_short_window_at_the_end_of_an_epoch(tmp_path: Any, flush: Any, sized: bool) -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    step = ab.TrainStep(model, loss_of, optimizer, accumulate=2, flush=flush)
    loader = SizedLoader() if sized else Loader()
    windows = {"keep": [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]], "step": [[0, 1], [2, 3], [4]] * 2}
    windows["drop"] = [[0, 1], [2, 3]] * 2
    with ab.Executor({"train": step}, dataloaders={"train": loader}) as executor:
        steps = []
        for run in range(10):
            executor.run("train")
            steps.append(executor.step)
            if sized and flush == "drop" and run % 5 == 4:
                executor.save(tmp_path)  # nothing is left of the window
        if sized:
            assert (
                steps
                == {
                    "keep": [0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
                    "step": [0, 1, 1, 2, 3, 3, 4, 4, 5, 6],
                    "drop": [0, 1, 1, 2, 2, 2, 3, 3, 4, 4],
                }[flush]
            )
        executor.run("train")  # without a length the end is known now
        for window in windows[flush]:
            reference.zero_grad()
            for index in window:
                (loss_of(plain, batch_of(index)) / len(window)).backward()  # type: ignore[no-untyped-call]
            reference.step()
        assert executor.step == len(windows[flush])
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.quick_cases(4)
@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("skips", "clip"), [(False, None), (True, None), (True, 1.0)])
def test_nonfinite_values_do_not_stay_in_uncleared_gradients(engine: Any, skips: bool, clip: float | None) -> None:
    """Of parameters that no optimizer holds, thawed on the way: their step waits, also where others do not."""
    model = model_of()
    model[2].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01, fused=True)  # type: ignore[index]
    step = ab.TrainStep(model, loss_of, optimizer, skip_nonfinite=skips, clip_grad_norm=clip)
    with ab.Executor(step, engine=engine) as executor:
        for index in range(8):
            if index == 2:
                model[2].requires_grad_()  # type: ignore[index]
            raised = pytest.raises(ab.NonFinite, match=r"2\.weight") if index == 4 and not skips else nullcontext()
            with raised:
                executor.run(batch=batch_of(index, bad=index == 4))
        assert (executor.step, executor.statistics().skipped_steps) == (7, int(skips))
    for parameter in model.parameters():
        assert bool(parameter.isfinite().all() and parameter.grad.isfinite().all())  # type: ignore[union-attr]


# Parameters that no optimizer holds


def adds_a_group(k: int, model: Any, optimizer: Optimizer) -> None:
    if k == 1:
        optimizer.add_param_group({"params": [model[2].weight]})


def applies_by_hand(k: int, model: Any, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad.zero_()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("change", "clip"), [(adds_a_group, None), (applies_by_hand, 0.1)])
def test_gradients_that_no_optimizer_holds_add_up_and_count_in_the_norm(
    engine: Any, change: Callable[[int, Any, Optimizer], None], clip: float | None
) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = model_of()
        optimizer = SGD(model[0].parameters(), lr=0.1)
        gradients = lambda: [parameter.grad for parameter in model.parameters()]  # noqa: E731
        return TrainingCase(
            model, loss_of, optimizer, lambda k: change(k, model, optimizer), batch_of, clip=clip, seen=gradients
        )

    assert check(build, engine).refused_at is None


# Which gradients are finite; numbers too large to be summed are.


LARGE = 1 << 16


def large_and_small() -> dict[str, Tensor]:
    return {"large": torch.ones(LARGE), "small": torch.ones(3), "column": torch.ones(LARGE, 2)[:, 0]}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["large", "small", "column"])
def test_one_value_in_any_gradient_is_found(name: str, value: float, own: bool) -> None:
    found = large_and_small()
    assert all_finite(list(found.values()), own=own)
    found[name][1] = value
    found[name][-1] = -value  # which does not cancel it
    assert not all_finite(list(found.values()), own=own)
    assert nonfinite_names(found.items(), own=own) == [name]


KINDS: dict[str, Callable[[float], Tensor]] = {
    "half": lambda value: torch.full((3,), value, dtype=torch.float16),
    "double": lambda value: torch.full((3,), value, dtype=torch.float64),
    "complex": lambda value: torch.full((3,), value, dtype=torch.complex64),
    "sparse": lambda value: torch.sparse_coo_tensor(torch.tensor([[1]]), torch.full((1, 2), value), (3, 2)),
    "expanded": lambda value: torch.full((1,), value).expand(3),
    "overlapping": lambda value: torch.full((6,), value).as_strided((3, 4), (1, 1)),
    "recorded": lambda value: torch.ones(3, requires_grad=True) * value,
    "large": lambda value: torch.full((LARGE,), value),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("first", KINDS)
def test_gradients_of_several_kinds_are_looked_at_together(first: str) -> None:
    good, bad = ({kind: KINDS[kind](value) for kind in (first, *KINDS)} for value in (1.0, float("nan")))
    for kind in KINDS:
        assert all_finite([*good.values()])
        assert nonfinite_names({**good, kind: bad[kind]}.items()) == [kind]


def test_gradients_of_one_kind_take_one_call_under_any_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_sums_finite", None)
    gradients._scratch.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert all_finite([torch.ones(3), torch.ones(2, dtype=torch.float32)])
        assert not all_finite([torch.ones(3), torch.full((2,), float("nan"))])
        assert LateCheck([], torch.device("cpu"))._bad.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["large", "small"])
def test_finite_gradients_whose_sum_overflows_are_finite(name: str) -> None:
    found = large_and_small()
    found[name].fill_(torch.finfo(torch.float32).max)
    assert nonfinite_names(found.items()) == []
