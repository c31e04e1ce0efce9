"""Push, acknowledge, log, checkpoint, restart: every order of them that there is, in a model of plain Python.

The model has the steps of ``push_log.py``, ``durability.py`` and ``OnceTable`` and nothing else, so that all of its
states can be gone through. A process may die before any step; a client that hears nothing asks again. A kill leaves
what was written; a power cut leaves any prefix of it, at least as much as was synced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

PUSHES, DEATHS, CHECKPOINTS = 3, 2, 2


class Checkpoint(NamedTuple):
    """What one generation holds: pushes done, requests remembered, and the first record of the log that goes on."""

    done: tuple[int, ...] = ()
    remembered: frozenset[int] = frozenset()
    log_from: int = 0


NONE_YET = Checkpoint()


@dataclass(frozen=True)
class World:
    """One state: the shard's memory, its disk, and what the client knows."""

    alive: bool = True
    done: tuple[int, ...] = ()  # in memory: pushes in the order in which they were done
    remembered: frozenset[int] = frozenset()
    disk: tuple[int, ...] = ()  # the log's records, of which the first `synced` are durable
    synced: int = 0
    forgotten: int = 0  # records of log files that were removed
    checkpoint: Checkpoint = NONE_YET
    writing: Checkpoint | None = None
    phase: str = "idle"  # of the push that is being served
    asking: int | None = None
    next: int = 1
    acknowledged: frozenset[int] = frozenset()
    told_lost: frozenset[int] = frozenset()
    deaths: int = 0
    checkpoints: int = 0


@dataclass(frozen=True)
class Rules:
    """The mechanisms, each of which can be taken out."""

    logs: bool = True
    syncs_before_answer: bool = True
    remembers_in_checkpoints: bool = True
    forgets_after_checkpoint: bool = True
    tells_what_is_lost: bool = True


def steps(world: World, rules: Rules) -> Iterator[World]:
    """Every state that can follow."""
    if not world.alive:
        yield restarted(world, rules)
        return
    if world.deaths < DEATHS:
        yield from deaths(world)
    yield from served(world, rules)
    yield from checkpointed(world, rules)


def served(world: World, rules: Rules) -> Iterator[World]:
    asked, phase = world.asking, world.phase
    if asked is None:
        if world.next <= PUSHES:
            yield replace(world, asking=world.next, next=world.next + 1)
    elif phase == "idle":
        if asked in world.remembered:
            yield acknowledge(world)
        elif rules.logs:
            yield replace(world, disk=(*world.disk, asked), phase="logged")
        else:
            yield do(world, asked)
    elif phase == "logged":
        yield do(world, asked)
    elif phase == "done":
        if rules.logs and rules.syncs_before_answer:
            yield replace(world, synced=len(world.disk), phase="synced")
        else:
            yield acknowledge(world)
    else:
        yield acknowledge(world)


def do(world: World, push: int) -> World:
    return replace(world, done=(*world.done, push), remembered=world.remembered | {push}, phase="done")


def acknowledge(world: World) -> World:
    assert world.asking is not None
    known = world.acknowledged | {world.asking}
    return replace(world, acknowledged=known, asking=None, phase="idle")


def checkpointed(world: World, rules: Rules) -> Iterator[World]:
    """Copied and the log begun anew under the lock, so not between a push's record and its being done."""
    if world.writing is None:
        if world.checkpoints < CHECKPOINTS and world.phase != "logged":
            remembered = world.remembered if rules.remembers_in_checkpoints else frozenset()
            begun = Checkpoint(world.done, remembered, len(world.disk))
            yield replace(world, writing=begun, synced=len(world.disk), checkpoints=world.checkpoints + 1)
            if not rules.forgets_after_checkpoint:
                yield replace(world, writing=begun, forgotten=len(world.disk), checkpoints=world.checkpoints + 1)
    else:
        whole = replace(world, checkpoint=world.writing, writing=None)
        yield whole
        yield replace(whole, forgotten=whole.checkpoint.log_from)


def deaths(world: World) -> Iterator[World]:
    """A kill leaves what was written, a power cut at least what was synced."""
    gone = replace(
        world, alive=False, done=(), remembered=frozenset(), writing=None, phase="idle", deaths=world.deaths + 1
    )  # fmt: skip
    for kept in range(world.synced, len(world.disk) + 1):
        yield replace(gone, disk=world.disk[:kept], synced=min(world.synced, kept))


def restarted(world: World, rules: Rules) -> World:
    found = world.checkpoint
    rest = world.disk[max(found.log_from, world.forgotten) :]
    remembered = found.remembered | frozenset(rest)
    back = replace(
        world, alive=True, done=(*found.done, *rest), remembered=remembered, synced=len(world.disk)
    )  # fmt: skip
    missing = world.acknowledged - set(back.done)
    return replace(back, told_lost=world.told_lost | missing) if rules.tells_what_is_lost else back


def wrong(world: World, rules: Rules) -> str | None:
    """What a state breaks of what was promised."""
    if not world.alive:
        return None
    if len(set(world.done)) != len(world.done):
        return "done twice"
    gone = world.acknowledged - set(world.done)
    if gone and rules.logs:
        return "lost"
    if gone - world.told_lost:
        return "lost, and not told"
    if world.told_lost - gone:
        return "told lost, and there"
    if list(world.done) != sorted(world.done):
        return "in another order"
    return None


def explore(rules: Rules) -> tuple[int, set[str]]:
    """How many states there are, and all that is wrong in any of them."""
    start = World()
    seen, todo, found = {start}, [start], set[str]()
    while todo:
        world = todo.pop()
        fault = wrong(world, rules)
        if fault is not None:
            found.add(fault)
            continue
        for after in steps(world, rules):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), found


@pytest.mark.parametrize("logs", [True, False])
def test_nothing_is_lost_untold_or_done_twice_in_any_order_of_events(logs: bool) -> None:
    states, found = explore(Rules(logs=logs))
    assert states > 500
    assert not found


@pytest.mark.parametrize(
    ("without", "then"),
    [
        (Rules(syncs_before_answer=False), {"lost"}),
        (Rules(remembers_in_checkpoints=False), {"done twice"}),
        (Rules(forgets_after_checkpoint=False), {"lost"}),
        (Rules(logs=False, tells_what_is_lost=False), {"lost, and not told"}),
    ],
)
def test_the_model_finds_a_loss_without_each_mechanism(without: Rules, then: set[str]) -> None:
    assert explore(without)[1] >= then
