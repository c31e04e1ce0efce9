"""Starts the processes of a job on this machine, watches them, and sees to it that none is left behind.

What it is not: a scheduler, or elastic. Several machines and restarts are ``torchrun``'s, which starts the same scripts
unchanged. Open ``local.py`` first, then ``supervisor.py``.
"""

from anabranch.launch.local import launch
from anabranch.launch.outcome import Exit, Outcome
from anabranch.launch.supervisor import Patience

__all__ = ["Exit", "Outcome", "Patience", "launch"]
