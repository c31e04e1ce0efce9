"""The experts of a mixture: the best ones of a grid, their endpoints and schemas, and those avoided after failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anabranch.choices import listed
from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, NotFound, PeerLost, ProtocolError
from anabranch.experts import wire
from anabranch.experts.client.calls import ExpertCall
from anabranch.experts.directory import DirectoryLike, within
from anabranch.experts.wire import Schema
from anabranch.transport import Answer, Client, Request
from anabranch.transport.announcements import prefixes_of
from anabranch.transport.client import ModuleClient
from anabranch.transport.failures import printable

_log = logging.getLogger("anabranch.experts")

GONE = (PeerLost, NotFound)
"""Errors of an expert whose server has gone."""

_WITHDRAWN = "the directory no longer lists them"
_NAMED = 16
_PATIENCE = 2
_SHORTEST_BREAK = 0.5
_LONGEST_BREAK = 10.0

Phase = Literal["forward", "cut off", "backward", "form"]


class FailureBackoff:
    """Avoids experts that failed twice in a row: for half a second, or as long as the failure took, doubling to ten
    times as long, until they answer again.

    Failures of forwards, of backwards, and of stragglers that were cut off are counted apart: an expert that answers
    every forward may still owe every backward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Failures in a row, and the moment until which the expert is avoided.
        self._failures: dict[tuple[str, Phase], tuple[int, float]] = {}
        self._lock = threading.Lock()

    def failed(self, uid: str, phase: Phase = "forward", *, seconds: float = 0.0) -> None:
        """Count a failure of ``uid``: no answer, or an invalid one, after so many ``seconds``."""
        key = uid, phase
        with self._lock:
            failures, until = self._failures.get(key, (0, 0.0))
            if failures + 1 >= _PATIENCE or phase == "form":
                longest = max(_LONGEST_BREAK, 10 * seconds)
                pause = max(_SHORTEST_BREAK, seconds) * 2 ** max(failures + 1 - _PATIENCE, 0)
                until = self._clock() + min(pause, longest)
            self._failures[key] = failures + 1, until

    def answered(self, uid: str, phase: Phase = "forward") -> None:
        """Clear the failures of ``uid`` in ``phase``; a forward in time also those of a straggler."""
        with self._lock:
            cleared: tuple[Phase, ...] = (phase, "cut off", "form") if phase == "forward" else (phase,)
            for one in cleared:
                self._failures.pop((uid, one), None)

    def now(self) -> set[str]:
        """Return the uids that are avoided now."""
        with self._lock:
            now = self._clock()
            return {uid for (uid, _), (_, until) in self._failures.items() if until > now}


