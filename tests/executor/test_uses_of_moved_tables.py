"""Uses of what lives on servers: each is the plain program's, or an error that names the parameter and the cure.

The rows of the tables are PyTorch's own: what ``torch.overrides`` says can be overridden, all attributes of
``torch.Tensor``, and all methods of ``nn.Module``; a new PyTorch adds its own by itself.
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides, is_tensor_method_or_property
from torch.testing._internal.generated.annotated_fn_args import annotated_args

import anabranch as ab
from anabranch.autodiff.moved_parameter import MovedParameter, from_within, is_within
from plain_loop import mean_square
from toys import Tabled, look_of, step_of

ROWS, WIDTH = 5, 5  # square, so that most operators take the table with itself
IDS = torch.tensor([0, 3, 3])


def opened(model: nn.Module, mode: str | None = "Hybrid") -> ab.Executor:
    return ab.Executor(step_of(model, partial(torch.optim.SGD, momentum=0.9)), mode, engine="tape")


def is_refused(error: object) -> bool:
    cured = any(cure in str(error) for cure in ("executor.", "Executor", "call the module", "outside of"))
    return isinstance(error, ValueError) and "table.weight" in str(error) and "routes=" in str(error) and cured


def outcome(use: Callable[[], Any]) -> Any:
    """What ``use`` returns, or the error that it raises."""
    try:
        return use()
    except Exception as error:  # noqa: BLE001 - it is compared
        return error


def agrees(mine: Any, plain: Any, table: Tensor, twin: Tensor) -> bool:
    """Whether ``mine``, of the table, is what the plain program's twin gives."""
    if mine is table:
        return plain is twin
    if isinstance(mine, MovedParameter):  # refuses all uses in its turn
        return plain is None or isinstance(plain, Tensor)
    if isinstance(mine, ab.SchemaError):  # ids that PyTorch refuses without the table's name
        return isinstance(plain, RuntimeError) and "table.weight" in str(mine)
    if isinstance(mine, Exception):
        return type(mine) is type(plain)
    if isinstance(mine, Tensor) and isinstance(plain, Tensor):
        return torch.equal(mine, plain)
    return callable(mine) or bool(mine == plain)


def disagreements(uses: dict[str, Callable[[Tensor], Any]]) -> tuple[list[str], int]:
    """The uses that are neither refused nor the plain program's, and how many are refused."""
    model, plain = Tabled(ROWS, WIDTH), Tabled(ROWS, WIDTH)
    bad, refused = [], 0
    with opened(model) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, twin = model.table.weight, plain.table.weight
        for name, use in uses.items():
            mine = outcome(lambda: use(table))  # noqa: B023 - called at once
            if is_refused(mine):
                refused += 1
                continue
            theirs = outcome(lambda: use(twin))  # noqa: B023
            if not agrees(mine, theirs, table, twin):
                bad.append(f"{name}: {mine!r}, and plainly {theirs!r}")
        assert model.table.weight is table
        trained = table.requires_grad
        executor.run(batch=IDS)
    twin.requires_grad_(trained)
    with opened(plain, None) as executor:
        executor.run(batch=IDS)
    assert all(map(torch.equal, model.parameters(), plain.parameters())), "the uses have changed something"
    return bad, refused


def fitting(kind: str, tensor: Tensor) -> Any:
    """An argument of the kind that PyTorch's own declarations name."""
    kind = kind.removesuffix("?")
    if kind in ("TensorList", "ITensorListRef") or "optional<Tensor>" in kind:
        return [tensor, tensor]
    if "ArrayRef" in kind or kind.startswith("std::array"):
        return [1, 1]
    values = {"Tensor": tensor, "Scalar": 2, "bool": False, "double": 0.5, "c10::string_view": "mean", "str": "mean"}
    values |= dict.fromkeys(("int64_t", "SymInt", "c10::SymInt", "int"), 0)
    values |= {"ScalarType": torch.float32, "Layout": torch.strided, "MemoryFormat": torch.contiguous_format}
    return values.get(kind)


