"""Run by every rank of a job: tensors of a pipe that go from device to device, and every way for them not to come.

The arguments are as of ``pipeline_ranks_job.py``. Without a GPU the links are gloo's, and the devices CPUs.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipeline_models import close, reference, skipping_model
from pipeline_ranks_job import RANK, WORLD, GlooLine, GlooWork, balance_for, make, raised_by, step

import anabranch as ab
from anabranch.pipeline.links import direct
from anabranch.pipeline.links.communicators import MAKERS
from anabranch.pipeline.links.direct import DirectLinks
from anabranch.pipeline.ranks import RankTurn
from anabranch.pipeline.schedule.actions import Action
from anabranch.record.fault_points import on_fault_point

LAST = WORLD - 1


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x, target = torch.randn(2, 4, 5, dtype=torch.float64)
    return x, target


def links_of(pipe: ab.Pipe) -> DirectLinks:
    return pipe._engine.links


def on_the_way(stop: int) -> tuple[ab.Pipe, dict]:
    """The last rank gets a signal when it has sent a header, before its tensors."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(WORLD)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    pipe = make(skipping_model(), heartbeat=0.5, timeout=60.0)
    x, target = batch()
    step(pipe, x, target)
    send = DirectLinks.send

    def send_late(self: DirectLinks, *arguments: object) -> None:
        if RANK == LAST:
            os.kill(os.getpid(), stop)
        send(self, *arguments)

    DirectLinks.send = send_late
    began = time.monotonic()
    caught = raised_by(partial(step, pipe, x, target))
    DirectLinks.send = send
    assert isinstance(caught, ab.PipelineError if RANK == LAST else ab.PeerLost), caught
    if RANK == 0 and stop == signal.SIGSTOP:
        os.kill(int(pids[LAST]), signal.SIGCONT)
    return pipe, {"text": str(caught), "seconds": time.monotonic() - began}


def stopped_on_the_way() -> dict:
    """The others name it, though their hosts wait for the tensors; when it goes on, tensors go over the host."""
    pipe, found = on_the_way(signal.SIGSTOP)
    works_over_the_host(pipe)
    return found


def killed_on_the_way() -> dict:
    return on_the_way(signal.SIGKILL)[1]


def works_over_the_host(pipe: ab.Pipe) -> None:
    plain = reference(torch.nn.Sequential(*skipping_model()))
    before = links_of(pipe).bytes_sent
    plain.load_state_dict(pipe.state_dict(), strict=False)
    pipe.zero_grad()
    for _ in range(2):
        step(pipe, *batch())
    assert links_of(pipe).bytes_sent == before
    assert not links_of(pipe).peers()
    pipe.close()


def broken() -> dict:
    """A link breaks and no rank is lost: the turn ends with the backend's words, and the pipe goes on over the host."""
    pipe = make(skipping_model(), heartbeat=0.25, timeout=60.0)
    step(pipe, *batch())

    def cut(name: str) -> None:
        if name == f"pipeline.forward.{LAST}.1":
            links_of(pipe).close()

    with on_fault_point(cut):
        caught = raised_by(lambda: step(pipe, *batch()))
    works_over_the_host(pipe)
    return {"text": str(caught)}


def broken_unseen() -> dict:
    """A link breaks at the receiving end when all that the other end had to send has arrived: nothing fails there.

    A stream that is told to wait for tensors says nothing of an abort, and the last header comes later.
    """
    receive = RankTurn.receive

    def receive_ahead(self: RankTurn, action: Action) -> object:
        def next_is_here() -> bool:
            self._begin_to_receive()
            return any(microbatch == 2 for *_, microbatch in self._receipts)

        if RANK == LAST and action.microbatch == 1 and turns:
            self._wait(next_is_here, "the next one", [0])
        return receive(self, action)

    turns: list[int] = []
    RankTurn.receive = receive_ahead
    # A forward that waits for no tensors may run before they are there: its second run would have other values.
    pipe = make(skipping_model(), heartbeat=0.25, timeout=60.0, checkpoint="never")
    step(pipe, *batch())
    turns.append(1)
    GlooWork.block_current_stream = lambda self: None

    def cut(name: str) -> None:
        if name == f"pipeline.forward.{LAST}.1":
            links_of(pipe).close()
        if name == "pipeline.forward.0.3":
            time.sleep(1.0)  # the last one's header comes when the receiving end waits already

    with on_fault_point(cut):
        caught = raised_by(lambda: step(pipe, *batch()))
    return {"text": str(caught)}


