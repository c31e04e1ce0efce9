"""The job's process group: met under its own keys, by calls that Ctrl-C ends, and ended before the interpreter ends.

Gloo's threads take the interpreter's lock to free a tensor. One that waits for it when the interpreter is taken apart
is ended by Python in the middle of C++ code, and with it the whole process: SIGABRT, "terminate called without an
active exception". On a busy machine a thread may come so late. The threads end with the last reference to their group,
so that is let go of while Python still runs.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # defined in C++
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from anabranch.job import MEETING_VARIABLE
from anabranch.record.process import flush, process_record
from anabranch.record.spans import Lasting

_T = TypeVar("_T")
_log = logging.getLogger("anabranch")
SAID_AFTER = 5.0
LOOK_SECONDS = 0.5
"""A signal that comes as a wait begins is seen at its end, and none in the middle of gloo's."""


def destroy_group_at_exit() -> None:
    """Destroy the process group at process exit unless it has been destroyed.

    Functions that were given to ``atexit`` later run before that, with the group in place.
    """
    atexit.register(_destroy, os.getpid())


def _destroy(pid: int) -> None:
    if pid == os.getpid() and dist.is_initialized():  # a fork has none of the threads
        dist.destroy_process_group()


_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# How often this process has met the others; the same on all of them, as they run the same program.
_meetings = itertools.count()


def meet_peers(backend: str, timeout: timedelta) -> None:
    """Initialise the job's process group from the environment, as ``init_process_group`` does, under its own keys.

    Ranks leave each other their addresses in a store that may outlive them: torchrun's survives a restart of the
    workers, and a process may meet the others again after it closed the first group. Under the same keys a rank would
    now and then find an address that nobody listens at any more.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"anabranch/{attempt}/{next(_meetings)}"

    def meet() -> None:
        store, rank, size = _place(timeout)
        if device is not None:
            torch.cuda.set_device(device)  # a thread's own
        keys = PrefixStore(prefix, store)
        dist.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=timeout)

    variables = " ".join(f"{name}={os.environ[name]}" for name in _MEETING if name in os.environ)
    waiting = (
        f"waiting for the other workers that the environment names, {variables}; if this process is a job of its own, "
        "unset RANK and WORLD_SIZE"
    )
    process_record()
    with Lasting("connect", "wait"):
        interruptible(meet, waiting)


def _place(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store through which the workers meet, this one's rank, and how many they are."""
    path = os.environ.get(MEETING_VARIABLE, "")
    if path.endswith(f"-{os.environ.get('MASTER_PORT')}"):  # a job inside of that job has another port
        store = FileStore(path)
        store.set_timeout(timeout)
        return store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place: tuple[Store, int, int] = next(rendezvous("env://", timeout=timeout))
    return place


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


def interruptible(call: Callable[[], _T], waiting: str = "") -> _T:
    """Return ``call()``, made on another thread: no signal reaches Python while gloo waits for a rank.

    Where Ctrl-C ends the wait the thread is left behind, and the process ends without waiting for it. ``waiting`` is
    said once after five seconds.
    """
    thread, answer = begin_call(call, "anabranch-meeting")
    say_at = time.monotonic() + SAID_AFTER
    try:
        while not wait([answer], timeout=LOOK_SECONDS).done:
            if waiting and time.monotonic() >= say_at:
                _log.warning("%s", waiting)
                waiting = ""
    except BaseException:
        atexit.register(end_without_waiting)
        raise
    thread.join(timeout=10.0)
    return answer.result(timeout=0)


def end_without_waiting() -> None:
    """End the process: gloo's threads would wait for a lost rank, and the interpreter for them."""
    logging.shutdown()
    flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
