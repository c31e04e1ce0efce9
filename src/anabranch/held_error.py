"""The uncaught error that ends a process of a job: recorded for the launcher, and kept off its screen where it is old
news.

The record (``record/process.py``) has its type, message and time, and the process whose loss it reports: so nothing
reads tracebacks. Where the launcher shows rank 0's output it names a file. An error that only says that another rank
was lost, or Ctrl-C itself, goes there in place of stderr; the launcher adds it to the log, and shows it if nothing else
explains the end of the job. Every other error is shown as anywhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from anabranch.errors import PeerLost
from anabranch.record.process import STATUS_VARIABLE, process_record, read_regular

HELD_ERROR_VARIABLE = "ANABRANCH_HELD_ERROR"
"""Names the file."""


def hold_back_errors() -> None:
    """Set ``sys.excepthook`` in a process of a job; the hook that was set writes the text."""
    if not os.environ.get(STATUS_VARIABLE) and not os.environ.get(HELD_ERROR_VARIABLE):
        return
    path = os.environ.get(HELD_ERROR_VARIABLE)
    written_by = sys.excepthook

    def write(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _record(error)
        text = io.StringIO()
        if path and _is_a_consequence(error):
            with contextlib.redirect_stderr(text):
                written_by(kind, error, trace)
            with contextlib.suppress(OSError):
                Path(path).write_text(text.getvalue())
                return
        written_by(kind, error, trace)

    sys.excepthook = write


def move_held_error(path: Path, log: Path) -> None:
    """Append the held error to ``log``, if there is one."""
    with contextlib.suppress(OSError):  # there is none, or the folder was removed; opening a FIFO must not wait
        text = read_regular(path)
        path.unlink()
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK), "ab") as file:
            file.write(text)


def _record(error: BaseException) -> None:
    record = process_record()
    if record is not None:
        loss = next((each for each in _causes(error) if isinstance(each, PeerLost)), None)
        facts = {
            "type": type(error).__name__,
            "message": str(error),
            "at": time.time(),
            "lost": None if loss is None else loss.peer,
            "is_loss": loss is not None,
        }
        record.put(error=lambda: facts)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and those that led to it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _is_a_consequence(error: BaseException) -> bool:
    of_a_rank = isinstance(error, PeerLost) and (error.peer or "").startswith("rank")
    return of_a_rank or isinstance(error, KeyboardInterrupt)
