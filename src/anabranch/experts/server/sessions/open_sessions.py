"""Sequences that callers continue step by step, each with a cache from its expert's module.

::

    step 0 ── room? ──> make_cache(rows, max_length) ──> forward(x, cache=cache) ──> answer, kept to be asked for again
    step n ── still here? next, or the last again? ────> forward(x, cache=cache) ──> answer, kept instead
                                                                             end, or ttl without a step: all is freed

Callers draw the ids and number the steps, so a request that the network repeats never advances a sequence twice. A step
that fails in the module may have changed the cache, so it ends its session. The reasons why the latest sessions ended
are kept, so that the next request is answered with the reason.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import Overloaded, SchemaError, SessionGone
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.server.sessions.step_tasks import bytes_held
from anabranch.experts.wire import StepHeader
from anabranch.periodic import periodic
from anabranch.record.spans import mark

__all__ = ["SessionLimits", "Sessions", "Step"]

# Ended sessions whose reasons are kept.
_MOST_REASONS = 4096
# Seconds between two checks for expired sessions while no request makes one.
_GLANCE = 1.0
# The moment at which a session expires whose step is being computed.
_WHILE_COMPUTED = float("inf")
_UNKNOWN = (
    "this server does not have the session: it has restarted since, or the session ended long ago; open another and "
    "start the sequence again"
)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The bounds of an expert server's sessions; beyond them callers get ``Overloaded``, or ``SchemaError`` for a
    session that could never fit.

    >>> SessionLimits(sessions=64).tokens
    1048576

    Attributes:
        sessions: open at the same time.
        tokens: positions that all open sessions may grow to together: rows times ``max_length``, set aside at the first
            step.
        nbytes: bytes of all caches and of the answers kept beside them, measured after each step. Beyond it no session
            opens, and no step is taken, until others have ended.
        ttl: the longest time to live that a caller may request, in seconds.

    Raises:
        ValueError: a bound that is not above 0.
    """

    sessions: int = 1024
    tokens: int = 1 << 20
    nbytes: int = 4 << 30
    ttl: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("sessions", "tokens", "nbytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is a whole number above 0, got {value!r}")
        if not 0 < self.ttl < float("inf"):
            raise ValueError(f"ttl is a finite number of seconds above 0, got {self.ttl!r}")


class Step(msgspec.Struct, frozen=True, eq=False):
    """One step that a caller requests.

    Attributes:
        header: the session's id, the step's number, the session's bounds.
        rows: of the inputs.
        length: positions by which the sequences grow.
        checksum: of the inputs as received.
    """

    header: StepHeader
    rows: int
    length: int = 0
    checksum: int = 0


class _Session(msgspec.Struct, eq=False):
    """The sequences of one session.

    Attributes:
        backend: their expert.
        rows: the number of sequences.
        max_length: positions that they may grow to.
        ttl: seconds without a step after which they are freed.
        expires: the moment at which they are.
        cache: from the module.
        length: positions so far.
        steps: the number of steps taken.
        checksum: of the last step's inputs.
        answer: of the last step.
        nbytes: of the cache and the answer.
    """

    backend: ExpertBackend
    rows: int
    max_length: int
    ttl: float
    expires: float
    cache: object = None
    length: int = 0
    steps: int = 0
    checksum: int = 0
    answer: Sequence[Tensor | None] = ()
    nbytes: int = 0


