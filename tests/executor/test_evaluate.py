"""``evaluate`` joins a whole loader's results; ``epoch`` counts; ``log`` and ``state`` take what is the user's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_loaders import Stateful
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import anabranch as ab
from anabranch.liveness import meeting
from toys import Kept, in_job, messages_of, step_of
from waiting import wait_until

DATA = torch.arange(22.0).view(11, 2)


def outputs(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    return {"mean": batch.mean(), "rows": batch, "sum": batch.sum(1)}


def program(loader: Any = None, look: Any = outputs, **options: Any) -> ab.Executor:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    steps = {"train": step_of(model, lr=0.001), "look": ab.EvalStep(model, look)}
    return ab.Executor(steps, dataloaders={} if loader is None else dict.fromkeys(steps, loader), **options)


LOADERS = [list(DATA.split(4)), DataLoader(DATA, 4), ab.loaders.GlobalBatches(DATA, 4, shuffle=False)]  # type: ignore[arg-type]


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: type(loader).__name__)
@pytest.mark.parametrize("bound", [False, True])
def test_a_whole_loader_is_joined_and_its_position_stays(loader: Any, bound: bool) -> None:
    with program(loader if bound else None) as executor:
        if bound:
            executor.run("train")
        for _ in range(2):
            results = executor.evaluate("look", None if bound else loader)
            assert results["rows"].tolist() == DATA.tolist()
            assert results["sum"].tolist() == DATA.sum(1).tolist()
            assert results["mean"].dtype == torch.float64
            assert results["mean"].item() == pytest.approx(DATA.double().mean().item(), rel=1e-12)
        for epoch in (0, 1) if bound else ():
            executor.run("train")
            assert executor.epoch == epoch


def test_an_evaluation_does_not_move_the_position_of_another_step() -> None:
    loaders = [Stateful(), DataLoader(DATA, 4, num_workers=1, persistent_workers=True)]  # type: ignore[arg-type]
    for loader in loaders:
        with program(loader) as executor:
            executor.run("train")
            for given in (None, loader):
                with pytest.raises(ValueError, match="give evaluate a loader of its own"):
                    executor.evaluate("look", given)
    loaders[1]._iterator = None  # freed in a cycle of references, its process would be waited for


def test_batches_weigh_by_their_rows() -> None:
    with program() as executor:
        assert executor.evaluate("look", [DATA[:0], DATA])["mean"].item() == pytest.approx(10.5)
    model = nn.Linear(2, 1)
    step = ab.EvalStep(model, lambda m, b: {"mean": b.mean()}, rows=lambda b: b[0, 0])
    with ab.Executor({"look": step}) as executor:
        batches = [torch.full((2, 2), 1.0), torch.full((3, 2), 3.0)]
        assert executor.evaluate("look", batches)["mean"].item() == (1 + 9) / 4


@pytest.mark.parametrize(
    ("look", "loader", "message"),
    [
        (lambda m, b: {"x": b.t()}, [DATA], r"output 'x' has the shapes \[\(2, 11\)\] for batches of \[11"),
        (lambda m, b: {"x": b[: 2 if len(b) > 2 else 0]}, [DATA, DATA[:2]], "output 'x' has the shapes"),
        (lambda m, b: {"x": 1.0}, [DATA], "output 'x' is a float"),
        (lambda m, b: {"x": (b > 3).sum()}, [DATA], "output 'x' is a count, 18, and evaluate averages"),
        (outputs, [], "the loader yields no batches on any worker"),
        (
            outputs,
            DataLoader(TensorDataset(DATA), 4, sampler=DistributedSampler(range(11), 2, 0)),  # type: ignore[arg-type]
            "a DistributedSampler repeats samples",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused(look: Any, loader: Any, message: str) -> None:
    with program(look=look) as executor, pytest.raises((ValueError, TypeError), match=message):
        executor.evaluate("look", loader)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: list(DATA.split(4)), [0, 0, 1, 1, 1, 2, 2]),
        (lambda: ab.loaders.GlobalBatches(DATA, 4), [0, 0, 1, 1, 1, 2, 2]),
        (lambda: iter(DATA.split(4)), [0, 0, 0]),  # whether there is a next batch is not known
        (lambda: None, [0] * 7),
    ],
    ids=["list", "GlobalBatches", "iterator", "none"],
)
def test_epochs_are_counted_where_there_is_a_loader(make: Any, expected: list[int], tmp_path: Path) -> None:
    loader = make()
    with program(loader) as executor:
        epochs = []
        for _ in expected:
            executor.run("train", DATA if loader is None else None)
            epochs.append(executor.epoch)
        executor.save(tmp_path)
    assert epochs == expected
    if max(expected) > 0:
        with program(make()) as executor:
            executor.resume(tmp_path)
            while executor.epoch < 4:
                executor.run("train")
            assert executor.step == 12


def test_the_user_s_own_numbers_reach_the_sinks_behind_the_steps_before() -> None:
    sink = Kept()
    with program(sinks=[sink]) as executor:
        executor.run("train", DATA)
        executor.log({"score": torch.tensor([0.5]), "count": 3})
        executor.run("train", DATA)
        with pytest.raises(ValueError, match="'loss' is a name that the step reports itself"):
            executor.log({"loss": 1.0})
    assert [step for step, _ in sink.steps] == [1, 1, 2]
    assert sink.steps[1] == (1, {"score": 0.5, "count": 3.0})


def test_plain_values_are_saved_and_dicts_and_lists_are_filled_in_place(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))
    state = {"best": 1.0, "history": {"seen": [1, 2]}, "average": average, "losses": [0.5, 0.25]}
    with program(state=state) as executor:
        executor.state["best"] = 0.5
        executor.state["history"]["more"] = torch.ones(2)
        executor.save(tmp_path)
        with pytest.raises(ValueError, match="no state is called 'other', so it would not be saved"):
            executor.state["other"] = 1
    history: dict[str, Any] = {}
    losses: list[float] = []
    with program(state={"best": None, "history": history, "average": average, "losses": losses}) as executor:
        executor.load(tmp_path)
        assert executor.state["best"] == 0.5
        for name, value in {"history": history, "losses": losses, "average": average}.items():
            assert executor.state[name] is value
        assert losses == [0.5, 0.25]
        assert (history["seen"], history["more"].tolist()) == ([1, 2], [1.0, 1.0])
    with pytest.raises(ValueError, match="objects.best.value is a builtins.object"):
        program(state={"best": object()})


# The mode that the job says.


@pytest.mark.parametrize(
    "options", [{"routes": {"weight": "PS"}}, {"cache": ab.Cache(capacity=9)}, {"consistency": "asp"}]
)
def test_options_of_another_mode_are_checked_and_without_effect_alone(options: dict[str, Any]) -> None:
    with program(**options) as executor:
        assert executor.comm_mode is None
        executor.run("train", DATA)
    if "routes" in options:
        with pytest.raises(ValueError, match="routes= makes exceptions from a comm_mode"):
            program(comm_mode=None, **options)
        with pytest.raises(ValueError, match="routes= names 'other'"):
            program(routes={"other": "PS"})


def without_a_mode(shared: bool) -> dict[str, Any]:
    """A script that says no mode; its data are ``shared``, or each worker takes its part."""
    data, rank, caught, logged = DATA.double(), ab.job().rank, list[str](), messages_of()
    loader = [data] if shared else ab.loaders.GlobalBatches(data, 4, shuffle=False)
    torch.manual_seed(rank)
    model = nn.Linear(2, 1).double()
    model.register_buffer("rank", torch.tensor(float(rank)))
    look = ab.EvalStep(model, lambda m, b: {**outputs(m, b), "buffer": m.rank.clone()})
    steps = {"train": step_of(model, lr=1e-3), "look": look}
    with warnings.catch_warnings(record=True) as said, ab.Executor(steps, dataloaders={"train": loader}) as executor:  # type: ignore[dict-item]
        warnings.simplefilter("always")
        while executor.epoch < 2:
            executor.run("train")
        looked = executor.evaluate("look", ab.loaders.GlobalBatches(data, 4, shuffle=False))
        own = executor.evaluate("look", [data[rank :: ab.job().world_size]])
        try:
            executor.evaluate("look", [data])  # twice
            executor.evaluate("look", [data] if rank else [])
            executor.evaluate("look", [data if rank else "no batch"])
        except Exception as error:  # noqa: BLE001 - it is compared
            caught.append(f"{type(error).__name__}: {error}")
    return {
        "mode": executor.comm_mode, "steps": executor.step, "weight": model.weight.tolist()[0],
        "rows": looked["rows"].tolist(), "mean": looked["mean"].item(), "own": own["rows"].tolist(), "failed": caught,
        "logged": "\n".join(logged), "buffers": [own["buffer"].item(), model.rank.item()],
        "warnings": [str(one.message) for one in said if one.category is UserWarning],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, 1])
def test_a_script_without_a_mode_trains_one_model_on_all_workers(servers: int) -> None:
    weights = []
    for size in (1, 2, 3):
        for rank, result in enumerate(in_job(without_a_mode, size, False, servers=servers)):
            assert result["mode"] == ("Hybrid" if servers else "AllReduce" if size > 1 else None)
            assert result["steps"] == 6
            weights.append(result["weight"])
            assert result["rows"] == DATA.tolist()
            assert result["mean"] == pytest.approx(10.5, rel=1e-12)
            assert result["own"] == torch.cat([DATA[other::size] for other in range(size)]).tolist()
            assert result["buffers"] == [0, rank]
            if size > 1:
                [warning] = result["warnings"]
                assert f"all {size} workers evaluate the same batches" in warning
                assert ("rank 0 failed to evaluate" in result["failed"][0]) == (rank > 0)
                assert rank > 0 or "comm_mode is" in result["logged"]
                assert (rank, size) != (0, 2) or "train: 2 workers x 2 rows = 4 rows a step" in result["logged"]
    assert all(weight == pytest.approx(weights[0], rel=1e-6) for weight in weights)


def test_workers_on_the_same_batch_are_warned_of_it() -> None:
    for result in in_job(without_a_mode, 2, True):
        warning, evaluated = result["warnings"]
        assert "all 2 workers evaluate the same batches" in evaluated
        assert "all 2 workers run 'train' on the same batch" in warning
        assert "ab.loaders.GlobalBatches" in warning


def apart(folder: str) -> str:
    """Rank 1 comes once rank 0 has said that it waits."""
    said, rank = Path(folder) / "said", ab.job().rank

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for" in record.getMessage():
                said.write_text(record.getMessage())

    logging.getLogger("anabranch").addHandler(Note())
    torch.distributed.init_process_group("gloo")
    if rank == 0:
        meeting.SAID_AFTER = 0.0
    else:
        wait_until(said.exists)
    with pytest.raises(ValueError, match="comm_mode='AllReduce'") as caught:
        program(comm_mode=["AllReduce", "PS"][rank])
    return str(caught.value)


def test_modes_are_compared_where_workers_meet_and_who_is_waited_for_is_said(tmp_path: Path) -> None:
    assert all("comm_mode='PS'" in message for message in in_job(apart, 2, str(tmp_path), servers=1))
    assert (tmp_path / "said").read_text() == "waiting for rank 1 to make an Executor; comm_mode=None trains alone"


# What is made in an evaluation under inference mode serves the training after it, at every boundary.

Mode = Callable[[], AbstractContextManager[object]]


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 20, (6, 3), generator=generator), torch.randn(6, 2, generator=generator)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 4)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.norm(self.table(ids).sum(1)))


def losses_of(folder: Path, mode: Mode, comm_mode: str | None, **options: object) -> list[float]:
    """Losses of a training in whose pauses is evaluated, saved and loaded, in ``mode``."""
    model = Norms()
    train = step_of(model, torch.optim.Adagrad, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    evaluate = ab.EvalStep(model, lambda model, batch: {"y": model(batch[0])})
    losses = []
    with mode():
        executor = ab.Executor({"train": train, "eval": evaluate}, comm_mode, **options)
    with executor:
        for number in range(6):
            with mode():
                executor.run("eval", batch_of(number + 3))
                executor.statistics()
                if number == 3:
                    executor.save(folder)
                    executor.load(folder)
            losses.append(executor.run("train", batch_of(number))["loss"].item())
    return losses


@pytest.mark.parametrize(
    ("comm_mode", "options"),
    [(None, {}), ("PS", {}), ("Hybrid", {"cache": ab.Cache(capacity=8, push_bound=2, pull_bound=2)})],
    ids=str,
)
def test_an_executor_trains_after_evaluations_in_inference_mode(
    tmp_path: Path, comm_mode: str | None, options: dict[str, object]
):
    expected = losses_of(tmp_path / "plain", nullcontext, comm_mode, **options)
    assert losses_of(tmp_path / "inference", torch.inference_mode, comm_mode, **options) == expected
