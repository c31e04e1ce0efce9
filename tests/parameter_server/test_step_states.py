"""Steps of a job on several shards: random walks of workers that vote, die, are replaced and send late messages.

A model of what workers do, and real shards. A step's gradients add 1 + the membership's number to each of twelve
samples, of which every member pushes its share: so a row of the parameter that is not one number is a step that was
applied by halves, or with pushes of two memberships.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.parameter_server import Shard
from anabranch.parameter_server.messages import (
    InitMessage,
    JoinMessage,
    Merging,
    PushMessage,
    PushPart,
    ReleaseMessage,
    WorkerProgress,
)
from anabranch.tables import Family, RowOptimizer

STEPS, SAMPLES = 6, 12
SGD = RowOptimizer(Family.SGD, lr=1.0)
NO_IDS = torch.empty(0, dtype=torch.int64)
DROPPED = -1


class Recorded:
    """A shard and the log from which it can begin again."""

    def __init__(self) -> None:
        self.log: list[tuple[str, msgspec.Struct, Sequence[Tensor]]] = []
        self.shard = Shard(journal=lambda *record: self.log.append(record))

    def restart(self) -> None:
        log, self.log = self.log, []
        self.shard = Shard(journal=lambda *record: self.log.append(record))
        for record in log:
            self.shard.replay(record[0], msgspec.msgpack.encode(record[1]), record[2])
        self.log = log

    def steps(self) -> list[int]:
        """Return the membership that has done each step which is applied."""
        assert self.shard._job is not None
        value = self.shard.contents.dense["p"].value
        rows = [value[step].unique().tolist() for step in range(STEPS)]
        assert all(len(row) == 1 for row in rows), rows
        applied = self.shard._job.applied
        assert not value[applied:].any()
        return [int(row[0]) - 1 for row in rows[:applied]]


@dataclass
class Worker:
    phase: str = "work"  # work, voted, meet, closed
    number: int = 0
    steps: list[int] = field(default_factory=list)  # the membership that has done each, or that it was dropped
    sent: dict[int, str] = field(default_factory=dict)  # to each shard: "released", "pushed"
    refuses: bool = False
    alive: bool = True
    stateless: bool = False  # a newcomer that has not met the others yet


class Walk:
    def __init__(self, seed: int, workers: int, shards: int) -> None:
        self.chance = random.Random(seed)
        self.shards = [Recorded() for _ in range(shards)]
        self.members = [tuple(range(workers))]
        self.workers = [Worker() for _ in range(workers)]
        self.votes: dict[tuple[int, int], dict[int, bool]] = {}
        self.late: list[tuple[int, int, WorkerProgress, bool]] = []
        for one in self.shards:
            one.shard.init(InitMessage("p", SGD.to_dict()), [torch.zeros(STEPS, SAMPLES, dtype=torch.float64)])
            for rank in range(workers):
                one.shard.join(JoinMessage(rank, workers, "bsp"))

    def turn(self, worker: Worker) -> WorkerProgress:
        last = max((step for step, doing in enumerate(worker.steps) if doing != DROPPED), default=-1)
        return WorkerProgress(worker.number, len(self.members[worker.number]), len(worker.steps), last)

    def deliver(self, at: int, who: int, turn: WorkerProgress, push: bool) -> None:
        rank, shard = self.members[turn.number].index(who), self.shards[at].shard
        if not push:
            shard.release(ReleaseMessage(rank, turn))
            return
        gradient = torch.zeros(STEPS, SAMPLES, dtype=torch.float64)
        gradient[turn.done, rank :: turn.world] = -1.0 - turn.number
        assert shard._job is not None
        if turn.number == shard._job.number and shard._job.clocks[rank] > turn.done >= shard._job.applied:
            return  # a retry of a numbered request, which is recognised as such
        message = PushMessage([PushPart("p")], [], rank, turn.done, merging=Merging(mean=False, hold=True), turn=turn)
        shard.push(shard.request(message, [NO_IDS, gradient.flatten()]))

    def outdated(self, at: int, turn: WorkerProgress) -> bool:
        job = self.shards[at].shard._job
        return job is not None and turn.number < job.number

    def there(self, done: int) -> bool:
        jobs = [one.shard._job for one in self.shards]
        return all(job is not None and job.applied >= done for job in jobs)

    def moves(self) -> list[tuple[object, ...]]:
        """What can happen next without a fault."""
        possible: list[tuple[object, ...]] = [("late", index) for index in range(len(self.late))]
        newest = self.members[-1]
        present = [one for one in newest if self.workers[one].alive and self.workers[one].phase != "closed"]
        lost = [self.workers[one] for one in newest if one not in present]
        meets = any(self.workers[one].phase == "meet" for one in present)
        informed = any(not self.workers[one].stateless for one in present)  # newcomers left alone end
        if informed and lost and (meets or not all(one.alive for one in lost)):
            possible.append(("regroup", tuple(present)))
            if not any(one.phase == "closed" for one in self.workers):
                possible.append(("regroup", (*present, len(self.workers))))
        for who, me in enumerate(self.workers):
            if not me.alive or me.phase == "closed":
                continue
            done = len(me.steps)
            if me.number < len(self.members) - 1 and who in newest:
                possible.append(("interrupt", who))
            if me.phase == "voted" and len(self.votes[me.number, done]) == len(self.members[me.number]):
                possible.append(("result", who))
            elif me.phase == "meet":
                reports = [one for i in self.members[me.number] if (one := self.workers[i]).number >= me.number]
                if len(reports) == len(self.members[me.number]):
                    possible.append(("met", who))
            elif me.phase == "work":
                for at in range(len(self.shards)):
                    job = self.shards[at].shard._job
                    assert job is not None
                    again = job.number < me.number or job.released[self.members[me.number].index(who)] < done
                    if at not in me.sent or (me.sent[at] == "released" and again):
                        possible.append(("tell", who, at))
                unpushed = [at for at, sent in me.sent.items() if sent != "pushed"]
                # A shard that restarts among the pushes may not know of the last step, if that was dropped.
                told = len(me.sent) == len(self.shards) and (self.there(done) or "pushed" in me.sent.values())
                if told and done < STEPS:
                    possible += [("push", who, at) for at in unpushed]
                    if not unpushed or me.refuses:
                        possible.append(("vote", who))
                elif told:
                    possible.append(("close", who))
        return possible

    def move(self, kind: object, *what: object) -> None:
        if kind == "late":
            index = what[0]
            assert isinstance(index, int)
            with suppress(SchemaError):
                self.deliver(*self.late.pop(index))
            return
        if kind == "regroup":
            members = what[0]
            assert isinstance(members, tuple)
            if members[-1] == len(self.workers):  # in the place of one that is lost
                self.workers.append(Worker("meet", len(self.members), stateless=True))
            self.members.append(members)
            return
        who = what[0]
        assert isinstance(who, int)
        me, done = self.workers[who], len(self.workers[who].steps)
        if kind in ("tell", "push"):
            at = what[1]
            assert isinstance(at, int)
            self.deliver(at, who, self.turn(me), kind == "push")
            me.sent[at] = "pushed" if kind == "push" else "released"
        elif kind == "interrupt":
            me.phase, me.number, me.sent, me.refuses = "meet", len(self.members) - 1, {}, False
        elif kind == "vote":
            agrees = not me.refuses and "pushed" in me.sent.values()
            self.votes.setdefault((me.number, done), {})[who] = agrees
            me.phase, me.sent, me.refuses = "voted", {}, False
        elif kind == "result":
            agreed = all(self.votes[me.number, done].values())
            me.steps.append(me.number if agreed else DROPPED)
            me.phase = "work"
        elif kind == "met":
            reports = [self.workers[one] for one in self.members[me.number]]
            longest = max((one.steps for one in reports), key=len)
            me.phase, me.steps, me.stateless = "work", list(longest), False
        else:
            me.phase, me.sent = "closed", {}

    def fault(self) -> None:
        kind = self.chance.choice(["die", "late", "restart", "refuse"])
        working = [i for i, one in enumerate(self.workers) if one.alive and one.phase != "closed"]
        who = self.chance.choice(working)
        me = self.workers[who]
        if kind == "die" and any(i != who and not self.workers[i].stateless for i in working):
            me.alive = False
        if kind in ("die", "late") and me.phase == "work":  # the last message of the dead may come, too
            push = len(me.steps) < STEPS and self.there(len(me.steps)) and self.chance.random() < 0.9
            if not push or len(me.sent) == len(self.shards):
                self.late.append((self.chance.randrange(len(self.shards)), who, self.turn(me), push))
        elif kind == "restart":
            at = self.chance.randrange(len(self.shards))
            self.shards[at].restart()
            for one in self.workers:  # whoever waits there asks again
                if one.sent.get(at) == "released":
                    del one.sent[at]
        elif kind == "refuse":
            me.refuses = me.phase == "work"

    def check(self) -> int:
        states = [one.steps for one in self.workers if one.alive and not one.stateless]
        states += [one.steps() for one in self.shards]
        longest = max(states, key=len)
        assert all(longest[: len(one)] == one for one in states), states
        return min(map(len, states))

    def run(self, faults: float) -> int:
        taken = 0
        while moves := self.moves():
            if any(one.alive and one.phase != "closed" for one in self.workers) and self.chance.random() < faults:
                self.fault()
            else:
                # Late messages mostly wait until their shard has heard of a newer membership.
                old = [("late", index) for index, one in enumerate(self.late) if self.outdated(one[0], one[2])]
                others = [move for move in moves if move[0] != "late"] if self.chance.random() < 0.9 else []
                self.move(*self.chance.choice(old if old and self.chance.random() < 0.5 else others or moves))
            self.check()
            taken += 1
        assert self.check() == STEPS
        return taken


@pytest.mark.parametrize("runs", [20, pytest.param(250, marks=pytest.mark.slow)])
def test_every_step_is_on_all_shards_or_nowhere_whatever_happens(runs: int) -> None:
    taken = 0
    for seed in range(20, 20 + runs):  # 22 meets a push of an older membership in time to spoil a step
        workers, shards = random.Random(seed).choice([(1, 2), (2, 1), (2, 2), (3, 2)])
        taken += Walk(seed, workers, shards).run(faults=0.12 * (seed % 3))
    assert taken > 40 * runs