class ExpertFinder:
    """Looks experts up, and remembers their schemas, and the form that those of one mixture have in common.

    Attributes:
        directory: lists their endpoints.
        backoff: the experts that failed.
        form: the schema of most of the experts first called.
        misfits: why experts are left out because of their form; each has been named in a warning.
        answered: the experts that have answered a forward.
        gone: those of them whose server had gone when last called, or that the directory no longer lists.
    """

    def __init__(self, directory: DirectoryLike, module_client: ModuleClient) -> None:
        self.directory = directory
        self._module_client = module_client
        self.backoff = FailureBackoff()
        self.form: Schema | None = None
        self.misfits: dict[str, str] = {}
        self.answered: set[str] = set()
        self.gone: set[str] = set()
        self._active: dict[str, list[int]] = {}  # as the directory has last answered, and so:
        self._endpoints: dict[str, str] = {}
        self._asked_again_at: float | None = None  # while it does not answer
        self._schemas: dict[tuple[str, str], Schema] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertFinder:
        # A copied mixture has its own gate and calls the same experts.
        return self

    def __reduce__(self) -> tuple[type[ExpertFinder], tuple[DirectoryLike, ModuleClient]]:
        # Cached endpoints and schemas may be stale by then.
        return ExpertFinder, (self.directory, self._module_client)

    @property
    def client(self) -> Client:
        """The client that sends the requests."""
        return self._module_client.client

    def find(self, uids: Sequence[str], deadline: Deadline) -> dict[str, tuple[str, Schema]]:
        """Return the endpoint and schema of each of ``uids`` that can be reached; the others count as failed."""
        endpoints = self._ask("lookup", uids, self._endpoints, deadline)
        unknown = [uid for uid, endpoint in endpoints.items() if (uid, endpoint) not in self._schemas]
        requests = [Request(endpoints[uid], wire.INFO, uid, role="experts") for uid in unknown]
        # An expert that does not send its schema cannot be called; half of the time is left for the others.
        patience = deadline.sooner(max(deadline.remaining() / 2, 1e-3))
        for uid, outcome in zip(unknown, self.client.gather(requests, patience) if requests else (), strict=True):
            if not isinstance(outcome, Answer):
                self.backoff.failed(uid, seconds=getattr(outcome, "elapsed", None) or 0.0)
                continue
            try:
                self._schemas[uid, endpoints[uid]] = Schema.unpack(outcome.payload)
            except ProtocolError:
                self.backoff.failed(uid)
        return {
            uid: (endpoint, self._schemas[uid, endpoint])
            for uid, endpoint in endpoints.items()
            if (uid, endpoint) in self._schemas
        }

    def active(self, prefixes: Sequence[str], deadline: Deadline) -> dict[str, list[int]]:
        """Return the directory's indices below each of ``prefixes``; warn of experts withdrawn since they answered."""
        past = {one: set(self._active.get(one, ())) for one in prefixes}
        active = self._ask("active", prefixes, self._active, deadline)
        left = {(one, index) for one in prefixes for index in past[one].difference(active.get(one, ()))}
        if left:
            self._warn_gone({uid: _WITHDRAWN for uid in [*self.answered] if left.intersection(prefixes_of(uid))})
        return active

    def _ask(self, verb: str, names: Sequence[str], known: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        """Return the directory's answer, or while it gives none, of ``names`` the ``known`` ones: as last answered."""
        if self._asked_again_at is None or time.monotonic() >= self._asked_again_at:
            try:
                answer: dict[str, Any] = getattr(within(self.directory, deadline), verb)(names)
            except (PeerLost, DeadlineExceeded) as error:
                if known.keys().isdisjoint(names):
                    raise
                if self._asked_again_at is None:
                    text = "the directory does not answer (%s); the mixture goes on with the experts that it has listed"
                    _log.warning(text, printable(str(error)))
                self._asked_again_at = time.monotonic() + _LONGEST_BREAK
            else:
                self._asked_again_at = None
                for name in names:
                    known.pop(name, None)
                known.update(answer)
                return answer
        return {name: known[name] for name in names if name in known}

    def note_gone(self, calls: Iterable[ExpertCall]) -> None:
        """Note the outcomes of forwards; warn of experts that have gone, and of those that are back."""
        back = sorted(call.uid for call in calls if call.answered and call.uid in self.gone)
        self.answered |= {call.uid for call in calls if call.answered}
        self._warn_gone({call.uid: str(call.error) for call in calls if isinstance(call.error, GONE)})
        if back:
            _log.warning("experts are back: %s", listed(back, _NAMED))
            self.gone -= set(back)

    def _warn_gone(self, why: Mapping[str, str]) -> None:
        """Warn of the experts in ``why`` that have answered before, once until they are back."""
        lost = sorted(why.keys() & self.answered - self.gone)
        if lost:
            text = printable(why[lost[0]])
            _log.warning("experts have gone: %s (%s); the mixture goes on with the others", listed(lost, _NAMED), text)
            self.gone |= set(lost)

    def some_away(self, deadline: Deadline) -> bool:
        """Return True if an expert that has answered before has gone, was withdrawn, or is avoided."""
        answered = [*self.answered]  # a copy: other threads' forwards change it
        if self.gone or self.backoff.now().intersection(answered):
            return True
        there = self._ask("lookup", answered, self._endpoints, deadline)
        self._warn_gone(dict.fromkeys(set(answered).difference(there), _WITHDRAWN))
        return bool(self.gone)

    def retry_gone(self) -> None:
        """Avoid those no longer that have gone: one of them may be back."""
        for uid in [*self.gone]:  # a copy: other threads' forwards change it
            self.backoff.answered(uid)

    def forget(self, uids: Iterable[str]) -> None:
        """Forget their schemas, so that they are requested again."""
        gone = set(uids)
        self._schemas = {key: schema for key, schema in [*self._schemas.items()] if key[0] not in gone}


# --- beam search: the best experts of a grid for each row, dimension by dimension among the announced ones
#
# An expert's score is the sum of its coordinates' scores, so the best ones have prefixes among the best prefixes:
# keeping k prefixes per dimension finds the k best experts of a full grid. The directory is asked once per dimension,
# for all rows together.


@dataclass(frozen=True, slots=True)
class Choices:
    """The experts chosen for each row.

    Attributes:
        uids: the chosen experts, each once.
        slots: of shape (rows, k): an index into ``uids``, best first; -1 where there are fewer than k.
        coordinates: of shape (rows, k, dimensions): the indices in the experts' uids; 0 where ``slots`` is -1.
    """

    uids: list[str]
    slots: NDArray[np.int64]
    coordinates: NDArray[np.int64]

    def with_rows_of(self, other: Choices, which: NDArray[np.bool_]) -> Choices:
        """Return these choices with those of ``other`` for the rows that are true in ``which``."""
        place = {uid: slot for slot, uid in enumerate(dict.fromkeys([*self.uids, *other.uids]))}
        translated = np.array([*(place[uid] for uid in other.uids), -1])[other.slots]
        slots = np.where(which[:, None], translated, self.slots)
        return Choices([*place], slots, np.where(which[:, None, None], other.coordinates, self.coordinates))


def beam_search(
    active: Callable[[Sequence[str]], Mapping[str, Sequence[int]]],
    uid_prefix: str,
    scores: Sequence[NDArray[np.float64]],
    k: int,
    avoid: Collection[str] = (),
) -> Choices:
    """Return the ``k`` best experts for each row.

    >>> from anabranch.experts import Directory
    >>> directory = Directory()
    >>> directory.announce(["ffn.0.0", "ffn.0.1", "ffn.1.1"], "unix:/run/experts", ttl=30.0)
    >>> found = beam_search(directory.active, "ffn", [np.array([[0.0, 1.0]]), np.array([[5.0, 0.0]])], k=2)
    >>> [found.uids[slot] for slot in found.slots[0]]
    ['ffn.0.0', 'ffn.1.1']

    Args:
        active: of a directory: finds the announced experts.
        uid_prefix: of all uids.
        scores: for each dimension of the grid, of shape (rows, size of the dimension).
        k: experts a row.
        avoid: uids not to choose.
    """
    rows = len(scores[0])
    prefixes = [uid_prefix]
    # Of each row's beams: the prefix, the score so far (-inf where there is none), the indices so far.
    beam_RK = np.zeros((rows, 1), dtype=np.int64)
    score_RK = np.zeros((rows, 1))
    coordinates_RKD = np.zeros((rows, 1, 0), dtype=np.int64)
    for dimension, grid_RG in enumerate(scores):
        size = grid_RG.shape[1]
        last = dimension == len(scores) - 1
        # Each avoided expert may rule out one prefix that is better than those of the experts to be found.
        width = k if last else k + len(avoid)
        known_PG = _known(active(prefixes), prefixes, size, avoid if last else ())
        candidate_RKG = np.where(known_PG[beam_RK], score_RK[:, :, None] + grid_RG[:, None, :], -np.inf)
        flat = candidate_RKG.reshape(rows, beam_RK.shape[1] * size)
        if last:
            flat = np.pad(flat, ((0, 0), (0, max(k - flat.shape[1], 0))), constant_values=-np.inf)
        best = np.argsort(-flat, axis=1, kind="stable")[:, :width]
        score_RK = np.take_along_axis(flat, best, axis=1)
        there = np.isfinite(score_RK)
        parent, index = np.divmod(np.where(there, best, 0), size)
        coordinates_RKD = np.concatenate(
            [np.take_along_axis(coordinates_RKD, parent[:, :, None], axis=1), index[:, :, None]], axis=2
        )
        keys = np.take_along_axis(beam_RK, parent, axis=1) * size + index
        distinct, inverse = np.unique(keys[there], return_inverse=True)
        prefixes = [f"{prefixes[key // size]}.{key % size}" for key in distinct.tolist()]
        beam_RK = np.zeros_like(keys)
        beam_RK[there] = inverse
        if not prefixes:
            break
    if not prefixes:
        shape = (rows, k)
        return Choices([], np.full(shape, -1), np.zeros((*shape, len(scores)), dtype=np.int64))
    return Choices(prefixes, np.where(np.isfinite(score_RK), beam_RK, -1), coordinates_RKD)


def _known(
    active: Mapping[str, Sequence[int]], prefixes: Sequence[str], size: int, avoid: Collection[str]
) -> NDArray[np.bool_]:
    known = np.zeros((len(prefixes), size), dtype=np.bool_)
    for position, prefix in enumerate(prefixes):
        known[position, [index for index in active.get(prefix, ()) if index < size]] = True
    positions = {prefix: position for position, prefix in enumerate(prefixes)}
    for uid in avoid:
        prefix, _, last = uid.rpartition(".")
        if prefix in positions and int(last) < size:
            known[positions[prefix], int(last)] = False
    return known
