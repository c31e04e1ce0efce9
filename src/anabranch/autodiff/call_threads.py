"""Calls that run at once: threads that one function call starts and joins, so that none outlives it.

A pool of threads that were kept would have to be owned by somebody, and calls that wait for calls of the same pool
would deadlock. Starting a thread costs tens of microseconds; what is worth running at once costs milliseconds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from anabranch.autodiff.boundary.answers import current_answers, replay_from
from anabranch.autodiff.thread_modes import ThreadModes, current_streams, on_streams

_Result = TypeVar("_Result")


def run_at_once(
    calls: Sequence[Callable[[], _Result]], *, max_workers: int | None, describe: Callable[[int], str]
) -> list[_Result]:
    """Return the calls' results, in order; the calling thread runs its share.

    Args:
        calls: run with the calling thread's modes.
        max_workers: the most to run at once; all by default.
        describe: what to note on an error of the call of that index.

    Raises:
        BaseException: the first that a call raised, once no call is running any more; calls not yet begun are not.
    """
    results: list[_Result | None] = [None] * len(calls)
    errors: list[BaseException] = []
    indices = itertools.count()  # taking the next is one bytecode of C: atomic

    def work() -> None:
        while not errors and (index := next(indices)) < len(calls):
            try:
                results[index] = calls[index]()
            except BaseException as error:  # noqa: BLE001  # raised again on the caller's thread
                error.add_note(describe(index))
                errors.append(error)

    modes, streams, answers = ThreadModes.take(), current_streams(), current_answers()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def work_elsewhere(number: int) -> None:
        try:
            start_two(number)
            with (
                modes.entered(),
                on_streams(streams),
                replay_from(answers),
                saved_tensors_hooks(*hooks) if hooks else nullcontext(),
            ):
                work()
        except BaseException as error:  # noqa: BLE001  # no thread could be started, or no mode entered
            errors.append(error)

    width = len(calls) if max_workers is None else min(max_workers, len(calls))
    threads = [
        threading.Thread(target=work_elsewhere, args=(number,), name=f"anabranch-call-{number}")
        for number in range(1, width)
    ]

    # A thread is started by a handshake, milliseconds long on a busy machine: so as a tree, in log(width) of them.
    #     caller ──> 1 ──> 3, 4
    #            └─> 2 ──> 5, 6
    def start_two(number: int) -> None:
        for child in (2 * number + 1, 2 * number + 2):
            if child < width and not errors:
                threads[child - 1].start()

    try:
        start_two(0)
        work()
    except BaseException as error:  # noqa: BLE001  # interrupted, or no thread could be started; raised below
        errors.append(error)
    finally:
        for thread in threads:  # in this order: a thread that has ended has started those it was to start
            while thread.is_alive():
                thread.join(timeout=60.0)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # an error holds this frame, which must not hold it
    return cast("list[_Result]", results)
