"""Experts that a command line or a file describes: all that a backend takes can be said, and mistakes are named."""

from __future__ import annotations

import builtins
import inspect
import json
import signal
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from expert_modules import served
from fleet_modules import Two, Wide
from test_serving import service
from typer.testing import CliRunner

from anabranch.cli import serve as serving
from anabranch.experts import (
    Directory,
    DirectoryServer,
    ExpertBackend,
    ExpertGroup,
    RemoteExpert,
    draw_uids,
    make_experts,
    read_fleet,
)
from anabranch.experts.uid_patterns import UidPattern
from anabranch.tensors import TensorSpec
from programs import Programs

HERE = "fleet_modules"


def one(**said: object) -> ExpertBackend:
    said.setdefault("uids", "ffn.0")
    (backend,) = make_experts([ExpertGroup(**said)])  # type: ignore[arg-type]
    return backend


# --- what can be said


def test_every_plain_argument_of_a_backend_can_be_given() -> None:
    backend = one(
        features=4,
        optimizer="sgd",
        optimizer_args={"momentum": 0.9},
        lr=0.25,
        scheduler="StepLR",
        scheduler_args={"step_size": 1, "gamma": 0.5},
        clip_grad_norm=2.0,
        gradient_reduction="mean",
        keep_activations=8,
        min_batch_size=2,
        max_batch_size=16,
        timeout=0.5,
        max_queue_rows=100,
        max_queue_bytes=1000,
        device="cpu",
    )
    assert isinstance(backend.optimizer, torch.optim.SGD)
    assert backend.optimizer.defaults["momentum"] == 0.9
    assert backend.optimizer.defaults["lr"] == 0.25
    backend.backward(torch.ones(2, 4), torch.ones(2, 4))
    assert backend.optimizer.param_groups[0]["lr"] == 0.125
    assert backend.clip_grad_norm == 2.0
    assert backend.gradient_reduction == "mean"
    assert backend.kept.budget == 8
    for pool in backend.get_pools():
        assert (pool.min_batch_size, pool.max_batch_size, pool.timeout) == (2, 16, 0.5)
        assert (pool.max_queue_rows, pool.max_queue_bytes) == (100, 1000)


def test_a_group_can_say_all_that_a_backend_takes() -> None:
    said = {field.name for field in fields(ExpertGroup)}
    assert set(inspect.signature(ExpertBackend).parameters) - {"uid"} <= said
    options = set(inspect.signature(serving.experts).parameters)
    assert said - {"where"} <= options


def test_without_options_the_command_serves_its_defaults() -> None:
    backend = one()
    assert backend.schema.arguments == (TensorSpec(512),)
    assert isinstance(backend.optimizer, torch.optim.Adam)
    assert backend.optimizer.defaults["lr"] == 1e-3


def test_a_factory_takes_arguments() -> None:
    backend = one(module=f"{HERE}:wide", module_args={"width": 4, "scale": 3.0}, args_schema=[{"shape": [4]}])
    assert isinstance(backend.module, Wide)
    assert backend.module.scale == 3.0
    backend = one(module=f"{HERE}:of_features", features=6, module_args={"scale": 2.0})
    assert backend.schema.arguments == (TensorSpec(6),)
    assert backend.module.scale == 2.0


def test_schemas_of_several_inputs_are_given_in_plain_values() -> None:
    backend = one(
        module=f"{HERE}:two",
        module_args={},
        args_schema=[{"shape": [4]}],
        kwargs_schema={"ids": {"shape": [], "dtype": "int64"}},
        outputs_schema=[{"shape": [4]}, {"shape": [], "dtype": "int64"}],
    )
    assert backend.schema.keywords == {"ids": TensorSpec(dtype=torch.int64)}
    assert backend.schema.outputs == (TensorSpec(4), TensorSpec(dtype=torch.int64))
    with served(backend) as server:
        outputs = RemoteExpert("ffn.0", server.endpoint)(torch.ones(2, 4), ids=torch.tensor([1, 2]))
    assert outputs[1].tolist() == [2, 3]
    nested = one(
        module="torch.nn:Identity",
        module_args={},
        args_schema=[{"a": [{"shape": ["any", 2], "pad": False}, None], "b": {"shape": [3], "requires_grad": False}}],
        outputs_schema={"a": [{"shape": ["any", 2]}, None], "b": {"shape": [3]}},
    )
    assert nested.schema.arguments[0] == {"a": [TensorSpec(None, 2), None], "b": TensorSpec(3, requires_grad=False)}