class Untried:
    """A backend that would wait for one that is not there."""

    def abort(self) -> None:
        pass


def refused() -> dict:
    """A rank that cannot connect, or is told not to, takes all the others it would be linked to to the host."""

    def refuse(*_: object) -> object:
        if RANK == LAST:
            raise RuntimeError("no network of that kind")
        return Untried()

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("anabranch.pipeline").addHandler(handler)
    MAKERS["gloo"] = refuse
    works_over_the_host(make(skipping_model()))
    MAKERS["gloo"] = GlooLine
    works_over_the_host(make(skipping_model(), nccl=RANK != LAST))
    return {"said": said}


def late() -> dict:
    """No rank ends a turn before the streams have all tensors; one comes at the eighth look."""
    looks: list[list[bool]] = []

    def reached_late(_: torch.Tensor) -> Callable[[], bool]:
        looks.append([])

        def has_reached(seen: list[bool] = looks[-1]) -> bool:
            seen.append(len(seen) > 6)
            return seen[-1]

        return has_reached

    direct.reached = reached_late
    with make(skipping_model()) as pipe:
        step(pipe, *batch())
        assert looks, "this rank has received"
        assert all(seen and seen[-1] for seen in looks)
    return {}


def told_once() -> dict:
    """A stage raises in two turns: one of each rank's log says that its tensors take the host's way."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("anabranch.pipeline").addHandler(handler)
    pipe = make(skipping_model())

    def fail(name: str) -> None:
        if name == "pipeline.backward.0.2":
            raise ZeroDivisionError

    for _ in range(2):
        with on_fault_point(fail):
            raised_by(lambda: step(pipe, *batch()))
    works_over_the_host(pipe)
    return {"said": said}


def on_cuda(devices: str) -> dict:
    """Every schedule over NCCL is the unsplit module, and after a failure over the host too."""
    places = [torch.device("cuda", int(index)) for index in devices.split(",")]
    sent = 0
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"):
        model = skipping_model()
        plain = reference(model)
        x, target = torch.randn(2, 7, 5, dtype=torch.float64)
        with ab.Pipe(
            model, balance_for(schedule), chunks=3, schedule=schedule, devices=places, process_group=dist.group.WORLD
        ) as pipe:
            step(pipe, x, target)
            F.mse_loss(plain(x), target).backward()
            compare(pipe, plain)
            sent += links_of(pipe).bytes_sent

            def fail(name: str) -> None:
                if name == f"pipeline.backward.{LAST}.1":
                    raise ZeroDivisionError

            with on_fault_point(fail):
                raised_by(lambda pipe=pipe, x=x, target=target: step(pipe, x, target))
            pipe.zero_grad()
            step(pipe, x, target)
            compare(pipe, plain)
    return {"sent": sent}


def compare(pipe: ab.Pipe, plain: torch.nn.Module) -> None:
    expected = {name: parameter.grad for name, parameter in plain.named_parameters(remove_duplicate=False)}
    for name, parameter in pipe.named_parameters():
        assert close(None if parameter.grad is None else parameter.grad.cpu(), expected[name]), name


def killed_on_cuda() -> dict:
    """The last rank dies in a backward: the others' streams wait for it, and still they name it."""
    places = [torch.device("cuda", rank) for rank in range(WORLD)]
    pipe = ab.Pipe(
        skipping_model(), balance_for("1F1B"), chunks=4, schedule="1F1B", devices=places, timeout=60.0,
        process_group=dist.group.WORLD,
    )  # fmt: skip
    x, target = batch()
    step(pipe, x, target)

    def die(name: str) -> None:
        if name == f"pipeline.backward.{LAST}.1":
            os.kill(os.getpid(), signal.SIGKILL)

    with on_fault_point(die):
        caught = raised_by(partial(step, pipe, x, target))
    assert isinstance(caught, ab.PeerLost), caught
    return {"text": str(caught)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, _, argument = sys.argv[1].partition(":")
    if "cuda" in name:
        torch.cuda.set_device(RANK % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        MAKERS["gloo"] = GlooLine
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    print(json.dumps({"rank": RANK} | globals()[name](*filter(None, [argument]))), flush=True)
    if not name.startswith("killed"):
        dist.barrier()
        dist.destroy_process_group()
