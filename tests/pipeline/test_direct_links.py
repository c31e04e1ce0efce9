"""Tensors of a pipe that go from device to device: here over gloo, between CPUs; over NCCL in ``test_pipe_cuda.py``."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.launch import Patience
from anabranch.pipeline.links import communicators
from anabranch.pipeline.links.direct import DirectLinks, announce, guard
from anabranch.pipeline.links.inbox import Inbox
from anabranch.pipeline.links.packet_codec import Header, PacketFault
from anabranch.pipeline.schedule.actions import Kind
from anabranch.testing import LocalJob
from waiting import wait_until

RANKS = Path(__file__).with_name("pipeline_ranks_job.py")
SCRIPT = Path(__file__).with_name("direct_links_job.py")
DIRECT = {"PIPELINE_POST": "direct"}
DIRECT_AND_GLOO = {"PIPELINE_POST": "direct,gloo"}


@pytest.mark.parametrize(
    ("ranks", "environment"),
    [
        (2, DIRECT),
        pytest.param(2, DIRECT_AND_GLOO, marks=pytest.mark.slow),
        pytest.param(3, DIRECT, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_are_the_unsplit_module(ranks: int, environment: dict[str, str]):
    """Every schedule, with skips, ties and recomputation."""
    LocalJob(ranks, environment=environment).run(RANKS, "exact").check()


def test_pipelines_of_a_grid_have_links_of_their_own():
    LocalJob(4, environment=DIRECT).run(RANKS, "grid").check()


@pytest.mark.parametrize(
    ("ranks", "schedules"), [(2, "1F1B"), pytest.param(3, "1F1B,ZBV,Interleaved1F1B", marks=pytest.mark.slow)]
)
def test_a_failure_anywhere_ends_the_step_and_the_next_goes_over_the_host(ranks: int, schedules: str):
    result = LocalJob(ranks, environment=DIRECT).run(RANKS, f"failures:{schedules}").check()
    for found in result.results:
        assert found["longest"] < 20.0  # of 30; a tenth of a second where the machine is free


def test_a_failure_is_reported_once():
    told = [found["said"] for found in LocalJob(2).run(SCRIPT, "told_once").check().results]
    assert all(len(said) <= 1 for said in told)  # a rank that meets the closed link first says nothing
    assert {text.split(":")[0] for said in told for text in said} == {"a turn of the pipe failed"}


def test_a_stopped_rank_is_named_and_the_pipe_works_when_it_resumes():
    found = LocalJob(2, environment=DIRECT).run(RANKS, "stopped").check().results
    assert "its process is stopped" in found[0]["text"]


def test_a_killed_rank_is_named_at_once():
    result = LocalJob(2, environment=DIRECT, patience=Patience(failure=60.0)).run(RANKS, "killed")
    assert result.exit_codes[1] == -9
    assert result.results[0]["peer"] == "rank 1"
    assert result.results[0]["seconds"] < 30.0  # of 60


def test_a_rank_that_stops_between_header_and_tensors_is_named_though_the_host_waits_for_them():
    found = LocalJob(2).run(SCRIPT, "stopped_on_the_way").check().results
    assert "rank 1 is lost: its process is stopped" in found[0]["text"]
    assert found[0]["seconds"] < 30.0  # of 60


def test_a_rank_that_dies_between_header_and_tensors_is_named():
    result = LocalJob(2, patience=Patience(failure=60.0)).run(SCRIPT, "killed_on_the_way")
    assert result.exit_codes[1] == -9
    assert "rank 1 is lost" in result.results[0]["text"]
    assert result.results[0]["seconds"] < 30.0  # of 60


def test_a_link_that_breaks_alone_ends_the_turn_and_no_other():
    found = LocalJob(2).run(SCRIPT, "broken").check().results
    assert any("sending tensors between it and this rank failed" in rank["text"] for rank in found)


@pytest.mark.slow
def test_a_link_that_breaks_unseen_ends_the_turn_long_before_its_deadline():
    found = LocalJob(2).run(SCRIPT, "broken_unseen").check().results
    assert all("the link between them is closed" in rank["text"] for rank in found)


def test_a_link_that_closed_at_this_end_alone_is_the_reason_why_a_wait_ends():
    """The other rank had sent all it had to, met no error, and both waited until the turn's time was over."""
    links, inbox, *_ = linked(patience=-1.0)
    inbox.deliver(1, announce(header()), [])
    links.take_up(*links.receive())
    links.note_cut_off()
    assert links.lost() == {}
    links.close()
    links.note_cut_off()
    assert links.lost() == {1: "sending tensors between it and this rank failed: the link between them is closed"}


