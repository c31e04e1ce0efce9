"""What a table's capacity costs is counted and said: ids that find no room, and rows that leave for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anabranch as ab
from toys import Users, job_servers


def executor_of(model: Users, **options: Any) -> ab.Executor:
    step = ab.TrainStep(model, Users.loss, torch.optim.SGD(model.head.parameters(), lr=0.1))
    return ab.Executor(step, "Hybrid", **options)


def counts(executor: ab.Executor) -> tuple[int, int]:
    users = executor.statistics().tables["users"]
    return users.unadmitted, users.evicted


@pytest.mark.parametrize("cache", [None, ab.Cache(capacity=3), ab.Cache(capacity=99, pull_bound=5)], ids=str)
def test_ids_without_room_are_counted_and_said_once(cache: ab.Cache | None) -> None:
    model = Users(capacity=4)
    with executor_of(model, cache=cache) as executor:
        executor.run(batch=torch.tensor([1, 2, 3, 4]))
        assert counts(executor) == (0, 0)
        executor.run(batch=torch.tensor([1, 2, 3, 4, 5, 5, 6]))
        assert counts(executor) == (2, 0)
        with pytest.warns(RuntimeWarning, match=r"table users has no room .* capacity=4, .*\(there are 1\)") as given:
            executor.run(batch=torch.tensor([6, 4, 3, 2, 1, 7, 8]))
        assert given[0].filename == __file__
        assert counts(executor) == (5, 0)
        assert torch.equal(model(torch.arange(1, 9))[:, 0], torch.tensor([-3.0, -3, -3, -3, 0, 0, 0, 0]))
        first = executor.record_loads().tables["users"]
        executor.run(batch=torch.tensor([11, 12]))
        assert counts(executor) == (5, 2)
        later = executor.record_loads().tables["users"]
    assert [(first.unadmitted, first.evicted), (later.unadmitted, later.evicted)] == [(5, 0), (0, 2)]
    assert counts(executor) == (5, 2)  # after the end


def test_ids_that_admission_leaves_out_and_tables_without_capacity_are_not_at_an_edge() -> None:
    model = Users(None, admission=0.5)
    with executor_of(model) as executor:
        executor.run(batch=torch.arange(100))
        assert counts(executor) == (0, 0)
        assert 0 < executor._remote.client.statistics()[0].tables["users"].rows < 100  # type: ignore[union-attr]


def test_the_shards_of_a_table_count_together_and_one_warning_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity is divided between them, and ids are not spread quite evenly."""
    with job_servers(3, monkeypatch):
        model, ids = Users(capacity=300), torch.arange(300)
        with executor_of(model) as executor:
            executor.run(batch=ids)
            with pytest.warns(RuntimeWarning, match=r"capacity=300, .*\(there are 3\)"):
                executor.run(batch=ids)
            untrained = int((model(ids)[:, 0] == 0).sum())
            assert untrained > 0
            assert counts(executor) == (2 * untrained, 0)
