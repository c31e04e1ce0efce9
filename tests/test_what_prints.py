"""The repr of public objects: a description in one line."""

from __future__ import annotations

import torch
from torch import nn

import anabranch as ab
from anabranch.parameter_server import ParameterClient
from anabranch.tables import RowOptimizer, RowTable, TableSpec


def test_objects_have_a_descriptive_repr() -> None:
    model = nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda model, x: model(x).mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    pipe = ab.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), balance=[1, 1], chunks=3)
    rule = RowOptimizer.from_factory(lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    assert repr(step) == "TrainStep(Linear, SGD)"
    with ab.Executor({"train": step}) as executor:
        executor.run("train", torch.ones(2, 4))
        assert repr(executor) == "Executor({'train': TrainStep(Linear, SGD)}, comm_mode=None, step=1)"
    assert "balance=[1, 1], schedule='GPipe', chunks=3" in repr(pipe)
    assert repr(ab.RemoteExpert("ffn.0", "unix:/there")) == "RemoteExpert('ffn.0', unix:/there)"
    mixture = ab.RemoteMixtureOfExperts(4, [3, 2], ab.Directory(), "ffn", k_best=2)
    assert "'ffn', grid_size=(3, 2), k_best=2" in repr(mixture)
    assert [repr(ab.Directory()), repr(ab.Directory("unix:/names"))] == ["Directory()", "Directory('unix:/names')"]
    assert repr(RowTable(TableSpec("users", 10, 4), rule)) == "RowTable('users', 10 x 4, float32, ADAM)"
    with ParameterClient() as client:
        assert repr(client) == "ParameterClient(in this process)"
    assert repr(ab.capture(lambda x: x * 2, torch.ones(2))).startswith("Graph(")
