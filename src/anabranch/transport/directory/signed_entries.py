"""Announcements signed by the announcer and checked by the reader, because their store cannot check them.

::

    announcer   signs (space, uid, endpoint, issued, expires) with the key of its role ──> entry, with its certificate
    reader      the certificate: of the same authority, of the space's job, of a role that may announce the uid
                the signature: its own
                the time: not over, and not before that of an entry that it has seen already
                the owner: the certificate whose entry it has seen, until that one's time is over

An entry that fails is not trusted, and a warning says why. An earlier entry that has not expired stays valid.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.errors import ProtocolError, Unauthorized
from anabranch.record.spans import mark
from anabranch.transport.directory.rules import LONGEST_TTL, check_kind
from anabranch.transport.directory.signing import NotSigned, SignedEntry, Signer, SigningIdentity
from anabranch.transport.frame import unpack
from anabranch.transport.network.streams import Peer

__all__ = ["EntryReader"]

# Redis' clock, shared by all hosts, is trusted unless it differs by more than this from the reader's own.
_CLOCKS_APART = 300.0
# Entries and certificates kept before any is forgotten.
_FEW = 1024
_log = logging.getLogger("anabranch.transport")


@dataclass(frozen=True, slots=True)
class _Seen:
    raw: bytes
    owner: str
    issued: int
    expires: int
    endpoint: str


class _Refused(Exception):
    """An entry is not trusted; gives the reason."""


class EntryReader:
    """Reads signed entries, and remembers them, so that an older one is not replayed.

    Args:
        identity: ours, whose authority is trusted.
        check_endpoint: raises ``ValueError`` for an endpoint that must not be announced.
        clock: seconds since the epoch.
    """

    def __init__(
        self, identity: SigningIdentity, check_endpoint: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._identity = identity
        self._check_endpoint = check_endpoint
        self._clock = clock
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._signers: dict[bytes, Signer] = {}
        self._told: set[tuple[str, str]] = set()

    def endpoint_of(self, raw: bytes, uid: str, job: str, now: int) -> str | None:
        """Return the endpoint that the entry ``raw`` announces for ``uid``, if it is trusted.

        Args:
            raw: the entry as found in the space of ``job``.
            uid: the name under which it was found.
            job: one visible to us.
            now: milliseconds since the epoch, by the clock that all announcers share.
        """
        before = self._seen.get((job, uid))
        if before is not None and self._is_over(before.expires, now):
            before = None
        if before is not None and (before.raw == raw or before.issued > now):  # read before that one was announced
            return before.endpoint
        try:
            entry = self._read(raw, uid, job, now)
            _check_successor(entry, before, now)
        except _Refused as refused:
            self._warn(uid, str(refused))
            return None if before is None else before.endpoint
        self._seen[job, uid] = entry
        if len(self._seen) > 2 * _FEW:
            self._forget(now)
        return entry.endpoint

    def _read(self, raw: bytes, uid: str, job: str, now: int) -> _Seen:
        try:
            entry = unpack(raw, SignedEntry)
        except ProtocolError:
            raise _Refused("it is not a signed entry") from None
        try:
            signer = self._signer(entry.certificate)
            self._check_signer(signer, uid, job)
            signer.check(entry, uid, self._identity.space(job))
        except NotSigned as error:
            raise _Refused(str(error)) from None
        if not 0 < entry.expires - entry.issued <= LONGEST_TTL * 1000:
            raise _Refused("its time to live is longer than a day")
        if self._is_over(entry.expires, now):
            ago = max(now / 1000, self._clock()) - entry.expires / 1000
            raise _Refused(f"it expired {ago:.0f} s ago: it is a replayed old entry, or this host's clock is wrong")
        try:
            self._check_endpoint(entry.endpoint)
        except ValueError as error:
            raise _Refused(str(error)) from None
        return _Seen(raw, signer.owner, entry.issued, entry.expires, entry.endpoint)

    def _is_over(self, expires: int, now: int) -> bool:
        return expires <= now or expires / 1000 <= self._clock() - _CLOCKS_APART

    def _check_signer(self, signer: Signer, uid: str, job: str) -> None:
        if signer.job != job:
            raise _Refused(f"its certificate is for job {signer.job!r}")
        try:
            check_kind([uid], Peer("", role=signer.role))
        except Unauthorized as error:
            raise _Refused(error.message) from None
        if not signer.valid_from.timestamp() <= self._clock() <= signer.valid_until.timestamp():
            raise _Refused(f"its certificate is valid from {signer.valid_from} to {signer.valid_until} only")

    def _signer(self, der: bytes) -> Signer:
        found = self._signers.get(der)
        if found is None:
            if len(self._signers) >= _FEW:
                self._signers.clear()
            found = self._signers[der] = self._identity.signer_of(der)
        return found

    def _forget(self, now: int) -> None:
        self._seen = {key: seen for key, seen in list(self._seen.items()) if not self._is_over(seen.expires, now)}

    def _warn(self, uid: str, why: str) -> None:
        mark("directory.refused", uid=uid, why=why)
        kind = (uid, why.partition(":")[0].rstrip("0123456789 s"))
        if kind not in self._told and len(self._told) < _FEW:
            self._told.add(kind)
            _log.warning("the directory's entry of %s is not trusted: %s", uid, why)


def _check_successor(entry: _Seen, before: _Seen | None, now: int) -> None:
    """Refuse an entry that does not follow ``before``, which has not expired."""
    if before is None:
        return
    if entry.owner != before.owner:
        left = (before.expires - now) / 1000
        raise _Refused(f"another certificate announced it before and holds it for {left:.0f} s more")
    if entry.issued < before.issued:
        raise _Refused("a newer entry was here before: it is a replayed old entry")
