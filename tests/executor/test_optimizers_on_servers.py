"""An optimizer whose parameters are on servers: what is done with it equals plain PyTorch, or is refused by name."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import anabranch as ab
from plain_loop import mean_square
from toys import Tabled, assert_near, in_job, step_of

BATCHES = [torch.tensor([[1, 3], [3, 0]]), torch.tensor([[2, 2], [0, 4]]), torch.tensor([[1, 1], [5, 0]])]


class Net(Tabled):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__(sparse=sparse)
        self.double()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - 1).square().mean()  # type: ignore[no-any-return]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def interrupt() -> None:
    raise KeyboardInterrupt


def opened(model: nn.Module, optimizer: torch.optim.Optimizer, mode: str | None, **options: Any) -> ab.Executor:
    return ab.Executor(ab.TrainStep(model, loss_of, optimizer), mode, **options)


def run_around(
    model: nn.Module, optimizer: torch.optim.Optimizer, mode: str | None, change: Callable[[], object]
) -> None:
    """A run, the change, and two more."""
    with opened(model, optimizer, mode) as executor:
        executor.run(batch=BATCHES[0])
        change()
        for batch in BATCHES[1:]:
            executor.run(batch=batch)


# The state.

STATE_CHANGES: dict[str, Callable[[torch.optim.Optimizer, nn.Parameter], object]] = {
    "clear": lambda optimizer, parameter: optimizer.state.clear(),
    "replace": lambda optimizer, parameter: setattr(optimizer, "state", defaultdict(dict)),
    "set": lambda optimizer, parameter: optimizer.state.update({parameter: {"step": torch.tensor(0.0)}}),
    "zero": lambda optimizer, parameter: optimizer.state[parameter]["exp_avg"].zero_(),
    "look": lambda optimizer, parameter: "exp_avg" in optimizer.state[parameter],
}


@pytest.mark.parametrize("mode", ["Hybrid", "PS"])
@pytest.mark.parametrize("change", STATE_CHANGES)
def test_a_change_of_state_that_the_servers_have_is_refused_by_name(change: str, mode: str) -> None:
    model, plain = Net(), Net()
    optimizer = adam(model)
    words = r"state of Adam for table\.weight.*executor\.load.*routes={'table\.weight'"
    with pytest.raises(ValueError, match=words):
        run_around(model, optimizer, mode, lambda: STATE_CHANGES[change](optimizer, model.table.weight))
    with opened(plain, adam(plain), None) as executor:
        executor.run(batch=BATCHES[0])
    assert_near(model, plain)
    assert set(optimizer.state[model.table.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_and_where_it_is_the_last_thing_by_save_and_close(tmp_path: Path) -> None:
    model = Net()
    optimizer = adam(model)
    executor = opened(model, optimizer, "Hybrid")
    executor.run(batch=BATCHES[0])
    kept = optimizer.state.pop(model.table.weight)
    with pytest.raises(ValueError, match=r"state of Adam for table\.weight"):
        executor.save(tmp_path)
    optimizer.state[model.table.weight] = kept  # and goes on once it is taken back
    executor.run(batch=BATCHES[1])
    assert "table.weight" in repr(optimizer.state)
    optimizer.state.clear()
    with pytest.raises(ValueError, match=r"state of Adam for table\.weight"):
        executor.close()
    assert "exp_avg" in optimizer.state[model.table.weight]


# Hooks.


def patch(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    step = optimizer.step

    def stepping(closure: Any = None) -> Any:
        return step(closure)

    optimizer.step = stepping  # type: ignore[method-assign]
    return lambda: vars(optimizer).pop("step", None)


def noise(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(1.0)


HOOKS: dict[str, tuple[Callable[[torch.optim.Optimizer], Callable[[], Any]], str]] = {
    "post": (lambda optimizer: optimizer.register_step_post_hook(noise).remove, "noise"),
    "every pre": (lambda optimizer: register_optimizer_step_pre_hook(noise).remove, "noise"),
    "patched": (patch, "stepping"),
}


@pytest.mark.parametrize("mode", ["Hybrid", "PS"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_a_step_that_would_not_see_a_table_is_refused_before_each_run(kind: str, mode: str) -> None:
    set_hook, name = HOOKS[kind]
    words = rf"{name}.*table\.weight.*on_gradients.*routes={{'table\.weight': 'AllReduce'"
    model = Net()
    optimizer = adam(model)
    remove = set_hook(optimizer)
    try:
        with pytest.raises(ValueError, match=words):
            opened(model, optimizer, mode)
        remove()
        with opened(model, optimizer, mode) as executor:
            executor.run(batch=BATCHES[0])
            remove = set_hook(optimizer)
            with pytest.raises(ValueError, match=words):
                executor.run(batch=BATCHES[1])
            remove()
            executor.run(batch=BATCHES[1])
    finally:
        remove()


# Groups, and what is frozen.


def move_to_a_group(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    take_out(optimizer, parameter)
    optimizer.add_param_group({"params": [parameter], "lr": 0.5})


def take_out(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    group = optimizer.param_groups[0]
    group["params"] = [one for one in group["params"] if one is not parameter]


GROUP_CHANGES: dict[str, tuple[Callable[[torch.optim.Optimizer, nn.Parameter], object], str]] = {
    "freeze": (lambda optimizer, parameter: parameter.requires_grad_(False), ""),
    "learning rate": (lambda optimizer, parameter: optimizer.param_groups[0].update(lr=0.01), ""),
    "another group": (move_to_a_group, ""),
    "no group": (take_out, r"table\.weight"),
    "twice": (lambda optimizer, parameter: optimizer.add_param_group({"params": [parameter]}), "more than one"),
    "load": (
        lambda optimizer, parameter: optimizer.load_state_dict(adam(Net()).state_dict()),
        r"table\.weight.*executor\.load",
    ),
}


@pytest.mark.parametrize("mode", ["Hybrid", "PS"])
@pytest.mark.parametrize("kind", GROUP_CHANGES)
def test_a_change_of_groups_counts_as_in_the_plain_program_or_is_refused(kind: str, mode: str) -> None:
    change, refused = GROUP_CHANGES[kind]
    model, plain = Net(), Net()
    optimizer, other = adam(model), adam(plain)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        run_around(model, optimizer, mode, lambda: change(optimizer, model.table.weight))
    if not refused:
        run_around(plain, other, None, lambda: change(other, plain.table.weight))
        assert_near(model, plain)


# Sparse gradients.

SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("options", [{}, {"use_sparse_pull": False}, {"cache": ab.Cache("LRU", capacity=3)}], ids=str)
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_gradients_move_the_rows_that_pytorch_moves(kind: str, options: dict[str, Any]) -> None:
    """With momentum PyTorch goes on moving rows that earlier steps have looked up."""
    model, plain = Net(sparse=True), Net(sparse=True)
    for one, mode, more in ((model, "Hybrid", options), (plain, None, {})):
        sparse, dense = SPARSE[kind]([one.table.weight]), torch.optim.SGD(one.head.parameters(), lr=0.1)
        step = ab.TrainStep(one, loss_of, [sparse, dense])
        # The second with the state of the first, and a plain step with what was given back.
        for where, count in ((mode, 3), (mode, 3), (None, 1)):
            with ab.Executor(step, where, **(more if where else {})) as executor:
                for batch in BATCHES[:count]:
                    executor.run(batch=batch)
    assert_near(model, plain)


# A RemoteEmbedding that is frozen.


class Remote(nn.Module):
    """``Net``, with the rows in a ``RemoteEmbedding``."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = table, nn.Linear(3, 1)
        self.double()

    forward = Net.forward


