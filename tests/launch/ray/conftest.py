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
    config = {"health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 3}
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        # On a busy machine: by default Ray's workers yield to all else, and a node has half a minute to start.
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "200")
        head = {**nodes, "num_cpus": 0, "_system_config": config, "temp_dir": folder}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                made.add_node(**nodes)
            yield made
        finally:
            made.shutdown()
