"""Schedules: each is complete, ends, holds no more than it says, and survives a file."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anabranch import Pipe
from anabranch.pipeline import Action, Kind, Schedule, make_schedule, simulate

NAMES = ["GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    ranks, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    each = {"ZBV": 2, "Interleaved1F1B": draw(st.integers(1, 3))}.get(name, 1)
    return make_schedule(name, ranks * each, microbatches, ranks=ranks)


@given(schedules())
def test_every_schedule_ends_with_every_action_once(schedule: Schedule):
    simulation = simulate(schedule)
    done = [interval.action for row in simulation.intervals for interval in row]
    kinds = [Kind.F, Kind.B, *([Kind.W] if schedule.splits_backward else [])]
    wanted = {
        Action(kind, j, i) for kind in kinds for j in range(schedule.stages) for i in range(schedule.microbatches)
    }
    assert len(done) == len(wanted)
    assert set(done) == wanted


@given(schedules(), st.data())
def test_microbatches_that_keep_nothing_run_forward_again_just_before_backward(schedule: Schedule, data: st.DataObject):
    pairs = st.tuples(st.integers(0, schedule.stages - 1), st.integers(0, schedule.microbatches - 1))
    those = data.draw(st.sets(pairs, max_size=6))
    recomputing = schedule.recomputing(those)
    twins = [two for actions in recomputing.actions for two in pairwise(actions) if two[0].kind is Kind.R]
    assert sorted(first[1:] for first, _ in twins) == sorted(those)
    assert all(second == first._replace(kind=Kind.B) for first, second in twins)


def test_an_order_that_cannot_end_is_refused_when_it_is_made():
    going, coming = make_schedule("GPipe", 2, 2).actions
    with pytest.raises(ValueError, match=r"never ends.*rank 0 at B0.0.*rank 1 at"):
        Schedule("mine", 2, 2, (0, 1), ((going[0], going[3], going[1], going[2]), coming))


def test_a_schedule_of_ones_own_is_for_its_number_of_microbatches_unless_its_name_is_known():
    known = make_schedule("1F1B", 2, 3)
    x = torch.randn(5, 2)
    for name, fits in (("1F1B", True), ("mine", False)):
        schedule = dataclasses.replace(known, name=name)
        with Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=3, schedule=schedule) as pipe:
            assert pipe(x).shape == (5, 2)
            if fits:
                assert pipe(x[:2]).shape == (2, 2)
            else:
                with pytest.raises(
                    ValueError, match="'mine' is for 3 microbatches, but this batch makes 2; give batches"
                ):
                    pipe(x[:2])


@pytest.mark.parametrize("p", [2, 3, 4])
def test_schedules_take_the_time_and_hold_the_memory_of_their_papers(p: int):
    m = 4 * p
    gpipe, one, split = (simulate(make_schedule(name, p, m)) for name in ("GPipe", "1F1B", "ZB1P"))
    assert gpipe.makespan == one.makespan == 3 * (m + p - 1)
    assert gpipe.peak_activations == (m,) * p
    assert one.peak_activations == tuple(p - j for j in range(p))
    assert split.makespan == 3 * m + p - 1
    assert split.bubble < 0.75 * one.bubble
    assert max(split.peak_activations) <= max(one.peak_activations)
    for v in (2, 3):
        assert simulate(make_schedule("Interleaved1F1B", p * v, m, ranks=p)).makespan == 3 * (m * v + p - 1)
    zbv = simulate(make_schedule("ZBV", 2 * p, m))
    assert zbv.makespan <= 6 * m + p
    assert max(zbv.peak_activations) <= 2 * p  # of half a stage each


@given(schedules())
def test_a_schedule_survives_a_file(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule):
    path = tmp_path_factory.mktemp("schedule") / "schedule.json"
    schedule.save(path)
    assert Schedule.load(path) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "does not hold a schedule"),
        ("not json", "does not hold a schedule"),
        ('{"name":"x","stages":1,"microbatches":1,"rank_of":[0],"actions":[[["F",0,0]]]}', "1 of 2 actions"),
        ('{"name":"x","stages":1,"microbatches":1,"rank_of":[0],"actions":[[["B",0,0],["F",0,0]]]}', "before its F"),
        ('{"name":"x","stages":1,"microbatches":1,"rank_of":[0],"actions":[[["F",0,0],["F",0,0]]]}', "twice"),
        ('{"name":"x","stages":1,"microbatches":1,"rank_of":[0],"actions":[[["Q",0,0]]]}', "Invalid enum value 'Q'"),
        ('{"name":"x","stages":1,"microbatches":1,"rank_of":[0],"actions":[[["F",1,0]]]}', "is out of range"),
        (
            '{"name":"x","stages":2,"microbatches":1,"rank_of":[0],"actions":[[]]}',
            "rank_of names the ranks of 1",
        ),
        (
            '{"name":"x","stages":1,"microbatches":1,"rank_of":[1],"actions":[[["F",0,0],["B",0,0]]]}',
            "its stage is on rank 1",
        ),
        (
            '{"name":"x","stages":2,"microbatches":2,"rank_of":[0,1],"actions":'
            '[[["F",0,0],["B",0,0],["F",0,1],["B",0,1]],[["F",1,0],["F",1,1],["B",1,1],["B",1,0]]]}',
            "never ends",
        ),
    ],
)
def test_a_damaged_file_is_refused_saying_why(tmp_path: Path, text: str, message: str):
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Schedule.load(path)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "ranks", "message"),
    [
        ("Chimera", 2, 2, None, "schedule is 'GPipe', '1F1B'"),
        ("GPipe", 0, 2, None, "stages, at least 1, got 0"),
        ("GPipe", 2, 0, None, "microbatches, at least 1, got 0"),
        ("1F1B", 2, 4.0, None, "a whole number of microbatches, at least 1, got 4.0"),
        ("GPipe", 4, 2, 2, "4 stages do not fit on 2 ranks: .* make 2 stages"),
        ("ZBV", 3, 2, 2, "3 stages do not fit on 2 ranks: .* make 4 stages"),
        ("Interleaved1F1B", 4, 2, 3, r"on 3 ranks: .* use one of \[1, 2, 4\]"),
    ],
)
def test_numbers_that_cannot_run_are_refused_with_those_that_can(
    name: str, stages: int, microbatches: int, ranks: int | None, message: str
):
    with pytest.raises(ValueError, match=message):
        make_schedule(name, stages, microbatches, ranks=ranks)
