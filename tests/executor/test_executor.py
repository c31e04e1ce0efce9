"""The arguments and results of ``run``, and its refusals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch import interrupts
from anabranch.autodiff.hooks import move_at_edges
from anabranch.executor import device_placement
from plain_loop import mean_square, sgd
from toys import interrupted_at, step_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.body(x)))


def squared(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    prediction = model(batch["x"])
    return F.mse_loss(prediction, batch["y"]), {"prediction": prediction.detach()}


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {"x": torch.randn(rows, 3, generator=generator), "y": torch.randn(rows, 1, generator=generator)}


def train_step(model: nn.Module | None = None, **options: Any) -> ab.TrainStep:
    model = Net() if model is None else model
    return ab.TrainStep(model, squared, sgd(model), **options)


# What comes back.


def test_fetch_finds_losses_keys_outputs_of_submodules_and_gradients() -> None:
    model = Net()
    names = ["prediction", "body", "body.0", "head.weight.grad"]
    model.drop.p = 0.0
    gradients = torch.autograd.grad(squared(model, batch_of())[0], [model.head.weight])
    with ab.Executor(train_step(model)) as executor:
        found = executor.run(batch=batch_of(), fetch=names)
        assert repr(executor) == "Executor({'default': TrainStep(Net, SGD)}, comm_mode=None, step=1)"
        numbers = executor.run(batch=batch_of(), fetch=["body", "grad_norm"], as_numpy=True)
        assert {type(value) for value in numbers.values()} == {np.ndarray}
    assert set(found) == {"loss", *names}
    assert found["body"].shape == (4, 4)
    assert torch.equal(found["body"], F.relu(found["body.0"]))
    assert torch.equal(found["head.weight.grad"], gradients[0])
    assert not model.head._forward_hooks


def test_a_fetched_gradient_is_unchanged_by_the_next_step() -> None:
    with ab.Executor(train_step(accumulate=2)) as executor:
        executor.run(batch=batch_of())
        first = executor.run(batch=batch_of(), fetch=["head.weight.grad"])["head.weight.grad"]
        kept = first.clone()
        for _ in range(2):
            executor.run(batch=batch_of(8))
        assert torch.equal(first, kept)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_numpy_arrays_and_scipy_matrices_are_taken_as_batches() -> None:
    model = nn.Linear(3, 1)
    matrix = scipy.sparse.random(4, 3, density=0.5, format="coo", dtype=np.float32, random_state=0)

    def loss(model: nn.Linear, batch: dict[str, Tensor]) -> Tensor:
        assert batch["features"].layout is torch.sparse_csr
        return F.mse_loss(batch["features"] @ model.weight.t() + model.bias, batch["y"])

    with ab.Executor(ab.TrainStep(model, loss, sgd(model))) as executor:
        found = executor.run(batch={"features": matrix, "y": np.ones((4, 1), dtype=np.float32)})
    expected = F.mse_loss(torch.from_numpy(matrix.toarray()) @ model.weight.new_zeros(3, 1), torch.ones(4, 1))
    assert found["loss"].shape == expected.shape


def test_a_batch_that_can_be_called_is_data_and_a_function_makes_a_batch() -> None:
    """A graph of PyTorch Geometric's can be called."""

    class Data(dict[str, Tensor]):
        def __call__(self) -> Iterator[Tensor]:
            yield from self.values()

    model, data = nn.Linear(2, 1), Data(x=torch.ones(3, 2))
    with ab.Executor(step_of(model, loss=lambda model, batch: model(batch["x"]).sum(), lr=0.0)) as executor:
        for batch in (data, lambda job: data):
            assert torch.equal(executor.run(batch=batch)["loss"], model(data["x"]).sum())
        with pytest.raises(ValueError, match=r"the function given to run\('default', ...\) returned None"):
            executor.run(batch=lambda job: None)