def remote_table() -> ab.RemoteEmbedding:
    return ab.RemoteEmbedding("table", 8, 3, init=0.5, dtype=torch.float64)


def plain_table() -> nn.Embedding:
    table = nn.Embedding(8, 3, sparse=True)
    nn.init.constant_(table.weight, 0.5)
    return table


FREEZES: dict[str, Callable[[nn.Module, bool], object]] = {
    "the module": lambda model, frozen: model.table.requires_grad_(not frozen),
    "by name": lambda model, frozen: [
        setattr(p, "requires_grad", not frozen) for name, p in model.named_parameters() if name.startswith("table.")
    ],
}


@pytest.mark.parametrize(
    ("engine", "options"),
    [("tape", {}), ("graph", {}), ("tape", {"cache": ab.Cache("LRU", capacity=4, pull_bound=2, push_bound=2)})],
    ids=str,
)
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("way", FREEZES)
def test_a_remote_embedding_is_frozen_and_thawed_as_an_embedding(
    way: str, engine: Any, options: dict[str, Any]
) -> None:
    found = []
    for table, mode in ((remote_table(), "Hybrid"), (plain_table(), None)):
        model = Remote(table)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with opened(model, optimizer, mode, engine=engine, **(options if mode else {})) as executor:
            for number, batch in enumerate([*BATCHES, *BATCHES]):
                FREEZES[way](model, number in (1, 2, 3))
                executor.run(batch=batch)
        with torch.no_grad():
            found.append([table(torch.arange(8)), model.head.weight.detach(), model.head.bias.detach()])
        if isinstance(table, ab.RemoteEmbedding):
            table.close()
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-12)


