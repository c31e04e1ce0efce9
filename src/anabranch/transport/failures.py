"""Errors on the wire: those that keep their type at the client, and the form of the others.

A caller's mistake arrives as the ``ValueError`` that it would be locally, a full or failing disk at the server as a
``CheckpointError``; any other remote error is a ``RemoteError`` with its type and traceback as a string.
"""

from __future__ import annotations

import logging
import threading
import traceback
from typing import Unpack

from anabranch.errors import (
    ActivationsGone,
    AnotherSchema,
    BoundaryError,
    CheckpointError,
    DeadlineExceeded,
    NonFinite,
    NotFound,
    Overloaded,
    PeerLost,
    ProtocolError,
    RemoteError,
    RolledBack,
    SchemaError,
    SessionGone,
    Unauthorized,
    Where,
)
from anabranch.record.spans import mark
from anabranch.transport.frame import FailureFrame

_log = logging.getLogger("anabranch.transport")

_ERRORS: dict[str, type[ValueError | CheckpointError | BoundaryError]] = {
    "activations_gone": ActivationsGone,  # before their base classes
    "another_schema": AnotherSchema,
    "session_gone": SessionGone,
    "not_found": NotFound,
    "schema": SchemaError,
    "non_finite": NonFinite,
    "disk": CheckpointError,
    "deadline": DeadlineExceeded,
    "overloaded": Overloaded,
    "unauthorized": Unauthorized,
    "protocol": ProtocolError,
    "leaving": PeerLost,
    "rolled_back": RolledBack,
    "remote": RemoteError,
}
_LONGEST_TEXT = 6_000


def failure_of(error: BaseException, sequence: int | None = None) -> FailureFrame:
    """Return what to send for ``error``, as the answer to the request of that ``sequence``.

    >>> failure_of(NotFound("no expert 'ffn.9'")).code
    'not_found'
    >>> failure_of(ZeroDivisionError("1/0")).remote_type
    'ZeroDivisionError'
    """
    code = next((code for code, kind in _ERRORS.items() if isinstance(error, kind)), None)
    kind = trace = ""
    if code is None:
        code, kind, trace = "remote", _name_of(error), "".join(traceback.format_exception(error))
        message = f"{kind}: {error}"
    else:
        message = error.message if isinstance(error, BoundaryError) else str(error)
    if isinstance(error, RolledBack):
        kind = str(error.lost)
    elif isinstance(error, RemoteError):
        kind, trace = error.remote_type, error.remote_traceback
    return FailureFrame(code, _shorten(message), kind, _shorten(trace), sequence)


def error_of(failure: FailureFrame, **where: Unpack[Where]) -> Exception:
    """Return the error to raise for ``failure``, naming the peer; a caller's mistake keeps its type and gets a note
    with the peer.
    """
    kind, message = _ERRORS.get(failure.code, RemoteError), printable(failure.message)
    if issubclass(kind, RolledBack):
        lost = int(failure.remote_type) if failure.remote_type.isdigit() else 0
        return kind(message, lost=lost, **where)
    if issubclass(kind, RemoteError):
        remote_type, remote_traceback = printable(failure.remote_type), printable(failure.remote_traceback)
        return kind(message, remote_type=remote_type, remote_traceback=remote_traceback, **where)
    if issubclass(kind, BoundaryError):
        return kind(message, **where)
    error = kind(message)
    error.add_note(f"refused by {where.get('peer')}, operation {where.get('operation')}")
    return error


def printable(text: str) -> str:
    """Return text of another process with ``?`` for what would move the cursor or change colours, lines kept."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def ends_the_program(error: BaseException) -> bool:
    """Return True for a Ctrl-C or an exit in the main thread, which must propagate; elsewhere any exception is an
    answer.

    User code on a server's thread may raise a ``SystemExit``, a ``KeyboardInterrupt`` or a Rust panic: it would
    silently end only the thread, and callers would wait for it.
    """
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()


def note_failure(event: str, error: BaseException) -> None:
    """Log ``error`` with its traceback and report it as ``event``: its thread continues."""
    _log.error("%s: %s: %s", event, _name_of(error), error, exc_info=error)
    mark(event, error="".join(traceback.format_exception(error)))


def _name_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shorten(text: str) -> str:
    # Cut from the front: the end of a traceback names the error.
    return text if len(text) <= _LONGEST_TEXT else f"...{text[-_LONGEST_TEXT:]}"