def test_a_factory_may_return_all_arguments_of_a_backend_and_given_ones_take_precedence() -> None:
    backend = one(module=f"{HERE}:complete", module_args={"width": 3})
    assert isinstance(backend.module, Two)
    assert backend.schema.arguments == (TensorSpec(3),)
    assert backend.optimizer is not None
    assert backend.optimizer.defaults["lr"] == 0.5
    assert backend.scheduler is not None
    assert backend.forward_pool.max_batch_size == 11
    said = one(
        module=f"{HERE}:complete",
        module_args={},
        max_batch_size=5,
        optimizer="adagrad",
        scheduler=f"{HERE}:halving",
        scheduler_args={"factor": 0.25},
    )
    assert said.forward_pool.max_batch_size == 5
    assert isinstance(said.optimizer, torch.optim.Adagrad)
    assert said.scheduler is not None
    assert said.scheduler.optimizer is said.optimizer
    assert isinstance(one(module=f"{HERE}:with_schema", module_args={}).optimizer, torch.optim.Adam)
    assert one(module=f"{HERE}:with_schema", module_args={}, optimizer="none").optimizer is None
    custom = one(features=4, optimizer="torch.optim:RMSprop", optimizer_args={"alpha": 0.5})
    assert isinstance(custom.optimizer, torch.optim.RMSprop)


def test_compression_is_of_all_floating_values() -> None:
    backend = one(module=f"{HERE}:complete", module_args={}, compression="int8")
    assert backend.schema.arguments == (TensorSpec(4, compression="int8"),)
    assert backend.schema.keywords == {"ids": TensorSpec(dtype=torch.int64)}
    assert backend.schema.outputs == (
        TensorSpec(4, compression="int8"),
        TensorSpec(dtype=torch.int64),
    )
    own = one(module="nop", features=4, compression="int8", args_schema=[{"shape": [4], "compression": "float16"}])
    assert own.schema.arguments == (TensorSpec(4, compression="float16"),)
    assert own.schema.outputs == TensorSpec(4, compression="int8")


# --- uids drawn at random


def test_drawn_uids_are_different_repeatable_and_not_those_taken() -> None:
    pattern = "ffn.[0:31].[0:255]"
    drawn = draw_uids(pattern, 16, seed=1)
    assert len(set(drawn)) == 16
    assert drawn == draw_uids(pattern, 16, seed=1) != draw_uids(pattern, 16, seed=2)
    assert all(uid in UidPattern(pattern) for uid in drawn)
    others = draw_uids(pattern, 16, seed=1, taken=lambda uids: [uid for uid in uids if uid in drawn])
    assert not set(drawn) & set(others)
    assert sorted(draw_uids("ffn.[0:5].[0:3]", 15)) == sorted(UidPattern("ffn.[0:5].[0:3]"))
    free = {"ffn.7.7", "ffn.30.254"}
    assert set(draw_uids(pattern, 2, taken=lambda uids: set(uids) - free)) == free
    with pytest.raises(ValueError, match="matches 7905, of which 2 are free; widen a range"):
        draw_uids(pattern, 3, taken=lambda uids: set(uids) - free)
    huge = draw_uids("ffn.[0:4096].[0:4096].[0:4096]", 4, seed=0)
    assert len(set(huge)) == 4
    with pytest.raises(ValueError, match="narrow a range"):
        UidPattern("ffn" + ".[0:4294967296]" * 3)


