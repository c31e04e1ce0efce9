"""Uses of a model beside its steps: each equals the plain program's, or is refused by an error that names the table.

Two programs live the same life: the plain loop, and an Executor. At one moment of it something is done to the model.
Both answer alike, or the Executor refuses, and what it refuses is then not done in the plain loop. At the end both
models have the same numbers, bit for bit. Where the Executor is one of two workers, it trains on its rows of each
batch, and the plain loop on all of them.
"""

from __future__ import annotations

import copy
import gc
import io
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import anabranch as ab
from toys import in_job, look_of

ROWS, WIDTH = 7, 3
BATCHES = [torch.tensor(ids) for ids in ([[1, 3], [3, 0], [5, 3]], [[6, 1], [2, 2], [1, 1]], [[3, 6], [5, 1], [0, 2]])]
FIRST = (2, 1, 3)  # rows of each batch that the first of two workers has: the second has none of the last
ALL = torch.arange(ROWS).reshape(ROWS, 1)
UNSEEN = torch.tensor([[4, 1], [0, 4]])  # 4 is in no batch
MODES: dict[str, dict[str, Any]] = {
    "None": {"comm_mode": None},
    "AllReduce": {"comm_mode": "AllReduce"},
    "PS": {"comm_mode": "PS"},
    "PS cached": {"comm_mode": "PS", "cache": ab.Cache("LRU", capacity=4)},
    "Hybrid": {"comm_mode": "Hybrid"},
    "Hybrid cached": {"comm_mode": "Hybrid", "cache": ab.Cache("LFU", capacity=4)},
}