class Sessions:
    """The open sessions of one server; they expire while the ``with`` block runs, and leaving it ends them all.

    Args:
        limits: their bounds.
        clock: seconds for their times to live.
    """

    def __init__(self, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.nbytes = 0
        """Bytes of all caches, and of the answers kept beside them."""
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, _Session] = {}
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        self._tokens = 0
        # A lower bound of all expiries, not the exact minimum, because every step extends one.
        self._sweep_at = float("inf")
        self._sweeper = ExitStack()

    def __len__(self) -> int:
        return len(self._open)

    def __enter__(self) -> Sessions:
        self._sweeper.enter_context(periodic(self._sweep_now, _GLANCE, name="anabranch-sessions"))
        return self

    def __exit__(self, *_: object) -> None:
        self._sweeper.close()
        with self._lock:
            for key in list(self._open):
                self._drop(key, "the session's server was stopped")

    # --- on the thread that reads

    def find(self, header: StepHeader, backend: ExpertBackend) -> None:
        """Raise ``SessionGone`` if the session of a step has ended."""
        with self._lock:
            self._find(header, backend)

    def check(self, step: Step, backend: ExpertBackend) -> None:
        """Refuse a step that cannot be taken now.

        Raises:
            SessionGone: the session has ended.
            SchemaError: it is not the next step, does not fit its session, or can never fit these limits.
            Overloaded: there is no room.
        """
        with self._lock:
            session = self._find(step.header, backend)
            if session is None:
                self._check_room(step)
            else:
                self._check_step(session, step)

    def hold(self, key: bytes, deadline: Deadline) -> None:
        """Keep a session alive while its step waits for the device, even longer than its ttl."""
        with self._lock:
            session = self._open.get(key)
            if session is not None and session.expires != _WHILE_COMPUTED:
                self._renew(session, max(session.ttl, min(deadline.remaining(), self._limits.ttl)))

    def end(self, key: bytes, reason: str) -> None:
        """Free a session; later requests for it are answered with ``reason``, even if it never existed."""
        with self._lock:
            self._drop(key, reason)

    # --- on the device's thread

    def take(self, step: Step, backend: ExpertBackend, inputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Take a step, or return the last one's answer again if it is retried.

        Raises:
            SessionGone, SchemaError, Overloaded: as ``check``.
            Exception: from the module; the session has ended.
        """
        key = step.header.session
        with self._lock:
            session = self._find(step.header, backend)
            if session is not None:
                self._check_step(session, step)
                if step.header.number < session.steps:
                    return session.answer
                session.expires = _WHILE_COMPUTED
        if session is None:
            session = self._begin(step, backend)
        try:
            answer = backend.step(session.cache, *inputs)
            held = bytes_held(session.cache, answer)
        except BaseException as error:
            self.end(key, f"step {step.header.number} failed in the module of {backend.uid}: {_name_of(error)}")
            raise
        with self._lock:
            if self._open.get(key) is not session:
                raise SessionGone(self._reasons.get(key, _UNKNOWN))
            session.length += step.length
            session.steps += 1
            session.checksum, session.answer = step.checksum, answer
            self._count_bytes(session, held)
            self._renew(session, session.ttl)
        return answer

    def _begin(self, step: Step, backend: ExpertBackend) -> _Session:
        header = step.header
        with self._lock:
            self._check_room(step)
            session = _Session(backend, step.rows, header.max_length, header.ttl, _WHILE_COMPUTED)
            self._open[header.session] = session
            self._tokens += session.rows * session.max_length
            backend.open_sessions += 1
        try:
            session.cache = backend.make_cache(step.rows, header.max_length)
            held = bytes_held(session.cache)
        except BaseException as error:
            self.end(header.session, f"{backend.uid} could not make a cache: {_name_of(error)}")
            raise
        with self._lock:
            self._count_bytes(session, held)
            if self.nbytes > self._limits.nbytes:
                # Without a reason, because nothing was done: a retry may find room later.
                self._drop(header.session)
                if held > self._limits.nbytes:
                    raise SchemaError(
                        f"{backend.uid}: a cache of {held} bytes never fits into the {self._limits.nbytes} of all "
                        "sessions here; open a session of fewer rows or positions, or raise the server's bound"
                    )
                raise Overloaded(
                    f"{backend.uid}: a cache of {held} bytes more exceeds {self._limits.nbytes} bytes for sessions; "
                    f"{len(self._open)} are open"
                )
        mark("experts.session_opened", uid=backend.uid, rows=step.rows, max_length=header.max_length)
        return session

    # --- with the lock held

    def _find(self, header: StepHeader, backend: ExpertBackend) -> _Session | None:
        """Return the session of a step; ``None`` if it is to be opened."""
        self._sweep()
        key, number = header.session, header.number
        session = self._open.get(key)
        if session is not None and session.backend is backend:
            return session
        if number == 0 and session is None and key not in self._reasons:
            return None
        raise SessionGone(self._reasons.get(key, _UNKNOWN))

    def _check_step(self, session: _Session, step: Step) -> None:
        number, uid = step.header.number, session.backend.uid
        if step.rows != session.rows:
            raise SchemaError(f"{uid}: the session has {session.rows} rows, step {number} brings {step.rows}")
        if number == session.steps - 1:
            # Before its body has arrived, a step's inputs are not known.
            if step.length and step.checksum != session.checksum:
                raise SchemaError(
                    f"{uid}: step {number} was already taken, with other inputs; its answer may have been lost: send "
                    "it with the same inputs again, or open another session"
                )
            return
        if number != session.steps:
            raise SchemaError(f"{uid}: received step {number}, but the session expects step {session.steps}")
        if session.length + step.length > session.max_length:
            raise SchemaError(
                f"{uid}: {session.length} positions and {step.length} more exceed the session's max_length, "
                f"{session.max_length}"
            )
        if session.nbytes > self._limits.nbytes:
            raise SchemaError(
                f"{uid}: this session alone holds {session.nbytes} bytes, over the {self._limits.nbytes} of all "
                "sessions here, and cannot continue; open one with fewer rows or positions, or raise the server's bound"
            )
        if self.nbytes > self._limits.nbytes:
            raise Overloaded(
                f"{uid}: {len(self._open)} sessions hold {self.nbytes} bytes, over {self._limits.nbytes}; the same "
                "step can be sent again once others have ended"
            )

    def _check_room(self, step: Step) -> None:
        limits, header = self._limits, step.header
        if header.ttl > limits.ttl:
            raise SchemaError(f"this server keeps an idle session for at most {limits.ttl:g} s, got ttl={header.ttl:g}")
        wanted = step.rows * header.max_length
        if wanted > limits.tokens:
            raise SchemaError(
                f"a session of {step.rows} rows of max_length {header.max_length} reserves {wanted} tokens, over "
                f"the {limits.tokens} of all sessions here; open one of fewer rows or positions, or raise the server's "
                "bound"
            )
        if len(self._open) >= limits.sessions or self._tokens + wanted > limits.tokens or self.nbytes >= limits.nbytes:
            raise Overloaded(
                f"{len(self._open)} sessions are open, with {self._tokens} tokens reserved and {self.nbytes} bytes; "
                f"one more of {wanted} tokens exceeds {limits.sessions} sessions, {limits.tokens} tokens or "
                f"{limits.nbytes} bytes"
            )

    def _count_bytes(self, session: _Session, held: int) -> None:
        self.nbytes += held - session.nbytes
        session.nbytes = held

    def _renew(self, session: _Session, seconds: float) -> None:
        session.expires = self._clock() + seconds
        self._sweep_at = min(self._sweep_at, session.expires)

    def _drop(self, key: bytes, reason: str | None = None) -> None:
        session = self._open.pop(key, None)
        if session is not None:
            self._tokens -= session.rows * session.max_length
            self.nbytes -= session.nbytes
            session.backend.open_sessions -= 1
        if reason is not None and key not in self._reasons:
            self._reasons[key] = reason
            if len(self._reasons) > _MOST_REASONS:
                self._reasons.popitem(last=False)

    def _sweep(self) -> None:
        """Free the expired sessions."""
        now = self._clock()
        if now < self._sweep_at:
            return
        for key, session in [item for item in self._open.items() if item[1].expires <= now]:
            mark("experts.session_expired", uid=session.backend.uid, steps=session.steps)
            self._drop(
                key,
                f"the session had no step for {session.ttl:g} s, its time to live, and was freed; open another, with a "
                "longer ttl",
            )
        self._sweep_at = min((session.expires for session in self._open.values()), default=float("inf"))

    def _sweep_now(self) -> None:
        with self._lock:
            self._sweep()


def _name_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