def test_drawn_uids_are_not_those_that_the_directory_lists_nor_those_of_other_groups() -> None:
    directory = Directory()
    directory.announce([f"ffn.{index}" for index in range(0, 20, 2)], "unix:/run/experts", ttl=60.0)
    groups = [
        ExpertGroup(uids="ffn.[0:20]", count=6, seed=0, features=2),
        ExpertGroup(uids="ffn.[0:20]", count=2, features=2),
        ExpertGroup(uids="ffn.1", features=2),
    ]
    backends = make_experts(groups, directory=directory)
    uids = [backend.uid for backend in backends]
    assert len(set(uids)) == 9
    assert uids[-1] == "ffn.1"
    assert all(int(uid.split(".")[1]) % 2 for uid in uids)


@pytest.mark.parametrize("seed", [None, 1])
def test_two_that_draw_before_either_announces_draw_different_uids(seed: int | None) -> None:
    group = ExpertGroup(uids="ffn.[0:8]", count=4, features=2, seed=seed)
    with DirectoryServer() as names:
        first, second = (make_experts([group], directory=Directory(names.endpoint)) for _ in range(2))
        drawn = {backend.uid for backend in (*first, *second)}
        assert drawn == set(UidPattern(group.uids))
        with pytest.raises(ValueError, match="of which 0 are free"):
            make_experts([group], directory=Directory(names.endpoint))
        with served(*first, directory=names.endpoint):
            assert set(Directory(names.endpoint).lookup(drawn)) == {backend.uid for backend in first}
        # Those that were announced and withdrawn are free again.
        assert {each.uid for each in make_experts([group], directory=names.directory)} == {each.uid for each in first}


def test_uids_of_experts_that_could_not_be_made_are_free_again() -> None:
    directory = Directory()
    broken = ExpertGroup(uids="ffn.[0:4]", count=4, features=2, optimizer="sgd", optimizer_args={"momentum": -1.0})
    with pytest.raises(ValueError, match="momentum"):
        make_experts([broken], directory=directory)
    assert len(make_experts([ExpertGroup(uids="ffn.[0:4]", count=4, features=2)], directory=directory)) == 4


def test_a_user_s_directory_without_claims_is_asked_for_the_served_uids() -> None:
    class Own:
        def lookup(self, uids: Iterable[str]) -> dict[str, str]:
            return {uid: "unix:/run/experts" for uid in uids if uid != "ffn.3"}

    group = ExpertGroup(uids="ffn.[0:4]", count=1, features=2)
    (backend,) = make_experts([group], directory=Own())  # type: ignore[arg-type]
    assert backend.uid == "ffn.3"


def test_a_restarted_server_draws_the_experts_it_has_saved(tmp_path: Path) -> None:
    group = ExpertGroup(uids="ffn.[0:1000]", count=3, features=2)
    first = make_experts([group], checkpoint_dir=tmp_path)
    with served(*first, checkpoint_dir=tmp_path):
        pass
    (tmp_path / "other.5").mkdir()
    second = make_experts([group], checkpoint_dir=tmp_path)
    assert {backend.uid for backend in second} == {backend.uid for backend in first}
    more = make_experts([ExpertGroup(uids="ffn.[0:1000]", count=5, features=2)], checkpoint_dir=tmp_path)
    assert {backend.uid for backend in first} < {backend.uid for backend in more}


# --- files

TOML = """
[[experts]]
uids = "ffn.[0:2]"
features = 8
optimizer = "sgd"
lr = 0.1
clip-grad-norm = 1.0

[[experts]]
uids = "two.[0:100]"
count = 3
module = "fleet_modules:two"
module_args = {width = 4}
args_schema = [{shape = [4]}]
kwargs_schema = {ids = {shape = [], dtype = "int64"}}
"""

