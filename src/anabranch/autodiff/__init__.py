"""Gradients you can act on the moment they are final.

Not a tape and no engine: torch's records and sweeps; this package says when. Open ``grad_manager.py`` first; every
hook that the package sets on tensors is in ``hooks.py``, which sessions see one another is in ``sessions.py``.
"""

from anabranch.autodiff.grad_manager import GradManager, GradManagerGroup
from anabranch.autodiff.hooks import record_outputs

__all__ = ["GradManager", "GradManagerGroup", "record_outputs"]
