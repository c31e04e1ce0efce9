"""Ctrl-C during an optimizer step: the step is made whole and counted, and then interrupted."""

from __future__ import annotations

import os
import signal
import threading

# Their wrappers in ``signal`` look for each handler in an enum, and fail: 5 us a call, of which a step makes four.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_of_program: Callable[[int, FrameType | None], object] | None = None  # its handler, while interrupts are held
_has_block = False
_came = False


@contextmanager
def releasing_interrupts() -> Iterator[None]:
    """Let an interrupt that was held in the block come at its end; outside of such a block none is held.

    A parameter that was changed by a step that nobody counts would be trained twice on one batch after a resume.
    """
    global _has_block
    if _has_block or threading.current_thread() is not threading.main_thread():  # where Python has signals
        yield
        return
    try:
        _has_block = True
        yield
    finally:
        _has_block = False
        _release()


def hold_interrupts() -> None:
    """Hold the first Ctrl-C from now on; a second one ends what may be waiting at once."""
    global _of_program
    if not _has_block or _of_program is not None or threading.current_thread() is not threading.main_thread():
        return
    handler = _get_handler(signal.SIGINT)
    if callable(handler) and handler is not _hold:  # not where the program ignores them
        _of_program = handler
        _set_handler(signal.SIGINT, _hold)


def _hold(number: int, frame: FrameType | None) -> None:
    global _came
    handler, again = _of_program, _came
    _came = handler is not None
    if handler is None:  # put back by somebody who had saved it, such as a debugger
        signal.default_int_handler(number, frame)
    elif again:
        _release()
        handler(number, frame)


def _release() -> None:
    global _of_program, _came
    handler = _of_program
    if handler is not None and _get_handler(signal.SIGINT) is _hold:
        _set_handler(signal.SIGINT, handler)
    came, _of_program, _came = _came, None, False
    if handler is not None and came:
        handler(signal.SIGINT, None)


os.register_at_fork(after_in_child=_release)
