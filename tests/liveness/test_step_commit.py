"""The commit of a training step, gone through state by state, in a model of workers and shards.

Workers vote for a step, or against it; shards keep what is pushed and apply it, or drop it, once every member has
released it. Members that lose one meet again under the next number. Every message of a worker carries its membership's
number, the last step that it has (``done``), which releases all steps up to that one, and what became of that: the
release's contents. Faults: workers crash anywhere, messages are late (those of the dead, too), a shard loses its memory
and replays its log, a newcomer joins, a worker refuses a step: it lets shards know before it votes, as others may wait
for its push. A vote's result reaches any subset of its members. Result and dense update are one move.

Each rule can be switched off, and is missed then. The tests with real processes are in ``tests/faults``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

STEPS, SAMPLES = 2, tuple(range(12))


class Rules(NamedTuple):
    every_release: bool = True  # a shard waits for all members' releases; False: the first one applies
    replaces: bool = True  # a shard that hears of a higher number drops what it has of steps after `done`
    says_members: bool = True  # messages say who the members of their number are
    refuses_old: bool = True  # a shard refuses messages of lower numbers
    says_last_word: bool = True  # a worker that needs nothing more releases its last step, too
    close_waits: bool = True  # a worker leaves only when its last step is applied on every shard
    logs_applied: bool = True  # "step t is applied" is in the log before anybody can see it
    logs_pushes: bool = True  # a push is in the log before it is acknowledged
    ignores_late_result: bool = True  # a result of an older number is not looked at after the report
    waits_for_pull: bool = True  # False: rows come from a cache, a push may overtake the table
    waits_for_all: bool = True  # a meeting is decided by all reports; False: by those that have come so far
    takes_back: bool = True  # a shard that hears of a higher number takes back what was dropped after `done`
    hands_contents: bool = True  # those behind take the release's contents with the state; False: they say "apply"


class Faults(NamedTuple):
    crashes: int = 0
    losses: int = 0
    joins: int = 0
    restarts: int = 0
    noes: int = 0


class Worker(NamedTuple):
    phase: str = "work"  # work, refuses, voted, meet, closed; out: not there yet
    number: int = 0
    # Of each step that its dense state has the number of the doing, or -1 if it was voted down; None: no state.
    steps: tuple[int, ...] | None = ()
    sent: tuple[int, ...] = ()  # to each shard: 0 nothing, 1 released and asked for rows, 2 pushed and acknowledged
    alive: bool = True

    @property
    def done(self) -> int:
        return -1 if self.steps is None else len(self.steps)


class Message(NamedTuple):
    worker: int
    number: int
    done: int
    contents: int  # of step `done`
    push: bool


class Shard(NamedTuple):
    number: int = 0
    table: tuple[int, ...] = ()  # as a worker's steps
    pushes: frozenset[tuple[int, int, int]] = frozenset()  # step, number, worker
    contents: frozenset[tuple[int, int]] = frozenset()  # of released steps
    released: tuple[int, ...] = ()  # the last step that each worker has released under `number`


class World(NamedTuple):
    members: tuple[tuple[int, ...], ...]  # of each number
    workers: tuple[Worker, ...]
    shards: tuple[Shard, ...]
    logs: tuple[Shard, ...]  # what a restart of each shard would give
    votes: frozenset[tuple[int, int, int, bool]]  # number, step, worker, yes
    late: tuple[tuple[int, Message], ...]
    left: Faults  # that may still happen


def put(items: tuple[Any, ...], at: int, item: object) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def share(members: tuple[int, ...], worker: int) -> tuple[int, ...]:
    """The samples of the worker's rank."""
    return SAMPLES[members.index(worker) :: len(members)]


def heard(shard: Shard, message: Message, rules: Rules) -> Shard:
    """The shard once it has heard of the message's number."""
    number, done, table = message.number, message.done, shard.table
    if number <= shard.number:
        return shard
    while rules.takes_back and len(table) > done and table[-1] < 0:  # all had refused it, and one of them is lost
        table = table[:-1]
    pushes = frozenset(one for one in shard.pushes if one[0] <= done or not rules.replaces)
    # No contents: what a restarted shard has heard under a lower number may never have been the result.
    return Shard(number, table, pushes, frozenset(), (0,) * len(shard.released))


