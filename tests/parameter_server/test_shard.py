"""What a shard makes of messages that no client of ours would send, and of connections that are cut again and again."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from saved_rows import readers

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
    WorkerProgress,
)
from anabranch.parameter_server.server import shard as shard_module
from anabranch.parameter_server.server.push_log import PushLog, Record
from anabranch.parameter_server.server.requests import check
from anabranch.record.spans import Span, heard
from anabranch.tables import Constant, Family, RowOptimizer, TableSpec
from anabranch.tables.optimizers.row_optimizers import CONSTANTS
from anabranch.tensors.packing import Share, join
from anabranch.testing import FakeClock, LossyTransport, MemoryTransport
from anabranch.transport import Client, Request, pack
from waiting import PATIENCE, wait_until

SGD = RowOptimizer(Family.SGD, lr=1.0)
SPEC = TableSpec("t", 10, 2, initial=Constant(1.0))


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
    shard = Shard()
    shard.join(JoinMessage(0, 2, "bsp"))
    shard.init(InitMessage("t", SGD.to_dict(), SPEC.to_dict()))
    ids, grad = torch.tensor([1]), torch.ones(2)
    push = PushMessage([PushPart("t", 1)], [], 0, 0)
    shard.push(shard.request(push, [ids, grad]))
    with pytest.raises(SchemaError, match="this job has 2 workers"):
        shard.join(JoinMessage(1, 3, "bsp", 5))
    with pytest.raises(SchemaError, match="out of range for a world"):
        shard.join(JoinMessage(2, 2, "bsp"))
    with pytest.raises(SchemaError, match="has not joined"):
        shard.push(shard.request(msgspec.structs.replace(push, rank=2), [ids, grad]))


def test_a_held_push_that_comes_after_the_word_of_its_outcome_is_refused() -> None:
    shard = Shard()
    shard.join(JoinMessage(0, 1, "bsp"))
    shard.init(InitMessage("t", SGD.to_dict(), SPEC.to_dict()))
    push = PushMessage([PushPart("t", 1)], [], 0, 0, merging=Merging(hold=True), turn=WorkerProgress(0, 1, 0))
    shard.release(ReleaseMessage(0, WorkerProgress(0, 1, 1)))  # the worker has dropped the step
    with pytest.raises(SchemaError, match="pushes step 0, which it has the outcome of"):
        shard.push(shard.request(push, [torch.tensor([1]), torch.ones(2)]))
    following = msgspec.structs.replace(push, step=1, turn=WorkerProgress(0, 1, 1))
    shard.push(shard.request(following, [torch.tensor([1]), torch.ones(2)]))
    assert shard._job is not None
    assert list(shard._job.held) == [1]


def test_a_message_of_an_older_membership_is_refused_though_that_had_as_many_workers() -> None:
    shard = Shard()
    for rank in range(2):
        shard.join(JoinMessage(rank, 2, "bsp"))
    shard.release(ReleaseMessage(0, WorkerProgress(1, 2, 0)))
    for turn in (WorkerProgress(0, 2, 0), WorkerProgress(0, 2, 1, 0)):
        with pytest.raises(SchemaError, match="membership 0 of the workers; they are at 1"):
            shard.release(ReleaseMessage(1, turn))
    assert shard._job is not None
    assert shard._job.released == [0, 0]


def of_two_workers() -> Shard:
    """Return a shard of the dense parameter p, which is 0, and of two workers that have joined."""
    shard = Shard()
    shard.init(InitMessage("p", SGD.to_dict()), [torch.zeros(2)])
    for rank in range(2):
        shard.join(JoinMessage(rank, 2, "bsp"))
    return shard


def test_pushes_of_a_step_may_name_different_tables_or_none() -> None:
    shard = of_two_workers()
    for name in "ab":
        shard.init(InitMessage(name, SGD.to_dict(), TableSpec(name, 9, 2, initial=Constant(0.0)).to_dict()))
    ids = torch.tensor([1, 2])
    pushes = [
        ([PushPart("a", 2), PushPart("p")], [ids, torch.tensor([1.0, 1, 2, 2, 3, 3])]),
        ([PushPart("b", 1), PushPart("a", 1)], [ids, torch.tensor([4.0, 4, 5, 5])]),
        ([], [ids[:0]]),
    ]
    for step, both in enumerate([(0, 1), (0, 2), (2, 2)]):
        for rank, which in enumerate(both):
            parts, tensors = pushes[which]
            shard.push(shard.request(PushMessage(parts, [], rank, step, Merging(mean=False)), tensors))
    pull = PullMessage([PullPart("b", 1), PullPart("p"), PullPart("a", 2)])
    _, (numbers,) = shard.pull(shard.request(pull, [torch.tensor([1, 1, 2])]))
    assert numbers.view(-1, 2).tolist() == [[-4, -4], [-6, -6], [-2, -2], [-9, -9]]
    assert shard.statistics().tables["a"].pushes == 3
    assert shard.statistics().tables["a"].rows_pushed == 5


def test_the_norm_of_a_step_is_that_of_its_merged_gradients_and_its_sums_are_finite() -> None:
    shard = of_two_workers()
    shard.init(InitMessage("half", SGD.to_dict()), [torch.zeros(2, dtype=torch.float16)])
    shard.init(InitMessage("a", SGD.to_dict(), TableSpec("a", 9, 2, initial=Constant(0.0)).to_dict()))
    half, merging = torch.tensor([6e4, 1], dtype=torch.float16), Merging(mean=False, hold=True)
    for rank, ids in enumerate([[1, 2], [1, 1, 3]]):
        parts = [PushPart("half"), PushPart("a", len(ids)), PushPart("p")]
        tensors = [torch.tensor(ids), torch.full((2 * len(ids) + 2,), 1.0 + rank), half]
        shard.push(shard.request(PushMessage(parts, [], rank, 0, merging), tensors))
    deadline = Deadline(60.0)
    assert shard.squared_norm(NormMessage(0, 0), deadline) == 2 * (5**2 + 1 + 2**2 + 3**2) + 65504.0**2 + 2**2
    for rank in range(2):
        shard.release(ReleaseMessage(rank, WorkerProgress(0, 2, 1, 0)))
    dense = shard.contents.dense
    assert [dense["half"].value.tolist(), dense["p"].value.tolist()] == [[-65504, -2], [-3, -3]]
    assert shard.contents.tables["a"].pull(torch.arange(4))[:, 0].tolist() == [0, -5, -1, -2]
    for rank in range(2):  # a step of nothing
        shard.push(shard.request(PushMessage([], [], rank, 1, merging), [torch.empty(0, dtype=torch.int64)]))
    assert shard.squared_norm(NormMessage(0, 1), deadline) == 0.0


def test_members_may_drop_a_step_that_one_who_is_gone_had_released() -> None:
    shard = of_two_workers()
    shard.release(ReleaseMessage(1, WorkerProgress(0, 2, 1, 0)))  # step 0 of the older membership is to be applied
    for rank in range(2):
        push = PushMessage([PushPart("p")], [], rank, 0, merging=Merging(hold=True), turn=WorkerProgress(1, 2, 0))
        shard.push(shard.request(push, [torch.empty(0, dtype=torch.int64), torch.ones(2)]))
    for rank in range(2):
        shard.release(ReleaseMessage(rank, WorkerProgress(1, 2, 1)))
    assert shard._job is not None
    assert shard._job.applied == 1
    assert not shard.contents.dense["p"].value.any()


def test_members_may_drop_a_step_that_a_restarted_shard_has_heard_under_an_older_number() -> None:
    shard = of_two_workers()
    for rank in range(2):
        push = PushMessage([PushPart("p")], [], rank, 0, merging=Merging(hold=True), turn=WorkerProgress(0, 2, 0))
        shard.push(shard.request(push, [torch.empty(0, dtype=torch.int64), torch.ones(2)]))
    shard.release(ReleaseMessage(1, WorkerProgress(0, 2, 1, 0)))  # which was never the result
    for rank in range(2):
        shard.release(ReleaseMessage(rank, WorkerProgress(1, 2, 1)))
    assert shard._job is not None
    assert shard._job.applied == 1
    assert not shard.contents.dense["p"].value.any()


def test_members_may_do_a_step_again_that_all_had_dropped() -> None:
    """One push was refused, so that no norm was known; its worker died before the vote was over."""
    shard = of_two_workers()
    for rank in range(2):
        shard.release(ReleaseMessage(rank, WorkerProgress(0, 2, 1)))
    assert shard._job is not None
    assert shard._job.applied == 1
    push = PushMessage([PushPart("p")], [], 0, 0, merging=Merging(hold=True), turn=WorkerProgress(1, 1, 0))
    shard.push(shard.request(push, [torch.empty(0, dtype=torch.int64), torch.ones(2)]))
    shard.release(ReleaseMessage(0, WorkerProgress(1, 1, 1, 0)))
    assert shard._job.applied == 1
    assert shard.contents.dense["p"].value.all()
    shard.release(ReleaseMessage(0, WorkerProgress(2, 1, 0)))
    assert shard._job.applied == 1  # what was applied is not done again


def test_a_member_of_another_number_is_known_by_its_client_whatever_its_rank() -> None:
    shard = Shard()
    for rank, client in enumerate([b"a", b"b", b"c"]):
        shard.join(JoinMessage(rank, 3, "bsp"), client)
    shard.release(ReleaseMessage(0, WorkerProgress(1, 2, 0)), b"c")  # in the place of a
    for other, turn in ((b"a", WorkerProgress(0, 3, 0)), (b"x", WorkerProgress(2, 2, 0))):
        with pytest.raises(SchemaError, match="another client has joined"):
            shard.release(ReleaseMessage(0, turn), other)
    shard.release(ReleaseMessage(1, WorkerProgress(1, 2, 0)), b"b")
    assert shard._job is not None
    assert (shard._job.number, shard._job.world) == (1, 2)
    assert [shard.joined_as(rank) for rank in range(2)] == [b"c", b"b"]
    shard.join(JoinMessage(0, 1, "bsp"), b"d")  # of another job
    with pytest.raises(SchemaError, match="another client has joined"):
        shard.release(ReleaseMessage(0, WorkerProgress(2, 2, 0)), b"b")
    assert shard._job.number == 0


@pytest.mark.parametrize("world", [1, 3])
def test_the_end_of_a_job_is_told_a_shard_that_has_not_heard_of_its_last_membership(world: int) -> None:
    """A step was applied on one of two servers only, or the next job could not take them over."""
    shard = of_two_workers()
    for rank in range(2):
        push = PushMessage([PushPart("p")], [], rank, 0, merging=Merging(hold=True), turn=WorkerProgress(0, 2, 0))
        shard.push(shard.request(push, [torch.empty(0, dtype=torch.int64), torch.ones(2)]))
    shard.release(ReleaseMessage(-1, WorkerProgress(1, world, 1, 0)))
    assert shard._job is not None
    assert (shard._job.applied, shard._job.held) == (1, {})
    assert shard.contents.dense["p"].value.all()


def test_who_is_a_member_is_known_after_a_restart() -> None:
    """Clients of an Executor that another has followed were members again."""
    records: list[tuple[str, bytes, bytes]] = []
    client = b""
    shard = Shard(journal=lambda verb, message, _: records.append((verb, msgspec.msgpack.encode(message), client)))
    for rank, client in enumerate([b"x", b"a", b"b", b"c"]):
        shard.join(JoinMessage(max(0, rank - 1), 3, "bsp"), client)
    shard.release(ReleaseMessage(1, WorkerProgress(1, 2, 0)), b"c")  # in the place of b
    client = b"d"
    shard.join(JoinMessage(2, 3, "bsp", 0, 2, WorkerProgress(2, 3, 0)), client)
    from_log, from_snapshot = Shard(), Shard()
    for verb, message, who in records:
        from_log.replay(verb, message, (), who)
    snapshot = shard.snapshot_of_all()
    from_snapshot.load(snapshot.state, readers(snapshot))
    for each in (shard, from_log, from_snapshot):
        with pytest.raises(SchemaError, match="another client has joined"):
            each.release(ReleaseMessage(0, WorkerProgress(3, 3, 9)), b"x")
        each.release(ReleaseMessage(1, WorkerProgress(2, 3, 0)), b"c")
        assert [each.joined_as(rank) for rank in range(3)] == [b"a", b"c", b"d"]


def test_a_member_that_wakes_after_the_job_takes_no_place_in_the_next_one() -> None:
    shard = Shard()
    for rank, client in enumerate([b"a", b"b", b"c"]):
        shard.join(JoinMessage(rank, 3, "bsp"), client)
    shard.release(ReleaseMessage(1, WorkerProgress(1, 2, 4)), b"c")  # in the place of b, which is frozen
    with pytest.raises(SchemaError, match="membership 0"):
        shard.join(JoinMessage(1, 3, "bsp", 4), b"b")  # which was to load a checkpoint
    for rank, client in enumerate([b"d", b"e"]):
        shard.join(JoinMessage(rank, 2, "bsp"), client)
    for client, rank, turn in ((b"b", 1, WorkerProgress(0, 2, 4)), (b"c", 2, WorkerProgress(1, 3, 4))):
        with pytest.raises(SchemaError, match="another client has joined"):
            shard.release(ReleaseMessage(rank, turn), client)
    assert shard._job is not None
    assert (shard._job.number, shard._job.released) == (0, [0, 0])


def test_a_read_that_waits_admits_no_ids_once_there_is_a_newer_membership() -> None:
    shard = Shard()
    shard.init(InitMessage("t", SGD.to_dict(), TableSpec("t", None, 2).to_dict()))
    for rank in range(2):
        shard.join(JoinMessage(rank, 2, "bsp"))
    pull = PullMessage([PullPart("t", 1)], True, rank=1, step=1, turn=WorkerProgress(0, 2, 1))
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(shard.pull, shard.request(pull, [torch.tensor([7])]), Deadline.after(60.0))
        wait_until(lambda: bool(shard._state._waiters))  # type: ignore[attr-defined]
        for rank in range(2):
            shard.release(ReleaseMessage(rank, WorkerProgress(1, 2, 1)))
        with pytest.raises(SchemaError, match="membership 0 of the workers; they are at 1"):
            late.result(timeout=60.0)
    assert shard.contents.tables["t"].used == 0


def test_a_restarted_shard_knows_who_has_closed_under_ssp() -> None:
    """Reads waited for it until their deadline, as its last word is said once."""
    records: list[tuple[str, bytes]] = []
    shard = Shard(journal=lambda verb, message, _: records.append((verb, msgspec.msgpack.encode(message))))
    for rank in range(2):
        shard.join(JoinMessage(rank, 2, "ssp:1"))
    for rank in (1, 0, 0):  # its last word, and others' that see it gone
        shard.release(ReleaseMessage(rank, WorkerProgress(0, 2), [1]))
    from_log, from_snapshot = Shard(), Shard()
    for verb, message in records:
        from_log.replay(verb, message, ())
    snapshot = shard.snapshot_of_all()
    from_snapshot.load(snapshot.state, readers(snapshot))
    for each in (shard, from_log, from_snapshot):
        assert each._job is not None
        assert each._job.late(5) == [0]
    assert [verb for verb, _ in records].count("release") == 1


def test_no_read_under_ssp_waits_for_a_worker_that_is_gone() -> None:
    shard = Shard()
    for rank, clock in enumerate([5, 0, 3]):
        shard.join(JoinMessage(rank, 3, "ssp:1", clock))
    assert shard._job is not None
    assert shard._job.late(4) == [1, 2]
    shard.release(ReleaseMessage(0, WorkerProgress(0, 3), [1]))
    assert (shard._job.late(4), shard.current_step()) == ([2], 3)
    shard.release(ReleaseMessage(0, WorkerProgress(1, 2, 5)))  # each member is at a step of its own
    assert shard._job.late(4) == []
    shard.release(ReleaseMessage(1, WorkerProgress(1, 2, 3)))
    assert shard._job.late(4) == [1]


@pytest.mark.parametrize("compression", [None, "int8"])
def test_a_held_push_loses_the_gradients_of_a_table_that_is_dropped(compression: str | None) -> None:
    """They once made every later message of the job ``NotFound``, also after a restart."""
    shard, again = Shard(), Shard()
    shard.init(InitMessage("w", SGD.to_dict()), [torch.zeros(1)])
    for name in "ab":
        shard.init(InitMessage(name, SGD.to_dict(), TableSpec(name, 9, 16, initial=Constant(0.0)).to_dict()))
    shard.join(JoinMessage(0, 1, "bsp"))
    parts = [PushPart("a", 2, 0, 1), PushPart("b", 2, 0, 1), PushPart("w")]
    turn, ids, squares = WorkerProgress(0, 1, 0), torch.tensor([1, 2, 1, 3]), torch.ones(2, dtype=torch.bfloat16)
    grads = [torch.full((2, 16), 1.0), torch.full((2, 16), 2.0), torch.ones(1)]
    shares = [Share(torch.float32, (2, 16), "rows")] * 2 + [Share(torch.float32, (1,))]
    push = PushMessage(parts, [], 0, 0, Merging(hold=True), compression, turn)
    shard.push(shard.request(push, [ids, squares, *join(grads, shares, compression)]))
    shard.drop(DropMessage("a"))
    again.load((snapshot := shard.snapshot_of_all()).state, readers(snapshot))
    for one in (shard, again):
        one.init(InitMessage("a", SGD.to_dict(), TableSpec("a", 9, 8, initial=Constant(0.0)).to_dict()))
        one.release(ReleaseMessage(0, WorkerProgress(0, 1, 1, 0)))
        pull = PullMessage([PullPart("a", 2), PullPart("b", 2), PullPart("w")])
        _, (numbers,) = one.pull(one.request(pull, [torch.tensor([1, 2, 1, 3])]))
        assert not numbers[:16].any()
        torch.testing.assert_close(numbers[16:-1], torch.full((32,), -2.0), rtol=0.01, atol=0)
        assert numbers[-1] == -1.0


@pytest.mark.parametrize("fails", ["admission", "optimizer"])
def test_a_held_step_that_fails_is_not_applied_twice(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    shard = Shard(journal=lambda verb, message, tensors: log.append(verb))
    shard.join(JoinMessage(0, 1, "bsp"))
    shard.init(InitMessage("w", SGD.to_dict()), [torch.zeros(1)])
    for name, width in (("a", 2), ("b", 3)):
        shard.init(InitMessage(name, SGD.to_dict(), TableSpec(name, None, width).to_dict()))
    push = PushMessage([PushPart("w"), PushPart("a", 1), PushPart("b", 1)], [], 0, 0, merging=Merging(hold=True))
    shard.push(shard.request(push, [torch.tensor([1, 1]), torch.ones(6)]))

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    table = shard.contents.tables["b"]
    monkeypatch.setattr(*((table.arena, "take") if fails == "admission" else (table, "_rule")), no_memory)
    told = []
    for _ in range(3):
        with pytest.raises((MemoryError, AttributeError, Overloaded)) as raised:
            shard.release(ReleaseMessage(0, WorkerProgress(0, 1, 1, 0)))
        told.append(raised.type)
    begun = fails == "optimizer"
    assert told[1:] == ([Overloaded] if begun else told[:1]) * 2
    assert log.count("step") == begun
    assert shard.contents.dense["w"].value.tolist() == [-1.0 if begun else 0.0]


def test_a_restarted_worker_pushes_its_step_again() -> None:
    shard = Shard()
    shard.init(InitMessage("t", SGD.to_dict(), SPEC.to_dict()))
    for rank in (0, 1):
        shard.join(JoinMessage(rank, 2, "bsp"))
    ids = torch.tensor([1])
    shard.push(shard.request(PushMessage([PushPart("t", 1)], [], 0, 0), [ids, torch.full((2,), 100.0)]))
    shard.join(JoinMessage(0, 2, "bsp", 0))  # started again, at the same step
    shard.push(shard.request(PushMessage([PushPart("t", 1)], [], 0, 0), [ids, torch.full((2,), 4.0)]))
    shard.push(shard.request(PushMessage([PushPart("t", 1)], [], 1, 0), [ids, torch.full((2,), 2.0)]))
    _, (rows,) = shard.pull(shard.request(PullMessage([PullPart("t", 1)]), [ids]))
    assert rows.tolist() == [1 - 3.0, 1 - 3.0]


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
    rows, at = [ids, torch.zeros(2, 2), ids, torch.empty(0), torch.empty(0, 2, dtype=torch.int64)], 1
    bad_tensors = [
        torch.tensor([-1, 2]), torch.tensor([1, 10]), torch.tensor([1]), torch.ones(4), torch.full((4,), float("inf")),
        torch.ones(2, 2), torch.ones(4, dtype=torch.float64), torch.empty(0), torch.ones(4, dtype=torch.int64),
    ]  # fmt: skip
    messages = {
        "push": (PushMessage([PushPart("t", 2)], [SGD.to_dict()]), [ids, torch.zeros(4)]),
        "pull": (PullMessage([PullPart("t", 2, 1, 1, 3)]), [ids, ages]),
        "init": (InitMessage("t", SGD.to_dict(), SPEC.to_dict()), []),
        "join": (JoinMessage(0, 1, "bsp"), []),
        "restore": (RestoreMessage("t", 1), rows),
        "release": (ReleaseMessage(0, WorkerProgress(0, 1, 1, 0)), []),
        "norm": (NormMessage(0, 0), []),
    }
    outcomes: dict[str, int] = {}
    with (
        ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path / "state") as server,
        Client(transport=network) as client,
    ):
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
            request = Request(
                server.endpoint, verb, tensors=sent, payload=pack(plain), once=verb not in ("pull", "norm", "release")
            )
            try:
                client.call(request, Deadline.after(0.05 if verb == "norm" else 60.0))
                kind = "done"
            except (NotFound, SchemaError, NonFinite, BoundaryError) as error:
                kind = f"{type(error).__name__} {error}" if isinstance(error, RemoteError) else type(error).__name__
            outcomes[kind] = outcomes.get(kind, 0) + 1
        with ParameterClient([server.endpoint], transport=network) as reader:
            found = reader.sparse_pull("t", torch.arange(10))
        shutil.copytree(tmp_path / "state", tmp_path / "as killed")
    refused: list[Span] = []
    with (
        heard(lambda span: refused.append(span) if span[0].endswith("record_refused") else None),
        ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path / "as killed") as server,
        ParameterClient([server.endpoint], transport=network) as reader,
    ):
        assert torch.equal(reader.sparse_pull("t", torch.arange(10)), found)
        assert server.statistics().replayed > count // 40
    assert not refused
    assert torch.isfinite(found).all()
    assert not [kind for kind in outcomes if kind.startswith("RemoteError")]
    assert outcomes["done"] > count // 30
    assert {"SchemaError", "ProtocolError", "NonFinite", "NotFound"} <= set(outcomes)


def test_the_header_of_a_push_is_checked_while_the_shard_is_busy() -> None:
    shard = Shard()
    shard.init(InitMessage("t", SGD.to_dict(), SPEC.to_dict()))
    push, came = PushMessage([PushPart("t", 3)], []), [(torch.int64, (3,)), (torch.float32, (6,))]
    with ThreadPoolExecutor(1) as other, shard.locked():  # as a checkpoint of a table in a file holds it
        assert other.submit(check, shard.contents, push, came).result(PATIENCE).counts == [3]
        assert other.submit(shard.current_step).result(PATIENCE) == 0
    with pytest.raises(NotFound, match="'u' on this shard; there are: t"):
        check(shard.contents, PushMessage([PushPart("u", 3)], []), came)


@pytest.mark.parametrize("width", [2, 3])
def test_a_table_made_again_while_a_request_waits_is_the_one_that_it_meets(width: int) -> None:
    shard = Shard()
    shard.init(InitMessage("t", SGD.to_dict(), SPEC.to_dict()))
    ids = torch.tensor([3])
    pull = shard.request(PullMessage([PullPart("t", 1)]), [ids])
    push = shard.request(PushMessage([PushPart("t", 1)], []), [ids, torch.ones(2)])
    shard.drop(DropMessage("t"))
    for ask in (lambda: shard.pull(pull), lambda: shard.push(push)):
        with pytest.raises(NotFound, match="no table or parameter 't'"):
            ask()
    shard.init(InitMessage("t", SGD.to_dict(), TableSpec("t", 10, width, initial=Constant(5.0)).to_dict()))
    if width == 2:
        shard.push(push)
        assert shard.pull(pull)[1][0].tolist() == [4.0, 4.0]
    else:
        with pytest.raises(SchemaError, match=r"float32, \(3,\)"):
            shard.push(push)


def test_a_record_that_cannot_be_done_again_does_not_keep_a_shard_from_starting(tmp_path: Path) -> None:
    """It was not acknowledged, for it could not be done the first time either."""
    directory = tmp_path / "shard-0-of-1"
    ids = torch.tensor([1])
    with PushLog(directory) as log:
        assert not list(log.replay())
        log.append(Record("init", msgspec.msgpack.encode(InitMessage("t", SGD.to_dict(), SPEC.to_dict()))))
        beyond = PushMessage([PushPart("t", 1)], [dict(SGD.to_dict(), beta2=2.0)])
        for message in (beyond, PushMessage([PushPart("t", 1)], [])):
            log.append(Record("push", msgspec.msgpack.encode(message)), [ids, torch.ones(2)])
    network = MemoryTransport()
    told: list[Span] = []
    with (
        heard(told.append),
        ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path) as server,
        ParameterClient([server.endpoint], transport=network) as client,
    ):
        assert client.sparse_pull("t", ids).tolist() == [[0.0, 0.0]]
    refused = [facts for name, *_, facts, _ in told if name == "parameter_server.record_refused"]
    assert [facts and facts["verb"] for facts in refused] == ["push"]


def test_a_shard_does_not_start_without_rows_that_were_restored(tmp_path: Path) -> None:
    spec = TableSpec("t", None, 2)
    shard = Shard()
    shard.init(InitMessage("t", SGD.to_dict(), spec.to_dict()))
    shard.push(shard.request(PushMessage([PushPart("t", 1)], []), [torch.tensor([1]), torch.ones(2)]))
    (block,) = [piece.rows for piece in shard.snapshot().rows]
    with PushLog(tmp_path / "shard-0-of-1") as log:
        assert not list(log.replay())
        log.append(Record("init", msgspec.msgpack.encode(InitMessage("t", SGD.to_dict(), spec.to_dict()))))
        history = torch.empty(0, CONSTANTS, dtype=torch.float64)
        for tensors in ([history], block.tensors(), block.tensors()):
            log.append(Record("restore", msgspec.msgpack.encode(RestoreMessage("t", 1))), tensors)
    with pytest.raises(ValueError, match="an id already has a row"):
        ParameterServer(transport=MemoryTransport(), durability="log", checkpoint_dir=tmp_path)


def test_ids_are_admitted_as_in_a_replay_where_there_is_no_memory_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal: list[tuple[str, msgspec.Struct, Sequence[torch.Tensor]]] = []
    first, again = Shard(journal=lambda *change: journal.append(change)), Shard()
    first.init(InitMessage("t", SGD.to_dict(), TableSpec("t", None, 2).to_dict()))
    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "read", functools.partial(_fail, MemoryError))
        with pytest.raises(MemoryError):
            first.pull(first.request(PullMessage([PullPart("t", 3)], training=True), [torch.tensor([7, 9, 7])]))
    for verb, message, tensors in journal:
        again.replay(verb, msgspec.msgpack.encode(message), tensors)
    assert first.statistics().tables["t"].rows == again.statistics().tables["t"].rows == 2


def _fail(kind: type[Exception], *arguments: object) -> None:
    raise kind


def test_a_pull_that_does_not_fit_in_memory_does_not_keep_a_shard_from_starting(tmp_path: Path) -> None:
    wide = TableSpec("wide", None, 1 << 28)
    ids = torch.arange(1 << 20)  # rows of a GiB each, so no machine has the address space for all
    with PushLog(tmp_path / "shard-0-of-1") as log:
        assert not list(log.replay())
        for spec in (wide, SPEC):
            log.append(Record("init", msgspec.msgpack.encode(InitMessage(spec.name, SGD.to_dict(), spec.to_dict()))))
        pull = PullMessage([PullPart("wide", len(ids))], training=True)
        log.append(Record("pull", msgspec.msgpack.encode(pull)), [ids])
        push = PushMessage([PushPart("t", 1)], [])
        log.append(Record("push", msgspec.msgpack.encode(push)), [ids[:1], torch.ones(2)])
    network = MemoryTransport()
    with (
        ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path) as server,
        ParameterClient([server.endpoint], transport=network) as client,
    ):
        assert client.sparse_pull("t", ids[:1]).tolist() == [[0.0, 0.0]]
        assert client.statistics()[0].tables["wide"].rows == 0


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
    shard = Shard()
    for rank in range(2):
        shard.join(JoinMessage(rank, 2, "bsp"))
    shard.init(InitMessage("t", SGD.to_dict(), SPEC.to_dict()))
    ids, grad = torch.tensor([1]), torch.ones(2)
    for rank, weight in enumerate((1.0, 3.0)):
        shard.push(shard.request(PushMessage([PushPart("t", 1)], [], rank, 0, Merging(weight)), [ids, grad]))
    again = Shard()
    snapshot = shard.snapshot_of_all()
    again.load(snapshot.state, readers(snapshot))
    for one in (shard, again):
        one.push(one.request(PushMessage([PushPart("t", 1)], [], 1, -1, Merging(3.0)), [ids, grad]))
        _, (rows,) = one.pull(one.request(PullMessage([PullPart("t", 1)]), [ids]))
        assert rows.tolist() == [1.0 - 1.0 - 0.75] * 2
    with pytest.raises(SchemaError, match="has not joined"):
        shard.push(shard.request(PushMessage([PushPart("t", 1)], [], 2, -1), [ids, grad]))


def test_pushes_beside_the_steps_wait_until_their_worker_s_share_is_known() -> None:
    """It once counted whole, or by the share in an older step, if it came before the others' push of its last step."""
    shard = Shard()
    shard.init(InitMessage("t", SGD.to_dict(), SPEC.to_dict()))
    ids, grad = torch.tensor([1]), torch.ones(2)
    for rank in range(2):
        shard.join(JoinMessage(rank, 2, "bsp"))
    shard.push(shard.request(PushMessage([PushPart("t", 1)], [], 0, 0, Merging(1.0)), [ids, grad]))
    beside = PushMessage([PushPart("t", 1)], [], 0, -1, Merging(1.0))
    with pytest.raises(DeadlineExceeded, match="worker 1"):
        shard.push(shard.request(beside, [ids, grad]), deadline=Deadline.after(0.01))
    shard.push(shard.request(PushMessage([PushPart("t", 1)], [], 1, 0, Merging(3.0)), [ids, grad]))
    shard.push(shard.request(beside, [ids, grad]), deadline=Deadline.after(60.0))
    _, (rows,) = shard.pull(shard.request(PullMessage([PullPart("t", 1)]), [ids]))
    assert rows.tolist() == [1.0 - 1.0 - 0.25] * 2