YAML = """
- uids: ffn.[0:2]
  features: 8
  optimizer: sgd
  lr: 0.1
  clip-grad-norm: 1.0
- uids: two.[0:100]
  count: 3
  module: fleet_modules:two
  module_args: {width: 4}
  args_schema: [{shape: [4]}]
  kwargs_schema: {ids: {shape: [], dtype: int64}}
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("fleet.toml", TOML), ("fleet.yaml", YAML), ("fleet.yml", "experts:" + YAML.replace("\n", "\n  "))],
    ids=["toml", "yaml", "yaml-table"],
)
def test_a_file_describes_a_fleet(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    backends = make_experts(read_fleet(tmp_path / name))
    assert [backend.uid for backend in backends[:2]] == ["ffn.0", "ffn.1"]
    assert len(backends) == 5
    assert backends[0].clip_grad_norm == 1.0
    assert isinstance(backends[4].module, Two)
    assert backends[0].module is not backends[1].module


GROUP = '[[experts]]\nuids = "ffn.0"\nfeatures = 4\n'
WRONG = [
    ("max_batch = 3", "unknown key 'max_batch' with the value 3; did you mean 'max_batch_size'?"),
    ("nonsense = 3", "unknown key 'nonsense' with the value 3; keys are uids, count, seed,"),
    ('max_batch_size = "many"', "max_batch_size is a whole number, 1 or more, got 'many'"),
    ("max_batch_size = 0", "max_batch_size is a whole number, 1 or more, got 0"),
    ("max_batch_size = true", "max_batch_size is a whole number, 1 or more, got True"),
    ("max_batch_size = 2.5", "max_batch_size is a whole number, 1 or more, got 2.5"),
    ("max_batch_size = 3\nmax-batch-size = 4", "'max_batch_size' is given twice"),
    ("min_batch_size = 9\nmax_batch_size = 3", "1 <= min_batch_size <= max_batch_size, got 9 and 3"),
    ('lr = "1e-3"', "lr is a number, 0 or more, without quotes, and in YAML with a decimal point: 1.0e-3, got '1e-3'"),
    ("lr = -1.0", "lr is a number, 0 or more, got -1.0"),
    ("lr = nan", "lr is a number, 0 or more, got nan"),
    ("clip_grad_norm = 0", "clip_grad_norm is a norm above 0, got 0"),
    ('gradient_reduction = "max"', "gradient_reduction is one of sum, mean, got 'max'"),
    ('compression = "zip"', "compression is one of float16, bfloat16, int8, got 'zip'"),
    ("module = 3", "module is a text, got 3"),
    ('module = "nosuch"', "'nosuch' is not the name of a module to serve"),
    ('module = ".x:thing"', "'.x:thing' cannot be loaded"),
    ('module = "os:"', "'os:' cannot be loaded"),
    ('module = "nosuch:thing"', "'nosuch:thing' cannot be loaded: No module named 'nosuch'"),
    ('module = "fleet_modules:number"\nmodule_args = {}', "cannot be called with (4)"),
    ('module_args = "width"', "module_args is a table of values by name, got 'width'"),
    ("module_args = {width = 4}", "'ffn' cannot be called with (4, width=4)"),
    ('optimizer = "nosuch"', "'nosuch' is not an optimizer"),
    ('optimizer = "sgd"\noptimizer_args = {speed = 3}', "'sgd' does not take {'speed': 3, 'lr': 0.001}"),
    ('optimizer = "torch.optim:LBFGS"', "a step of the optimizer, a LBFGS, needs closure"),
    ("optimizer_args = {momentum = 1.0}", "optimizer_args are for the optimizer, which is not given"),
    ('scheduler = "nosuch"', "'nosuch' is not a scheduler; use a class of torch.optim.lr_scheduler"),
    ('scheduler = "math"', "'math' is not a scheduler"),
    ('scheduler = "LRScheduler"', "'LRScheduler' is not a scheduler"),
    ('scheduler = "os:getcwd"', "'os:getcwd' does not take {}"),
    ('scheduler = "torch.optim:SGD"\nscheduler_args = {lr = 0.1}', "'torch.optim:SGD' does not take {'lr': 0.1}"),
    ('scheduler = "StepLR"', "'StepLR' does not take {}"),
    ('optimizer = "sgd"\noptimizer_args = {lr = 0.1}', "lr is a separate argument, not part of optimizer_args"),
    ('scheduler = "ReduceLROnPlateau"', "an LRScheduler that steps without a loss"),
    ('optimizer = "none"\nscheduler = "StepLR"', "there is no optimizer to schedule"),
    ("args_schema = 4", "args_schema is a list of inputs"),
    ("args_schema = [4]", "args_schema[0] is a table such as"),
    ("args_schema = [{shape = 4}]", "args_schema[0].shape is a list of sizes"),
    ("args_schema = [{shape = [-4]}]", "args_schema[0]: TensorSpec sizes are ints >= 0"),
    ('args_schema = [{shape = [4], dtype = "real"}]', "args_schema[0]: dtype 'real' is not one of"),
    ("args_schema = [{shape = [4], size = 4}]", "args_schema[0] has 'size'; a tensor has shape, dtype,"),
    ("args_schema = [{shape = [4], pad = 1}]", "args_schema[0].pad is true or false, got 1"),
    ("args_schema = [{shape = [5]}]", "the module does not accept the inputs of its schema"),
    ("kwargs_schema = [4]", "kwargs_schema is a table of values by name, got [4]"),
    ("count = 2", "count is at most the 1 uids of 'ffn.0', got 2"),
    ("seed = 2", "seed is for drawing uids, but there is no count"),
    ('device = "abacus"', "no expert can run on 'abacus' here"),
]


def test_yaml_that_merges_tables_may_say_a_key_again(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("- &one {uids: ffn.0, lr: 0.1}\n- {<<: *one, uids: ffn.1}\n")
    assert [(group.uids, group.lr) for group in read_fleet(path)] == [("ffn.0", 0.1), ("ffn.1", 0.1)]


@pytest.mark.parametrize(("line", "says"), WRONG, ids=[line.replace("\n", " ") for line, _ in WRONG])
def test_a_mistake_in_a_group_is_one_sentence_with_file_group_key_and_value(
    tmp_path: Path, line: str, says: str
) -> None:
    path = tmp_path / "fleet.toml"
    lines = GROUP.replace("features = 4\n", "") if line.startswith("args_schema = [{shape = [5]") else GROUP
    path.write_text('[[experts]]\nuids = "other.0"\nfeatures = 2\n' + lines + line)
    with pytest.raises(ValueError, match="group 2") as raised:
        make_experts(read_fleet(path))
    text = str(raised.value)
    assert text.startswith(f"{path}, group 2")
    assert says in text


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("fleet.toml", "", "a fleet is a list of groups"),
        ("fleet.toml", "experts = 3", "got 3"),
        ("fleet.toml", "experts = []", "got []"),
        ("fleet.toml", "experts = [3]", "group 1: a group is a table of keys and values, got 3"),
        ("fleet.toml", "[[experts]]\nfeatures = 3", "group 1: has no uids"),
        ("fleet.toml", "[[experts]]\nuids = 3", "group 1 (3): uids is a text, got 3"),
        ("fleet.toml", '[[experts]]\nuids = "ffn"', "'ffn' is not a uid"),
        ("fleet.toml", 'listen = "unix:x"\n' + GROUP, "'listen' is outside the groups"),
        ("fleet.toml", "uids = ", "is not TOML"),
        ("fleet.yaml", "a: [", "is not YAML"),
        ("fleet.yaml", "3", "got 3"),
        (
            "fleet.yaml",
            "- uids: ffn.0\n  lr: 0.1\n  'lr': 0.2\n",
            "'lr' is given twice in one table, in line 2 and in line 3",
        ),
        ("fleet.yaml", "- uids: ffn.0\n  module_args: {a: 1, a: 2}\n", "'a' is given twice in one table, in line 2"),
        ("fleet.yaml", "experts: []\nexperts: &all [uids: ffn.0, *all]\n", "'experts' is given twice"),
        ("fleet.json", "[]", "has no known format"),
        ("fleet.toml", GROUP + GROUP, "ffn.0 is in another group too"),
        ("fleet.toml", GROUP + 'module = "fleet_modules:misspelt"\nmodule_args = {}', "cannot be called with (4)"),
    ],
)
def test_a_file_that_is_not_a_fleet_is_refused_with_the_expected_form(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match="fleet") as raised:
        make_experts(read_fleet(path))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"module": f"{HERE}:misspelt"}, "returned 'arg_schema', which is not an argument of ExpertBackend"),
        ({"module": f"{HERE}:number"}, "returned a int, not an nn.Module, nor a mapping"),
        ({"module": f"{HERE}:two"}, "the inputs of 'fleet_modules:two' are not known"),
        ({"module": f"{HERE}:complete", "optimizer": "sgd"}, "another one was requested"),
        ({"module": f"{HERE}:complete", "lr": 0.1}, "returns its own optimizer; set lr there"),
    ],
)
def test_a_factory_that_does_not_fit_is_reported(said: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match="fleet_modules") as raised:
        one(module_args={}, **said)
    assert says in str(raised.value)


def test_yaml_without_its_extra_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleet.yaml").write_text(YAML)
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "yaml":
            raise ModuleNotFoundError("No module named 'yaml'", name="yaml")
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'anabranch\[yaml\]', or use TOML"):
        read_fleet(tmp_path / "fleet.yaml")


# --- the command line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name them with --uids, such as --uids 'ffn.[0:4]', or in a file with --config"),
        (["--uids", "ffn.0", "--module-args", "{width: 4}"], "--module-args is written in JSON, such as"),
        (["--uids", "ffn.0", "--module-args", "[4]"], "module_args is a table of values by name, got [4]"),
        (["--uids", "ffn.0", "--features", "0"], "features is a whole number, 1 or more, got 0"),
        (["--uids", "ffn.[0:4]", "--count", "5"], "count is at most the 4 uids"),
        (["--config", "fleet.toml", "--lr", "0.1"], "--lr cannot be used with --config fleet.toml"),
        (["--config", "fleet.ini"], "has no known format"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(serving.serve, ["experts", *arguments])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert says in " ".join(result.output.replace("│", " ").split())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(serving.serve, ["experts", "--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 1
    assert "none.toml" in result.output


MINE = """
from torch import nn