def deliver(shard: Shard, message: Message, members: tuple[tuple[int, ...], ...], rules: Rules) -> Shard:
    """The shard after a message."""
    who, number, done, content, push = message
    current, table, pushes, contents, released = heard(shard, message, rules)
    if number < current and rules.refuses_old:
        return shard
    if push and done >= len(table):
        pushes |= {(done + 1, number, who)}
    if done > len(table):
        contents |= {(done, content)}
    released = put(released, who, max(done, released[who]))
    enough = all if rules.every_release else any
    while enough(released[one] > len(table) for one in members[current if rules.says_members else 0]):
        step = len(table) + 1
        parts = [one for one in pushes if one[0] == step]
        decisions = {content for of, content in contents if of == step}
        if len(decisions) != 1:
            raise AssertionError(f"a shard is told {sorted(decisions)} of step {step}")
        decision = decisions.pop()
        if decision >= 0 and sorted(x for _, n, one in parts for x in share(members[n], one)) != list(SAMPLES):
            raise AssertionError(f"a shard applies step {step} with {sorted(parts)}")
        table += (decision,)
        pushes = frozenset(one for one in pushes if one[0] > len(table))
        contents = frozenset(one for one in contents if one[0] > len(table))
    return Shard(current, table, pushes, contents, released)


def sent_to(world: World, at: int, message: Message, rules: Rules) -> World:
    log, new = world.logs[at], deliver(world.shards[at], message, world.members, rules)
    before = heard(world.shards[at], message, rules)
    # One of an older number, or of a step that its worker has the outcome of, is refused before it is logged.
    taken = before.number <= message.number or not rules.refuses_old
    taken = taken and message.push and before.released[message.worker] <= message.done
    if world.left.restarts and rules.logs_pushes and taken:
        log = deliver(log, message, world.members, rules)
    if world.left.restarts and rules.logs_applied and len(new.table) > len(before.table):
        later = frozenset(one for one in log.pushes if one[0] > len(new.table))
        log = log._replace(table=new.table, pushes=later, contents=frozenset())
    return world._replace(shards=put(world.shards, at, new), logs=put(world.logs, at, log))


def message_of(worker: int, me: Worker, *, push: bool) -> Message:
    assert me.steps is not None
    return Message(worker, me.number, me.done, me.steps[-1] if me.steps else 0, push)


