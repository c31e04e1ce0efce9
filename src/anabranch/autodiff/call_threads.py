"""Calls that run at once: threads that one function call starts and joins, so that none outlives it.

A pool of threads that were kept would have to be owned by somebody, and calls that wait for calls of the same pool
would deadlock. Starting a thread costs tens of microseconds; what is worth running at once costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
    """Return the calls' results, in order.

    Args:
        calls: run with the calling thread's modes.
        max_workers: the most to run at once; all by default.
        describe: what to note on an error of the call of that index.

    Raises:
        BaseException: the first that a call raised, once no call is running any more; calls not yet begun are not.
    """
    modes, streams, answers = ThreadModes.take(), current_streams(), current_answers()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    results: list[_Result | None] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        saving = saved_tensors_hooks(*hooks) if hooks else nullcontext()
        try:
            with modes.entered(), on_streams(streams), replay_from(answers), saving:
                if not errors:
                    results[index] = calls[index]()
        except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
            error.add_note(describe(index))
            errors.append(error)

    with ThreadPoolExecutor(max(1, min(max_workers or len(calls), len(calls))), "anabranch-call") as pool:
        try:
            wait([pool.submit(run, index) for index in range(len(calls))])
        except BaseException as error:  # noqa: BLE001 - an interrupt, or no thread could be started; raised below
            errors.append(error)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # an error holds this frame, which must not hold it
    return cast("list[_Result]", results)
