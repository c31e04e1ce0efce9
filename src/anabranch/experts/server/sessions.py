"""Sequences that callers continue step by step, each with a cache from its expert's module.

::

    step 0 ── room? ──> make_cache(rows, max_length) ──> forward(x, cache=cache) ──> answer, kept to be asked for again
    step n ── still here? next, or the last again? ────> forward(x, cache=cache) ──> answer, kept instead
                                                                             end, or ttl without a step: all is freed

Callers draw the ids and number the steps, so a request that the network repeats never advances a sequence twice. A step
that fails in the module may have changed the cache, so it ends its session. The reasons why the latest sessions ended
are kept, so that the next request is answered with the reason.

All sessions share one budget of bytes. A session counts with the measured bytes of its cache and of the answer kept
beside it, at least 64 KiB, and while a step of it is computed with what the step may add.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

import msgspec
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import Overloaded, SchemaError, SessionGone
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.wire import StepHeader
from anabranch.record.spans import mark

LEAST_BYTES = 1 << 16
"""The least that a session counts with, for its record here and its module's own, which is not measured."""

# Seconds that a caller may ask to keep an idle session for.
_LONGEST_TTL = 3600.0
# Ended sessions whose reasons are kept.
_MOST_REASONS = 4096
# The moment at which a session expires whose step is being computed.
_WHILE_COMPUTED = float("inf")
_UNKNOWN = "this server does not have the session: it has restarted since, or that ended long ago; open another"