def test_train_steps_train_and_eval_steps_leave_modes_and_gradients_as_they_were() -> None:
    model = Net().eval()
    seen: dict[str, Any] = {}

    def outputs(model: Net, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        seen["training"] = [module.training for module in model.modules()]
        seen["grad_mode"] = torch.is_grad_enabled()
        return {"prediction": model(batch["x"])}

    steps = {"train": train_step(model), "validate": ab.EvalStep(model, outputs)}
    with ab.Executor(steps) as executor:
        assert model.training
        model.drop.eval()
        executor.run("train", batch_of())
        first = executor.run("validate", batch_of())["prediction"]
        assert seen == {"training": [False] * len(list(model.modules())), "grad_mode": False}
        assert model.training
        assert not model.drop.training
        executor.run("train", batch_of())
        assert not torch.equal(executor.run("validate", batch_of())["prediction"], first)  # current parameters


def test_a_run_that_fails_changes_nothing_and_the_next_one_works() -> None:
    model = Net()
    with ab.Executor(train_step(model)) as executor:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match="fetch names 'nothing'"):
            executor.run(batch=batch_of(), fetch=["nothing"])
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        executor.run(batch=batch_of())
        assert not torch.equal(model.head.weight, before["head.weight"])


def test_a_backward_that_fails_drops_the_open_window_and_says_so() -> None:
    explode = [False, True, False, False]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = mean_square(model, x)
        if explode.pop(0):
            value.register_hook(lambda gradient: 1 / 0)
        return value

    with ab.Executor(step_of(nn.Linear(3, 1), loss=loss, accumulate=2)) as executor:
        executor.run(batch=torch.ones(2, 3))
        with pytest.raises(ZeroDivisionError) as caught:
            executor.run(batch=torch.ones(2, 3))
        assert "1 runs accumulated" in caught.value.__notes__[0]
        for steps in (0, 1):
            executor.run(batch=torch.ones(2, 3))
            assert executor.step == steps


def test_a_batch_without_rows_trains_nothing() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    with ab.Executor(step_of(model)) as executor:
        executor.run(batch=torch.ones(0, 3))  # whose loss is NaN
        assert torch.equal(model.weight, before)
        executor.run(batch=torch.ones(2, 3))
        assert not torch.equal(model.weight, before)


# What is refused.


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda model, batch: model(batch["x"]), ValueError, r"shape \(4, 1\)"),
        (lambda model, batch: 3.0, TypeError, "float"),
        (lambda model, batch: (model(batch["x"]).mean(), 5), TypeError, "int"),
        (lambda model, batch: torch.zeros(()), ValueError, "does not depend"),
    ],
)
def test_a_loss_that_is_not_a_scalar_of_the_parameters_is_refused(loss: Any, error: Any, message: str) -> None:
    model = Net()
    with ab.Executor(ab.TrainStep(model, loss, sgd(model))) as executor, pytest.raises(error, match=message):
        executor.run(batch=batch_of())


def test_tensors_that_disagree_in_rows_are_named() -> None:
    with ab.Executor(train_step()) as executor:
        with pytest.raises(ValueError, match=r"x \(4, 3\), y \(5, 1\)"):
            executor.run(batch={"x": torch.zeros(4, 3), "y": torch.zeros(5, 1)})
        with pytest.raises(ValueError, match="no tensor with rows"):
            executor.run(batch={"x": 5})


def test_a_closed_executor_says_so() -> None:
    executor = ab.Executor(train_step())
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.run(batch=batch_of())


def test_a_parameter_thawed_where_its_gradient_would_not_be_summed_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    with ab.Executor(step_of(model, accumulate=2)) as executor:
        executor.run(batch=torch.ones(3, 2))
        model[0].weight.requires_grad_(True)
        before = model[0].bias.detach().clone()
        with pytest.raises(ValueError, match=r"'0\.weight' was thawed"):
            executor.run(batch=torch.ones(3, 2))
        assert torch.equal(model[0].bias, before)
        for _ in range(2):  # from the next window on it takes part
            executor.run(batch=torch.ones(3, 2))
        assert not torch.equal(model[0].bias, before)


