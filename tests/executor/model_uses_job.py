"""Run by both workers of a job, and by another program beside them: the uses of ``model_uses.py`` at each moment.

The workers go through the cases together. After each they tell each other how it ended, and drop what it has left on
the servers. They print the cases that ended otherwise than in the plain program, or than by a refusal of both.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_uses import (
    ALL,
    BATCHES,
    CHANGES,
    KINDS,
    MODES,
    MOMENTS,
    ROWS,
    WIDTH,
    Doing,
    Life,
    Worker,
    close_tables,
    executor_of,
    live,
    possible,
    reads_of,
    refuses,
    same,
)
from torch import Tensor

import anabranch as ab

TIMEOUT = 20.0  # seconds: also where one worker waits for the other in vain
HANG = timedelta(seconds=100)


class Meeting:
    """Where programs leave word for each other."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._asked = 0

    def say(self, name: str, value: object) -> None:
        self._store.set(name, json.dumps(value))

    def hear(self, name: str) -> Any:
        self._store.wait([name], HANG)
        return json.loads(self._store.get(name))

    def ask(self, *question: str) -> Any:
        """Let the program beside do something; raise ``AssertionError`` with what it has seen that is wrong."""
        self._asked += 1
        self.say(f"question {self._asked}", question)
        answer, error = self.hear(f"answer {self._asked}")
        assert not error, f"beside: {error}"
        return answer

    def answer(self) -> None:
        """Do what is asked, until all is over."""
        for number in itertools.count(1):
            while not self._store.check([f"question {number}"]):
                if self._store.check(["over"]):
                    return
                time.sleep(0.005)
            what, *rest = self.hear(f"question {number}")
            answer, error = None, ""
            try:
                answer = DOES[what](*rest)
            except BaseException as failed:  # noqa: BLE001 - told to the worker that asks
                error = "".join(traceback.format_exception(failed))
            close_tables()
            self.say(f"answer {number}", [answer, error])


# The cases of both workers.

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
    for what, ranks, moment in itertools.product(CHANGES, ((0, 1), (1,)), MOMENTS):
        # Of an assignment by one of them, its optimizer says so before it has met the other.
        shared = kind == "remote" and what == "step by hand"  # each steps the table of both
        if possible(what, kind, moment) and not shared and (what, ranks, moment) != ("assignment", (1,), "before"):

            def case(worker: Worker, what: str = what, ranks: tuple[int, ...] = ranks, moment: str = moment) -> None:
                live(kind, mode, {moment: Doing({what: CHANGES[what]}, ranks, shared=True)}, worker)

            yield f"{what} by ranks {ranks}, {moment}", what, case


def beside_it(kind: str, mode: str, beside: Meeting) -> Iterator[Case]:
    """Another program on the same servers: its looks change nothing, and what it takes is refused to the workers."""
    if not served(kind, mode):
        return
    for end in ("after close", "after an exception"):
        moments = [one for one in MOMENTS if one != "before" and (not one.startswith("after") or one == end)]

        def looks(worker: Worker, moments: list[str] = moments) -> None:
            uses = {what: partial(let, beside, what, mode) for what in ("reads", "refusals")}
            live(kind, mode, {one: Doing(uses, (0,)) for one in moments}, worker)

        yield f"reads and refusals beside, {end}", "", looks
    for what, moment in itertools.product(("adopt", "replace", "resume"), ("opened", "between runs", "after close")):

        def takes(worker: Worker, what: str = what, moment: str = moment) -> None:
            live(kind, mode, {moment: Doing({what: partial(let, beside, what, mode)})}, worker)

        if kind != "remote" or moment != "after close":  # when the workers read the rows that it trains
            yield f"{what} beside, {moment}", what if moment != "after close" else "", takes


def served(kind: str, mode: str) -> bool:
    """True if the servers have the parameter that is used."""
    return MODES[mode]["comm_mode"] != "AllReduce" and (kind != "dense" or MODES[mode]["comm_mode"] == "PS")


def let(beside: Meeting, what: str, mode: str, life: Life) -> Tensor | None:
    """Let the program beside do something; return what it reads, or what the plain program has there."""
    assert life.worker is not None
    if not life.plain:
        if what != "reads" and what != "refusals":
            dist.barrier()  # both are at this moment
        answer = None if life.worker.rank else beside.ask(what, life.kind, mode)
        return None if answer is None else torch.tensor(answer, dtype=torch.float64)
    return torch.stack([life.model.weight.detach()] * (2 if life.kind == "remote" else 1)) if what == "reads" else None


def refused(error: BaseException, kind: str, what: str) -> bool:
    """True if the error names what is refused, or the other worker, which has seen it and left."""
    if isinstance(error, ab.SchemaError):
        return "close one Executor before the next is made" in str(error)
    return refuses(error, kind, what) or (isinstance(error, ab.PeerLost) and "peer rank" in str(error))


