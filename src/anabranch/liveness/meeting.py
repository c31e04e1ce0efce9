"""Workers meet: the job's process group, made once all of them have come, by calls that Ctrl-C ends.

Those that are left when a worker has died meet again, under the next membership: not in that group, which would wait
for the dead, but through a store of that number alone.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # defined in C++
from torch.distributed.distributed_c10d import PrefixStore, Store

from anabranch.deadline import Deadline
from anabranch.errors import PeerLost
from anabranch.job import JOINED_VARIABLE, MEETING_VARIABLE
from anabranch.liveness.group import LOOK_SECONDS, rank_names, too_late
from anabranch.liveness.membership import Membership, own_place, published, rank_variables
from anabranch.liveness.peers import Identity, Peers, end_without_waiting, peers_of_job
from anabranch.record.process import process_record
from anabranch.record.spans import Lasting

_T = TypeVar("_T")
_log = logging.getLogger("anabranch")
SAID_AFTER = 5.0
BACKEND_GRACE = 60.0
"""Seconds by which a wait of gloo's or NCCL's, which ends without a name, is longer than ours."""
_PAUSE = 0.01
# For which nobody is lost any more: one that was frozen is awake, and not about to be killed, and the launcher, which
# looks every second, has seen that none of them has closed.
_AWAKE_SECONDS = 3.0
_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# How often this process has met the others under its membership; the same on all of them, as they run the same program.
_meetings = 0
# The processes of the last meeting: one that has ended comes to no other.
_met: dict[int, Identity] = {}


def meet_peers(backend: str, timeout: float) -> None:
    """Initialise the job's process group from the environment, as ``init_process_group`` does, under its own keys.

    Ranks leave each other their addresses in a store that may outlive them: torchrun's survives a restart of the
    workers, and a process may meet the others again after it closed the first group. Under the same keys a rank would
    now and then find an address that nobody listens at any more.

    Raises:
        ValueError: the environment names no job.
        PeerLost: a worker that came to this or an earlier meeting has ended.
        DeadlineExceeded: names those who have not come.
    """
    if missing := [name for name in _MEETING if name not in os.environ]:
        raise ValueError(
            f"the environment names no job of several workers: {', '.join(missing)} is not set; start the script with "
            "anabranch run or torchrun"
        )
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    # A newcomer has been started anew, and has met the others less often.
    start = Peers.membership and f"of membership {Peers.membership}"
    prefix = f"anabranch/{start or os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_meetings}"
    rank, size, deadline = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Deadline.after(timeout)
    others, names = [other for other in range(size) if other != rank], [f"{one}" for one in range(size)]
    absent, came, place = list(others), dict[int, Identity](), own_place()
    remind = reminder(absent)

    def meet() -> None:
        global _meetings
        try:
            store = PrefixStore(prefix, _store(rank, timedelta(seconds=timeout)))
        except dist.DistError as error:
            if not deadline.expired():  # such as an address that is in use
                raise
            raise too_late([0], "meet", deadline, None) from error
        store.set(f"{rank}", Identity.of_this_process().encode())
        while not store.check(names):  # all of them: one that had come may have given up
            absent[:] = [other for other in absent or others if not store.check([names[other]])]
            ended = [other for other in absent if other in _met and _met[other].has_ended()]
            now = published(place.meeting) if absent and place is not None else None
            if now is not None and place is not None and place.process not in now.ranks:
                store.delete_key(f"{rank}")
                raise lost(
                    absent, "the others have gone on without this worker, which had closed its Executor before them"
                )
            if now is not None and (now.over or len(now.ranks) + now.closed < size):
                ended = ended or [other for other in absent if other not in now.ranks] or list(absent)
            if ended or (absent and deadline.expired()):
                store.delete_key(f"{rank}")  # the others wait until this one comes again
                raise lost(ended) if ended else too_late(absent, "meet", deadline, None)
            time.sleep(_PAUSE)
        absent.clear()
        came.update(enumerate(Identity.decode(text.decode()) for text in store.multi_get(names)))
        if device is not None:
            torch.cuda.set_device(device)  # a thread's own
        limit = timedelta(seconds=timeout + BACKEND_GRACE)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        _met.update(came)
        _meetings += 1

    def lost(ranks: Sequence[int], why: str = "its process has ended") -> PeerLost:
        return PeerLost(why, peer=rank_names(ranks), operation="meet", elapsed=deadline.elapsed())

    def look() -> None:
        remind()
        if ended := [other for other in others if other in came and came[other].has_ended()]:
            raise lost(ended)  # gloo would wait for its connection

    def facts() -> dict[str, object]:
        return {"peer": ", ".join(f"rank {other}" for other in absent or others), "operation": "meet", "limit": timeout}

    process_record()
    with Lasting("wait", "wait", facts):
        try:
            interruptible(meet, look)
        except dist.DistNetworkError as error:
            if rank == 0:
                raise
            raise lost([0], f"the connection to the job's store failed: {error}") from None


def meet_members(
    after: int, timeout: float, has_lost: Callable[[], bool]
) -> tuple[Membership, int, Store, dict[int, Identity]] | None:
    """Meet the members of the newest membership behind number ``after``, once the launcher has published it.

    From then on ``job()`` is that membership.

    Args:
        after: the number of the last one; -1 of a newcomer.
        timeout: seconds that this may take.
        has_lost: says whether anybody is lost of that one, or awaited; else there will be no other.

    Returns:
        The membership, this process's rank in it, a store of its members alone, and who they are by rank; ``None`` if
        there will be none, as the job, or for a newcomer the others, have ended.

    Raises:
        DeadlineExceeded: names those who have not come.
    """
    global _meetings
    place = own_place()
    assert place is not None, "only jobs that may lose workers meet again"
    absent, names = list[int](), list[str]()
    store: Store | None = None
    membership, rank = Membership(after, {}), -1
    deadline, awake = Deadline.after(timeout), Deadline.after(_AWAKE_SECONDS)

    def facts() -> dict[str, object]:
        return {"peer": rank_names(absent) if store else "a newcomer", "operation": "meet", "limit": timeout}

    def is_settled(outcome: str) -> bool:
        """Settle for all whether this meeting has taken place, or one of them is at the next already."""
        return store is None or store.compare_set("outcome", "", outcome).decode() == outcome

    with Lasting("wait", "wait", facts), place.saying("meets"):
        while True:
            newest = published(place.meeting)
            if newest.over or not newest.ranks or (after >= 0 and place.process not in newest.ranks):
                return None
            if newest.number > membership.number and place.process in newest.ranks and is_settled("left"):
                # The first, or one of those awaited has died meanwhile, or nobody waits for newcomers any more.
                membership, rank = newest, newest.ranks[place.process]
                names = [f"{one}" for one in range(len(membership.ranks))]
                store = _store(rank, timedelta(seconds=timeout), membership.number)
                store.set(f"{rank}", Identity.of_this_process().encode())
            elif store is None and has_lost():
                awake = Deadline.after(_AWAKE_SECONDS)
            elif store is None and awake.expired():
                return None
            if store is not None:
                absent[:] = [other for other in range(len(names)) if not store.check([names[other]])]
                if not absent and is_settled("met"):
                    break
            if deadline.expired():
                if store is None:
                    raise deadline.error(peer="a newcomer", operation="meet")
                raise too_late(absent, "meet", deadline, None)
            time.sleep(_PAUSE)
    identities = {one: Identity.decode(text.decode()) for one, text in enumerate(store.multi_get(names))}
    _met.clear()
    _met.update(identities)
    os.environ.update(rank_variables(os.environ, rank, len(names)))
    if JOINED_VARIABLE in os.environ:
        os.environ[JOINED_VARIABLE] = "before"
    _meetings = 0
    return membership, rank, store, identities


def connect_world(number: int, store: Store, rank: int, size: int, limit: timedelta) -> dist.ProcessGroup:
    """Connect a group of gloo with the members of a membership, which ``set_world`` makes ``torch.distributed``'s."""
    c10d, store = dist.distributed_c10d, PrefixStore("anabranch/world", store)
    name = cast(Any, f"anabranch/{number}")
    made = c10d._new_process_group_helper(size, rank, [], c10d.Backend("gloo"), store, name, timeout=limit)
    return cast(dist.ProcessGroup, made[0])