def moves(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    """What can happen next without a fault."""
    members, workers = world.members, world.workers
    newest, nothing = len(members) - 1, (0,) * len(world.shards)
    now = tuple(i for i, w in enumerate(workers) if w.alive and w.phase not in ("out", "closed"))
    lost = [workers[one] for one in members[newest] if one not in now]  # a closed one, too, when others meet
    if now and lost and (not all(w.alive for w in lost) or any(w.alive and w.phase == "meet" for w in workers)):
        yield f"number {newest + 1}: {now}", world._replace(members=(*members, now))
    for i, (at, message) in enumerate(world.late):
        was = world._replace(late=world.late[:i] + world.late[i + 1 :])
        yield f"late {message} at shard {at}", sent_to(was, at, message, rules)
    for i, me in enumerate(workers):
        if me.alive and me.phase not in ("closed", "out"):
            yield from moves_of(world, rules, i, nothing)


def moves_of(world: World, rules: Rules, i: int, nothing: tuple[int, ...]) -> Iterator[tuple[str, World]]:
    members, workers, me = world.members, world.workers, world.workers[i]
    newest = len(members) - 1

    def become(note: str, was: World = world, **changes: Any) -> tuple[str, World]:
        return f"worker {i} {note}", was._replace(workers=put(was.workers, i, me._replace(**changes)))

    def result(number: int) -> int | None:
        """What became of the step after `done` under that number; None if not all have voted."""
        votes = {one: yes for n, step, one, yes in world.votes if (n, step) == (number, me.done + 1)}
        return None if votes.keys() != {*members[number]} else number if all(votes.values()) else -1

    if me.number < newest and i in members[newest]:
        yield become("interrupted", phase="meet", number=newest, sent=nothing)
    if not rules.ignores_late_result and me.phase == "meet" and me.steps is not None:
        late = result(me.number - 1)
        if late is not None:
            yield become("has a late result", steps=(*me.steps, late))
    if me.phase == "voted" and (decision := result(me.number)) is not None:
        assert me.steps is not None
        yield become("has the result, returns", phase="work", steps=(*me.steps, decision), sent=nothing)
    elif me.phase == "meet" and me.steps is None and members[newest] == (i,):
        yield become("ends: all others have left", phase="closed")
    elif me.phase == "meet":
        reports = [w for w in (workers[one] for one in members[me.number]) if w.number >= me.number]
        decided = max(one.done for one in reports)
        ahead = [one for one in reports if one.done == decided and (one.alive or decided == me.done)]
        if ahead and (len(reports) == len(members[me.number]) or not rules.waits_for_all):
            steps = ahead[0].steps
            if me.done != decided and steps and not rules.hands_contents:
                steps = (*steps[:-1], max(steps[-1], 0))
            yield become("has met", phase="work", steps=steps)
    elif me.phase == "refuses":
        for at, so_far in enumerate(me.sent):
            if so_far < 3:
                was = sent_to(world, at, Message(i, me.number, me.done + 1, -1, push=False), rules)
                yield become(f"drops its push on shard {at}", was, sent=put(me.sent, at, 3))
        was = world._replace(votes=world.votes | {(me.number, me.done + 1, i, False)})
        yield become("votes no", was, phase="voted", sent=nothing)
    elif me.phase == "work":
        for at, so_far in enumerate(me.sent):
            shard = world.shards[at]  # which may have been restarted and not know what it was told
            again = so_far == 1 and (shard.released[i] < me.done or shard.number < me.number)
            if (so_far == 0 or again) and (me.done < STEPS or rules.says_last_word):
                was = sent_to(world, at, message_of(i, me, push=False), rules)
                yield become(f"asks shard {at}", was, sent=put(me.sent, at, 1))
        there = all(len(shard.table) >= me.done for shard in world.shards)
        if me.done < STEPS and all(me.sent) and (there or not rules.waits_for_pull):
            for at, so_far in enumerate(me.sent):
                if so_far == 1:
                    was = sent_to(world, at, message_of(i, me, push=True), rules)
                    yield become(f"pushes to shard {at}", was, sent=put(me.sent, at, 2))
            if min(me.sent) == 2:
                was = world._replace(votes=world.votes | {(me.number, me.done + 1, i, True)})
                yield become("votes", was, phase="voted", sent=nothing)
        elif me.done == STEPS and (all(me.sent) or not rules.says_last_word) and (there or not rules.close_waits):
            yield become("closes", phase="closed", sent=nothing)


def faults(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    left, workers = world.left, world.workers
    for i, me in enumerate(workers):
        others = [w for j, w in enumerate(workers) if j != i and w.alive and w.steps is not None]
        if left.crashes and me.alive and me.phase not in ("out", "closed") and others:
            gone = put(workers, i, me._replace(alive=False, sent=()))
            yield f"worker {i} dies", world._replace(workers=gone, left=left._replace(crashes=left.crashes - 1))
        if left.losses and me.alive and me.phase == "work":
            for at, so_far in enumerate(me.sent):
                message = message_of(i, me, push=all(me.sent))
                if so_far < 2 and (me.done < STEPS or not message.push):
                    rest, late = left._replace(losses=left.losses - 1), (*world.late, (at, message))
                    yield f"{message} to shard {at} is late", world._replace(late=late, left=rest)
        there = all(len(shard.table) >= me.done for shard in world.shards)
        if left.noes and me.alive and me.phase == "work" and me.done < STEPS and all(me.sent) and there:
            refuses = put(workers, i, me._replace(phase="refuses"))  # a shard has refused its push, say
            yield f"worker {i} refuses", world._replace(workers=refuses, left=left._replace(noes=left.noes - 1))
    if left.joins and not any(w.phase == "closed" for w in workers):
        i = len(workers) - 1
        now = (*(j for j, w in enumerate(workers) if w.alive and w.phase != "out"), i)
        new = world._replace(members=(*world.members, now), left=left._replace(joins=0))
        newcomer = Worker("meet", len(world.members), None, (0,) * len(world.shards))
        yield f"number {len(world.members)}: {now} with a newcomer", new._replace(workers=put(workers, i, newcomer))
    for at, log in enumerate(world.logs if left.restarts else ()):
        late = tuple(one for one in world.late if one[0] != at)  # its connections end with it
        new = world._replace(logs=(Shard(),) * len(world.logs), late=late, left=left._replace(restarts=0))
        yield f"shard {at} restarts", new._replace(shards=put(world.shards, at, log))


def check(world: World, *, ended: bool) -> None:
    """Nothing that lives, or has left in peace, disagrees with anything; and at the end everything is everywhere.

    One step is excepted: the last, all refused it, some left in peace, and the others lose one before they hear of it.
    """
    states = [shard.table for shard in world.shards]
    states += [w.steps for w in world.workers if w.alive and w.steps is not None]
    if ended and any(len(one) < STEPS for one in states):
        raise AssertionError(f"nothing can happen any more: tables and workers stand at {states}")
    for w in world.workers:
        if w.alive and w.phase == "closed" and w.steps is not None and w.steps[-1] < 0:
            states.remove(w.steps)
            states.append(w.steps[:-1])
    longest = max(states, key=len)
    if any(longest[: len(one)] != one for one in states):
        raise AssertionError(f"states differ: {states}")


def explore(workers: int, shards: int, fault: Faults, rules: Rules) -> tuple[int, str]:
    """Return the number of states, and what is broken, with the way there."""
    everybody = (Worker(sent=(0,) * shards),) * workers + (Worker("out", steps=None),) * fault.joins
    shard = (Shard(released=(0,) * len(everybody)),) * shards
    world = World((tuple(range(workers)),), everybody, shard, shard, frozenset(), (), fault)
    came: dict[World, tuple[World, str] | None] = {world: None}
    queue = deque([world])
    try:
        while queue:
            world = queue.popleft()
            going_on = list(moves(world, rules))
            check(world, ended=not going_on)
            for note, new in (*going_on, *faults(world, rules)):
                oldest = min(w.number for w in new.workers if w.alive) - (not rules.ignores_late_result)
                new = new._replace(votes=frozenset(vote for vote in new.votes if vote[0] >= oldest))
                if new not in came:
                    came[new] = (world, note)
                    queue.append(new)
    except AssertionError as error:
        way = list[str]()
        while (before := came[world]) is not None:
            world = before[0]
            way.insert(0, before[1])
        return len(came), f"{error}, after: {'; '.join(way)}"
    return len(came), ""


CASES = [
    (2, 2, Faults(crashes=1)),
    (2, 1, Faults(crashes=1, losses=1, noes=1)),
    (2, 1, Faults(crashes=1, joins=1)),
    (2, 1, Faults(crashes=1, restarts=1, noes=1)),
    (2, 1, Faults(crashes=1, noes=2)),
    (2, 2, Faults(crashes=1, restarts=1)),
    pytest.param((2, 2, Faults(crashes=1, joins=1)), marks=pytest.mark.slow),
    pytest.param((2, 2, Faults(crashes=1, noes=2)), marks=pytest.mark.slow),
    pytest.param((3, 1, Faults(crashes=2)), marks=pytest.mark.slow),
    pytest.param((2, 2, Faults(crashes=1, losses=1)), marks=pytest.mark.slow),
    pytest.param((3, 1, Faults(crashes=1, noes=1)), marks=pytest.mark.slow),
    pytest.param((2, 1, Faults(crashes=1, losses=1, restarts=1, noes=1)), marks=pytest.mark.slow),
]


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("overtakes", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_applied_everywhere_or_nowhere_whoever_dies_when(
    case: tuple[int, int, Faults], overtakes: bool
) -> None:
    states, broken = explore(*case, Rules(waits_for_pull=not overtakes))
    assert not broken
    assert states > 100


ONE, THREE = (2, 1, Faults(crashes=1)), (3, 1, Faults(crashes=1))
RESTART = (2, 1, Faults(crashes=1, restarts=1))


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        ("every_release", (2, 2, Faults(crashes=1))),
        ("replaces", ONE),
        ("says_members", ONE),
        ("refuses_old", (2, 1, Faults(crashes=1, losses=1))),
        ("says_last_word", ONE),
        ("close_waits", ONE),
        ("logs_applied", RESTART),
        ("logs_pushes", RESTART),
        ("ignores_late_result", THREE),
        ("waits_for_all", THREE),
        ("takes_back", (2, 1, Faults(crashes=1, noes=2))),
        ("hands_contents", (3, 1, Faults(crashes=1, noes=1))),
    ],
)
def test_each_rule_is_needed(rule: str, case: tuple[int, int, Faults]) -> None:
    assert explore(*case, Rules()._replace(**{rule: False}))[1], f"nothing breaks without {rule}"
