"""A job that fails is started again as a whole; a service's restarts are a budget that refills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import launch

from anabranch.launch import RestartBudget


@pytest.mark.parametrize(("restarts", "code", "lives"), [(3, 0, 3), (1, 1, 2)])
def test_a_job_that_fails_is_run_again_until_it_succeeds_or_no_restart_is_left(
    tmp_path: Path, restarts: int, code: int, lives: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "life = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('life', life)\n"
        "sys.exit(life < 2)\n"
    )
    told: list[str] = []
    found = launch(script, log_dir=tmp_path, tell=told.append, max_restarts=restarts, seconds=200)
    assert found.exit_code == code
    assert (tmp_path / "worker-0.log").read_text() == "".join(f"life {life}\n" for life in range(lives))
    assert [line.partition("; ")[2] for line in told if "restarting" in line] == [
        f"restarting the job ({number} of {restarts})" for number in range(1, lives)
    ]


def test_a_budget_refills_over_time() -> None:
    """Three restarts for the life of a job ended a week's run at the fourth crash."""
    now = 0.0
    budget = RestartBudget(3, 600.0, clock=lambda: now)
    for _ in range(50):
        assert budget.take() is not None
        now += 300.0
    for pause in (0.5, 1.0, None):
        assert budget.take() == pause or budget.used == 3


@pytest.mark.parametrize("text", ["", "3", "3/600", "-1/5s", "3/0s", "x/5s", "3/5m"])
def test_budgets_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="3/600s"):
        RestartBudget.parse(text)


@pytest.mark.slow
def test_a_job_with_a_rolled_back_server_restarts_from_its_last_complete_checkpoint(tmp_path: Path) -> None:
    """Its workers died of ``SchemaError ... pushes step 503; its next is step 430``."""
    script = tmp_path / "script.py"
    script.write_text(ROLLED_BACK)
    told: list[str] = []
    found = launch(
        script, [str(tmp_path / "saved")], workers=2, servers=1, durability="checkpoint", max_restarts=1, seconds=240,
        log_dir=tmp_path, tell=told.append,
    )  # fmt: skip
    logs = [(tmp_path / f"worker-{rank}.log").read_text() for rank in range(2)]
    assert found.exit_code == 0, logs
    # The first worker that meets the shard again is told so; the other may hear of that worker's death before.
    assert "RolledBack: this shard came back without changes that it had acknowledged" in "".join(logs)
    last = json.loads(logs[0].splitlines()[-1])
    assert (last["life"], last["first"]) == (1, 4)
    assert "restarting the job (1 of 1)" in told[-1]


ROLLED_BACK = """
import json, os, pathlib, signal, sys
import torch, anabranch as ab

def kill(role):
    record = json.loads(pathlib.Path(os.environ["ANABRANCH_STATUS"]).with_name("job.json").read_text())
    os.kill(next(one["pid"] for one in record["roles"] if one["role"] == role), signal.SIGKILL)

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with ab.Executor(step, comm_mode="PS") as executor:
    executor.resume(sys.argv[1])
    first = done = executor.statistics().steps
    while done < 8:
        executor.run(batch=torch.ones(2, 4) * (1 + done))
        done = executor.statistics().steps
        if done == 4:
            executor.save(sys.argv[1])
        if done == 6 and not life and ab.job().rank == 0:
            kill("parameters")
    print(json.dumps({"first": first, "life": life}), flush=True)
"""
