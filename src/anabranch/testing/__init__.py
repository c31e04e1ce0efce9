"""Tools for tests of distributed programs: jobs on this machine that are bounded in time and leave nothing behind,
networks that fail on demand, a clock advanced by hand, faults at named places, modules compared by gradients.

Shipped, so that users test their own scripts with it. Nothing in the package imports it. Open ``local_job.py`` for jobs
and ``transports.py`` for networks, ``faults.py``, ``clock.py`` and ``gradient_checks.py`` for the rest.
"""

from anabranch.testing import faults
from anabranch.testing.clock import FakeClock
from anabranch.testing.gradient_checks import assert_same_gradients
from anabranch.testing.local_job import JobResult, LocalJob
from anabranch.testing.transports import LossyTransport
from anabranch.transport import MemoryTransport

__all__ = ["FakeClock", "JobResult", "LocalJob", "LossyTransport", "MemoryTransport", "assert_same_gradients", "faults"]