def test_a_resume_freezes_what_was_frozen(tmp_path: Path) -> None:
    for number in range(2):
        model = Remote(remote_table())
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        with opened(model, optimizer, "Hybrid") as executor:
            if number:
                executor.load(tmp_path)
                assert not model.table.on_servers.requires_grad
            model.table.requires_grad_(False)
            executor.run(batch=BATCHES[0])
            executor.save(tmp_path)
            with torch.no_grad():
                assert bool((model.table(torch.arange(8)) == 0.5).all())


# An interrupt between the push and the step of the layers.


def test_an_interrupt_between_vote_and_step_comes_when_both_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = Net(), Net()
    optimizers = adam(model), adam(plain)
    with opened(plain, optimizers[1], None) as loop:
        for batch in BATCHES:
            loop.run(batch=batch)
    with opened(model, optimizers[0], "Hybrid", engine="tape") as executor:
        executor.run(batch=BATCHES[0])
        engine = executor._runners["default"].engine
        update = engine.update
        monkeypatch.setattr(engine, "update", lambda: (signal.raise_signal(signal.SIGINT), update()))
        with pytest.raises(KeyboardInterrupt):
            executor.run(batch=BATCHES[1])
        monkeypatch.undo()
        assert executor.step == 2
        executor.run(batch=BATCHES[2])
    assert_near(model, plain)


@pytest.mark.parametrize("leaves", [True, False])
def test_an_interrupt_behind_the_push_says_that_the_tables_are_ahead(
    leaves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    optimizer = adam(model)
    executor = opened(model, optimizer, "Hybrid", engine="tape", consistency="asp")
    executor.run(batch=BATCHES[0])
    monkeypatch.setattr(executor._runners["default"].engine, "update", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught, executor if leaves else nullcontext():
        executor.run(batch=BATCHES[1])
    executor.close()  # of a notebook, where the interrupt has ended a cell
    said = caught.value.__notes__[-1] if leaves else caplog.messages[-1]
    assert "table.weight" in said
    assert "step 2 " in said
    assert "executor.load" in said


def sgd(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_momentum_is_switched_on_or_off_by_no_step_and_nothing_is_lost(before: float, after: float) -> None:
    """The push was refused, and then the table could not be read back."""
    model, plain = Net(), Net()
    optimizer = sgd(model, before)
    with pytest.raises(ValueError, match=r"table\.weight.*momentum, amsgrad or centered cannot be switched on or off"):
        run_around(model, optimizer, "Hybrid", lambda: optimizer.param_groups[0].update(momentum=after))
    plain_optimizer = sgd(plain, before)
    loss_of(plain, BATCHES[0]).backward()
    plain_optimizer.step()
    assert_near(model, plain)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        buffers = (optimizer.state[parameter], plain_optimizer.state[other])
        assert [one.get("momentum_buffer") is None for one in buffers] == [not before] * 2
        if before:
            torch.testing.assert_close(*(one["momentum_buffer"] for one in buffers), rtol=0, atol=1e-12)


def resume_with_momentum(folder: str, mode: str) -> dict[str, list[Any]]:
    """Two steps with momentum, saved, and two more by a script that has none; the checkpoint's counts."""
    for momentum in (0.9, 0.0):
        model = Net()
        with opened(model, sgd(model, momentum), mode, served="replace") as executor:
            executor.resume(folder)
            for _ in range(2):
                executor.run(batch=BATCHES[executor.step % 3][ab.job().rank :: ab.job().world_size])
            executor.save(folder)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_a_checkpoint_with_other_parameter_groups_is_refused_by_name(tmp_path: Path) -> None:
    model = Net()
    with opened(model, adam(model), "Hybrid") as executor:
        executor.run(batch=BATCHES[0])
        executor.save(tmp_path)
    groups = [{"params": model.head.parameters()}, {"params": model.table.parameters()}]
    with opened(model, torch.optim.Adam(groups, lr=0.1), "Hybrid") as executor:  # noqa: SIM117
        with pytest.raises(ab.CheckpointError, match="holds the parameter groups"):
            executor.load(tmp_path)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("workers", "mode"), [(1, "PS"), (2, "PS"), pytest.param(2, "Hybrid", marks=pytest.mark.slow)])
def test_a_checkpoint_s_momentum_counts(workers: int, mode: str, tmp_path: Path) -> None:
    """The buffers were lost, and another worker than the first could not read the tables any more."""
    plain = Net()
    optimizer = sgd(plain, 0.9)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(plain, BATCHES[step % 3]).backward()
        optimizer.step()
    for state in in_job(resume_with_momentum, workers, str(tmp_path), mode, servers=1):
        model = Net()
        model.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()})
        assert_near(model, plain)


