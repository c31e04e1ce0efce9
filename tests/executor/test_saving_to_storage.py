"""Several workers save to a URL together and resume from it with other servers, as from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.testing import LocalJob

SCRIPT = """
import json, sys
import torch
import anabranch as ab

torch.manual_seed(0)
job = ab.job()
model = torch.nn.Sequential(ab.RemoteEmbedding("t", 50, 4, mode="sum"), torch.nn.Linear(4, 1))
loss = lambda m, ids: m(ids).square().mean()
step = ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.1))
with ab.Executor(step, comm_mode="Hybrid") as executor:
    executor.resume(sys.argv[1])
    first, losses = executor.step, []
    while executor.step < int(sys.argv[2]):
        ids = torch.arange(6).reshape(3, 2) * (executor.step + 1 + job.rank) % 50
        losses.append(executor.run(batch=ids)["loss"].item())
        executor.save(sys.argv[1], wait=executor.step % 2 == 0)
print(json.dumps({"first": first, "losses": losses}))
"""


@pytest.mark.slow
def test_a_url_is_saved_to_by_all_workers_and_loads_on_other_servers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cut, whole = f"local://{tmp_path}/cut", f"local://{tmp_path}/whole"
    found = [
        LocalJob(2, servers).run(script, url, str(steps)).check().results[0]
        for servers, url, steps in ((2, cut, 5), (1, cut, 8), (2, whole, 8))
    ]
    assert [one["first"] for one in found] == [0, 5, 0]
    assert found[0]["losses"] + found[1]["losses"] == found[2]["losses"]
