"""What a shard makes of messages that no client of ours would send, and of connections that are cut again and again."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from saved_rows import readers
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, DeadlineExceeded, NonFinite, NotFound, Overloaded, RemoteError, SchemaError
from anabranch.parameter_server import Consistency, ParameterClient, ParameterServer, Shard
from anabranch.parameter_server.messages import (
    DropMessage,
    InitMessage,
    JoinMessage,
    Merging,
    NormMessage,
    PullMessage,
    PullPart,
    PushMessage,
    PushPart,
    ReleaseMessage,
    RestoreMessage,
    Share,
    WorkerProgress,
    join,
)
from anabranch.parameter_server.server import shard as shard_module
from anabranch.parameter_server.server.push_log import PushLog, Record
from anabranch.parameter_server.server.requests import check
from anabranch.parameter_server.server.worker_order import WorkerOrder
from anabranch.record.spans import Span, heard
from anabranch.tables import Constant, Family, RowOptimizer, TableSpec
from anabranch.tables.optimizers.row_optimizers import CONSTANTS
from anabranch.testing import FakeClock, LossyTransport, MemoryTransport
from anabranch.transport import Client, Request, pack
from waiting import PATIENCE, wait_until

SGD = RowOptimizer(Family.SGD, lr=1.0)
SPEC = TableSpec("t", 10, 2, initial=Constant(1.0))
ONE, NO_IDS = torch.tensor([1]), torch.empty(0, dtype=torch.int64)
Change = tuple[str, msgspec.Struct, Sequence[Tensor], bytes]


class Recorded(Shard):
    """A shard of the parameter p, which is 0, and the workers of a job; it keeps what it would log."""

    def __init__(self, workers: int = 0, consistency: str = "bsp", *tables: TableSpec) -> None:
        self.records: list[Change] = []
        self.client = b""
        super().__init__(journal=lambda *change: self.records.append((*change, self.client)))
        self.init(InitMessage("p", SGD.to_dict()), [torch.zeros(2)])
        for spec in tables:
            make(self, spec)
        for rank in range(workers):
            self.join(JoinMessage(rank, workers, consistency))

    @property
    def job(self) -> WorkerOrder:
        assert self._job is not None
        return self._job

    @property
    def value(self) -> list[float]:
        return self.contents.dense["p"].value.tolist()

    def enter(self, message: JoinMessage, client: bytes) -> None:
        self.client = client
        self.join(message, client)

    def hear(self, rank: int, *turn: int, client: bytes = b"", gone: Sequence[int] = ()) -> None:
        """Take a worker's word: number of its membership, workers, steps done, the last that is applied."""
        self.release(ReleaseMessage(rank, WorkerProgress(*turn), [*gone]), client)

    def hold(self, rank: int, step: int, *turn: int) -> None:
        push(self, [PushPart("p")], NO_IDS, torch.ones(2), rank, step, Merging(hold=True), turn=WorkerProgress(*turn))

    def again(self) -> list[Shard]:
        """Return the shard itself, one that has done its log again, and one of its checkpoint."""
        from_log, from_snapshot = Shard(), Shard()
        for verb, message, tensors, client in self.records:
            from_log.replay(verb, msgspec.msgpack.encode(message), tensors, client)
        snapshot = self.snapshot_of_all()
        from_snapshot.load(snapshot.state, readers(snapshot))
        return [self, from_log, from_snapshot]


def make(shard: Shard, spec: TableSpec) -> None:
    shard.init(InitMessage(spec.name, SGD.to_dict(), spec.to_dict()))


def push(shard: Shard, parts: list[PushPart], ids: Tensor, numbers: Tensor, *fields: object, **more: object) -> None:
    shard.push(shard.request(PushMessage(parts, [], *fields, **more), [ids, numbers]))  # type: ignore[arg-type]