@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
def test_gradients_that_on_gradients_does_not_get_are_named(mode: Any) -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 2), nn.Linear(2, 1))
    names = {"PS": "0.weight, 1.bias, 1.weight", "Hybrid": "0.weight"}[mode]
    with pytest.warns(UserWarning, match=f"^on_gradients gets no gradients of {names}:") as caught:
        executor = ab.Executor(step_of(model, on_gradients=lambda gradients: None), mode)
    assert caught[0].filename == __file__
    with executor:
        executor.run(batch=torch.tensor([[1, 2]]))


# Several training steps over one model: each moves what its own optimizer has.


class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids).sum(1)).tanh())


def trained(mode: str | None, engine: str = "tape", **options: Any) -> Deep:
    model = Deep()
    one = torch.optim.SGD([*model.body.parameters(), model.table.weight], lr=0.1, momentum=0.9)
    two = torch.optim.Adam(model.head.parameters(), lr=0.1)
    steps = {"one": ab.TrainStep(model, mean_square, one), "two": ab.TrainStep(model, loss_of, two, **options)}
    with ab.Executor(steps, mode, engine=engine) as executor:
        for _ in range(4):
            executor.run("one", BATCHES[0])
            executor.run("two", BATCHES[0])
    return model


@pytest.mark.parametrize("engine", ["tape", pytest.param("graph", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
def test_a_step_moves_on_servers_what_its_own_optimizer_has(mode: str, engine: str) -> None:
    assert_near(trained(mode, engine), trained(None))


def test_a_step_that_clips_gradients_of_anothers_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"table\.weight.*routes="):
        trained("Hybrid", clip_grad_norm=1.0)


@pytest.mark.parametrize(("mode", "accumulate"), [("Hybrid", 1), ("PS", 1), (None, 2)])
def test_a_loss_that_calls_backward_itself_is_refused(mode: str | None, accumulate: int) -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        mean_square(model, ids).backward()
        return loss_of(model, ids)

    step = step_of(Deep(), loss=loss, accumulate=accumulate)
    with ab.Executor(step, mode) as executor, pytest.raises(ValueError, match="called backward"):
        executor.run(batch=BATCHES[0])


def refused_by_two() -> list[str]:
    """Two workers run different steps, and then want gradients scaled by a shard's frequencies."""
    model, bag = nn.Linear(2, 1), nn.EmbeddingBag(5, 2, scale_grad_by_freq=True)
    with pytest.raises(ValueError, match="scale_grad_by_freq") as scaled:
        ab.Executor(step_of(bag), "AllReduce")
    steps = {"a": step_of(model), "b": step_of(model)}
    with ab.Executor(steps, "AllReduce") as executor, pytest.raises(ab.BoundaryError) as different:
        executor.run("a" if ab.job().rank == 0 else "b", torch.ones(2, 2))
    return [str(different.value), str(scaled.value)]


def test_different_steps_on_two_workers_and_gradients_scaled_by_a_shards_frequencies_are_refused() -> None:
    for different, scaled in in_job(refused_by_two, 2):
        assert "the same steps in the same order" in different
        assert "scale_grad_by_freq" in scaled
