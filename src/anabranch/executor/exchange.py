"""Exchange of plain values, and of nested structures with tensors, between the workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from anabranch.checkpoint.state import decode, encode
from anabranch.collectives import Workers
from anabranch.errors import BoundaryError
from anabranch.tensors.dtypes import as_bytes, dtype_name, dtype_named

_PIECE_BYTES = 16 << 20  # of a state on its way
_T = TypeVar("_T")


def exchange(workers: Workers | None, value: object, kind: type[_T], operation: str) -> list[_T]:
    """Return the plain ``value`` of each worker, in the order of ranks."""
    if workers is None:
        return [cast(_T, value)]
    texts = workers.all_gather_bytes(msgspec.json.encode(value), operation=operation)
    return [msgspec.json.decode(text, type=kind) for text in texts]


def together(
    workers: Workers | None, act: Callable[[], _T], failed: str, operation: str, *kinds: type[Exception]
) -> _T:
    """Return ``act()`` if it succeeds on all workers; otherwise raise its error, or one that names the worker.

    Args:
        workers: all of which call this; ``None`` alone.
        act: changes nothing that the others would have to know of.
        failed: what the worker did not do, for the error.
        operation: for errors of the exchange.
        kinds: classes of errors, of whose first the others' is, or of another if all failures are of that.
    """
    if workers is None:
        return act()
    error, mine = None, None
    try:
        result = act()
    except Exception as caught:  # noqa: BLE001 - raised below: a server may be lost, the user's object may fail
        number = next((at for at, kind in enumerate(kinds[1:], 1) if isinstance(caught, kind)), 0)
        text = str(caught) if isinstance(caught, kinds[0]) else f"{type(caught).__name__}: {caught}"
        error, mine = caught, (number, text)
    answers = exchange(workers, mine, tuple[int, str] | None, operation)  # type: ignore[arg-type]
    failures = [(answer[0], rank, answer[1]) for rank, answer in enumerate(answers) if answer is not None]
    if not failures:
        return result
    number, rank, text = min(failures)
    if error is not None and mine is not None and mine[0] == number:
        raise error
    raise kinds[number](f"rank {rank} {failed}: {text}")


def _described(structure: object) -> tuple[bytes, list[Tensor]]:
    """Return a nested structure as text, with the forms of its tensors, and these."""
    tensors: list[Tensor] = []
    encoded = encode(structure, tensors)
    return msgspec.json.encode([encoded, [(dtype_name(one.dtype), list(one.shape)) for one in tensors]]), tensors


def _blank(head: bytes, device: str) -> tuple[object, list[Tensor]]:
    """Return the structure of such a text, and its tensors, to be filled."""
    encoded, forms = msgspec.json.decode(head, type=tuple[Any, list[tuple[str, list[int]]]])
    return encoded, [torch.empty(shape, dtype=dtype_named(name), device=device) for name, shape in forms]


def pack(structure: object) -> bytes:
    """Return a nested structure with tensors as bytes, for ``unpack``."""
    head, tensors = _described(structure)
    memory = [as_bytes(one.detach().cpu().contiguous()).numpy().tobytes() for one in tensors]
    return b"".join([len(head).to_bytes(8, "little"), head, *memory])


def unpack(data: bytes) -> Any:
    """Return the structure that ``pack`` was given, its tensors on the CPU."""
    start = 8 + int.from_bytes(data[:8], "little")
    encoded, tensors = _blank(data[8:start], "cpu")
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)[start:]
    for tensor, part in zip(tensors, torch.split(memory, [one.nbytes for one in tensors]), strict=True):
        as_bytes(tensor).copy_(part)
    return decode(encoded, tensors)


@torch.inference_mode(False)
def send_state(workers: Workers, state: object, source: int, *, takes: bool) -> Any:
    """Return the ``state`` of rank ``source`` to those that take it; all call it, and hold a piece of it beside it."""
    sends = workers.rank == source
    head, tensors = _described(state) if sends else (b"", [])
    head = workers.broadcast_bytes(head, source, operation="state")
    encoded: object = None
    if not sends:
        encoded, tensors = _blank(head, "cpu" if takes else "meta")
    digest = hashlib.blake2b(head)
    for tensor in (one for one in tensors if one.numel()):
        for part in torch.split(as_bytes(tensor.detach().contiguous()), _PIECE_BYTES):
            piece = part.cpu() if sends else torch.empty(len(part), dtype=torch.uint8, device="cpu")
            workers.broadcast([piece], source=source, operation="state")
            if sends or takes:
                digest.update(piece.numpy().data)
            if takes:
                part.copy_(piece)
    if workers.broadcast_bytes(digest.digest(), source, operation="state") != digest.digest() and takes:
        raise BoundaryError("the state of training has arrived otherwise than it was sent", operation="state")
    return decode(encoded, tensors) if takes else None
