"""Words for people, of the names in spans."""

from __future__ import annotations

import re

ACTIVITIES = {
    "load": "is fetching a batch from its loader",
    "capture": "is capturing a graph, once for each kind of batch",
    "compile": "is compiling kernels of tables, once on this machine",
}
"""Work of a worker that may delay a step for long, by the name of its span, as the rest of a sentence."""

_RECEIVING = re.compile(r"R([FB])\d+\.(\d+)<\d+$")
_OPERATIONS = {"life": "its first answer", "norm": "norm of the gradients", "release": "update"}


def on_one_line(text: str) -> str:
    """Return ``text`` without control characters that move the cursor: names come from scripts and other machines."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def in_words(operation: str) -> str:
    """Return an operation as people say it: those of stages and servers are short for messages.

    >>> in_words("pipeline step RB0.3<1"), in_words("life"), in_words("pull")
    ('pipeline step: gradients of microbatch 3', 'its first answer', 'pull')
    """
    what = _RECEIVING.search(operation)
    if what is None:
        return _OPERATIONS.get(operation, operation)
    words = f"{'gradients' if what[1] == 'B' else 'activations'} of microbatch {what[2]}"
    before = operation[: what.start()].strip()
    return f"{before}: {words}" if before else words
