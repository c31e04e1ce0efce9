"""Whichever way an Executor ends, the model is plain PyTorch again, with the state that was applied last."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.moved_parameter import MovedParameter
from plain_loop import mean_square
from programs import Programs
from toys import job_servers, look_of, plain_step, step_of

ROWS = 9
IDS = torch.tensor([0, 3, 3, 8])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.Embedding(ROWS, 4)
        self.twin = nn.Embedding(ROWS, 4)
        self.twin.weight = self.item.weight
        self.bags = nn.EmbeddingBag(ROWS, 4, mode="sum")
        self.top = nn.Linear(4, 1)
        self.kept = list(self.parameters())  # as people collect them for a norm

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.item(ids) + self.twin(ids // 2) + self.bags(ids[:, None]))  # type: ignore[no-any-return]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def executor_of(model: nn.Module, optimizer: torch.optim.Optimizer, mode: str | None, **options: Any) -> ab.Executor:
    return ab.Executor(ab.TrainStep(model, mean_square, optimizer), mode, engine="tape", **options)


def ending(executor: ab.Executor, body: Callable[[ab.Executor], object]) -> BaseException | None:
    """The error that leaves the ``with`` block."""
    try:
        with executor:
            body(executor)
    except BaseException as error:  # noqa: BLE001 - it is looked at
        return error
    return None


def trained(executor: ab.Executor, steps: int = 3) -> None:
    for _ in range(steps):
        executor.run(batch=IDS)


def plainly(steps: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = adam(model)
    for _ in range(steps):
        plain_step(model, mean_square, optimizer, IDS)
    return model, optimizer


def assert_plain(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The model and its optimizer are those of the plain loop after ``steps``, and usable without the Executor."""
    plain, theirs = plainly(steps)
    assert [type(parameter) for parameter in model.parameters()] == [nn.Parameter] * 4
    assert all(one is other for one, other in zip(model.parameters(), model.kept, strict=True))
    assert model.twin.weight is model.item.weight
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        for key, value in theirs.state[other].items():
            torch.testing.assert_close(optimizer.state[mine][key], value, rtol=1e-4, atol=1e-6, msg=key)
    model.load_state_dict(copy.deepcopy(model).state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


def fail(executor: ab.Executor) -> None:
    raise KeyError("mine")


def interrupt(executor: ab.Executor) -> None:
    raise KeyboardInterrupt


def raised_in_backward(executor: ab.Executor) -> None:
    def explode(grad: Tensor) -> None:
        raise ZeroDivisionError("in backward")

    model: Any = next(iter(executor._spec.models.values()))
    with torch.enable_grad():
        handle = model.top.register_forward_hook(lambda module, args, output: output.register_hook(explode) and None)
    try:
        executor.run(batch=IDS)
    finally:
        handle.remove()


WAYS = {fail: KeyError, interrupt: KeyboardInterrupt, raised_in_backward: ZeroDivisionError}


@pytest.mark.parametrize(("mode", "cache"), [("Hybrid", None), ("PS", ab.Cache(capacity=5))], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_after_an_exception_the_model_has_the_state_applied_last_and_trains_on(
    way: Callable[[ab.Executor], None], mode: str, cache: ab.Cache | None
) -> None:
    model = Model()
    optimizer = adam(model)

    def body(executor: ab.Executor) -> None:
        trained(executor)
        assert isinstance(model.kept[0], MovedParameter)
        way(executor)

    error = ending(executor_of(model, optimizer, mode, cache=cache), body)
    assert type(error) is WAYS[way]
    assert not [note for note in getattr(error, "__notes__", []) if "Executor was closed" in note]
    assert_plain(model, optimizer, 3)
    with executor_of(model, optimizer, mode) as executor:
        executor.run(batch=IDS)
    assert_plain(model, optimizer, 4)


def test_gradients_that_wait_in_a_cache_are_applied_before_an_exception_leaves_the_block() -> None:
    states = []
    for way in (None, fail):
        model = Model()
        cache = ab.Cache(capacity=5, pull_bound=3, push_bound=3)
        executor = executor_of(model, torch.optim.SGD(model.parameters(), lr=0.1), "Hybrid", cache=cache)
        ending(executor, lambda executor, way=way: (trained(executor), way and way(executor)))  # type: ignore[misc]
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize(("mode", "way"), [("Hybrid", None), ("PS", fail)])
def test_tables_on_a_job_s_servers_are_read_back_too(
    mode: str, way: Callable[[ab.Executor], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.parameter_server.client.parameter_client.CHUNK", 4)  # in blocks
    model = Model()
    optimizer = adam(model)
    with job_servers(2, monkeypatch):
        for steps in (2, 4):
            executor = executor_of(model, optimizer, mode)
            error = ending(executor, lambda executor: (trained(executor, 2), way and way(executor)))  # type: ignore[func-returns-value]
            assert isinstance(error, KeyError if way else type(None))
            assert_plain(model, optimizer, steps)


def test_where_servers_are_gone_the_placeholder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    asked: list[object] = []
    with ExitStack() as servers:
        servers.enter_context(job_servers(1, monkeypatch))

        def body(executor: ab.Executor) -> None:
            trained(executor)
            servers.close()
            client = executor._remote.client  # type: ignore[union-attr]
            monkeypatch.setattr(client, "read_state", lambda *args, **options: asked.append(args))
            client.calls.timeout = 0.2  # for which nothing is there to wait
            fail(executor)

        error = ending(executor_of(model, adam(model), "Hybrid"), body)
    assert type(error) is KeyError
    assert asked == []  # one wait, whatever the number of tables
    assert any("as the Executor was closed: " in note for note in error.__notes__)
    for table in (model.item.weight, model.bags.weight):
        assert isinstance(table, MovedParameter)
        with pytest.raises(ValueError, match=r"on servers that could not be read when its Executor was closed"):
            table.sum()
    with pytest.raises(ValueError, match=r"item\.weight was on servers"):
        model.item(IDS)
    with pytest.raises(ValueError, match=r"item\.weight was on servers.*a second Executor"):
        executor_of(model, adam(model), "Hybrid")


def test_closing_after_a_load_without_servers_keeps_what_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, model = Model(), Model()
    with executor_of(saved, adam(saved), "PS") as executor:
        trained(executor)
        executor.save(tmp_path)
    with ExitStack() as servers:
        servers.enter_context(job_servers(1, monkeypatch))
        executor = executor_of(model, adam(model), "PS")
        executor.load(tmp_path)
        executor._remote.client.calls.timeout = 0.2  # type: ignore[union-attr]
        servers.close()
        with pytest.raises(ab.DeadlineExceeded, match="operation pull"):
            executor.close()
    assert torch.equal(model.top.weight, saved.top.weight)
    with pytest.raises(ValueError, match="on servers that could not be read when its Executor was closed"):
        model.item.weight.sum()


def test_an_interrupt_in_the_middle_of_a_move_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = adam(model)
    increment, moved = torch.autograd.graph.increment_version, []

    def interrupted(tensor: Any) -> None:
        increment(tensor)
        moved.append(tensor)
        if len(moved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.autograd.graph, "increment_version", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor_of(model, optimizer, "Hybrid")
    assert_plain(model, optimizer, 0)


FORKED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
import anabranch as ab

class Sink:
    def scalars(self, step, values): pass
    def event(self, name, facts): pass
    def close(self): print("closed", flush=True)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1))
step = ab.TrainStep(model, lambda m, ids: m(ids).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
with ab.Executor(step, "Hybrid", engine="tape", sinks=[Sink()]) as executor:
    executor.run(batch=torch.tensor([1, 2]))
    child = os.fork()
    if not child:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    executor.run(batch=torch.tensor([1, 2]))
print(type(model[0].weight).__name__)
dist.destroy_process_group()
"""


def test_a_forked_child_that_leaves_the_block_closes_nothing(programs: Programs) -> None:
    done = programs.run(FORKED)
    assert done.stdout.split() == ["7", "closed", "Parameter"], done.stderr


def test_a_graph_of_before_that_saved_the_numbers_refuses_its_backward_within_and_after() -> None:
    model = Model()
    x = torch.ones(2, ROWS, requires_grad=True)
    old = (x @ model.item.weight).sum(), (x @ model.bags.weight).sum()
    with executor_of(model, adam(model), "Hybrid") as executor:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old[0].backward()
        trained(executor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old[1].backward()


# A RemoteEmbedding.


class Users(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids = ab.RemoteEmbedding("users", None, 4)
        self.table = ab.RemoteEmbedding("places", 5, 4, mode="sum")
        self.top = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.ids(ids + 2**53) + self.table(ids[:, None]))  # type: ignore[no-any-return]


SMALL = torch.tensor([1, 2, 2])


@pytest.mark.parametrize(("servers", "way"), [(0, None), (1, fail)])
def test_a_remote_embedding_keeps_its_rows_after_its_executor(
    servers: int, way: Callable[[ab.Executor], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, state, copies = Users(), dict[str, Tensor](), list[Users]()

    def body(executor: ab.Executor) -> None:
        for _ in range(3):
            executor.run(batch=SMALL)
        state.update(executor.state_dict())
        copies.append(copy.deepcopy(model))
        if way is not None:
            way(executor)

    with job_servers(servers, monkeypatch):
        error = ending(executor_of(model, adam(model), "Hybrid"), body)
        assert isinstance(error, KeyError if way else type(None))
        assert torch.equal(model.ids(state["ids.ids"]), state["ids.weight"])
        assert torch.equal(model.table(torch.arange(5)[:, None]), state["table.weight"])
        copies.append(pickle.loads(pickle.dumps(model)))
        assert all(torch.equal(other(SMALL), model(SMALL)) for other in copies)
        for one in (model, *copies):
            one.ids.close()
            one.table.close()


@pytest.mark.parametrize("pickled", [False, True])
def test_rows_trained_without_servers_are_not_replaced_in_silence(
    pickled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Users()
    with executor_of(model, adam(model), "Hybrid") as executor:
        executor.run(batch=SMALL)
    trained = model(SMALL)
    for table in (model.ids, model.table):
        table.close()
    if pickled:
        model = pickle.loads(pickle.dumps(model))
    with job_servers(1, monkeypatch) as (server,):
        for _ in range(2):
            with pytest.raises(ValueError, match="RemoteEmbedding users were trained without servers"):
                executor_of(model, adam(model), "Hybrid")
            with pytest.raises(ValueError, match="RemoteEmbedding users were trained without servers"):
                model(SMALL)
        assert not server.statistics().tables
    monkeypatch.undo()
    assert torch.equal(model(SMALL), trained)
    for table in (model.ids, model.table):
        table.close()


def test_modules_of_one_name_have_one_table_also_in_another_model_of_the_executor() -> None:
    model = Users()
    twin = copy.deepcopy(model)
    steps = {
        "train": ab.TrainStep(model, mean_square, adam(model)),
        "look": ab.EvalStep(twin, lambda m, ids: {"rows": m.table(ids[:, None])}),
    }
    with ab.Executor(steps, "Hybrid", engine="tape") as executor:
        model.table.close()  # it has no client of its own
        executor.run("train", batch=SMALL)
        assert torch.equal(executor.run("look", batch=SMALL)["rows"], model.table(SMALL[:, None]))
    other = copy.deepcopy(model)
    other.table = ab.RemoteEmbedding("users", None, 4, seed=1)
    with pytest.raises(ab.SchemaError, match="table users is .* in this model, and"):
        executor_of(other, adam(other), "Hybrid")


def test_rows_that_were_trained_alone_are_not_left_behind_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor trained a table of first values, and the rows were gone."""
    module = ab.RemoteEmbedding("t", 6, 4, init=1.0, optimizer=lambda rows: torch.optim.SGD(rows, lr=1.0))
    module(SMALL).sum().backward()
    trained = module(SMALL)
    with job_servers(1, monkeypatch), pytest.raises(ValueError, match="were trained without servers"):
        ab.Executor(ab.TrainStep(module, lambda m, ids: m(ids).sum(), torch.optim.SGD(module.parameters(), 1.0)), "PS")
    assert torch.equal(module(SMALL), trained)
    module.close()


# Which tables move.


def test_a_parameter_of_another_class_or_with_gradient_hooks_stays_on_the_workers() -> None:
    class Scaled(nn.Parameter):
        pass

    model = Model()
    model.item.weight = model.twin.weight = Scaled(model.item.weight.detach().clone())
    doubled = model.bags.weight.register_hook(lambda grad: 2 * grad)
    for mode in ("Hybrid", "PS"):
        with executor_of(model, adam(model), mode) as executor:
            routes = {route.parameter: route for route in executor.routes()}
            for name, why in (("item", "it is an nn.Parameter of another class"), ("bags", "it has gradient hooks")):
                assert (routes[f"{name}.weight"].place.value, routes[f"{name}.weight"].why) == ("workers", why)
            executor.run(batch=IDS)
    with pytest.raises(ValueError, match=r"routes={'bags\.weight': 'PS'}.*gradient hooks"):
        executor_of(model, adam(model), "Hybrid", routes={"bags.weight": "PS"})
    doubled.remove()
    with executor_of(model, adam(model), "Hybrid") as executor:
        assert executor.routes().at(ab.executor.routes.Place.ROWS)[0].parameter == "bags.weight"


def test_a_tensor_that_shares_a_table_s_memory_sees_nan_meanwhile_and_the_trained_numbers_after() -> None:
    model = Model()
    flat = model.item.weight.detach().view(-1)
    numpy = model.bags.weight.detach().numpy()
    with executor_of(model, adam(model), "Hybrid") as executor:
        executor.run(batch=IDS)
        assert flat.isnan().all()
        assert torch.from_numpy(numpy).isnan().all()
    assert torch.equal(flat, model.item.weight.detach().view(-1))
    assert model.item.weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert (torch.from_numpy(numpy) == model.bags.weight).all()


def test_a_second_executor_that_trains_a_moved_table_is_refused_by_name() -> None:
    model = Model()
    with executor_of(model, adam(model), "Hybrid") as executor:
        for mode in (None, "Hybrid", "PS"):
            with pytest.raises(ValueError, match=r"item\.weight is on the servers.*close the one that has it"):
                executor_of(model, adam(model), mode)
        executor.run(batch=IDS)


def test_what_did_not_pass_by_the_placeholder_is_refused_at_the_next_run_and_save(tmp_path: Any) -> None:
    """A replaced weight, a replaced module, and a gradient from a graph of before the move."""
    model = Model()
    old = model.item(IDS).sum()
    optimizer = adam(model)
    steps = {"train": ab.TrainStep(model, mean_square, optimizer), "look": look_of(model)}
    with ab.Executor(steps, "Hybrid", engine="tape") as executor:
        uses: list[Callable[[], object]] = [
            lambda: executor.run("train", IDS), lambda: executor.run("look", IDS), lambda: executor.save(tmp_path),
            executor.state_dict,
        ]  # fmt: skip
        weight, module = model.bags.weight, model.item

        def refused(words: str) -> None:
            for use in uses:
                with pytest.raises(ValueError, match=rf"weight is on the servers, and {words}"):
                    use()

        model.bags.weight = nn.Parameter(torch.ones(ROWS, 4))
        refused("'weight' was replaced")
        model.bags.weight = weight
        model.item = nn.Embedding(ROWS, 4)
        refused("'item' was replaced")
        model.item = module
        executor.run("train", IDS)
        old.backward()
        refused("it got a gradient from a graph of before")
        with pytest.raises(ValueError, match="this was seen as the Executor was closed"):
            executor.close()
    assert type(model.item.weight) is nn.Parameter


# Executors opened and closed in turn, as in a notebook or a search over settings, leave nothing behind.


def train_once(mode: str | None, engine: str) -> list[weakref.ref[object]]:
    """Train and evaluate a new model; return what should be gone with it."""
    model = nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 1))
    steps = {"train": step_of(model, torch.optim.Adagrad, accumulate=2), "look": look_of(model)}
    with ab.Executor(steps, mode, engine=engine) as executor:  # type: ignore[arg-type]
        for _ in range(4):
            executor.run("train", batch=torch.randint(50, (6, 2)))
        executor.run("look", batch=torch.randint(50, (6, 2)))
    return [weakref.ref(thing) for thing in (executor, model)]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("mode", [None, "AllReduce", "PS", "Hybrid"])
def test_an_executor_is_freed_with_its_model(mode: str | None) -> None:
    left, sizes = [], []
    for number in range(8):
        left += train_once(mode, "tape")
        if number in (1, 7):
            gc.collect()
            tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
            sizes.append(sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided))
    assert [reference() for reference in left] == [None] * 16
    assert sizes[1] == sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "Hybrid"])
def test_an_executor_with_graphs_is_freed_with_its_model(mode: str | None) -> None:
    left = train_once(mode, "graph")
    for _ in range(5):  # Dynamo's programs are freed by a finalizer, and what they hold after it
        gc.collect()
    assert [reference() for reference in left] == [None, None]