def test_parameters_may_join_an_optimizer_later_if_they_are_the_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with ab.Executor(ab.TrainStep(model, lambda m, b: m(b).mean(), optimizer)) as executor:
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        executor.run(batch=torch.ones(3, 2))
        optimizer.add_param_group({"params": list(nn.Linear(1, 1).parameters())})
        with pytest.raises(ValueError, match=r"SGD was given a parameter of shape \(1, 1\) that the model d.* not"):
            executor.run(batch=torch.ones(3, 2))


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("engine", ["tape", "graph"])
@pytest.mark.parametrize(
    ("make", "mode", "options"),
    [
        (lambda: nn.Linear(3, 1), None, {}),
        (lambda: nn.Linear(3, 1), None, {"accumulate": 2}),
        (lambda: nn.Linear(3, 1), "PS", {}),
        (lambda: ab.Pipe(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), [1, 1], chunks=1), None, {}),
    ],
    ids=["alone", "accumulated", "PS", "pipe"],
)
def test_an_update_that_ctrl_c_meets_is_made_and_counted_first(
    engine: Any, make: Any, mode: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was made and not counted would be made again after a resume."""

    def weight_after(interrupted: bool) -> tuple[list[int], Tensor]:
        torch.manual_seed(0)
        model = make()
        piped = isinstance(model, ab.Pipe)
        loss = (lambda output, _: output.square().mean()) if piped else mean_square
        step = step_of(model, loss=loss, **options)
        counts = []
        set_handler = interrupts._set_handler

        def set_handler_and_press(number: int, handler: Any) -> Any:
            before = set_handler(number, handler)
            if handler is interrupts._hold:
                signal.raise_signal(number)
            return before

        with ab.Executor(step, mode, engine=engine) as executor:
            while executor.step < 4:
                count = executor.step
                with monkeypatch.context() as patched:
                    if interrupted:
                        patched.setattr(interrupts, "_set_handler", set_handler_and_press)
                    try:
                        x = torch.randn(2, 3)
                        executor.run(batch=(x, x) if piped else x)
                        assert not interrupted or executor.step == count
                    except KeyboardInterrupt:
                        assert executor.step == count + 1
                counts.append(executor.step)
        return counts, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    plain, interrupted = weight_after(False), weight_after(True)
    assert plain[0] == interrupted[0]
    assert torch.equal(plain[1], interrupted[1])


def test_a_second_ctrl_c_does_not_wait_for_an_update() -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    with ab.Executor(ab.TrainStep(model, mean_square, optimizer)) as executor:
        executor.run(batch=torch.randn(2, 3))
        reached = []

        def stuck(*_: object) -> None:
            signal.raise_signal(signal.SIGINT)
            reached.append("first")
            signal.raise_signal(signal.SIGINT)
            reached.append("second")

        optimizer.register_step_post_hook(stuck)
        with pytest.raises(KeyboardInterrupt):
            executor.run(batch=torch.randn(2, 3))
        assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_hears_each_ctrl_c_in_an_update() -> None:
    """One that stops at the second was called for the first alone."""
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    presses: list[int] = []
    heard: list[int] = []

    def press(*_: object) -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            heard.append(len(presses))

    optimizer.register_step_post_hook(press)
    before = signal.signal(signal.SIGINT, lambda number, frame: presses.append(number))
    try:
        with ab.Executor(ab.TrainStep(model, mean_square, optimizer)) as executor:
            executor.run(batch=torch.randn(2, 3))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (heard, len(presses)) == ([0, 2, 3], 3)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_run_continues_after_an_interrupt_at_any_line(engine: Any) -> None:
    """Ctrl-C in a notebook left the session open, or gradients switched off, for good."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with ab.Executor(step_of(model), engine=engine) as executor:
        executor.run(batch=torch.randn(2, 3))
        executor.run(batch=torch.randn(2, 3))
        lines, files = 1, ("anabranch", "grad_mode")
        but = interrupts.__file__  # it holds signals, of which a trace knows nothing
        while interrupted_at(lines, lambda: executor.run(batch=torch.randn(2, 3)), files, but):
            lines += 1
            assert torch.is_grad_enabled()
            before = model.weight.detach().clone()
            executor.run(batch=torch.randn(2, 3))
            assert not torch.equal(model.weight, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not interrupts._has_block
    assert lines > 50


# ``devices=``: parts of a model elsewhere, the same numbers, and transfers at the edges only.


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        # Its bias would have no gradient, so that Adam would move it by what was rounded.
        self.encoder = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8))
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.encoder(x))  # type: ignore[no-any-return]


