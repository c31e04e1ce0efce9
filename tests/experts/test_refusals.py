"""A request that does not fit, or a module that fails, is its caller's error alone, with the expected form."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
import torch
from expert_modules import CausalBlock, Feedforward, adam, calling, expert_of, served, sgd
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import AnabranchError, NonFinite, ProtocolError, RemoteError, SchemaError
from anabranch.experts import (
    Directory,
    ExpertBackend,
    ExpertServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
    Task,
    TaskPool,
    wire,
)
from anabranch.tensors import TensorSpec
from anabranch.tensors.spec import Compression
from anabranch.transport import Call, Client, Request, TensorHeader, allocate, pack
from anabranch.transport.frame import Hello, RequestHeader, encode
from waiting import running, wait_until


def test_arguments_that_do_not_fit_are_refused_locally_with_the_expected_form() -> None:
    wrong: list[tuple[tuple[object, ...], str]] = [
        ((torch.ones(2, 5),), r"args\.0: expected \(rows, 4\) float32, got \(2, 5\)"),
        ((torch.ones(2, 4, dtype=torch.float64),), "float64"),
        ((torch.ones(4),), r"got \(4\)"),
        ((torch.ones(2, 4), torch.ones(2, 4)), "expected arguments"),
        (([torch.ones(2, 4)],), "expected arguments"),
        (("text",), "got str"),
    ]
    with calling(expert_of(Feedforward())) as caller:
        for arguments, says in wrong:
            with pytest.raises(SchemaError, match=says):
                caller(*arguments)
        with pytest.raises(SchemaError, match="expected arguments"):
            caller(torch.ones(2, 4), by=torch.ones(2, 4))
    pair = expert_of(nn.Bilinear(2, 2, 1), args_schema=[TensorSpec(2), TensorSpec(2)])
    with calling(pair) as caller, pytest.raises(SchemaError, match=r"args\.0 has 2, args\.1 has 3"):
        caller(torch.ones(2, 2), torch.ones(3, 2))


def expert(uid: str = "ffn.0", module: nn.Module | None = None, **options: object) -> ExpertBackend:
    options.setdefault("args_schema", [TensorSpec(1)])
    return ExpertBackend(uid, module or nn.Linear(1, 1), **options)  # type: ignore[arg-type]


def mixture(kind: type = RemoteMixtureOfExperts, **options: object) -> nn.Module:
    arguments = {"in_features": 4, "grid_size": (2,), "directory": Directory(), "uid_prefix": "ffn", **options}
    return kind(**arguments)  # type: ignore[no-any-return]


def stepping(make: Callable[[torch.optim.Optimizer], object], kind: type[ExpertBackend] = ExpertBackend) -> object:
    module = nn.Linear(1, 1)
    scheduler = make(optimizer := sgd(module))
    return kind("ffn.0", module, optimizer, scheduler=scheduler, args_schema=[TensorSpec(1)])  # type: ignore[arg-type]


class Own(ExpertBackend):
    def apply_gradients(self) -> None: ...


class OfLength(nn.Module):
    """Returns something else for long inputs."""

    def __init__(self, of_long: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.of_long = of_long

    def forward(self, x: Tensor) -> object:
        return x if x.shape[1] <= 8 else self.of_long(x)


def of_length(of_long: Callable[[Tensor], object]) -> ExpertBackend:
    return expert(module=OfLength(of_long), args_schema=[TensorSpec(None, 2)])


class Overriding(ExpertBackend):
    def backward(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return inputs


def session(max_length: object = 8, ttl: float = 60.0) -> object:
    return RemoteExpert("block.0", "unix:/nowhere").session(max_length, ttl)  # type: ignore[arg-type]


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: expert("ffn"), ValueError, "not a uid"),
    (lambda: expert("ffn.01"), ValueError, "leading"),
    (lambda: expert(args_schema=()), ValueError, "without inputs"),
    (lambda: expert(optimizer=adam(nn.Linear(1, 1))), ValueError, "another module"),
    (lambda: expert(module=nn.Linear(2, 1)), SchemaError, "does not accept"),
    (lambda: expert(module=nn.Flatten(0), args_schema=[TensorSpec(2)]), SchemaError, "as many rows"),
    (lambda: of_length(lambda x: x.sum(1)), SchemaError, "the length of its input"),
    (lambda: of_length(lambda x: None), SchemaError, "the length of its input"),
    (lambda: of_length(lambda x: x.unbind(1)), SchemaError, "the length of its input"),
    (lambda: of_length(lambda x: x.double()), SchemaError, "the length of its input"),
    (lambda: expert(args_schema=["x"]), SchemaError, "TensorSpec"),
    (lambda: expert(max_batch_size=0), ValueError, "batch sizes"),
    (lambda: expert(min_batch_size=5000), ValueError, "batch sizes"),
    (lambda: expert(timeout=-1.0), ValueError, "timeout is a finite number"),
    (lambda: Overriding("ffn.0", nn.Linear(1, 1)), TypeError, "overrides backward.*override apply_gradients"),
    (lambda: expert(clip_grad_norm=0.0), ValueError, "a norm above 0"),
    (lambda: expert(keep_activations=True), ValueError, "a number of rows"),
    (lambda: ExpertServer([expert(), expert()]), ValueError, "two backends are called 'ffn.0'"),
    (lambda: expert(gradient_reduction="max"), ValueError, "gradient_reduction"),
    (
        lambda: expert(module=(m := nn.Linear(1, 1)), optimizer=torch.optim.LBFGS(m.parameters())),
        ValueError,
        r"ffn\.0: LBFGS\.step is called without arguments \(.*'closure'\); use another one, or override",
    ),
    (lambda: stepping(torch.optim.lr_scheduler.ReduceLROnPlateau), ValueError, r"ReduceLROnPlateau\.step .*'metrics'"),
    (lambda: expert(module=CausalBlock(), kwargs_schema={"cache": TensorSpec(4)}), ValueError, "an input called cache"),
    (lambda: ExpertServer([]), ValueError, "without experts"),
    (lambda: ExpertServer([expert()], session_bytes=65535), ValueError, "session_bytes is a whole"),
    (lambda: ExpertServer([expert()], session_bytes=1e9), ValueError, "session_bytes is a whole"),  # type: ignore[arg-type]
    (lambda: RemoteExpert("ffn", "unix:/nowhere"), ValueError, "not a uid"),
    (lambda: RemoteExpert("ffn.0", "unix:/nowhere", forward_timeout=0), ValueError, "forward_timeout"),
    (lambda: session(0), ValueError, "max_length is a whole number"),
    (lambda: session(2.5), ValueError, "max_length is a whole number"),
    (lambda: session(ttl=float("inf")), ValueError, "ttl is a finite number"),
    (lambda: mixture(grid_size=()), ValueError, "grid_size"),
    (
        lambda: mixture(directory=None),
        TypeError,
        r"got None; in a job .* job\.serve\(make_backends\)",
    ),
    (lambda: RemoteExpert("ffn.0", None), TypeError, "found by a Directory or an endpoint, got None"),  # type: ignore[arg-type]
    (lambda: mixture(k_min=9), ValueError, "k_min"),
    (lambda: mixture(forward_timeout=0.0), ValueError, "forward_timeout"),
    (lambda: mixture(timeout_after_k_min=-1.0), ValueError, "timeout_after_k_min"),
    (lambda: mixture(uid_prefix="1ffn"), ValueError, "not a prefix"),
    (lambda: mixture(k_min="a"), TypeError, "k_min is a .*number.* got 'a'"),
    (lambda: mixture(backward_timeout="a"), TypeError, "backward_timeout is a .*number.* got 'a'"),
    (lambda: mixture(RemoteSwitchMixtureOfExperts, jitter="a"), TypeError, "jitter is a number in .* got 'a'"),
]


@pytest.mark.parametrize(("make", "error", "says"), MISTAKES)
def test_mistakes_are_explained(make: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_an_override_of_the_update_may_step_as_it_needs() -> None:
    assert stepping(torch.optim.lr_scheduler.ReduceLROnPlateau, Own)


class Many(nn.Module):
    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [x * 2 for x in inputs[1:]]


def test_an_expert_of_more_tensors_than_a_backward_can_send_is_refused_when_it_is_made() -> None:
    def make(inputs: int, compression: Compression | None = None, **options: object) -> ExpertBackend:
        return expert("many.0", Many(), args_schema=[TensorSpec(2, compression=compression)] * inputs, **options)

    make(32)
    says = r"^many\.0: a message carries at most 64 tensors, and this expert needs 65 .*requires_grad=False"
    with pytest.raises(SchemaError, match=says):
        make(33)
    make(64, outputs_schema=[TensorSpec(2, requires_grad=False)] * 63)
    with pytest.raises(SchemaError, match="needs 68 "):
        make(23, "int8")


class Short(nn.Module):
    """A module that may lose its last row."""

    def __init__(self, *, pair: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.pair, self.loses = pair, False

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        whole = x * self.scale
        cut = whole[:-1] if self.loses else whole
        return (whole, cut) if self.pair else cut


@pytest.mark.parametrize("keep", [0, 64])
@pytest.mark.parametrize("pair", [False, True])
def test_a_module_that_returns_other_rows_than_it_took_is_named(pair: bool, keep: int) -> None:
    """Callers were told of the protocol, of autograd or of ``split_with_sizes``."""
    module = Short(pair=pair)
    backend = expert_of(module, uid="e.0", keep_activations=keep)
    says = rf"^e\.0's output {int(pair)}: expected 2 rows, as in the input, got 1; "
    with calling(backend) as caller:
        x = torch.ones(2, 4, requires_grad=True)
        outputs = caller(x)
        module.loses = True
        with pytest.raises(SchemaError, match=says):
            caller(x)
        if not keep:  # else the forward that was whole is the one that runs back
            with pytest.raises(SchemaError, match=says):
                (outputs[1] if pair else outputs).sum().backward()
            assert not backend.updates


@pytest.mark.parametrize("shape", [(1 << 20, 4), (2, 1 << 20), (2, 4, 1)])
def test_the_answer_to_a_backward_is_checked_before_memory_is_taken(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient of 1 GB for an input of a few rows cost its caller as much memory, and then the error."""
    reply = Call.reply

    def other(call: Call, tensors: Sequence[Tensor] = (), payload: bytes = b"") -> None:
        reply(call, [torch.zeros(shape)] if call.verb == wire.BACKWARD else tensors, payload)

    taken: list[int] = []

    def counted(headers: Sequence[TensorHeader]) -> list[Tensor]:
        taken.extend(header.nbytes for header in headers)
        return allocate(headers)

    with calling(expert_of(Feedforward())) as caller:
        y = caller(torch.ones(2, 4, requires_grad=True))
        monkeypatch.setattr(Call, "reply", other)
        monkeypatch.setattr("anabranch.transport.client.allocate", counted)
        with pytest.raises((ProtocolError, SchemaError), match="gradient|2 rows were sent, but"):
            y.sum().backward()
    assert sum(taken) < 1000


