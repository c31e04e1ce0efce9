"""Training that is saved and loaded into a new process continues as if uninterrupted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch import checkpoint
from anabranch.executor.saving import saving
from toys import assert_same, in_job, step_of


def batch_of(step: int, rows: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(rows, 4, generator=generator), "y": torch.randint(0, 3, (rows,), generator=generator)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def program(
    make: Callable[[Any], torch.optim.Optimizer] = sgd, seed: int = 0, **options: Any
) -> tuple[nn.Module, ab.Executor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step = ab.TrainStep(model, loss, optimizer, scheduler=scheduler, **options)
    return model, ab.Executor({"train": step})


def losses(executor: ab.Executor, steps: range) -> list[float]:
    return [executor.run("train", batch_of(step))["loss"].item() for step in steps]


def test_a_checkpoint_is_of_an_optimizer_step(tmp_path: Path) -> None:
    model, executor = program(accumulate=3)
    with executor:
        for run in range(5):
            losses(executor, [run])
            if run == 2:
                executor.save(tmp_path)
                continue
            words = f"'train' has run {run % 3 + 1} of the 3 runs .* save after {2 - run % 3} more"
            with pytest.raises(RuntimeError, match=words):
                executor.save(tmp_path)
        expected = losses(executor, range(5, 8))
    other, resumed = program(seed=99, accumulate=3)
    with resumed:
        resumed.load(tmp_path)
        losses(resumed, range(3, 5))
        assert losses(resumed, range(5, 8)) == expected
        assert resumed.statistics().steps == 2
    assert_same(other, model)


class Counting(torch.optim.SGD):
    """Keeps values of its own in its state, one under the name of a parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["weight"] = self.state.get("weight", torch.zeros(1)) + 0.5
        return super().step(closure)


def test_an_optimizers_state_that_belongs_to_no_parameter_is_saved_and_loaded(tmp_path: Path) -> None:
    first, second = (step_of(nn.Linear(4, 3), partial(Counting, momentum=0.9), loss) for _ in range(2))
    with ab.Executor({"train": first}) as executor, ab.Executor({"train": second}) as resumed:
        losses(executor, range(2))
        executor.save(tmp_path)
        resumed.load(tmp_path)
        assert losses(resumed, range(2, 4)) == losses(executor, range(2, 4))
    for (optimizer,) in (first.optimizers, second.optimizers):
        assert (optimizer.state["steps"], optimizer.state["weight"]) == (4, torch.tensor([2.0]))


def test_a_parameter_that_a_layer_in_its_place_left_without_a_name_is_an_error_that_says_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ab.Executor({"train": ab.TrainStep(model, loss, optimizer)}) as executor:
        model[0] = nn.Linear(4, 3)
        optimizer.add_param_group({"params": model[0].parameters()})
        with pytest.raises(ab.CheckpointError, match=r"SGD holds a parameter of shape \(3, 4\) .* remove it from"):
            executor.save(tmp_path)
        del optimizer.param_groups[1]
        executor.save(tmp_path)


