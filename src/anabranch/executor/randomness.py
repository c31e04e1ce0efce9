"""The process's random number generators as one value: to detect draws and to restore them.

There is one generator each of torch (CPU), Python and NumPy for the whole process, shared by all of its threads.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, object]:
    """Return the states of all of them, as values for a checkpoint."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.array(keys, dtype=np.int64)), int(position), int(has_gauss), float(gauss)],
    }
    # Asking for them earlier would start CUDA in a process that may never use it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_random_state(state: dict[str, object]) -> None:
    """Restore the generators to ``state``; those of GPUs only if their number is the same."""
    torch.set_rng_state(cast(Tensor, state["torch"]))
    random.setstate(cast("tuple[object, ...]", state["python"]))
    kind, keys, position, has_gauss, gauss = cast("list[object]", state["numpy"])
    np.random.set_state((kind, cast(Tensor, keys).numpy().astype(np.uint32), position, has_gauss, gauss))  # type: ignore[arg-type]
    cuda = cast("list[Tensor]", state.get("cuda", []))
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)


class RandomMoment:
    """The generators' states at one moment after the other.

    NumPy's is only read if its numbers in memory have changed, as few steps draw any: reading makes many objects.

    >>> moment = RandomMoment()
    >>> moment.remember()
    >>> drawn = random.random(), np.random.standard_normal(), torch.rand(()).item()
    >>> moment.go_back()
    >>> drawn == (random.random(), np.random.standard_normal(), torch.rand(()).item())
    True
    """

    def __init__(self) -> None:
        self._numpy: tuple[bytes, dict[str, Any]] = b"", {}
        self._generator: object = None
        self._numpy_words: ctypes.Array[ctypes.c_char] | None = None

    def remember(self) -> None:
        """Take this moment in place of the last."""
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:
            known = type(generator) is np.random.MT19937
            self._generator, self._numpy = generator, (b"", {})
            at = (ctypes.c_char * _WORDS_BYTES).from_address
            self._numpy_words = at(generator.ctypes.state_address) if known else None
        words = b"" if self._numpy_words is None else self._numpy_words.raw
        # A second normal number is drawn together with the first, and leaves no trace there when it is taken.
        if not words or words != self._numpy[0] or self._numpy[1]["has_gauss"]:
            self._numpy = words, np.random.get_state(legacy=False)

    def go_back(self) -> None:
        """Restore the generators to the moment."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy[1])


_WORDS_BYTES = 625 * 4  # the numbers of a Mersenne twister, and the place among them


def same_random_state(a: dict[str, object], b: dict[str, object]) -> bool:
    """Return True if nothing was drawn between the two."""
    return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
