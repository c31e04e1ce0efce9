"""Steps whose tables live on servers, captured as graphs: the tape's numbers, to the bit, and the tape's errors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.graph import StepProgram
from anabranch.graph.crossings import crossing_of
from anabranch.parameter_server import ParameterClient, RemoteEmbedding, RemoteTables
from anabranch.tables import Cache
from toys import plain_step

ROWS, WIDTH, STEPS = 20, 8, 4
NAMES = ["first.weight", "bag.weight"]


class Model(nn.Module):
    """Rows and bags, a table that is looked up twice, weights of samples that are learned, a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=-1)
        self.mean = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", include_last_offset=True)
        self.mean.weight = self.bag.weight
        self.scale = nn.Parameter(torch.randn(7))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        bags = self.bag(ids[0], torch.tensor([0, 3, 3]), per_sample_weights=self.scale)
        means = self.mean(ids[1], torch.tensor([0, 2, 4, 7]))
        rows = self.first(ids).sum((0, 1)) + self.first(ids[1] // 2).sum(0)
        return self.head(torch.tanh(bags + means + rows))  # type: ignore[no-any-return]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().mean()  # type: ignore[no-any-return]


def batches(count: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, ROWS, (2, 7), generator=generator) for _ in range(count)]


def train(start: Model, cache: Cache | None, *, graph: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The losses, and all parameters in the end, those on the servers first."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    with ParameterClient() as client, RemoteTables(client, cache=cache) as tables:
        tables.adopt(model, NAMES, optimizer)
        program = StepProgram(model, loss, [optimizer])
        losses = []
        for step, ids in enumerate(batches()):
            tables.begin(step)
            if graph:
                losses.append(program.run(ids)["loss"])
            else:
                losses.append(plain_step(model, loss, optimizer, ids))
            tables.push()
            schedule.step()
        if graph:
            crossings = [found for node in program.graph.fx.nodes if (found := crossing_of(node)) is not None]
            assert (
                sorted(crossing.label for crossing in crossings)
                == ["table bag.weight"] * 4 + ["table first.weight"] * 4
            )
        tables.wait_until_quiet()
        assert client.statistics()[0].tables["bag.weight"].pushes == STEPS
        tables.flush()
        return losses, [*(client.pull(name) for name in NAMES), *(p.detach() for p in parameters_here(model).values())]  # type: ignore[misc]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "cache", [None, pytest.param(Cache(capacity=6), marks=pytest.mark.slow), Cache(capacity=8, push_bound=2)], ids=str
)
def test_a_graph_with_remote_tables_is_the_tape_to_the_bit(cache: Cache | None) -> None:
    torch.manual_seed(0)
    start = Model()
    tape, graph = train(start, cache, graph=False), train(start, cache, graph=True)
    for theirs, mine in zip(tape, graph, strict=True):
        assert all(map(torch.equal, theirs, mine))


class Users(nn.Module):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.table = RemoteEmbedding("users", None, WIDTH, init=0.5, optimizer=optimizer)
        self.bags = RemoteEmbedding("bags", None, WIDTH, mode="mean", optimizer=optimizer)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids).sum(1) + self.bags(ids)))  # type: ignore[no-any-return]


def sgd(rows: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(rows, lr=0.1)


def test_an_executor_trains_a_remote_embedding_on_either_engine() -> None:
    def run(engine: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Users(sgd)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = ab.TrainStep(model, loss, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        losses = []
        with ab.Executor({"train": step}, engine=engine) as executor:  # type: ignore[arg-type]
            for rows in (3, 3, 5, 3):  # another batch size is another graph
                ids = torch.arange(rows * 4).reshape(rows, 4) % 5 + 2**53
                losses.append(executor.run("train", ids)["loss"])
            assert executor.engine("train") == engine
        model.eval()
        with torch.no_grad():
            rows_now = [table(torch.arange(6)[:, None] + 2**53) for table in (model.table, model.bags)]
        for table in (model.table, model.bags):
            table.close()
        return [*losses, *rows_now, *(p.detach() for p in parameters_here(model).values())]

    assert all(map(torch.equal, run("tape"), run("graph")))


def test_a_graph_without_a_backward_pushes_nothing() -> None:
    model = Users(sgd)
    ids = torch.arange(8).reshape(2, 4)
    graph = ab.capture(lambda ids: model(ids).sum(), ids)
    with ParameterClient() as client:
        tables = RemoteTables(client)
        tables.adopt_modules(model)
        tables.begin(0)
        first = graph(ids)
        tables.push()
        tables.begin(1)
        assert torch.equal(graph(ids), first)  # type: ignore[arg-type]
        assert client.statistics()[0].tables["users"].pushes == 0
