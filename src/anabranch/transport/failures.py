"""Errors on the wire: those that keep their type at the client, and the form of the others.

A caller's mistake arrives as the ``ValueError`` that it would be locally, a full or failing disk at the server as a
``CheckpointError``; any other remote error is a ``RemoteError`` with its type and traceback as a string.
"""

from __future__ import annotations

import logging
import threading
import traceback

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
)
from anabranch.record.spans import mark
from anabranch.transport.frame import FailureFrame

_log = logging.getLogger("anabranch.transport")

_MISTAKES: dict[str, type[ValueError | CheckpointError]] = {
    "activations_gone": ActivationsGone,  # before their base classes
    "another_schema": AnotherSchema,
    "session_gone": SessionGone,
    "not_found": NotFound,
    "schema": SchemaError,
    "non_finite": NonFinite,
    "disk": CheckpointError,
}
_REFUSALS: dict[str, type[BoundaryError]] = {
    "deadline": DeadlineExceeded,
    "overloaded": Overloaded,
    "unauthorized": Unauthorized,
    "protocol": ProtocolError,
    "leaving": PeerLost,
}
_LONGEST_TEXT = 6_000


def failure_of(error: BaseException, sequence: int | None = None) -> FailureFrame:
    """Return what to send for ``error``, as the answer to the request of that ``sequence``.

    >>> failure_of(NotFound("no expert 'ffn.9'")).code
    'not_found'
    >>> failure_of(ZeroDivisionError("1/0")).remote_type
    'ZeroDivisionError'
    """
    for code, mistake in _MISTAKES.items():
        if isinstance(error, mistake):
            return FailureFrame(code, _shorten(str(error)), sequence=sequence)
    for code, refusal in _REFUSALS.items():
        if type(error) is refusal:
            return FailureFrame(code, _shorten(error.message), sequence=sequence)
    if isinstance(error, RolledBack):
        return FailureFrame("rolled_back", _shorten(error.message), str(error.lost), sequence=sequence)
    if isinstance(error, RemoteError):
        return FailureFrame(
            "remote", _shorten(error.message), error.remote_type, _shorten(error.remote_traceback), sequence
        )
    text = "".join(traceback.format_exception(error))
    return FailureFrame("remote", _shorten(f"{_name_of(error)}: {error}"), _name_of(error), _shorten(text), sequence)


def error_of(failure: FailureFrame, *, peer: str, operation: str, step: int | None, elapsed: float) -> Exception:
    """Return the error to raise for ``failure``, naming the peer; a caller's mistake keeps its type and gets a note
    with the peer.
    """
    message = printable(failure.message)
    mistake = _MISTAKES.get(failure.code)
    if mistake is not None:
        error = mistake(message)
        error.add_note(f"refused by {peer}, operation {operation}")
        return error
    refusal = _REFUSALS.get(failure.code)
    if refusal is not None:
        return refusal(message, peer=peer, operation=operation, step=step, elapsed=elapsed)
    if failure.code == "rolled_back":
        lost = int(failure.remote_type) if failure.remote_type.isdigit() else 0
        return RolledBack(message, lost=lost, peer=peer, operation=operation, step=step, elapsed=elapsed)
    return RemoteError(
        message,
        remote_type=printable(failure.remote_type),
        remote_traceback=printable(failure.remote_traceback),
        peer=peer,
        operation=operation,
        step=step,
        elapsed=elapsed,
    )


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