def make(width, bias=True):
    return nn.Linear(width, width, bias=bias)
"""


def test_a_command_serves_a_function_of_the_folder_with_arguments_and_drawn_uids(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    options = [
        *("--uids", "ffn.[0:100]", "--count", "2", "--module", "mine:make"),
        *("--module-args", json.dumps({"width": 3, "bias": False}), "--args-schema", json.dumps([{"shape": [3]}])),
        *("--max-batch-size", "8", "--compression", "float16", "--max-sessions", "5"),
    ]
    with DirectoryServer() as names:
        directory = Directory(names.endpoint)
        with service(programs, "experts", *options, "--directory", names.endpoint) as (process, endpoint):
            (first, second) = directory.active(["ffn"])["ffn"]
            assert directory.lookup([f"ffn.{first}"]) == {f"ffn.{first}": endpoint}
            expert = RemoteExpert(f"ffn.{second}", endpoint)
            assert expert(torch.zeros(2, 3)).abs().max() == 0
            assert expert.get_info()["outputs_schema"] == TensorSpec(3, compression="float16")
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0


def test_a_command_serves_a_fleet(programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(GROUP + '[[experts]]\nuids = "nop.[0:2]"\nmodule = "nop"\nfeatures = 3\n')
    with service(programs, "experts", "--config", str(path)) as (process, endpoint):
        for uid, features in (("ffn.0", 4), ("nop.0", 3), ("nop.1", 3)):
            assert RemoteExpert(uid, endpoint)(torch.zeros(2, features)).shape == (2, features)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
