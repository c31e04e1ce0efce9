"""Calls that run at once: threads that one function call starts and joins, so that none outlives it.

A pool of threads that were kept would have to be owned by somebody, and calls that wait for calls of the same pool
would deadlock. Starting a thread costs tens of microseconds; what is worth running at once costs milliseconds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from anabranch.autodiff.surroundings import Surroundings

__all__ = ["run_at_once"]

_Result = TypeVar("_Result")


def run_at_once(
    calls: Sequence[Callable[[], _Result]], *, max_workers: int | None, describe: Callable[[int], str]
) -> list[_Result]:
    """The calls' results, in order; the calling thread runs its share.

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

    surroundings = Surroundings.here()

    def work_elsewhere() -> None:
        try:
            with surroundings.entered():
                work()
        except BaseException as error:  # noqa: BLE001  # the modes could not be entered; raised below
            errors.append(error)

    width = len(calls) if max_workers is None else min(max_workers, len(calls))
    threads = [threading.Thread(target=work_elsewhere, name=f"anabranch-call-{n}") for n in range(1, width)]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        work()
    except BaseException as error:  # noqa: BLE001  # interrupted, or no thread could be started; raised below
        errors.append(error)
    finally:
        for thread in started:
            while thread.is_alive():
                thread.join(timeout=60.0)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # an error holds this frame, which must not hold it
    return cast("list[_Result]", results)
