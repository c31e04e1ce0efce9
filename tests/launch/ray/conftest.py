"""One cluster of three Ray nodes for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    nodes = {"num_cpus": 2, "object_store_memory": 80 << 20}
    config = {"health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 3}
    made = Cluster(initialize_head=True, head_node_args={**nodes, "num_cpus": 0, "_system_config": config})
    try:
        for _ in range(2):
            made.add_node(**nodes)
        yield made
    finally:
        made.shutdown()
