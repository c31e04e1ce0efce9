"""An elastic job whose workers die where a plan says, and the plain loop that the others' numbers are those of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import launch, lines
from safetensors import safe_open
from torch import Tensor, nn

import anabranch as ab
from anabranch.launch import JobOutcome, RestartBudget

Deaths = dict[int, list[tuple[str, int]]]  # of processes: where, and in which run, counted from 0

SAMPLES, BATCH, STEPS, ROWS = 44, 12, 10, 30  # 4 batches an epoch, the last of 8 samples


def sample(index: int) -> dict[str, Any]:
    ids = torch.tensor([index * 7 % ROWS, index * index % ROWS])
    return {"id": index, "ids": ids, "y": index % 7 / 7.0}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 4) for _ in range(2))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        return self.layers(torch.cat(rows, 1))[:, 0]  # type: ignore[no-any-return]


class Undisturbed:
    """The plain loop on whole batches."""

    def __init__(self, *, function: bool, accumulate: int, clip: float | None, steps: int) -> None:
        self.model = Model()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        loader = ab.loaders.GlobalBatches(range(SAMPLES), BATCH, seed=3)
        epochs = [
            [int(one) for one in loader.order(epoch)[first : first + BATCH]]
            for epoch in range(steps * accumulate * BATCH // SAMPLES + 2)
            for first in range(0, SAMPLES, BATCH)
        ]
        offsets = [(run * BATCH) % (SAMPLES - BATCH) for run in range(steps * accumulate)]
        self.batches = [list(range(one, one + BATCH)) for one in offsets] if function else epochs
        self.losses: list[float] = []
        self.scores: list[float] = []
        for step in range(steps):
            runs = self.batches[step * accumulate : (step + 1) * accumulate]
            optimizer.zero_grad()
            for ids in runs:
                errors = self.errors(ids)
                self.losses.append(errors.mean().item())
                (errors.sum() / sum(map(len, runs))).backward()  # type: ignore[no-untyped-call]
                self.scores.append(self.score())
            if clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            self.scores[-1] = self.score()

    def errors(self, numbers: list[int]) -> Tensor:
        batch = torch.utils.data.default_collate([sample(one) for one in numbers])
        return (self.model(batch["ids"]) - batch["y"]).square()  # type: ignore[no-any-return]

    @torch.no_grad()
    def score(self) -> float:
        return self.errors(list(range(SAMPLES))).mean().item()


def drawn_after(count: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    return float(torch.rand(count + 1, generator=generator)[-1])


def chosen(*values: Iterable[object]) -> list[Any]:
    """Few cases that have every pair of two values."""
    from covering import pairwise  # here: the job's processes do not find it

    return [case.values for case in pairwise(*values, slow=False)]


PLAN = {
    "mode": None, "misses": {}, "gloo": False, "function": False, "accumulate": 1, "clip": 0.3, "cache": False,
    "freezes": False, "evaluates": False, "exports": False, "background": False, "reduces": False, "waits": -1,
    "hosts": False, "strikes": None,
}  # fmt: skip


def train(
    folder: Path,
    deaths: Deaths,
    *,
    workers: int = 3,
    least: int | None = 1,
    joiners: Deaths | None = None,
    restarts: int = 0,
    left: int | None = None,
    last: bool = False,
    steps: int = STEPS,
    durability: str = "none",
    **options: Any,
) -> tuple[JobOutcome, list[str]]:
    """Train, and check that all have what the undisturbed run has; return the end and what was told.

    ``options``: of ``PLAN``. ``mode``: that of a job with two servers. ``left``: so many are there at the end; by
    default those that do not die. ``joiners``: deaths of replacements. ``strikes``: the signal that who dies first
    sends a server. ``last``: who dies does so in the last step, for which nobody needs to meet.
    """
    assert options.keys() <= PLAN.keys()
    plan: dict[str, Any] = {**PLAN, **options, "deaths": deaths, "joiners": joiners or {}, "workers": workers}
    mode, accumulate = plan["mode"], plan["accumulate"]
    records, logs, told = folder / "records", folder / "logs", list[str]()
    plan |= {"steps": steps, "logs": str(logs)}
    records.mkdir()
    logs.mkdir()
    outcome = launch(
        Path(__file__).with_name("elastic_job.py"), [str(records), json.dumps(plan)], workers=workers,
        servers=0 if mode is None else 2, min_workers=least, log_dir=logs, durability=durability,
        worker_restarts=RestartBudget(restarts), tell=told.append, seconds=300.0,
    )  # fmt: skip
    assert outcome.exit_code == 0, "\n".join([*told, *(log.read_text() for log in sorted(logs.glob("*.log")))])
    assert {one.code for one in outcome.services} <= {0}, (outcome.services, told)
    ends = lines(records, "end")
    steps = ends[0]["steps"]
    expected = Undisturbed(function=plan["function"], accumulate=accumulate, clip=plan["clip"], steps=steps)
    if left is None:
        left = workers - len(deaths)
    assert len(ends) == left
    if not last:
        assert sorted(end["rank"] for end in ends) == list(range(left))
        assert {end["size"] for end in ends} == {left}
    assert {end["restarts"] for end in ends if not end["joined"]} <= {"0"}
    assert {end["pid"] for end in ends} <= {one.pid for one in outcome.exits}
    if deaths and least is None:  # else a newcomer may come too late to some place
        assert sum(not end["joined"] for end in ends) == workers - len(deaths), "all have died where the plan says"
    seeds = [5 + process for process in range(workers)]
    for end in ends:
        assert end["steps"] == steps
        for here, there in zip(end["parameters"], expected.model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), there.detach(), rtol=0.0, atol=1e-12)
        assert end["calls"] == steps * accumulate  # buffers and generators went back with the step
        assert end["joined"] or end["drawn"] in [drawn_after(steps * accumulate, one) for one in seeds]
    # In the last doing of each run every sample counts once.
    doings: dict[int, dict[int, list[int]]] = {}
    for one in lines(records, "doings"):
        doings.setdefault(one["run"], {}).setdefault(one["number"], []).extend(one["ids"])
    for run in range(steps * accumulate):
        assert sorted(doings[run][max(doings[run])]) == sorted(expected.batches[run]), run
    for name, values in (("losses", expected.losses), ("scores", expected.scores)):
        for one in lines(records, name):
            assert one["loss"] == pytest.approx(values[one["run"]], abs=1e-12)
    if plan["evaluates"]:
        assert ab.checkpoint.read(records / "saved").state["ranks"][0]["counts"]["train"]["steps"] == steps
    if plan["exports"]:
        last = max(lines(records, "states"), key=lambda one: (one["run"], bool(one["state"])))["state"]
        with safe_open(records / "exported" / "model.safetensors", "pt") as file:
            exported = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118 - no mapping
        assert last == exported
        for name, value in expected.model.named_parameters():
            here = torch.tensor(exported[name], dtype=torch.float64)
            torch.testing.assert_close(here, value.detach(), rtol=0.0, atol=1e-12)
    for one in lines(records, "memberships"):
        assert one["job"] == [one["rank"], one["size"]]
    return outcome, told
