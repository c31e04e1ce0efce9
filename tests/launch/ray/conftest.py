"""One cluster of three Ray nodes for all tests that need one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    nodes = {"num_cpus": 2, "object_store_memory": 80 << 20}
    # A node that is gone refuses at once; one on a busy machine may be slow.
    config = {"health_check_period_ms": 500, "health_check_timeout_ms": 20000, "health_check_failure_threshold": 3}
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("RAY_TMPDIR", folder)  # its sockets have long names
        # By default Ray's workers yield to all else on a busy machine.
        patch.setenv("RAY_worker_niceness", "0")
        nodes |= {"include_dashboard": False, "include_log_monitor": False}  # nobody looks
        head = {**nodes, "num_cpus": 0, "_system_config": config}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                made.add_node(**nodes)
            yield made
        finally:
            made.shutdown()