def called(function: Any, override: Any) -> Callable[[Tensor], Any]:
    def use(tensor: Tensor) -> Any:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if function in annotated_args:
            for one in annotated_args[function]:
                value = fitting(one["simple_type"], tensor)
                if one.get("is_kwarg_only") == "True":
                    kwargs[one["name"]] = value
                else:
                    args.append(value)
            if is_tensor_method_or_property(function) and not any(value is tensor for value in args[:1]):
                args.insert(0, tensor)
        else:
            declared = inspect.getfullargspec(override)
            args = [tensor] * max(1, len(declared.args) - len(declared.defaults or ()))
        return function(*args, **kwargs)

    return use


def test_every_function_that_can_be_overridden_is_right_or_refused_by_name() -> None:
    overrides = get_testing_overrides()
    uses = {}
    for function, override in overrides.items():
        owner = getattr(function, "__self__", None)
        name = f"{getattr(function, '__name__', function)} {owner or ''}"
        uses[f"{name} {len(uses)}"] = called(function, override)
        for more in ((), (2,), (IDS,), (0, 1)) if is_tensor_method_or_property(function) else ():
            uses[f"{name} {more}"] = lambda tensor, function=function, more=more: function(tensor, *more)
    bad, refused = disagreements(uses)
    assert bad == []
    assert refused > 0.9 * len(overrides)


# A module's methods.


def filled(method: Any) -> list[Any] | None:
    """Arguments for a method of a module, by their names; ``None`` if one of them is not known."""
    values: dict[str, Any] = {
        "fn": lambda module: None, "mode": True, "name": "head", "module": nn.Identity(), "tensor": torch.ones(2),
        "param": None, "target": "head", "state_dict": {}, "device": "cpu", "dtype": torch.float32,
        "dst_type": torch.float32, "ids": IDS, "input": IDS, "state": {}, "prefix": "", "strict": True,
    }  # fmt: skip
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return None
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [parameter for parameter in needed if parameter.name != "self"]
    return [values[p.name] for p in needed] if all(p.name in values for p in needed) else None


METHODS = [
    name
    for name in dir(nn.Module)
    if callable(getattr(nn.Module, name)) and not name.startswith("_") and "hook" not in name
]


# Dynamo, which the user's own compile() starts, looks at the .grad of every tensor that it resumes with.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compile")) for n in METHODS])
def test_every_method_of_a_module_is_right_or_refused_and_training_goes_on_as_the_plain_one(name: str) -> None:
    """A method that changes the model changes the plain one, too: both train on, or the next run names the table."""
    model, plain = Tabled(ROWS, WIDTH), Tabled(ROWS, WIDTH)
    args = filled(getattr(model, name))
    kwargs = {"backend": "eager"} if name == "compile" else {}
    assert args is not None, f"how is {name} called?"
    with opened(plain, None) as executor:
        executor.run(batch=IDS)
        theirs = outcome(lambda: getattr(plain, name)(*args or (), **kwargs))
        rest = outcome(lambda: [executor.run(batch=IDS)["loss"] for _ in range(2)])
    with opened(model) as executor:
        executor.run(batch=IDS)
        mine = outcome(lambda: getattr(model, name)(*args or (), **kwargs))
        if is_refused(mine):
            return
        assert isinstance(mine, Exception) == isinstance(theirs, Exception), (mine, theirs)
        found = outcome(lambda: [executor.run(batch=IDS)["loss"] for _ in range(2)])
        if is_refused(found):
            return
    assert type(found) is type(rest), (found, rest)
    assert isinstance(rest, Exception) or found == rest
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_refused_before_anything_was_copied(assign: bool) -> None:
    model, other = Tabled(ROWS, WIDTH), Tabled(ROWS, WIDTH)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.5)
    with opened(model) as executor:
        before = model.head.weight.detach().clone()
        for owner, state in ((model, other.state_dict()), (model.table, other.table.state_dict())):
            with pytest.raises(ValueError, match=r"table\.weight is on the servers.*executor\.load\(path\)"):
                owner.load_state_dict(state, assign=assign)
        assert torch.equal(model.head.weight, before)
        model.load_state_dict({f"head.{k}": v for k, v in other.head.state_dict().items()}, strict=False)  # stays here
        executor.run(batch=IDS)
    model.load_state_dict(other.state_dict())
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_what_the_package_itself_may_do_ends_with_the_block_of_each_thread() -> None:
    """Two Executors that step at once in two threads left placeholders without refusals for good."""
    entered, leave = threading.Event(), threading.Event()

    def step() -> None:
        with from_within():
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=step)
    thread.start()
    assert entered.wait(60)
    assert not is_within()
    with from_within():
        leave.set()
        thread.join()
        assert is_within()
    assert not is_within()