# --- NaN and infinity are refused where they come, counted, and the error names where they were made


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("compression", [None, "float16", "bfloat16", "int8"])
def test_infinity_is_refused_at_the_server_and_no_compression_turns_it_into_a_number(
    compression: Compression | None, value: float
) -> None:
    spec, module = TensorSpec(2, compression=compression), nn.Linear(2, 2)
    backend = expert_of(module, args_schema=[spec], outputs_schema=spec)
    with served(backend) as server:
        caller = RemoteExpert("ffn.0", server.endpoint)
        y = caller(torch.tensor([[1.0, 1e30]]))  # a number, however large, is rounded to one
        assert y.isfinite().all()
        with pytest.raises(NonFinite, match=r"args\.0 holds NaN or Inf"):
            caller(torch.tensor([[1.0, value]]))
        with pytest.raises(NonFinite, match=r"^ffn\.0: gradient of output 0 holds NaN or Inf"):
            y.backward(torch.tensor([[1.0, value]]))
        caller(torch.ones(2, 2)).sum().backward()
        assert sum(server.statistics().not_finite.values()) == 2
    assert backend.updates == 1
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


class Sick(nn.Linear):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


@pytest.mark.parametrize("keep", [0, 8])
def test_a_module_that_answers_nan_is_named_by_the_backward_that_it_spoils(keep: int) -> None:
    module = Sick(2, 2)
    backend = expert_of(module, 2, keep_activations=keep)
    with calling(backend) as caller:
        healthy = caller(torch.ones(1, 2))
        module.factor = float("nan")
        y = caller(torch.ones(1, 2))  # as a local module, it hands NaN on
        assert y.isnan().all()
        with pytest.raises(NonFinite, match="If an output did too, the cause is the module, not the loss"):
            y.square().mean().backward()
        if not keep:  # it is NaN in backward alone
            with pytest.raises(NonFinite, match="weight is NaN or Inf because the module's own output holds NaN"):
                healthy.sum().backward()
    assert backend.updates == 0


