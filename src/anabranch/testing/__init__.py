"""What tests of distributed programs need: jobs on this machine that are bounded in time and leave nothing behind.

Shipped, so that users test their own scripts with it. Nothing in the package imports it. Open ``local_job.py`` first.
"""

from anabranch.testing.local_job import JobResult, LocalJob

__all__ = ["JobResult", "LocalJob"]
