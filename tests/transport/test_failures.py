"""Errors on the wire: each arrives with its type, as the answer to its own request."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.errors import (
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
    Unauthorized,
)
from anabranch.transport.failures import error_of, failure_of
from anabranch.transport.frame import FailureFrame

KINDS = (
    CheckpointError,
    DeadlineExceeded,
    NonFinite,
    NotFound,
    Overloaded,
    PeerLost,
    ProtocolError,
    RolledBack,
    SchemaError,
    Unauthorized,
)


def arrived(error: BaseException, sequence: int | None) -> tuple[FailureFrame, Exception]:
    """What the client decodes, and what it raises for it."""
    failure = msgspec.msgpack.decode(msgspec.msgpack.encode(failure_of(error, sequence)), type=FailureFrame)
    return failure, error_of(failure, peer="unix:shard", operation="rows.push", step=7, elapsed=1.5)


@pytest.mark.parametrize("sequence", [None, 0, 1, 2**40])
@pytest.mark.parametrize("lost", [0, 1, 52, 2**40])
def test_a_rollback_error_carries_its_request_and_the_loss(lost: int, sequence: int | None) -> None:
    failure, error = arrived(RolledBack("52 pushes are gone", lost=lost, peer="another"), sequence)
    assert failure.sequence == sequence
    assert isinstance(error, RolledBack)
    assert error.lost == lost
    assert (error.message, error.peer, error.operation, error.step) == (
        "52 pushes are gone",
        "unix:shard",
        "rows.push",
        7,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_arrives_with_its_type(kind: type[Exception]) -> None:
    failure, error = arrived(kind("why"), 3)
    assert type(error) is kind
    assert failure.sequence == 3
    assert str(error).startswith("why")
    where = str(error) if isinstance(error, BoundaryError) else " ".join(error.__notes__)
    assert "unix:shard" in where
    assert "rows.push" in where


def test_any_other_error_arrives_as_text() -> None:
    failure, error = arrived(ZeroDivisionError("1/0"), 3)
    assert isinstance(error, RemoteError)
    assert (error.remote_type, failure.sequence) == ("ZeroDivisionError", 3)
    assert "1/0" in str(error)