def test_several_models_and_steps_share_a_checkpoint(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[dict[str, nn.Module], ab.Executor]:
        torch.manual_seed(seed)
        models = {name: nn.Linear(4, 3) for name in ("generator", "critic")}
        return models, ab.Executor({name: step_of(model, torch.optim.Adam, loss) for name, model in models.items()})

    models, executor = build(0)
    with executor:
        for name in ("generator", "critic", "critic"):
            executor.run(name, batch_of(0))
        executor.save(tmp_path)
    others, resumed = build(1)
    with resumed:
        resumed.load(tmp_path)
        for name, model in models.items():
            assert_same(others[name], model)


def test_checkpoints_of_others_under_the_path_are_passed_over_and_in_it_refused(tmp_path: Path) -> None:
    """A parameter server's own has the number of its changes as its step, and once no resume succeeded beside it."""
    checkpoint.write(tmp_path / "servers" / "shard-0-of-1", {"t": {"rows": torch.ones(1)}}, {"shard": 0}, step=1000)
    _, executor = program()
    with executor:
        assert not executor.resume(tmp_path)
        losses(executor, range(2))
        executor.save(tmp_path / "kept")
        losses(executor, range(1))
        executor.save(tmp_path / "later")
    (tmp_path / "later").rename(tmp_path / "kept" / "set-aside")
    _, executor = program(seed=1)
    with executor:
        assert executor.resume(tmp_path)
        assert executor.step == 2
    (tmp_path / "kept" / "manifest-00000001.json").write_text("{}")
    _, executor = program()
    with executor:
        with pytest.raises(ab.CheckpointError, match="no checkpoint is complete: generation 1 in .*kept"):
            executor.resume(tmp_path)
        with pytest.raises(ab.CheckpointError, match="was not saved by an Executor"):
            executor.resume(tmp_path / "servers" / "shard-0-of-1")


def trained_by_workers(path: str, start: int, stop: int, save_at: int, accumulate: int) -> dict[str, Any]:
    rank, world = ab.job().rank, ab.job().world_size
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)).double()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]), batch["y"])

    optimizers = [torch.optim.Adagrad(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    step = ab.TrainStep(model, loss, optimizers, scheduler=schedulers, accumulate=accumulate, clip_grad_norm=0.5)
    seen = []
    with torch.sparse.check_sparse_tensor_invariants(False), ab.Executor(step, comm_mode="AllReduce") as executor:
        assert executor.resume(path) == (start > 0)
        for index in range(start, stop):
            generator = torch.Generator().manual_seed(index)
            ids, y = torch.randint(0, 20, (9,), generator=generator), torch.randint(0, 3, (9,), generator=generator)
            mine = slice(rank * 9 // world, (rank + 1) * 9 // world)
            seen.append(executor.run(batch={"ids": ids[mine], "y": y[mine]})["loss"].item())
            if index + 1 == save_at:
                executor.save(path)
        return {"losses": seen, "head": model[1].weight.flatten().tolist(), "draw": torch.rand(3).tolist()}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "accumulate"), [(1, 3, 2), (2, 2, 4), (2, 1, 1)])
def test_another_number_of_workers_resumes_where_the_others_stopped(
    tmp_path: Path, before: int, after: int, accumulate: int
) -> None:
    whole = in_job(trained_by_workers, before, str(tmp_path), 0, 8, 4, accumulate)  # saves once, after half
    rest = in_job(trained_by_workers, after, str(tmp_path), 4, 8, 0, accumulate)
    for rank, found in enumerate(rest):
        assert found["losses"] == pytest.approx(whole[0]["losses"][4:], rel=1e-12)
        assert found["head"] == pytest.approx(whole[0]["head"], rel=0, abs=1e-12)
        if before == after:
            assert found == {**whole[rank], "losses": whole[rank]["losses"][4:]}  # bit for bit, random numbers too


def test_an_accumulating_worker_stops_behind_the_optimizer_step(tmp_path: Path) -> None:
    with executor_of(nn.Linear(3, 1), accumulate=3) as executor:
        executor.request_stop()
        for stopping in (False, False, True, False):
            executor.run(batch=torch.ones(2, 3))
            assert executor.stopping == stopping
            if stopping:
                executor.save(tmp_path)


# State of the user's own in checkpoints: objects given to the executor, extra state of modules, averaged weights.


class Counter:
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"words": ["a"], "count": 0, "total": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


class Noted(nn.Linear):
    note: Any = None

    def get_extra_state(self) -> Any:
        return {"note": self.note, "versions": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def executor_of(model: nn.Module, state: Any = None, **options: Any) -> ab.Executor:
    return ab.Executor(step_of(model, **options), state=state)


class Strict(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("not mine")


BATCHES = [batch_of(step) for step in range(4)]


def fitting(
    *, width: int = 8, last: type[nn.Linear] = nn.Linear, make: Any = sgd, loader: Any = BATCHES, state: Any = None
) -> tuple[nn.Module, ab.Executor]:
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), last(width, 3))
    step = ab.TrainStep(model, loss, make(model.parameters()))
    return model, ab.Executor({"train": step}, dataloaders={"train": loader}, state=state or {"counter": Counter()})


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"width": 9}, r"0\.weight.*\(9, 4\).*\(8, 4\)|0\.weight.*\(8, 4\).*\(9, 4\)"),
        ({"last": Noted}, r"missing: .*3\._extra_state"),
        (
            {"make": lambda parameters: [sgd([one]) for one in parameters]},
            "1 optimizers for step 'train', but this Executor has 6",
        ),
        ({"make": torch.optim.Adagrad}, "optimizer 0 of 'train' is Adagrad, but the checkpoint has SGD"),
        ({"loader": ab.loaders.GlobalBatches(BATCHES, 4)}, "'counted'"),
        ({"state": {"other": Counter()}}, r"no state called \['other'\], only \['counter'\]"),
        ({"state": {"counter": Strict()}}, r"'counter'.* \(Strict\) rejected its saved state: KeyError: 'not mine'"),
        ({}, "was not saved by an Executor of this version$"),
    ],
    ids=lambda value: str(*value) if isinstance(value, dict) and value else None,
)
def test_what_does_not_fit_is_named_before_anything_changes(
    other: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, executor = fitting()
    with executor, monkeypatch.context() as older:
        if not other:
            older.setattr(saving, "_FORMAT", saving._FORMAT - 1)
        executor.run("train")
        executor.save(tmp_path)
    model, executor = fitting(**other)
    before = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    with executor:
        for load in (executor.load, executor.resume):
            with pytest.raises(ab.CheckpointError, match=f"(?s){text}"):
                load(tmp_path)
        assert executor.step == 0
    assert all(
        value == before[name] if name.endswith("extra_state") else torch.equal(value, before[name])
        for name, value in model.state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), drawn)


def test_unsavable_values_are_named(tmp_path: Path) -> None:
    counter = Counter()
    with executor_of(nn.Linear(2, 1), state={"counter": counter}) as executor:
        counter.seen = {"file": object()}
        with pytest.raises(ValueError, match=r"counter.*file"):
            executor.save(tmp_path)


def test_a_state_that_the_script_does_not_give_is_named_where_it_resumes(tmp_path: Path) -> None:
    """It was dropped with a line of a log that nobody saw."""
    with executor_of(nn.Linear(2, 1), state={"best": 1.0}) as executor:
        executor.save(tmp_path)
    with executor_of(nn.Linear(2, 1)) as executor, pytest.warns(match=r"state \['best'\] that this Execu") as warned:
        assert executor.resume(tmp_path)
    assert [one.filename for one in warned] == [__file__]
    looks = ab.EvalStep(nn.Linear(2, 1), lambda model, batch: {"out": model(batch)})
    with ab.Executor(looks) as executor:  # which ignores the rest
        executor.load(tmp_path)


def test_extra_state_of_modules_is_saved_and_loaded(tmp_path: Path) -> None:
    one, two = nn.Sequential(nn.Linear(2, 2), Noted(2, 1)), nn.Sequential(nn.Linear(2, 2), Noted(2, 1))
    one[1].note = {"seen": [1, 2.5, None], "mean": torch.arange(3)}
    with executor_of(one) as executor:
        executor.save(tmp_path)
    with executor_of(two) as executor:
        executor.load(tmp_path)
    note: Any = two[1].note
    assert note["seen"] == [1, 2.5, None]
    assert torch.equal(note["mean"], torch.arange(3))