def push_row(shard: Shard, rank: int, step: int, number: float = 1.0, weight: float = 1.0) -> None:
    push(shard, [PushPart("t", 1)], ONE, torch.full((2,), number), rank, step, Merging(weight))


def rows(shard: Shard, ids: Tensor, *parts: PullPart) -> Tensor:
    return shard.pull(shard.request(PullMessage([*parts] or [PullPart("t", len(ids))]), [ids]))[1][0]


@pytest.mark.parametrize(
    ("name", "merges", "lag"),
    [("bsp", True, 0), ("ssp:0", False, 0), ("ssp:7", False, 7), ("asp", False, None), ("ASP", False, None)],
)
def test_consistencies_have_names(name: str, merges: bool, lag: int | None) -> None:
    assert Consistency.parse(name) == Consistency(name.lower(), merges, lag)


@pytest.mark.parametrize("name", ["", "ssp", "ssp:", "ssp:-1", "ssp:x", "ssp:1.5", "asp:1"])
def test_other_consistencies_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="consistency is 'bsp', 'asp' or 'ssp:K'"):
        Consistency.parse(name)


def test_a_shard_that_waits_for_a_worker_gives_up_in_time_to_name_it() -> None:
    clock = FakeClock()
    deadline = Deadline.after(10.0, clock)
    patience = shard_module._patience(deadline)
    clock.advance(8.0)
    assert patience.expired()
    assert deadline.remaining() == 2.0


def test_a_worker_of_another_job_is_refused() -> None:
    shard = Recorded(1, "bsp", SPEC)
    shard.join(JoinMessage(0, 2, "bsp"))
    push_row(shard, 0, 0)
    for message, words in [
        (JoinMessage(1, 3, "bsp", 5), "this job has 2 workers"),
        (JoinMessage(2, 2, "bsp"), "out of range for a world"),
    ]:
        with pytest.raises(SchemaError, match=words):
            shard.join(message)
    with pytest.raises(SchemaError, match="has not joined"):
        push_row(shard, 2, 0)


def test_a_held_push_that_comes_after_the_word_of_its_outcome_is_refused() -> None:
    shard = Recorded(1)
    shard.hear(0, 0, 1, 1)  # the worker has dropped the step
    with pytest.raises(SchemaError, match="pushes step 0, which it has the outcome of"):
        shard.hold(0, 0, 0, 1, 0)
    shard.hold(0, 1, 0, 1, 1)
    assert list(shard.job.held) == [1]


def test_a_message_of_an_older_membership_is_refused_though_that_had_as_many_workers() -> None:
    shard = Recorded(2)
    shard.hear(0, 1, 2, 0)
    for turn in ((0, 2, 0), (0, 2, 1, 0)):
        with pytest.raises(SchemaError, match="membership 0 of the workers; they are at 1"):
            shard.hear(1, *turn)
    assert shard.job.released == [0, 0]


def test_pushes_of_a_step_may_name_different_tables_or_none() -> None:
    shard = Recorded(2, "bsp", *(TableSpec(name, 9, 2, initial=Constant(0.0)) for name in "ab"))
    ids = torch.tensor([1, 2])
    pushes = [
        ([PushPart("a", 2), PushPart("p")], ids, torch.tensor([1.0, 1, 2, 2, 3, 3])),
        ([PushPart("b", 1), PushPart("a", 1)], ids, torch.tensor([4.0, 4, 5, 5])),
        ([], NO_IDS, torch.empty(0)),
    ]
    for step, both in enumerate([(0, 1), (0, 2), (2, 2)]):
        for rank, which in enumerate(both):
            parts, some, numbers = pushes[which]
            tensors = [some, numbers] if parts else [some]
            message = PushMessage(parts, [], rank, step, Merging(mean=False))
            shard.push(shard.request(message, tensors))
    numbers = rows(shard, torch.tensor([1, 1, 2]), PullPart("b", 1), PullPart("p"), PullPart("a", 2))
    assert numbers.view(-1, 2).tolist() == [[-4, -4], [-6, -6], [-2, -2], [-9, -9]]
    counts = shard.statistics().tables["a"]
    assert (counts.pushes, counts.rows_pushed) == (3, 5)


