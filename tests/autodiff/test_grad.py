"""Grad: one session's gradients, when they arrive, second order, and what its end frees."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import torch

import anabranch as ab
from waiting import running


def saver(into: dict, name: str):
    def save(tensor, grad):
        assert name not in into, "called twice"
        into[name] = grad

    return save


def test_gradients_of_leaves_and_intermediates_arrive_once_each_in_backward_order() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    got: dict[str, torch.Tensor] = {}
    with ab.Grad().wrt(x, callback=saver(got, "x")) as grad:
        h = x * x
        grad.wrt(h, callback=saver(got, "h"))
        y = h * 3 + h
        grad(y, torch.tensor([1.0, 10.0]))
    assert list(got) == ["h", "x"]
    assert got["h"].tolist() == [4.0, 40.0]
    assert got["x"].tolist() == [8.0, 160.0]
    assert x.grad is None


def test_the_callback_of_a_dropped_intermediate_gets_none_for_it() -> None:
    x, got = torch.ones(2, requires_grad=True), []
    with ab.Grad() as grad:
        h = x * 2
        grad.wrt(h, callback=lambda tensor, g: got.append((tensor, g)))
        y = (h * 3).sum()
        del h
        grad(y, torch.tensor(1.0))
    [(tensor, g)] = got
    assert tensor is None
    assert g.tolist() == [3.0, 3.0]


def test_an_unreached_tensor_and_an_unused_sibling_get_no_callback() -> None:
    x, unused = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
    with ab.Grad().wrt(unused, callback=lambda tensor, grad: pytest.fail("unreached")) as grad:
        first, second = x.chunk(2)
        grad.wrt(second, callback=lambda tensor, grad: pytest.fail("unused"))
        got = {}
        grad.wrt(first, callback=saver(got, "first"))
        grad(first.sum(), None)
    assert got["first"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("leaf", [True, False])
def test_a_root_that_is_itself_wanted_gets_its_dy_and_duplicate_roots_are_summed(leaf: bool) -> None:
    x, got = torch.ones(2, requires_grad=True), {}
    with ab.Grad() as grad:
        y = x if leaf else x * 2
        grad.wrt(y, callback=saver(got, "y"))
        grad([y, y], [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])
    assert got["y"].tolist() == [11.0, 22.0]


def test_roots_off_the_tape_are_ignored() -> None:
    x, got = torch.ones(2, requires_grad=True), {}
    with ab.Grad().wrt(x, callback=saver(got, "x")) as grad:
        grad([(x * 2).sum(), torch.tensor(1.0)], [torch.tensor(1.0), torch.tensor(1.0)])
    assert got["x"].tolist() == [2.0, 2.0]
    with ab.Grad().wrt(x, callback=lambda tensor, grad: pytest.fail("off the tape")) as grad:
        grad([torch.tensor(1.0)], [torch.tensor(1.0)])


def test_nested_sessions_give_second_and_third_derivatives() -> None:
    x = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    got: dict[str, torch.Tensor] = {}
    with ab.Grad().wrt(x, callback=saver(got, "3")) as outer:
        with ab.Grad().wrt(x, callback=saver(got, "2")) as middle:
            with ab.Grad().wrt(x, callback=saver(got, "1")) as inner:
                y = torch.sin(x)
                inner(y, torch.ones_like(y))
            middle(got["1"], torch.ones_like(x))
        outer(got["2"], torch.ones_like(x))
    torch.testing.assert_close(got["1"].detach(), torch.cos(x).detach())
    torch.testing.assert_close(got["2"].detach(), -torch.sin(x).detach())
    torch.testing.assert_close(got["3"], -torch.cos(x).detach())
    assert not got["3"].requires_grad


def test_sessions_that_end_out_of_order_keep_each_others_tape() -> None:
    x, got = torch.ones(2, requires_grad=True), {}
    first, second = ab.Grad().wrt(x), ab.Grad().wrt(x, callback=saver(got, "x"))
    first.__enter__()
    second.__enter__()
    y = torch.exp(x).sum()
    first.__exit__(None, None, None)
    second(y, None)
    second.__exit__(None, None, None)
    assert torch.equal(got["x"], torch.exp(x).detach())


@pytest.mark.parametrize("how", ["left", "swept", "raised in the body", "raised in a callback"])
def test_leaving_frees_the_tape_while_the_root_is_held(how: str) -> None:
    x = torch.ones(3, requires_grad=True)

    def callback(tensor, grad):
        if how == "raised in a callback":
            raise KeyError("mine")

    try:
        with ab.Grad().wrt(x, callback=callback) as grad:
            h = torch.exp(x * 2)
            alive = weakref.ref(h)
            y = (h * h).sum()
            del h
            assert alive() is not None
            if how == "raised in the body":
                raise KeyError("mine")
            if how != "left":
                grad(y, None)
    except KeyError:
        pass
    gc.collect()
    assert alive() is None
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="freed"):
        y.backward()


def test_a_sweep_frees_the_tape_on_the_way() -> None:
    x, alive = torch.ones(3, requires_grad=True), []

    def callback(tensor, grad):
        gc.collect()
        seen.append([reference() is None for reference in alive])

    seen: list[list[bool]] = []
    with ab.Grad().wrt(x, callback=callback) as grad:
        h = torch.exp(x)
        k = torch.sin(h)
        alive += [weakref.ref(h), weakref.ref(k)]
        y = (k * k).sum()
        del h, k
        grad(y, None)
    assert seen == [[True, True]]


def test_a_saved_tensor_changed_in_place_is_still_an_error() -> None:
    x = torch.ones(3, requires_grad=True)
    with ab.Grad().wrt(x) as grad:
        h = torch.exp(x)
        y = h.sum()
        with torch.no_grad():
            h.mul_(2)
        with pytest.raises(RuntimeError, match="inplace operation"):
            grad(y, None)


def test_live_sessions_are_listed_and_their_names_are_unique() -> None:
    before = {session.name for session in ab.get_grad_managers()}
    with ab.Grad("mine") as grad:
        assert grad.name == "mine"
        assert grad in ab.get_grad_managers()
        with pytest.raises(ValueError, match="'mine'"):
            ab.Grad("mine")
    with ab.Grad("mine"):
        pass
    assert {session.name for session in ab.get_grad_managers()} == before
    one, two = ab.Grad(), ab.Grad()
    assert one.name != two.name


def test_a_session_that_is_dropped_leaves_the_registry() -> None:
    ab.Grad("dropped")
    gc.collect()
    assert ab.Grad("dropped").name == "dropped"


def test_misuse_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    with ab.Grad().wrt(x) as grad:
        y = x * 2
        with pytest.raises(ValueError, match="twice"):
            grad.wrt(x)
        with pytest.raises(TypeError, match="int64"):
            grad.wrt(torch.tensor([1]))
        with pytest.raises(ValueError, match="1 roots, 2 gradients"):
            grad([y], [None, None])
        with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
            grad(y, torch.ones(3))
        grad(y, torch.ones(2))
        with pytest.raises(RuntimeError, match="has been used"):
            grad(y, torch.ones(2))
        with pytest.raises(RuntimeError, match="has been used"):
            grad.wrt(torch.ones(1))
    with pytest.raises(RuntimeError, match="has been used"), grad:
        pass
    with pytest.raises(RuntimeError, match="not entered"):
        ab.Grad().wrt(x)(x * 2, torch.ones(2))
    with ab.Grad() as grad:
        pass
    with pytest.raises(RuntimeError, match="has been used"):
        grad(x * 2, torch.ones(2))
    with pytest.raises(TypeError, match=r"callback\(tensor, grad\), got 3"):
        ab.Grad().wrt(x, callback=3)


def test_sessions_of_two_threads_know_nothing_of_each_other() -> None:
    results: dict[int, torch.Tensor] = {}
    barrier = threading.Barrier(2, timeout=30)

    def work(index: int) -> None:
        x = torch.full((2,), float(index + 1), requires_grad=True)
        with ab.Grad().wrt(x, callback=saver(results, index)) as grad:
            barrier.wait(timeout=30)
            y = (x * x).sum()
            barrier.wait(timeout=30)
            grad(y, None)
            barrier.wait(timeout=30)
        assert not results[index].requires_grad

    with running(partial(work, 0)):
        work(1)
    assert [results[index].tolist() for index in range(2)] == [[2.0, 2.0], [4.0, 4.0]]


class Send(torch.autograd.Function):
    """A boundary operation with nothing but a token on this side."""

    @staticmethod
    def forward(ctx, value, log):
        ctx.log, ctx.shape = log, value.shape
        return value.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        ctx.log.append("send")
        return torch.full(ctx.shape, 5.0), None


class Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, log):
        ctx.log = log
        return torch.ones(2)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(grad.tolist())
        return None, None


@pytest.mark.parametrize("session", ["grad", "manager"])
def test_a_sweep_without_roots_starts_from_the_boundary_tokens(session: str) -> None:
    weight, log, got = torch.ones(2, requires_grad=True), [], {}
    if session == "grad":
        with ab.Grad().wrt(weight, callback=saver(got, "w")) as grad:
            received = Receive.apply(ab.autodiff.boundary_entry(), log)
            ab.autodiff.boundary_exit(Send.apply(received * weight, log))
            grad([], [])
    else:
        manager = ab.GradManager().attach(weight, saver(got, "w"))
        with manager:
            received = Receive.apply(ab.autodiff.boundary_entry(), log)
            ab.autodiff.boundary_exit(Send.apply(received * weight, log))
            manager.backward()
        assert weight.grad.tolist() == [5.0, 5.0]
    assert log == ["send", [5.0, 5.0]]
    assert got["w"].tolist() == [5.0, 5.0]


def test_a_boundary_is_reached_without_a_wanted_tensor_behind_it() -> None:
    weight, log, got = torch.ones(2, requires_grad=True), [], {}
    with ab.Grad().wrt(weight, callback=saver(got, "w")) as grad:
        received = Receive.apply(ab.autodiff.boundary_entry(), log)
        grad((received * 7).sum() + weight.sum(), None)
    assert log == [[7.0, 7.0]]
