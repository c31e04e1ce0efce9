"""Starts the processes of a job, watches them, and makes sure that none is left behind.

It is no scheduler. A worker that is killed is replaced, see ``supervision/members.py``. For several machines there are
Ray (``ray``) and ``torchrun``, which starts the same scripts unchanged. Open ``job.py`` first, then ``local.py`` and
``supervision``; ``roles.py`` is the script's side of its role.
"""

from anabranch.launch.local import launch
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.spec import Durability, JobSpec
from anabranch.launch.supervision.budget import RestartBudget
from anabranch.launch.supervision.outcome import Exit, JobOutcome
from anabranch.launch.supervision.supervisor import Patience

__all__ = ["Durability", "Exit", "JobOutcome", "JobSpec", "Patience", "PythonProgram", "RestartBudget", "launch"]