def train(engine: Any, devices: dict[str, str] | None) -> tuple[list[Tensor], list[str]]:
    """The losses and the state in the end, and the transfers in the graph."""
    torch.manual_seed(0)
    model = Placed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = ab.TrainStep(model, mean_square, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    with ab.Executor(step, engine=engine, devices=devices) as executor:
        losses = [executor.run(batch=torch.randn(6, 4))["loss"].cpu() for _ in range(3)]
        transfers = []
        if engine == "graph":
            page = executor.graph("default").to_dot()
            transfers = [line.split("tooltip=")[1] for line in page.splitlines() if "tooltip=" in line]
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}  # back where they were
    assert not model.encoder._forward_hooks
    return [*losses, *model.state_dict().values()], transfers


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_placed_model_gives_the_same_numbers(engine: Any) -> None:
    plain, _ = train("tape", None)
    placed, transfers = train(engine, {"encoder": "cpu", "encoder.2": "cpu"})
    assert all(map(torch.equal, plain, placed))
    assert transfers == []  # it is where it was


def test_each_part_runs_on_its_own_device_and_returns_to_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: dict[nn.Module, tuple[str, str]] = {}

    def note(module: nn.Module, device: torch.device, around: torch.device) -> AbstractContextManager[None]:
        moves[module] = str(device), str(around)
        return nullcontext()

    monkeypatch.setattr(device_placement, "move_at_edges", note)
    model = Placed()
    devices = {"encoder.2": "cpu", "encoder": "meta", "head": "meta"}
    with pytest.raises(NotImplementedError, match="meta"), device_placement.placed([model], devices):  # no way back
        places = {name: str(tensor.device) for name, tensor in model.state_dict().items()}
    assert moves == {model.encoder[2]: ("cpu", "meta"), model.encoder: ("meta", "cpu"), model.head: ("meta", "cpu")}
    assert {name for name, device in places.items() if device == "meta"} == {
        name for name in places if name.startswith(("encoder.0", "encoder.1", "head"))
    }


def test_tensors_are_moved_at_the_edges() -> None:
    seen: list[str] = []

    class Inner(nn.Module):
        def forward(self, x: dict[str, Tensor], *, scale: Tensor) -> tuple[Tensor, int]:
            seen.extend((str(x["x"].device), str(scale.device)))
            return torch.ones(2, device="cpu"), 3

    module = Inner()
    with move_at_edges(module, torch.device("meta"), torch.device("meta")):
        output, number = module({"x": torch.ones(2)}, scale=torch.ones(()))
    assert seen == ["meta", "meta"]
    assert (str(output.device), number) == ("meta", 3)
    assert str(module({"x": torch.ones(2)}, scale=torch.ones(()))[0].device) == "cpu"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_part_on_another_device_trains_there(engine: Any) -> None:
    plain, _ = train("tape", None)
    placed, transfers = train(engine, {"encoder": "cuda:0"})
    for theirs, mine in zip(placed, plain, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    if engine == "graph":
        assert any("cpu -> cuda:0" in transfer for transfer in transfers)
        assert any("cuda:0 -> cpu" in transfer for transfer in transfers)
