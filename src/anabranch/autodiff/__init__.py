"""Gradients you can act on the moment they are final, and many calls' gradients at once.

It is neither a tape nor an engine: torch's autograd records and runs backward; this package controls when. Open
``grad_manager.py`` first; every hook that the package sets on tensors or modules is in ``hooks.py``, which sessions see
one another is in ``grad_sessions.py``, what runs at once is in ``parallel.py``, and how an operation leaves the
process, on the tape and in a captured graph alike, in ``boundary``.
"""

from anabranch.autodiff.grad import Grad, get_grad_managers
from anabranch.autodiff.grad_manager import GradManager, GradManagerGroup
from anabranch.autodiff.grad_sessions import boundary_entry, boundary_exit
from anabranch.autodiff.hooks import Callback, record_outputs
from anabranch.autodiff.isolated import run_isolated_backward, run_isolated_forward
from anabranch.autodiff.parallel import map_with_parallel_backward

__all__ = [
    "Callback",
    "Grad",
    "GradManager",
    "GradManagerGroup",
    "boundary_entry",
    "boundary_exit",
    "get_grad_managers",
    "map_with_parallel_backward",
    "record_outputs",
    "run_isolated_backward",
    "run_isolated_forward",
]
