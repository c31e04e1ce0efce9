"""An optimizer's state that is replaced while a hook keeps the step on the tape: the next graph uses the new one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_state_replaced_while_the_tape_runs_is_the_graphs_afterwards(accumulate: int) -> None:
    def run(engine: Any) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, accumulate=accumulate)
        options: dict[str, Any] = {"capture_after": 1} if engine == "auto" else {}
        losses, engines = [], []
        with ab.Executor(step, engine=engine, **options) as executor:
            for update in range(14):
                if update == 8:
                    for kept in optimizer.state.values():
                        kept["exp_avg"] = kept["exp_avg"] * -2.0
                    hook = model.weight.register_hook(lambda gradient: gradient)
                if update == 9:
                    hook.remove()
                x = torch.full((2, 4), 1.0 + update)
                losses += [executor.run(batch=x)["loss"] for _ in range(accumulate)]
                engines.append(executor.engine())
        return [*losses, *model.state_dict().values()], engines

    expected, _ = run("tape")
    found, engines = run("auto")
    assert engines[7:9] == ["graph", "tape"]
    assert engines[-1] == "graph"
    assert all(map(torch.equal, expected, found))
