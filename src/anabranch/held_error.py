"""Tracebacks of rank 0 without new information are kept off the screen of ``anabranch run``: ``hold_back_errors``.

Where the launcher shows rank 0's output it names a file. An uncaught error that only says that another rank was lost,
or Ctrl-C itself, goes there in place of stderr; the launcher adds it to the log, and shows it if nothing else explains
the end of the job. Every other error is shown as anywhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from types import TracebackType

from anabranch.errors import PeerLost

HELD_ERROR_VARIABLE = "ANABRANCH_HELD_ERROR"
"""Names the file."""


def hold_back_errors() -> None:
    """Set ``sys.excepthook``, if the launcher has named a file; the hook that was set writes the text."""
    path = os.environ.get(HELD_ERROR_VARIABLE)
    if not path:
        return
    written_by = sys.excepthook

    def write(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = io.StringIO()
        if _is_a_consequence(error):
            with contextlib.redirect_stderr(text):
                written_by(kind, error, trace)
            with contextlib.suppress(OSError):
                Path(path).write_text(text.getvalue())
                return
        written_by(kind, error, trace)

    sys.excepthook = write


def move_held_error(path: Path, log: Path) -> None:
    """Append the held error to ``log``, if there is one."""
    with contextlib.suppress(OSError):  # there is none, or the folder was removed
        text = path.read_bytes()
        path.unlink()
        with log.open("ab") as file:
            file.write(text)


def _is_a_consequence(error: BaseException) -> bool:
    of_a_rank = isinstance(error, PeerLost) and (error.peer or "").startswith("rank")
    return of_a_rank or isinstance(error, KeyboardInterrupt)