def test_the_norm_of_a_step_is_that_of_its_merged_gradients_and_its_sums_are_finite() -> None:
    shard = Recorded(2, "bsp", TableSpec("a", 9, 2, initial=Constant(0.0)))
    shard.init(InitMessage("half", SGD.to_dict()), [torch.zeros(2, dtype=torch.float16)])
    half, merging = torch.tensor([6e4, 1], dtype=torch.float16), Merging(mean=False, hold=True)
    for rank, ids in enumerate([[1, 2], [1, 1, 3]]):
        parts = [PushPart("half"), PushPart("a", len(ids)), PushPart("p")]
        tensors = [torch.tensor(ids), torch.full((2 * len(ids) + 2,), 1.0 + rank), half]
        shard.push(shard.request(PushMessage(parts, [], rank, 0, merging), tensors))
    deadline = Deadline(60.0)
    assert shard.squared_norm(NormMessage(0, 0), deadline) == 2 * (5**2 + 1 + 2**2 + 3**2) + 65504.0**2 + 2**2
    for rank in range(2):
        shard.hear(rank, 0, 2, 1, 0)
    assert [shard.contents.dense["half"].value.tolist(), shard.value] == [[-65504, -2], [-3, -3]]
    assert shard.contents.tables["a"].pull(torch.arange(4))[:, 0].tolist() == [0, -5, -1, -2]
    for rank in range(2):  # a step of nothing
        shard.push(shard.request(PushMessage([], [], rank, 1, merging), [NO_IDS]))
    assert shard.squared_norm(NormMessage(0, 1), deadline) == 0.0


@pytest.mark.parametrize("heard", ["before the pushes", "after them"])
def test_members_may_drop_a_step_that_was_released_under_an_older_number(heard: str) -> None:
    """By one who is gone; also if the shard was restarted with the pushes, and then heard what was never the result."""
    shard = Recorded(2)
    before = heard == "before the pushes"
    if before:
        shard.hear(1, 0, 2, 1, 0)
    for rank in range(2):
        shard.hold(rank, 0, int(before), 2, 0)
    if not before:
        shard.hear(1, 0, 2, 1, 0)
    for rank in range(2):
        shard.hear(rank, 1, 2, 1)
    assert (shard.job.applied, shard.value) == (1, [0.0, 0.0])


def test_members_may_do_a_step_again_that_all_had_dropped() -> None:
    """One push was refused, so that no norm was known; its worker died before the vote was over."""
    shard = Recorded(2)
    for rank in range(2):
        shard.hear(rank, 0, 2, 1)
    assert shard.job.applied == 1
    shard.hold(0, 0, 1, 1, 0)
    shard.hear(0, 1, 1, 1, 0)
    assert (shard.job.applied, shard.value) == (1, [-1.0, -1.0])
    shard.hear(0, 2, 1, 0)
    assert shard.job.applied == 1  # what was applied is not done again


def test_a_member_of_another_number_is_known_by_its_client_whatever_its_rank() -> None:
    shard = Recorded()
    for rank, client in enumerate([b"a", b"b", b"c"]):
        shard.join(JoinMessage(rank, 3, "bsp"), client)
    shard.hear(0, 1, 2, 0, client=b"c")  # in the place of a
    for other, turn in ((b"a", (0, 3, 0)), (b"x", (2, 2, 0))):
        with pytest.raises(SchemaError, match="another client has joined"):
            shard.hear(0, *turn, client=other)
    shard.hear(1, 1, 2, 0, client=b"b")
    assert (shard.job.number, shard.job.world) == (1, 2)
    assert [shard.joined_as(rank) for rank in range(2)] == [b"c", b"b"]
    shard.join(JoinMessage(0, 1, "bsp"), b"d")  # of another job
    with pytest.raises(SchemaError, match="another client has joined"):
        shard.hear(0, 2, 2, 0, client=b"b")
    assert shard.job.number == 0


