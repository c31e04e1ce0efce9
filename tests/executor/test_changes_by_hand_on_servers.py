"""What lives on servers is changed there: a change of the copy by hand is an error, not a lost update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import mean_square
from toys import Tabled

IDS = torch.tensor([0, 5, 5, 3])


def executor_of(model: nn.Module, mode: str = "PS", optimizer: Any = torch.optim.Adam, **options: Any) -> ab.Executor:
    step = ab.TrainStep(model, mean_square, optimizer(model.parameters(), lr=0.1))
    return ab.Executor({"train": step, "look": ab.EvalStep(model, lambda m, ids: {"out": m(ids)})}, mode, **options)


def give_other_data(model: Tabled) -> None:
    model.head.weight.data = torch.zeros(5, 3)


def change_the_last_number(model: Tabled) -> None:
    model.head.weight.data[-1, -1] += 1e-3


@pytest.mark.parametrize("change", [give_other_data, change_the_last_number])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_change_by_hand_is_an_error_that_names_it(change: Callable[[Tabled], None], steps: int) -> None:
    model = Tabled(out=5)
    with executor_of(model) as executor:
        for _ in range(steps):
            executor.run("train", IDS)
        before = copy.deepcopy(model.head.state_dict())
        change(model)
        with pytest.raises(ab.LostUpdate, match=r"^head\.weight was changed by hand.*routes={'head\.weight': "):
            executor.run("train", IDS)
        assert executor.step == steps
        model.head.load_state_dict(before)
        executor.run("train", IDS)  # and goes on once it is taken back
        assert executor.step == steps + 1


@pytest.mark.parametrize("options", [{"consistency": "asp"}, {"use_sparse_pull": False}, {"engine": "graph"}])
def test_and_so_under_every_consistency_engine_and_for_tables_held_whole(options: dict[str, Any]) -> None:
    model = Tabled(out=5)
    with executor_of(model, **options) as executor:
        executor.run("train", IDS)
        for value in (model.head.bias, model.table.weight)[: 1 + ("use_sparse_pull" in options)]:
            before = value.detach().clone()
            value.data.mul_(2)
            with pytest.raises(ab.LostUpdate, match=r"^(head\.bias|table\.weight) was"):
                executor.run("train", IDS)
            value.data.copy_(before)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_values_that_an_evaluation_would_not_use_are_an_error_and_those_it_uses_are_not(consistency: str) -> None:
    model = Tabled(out=5)
    with executor_of(model, consistency=consistency) as executor:
        executor.run("train", IDS)
        kept = model.head.bias.detach().clone()
        model.head.bias.data.add_(1)
        if consistency == "asp":
            with pytest.raises(ab.LostUpdate, match=r"head\.bias"):
                executor.run("look", IDS)  # would read the servers first
            model.head.bias.data.copy_(kept)
            executor.run("look", IDS)
            return
        assert torch.equal(executor.run("look", IDS)["out"], model.head(executor_rows(executor)))
        model.head.bias.data.copy_(kept)
        executor.run("train", IDS)


def executor_rows(executor: ab.Executor) -> Tensor:
    assert executor._remote is not None
    return executor._remote.client.sparse_pull("table.weight", IDS)


def test_a_change_in_the_run_itself_is_an_error_of_that_run() -> None:
    """As of a codebook that moves in forward: the read at the end of the run would overwrite it."""
    model = Tabled(out=5)

    def moving(model: Tabled, ids: Tensor) -> Tensor:
        model.head.bias.data.mul_(0.5)
        return mean_square(model, ids)

    step = ab.TrainStep(model, moving, torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        pytest.raises(ab.LostUpdate, match=r"^head\.bias was changed"),
        ab.Executor(step, "PS", engine="tape") as executor,
    ):
        executor.run(batch=IDS)


def test_neither_loading_nor_saving_nor_a_step_passed_over_is_a_change(tmp_path: Path) -> None:
    model = Tabled(out=5)
    with executor_of(model) as executor:
        executor.run("train", IDS)
        executor.save(tmp_path)
        expected = [executor.run("train", IDS)["loss"] for _ in range(2)]
        model.head.bias.data.zero_()  # a load does away with it
        executor.load(tmp_path)
        assert [executor.run("train", IDS)["loss"] for _ in range(2)] == expected
        assert executor.resume(tmp_path)
        assert [executor.run("train", IDS)["loss"] for _ in range(2)] == expected


def test_a_change_after_the_last_step_is_an_error_of_close_which_closes_all_the_same() -> None:
    model, plain = Tabled(out=5), Tabled(out=5)
    with executor_of(plain) as executor:
        executor.run("train", IDS)
    executor = executor_of(model)
    executor.run("train", IDS)
    model.head.bias.data.zero_()
    with pytest.raises(ab.LostUpdate, match=r"head\.bias") as caught:
        executor.close()
    assert "the model has the values of the servers" in caught.value.__notes__[0]
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