def test_a_rank_that_cannot_connect_takes_all_to_the_host():
    found = LocalJob(2).run(SCRIPT, "refused").check().results
    assert found[1]["said"] == ["rank 1 of a pipe sends tensors over the host, not over gloo: no network of that kind"]


def test_a_turn_ends_when_its_tensors_are_there():
    LocalJob(2).run(SCRIPT, "late").check()


class Work:
    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def block_current_stream(self) -> None:
        self.done = True


class Line:
    """A backend that notes what is asked of it."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []
        self.works: list[Work] = []
        self.aborted = False

    def _begin(self) -> Work:
        self.works.append(Work())
        return self.works[-1]

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        return self._begin()

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        self.received.append(list(tensors[0].shape))
        return self._begin()

    def abort(self) -> None:
        self.aborted = True


KIND = Kind.SEND_F.value
FAULT = PacketFault(1, "ValueError", "bad", "")


def linked(device: str = "cpu", patience: float = 10.0) -> tuple[DirectLinks, Inbox, Line, Line]:
    inbox, out, into = Inbox([1]), Line(), Line()
    links = DirectLinks(0, torch.device(device), {1: (out, into)}, inbox, patience=patience)
    inbox.begin(1, "step")
    links.begin(Deadline.after(60.0))
    return links, inbox, out, into


def header(
    kind: str = KIND, turn: int = 1, microbatch: int = 0, rows: int = 2, fault: PacketFault | None = None
) -> Header:
    described = [] if kind == "end" else [("uint8", [rows])]
    return Header(turn, "step", kind, 0, 1, microbatch, None, described, fault=fault)


def test_only_data_on_the_device_is_sent_directly():
    links, *_ = linked()
    parts = [torch.zeros(2, dtype=torch.uint8)]
    assert links.carry(1, header(), parts)
    assert not links.carry(1, header("share"), parts)
    assert not links.carry(1, header(), [])
    assert not links.carry(2, header(), parts)
    assert not links.carry(1, header(), [*parts, torch.zeros(2, dtype=torch.uint8, device="meta")])


def test_nothing_is_sent_directly_before_earlier_turns_have_ended_nor_after_a_fault():
    links, inbox, *_ = linked()
    parts = [torch.zeros(2, dtype=torch.uint8)]
    inbox.begin(2, "step")
    assert not links.carry(1, header(turn=2), parts), "the end of turn 1 may be a fault"
    inbox.deliver(1, header("end"), [])
    assert links.carry(1, header(turn=2), parts)
    inbox.deliver(1, header("end", turn=2, fault=FAULT), [])
    inbox.begin(3, "step")
    assert not links.carry(1, header(turn=3), parts), "the other end is aborted"


def test_receives_begin_in_the_order_of_headers():
    links, inbox, _, into = linked()
    for rows, microbatch in ((5, 2), (3, 0), (4, 1)):
        inbox.deliver(1, announce(header(microbatch=microbatch, rows=rows)), [])
    assert [receipt.header.microbatch for receipt in links.receive()] == [2, 0, 1]
    assert into.received == [[5], [3], [4]]


def test_sent_tensors_are_kept_until_they_are_sent():
    links, _, out, _ = linked()
    part = torch.zeros(2, dtype=torch.uint8)
    kept = weakref.ref(part)
    links.send(1, [part])
    del part
    links.send(1, [torch.zeros(3, dtype=torch.uint8)])
    assert kept() is not None
    out.works[0].done = True
    links.send(1, [torch.zeros(3, dtype=torch.uint8)])
    assert kept() is None


def test_a_receive_over_a_closed_link_never_completes():
    links, inbox, out, into = linked()
    inbox.deliver(1, announce(header()), [])
    (receipt,) = links.receive()
    assert links.all_arrived(), "nobody waits for it yet"
    links.take_up(receipt)
    assert links.all_arrived()
    assert links.close([1])
    assert not links.close([1])
    assert (out.aborted, into.aborted) == (True, True)
    assert links.gave_up()
    assert not links.all_arrived()
    links.begin(Deadline.after(60.0))
    assert links.all_arrived()


def test_received_tensors_are_kept_until_the_turn_has_ended():
    links, inbox, *_ = linked()
    inbox.deliver(1, announce(header()), [])
    kept = weakref.ref(links.receive()[0].tensors[0])
    assert kept() is not None, "the backend writes into its tensors"
    links.finish()
    assert kept() is None


def test_the_end_of_a_turn_waits_for_sent_tensors_and_releases_them():
    links, _, out, _ = linked()
    part = torch.zeros(2, dtype=torch.uint8)
    kept = weakref.ref(part)
    links.send(1, [part])
    del part
    links.finish()
    assert out.works[0].done
    assert kept() is None


def test_tensors_sent_over_a_closed_link_are_released():
    links, *_ = linked()
    part = torch.zeros(2, dtype=torch.uint8)
    kept = weakref.ref(part)
    links.send(1, [part])
    del part
    links.close([1])
    assert kept() is None


def test_an_error_of_a_backend_closes_its_link_and_is_reported_in_that_turn_only():
    links, _, out, into = linked(patience=-1.0)

    def fail(*_: object) -> Work:
        raise RuntimeError("cable cut")

    out.send = fail
    links.send(1, [torch.zeros(2, dtype=torch.uint8)])
    assert not links.peers()
    assert into.aborted
    assert links.lost() == {1: "sending tensors between it and this rank failed: cable cut"}
    links.begin(Deadline.after(60.0))
    assert links.lost() == {}


def test_the_reason_for_an_error_is_looked_for_before_its_peer_counts_as_lost():
    links, *_ = linked(patience=60.0)
    links.close([1])
    links.send(1, [torch.zeros(2, dtype=torch.uint8)])
    assert links.lost() == {}
    links.give_up({1: "killed"})
    assert links.lost() == {1: "killed"}


def awaiting(patience: float = 10.0, seconds: float = 60.0) -> DirectLinks:
    links, inbox, *_ = linked(patience=patience)
    links.begin(Deadline.after(seconds))
    inbox.deliver(1, announce(header()), [])
    links.take_up(links.receive()[0])
    links._awaited[0].has_arrived = lambda: False
    return links


@pytest.mark.parametrize(("lost", "seconds"), [({}, 1e-6), ({1: "killed"}, 60.0)], ids=["late", "lost"])
def test_a_wait_of_the_host_that_is_in_vain_is_ended(lost: dict[int, str], seconds: float):
    links = awaiting(seconds=seconds)
    end = guard(links, lambda: lost, every=0.001)
    wait_until(lambda: not links.peers())
    end()
    assert links.lost() == lost


def test_a_lost_rank_is_ignored_while_no_rank_waits_for_tensors():
    links, *_ = linked()
    asked: list[None] = []
    arrived = links.all_arrived
    links.all_arrived = lambda: asked.append(None) or arrived()
    end = guard(links, lambda: {1: "killed"}, every=0.001)
    wait_until(lambda: len(asked) > 3)
    end()
    assert links.peers() == [1]


@pytest.mark.parametrize("before", [None, "1"])
def test_nccls_watchdog_is_kept_from_ending_the_process_by_our_communicators_alone(
    before: str | None, monkeypatch: pytest.MonkeyPatch
):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    with communicators._errors_left_to_us():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before