def set_world(group: dist.ProcessGroup, peers: Peers) -> None:
    """Let ``torch.distributed``'s default group be this one, of ``peers``; ``init_process_group`` makes only one."""
    old = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    if old is not None and cast(Any, old)._get_sequence_number_for_group():  # a call of the script's may wait there
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(old))
    elif old is not None:
        dist.destroy_process_group(old)
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    peers_of_job(peers)


def _store(rank: int, timeout: timedelta, membership: int = 0) -> Store:
    """Return the store through which the workers meet under this membership."""
    path, port = os.environ.get(MEETING_VARIABLE, ""), os.environ["MASTER_PORT"]
    if path.endswith(f"-{port}"):  # a job inside of that job has another port
        store = FileStore(f"{path}.{membership}" if membership else path)
        store.set_timeout(timeout)
        return store
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # As torch's env:// has it, but it does not wait in C++ for workers that it cannot name.
    shared = TCPStore(
        os.environ["MASTER_ADDR"], int(port), None, serves, timeout, wait_for_workers=False, multi_tenant=True
    )
    return PrefixStore(f"anabranch/membership/{membership}", shared) if membership else shared


def reminder(ranks: Sequence[int]) -> Callable[[], dict[int, str]]:
    """Return a look at a wait that says once, after five seconds, which ``ranks`` have not come; it finds none lost."""
    say_at: list[float] = [time.monotonic() + SAID_AFTER]

    def look() -> dict[int, str]:
        if say_at and ranks and time.monotonic() >= say_at[0]:
            say_at.clear()
            _log.warning("waiting for %s to make an Executor; comm_mode=None trains alone", rank_names(ranks))
        return {}

    return look


def begin_call(call: Callable[[], _T], thread_name: str) -> tuple[threading.Thread, Future[_T]]:
    """Make ``call`` on another thread, which is in this one's inference mode."""
    answer: Future[_T] = Future()
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        try:
            with torch.inference_mode(inference):
                answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            answer.set_exception(error)

    thread = threading.Thread(target=run, name=thread_name, daemon=True)
    thread.start()
    return thread, answer


def interruptible(call: Callable[[], _T], look: Callable[[], object] = lambda: None) -> _T:
    """Return ``call()``, made on another thread: no signal reaches Python while gloo waits for a rank.

    Where Ctrl-C ends the wait the thread is left behind, and the process ends without waiting for it. ``look`` is
    called twice a second meanwhile.
    """
    thread, answer = begin_call(call, "anabranch-meeting")
    try:
        while not wait([answer], timeout=LOOK_SECONDS).done:
            look()
    except BaseException:
        atexit.register(end_without_waiting)
        raise
    thread.join(timeout=10.0)
    return answer.result(timeout=0)