@pytest.mark.parametrize("world", [1, 3])
def test_the_end_of_a_job_is_told_a_shard_that_has_not_heard_of_its_last_membership(world: int) -> None:
    """A step was applied on one of two servers only, or the next job could not take them over."""
    shard = Recorded(2)
    for rank in range(2):
        shard.hold(rank, 0, 0, 2, 0)
    shard.hear(-1, 1, world, 1, 0)
    assert (shard.job.applied, shard.job.held, shard.value) == (1, {}, [-1.0, -1.0])


def test_who_is_a_member_is_known_after_a_restart() -> None:
    """Clients of an Executor that another has followed were members again."""
    shard = Recorded()
    for rank, client in enumerate([b"x", b"a", b"b", b"c"]):
        shard.enter(JoinMessage(max(0, rank - 1), 3, "bsp"), client)
    shard.hear(1, 1, 2, 0, client=b"c")  # in the place of b
    shard.enter(JoinMessage(2, 3, "bsp", 0, 2, WorkerProgress(2, 3, 0)), b"d")
    for each in shard.again():
        with pytest.raises(SchemaError, match="another client has joined"):
            each.release(ReleaseMessage(0, WorkerProgress(3, 3, 9)), b"x")
        each.release(ReleaseMessage(1, WorkerProgress(2, 3, 0)), b"c")
        assert [each.joined_as(rank) for rank in range(3)] == [b"a", b"c", b"d"]


def test_a_member_that_wakes_after_the_job_takes_no_place_in_the_next_one() -> None:
    shard = Recorded()
    for rank, client in enumerate([b"a", b"b", b"c"]):
        shard.join(JoinMessage(rank, 3, "bsp"), client)
    shard.hear(1, 1, 2, 4, client=b"c")  # in the place of b, which is frozen
    with pytest.raises(SchemaError, match="membership 0"):
        shard.join(JoinMessage(1, 3, "bsp", 4), b"b")  # which was to load a checkpoint
    for rank, client in enumerate([b"d", b"e"]):
        shard.join(JoinMessage(rank, 2, "bsp"), client)
    for client, rank, turn in ((b"b", 1, (0, 2, 4)), (b"c", 2, (1, 3, 4))):
        with pytest.raises(SchemaError, match="another client has joined"):
            shard.hear(rank, *turn, client=client)
    assert (shard.job.number, shard.job.released) == (0, [0, 0])


def test_a_read_that_waits_admits_no_ids_once_there_is_a_newer_membership() -> None:
    shard = Recorded(2, "bsp", TableSpec("t", None, 2))
    pull = PullMessage([PullPart("t", 1)], True, rank=1, step=1, turn=WorkerProgress(0, 2, 1))
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(shard.pull, shard.request(pull, [torch.tensor([7])]), Deadline.after(60.0))
        wait_until(lambda: bool(shard._state._waiters))  # type: ignore[attr-defined]
        for rank in range(2):
            shard.hear(rank, 1, 2, 1)
        with pytest.raises(SchemaError, match="membership 0 of the workers; they are at 1"):
            late.result(timeout=60.0)
    assert shard.contents.tables["t"].used == 0


def test_a_restarted_shard_knows_who_has_closed_under_ssp() -> None:
    """Reads waited for it until their deadline, as its last word is said once."""
    shard = Recorded(2, "ssp:1")
    for rank in (1, 0, 0):  # its last word, and others' that see it gone
        shard.hear(rank, 0, 2, gone=[1])
    for each in shard.again():
        assert each._job is not None
        assert each._job.late(5) == [0]
    assert [verb for verb, *_ in shard.records].count("release") == 1