class Step(msgspec.Struct, frozen=True, eq=False):
    """One step that a caller requests.

    Attributes:
        header: the session's id, the step's number, the session's bounds.
        rows: of the inputs.
        length: positions by which the sequences grow.
        nbytes: of the inputs.
        checksum: of the inputs as received.
    """

    header: StepHeader
    rows: int
    length: int
    nbytes: int
    checksum: int


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
        measured: bytes of the cache and the answer.
        counted: bytes of the budget.
    """

    backend: ExpertBackend
    rows: int
    max_length: int
    ttl: float
    expires: float = _WHILE_COMPUTED
    cache: object = None
    length: int = 0
    steps: int = 0
    checksum: int = 0
    answer: Sequence[Tensor | None] = ()
    measured: int = 0
    counted: int = 0

    def with_step(self, step: Step) -> int:
        """Bytes to count with while ``step`` is computed: positions cost what those so far have cost."""
        grows = self.measured * step.length // self.length if self.length else 0
        return max(LEAST_BYTES, self.measured + step.nbytes + grows)


class Sessions:
    """The open sessions of one server.

    Args:
        budget: bytes that all may count together. Beyond it no session opens, and no step is taken, until others have
            ended.
        clock: seconds for their times to live.

    Raises:
        ValueError: a budget below that of one session.
    """

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < LEAST_BYTES:
            raise ValueError(f"session_bytes is a whole number of bytes, {LEAST_BYTES} or more, got {budget!r}")
        self.nbytes = 0
        """Bytes that the open sessions count."""
        self._budget = budget
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, _Session] = {}
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        # A lower bound of all expiries, not the exact minimum, because every step extends one.
        self._sweep_at = float("inf")

    def sweep(self) -> None:
        """Free the expired sessions; requests do so, too."""
        with self._lock:
            self._sweep()

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            for key in list(self._open):
                self._drop(key, "the session's server was stopped")

    # --- on the thread that reads

    def check(self, step: Step, backend: ExpertBackend, deadline: Deadline) -> None:
        """Refuse a step that cannot be taken now; keep its session while the step waits, even longer than its ttl.

        Raises:
            SessionGone: the session has ended.
            SchemaError: it is not the next step, does not fit its session, or can never fit the budget.
            Overloaded: there is no room.
        """
        with self._lock:
            session = self._find(step.header, backend)
            if session is None or not self._is_again(session, step):
                self._check_room(step, backend, session)
            if session is not None and session.expires != _WHILE_COMPUTED:
                self._renew(session, max(session.ttl, min(deadline.remaining(), _LONGEST_TTL)))

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
            if session is not None and self._is_again(session, step):
                return session.answer
            needs = self._check_room(step, backend, session)
            if session is None:
                session = self._open[key] = _Session(backend, step.rows, step.header.max_length, step.header.ttl)
                backend.open_sessions += 1
            session.expires = _WHILE_COMPUTED
            self._count(session, needs)
        try:
            if session.cache is None:
                session.cache = self._make_cache(session, step)
            answer = backend.step(session.cache, *inputs)
            measured = bytes_held(session.cache, answer)
        except BaseException as error:
            failed = f"step {step.header.number} failed in the module of {backend.uid}"
            if session.cache is None:
                failed = f"{backend.uid} could not make a cache"
            with self._lock:
                if self._open.get(key) is session:
                    self._drop(key, f"{failed}: {type(error).__name__}: {error}")
            raise
        with self._lock:
            if self._open.get(key) is not session:
                raise SessionGone(self._reasons.get(key, _UNKNOWN))
            session.length += step.length
            session.steps += 1
            session.checksum, session.answer, session.measured = step.checksum, answer, measured
            self._count(session, max(LEAST_BYTES, measured))
            self._renew(session, session.ttl)
        return answer

    def _make_cache(self, session: _Session, step: Step) -> object:
        """Return the module's cache; drop the session if it has no room, for which a retry may find some later."""
        cache = session.backend.make_cache(step.rows, session.max_length)
        session.measured = bytes_held(cache)
        with self._lock:
            try:
                self._count(session, self._check_room(step, session.backend, session))
            except (SchemaError, Overloaded):
                self._drop(step.header.session)
                raise
        return cache

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

    def _is_again(self, session: _Session, step: Step) -> bool:
        """Return True for the last step, asked for again, and False for the next one; refuse any other."""
        number, uid = step.header.number, session.backend.uid
        if step.rows != session.rows:
            raise SchemaError(f"{uid}: the session has {session.rows} rows, step {number} brings {step.rows}")
        if number == session.steps - 1:
            if step.checksum != session.checksum:
                says = "send it with the same inputs again, or open another session"
                raise SchemaError(f"{uid}: step {number} was already taken, with other inputs; {says}")
            return True
        if number != session.steps:
            raise SchemaError(f"{uid}: received step {number}, but the session expects step {session.steps}")
        return False

    def _check_room(self, step: Step, backend: ExpertBackend, session: _Session | None) -> int:
        """Return the bytes that the session counts with while ``step`` is computed; refuse a step without room."""
        length, most = (0, step.header.max_length) if session is None else (session.length, session.max_length)
        if length + step.length > most:
            says = f"{step.length} more exceed its max_length, {most}; open it with a larger one"
            raise SchemaError(f"{backend.uid}: the session has {length} positions; {says}")
        if not 0 < step.header.ttl <= _LONGEST_TTL:
            raise SchemaError(f"an idle session is kept for at most {_LONGEST_TTL:g} s, got ttl={step.header.ttl:g}")
        needs = max(LEAST_BYTES, step.nbytes) if session is None else session.with_step(step)
        others = self.nbytes - (0 if session is None else session.counted)
        if needs > self._budget:
            raise SchemaError(
                f"{backend.uid}: with this step the session alone needs {needs} bytes of the {self._budget} of all "
                "here; open one of fewer rows or positions, or raise the server's session_bytes"
            )
        if others + needs > self._budget:
            raise Overloaded(
                f"{backend.uid}: {len(self._open)} sessions are open and count {self.nbytes} bytes; {needs} for this "
                f"one exceed {self._budget}; the same step can be sent again once others have ended"
            )
        return needs

    def _count(self, session: _Session, counted: int) -> None:
        self.nbytes += counted - session.counted
        session.counted = counted

    def _renew(self, session: _Session, seconds: float) -> None:
        session.expires = self._clock() + seconds
        self._sweep_at = min(self._sweep_at, session.expires)

    def _drop(self, key: bytes, reason: str | None = None) -> None:
        session = self._open.pop(key, None)
        if session is not None:
            self.nbytes -= session.counted
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
            text = f"the session had no step for {session.ttl:g} s, its time to live, and was freed"
            self._drop(key, f"{text}; open another, with a longer ttl")
        self._sweep_at = min((session.expires for session in self._open.values()), default=float("inf"))


def bytes_held(*structures: object) -> int:
    """Return the bytes of the tensors in ``structures``: in containers and in attributes; shared memory counts once.

    >>> import dataclasses, torch
    >>> @dataclasses.dataclass(slots=True)
    ... class Layer:
    ...     keys: torch.Tensor
    ...     cache: object
    >>> class Cache:
    ...     def __init__(self, keys):
    ...         self.layers = Layer(keys[:2], self), Layer(keys[2:], nn.Linear(9, 9))
    >>> bytes_held({"blocks": [Cache(torch.zeros(4, 8))]}, None, 7, "text", torch.zeros(5))
    148
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = list(structures)
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif part is not None and id(part) not in seen:
            seen.add(id(part))
            waiting += _parts_of(part)
    return sum(storages.values())


def _parts_of(part: object) -> Iterator[object]:
    # A cache may refer to its module, which exists anyway.
    if isinstance(part, (str, bytes, int, float, type, ModuleType, nn.Module)):
        return
    if isinstance(part, (list, tuple, set, frozenset)):
        yield from part
    yield from (part if isinstance(part, Mapping) else {}).values()
    yield from getattr(part, "__dict__", {}).values()
    for kind in type(part).__mro__:
        for name in getattr(kind, "__slots__", ()):
            yield getattr(part, name, None)