# What lives on servers is changed there: a change of the copy by hand is an error, not a lost update.


def executor_of(model: nn.Module, **options: Any) -> ab.Executor:
    return ab.Executor({"train": step_of(model, torch.optim.Adam), "look": look_of(model)}, "PS", **options)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_change_by_hand_is_an_error_that_names_it(whole: bool, steps: int) -> None:
    model = Tabled(out=5)
    with executor_of(model) as executor:
        for _ in range(steps):
            executor.run("train", IDS)
        before = copy.deepcopy(model.head.state_dict())
        if whole:
            model.head.weight.data = torch.zeros(5, 3)
        else:
            model.head.weight.data[-1, -1] += 1e-3
        with pytest.raises(ab.LostUpdate, match=r"^head\.weight was changed by hand.*routes={'head\.weight': "):
            executor.run("train", IDS)
        assert executor.step == steps
        model.head.load_state_dict(before)
        executor.run("train", IDS)  # and goes on once it is taken back
        assert executor.step == steps + 1


@pytest.mark.parametrize("options", [{"consistency": "asp"}, {"use_sparse_pull": False}, {"engine": "graph"}])
def test_and_so_under_every_consistency_engine_and_for_tables_held_whole(options: dict[str, Any]) -> None:
    model = Tabled(out=5)
    with executor_of(model, **options) as executor:
        executor.run("train", IDS)
        for value in (model.head.bias, model.table.weight)[: 1 + ("use_sparse_pull" in options)]:
            before = value.detach().clone()
            value.data.mul_(2)
            with pytest.raises(ab.LostUpdate, match=r"^(head\.bias|table\.weight) was"):
                executor.run("train", IDS)
            value.data.copy_(before)


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_values_that_an_evaluation_would_not_use_are_an_error_and_those_it_uses_are_not(consistency: str) -> None:
    model = Tabled(out=5)
    with executor_of(model, consistency=consistency) as executor:
        executor.run("train", IDS)
        kept = model.head.bias.detach().clone()
        model.head.bias.data.add_(1)
        if consistency == "asp":
            with pytest.raises(ab.LostUpdate, match=r"head\.bias"):
                executor.run("look", IDS)  # would read the servers first
            model.head.bias.data.copy_(kept)
            executor.run("look", IDS)
            return
        rows = executor._remote.client.sparse_pull("table.weight", IDS)  # type: ignore[union-attr]
        assert torch.equal(executor.run("look", IDS)["out"], model.head(rows))
        model.head.bias.data.copy_(kept)
        executor.run("train", IDS)


def test_a_change_in_the_run_itself_is_an_error_of_that_run() -> None:
    """As of a codebook that moves in forward: the read at the end of the run would overwrite it."""
    model = Tabled(out=5)

    def moving(model: Tabled, ids: Tensor) -> Tensor:
        model.head.bias.data.mul_(0.5)
        return mean_square(model, ids)

    step = step_of(model, loss=moving)
    with pytest.raises(ab.LostUpdate, match=r"^head\.bias was changed"), ab.Executor(step, "PS") as executor:
        executor.run(batch=IDS)


def test_neither_loading_nor_saving_nor_a_step_passed_over_is_a_change(tmp_path: Path) -> None:
    model = Tabled(out=5)
    with executor_of(model) as executor:
        executor.run("train", IDS)
        executor.save(tmp_path)
        expected = [executor.run("train", IDS)["loss"] for _ in range(2)]
        model.head.bias.data.zero_()  # a load does away with it
        executor.load(tmp_path)
        assert [executor.run("train", IDS)["loss"] for _ in range(2)] == expected
        assert executor.resume(tmp_path)
        assert [executor.run("train", IDS)["loss"] for _ in range(2)] == expected


def test_a_change_after_the_last_step_is_an_error_of_close_which_closes_all_the_same() -> None:
    model, plain = Tabled(out=5), Tabled(out=5)
    with executor_of(plain) as executor:
        executor.run("train", IDS)
    executor = executor_of(model)
    executor.run("train", IDS)
    model.head.bias.data.zero_()
    with pytest.raises(ab.LostUpdate, match=r"head\.bias") as caught:
        executor.close()
    assert "the model has the values of the servers" in caught.value.__notes__[0]
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