# --- one bad request among good ones in a batch, of every kind there is: the others never notice

ROWS, GOOD = 2, 7
GRADIENT = pack(wire.BackwardHeader([True], [wire.RequestPart(ROWS, b"")], False, True))
FORWARD = pack(wire.ForwardHeader([wire.RequestPart(ROWS, b"")], False))


class Table(nn.Module):
    """Rows that do not see one another, and a value that it cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if (x == 666.0).any():
            raise IndexError("no such row")
        # A row at a time: then a batch's answers are those of its requests alone, bit for bit.
        return torch.stack([self.linear(row) for row in x])


Bad = Callable[[str, bytes], None]


def ask(**changes: object) -> Bad:
    """Asks for a forward that differs from a good one."""

    def run(endpoint: str, schema: bytes) -> None:
        facts = {"verb": wire.FORWARD, "target": "table.0", "tensors": [torch.ones(ROWS, 4)], "payload": FORWARD}
        with Client(retries=0) as client:
            client.call(Request(endpoint, **{**facts, "schema": schema, **changes}), Deadline.after(60.0))  # type: ignore[arg-type]

    return run


def send(data: bytes) -> Bad:
    """Sends bytes and goes."""

    def run(endpoint: str, schema: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(endpoint.removeprefix("unix:"))
            sock.sendall(data)
        raise ValueError("gone")

    return run


def leave(endpoint: str, schema: bytes) -> None:
    """Asks and does not wait."""
    ask_once = Request(endpoint, wire.FORWARD, "table.0", [torch.ones(ROWS, 4)], FORWARD, schema)
    with Client(retries=0) as client:
        client.gather([ask_once], Deadline.after(0.001))
    raise ValueError("left")


def backward(gradient: Tensor) -> Bad:
    return ask(verb=wire.BACKWARD, tensors=[torch.ones(ROWS, 4), gradient], payload=GRADIENT, once=True)


HEADER = RequestHeader(wire.FORWARD, "table.0", seconds=5.0)
WHOLE = b"".join(bytes(part) for part in (*encode(Hello()), *encode(HEADER, [torch.ones(ROWS, 4)])))
BAD: dict[str, Bad] = {
    "another shape": ask(tensors=[torch.ones(ROWS, 5)]),
    "another dtype": ask(tensors=[torch.ones(ROWS, 4).double()]),
    "no rows dimension": ask(tensors=[torch.tensor(1.0)]),
    "no tensor": ask(tensors=[]),
    "a tensor too many": ask(tensors=[torch.ones(ROWS, 4)] * 2),
    "a body over the limit": ask(tensors=[torch.ones(10_000, 4)]),
    "NaN": ask(tensors=[torch.full((ROWS, 4), float("nan"))]),
    "another schema": ask(schema=b"other"),
    "another uid": ask(target="table.9"),
    "a path for a uid": ask(target="../table.0"),
    "another verb": ask(verb="expert.steal"),
    "a long ticket": ask(payload=pack(wire.ForwardHeader([wire.RequestPart(ROWS, bytes(100))], False))),
    "a forward of garbage": ask(payload=b"\xc1"),
    "a backward without a number": ask(verb=wire.BACKWARD, payload=GRADIENT),
    "a backward of garbage": ask(verb=wire.BACKWARD, payload=b"\xc1", once=True),
    "gradients of other rows": backward(torch.ones(ROWS + 1, 4)),
    "a gradient that is NaN": backward(torch.full((ROWS, 4), float("nan"))),
    "a value the module cannot take": ask(tensors=[torch.full((ROWS, 4), 666.0)]),
    "no greeting": send(bytes(64)),
    "half a request": send(WHOLE[:-7]),
    "a request with a changed bit": send(WHOLE[:60] + bytes([WHOLE[60] ^ 4]) + WHOLE[61:]),
    "a request that is not waited for": send(WHOLE),
    "a caller that leaves": leave,
}


def test_one_bad_request_of_eight_harms_none_of_the_others_whatever_is_wrong_with_it() -> None:
    module = Table()
    backend = expert_of(module, uid="table.0", optimizer=None, min_batch_size=GOOD * ROWS, timeout=0.2)
    with served(backend, max_body=4096) as server, torch.no_grad():
        experts = [RemoteExpert("table.0", server.endpoint) for _ in range(GOOD)]
        for one in experts:
            one.get_info()
        outcomes: list[object] = [None] * GOOD

        def good(index: int, x: Tensor, barrier: threading.Barrier) -> None:
            barrier.wait(timeout=60)
            with torch.no_grad():
                outcomes[index] = experts[index](x)

        # Each kind with fresh neighbours, then one of them alone.
        for name in BAD:
            inputs, barrier = [torch.randn(ROWS, 4) for _ in range(GOOD)], threading.Barrier(GOOD + 1)
            with running(*(partial(good, index, x, barrier) for index, x in enumerate(inputs))):
                barrier.wait(timeout=60)
                with pytest.raises((AnabranchError, ValueError, OSError)):
                    BAD[name](server.endpoint, backend.schema.hash)
            for x, outcome in zip(inputs, outcomes, strict=True):
                assert isinstance(outcome, Tensor), name
                assert torch.equal(outcome, module(x)), name
        backend.forward_pool.min_batch_size = 1
        x = torch.randn(1, 4)
        for _ in range(1000):
            assert torch.equal(experts[0](x), module(x))
    assert backend.updates == 0


# --- no exception of user code ends a server's thread: its caller gets the error, and others are served


class Panic(BaseException):
    """As pyo3's PanicException and pytest's Failed: no ``Exception``."""


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
        answer: Tensor = self.linear(x)
        if answer.requires_grad:
            answer.register_hook(lambda gradient: self.raise_at("backward"))
        return answer


class Steps(torch.optim.SGD):
    def __init__(self, module: Exits) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self._module = module

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self._module.raise_at("step")
        super().step()


def faulty() -> tuple[Exits, ExpertBackend]:
    module = Exits()
    return module, expert_of(module, 2, optimizer=Steps(module))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("place", ["forward", "backward", "step"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("pressed"), Panic("rust")], ids=repr)
def test_an_exit_in_a_module_is_its_callers_error_and_the_server_serves_on(
    error: BaseException, place: str, quick: bool
) -> None:
    module, backend = faulty()
    module.error = error
    with calling(backend) as caller:
        for pool in backend.get_pools() if quick else ():
            pool.note_seconds(1, 1e-6)
        x = torch.ones(1, 2, requires_grad=True)
        module.places[0] = place
        with pytest.raises(RemoteError, match=f"{type(error).__name__}: {error}"):
            caller(x).sum().backward()
        updates = backend.updates
        caller(x).sum().backward()
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
    module, backend = faulty()
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
    with served(faulty()[1], directory=directory, ttl=0.01):
        wait_until(lambda: directory.announced > 3)
    assert "no directory" in caplog.text