def test_no_read_under_ssp_waits_for_a_worker_that_is_gone() -> None:
    shard = Recorded()
    for rank, clock in enumerate([5, 0, 3]):
        shard.join(JoinMessage(rank, 3, "ssp:1", clock))
    assert shard.job.late(4) == [1, 2]
    shard.hear(0, 0, 3, gone=[1])
    assert (shard.job.late(4), shard.current_step()) == ([2], 3)
    shard.hear(0, 1, 2, 5)  # each member is at a step of its own
    assert shard.job.late(4) == []
    shard.hear(1, 1, 2, 3)
    assert shard.job.late(4) == [1]


@pytest.mark.parametrize("compression", [None, "int8"])
def test_a_held_push_loses_the_gradients_of_a_table_that_is_dropped(compression: str | None) -> None:
    """They once made every later message of the job ``NotFound``, also after a restart."""
    tables = [TableSpec(name, 9, 16, initial=Constant(0.0)) for name in "ab"]
    shard, again = Recorded(1, "bsp", *tables), Shard()
    parts = [PushPart("a", 2, 0, 1), PushPart("b", 2, 0, 1), PushPart("p")]
    turn, ids, squares = WorkerProgress(0, 1, 0), torch.tensor([1, 2, 1, 3]), torch.ones(2, dtype=torch.bfloat16)
    grads = [torch.full((2, 16), 1.0), torch.full((2, 16), 2.0), torch.ones(2)]
    shares = [Share(torch.float32, (2, 16), "rows")] * 2 + [Share(torch.float32, (2,))]
    message = PushMessage(parts, [], 0, 0, Merging(hold=True), compression, turn)  # type: ignore[arg-type]
    shard.push(shard.request(message, [ids, squares, *join(grads, shares, compression)]))  # type: ignore[arg-type]
    shard.drop(DropMessage("a"))
    again.load((snapshot := shard.snapshot_of_all()).state, readers(snapshot))
    for one in (shard, again):
        make(one, TableSpec("a", 9, 8, initial=Constant(0.0)))
        one.release(ReleaseMessage(0, WorkerProgress(0, 1, 1, 0)))
        numbers = rows(one, torch.tensor([1, 2, 1, 3]), PullPart("a", 2), PullPart("b", 2), PullPart("p"))
        assert not numbers[:16].any()
        torch.testing.assert_close(numbers[16:-2], torch.full((32,), -2.0), rtol=0.01, atol=0)
        assert numbers[-2:].tolist() == [-1.0, -1.0]


def fail(kind: type[Exception], *_: object, **__: object) -> None:
    raise kind


