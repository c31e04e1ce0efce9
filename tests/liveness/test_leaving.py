"""No thread of gloo is left when the interpreter ends: one that frees a tensor then would abort the process."""

from __future__ import annotations

import pytest

from anabranch.testing import LocalJob

THREADS = """
import atexit, json
from pathlib import Path

def threads_of_gloo():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)

def tell_at_exit():
    print(json.dumps({"before": before, "after": threads_of_gloo()}))

atexit.register(tell_at_exit)  # runs behind those that are registered later

import torch
import torch.distributed as dist
from anabranch.collectives import Workers, all_reduce
"""

OWN_GROUP = """
workers = Workers()
workers.all_reduce(torch.zeros(4))
before = threads_of_gloo()
workers.close()
atexit.unregister(tell_at_exit)
tell_at_exit()
"""

GROUP_OF_THE_SCRIPT = """
dist.init_process_group("gloo")
workers = Workers()
workers.all_reduce(torch.zeros(4))
before = threads_of_gloo()
workers.close()
dist.destroy_process_group()
atexit.unregister(tell_at_exit)
tell_at_exit()
"""

NOTHING_IS_CLOSED = """
workers = Workers()
workers.all_reduce(torch.zeros(4))
before = threads_of_gloo()
"""

NOBODY_DESTROYS_THE_GROUP = """
dist.init_process_group("gloo")
all_reduce(torch.zeros(4))
before = threads_of_gloo()
"""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("script", [OWN_GROUP, GROUP_OF_THE_SCRIPT, NOTHING_IS_CLOSED, NOBODY_DESTROYS_THE_GROUP])
def test_no_thread_of_gloo_is_left_at_the_end(script: str) -> None:
    for result in LocalJob(workers=2).run_source(THREADS + script).check().results:
        assert result is not None
        assert result["before"] > 0
        assert result["after"] == 0