def work(folder: str, mode: str, only: str) -> dict[str, object]:
    """Go through every fourth change, others with each mode and kind."""
    dist.init_process_group("gloo", timeout=HANG)
    rank, wrong, slow = ab.job().rank, {}, {}
    meeting = Meeting(dist.PrefixStore("cases", dist.distributed_c10d._get_default_store()))
    beside = Meeting(dist.FileStore(f"{folder}/meeting", -1))
    if rank == 0:
        beside.say("servers", list(ab.job().servers))
    cases = [
        (f"{kind}: {name}", kind, what, case)
        for place, kind in enumerate(KINDS)
        for number, (name, what, case) in enumerate(
            [*reads(kind, mode), *beside_it(kind, mode, beside), *changes(kind, mode)]
        )
        if (number < 3 or name.startswith("beside") or (number + place + list(MODES).index(mode)) % 4 == 0 or only)
        and only in f"{kind}: {name}"
    ]
    for number, (name, kind, what, case) in enumerate(cases):
        print(name, flush=True)
        began, outcome, fine = time.monotonic(), "", True
        group = dist.new_group([0, 1])
        options = {"check_workers": 1, "timeout": TIMEOUT, "heartbeat": 2.0, "process_group": group}
        try:
            case(Worker(rank, options))
        except BaseException as error:  # noqa: BLE001 - told to the other worker
            outcome, fine = f"{type(error).__name__}: {error}", what != "" and refused(error, kind, what)
            print("".join(traceback.format_exception(error)), flush=True)
        close_tables()
        meeting.say(f"{number} {rank}", [outcome, fine])
        other, other_fine = meeting.hear(f"{number} {1 - rank}")
        if not fine or not other_fine or bool(outcome) != bool(other):
            wrong[name] = outcome
        if time.monotonic() - began > 2.0:
            slow[name] = time.monotonic() - began
        if rank == 0:
            drop_all()
        meeting.say(f"{number} {rank} is over", None)
        meeting.hear(f"{number} {1 - rank} is over")
        dist.destroy_process_group(group)
    if rank == 0:
        beside.say("over", None)
    return {"wrong": wrong, "slow": slow, "cases": len(cases)}


# What the program beside does.


def reads_beside(kind: str, mode: str) -> list[object]:
    """Read the table as a client, by an evaluation, and by a lookup."""
    name = name_of(kind)
    with ab.ParameterClient() as client:
        pulled = client.pull(name)
    if kind == "dense":
        return [pulled.tolist()]
    sgd = partial(torch.optim.SGD, lr=0.1)
    rows = ab.RemoteEmbedding(name, ROWS, WIDTH, init=0.5, dtype=torch.float64, optimizer=sgd)
    with ab.Executor(ab.EvalStep(rows, lambda model, ids: {"rows": model(ids)}), **MODES[mode]) as executor:
        if kind == "remote":
            return [pulled.tolist(), executor.run(batch=ALL)["rows"][:, 0].tolist()]
        with pytest.raises(ValueError, match=re.escape(name)):  # which is no RemoteEmbedding
            executor.run(batch=ALL)
    return [pulled.tolist()]


def refusals_beside(kind: str, mode: str) -> None:
    """Train, plan and save without a word about what is there: each is refused, and changes nothing."""
    life = Life(kind, plain=False)
    with executor_of(life, mode), tempfile.TemporaryDirectory() as folder:
        assert life.executor is not None
        for use in (
            lambda: life.train(0),
            lambda: life.executor.plan("train", BATCHES[0]),
            lambda: life.executor.save(folder),
        ):
            with raises(rf"already hold .*{name_of(kind)} \(step "):
                use()


def raises(message: str) -> Any:
    return pytest.raises(ValueError, match=message)


def takes_beside(what: str, kind: str, mode: str) -> None:
    """Train on what is there, or on new values in its place, as the plain program does."""
    ours, plain = Life(kind, plain=False), Life(kind, plain=True)
    if what == "adopt":
        with ab.ParameterClient() as client, torch.no_grad():
            values = {name: client.pull(name) for name in client.steps()}
            for name, parameter in plain.model.named_parameters():
                parameter.copy_(values.get("table" if (kind, name) == ("remote", "table.weight") else name, parameter))
    with (
        executor_of(ours, mode, **({} if what == "resume" else {"served": what})),
        tempfile.TemporaryDirectory() as folder,
    ):
        assert ours.executor is not None
        assert what != "resume" or not ours.executor.resume(folder)
        for life in (ours, plain):
            life.train(0)
            life.train(1)
        same(plain.evaluate(), ours.evaluate(), "EvalStep")
    same(plain.model.top.weight.detach(), ours.model.top.weight.detach(), "top.weight")
    same(plain.model.table(ALL).detach(), ours.model.table(ALL).detach(), "the table")


def name_of(kind: str) -> str:
    """The name on the servers of the parameter that is used."""
    return {"dense": "top.weight", "remote": "table"}.get(kind, "table.weight")


DOES: dict[str, Callable[..., list[object] | None]] = {
    "reads": reads_beside,
    "refusals": refusals_beside,
    **{what: partial(takes_beside, what) for what in ("adopt", "replace", "resume")},
}


def drop_all() -> None:
    with ab.ParameterClient() as client:
        for name in client.steps():
            client.drop(name)


def main() -> None:
    folder, mode, only = [*sys.argv[1:], ""][:3]
    if mode == "beside":
        beside = Meeting(dist.FileStore(f"{folder}/meeting", -1))
        os.environ["ANABRANCH_SERVERS"] = ",".join(beside.hear("servers"))
        beside.answer()
        return
    print(json.dumps(work(folder, mode, only)), flush=True)


if __name__ == "__main__":
    main()
