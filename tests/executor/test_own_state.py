"""State of the user's own in checkpoints: objects given to the executor, extra state of modules, averaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from plain_loop import mean_square


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


def executor_of(model: nn.Module, **options: Any) -> ab.Executor:
    return ab.Executor(ab.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1)), **options)


class Strict(Counter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("not mine")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"other": Counter()}, r"no state called \['other'\], only \['counter'\]"),
        ({"counter": Strict()}, r"'counter'.* \(Strict\) rejected its saved state: KeyError: 'not mine'"),
    ],
)
def test_objects_that_the_state_does_not_fit_are_named_before_anything_changes(
    state: Any, text: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 1)
    with executor_of(nn.Linear(2, 1), state={"counter": Counter()}) as executor:
        executor.save(tmp_path)
    before = model.weight.detach().clone()
    with executor_of(model, state=state) as executor, pytest.raises(ab.CheckpointError, match=text):
        executor.load(tmp_path)
    assert torch.equal(before, model.weight)


def test_unsavable_values_are_named(tmp_path: Path) -> None:
    counter = Counter()
    with executor_of(nn.Linear(2, 1), state={"counter": counter}) as executor:
        counter.seen = {"file": object()}
        with pytest.raises(ValueError, match=r"counter.*file"):
            executor.save(tmp_path)
    for state, text in (([], "a dict of objects by name"), ({1: counter}, "strings")):
        with pytest.raises(TypeError, match=text):
            executor_of(nn.Linear(2, 1), state=state)


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
    with (
        executor_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1), Noted(1, 1))) as executor,
        pytest.raises(ab.CheckpointError, match=r"missing: .*2\._extra_state"),
    ):
        executor.load(tmp_path)
