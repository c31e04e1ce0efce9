"""No exception of user code ends a server's thread: its caller gets the error, and others are served."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from expert_modules import calling, served
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import RemoteError
from anabranch.experts import Directory, ExpertBackend, Task, TaskPool
from anabranch.tensors import TensorSpec
from waiting import wait_until


class Panic(BaseException):
    """As pyo3's PanicException and pytest's Failed: no ``Exception``."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, module: Exits) -> Tensor:
        ctx.module = module  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.raise_at("backward")  # type: ignore[attr-defined]
        return gradient, None


class Exits(nn.Module):
    """Raises once, at the place it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.places = [""]  # in a list: what a forward that fails does to a plain attribute is undone
        self.error: BaseException = SystemExit(3)

    def raise_at(self, place: str) -> None:
        if self.places[0] == place:
            self.places[0] = ""
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.raise_at("forward")
        return _Raises.apply(self.linear(x), self)


class Steps(torch.optim.SGD):
    def __init__(self, module: Exits) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self._module = module

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self._module.raise_at("step")
        super().step()


def make(uid: str = "ffn.0") -> tuple[Exits, ExpertBackend]:
    module = Exits()
    return module, ExpertBackend(uid, module, Steps(module), args_schema=[TensorSpec(2)])


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("pressed"), Panic("rust")], ids=repr)
def test_an_exit_in_a_module_is_its_callers_error_and_the_server_serves_on(
    error: BaseException, place: str, quick: bool
) -> None:
    module, backend = make()
    module.error = error
    with calling(backend) as expert:
        for pool in backend.get_pools() if quick else ():
            pool.note_seconds(1, 1e-6)
        x = torch.ones(1, 2, requires_grad=True)
        module.places[0] = place
        with pytest.raises(RemoteError, match=f"{type(error).__name__}: {error}"):
            expert(x).sum().backward()
        updates = backend.updates
        expert(x).sum().backward()
        assert backend.updates == updates + 1
        assert all(parameter.grad is None for parameter in module.parameters())


def test_ctrl_c_in_the_main_thread_passes() -> None:
    def interrupted(x: Tensor) -> list[Tensor]:
        raise KeyboardInterrupt

    pool = TaskPool(interrupted)
    answers: list[object] = []
    pool.submit(Task([torch.ones(1, 1)], 1, Deadline.after(60.0), answers.append))
    with pytest.raises(KeyboardInterrupt):
        pool.run(pool.take_batch())
    assert isinstance(answers[0], KeyboardInterrupt)
    module, backend = make()
    module.places[0], module.error = "step", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        backend.backward(torch.ones(1, 2), torch.ones(1, 2))


class Unsteady(Directory):
    """A directory of the user's own, whose second announcement exits."""

    announced = 0

    def announce(self, uids: Iterable[str], endpoint: str, ttl: float) -> None:
        self.announced += 1
        if self.announced == 2:
            raise SystemExit("no directory")
        super().announce(uids, endpoint, ttl)


def test_announcements_are_renewed_after_a_directory_has_exited(caplog: pytest.LogCaptureFixture) -> None:
    directory = Unsteady()
    with served(make()[1], directory=directory, ttl=0.01):
        wait_until(lambda: directory.announced > 3)
    assert "no directory" in caplog.text
