"""What stands between gradients and optimizers: precision, callbacks, clipping, short windows, unheld gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_nonfinite import ENGINES, TAPE_QUICKLY, batch_of, loss_of, model_of
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import anabranch as ab
from plain_loop import TrainingCase, check
from toys import assert_near, assert_same, plain_step, step_of


def adams(*models: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]


# float16 and bfloat16


def test_float16_steps_as_grad_scaler_does() -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = adams(model, plain)
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    step = ab.TrainStep(model, loss_of, optimizer, precision=torch.float16, clip_grad_norm=1.0)
    with ab.Executor(step) as executor:
        for index in range(8):
            batch = batch_of(index)
            if index == 3:
                batch["y"] = batch["y"] * 1e3  # times the scale, more than float16 holds
            loss = executor.run(batch=batch)["loss"]
            reference.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                expected = loss_of(plain, batch)
            scaler.scale(expected).backward()
            scaler.unscale_(reference)
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            scaler.step(reference)
            scaler.update()
            assert loss == expected.detach()
            assert_same(model, plain)
        assert scaler.get_scale() == 16384.0  # two steps overflowed
        assert (executor.step, executor.statistics().skipped_steps) == (6, 2)


@pytest.mark.parametrize("engine", TAPE_QUICKLY)
def test_bfloat16_computes_under_autocast(engine: Any) -> None:
    model, plain = model_of(), model_of()
    optimizer, reference = adams(model, plain)
    with ab.Executor(ab.TrainStep(model, loss_of, optimizer, precision="bfloat16"), engine=engine) as executor:
        for index in range(6):
            executor.run(batch=batch_of(index))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                plain_step(plain, loss_of, reference, batch_of(index))
            assert_same(model, plain)
        assert executor.engine() == engine


# Callbacks, norms


def test_a_grad_dtype_is_refused_and_changes_nothing() -> None:
    model, seen = model_of(), list[object]()
    next(model.parameters()).grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
    step = step_of(model, loss=loss_of, on_gradients=seen.append)
    with ab.Executor(step) as executor:
        with pytest.raises(RuntimeError, match="with grad_dtype 'BFloat16'"):
            executor.run(batch=batch_of(0))
        assert (executor.step, seen) == (0, [])
    assert_same(model, model_of())


@pytest.mark.parametrize("engine", ENGINES)
def test_on_gradients_sees_averaged_gradients_before_clipping_and_may_change_them(engine: Any) -> None:
    seen: list[dict[str, Tensor]] = []

    def halve(gradients: dict[str, Tensor]) -> None:
        seen.append({name: gradient.clone() for name, gradient in gradients.items()})
        for gradient in gradients.values():
            gradient.mul_(0.5)

    model, plain = model_of(), model_of()
    optimizer, reference = adams(model, plain)
    step = ab.TrainStep(model, loss_of, optimizer, accumulate=2, on_gradients=halve, clip_grad_norm=0.05)
    with ab.Executor(step, engine=engine) as executor:
        for index in range(8):
            results = executor.run(batch=batch_of(index), fetch=["grad_norm"])
            (loss_of(plain, batch_of(index)) * 6).backward()  # type: ignore[no-untyped-call]
            if index % 2 == 0:
                assert results["grad_norm"] is None
                continue
            for name, parameter in plain.named_parameters():
                parameter.grad /= 12
                torch.testing.assert_close(seen[-1][name], parameter.grad)
                parameter.grad.mul_(0.5)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            torch.testing.assert_close(results["grad_norm"], norm)
            reference.step()
            reference.zero_grad()
            assert_near(model, plain, 1e-5)
        assert len(seen) == 4


REPLACEMENTS: dict[str, Callable[[Optimizer], object]] = {
    "no state": lambda optimizer: optimizer.state.clear(),
    "its own state": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "betas": lambda optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "another group": lambda optimizer: optimizer.param_groups.__setitem__(0, dict(optimizer.param_groups[0], lr=0.1)),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("when", ["in on_gradients", "before", "before a batch of another kind"])
@pytest.mark.parametrize("what", REPLACEMENTS)
def test_an_optimizer_may_change_at_any_time_where_steps_are_taken_in_parts(what: str, when: str) -> None:
    """As those of several workers are: backward does not look at optimizers, and the update does."""
    model, plain = model_of(), model_of()
    optimizer, reference = adams(model, plain)
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


# The end of an epoch


class Loader:
    """Five batches an epoch; with or without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([batch_of(index) for index in range(5)])


class SizedLoader(Loader):
    def __len__(self) -> int:
        return 5


WINDOWS: dict[str, tuple[list[list[int]], list[int]]] = {
    "keep": ([[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]], [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]),
    "step": ([[0, 1], [2, 3], [4]] * 2, [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]),
    "drop": ([[0, 1], [2, 3]] * 2, [0, 1, 1, 2, 2, 2, 3, 3, 4, 4]),
}
"""The batches of each step, and the steps behind each run."""


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("flush", WINDOWS)
def test_a_short_window_at_the_end_of_an_epoch(tmp_path: Path, flush: Any, sized: bool) -> None:
    model, plain = model_of(), model_of()
    step, reference = step_of(model, loss=loss_of, accumulate=2, flush=flush), SGD(plain.parameters(), lr=0.1)
    windows, steps = WINDOWS[flush]
    with ab.Executor({"train": step}, dataloaders={"train": SizedLoader() if sized else Loader()}) as executor:
        for run, expected in enumerate(steps):
            executor.run("train")
            assert executor.step == expected or not sized
            if sized and flush == "drop" and run % 5 == 4:
                executor.save(tmp_path)  # nothing is left of the window
        executor.run("train")  # without a length the end is known now
        for window in windows:
            reference.zero_grad()
            for index in window:
                (loss_of(plain, batch_of(index)) / len(window)).backward()  # type: ignore[no-untyped-call]
            reference.step()
        assert executor.step == len(windows)
        assert_near(model, plain, 1e-5)


# Parameters that no optimizer holds


def adds_a_group(k: int, model: Any, optimizer: Optimizer) -> None:
    if k == 1:
        optimizer.add_param_group({"params": [model[2].weight]})


def applies_by_hand(k: int, model: Any, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad.zero_()


@pytest.mark.quick_cases(2)
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