class Net(nn.Module):
    """A table and a dense layer; ``kind`` says how the table is held."""

    def __init__(self, kind: str, plain: bool) -> None:
        super().__init__()
        self.kind = kind
        self.top = nn.Linear(WIDTH, 1)  # before the table, which draws numbers here or on the servers
        if kind == "remote" and not plain:
            self.table: nn.Module = ab.RemoteEmbedding("table", ROWS, WIDTH, init=0.5, dtype=torch.float64)
        elif kind == "bag":
            self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        else:
            self.table = nn.Embedding(ROWS, WIDTH)
        self.double()
        if kind == "remote" and plain:
            nn.init.constant_(self.table.weight, 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        return self.top(rows if rows.ndim == 2 else rows.sum(1))

    @property
    def weight(self) -> nn.Parameter:
        """The parameter that is used: of the table, or of the dense layer."""
        return self.top.weight if self.kind == "dense" else self.table.weight


@dataclass(frozen=True)
class Worker:
    """One of two workers, with other options of its Executors."""

    rank: int
    options: Mapping[str, Any]

    def part(self, index: int) -> Tensor:
        """Its rows of a batch."""
        return BATCHES[index][: FIRST[index]] if self.rank == 0 else BATCHES[index][FIRST[index] :]


@dataclass
class Life:
    """One program: its model, what its owner has kept, and its Executor while it has one."""

    kind: str
    plain: bool
    worker: Worker | None = None
    model: Net = field(init=False)
    executor: ab.Executor | None = None
    inside: Callable[[Life], object] | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = Net(self.kind, self.plain)
        self.kept = self.model.top.weight if self.kind in ("dense", "remote") else self.model.table.weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.saved = {name: value + 1 for name, value in self.model.state_dict().items()}

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        value = model(ids).square().mean()
        if self.inside is not None:
            inside, self.inside = self.inside, None
            inside(self)
        return value

    def open(self, mode: str, **options: Any) -> None:
        if not self.plain:
            options |= self.worker.options if self.worker is not None else {}
            train = ab.TrainStep(self.model, self.loss, self.optimizer)
            self.executor = ab.Executor({"train": train, "evaluate": look_of(self.model)}, **MODES[mode], **options)

    def leave(self, error: BaseException | None = None) -> None:
        if self.executor is not None:
            self.executor.__exit__(None if error is None else type(error), error, None)
            self.executor = None

    def train(self, index: int) -> None:
        if self.executor is not None:
            self.executor.run("train", BATCHES[index] if self.worker is None else self.worker.part(index))
            return
        self.optimizer.zero_grad()
        self.model.train()
        self.loss(self.model, BATCHES[index]).backward()
        self.optimizer.step()

    def evaluate(self) -> Tensor:
        if self.executor is not None:
            return self.executor.run("evaluate", UNSEEN)["out"]
        training = self.model.training
        with torch.no_grad():
            value = self.model.eval()(UNSEEN)
        self.model.train(training)
        return value


# Uses. Each returns what it saw, or None where the numbers at the end tell.


def by_hand(life: Life) -> Tensor:
    training = life.model.training
    value = life.model.eval()(UNSEEN).detach()
    life.model.train(training)
    return value


def without_gradients(life: Life) -> Tensor:
    with torch.no_grad():
        return life.model(UNSEEN)


def of_file(life: Life) -> Tensor:
    file = io.BytesIO()
    torch.save(life.model.state_dict(), file)
    return sum_of(torch.load(io.BytesIO(file.getvalue())).values())


def sum_of(tensors: Any) -> Tensor:
    return torch.stack([tensor.detach().sum() for tensor in tensors]).sum()


READS: dict[str, Callable[[Life], Any]] = {
    "lookup": lambda life: life.model.table(UNSEEN).detach(),
    "model.eval()": by_hand,
    "no_grad": without_gradients,
    "EvalStep": lambda life: life.evaluate(),
    "weight": lambda life: life.model.weight.sum().detach(),
    ".T": lambda life: (life.model.weight.T * 2).sum().detach(),
    ".data": lambda life: life.model.weight.data.sum(),
    "parameters()": lambda life: sum_of(life.model.parameters()),
    "state_dict()": lambda life: sum_of(life.model.state_dict().values()),
    "torch.save": of_file,
    "kept": lambda life: life.kept.norm().detach(),
    "deepcopy": lambda life: copy.deepcopy(life.model)(UNSEEN).detach(),
    "shape": lambda life: torch.tensor(life.model.weight.shape),
    "requires_grad": lambda life: torch.tensor(life.model.weight.requires_grad),
}


def reads_of(kind: str) -> dict[str, Callable[[Life], Any]]:
    """What can be read; a ``RemoteEmbedding`` is in no state dict, so that its sum is another."""
    if kind != "remote":
        return READS
    return {what: use for what, use in READS.items() if what not in ("state_dict()", "torch.save")}


def assign(life: Life) -> None:
    new = nn.Parameter(torch.full(tuple(life.model.weight.shape), 2.0).double())
    (life.model.top if life.kind == "dense" else life.model.table).weight = new


@torch.no_grad()
def write(life: Life) -> None:
    life.model.weight.add_(1)


def set_data(life: Life) -> None:
    life.model.weight.data = torch.full(tuple(life.model.weight.shape), 2.0).double()


def step_by_hand(life: Life) -> None:
    life.optimizer.zero_grad()
    life.model(BATCHES[0]).square().mean().backward()
    life.optimizer.step()
    life.optimizer.zero_grad()


CHANGES: dict[str, Callable[[Life], Any]] = {
    "requires_grad_": lambda life: life.model.weight.requires_grad_(False) is None,
    "freeze the module": lambda life: life.model.table.requires_grad_(False) and None,
    "assignment": assign,
    "write": write,
    ".data =": set_data,
    "load_state_dict": lambda life: life.model.load_state_dict(life.saved),
    "step by hand": step_by_hand,
    "eval mode": lambda life: life.model.eval() and None,
}
MOMENTS = ("before", "opened", "in the loss", "between runs", "after close", "after an exception", "second Executor")
KINDS = ("embedding", "bag", "remote", "dense")


INSIDE = ("opened", "in the loss", "between runs", "second Executor")  # an Executor is open


class Doing:
    """Uses of both models at one moment: ours comes first, and what it refuses is not done to the plain one.

    Args:
        uses: by name.
        ranks: of two workers, those that do it.
        shared: they change what the workers have in common, so that in the plain loop all do it or nobody.
    """

    def __init__(
        self, uses: Mapping[str, Callable[[Life], Any]], ranks: Collection[int] = (0, 1), *, shared: bool = False
    ) -> None:
        self.uses = uses
        self.answers: dict[str, Any] = {}
        self.refused: dict[str, Exception] = {}
        self._ranks, self._shared = ranks, shared

    def __call__(self, life: Life, moment: str) -> None:
        if life.worker is not None and not self._does(life.worker.rank, moment if life.plain else ""):
            return
        for what, use in self.uses.items():
            if not life.plain:
                self._do_ours(life, what, use)
            elif what not in self.refused:
                answer, ours = use(life), self.answers.get(what)
                if answer is not None and ours is not None:
                    same(answer, ours, f"{moment}: {what}", life.worker)

    def _does(self, rank: int, plain_at: str) -> bool:
        if self._shared and plain_at == "before":  # the first worker's numbers become everyone's
            return 0 in self._ranks
        return len(self._ranks) == 2 if self._shared and plain_at in INSIDE else rank in self._ranks

    def _do_ours(self, life: Life, what: str, use: Callable[[Life], Any]) -> None:
        try:
            self.answers[what] = use(life)
        except (ValueError, AttributeError, RuntimeError) as error:
            if not refuses(error, life.kind, what):
                raise
            self.refused[what] = error


def refuses(error: BaseException, kind: str, what: str) -> bool:
    """True if the error refuses a use as it should: it names the table or the parameter, and is no crash."""
    if isinstance(error, AttributeError):  # a RemoteEmbedding has no weight
        return kind == "remote" and "weight" in str(error)
    if isinstance(error, RuntimeError):
        return what == "EvalStep" and "inside a run of 'train'" in str(error)
    named = any(name in str(error) for name in ("table", "top.weight", "holds a parameter of shape"))
    return named and isinstance(error, ValueError | ab.WorkersDiffer)


def same(plain: Any, ours: Any, what: str, worker: Worker | None = None) -> None:
    """Raise ``AssertionError`` unless both are equal; of two workers, up to the order of sums."""
    tolerance = 0.0 if worker is None else 1e-12
    torch.testing.assert_close(
        torch.as_tensor(ours).double(),
        torch.as_tensor(plain).double(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )


@contextmanager
def executor_of(life: Life, mode: str, error: BaseException | None = None, **options: Any) -> Iterator[None]:
    """An Executor of ours while the block runs; left as by ``error``."""
    life.open(mode, **options)
    try:
        yield
    finally:
        life.leave(error or sys.exception())


def live(kind: str, mode: str, doing: Mapping[str, Doing], worker: Worker | None = None) -> None:
    """One life of both programs, with what is done at each moment; at the end they have the same numbers."""
    ours, plain = both = Life(kind, False, worker), Life(kind, True, worker)

    def train(index: int) -> None:
        for life in both:
            life.train(index)

    def now(moment: str) -> None:
        for life in both:
            if moment in doing:
                doing[moment](life, moment)

    def inside(life: Life) -> None:
        doing["in the loss"](life, "in the loss")

    now("before")
    with executor_of(ours, mode, KeyboardInterrupt() if "after an exception" in doing else None):
        now("opened")
        train(0)
        if "in the loss" in doing:
            ours.inside = plain.inside = inside
        train(1)
        now("between runs")
        train(2)
    now("after an exception")
    now("after close")
    if "second Executor" in doing:
        # A job's servers keep a RemoteEmbedding's rows, which are to be trained on.
        with executor_of(ours, mode, served="adopt" if worker is not None and kind == "remote" else "refuse"):
            train(0)
            now("second Executor")
            train(1)
    if worker is None or kind != "remote":  # whose rows both workers would step
        train(2)  # by hand
    if kind == "remote":
        same(plain.model.table(ALL).detach(), ours.model.table(ALL).detach(), "the table at the end", worker)
    for name, value in ours.model.state_dict().items():
        same(plain.model.state_dict()[name], value, f"{name} at the end", worker)


IN_THE_LOSS = ("requires_grad_", "freeze the module", "assignment", "eval mode")  # PyTorch refuses others


def possible(change: str, kind: str, moment: str) -> bool:
    """True for a change that the plain loop allows, to what the model has."""
    if change == "load_state_dict" and kind == "remote":  # of the plain model's state, where the table is a parameter
        return False
    return moment != "in the loss" or change in IN_THE_LOSS


def close_tables() -> None:
    """Close what ``RemoteEmbedding``s and their copies have opened for themselves."""
    for module in [one for one in gc.get_objects() if type(one) is ab.RemoteEmbedding]:
        module.close()


# The tests.


@pytest.fixture(autouse=True)
def _tables_closed() -> Iterator[None]:
    yield
    close_tables()


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize(("kind", "mode", "moment"), list(product(KINDS, MODES, MOMENTS)))
def test_what_is_read_is_the_plain_programs_or_refused(kind: str, mode: str, moment: str) -> None:
    live(kind, mode, {moment: (doing := Doing(reads_of(kind)))})
    plain = kind != "remote" and moment in ("before", "after close", "after an exception")
    assert not plain or not doing.refused, "the model is plain PyTorch then"


# Each change of each kind at each moment in two of the six modes.
CASES = [
    case
    for number, case in enumerate(product(CHANGES, KINDS, MODES, MOMENTS))
    if possible(case[0], case[1], case[3]) and (number + number // 42) % 3 == 0
]


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize(("change", "kind", "mode", "moment"), CASES)
def test_a_change_counts_as_in_the_plain_program_or_is_refused(change: str, kind: str, mode: str, moment: str) -> None:
    doing = Doing({change: CHANGES[change]})
    try:
        live(kind, mode, {moment: doing})
    except ValueError as error:  # refused by the next run, the evaluation, or at the end
        if (change not in doing.answers and moment != "before") or not refuses(error, kind, change):
            raise


# Two workers, which go through the cases together. After each they tell each other how it ended, and drop what it has
# left on the servers.

TIMEOUT = 20.0  # seconds: also where one worker waits for the other in vain

Case = tuple[str, str, Callable[[Worker], object]]
"""Its name, the change that may be refused, and what each worker does."""


def reads(kind: str, mode: str) -> Iterator[Case]:
    """All reads at all moments, by both workers or by one of them while the other goes on."""
    for number, ranks in enumerate(((0, 1), (0,), (1,))):
        end = MOMENTS[4 + (number + KINDS.index(kind)) % 2]
        moments = [one for one in MOMENTS if not one.startswith("after") or one == end]

        def case(worker: Worker, ranks: tuple[int, ...] = ranks, moments: list[str] = moments) -> None:
            live(kind, mode, {one: Doing(reads_of(kind), ranks) for one in moments}, worker)

        yield f"reads by ranks {ranks}, {end}", "", case


def changes(kind: str, mode: str) -> Iterator[Case]:
    """Each change at each moment, by both workers or by the second alone."""
    for what, ranks, moment in product(CHANGES, ((0, 1), (1,)), MOMENTS):
        # Of an assignment by one of them, its optimizer says so before it has met the other.
        shared = kind == "remote" and what == "step by hand"  # each steps the table of both
        if possible(what, kind, moment) and not shared and (what, ranks, moment) != ("assignment", (1,), "before"):

            def case(worker: Worker, what: str = what, ranks: tuple[int, ...] = ranks, moment: str = moment) -> None:
                live(kind, mode, {moment: Doing({what: CHANGES[what]}, ranks, shared=True)}, worker)

            yield f"{what} by ranks {ranks}, {moment}", what, case


def work(mode: str) -> dict[str, str]:
    """Go through the reads and every eighth change, others with each mode and kind; return what went wrong."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, wrong = ab.job().rank, {}
    for place, kind in enumerate(KINDS):
        for number, (name, what, case) in enumerate([*reads(kind, mode), *changes(kind, mode)]):
            if number >= 3 and (number + 3 * place + list(MODES).index(mode)) % 8:
                continue
            print(kind, name, flush=True)
            outcome, fine = "", True
            group = dist.new_group([0, 1])
            options = {"check_workers": 1, "timeout": TIMEOUT, "heartbeat": 2.0, "process_group": group}
            try:
                case(Worker(rank, options))
            except BaseException as error:  # noqa: BLE001 - told to the other worker
                outcome = f"{type(error).__name__}: {error}"
                left = isinstance(error, ab.PeerLost) and "peer rank" in outcome  # the other has seen it
                fine = what != "" and (left or refuses(error, kind, what))
                print("".join(traceback.format_exception(error)), flush=True)
            close_tables()
            both: list[Any] = [None, None]
            dist.all_gather_object(both, (outcome, fine))
            if not all(fine for _, fine in both) or bool(both[0][0]) != bool(both[1][0]):
                wrong[f"{kind}: {name}"] = outcome
            if rank == 0:
                with ab.ParameterClient() as client:
                    for table in client.steps():
                        client.drop(table)
            dist.barrier()
            dist.destroy_process_group(group)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "None"])
def test_each_use_by_two_workers_or_one_of_them_is_the_plain_programs_or_refused(mode: str) -> None:
    """Every mode has one job, which names the cases that went wrong."""
    assert in_job(work, 2, mode, servers=2, timeout=600.0) == [{}, {}]
