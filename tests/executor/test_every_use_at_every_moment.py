"""Uses of a model beside its steps: each equals the plain program's, or is refused by an error that names the table.

The uses, the moments and the life are those of ``model_uses.py``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from model_uses import CHANGES, KINDS, MODES, MOMENTS, Doing, Worker, close_tables, live, possible, reads_of, refuses

import anabranch as ab
from toys import in_job


@pytest.fixture(autouse=True)
def _tables_closed() -> Iterator[None]:
    yield
    close_tables()


@pytest.mark.quick_cases(40)
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


@pytest.mark.quick_cases(40)
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


def refused(error: BaseException, kind: str, what: str) -> bool:
    """True if the error names what is refused, or the other worker, which has seen it and left."""
    return refuses(error, kind, what) or (isinstance(error, ab.PeerLost) and "peer rank" in str(error))


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
                outcome, fine = f"{type(error).__name__}: {error}", what != "" and refused(error, kind, what)
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
