"""W workers on shards of a batch end where one plain PyTorch loop on the whole batch ends, servers or none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

import anabranch as ab
from toys import distance, in_job, plain_step, plain_window, step_of

STEPS = 5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "row_wise_adagrad": lambda p: ab.RowWiseAdagrad(p, lr=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, weight_decay=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "ftrl": lambda p: ab.FTRL(p, lr=0.1, l1=0.01),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}


class Model(nn.Module):
    """An embedding (sparse or not), a layer used twice, a branch used on some rows only, a parameter never used."""

    def __init__(self, sparse: bool, has_rare: bool) -> None:
        super().__init__()
        self.has_rare = has_rare
        self.table = nn.Embedding(50, 6, sparse=sparse)
        self.shared = nn.Linear(6, 6)
        self.rare = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        hidden = self.shared(torch.tanh(self.shared(self.table(ids).mean(1) + x)))
        rare = ids[:, 0] < 5
        if self.has_rare and rare.any():  # on some steps and some workers only
            hidden = hidden.index_add(0, rare.nonzero()[:, 0], self.rare(hidden[rare]))
        return hidden


def batch_of(case: dict, step: int, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator("cpu").manual_seed(1000 + step)
    with torch.device("cpu"):
        batch = {
            "ids": torch.randint(0, 50, (rows, 3), generator=generator),
            "x": torch.randn(rows, 6, generator=generator, dtype=torch.float64),
            "y": torch.randint(0, 3, (rows,), generator=generator),
        }
    return {name: value.to(case.get("device", "cpu")) for name, value in batch.items()}


def loss_of(case: dict, total=lambda tensor: tensor):
    """Return a loss whose mean, or sum, over the rows of all workers is that of the whole batch."""

    def ordinary(model: nn.Module, batch: dict) -> Tensor:
        return F.cross_entropy(model.head(model(batch["ids"], batch["x"])), batch["y"], reduction=case["reduction"])

    def contrastive(model: nn.Module, batch: dict) -> Tensor:
        mine, start = F.normalize(model(batch["ids"], batch["x"]), dim=1), batch["start"]
        everyone = total(F.pad(mine, (0, 0, start, batch["rows"] - start - len(mine))))
        return F.cross_entropy(mine @ everyone.T / 0.3, start + torch.arange(len(mine))) + ordinary(model, batch)

    def normalised(model: nn.Module, batch: dict) -> Tensor:
        hidden = model(batch["ids"], batch["x"])
        mean = total(hidden.sum(0)) / batch["rows"]
        variance = total((hidden - mean).square().sum(0)) / batch["rows"]
        return F.cross_entropy(model.head((hidden - mean) / (variance + 1e-3).sqrt()), batch["y"])

    def balanced(model: nn.Module, batch: dict) -> Tensor:
        logits = model.head(model(batch["ids"], batch["x"]))
        shares = total(logits.softmax(1).sum(0)) / batch["rows"]
        return F.cross_entropy(logits, batch["y"]) + 3.0 * shares.square().sum()

    return {one.__name__: one for one in (ordinary, contrastive, normalised, balanced)}[case.get("loss", "ordinary")]


def by_torch(tensor: Tensor) -> Tensor:
    return functional_all_reduce(tensor, "sum", torch.distributed.group.WORLD)


def shard(batch: dict, sizes: list[int], rank: int) -> dict:
    start = sum(sizes[:rank])
    return {key: value[start : start + sizes[rank]] for key, value in batch.items()} | {
        "start": start,
        "rows": sum(sizes),
    }


def optimizers_of(name: str, model: Model, sparse: bool | str) -> list[torch.optim.Optimizer]:
    rest = [parameter for key, parameter in model.named_parameters() if key != "table.weight"]
    make = OPTIMIZERS[name]
    if not sparse:
        return [make([model.table.weight, *rest])]
    return [OPTIMIZERS[sparse if isinstance(sparse, str) else "adagrad"]([model.table.weight]), make(rest)]


def schedulers_of(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.lr_scheduler.LRScheduler]:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]


def new_model(case: dict, seed: int) -> Model:
    torch.manual_seed(seed)
    with torch.device("cpu"):
        return Model(bool(case["sparse"]), case.get("rare", True)).double().to(case.get("device", "cpu"))


def plain_loop(case: dict, rows: int) -> tuple[Model, list[float]]:
    sparse, accumulate = case["sparse"], case["accumulate"]
    model = new_model(case, seed=0)
    optimizers = optimizers_of(case["optimizer"], model, sparse)
    then, mean, losses = [*optimizers, *schedulers_of(optimizers)], case["reduction"] == "mean", list[float]()
    for step in range(STEPS):
        parts = [
            shard(batch_of(case, step * accumulate + part, rows + part), [rows + part], 0) for part in range(accumulate)
        ]
        count = lambda part: len(part["y"])  # noqa: E731
        losses += plain_window(model, loss_of(case), parts, count, mean=mean, clip=case["clip"], then=then)
    return model, losses


def with_workers(case: dict, rows: int, rank: int, world: int) -> tuple[dict[str, Tensor], list[float]]:
    sparse, accumulate = case["sparse"], case["accumulate"]
    model = new_model(case, seed=rank)  # rank 0's is everyone's
    optimizers = optimizers_of(case["optimizer"], model, sparse)
    step = ab.TrainStep(
        model,
        loss_of(case, by_torch if case["engine"] == "graph" else ab.all_reduce),
        optimizers,
        reduction=case["reduction"],
        scheduler=schedulers_of(optimizers),
        clip_grad_norm=case["clip"],
        accumulate=accumulate,
        precision=case.get("precision"),
    )
    losses = []
    steps = {"default": step, "look": ab.EvalStep(model, lambda model, ids: {"rows": model.table(ids)})}
    names = {"engine": "engine", "routes": "routes", "sparse_pull": "use_sparse_pull"}
    options = {names[name]: value for name, value in case.items() if name in names}
    options |= {"cache": ab.Cache(**case["cache"])} if "cache" in case else {}
    with ab.Executor(steps, case["mode"], served="replace", **options) as executor:
        for run in range(STEPS * accumulate):
            whole = batch_of(case, run, rows + run % accumulate)
            count = len(whole["y"])
            sizes = [count // world] * world
            sizes[run % world] += count - sum(sizes)
            if case["unequal"]:  # one worker has most rows, and one none at all, unless its loss talks to the others
                sizes = [2 if "loss" in case else 0] * world
                sizes[(run + 1) % world] = 2
                sizes[run % world] += count - sum(sizes)
            losses.append(executor.run(batch=shard(whole, sizes, rank))["loss"].item())
        assert executor.statistics().steps == STEPS
        found = {"table.weight": executor.run("look", torch.arange(50, device=case.get("device", "cpu")))["rows"]}
    return {**found, **dict(model.named_parameters())}, losses


def compared(cases: list[dict], default: str | None = None) -> list[list]:
    """The distances of parameters and losses in each case, and whether what is never used has no gradient."""
    torch.set_default_device(default)
    torch.distributed.init_process_group("gloo")  # which also sums CUDA tensors, even of ranks that share a GPU
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    results = []
    for case in cases:
        expected, expected_losses = plain_loop(case, rows=11)
        found, losses = with_workers(case, 11, rank, world)
        worst = max(distance(found[name], value) for name, value in expected.named_parameters())
        worst_loss = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
        results.append([worst, worst_loss, found["never"].grad is None])
    torch.distributed.destroy_process_group()
    torch.set_default_device(None)
    return results


# The cases.

MODES = ("AllReduce", "PS", "Hybrid")


def case(optimizer: str, mode: str = "AllReduce", **changes: object) -> dict[str, object]:
    plain = {"sparse": False, "unequal": True, "reduction": "mean", "clip": None, "accumulate": 1, "engine": "tape"}
    return {"optimizer": optimizer, "mode": mode, **plain, **changes}


MIXED = [
    case("adamw", sparse=True, reduction=reduction, clip=clip, accumulate=accumulate)
    for reduction, clip, accumulate in product(("mean", "sum"), (None, 0.5), (1, 3))
]
# A worker's own optimizer gets the same gradients, whichever it is.
FEW = [
    case("adam_decay"),
    case("sgd", reduction="sum"),
    case("momentum", clip=0.5, accumulate=2),
    *(MIXED[i] for i in (1, 2, 4, 7)),
]
REDUCED = [
    *FEW,
    *map(case, ("sgd", "sgd_decay", "momentum", "nesterov", "adagrad", "adam", "adamw", "adamw_fused")),
    case("adam", unequal=False),
    *(MIXED[i] for i in (0, 3, 5, 6)),
]
QUICK = [
    # What servers do for an optimizer depends on its states and on whether it moves rows that nobody has looked up.
    case("adagrad", "PS"),
    case("adam_decay", "Hybrid"),
    case("adamw", "Hybrid", sparse="sparse_adam"),
    case("adamw", "PS", sparse="adagrad", clip=0.5),
    case("adamw", "PS", clip=0.5, accumulate=3),
    case("adamw", "Hybrid", clip=0.5, accumulate=3, reduction="sum"),
    case("adam", "Hybrid", cache={"capacity": 20}),
    case("adam", "PS", sparse_pull=False),
    case("adamw", "Hybrid", engine="graph", rare=False, clip=0.5),
    case("adam", "PS", routes={"head.weight": "AllReduce"}),
    case("adam", "AllReduce", routes={"table.weight": "PS", "shared.weight": "PS"}),
]
RULES = ("sgd", "sgd_decay", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adamax", "amsgrad", "ftrl")
OTHERS = [
    *(case(optimizer, mode) for optimizer, mode in product(RULES, ("PS", "Hybrid"))),
    *(case("adamw", mode, sparse=sparse) for sparse, mode in product(("sgd", "row_wise_adagrad"), ("PS", "Hybrid"))),
    *(case("adam", mode, cache={"capacity": 20}) for mode in ("PS", "Hybrid")),
    case("adamw", "PS", sparse="adagrad", sparse_pull=False),
    case("row_wise_adagrad", "PS"),
    case("momentum", "PS", unequal=False),
    case("adamw", engine="graph", rare=False, sparse=True, clip=0.5, accumulate=2),
    case("adamw", "PS", engine="graph", rare=False),
    case("adam", "PS", engine="graph", rare=False, cache={"capacity": 20}, accumulate=2),
]
LOSSES = ("contrastive", "normalised", "balanced")
BETWEEN_WORKERS = [
    case("adam", loss="contrastive"),
    case("sgd", "Hybrid", loss="normalised", accumulate=2, clip=0.5),
    case("adam", "PS", loss="balanced"),
    case("sgd", loss="normalised", precision="float16", rare=False),
]
BETWEEN_MORE = [
    *(case("adam", loss=loss) for loss in LOSSES[1:]),
    *(case("adam", "Hybrid", loss=loss) for loss in LOSSES),
    *(case("sgd", mode, loss="contrastive", accumulate=2, clip=0.5) for mode in ("AllReduce", "PS")),
    *(case("adam", loss=loss, engine="graph", unequal=False, rare=False) for loss in LOSSES),
    case("adam", "Hybrid", loss="normalised", engine="graph", accumulate=2, unequal=False, rare=False),
]
"""The row weight was applied behind backward, so that gradients from another worker had the wrong one."""


@pytest.mark.parametrize(
    ("workers", "servers", "cases"),
    [
        (2, 0, FEW),
        (2, 2, [*QUICK, *BETWEEN_WORKERS]),
        pytest.param(4, 0, REDUCED, marks=pytest.mark.slow),
        # The model looks at its batch to decide what to do, which no graph can represent.
        pytest.param(2, 0, [{**one, "engine": "graph", "rare": False} for one in REDUCED[::3]], marks=pytest.mark.slow),
        pytest.param(2, 2, [*OTHERS, *BETWEEN_MORE], marks=pytest.mark.slow),
    ],
    ids=["2", "2 and servers", "4", "2 as graphs", "2 and servers, others"],
)
def test_workers_on_shards_equal_one_loop_on_the_whole_batch(
    workers: int, servers: int, cases: list[dict[str, object]]
) -> None:
    for rank, results in enumerate(in_job(compared, workers, cases, servers=servers, timeout=600)):
        for tried, (parameters, loss, unused_is_none) in zip(cases, results, strict=True):
            assert max(parameters, loss) <= 1e-12, (rank, tried)
            assert unused_is_none, (rank, tried)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("cases", [OTHERS[::5], pytest.param([*QUICK, *OTHERS], marks=pytest.mark.slow)])
def test_a_worker_alone_has_its_servers_in_memory(cases: list[dict[str, object]]) -> None:
    for tried in cases:
        expected, expected_losses = plain_loop(tried, rows=11)
        found, losses = with_workers(tried, 11, 0, 1)
        for name, value in expected.named_parameters():
            assert distance(found[name], value) <= 1e-12, (tried, name)
        assert losses == pytest.approx(expected_losses, rel=1e-12), tried


def pipe_of_workers(stages: int) -> float:
    """Train a pipe whose loss sums over the rows of a grid; return its parameters' distance from the plain loop's."""
    grid = ab.job().grid(data=2, pipeline=stages)
    row, sizes = ab.job().rank // stages, (7, 4)
    part = slice(sum(sizes[:row]), sum(sizes[: row + 1]))

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def balanced(output: Tensor, target: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        return F.mse_loss(output, target) + 3 * (total(output.softmax(1).sum(0)) / 11).square().sum()

    def of_all(output: Tensor, target: Tensor) -> Tensor:
        return balanced(output, target, lambda tensor: ab.all_reduce(tensor, group=grid.data_group))

    def of_one(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return balanced(model(batch[0]), batch[1], lambda tensor: tensor)

    plain = layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    group = {"process_group": grid.pipeline_group} if stages > 1 else {}
    pipe = ab.Pipe(layers(), [2, 1], chunks=1, **group)
    step = step_of(pipe, loss=of_all, lr=0.5)
    with ab.Executor(step, "AllReduce", process_group=grid.data_group, timeout=60) as executor:
        for number in range(4):
            torch.manual_seed(number)
            x, y = torch.randn(11, 3).double(), torch.randn(11, 2).double()
            plain_step(plain, of_one, optimizer, (x, y))
            executor.run(batch=(x[part], y[part]))
    expected = dict(plain.named_parameters())
    return max((value - expected[name]).abs().max().item() for name, value in pipe.named_parameters())


@pytest.mark.slow
def test_the_loss_of_a_pipe_across_ranks_may_sum_over_the_workers_too() -> None:
    assert max(in_job(pipe_of_workers, 4, 2)) <= 1e-13


ON_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    ("workers", "mode", "engine", "device", "default"),
    [
        pytest.param(1, "Hybrid", "tape", "cpu", "meta"),
        *(pytest.param(2, mode, "tape", "cpu", "meta", marks=pytest.mark.slow) for mode in MODES),
        *(
            pytest.param(workers, mode, engine, "cuda", default, marks=ON_CUDA)
            for workers, mode, (engine, default) in product(
                (1, 2), MODES, (("tape", "cuda"), ("tape", "cpu"), ("graph", None))
            )
        ),
    ],
)
def test_a_job_on_a_device_is_the_plain_loop(
    workers: int, mode: str, engine: str, device: str, default: str | None
) -> None:
    """Also where PyTorch's default device is another: nothing of the library's own belongs there.

    A graph refuses to be captured under one that is set.
    """
    cases = [case("adam_decay", mode, clip=0.5, engine=engine, device=device, rare=engine == "tape")]
    for ((*distances, _),) in in_job(compared, workers, cases, default, servers=int(mode != "AllReduce")):
        assert max(distances) < 1e-9


# Another number of workers' state, in an Executor that has run already.


def loaded(folder: str) -> list[float]:
    """Train behind the checkpoint, or make it, by a loss that sums over the workers."""
    rank, alone = ab.job().rank, ab.job().world_size == 1
    torch.manual_seed(0)
    model, sizes = nn.Linear(4, 1).double(), [12] if alone else [3, 9]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total = model(x).sum()
        total = total if alone else ab.all_reduce(total)
        return model(x).square().mean() + (total / 12).square()  # type: ignore[no-any-return]

    with ab.Executor(step_of(model, loss=loss, lr=0.05)) as executor:
        for number in (0, 1, 2, 3):
            if number == 2:
                if alone:
                    executor.save(folder)
                executor.load(folder)
            whole = torch.randn(12, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            executor.run(batch=whole.split(sizes)[rank])
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def of_two(folder: str) -> list[Any]:
    return [pipe_of_workers(1), loaded(folder)]


def test_the_loss_of_a_pipe_may_sum_over_workers_and_a_state_of_another_number_is_loaded(tmp_path: Path) -> None:
    expected = pytest.approx(loaded(str(tmp_path)), abs=1e-12)
    for distance_of_pipe, state in in_job(of_two, 2, str(tmp_path)):
        assert distance_of_pipe <= 1e-13
        assert state == expected
