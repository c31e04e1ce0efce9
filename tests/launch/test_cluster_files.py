"""The files of ``examples/cluster`` are valid by the tools of their kind, and fit each other and the command."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from anabranch.cli.app import _app

HERE = Path(__file__).parents[2]
CLUSTER = HERE / "examples/cluster"
VERSION = "1.32"
MANIFESTS = sorted(path for path in (CLUSTER / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")
BIN = Path(sys.executable).parent
ROLES = {"directory", "parameters", "experts", "worker"}


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each workload and the specification of its pods."""
    for document in documents():
        if "template" in document["spec"]:
            yield document, document["spec"]["template"]["spec"]


def command_of(container: dict[str, Any]) -> list[str]:
    words = [*container["command"], *container.get("args", ())]
    if words[:2] == ["sh", "-c"]:
        words = shlex.split(words[2].replace('"${HOSTNAME##*-}"', "0"))[1:]  # without exec
    return [word.replace("$(POD_IP)", "10.0.0.1") for word in words]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_match_the_schemas_of_kubernetes(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_all_manifests_are_applied_together() -> None:
    kustomization = yaml.safe_load((CLUSTER / "kubernetes/kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == [path.name for path in MANIFESTS]
    assert "Secret" not in {document["kind"] for document in documents()}, "keys are made, not kept"


def test_every_pod_finds_the_certificate_of_its_role_and_no_other() -> None:
    kustomization = yaml.safe_load((CLUSTER / "kubernetes/kustomization.yaml").read_text())
    (secret,) = kustomization["secretGenerator"]
    made = {Path(file).name for file in secret["files"]}
    assert made == {"authority.pem", *(f"{role}.pem" for role in ROLES)}
    mounted = []
    for _, pod in pods():
        (volume,) = (one["secret"] for one in pod["volumes"] if "secret" in one)
        assert volume["secretName"] == secret["name"]
        assert volume["defaultMode"] == 0o440, "others may not read a key"
        assert pod["securityContext"]["fsGroup"], "the process's group may"
        authority, own = (item["path"] for item in volume["items"])
        assert authority == "authority.pem"
        mounted.append(own.removesuffix(".pem"))
        (container,) = pod["containers"]
        told = " ".join(command_of(container)).replace("=", " ").split()
        role = told[2] if told[0] == "anabranch" else "worker"
        assert own == f"{role}.pem"
    assert sorted(mounted) == sorted(ROLES)


def test_services_are_commands_with_options_that_exist_and_are_watched_where_they_count(tmp_path: Path) -> None:
    for _, pod in pods():
        (container,) = pod["containers"]
        words = command_of(container)
        if words[0] != "anabranch":
            continue
        parse(words[1:], tmp_path)
        told = " ".join(words).replace("=", " ").split()
        metrics = told[told.index("--metrics") + 1]
        ports = {port.get("name"): port["containerPort"] for port in container["ports"]}
        assert metrics == f"0.0.0.0:{ports['metrics']}"
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/metrics", "port": "metrics"}
        listen = told[told.index("--listen") + 1]
        assert int(listen.rpartition(":")[2]) in ports.values()


def parse(words: list[str], folder: Path) -> None:
    """As the command does; ``/keys`` and what else is mounted stands for a folder that is there."""
    words = [re.sub(r"(^|=)/(keys|data/shard)$", rf"\g<1>{folder}", word) for word in words]
    command = typer.main.get_command(_app)
    context = command.make_context("anabranch", [], resilient_parsing=True)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    with command.make_context(str(command.name), words, parent=context):
        pass


def test_workers_know_every_shard_and_the_directory() -> None:
    named = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in documents()}
    servers, workers = named["StatefulSet", "anabranch-servers"], named["Job", "anabranch-workers"]
    replicas, service = servers["replicas"], servers["serviceName"]
    words = command_of(servers["template"]["spec"]["containers"][0])
    assert words[words.index("--shards") + 1] == str(replicas)
    (worker,) = workers["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in worker["env"]}
    assert variables["ANABRANCH_SERVERS"].split(",") == [
        f"tcp://anabranch-servers-{shard}.{service}:7000" for shard in range(replicas)
    ]
    assert variables["ANABRANCH_DIRECTORY"] == "tcp://anabranch-directory:7001"
    assert named["Service", "anabranch-directory"]["ports"][0]["port"] == 7001
    assert f"--nnodes={workers['completions']}" in command_of(worker)


def test_the_image_finds_all_files_that_it_copies_and_installs() -> None:
    text = re.sub(r"\\\n", " ", (CLUSTER / "Dockerfile").read_text())
    copied = [source for line in text.splitlines() if line.startswith("COPY") for source in line.split()[1:-1]]
    assert all((HERE / source).exists() for source in copied), copied
    project = tomllib.loads((HERE / "pyproject.toml").read_text())
    (extras,) = re.findall(r"'\.\[(.*)\]'", text)
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    assert set(re.findall(r"torch==\S+", text)) <= set((HERE / "constraints.txt").read_text().splitlines())


def test_the_batch_script_passes_the_shells_and_the_linters_look() -> None:
    subprocess.run(["bash", "-n", CLUSTER / "job.sbatch"], check=True)
    found = subprocess.run([BIN / "shellcheck", CLUSTER / "job.sbatch"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


SCONTROL = """#!/usr/bin/env bash
printf '%s\\n' 127.77.0.1 127.77.0.2
"""
# One task on the node that is named, or one on each of two; what runs is told of signals as srun's tasks are.
SRUN = """#!/usr/bin/env bash
output= nodes=2
while [[ $1 == --* ]]; do
    case $1 in
        --output=*) output=${1#--output=} ;;
        --nodelist=*) nodes=1 ;;
    esac
    shift
done
[[ $nodes == 1 ]] && exec "$@" > "$output" 2>&1
"$@" > "${output//%n/0}" 2>&1 & first=$!
"$@" > "${output//%n/1}" 2>&1 & second=$!
status=0
wait $first || status=$?
wait $second || status=$?
exit $status
"""


@pytest.mark.slow
def test_the_batch_script_runs_and_resumes(tmp_path: Path) -> None:
    """With SLURM's two commands in the form of two hosts' loopback addresses."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANABRANCH_")}
    environment |= {"PATH": f"{tools}:{BIN}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "two"}
    environment["OMP_NUM_THREADS"] = "1"
    logs = tmp_path / "runs/77/logs"
    for first, steps in ((0, 20), (20, 30)):
        done = subprocess.run(
            ["bash", CLUSTER / "job.sbatch", str(CLUSTER / "train.py"), "--steps", str(steps)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        told = "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(logs.iterdir()))
        assert done.returncode == 0, done.stderr + told
        lines = [path.read_text() for path in logs.glob("workers-*.log")]
        (last,) = [line for text in lines for line in text.splitlines() if line.startswith("{")]
        assert {**json.loads(last), "loss": None} == {"first": first, "steps": steps, "loss": None}, told
    assert not (tmp_path / "runs/77/keys/authority.key").exists()
    assert sum("gone" in line for line in (logs / "status").read_text().splitlines()) == 0
