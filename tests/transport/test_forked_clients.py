"""A client belongs to its process: a forked child gets an error at once, and the parent's connections are unaffected.

A module holds addresses, and makes its client again in the child.
"""

from __future__ import annotations

import torch
from torch import nn

from anabranch.experts import ExpertBackend, ExpertServer
from anabranch.parameter_server import ParameterServer
from anabranch.tensors import TensorSpec
from programs import Programs

PROGRAM = """
import os, sys
import torch
import anabranch as ab
from anabranch.deadline import Deadline
from anabranch.transport import Client, Request

experts, parameters = sys.argv[1:]
client, unused = Client(), Client()
first = unused.epoch
expert = ab.RemoteExpert("ffn.0", experts)
rows = ab.ParameterClient([parameters])
rows.init("bias", (2,), init=1.0)

def asks():
    info = lambda client: client.call(Request(experts, "expert.info", "ffn.0"), Deadline.after(60.0))
    yield "client", lambda: info(client)
    yield "expert", lambda: expert(torch.ones(1, 2)).sum().backward()
    yield "rows", lambda: rows.pull("bias")
    yield "unused", lambda: info(unused)
    yield "new", lambda: ab.RemoteExpert("ffn.0", experts)(torch.ones(1, 2)).sum().backward()

for name, ask in asks():
    if name not in ("unused", "new"):
        ask()
owner, child = os.getpid(), os.fork()
if child == 0:
    for name, ask in asks():
        try:
            ask()
            print(name, "served", unused.epoch != first, flush=True)
        except ab.ForkedClient as error:
            print(name, str(error).replace(str(owner), "OWNER").replace(str(os.getpid()), "HERE"), flush=True)
    client.close(), rows.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
before = os.listdir("/proc/self/fd")
for name, ask in asks():
    if name not in ("unused", "new"):
        ask()
print("parent", os.listdir("/proc/self/fd") == before, flush=True)
for name, ask in asks():
    if name in ("unused", "new"):
        ask()
rows.close()
"""


def test_a_client_used_before_a_fork_raises_in_the_child_and_works_in_the_parent(programs: Programs) -> None:
    module = nn.Linear(2, 2)
    backend = ExpertBackend("ffn.0", module, args_schema=[TensorSpec(2)])
    with ExpertServer([backend]) as experts, ParameterServer() as parameters:
        done = programs.run(PROGRAM, experts.endpoint, parameters.endpoint)
        assert done.returncode == 0, done.stderr
        lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for name in ("client", "rows"):
        assert "was made in process OWNER before a fork" in lines[name], name
        assert "make a new one in this process, HERE" in lines[name], name
    assert lines["unused"] == "served True"  # nobody knows it yet: it is a client of the child's own, with another name
    assert lines["new"] == "served True"
    assert lines["expert"] == "served True"
    assert lines["parent"] == "True"  # over the connections from before the fork
    assert backend.updates == 5  # three by the parent, two by the child
    assert "Warning" not in done.stderr
    assert torch.isfinite(module.weight).all()