@pytest.mark.parametrize("fails", ["admission", "optimizer"])
def test_a_held_step_that_fails_is_not_applied_twice(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Recorded(1, "bsp", *(TableSpec(name, None, width) for name, width in (("a", 2), ("b", 3))))
    parts = [PushPart("p"), PushPart("a", 1), PushPart("b", 1)]
    push(shard, parts, torch.tensor([1, 1]), torch.ones(7), 0, 0, Merging(hold=True))
    table = shard.contents.tables["b"]
    place = (table.arena, "take") if fails == "admission" else (table, "_rule")
    monkeypatch.setattr(*place, functools.partial(fail, MemoryError))
    kinds = []
    for _ in range(3):
        with pytest.raises((MemoryError, AttributeError, Overloaded)) as raised:
            shard.hear(0, 0, 1, 1, 0)
        kinds.append(raised.type)
    begun = fails == "optimizer"
    assert kinds[1:] == ([Overloaded] if begun else kinds[:1]) * 2
    assert [verb for verb, *_ in shard.records].count("step") == begun
    assert shard.value == [-1.0 * begun] * 2


def test_a_restarted_worker_pushes_its_step_again() -> None:
    shard = Recorded(2, "bsp", SPEC)
    push_row(shard, 0, 0, 100.0)
    shard.join(JoinMessage(0, 2, "bsp", 0))  # started again, at the same step
    push_row(shard, 0, 0, 4.0)
    push_row(shard, 1, 0, 2.0)
    assert rows(shard, ONE).tolist() == [1 - 3.0, 1 - 3.0]


def mutate(value: object, chance: random.Random) -> object:
    """``value`` with some of its parts replaced by others that do not belong there."""
    wrong = [
        -1, 0, 1, 2**31, 2**62, -(2**62), 0.5, float("nan"), "", "t", "../t", None, [], {}, True, b"x", ["t", 1, 0]
    ]  # fmt: skip
    if chance.random() < 0.15:
        return chance.choice(wrong)
    if isinstance(value, list):
        return [mutate(item, chance) for item in value] + [mutate(value, chance)] * (chance.random() < 0.05)
    if isinstance(value, dict):
        return {key: mutate(item, chance) for key, item in value.items() if chance.random() > 0.05}
    return value


@pytest.mark.parametrize("count", [400, pytest.param(8000, marks=pytest.mark.slow)])
def test_mutated_messages_are_refused_change_nothing_and_leave_no_record(tmp_path: Path, count: int) -> None:
    """Whatever comes, the answer is an error of a known kind, or the shard did what a well-formed message asked.

    Records that could not be done were once in the log before that was found out: the shard never started again.
    """
    chance = random.Random(0)
    network = MemoryTransport()
    ids, ages = torch.tensor([1, 2]), torch.tensor([1], dtype=torch.int16)
    history = torch.empty(0, CONSTANTS, dtype=torch.float64)
    block, at = [ids, torch.zeros(2, 2), ids, torch.empty(0), torch.empty(0, 2, dtype=torch.int64)], 1
    bad_tensors = [
        torch.tensor([-1, 2]), torch.tensor([1, 10]), torch.tensor([1]), torch.ones(4), torch.full((4,), float("inf")),
        torch.ones(2, 2), torch.ones(4, dtype=torch.float64), torch.empty(0), torch.ones(4, dtype=torch.int64),
    ]  # fmt: skip
    messages: dict[str, tuple[msgspec.Struct, list[Tensor]]] = {
        "push": (PushMessage([PushPart("t", 2)], [SGD.to_dict()]), [ids, torch.zeros(4)]),
        "pull": (PullMessage([PullPart("t", 2, 1, 1, 3)]), [ids, ages]),
        "init": (InitMessage("t", SGD.to_dict(), SPEC.to_dict()), []),
        "join": (JoinMessage(0, 1, "bsp"), []),
        "restore": (RestoreMessage("t", 1), block),
        "release": (ReleaseMessage(0, WorkerProgress(0, 1, 1, 0)), []),
        "norm": (NormMessage(0, 0), []),
    }
    outcomes: dict[str, int] = {}
    serve = functools.partial(ParameterServer, transport=network, durability="log")
    with serve(checkpoint_dir=tmp_path / "state") as server, Client(transport=network) as client:
        for number in range(count):
            verb = chance.choice(list(messages)) if number > 1 else ("init", "push")[number]
            message, tensors = messages[verb]
            if verb == "restore":
                if chance.random() < 0.5:  # not a step before the table's
                    at, tensors = 1000 + number, [history]
                message = RestoreMessage("t", at)
            plain = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
            sent = list(tensors)
            if number == 1:
                sent[1] = torch.full((4,), float("inf"))
            if number > 1 and chance.random() < 0.7:
                plain = mutate(plain, chance)
            if number > 1 and sent and chance.random() < 0.4:
                sent[chance.randrange(len(sent))] = chance.choice(bad_tensors)
            once = verb not in ("pull", "norm", "release")
            request = Request(server.endpoint, verb, tensors=sent, payload=pack(plain), once=once)
            try:
                client.call(request, Deadline.after(0.05 if verb == "norm" else 60.0))
                kind = "done"
            except (NotFound, SchemaError, NonFinite, BoundaryError) as error:
                kind = f"{type(error).__name__} {error}" if isinstance(error, RemoteError) else type(error).__name__
            outcomes[kind] = outcomes.get(kind, 0) + 1
        with ParameterClient([server.endpoint], transport=network) as reader:
            values = reader.sparse_pull("t", torch.arange(10))
        shutil.copytree(tmp_path / "state", tmp_path / "as killed")
    refused: list[Span] = []
    with (
        heard(lambda span: refused.append(span) if span[0].endswith("record_refused") else None),
        serve(checkpoint_dir=tmp_path / "as killed") as server,
        ParameterClient([server.endpoint], transport=network) as reader,
    ):
        assert torch.equal(reader.sparse_pull("t", torch.arange(10)), values)
        assert server.statistics().replayed > count // 40
    assert not refused
    assert torch.isfinite(values).all()
    assert not [kind for kind in outcomes if kind.startswith("RemoteError")]
    assert outcomes["done"] > count // 30
    assert {"SchemaError", "ProtocolError", "NonFinite", "NotFound"} <= set(outcomes)


def test_the_header_of_a_push_is_checked_while_the_shard_is_busy() -> None:
    shard = Recorded(0, "bsp", SPEC)
    message, came = PushMessage([PushPart("t", 3)], []), [(torch.int64, (3,)), (torch.float32, (6,))]
    with ThreadPoolExecutor(1) as other, shard.locked():  # as a checkpoint of a table in a file holds it
        assert other.submit(check, shard.contents, message, came).result(PATIENCE).counts == [3]
        assert other.submit(shard.current_step).result(PATIENCE) == 0
    with pytest.raises(NotFound, match="'u' on this shard; there are: t"):
        check(shard.contents, PushMessage([PushPart("u", 3)], []), came)


@pytest.mark.parametrize("width", [2, 3])
def test_a_table_made_again_while_a_request_waits_is_the_one_that_it_meets(width: int) -> None:
    shard, ids = Recorded(0, "bsp", SPEC), torch.tensor([3])
    pull = shard.request(PullMessage([PullPart("t", 1)]), [ids])
    waits = shard.request(PushMessage([PushPart("t", 1)], []), [ids, torch.ones(2)])
    shard.drop(DropMessage("t"))
    for ask in (lambda: shard.pull(pull), lambda: shard.push(waits)):
        with pytest.raises(NotFound, match="no table or parameter 't'"):
            ask()
    make(shard, TableSpec("t", 10, width, initial=Constant(5.0)))
    if width == 2:
        shard.push(waits)
        assert shard.pull(pull)[1][0].tolist() == [4.0, 4.0]
    else:
        with pytest.raises(SchemaError, match=r"float32, \(3,\)"):
            shard.push(waits)


def logged(directory: Path, *changes: tuple[str, msgspec.Struct, Sequence[Tensor]]) -> Callable[[], ParameterServer]:
    """Write a shard's log; return what starts the shard."""
    with closing(PushLog(directory / "shard-0-of-1")) as log:
        assert not list(log.replay())
        for verb, message, tensors in changes:
            log.append(Record(verb, msgspec.msgpack.encode(message)), tensors)
    transport = MemoryTransport()
    return functools.partial(
        ParameterServer, listen="memory:s", transport=transport, durability="log", checkpoint_dir=directory
    )


MADE = ("init", InitMessage("t", SGD.to_dict(), SPEC.to_dict()), ())
PUSHED = ("push", PushMessage([PushPart("t", 1)], []), [ONE, torch.ones(2)])


def test_a_record_that_cannot_be_done_again_does_not_keep_a_shard_from_starting(tmp_path: Path) -> None:
    """It was not acknowledged, for it could not be done the first time either; nor was one that lacked memory."""
    beyond = PushMessage([PushPart("t", 1)], [dict(SGD.to_dict(), beta2=2.0)])
    wide = TableSpec("wide", None, 1 << 28)
    ids = torch.arange(1 << 18)  # rows of a GiB each, so no machine has the address space for all
    start = logged(
        tmp_path,
        MADE,
        ("init", InitMessage("wide", SGD.to_dict(), wide.to_dict()), ()),
        ("push", beyond, PUSHED[2]),
        ("pull", PullMessage([PullPart("wide", len(ids))], training=True), [ids]),
        PUSHED,
    )
    spans: list[Span] = []
    with heard(spans.append), start() as server:
        assert rows(server._shard, ONE).tolist() == [0.0, 0.0]
        assert server.statistics().tables["wide"].rows == 0
    refused = [facts for name, *_, facts, _ in spans if name == "parameter_server.record_refused"]
    assert [facts and facts["verb"] for facts in refused] == ["push", "pull"]


def test_a_shard_does_not_start_without_rows_that_were_restored(tmp_path: Path) -> None:
    spec = TableSpec("t", None, 2)
    shard = Recorded(0, "bsp", spec)
    push_row(shard, -1, -1)
    (block,) = [piece.rows for piece in shard.snapshot().rows]
    history = torch.empty(0, CONSTANTS, dtype=torch.float64)
    restored = [("restore", RestoreMessage("t", 1), some) for some in ([history], *[block.tensors()] * 2)]
    start = logged(tmp_path, ("init", InitMessage("t", SGD.to_dict(), spec.to_dict()), ()), *restored)
    with pytest.raises(ValueError, match="an id already has a row"):
        start()


def test_ids_are_admitted_as_in_a_replay_where_there_is_no_memory_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = Recorded(0, "bsp", TableSpec("t", None, 2))
    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "read", functools.partial(fail, MemoryError))
        with pytest.raises(MemoryError):
            shard.pull(shard.request(PullMessage([PullPart("t", 3)], training=True), [torch.tensor([7, 9, 7])]))
    assert [one.statistics().tables["t"].rows for one in shard.again()] == [2, 2, 2]


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_pushes_over_a_connection_cut_after_delivery_count_once_each(count: int) -> None:
    network = LossyTransport(drop=0.2, seed=1)
    with (
        ParameterServer(transport=network) as server,
        ParameterClient([server.endpoint], transport=network, retries=50) as client,
    ):
        client.init("n", (1,), init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
        for _ in range(count):
            client.push("n", torch.tensor([-1.0]))
        assert client.pull("n").item() == count


def test_pushes_beside_the_steps_are_weighted_by_their_worker_s_share_also_after_a_restart() -> None:
    shard = Recorded(2, "bsp", SPEC)
    for rank, weight in enumerate((1.0, 3.0)):
        push_row(shard, rank, 0, weight=weight)
    for one in shard.again():
        push_row(one, 1, -1, weight=3.0)
        assert rows(one, ONE).tolist() == [1.0 - 1.0 - 0.75] * 2
    with pytest.raises(SchemaError, match="has not joined"):
        push_row(shard, 2, -1)


def test_pushes_beside_the_steps_wait_until_their_worker_s_share_is_known() -> None:
    """It once counted whole, or by the share in an older step, if it came before the others' push of its last step."""
    shard = Recorded(2, "bsp", SPEC)
    push_row(shard, 0, 0)
    beside = PushMessage([PushPart("t", 1)], [], 0, -1, Merging(1.0))
    with pytest.raises(DeadlineExceeded, match="worker 1"):
        shard.push(shard.request(beside, [ONE, torch.ones(2)]), deadline=Deadline.after(0.01))
    push_row(shard, 1, 0, weight=3.0)
    shard.push(shard.request(beside, [ONE, torch.ones(2)]), deadline=Deadline.after(60.0))
    assert rows(shard, ONE).tolist() == [1.0 - 1.0 - 0.25] * 2
