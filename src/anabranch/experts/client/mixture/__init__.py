"""Mixtures of remote experts: a gate here, experts anywhere, and an answer from those that answer.

::

                     ┌─ the boundary ─────────────────────────────────────────────────────────────┐
    x ──> gate ──> scores ──> beam search over the directory ──> rows grouped by expert            │
    │                │                                                  │                         │
    │                │                     one call an expert, all at once, one deadline          │
    │                │                                                  │                         │
    │                └──> softmax over the responders ──> * ──> sum ────┼─────────────────────────┼─> y
    └─────────────────────── inputs of the calls ────────────┘                                     │
                     └────────────────────────────────────────────────────────────────────────────┘

An expert that does not answer is left out of the softmax, so the result is that of a mixture of the responders alone,
and so are its gradients. Rows left with too few experts, some of them lost with their process, ask the next best ones.
The experts asked depend on the gate's values, so all of that is behind one boundary: the tape and a captured graph see
one operation whose outputs have the form given by the experts' schema.

``gated_mixture.py`` has the gate and the boundary, and both mixtures extend it: ``remote_mixture.py`` and
``switch_mixture.py``. ``expert_caller.py`` calls the chosen experts; ``answers_by_row.py`` sorts their answers by row.
"""

__all__: list[str] = []
