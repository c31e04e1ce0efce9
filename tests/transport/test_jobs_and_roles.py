"""Who serves and for which job: a client demands the role it asked for, jobs of one authority are strangers."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from anabranch.cli.keys import keys as keys_command
from anabranch.errors import Unauthorized
from anabranch.experts import Directory, DirectoryServer
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.transport import Client, Request, Server, Verb, make_keys
from anabranch.transport.certificates import job_of_keys
from waiting import soon

ECHO = Verb("echo", lambda call: call.reply(payload=(call.peer.job or "").encode()))
TCP = "tcp://127.0.0.1:0"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of one authority: job a, job b, and every job."""
    folder = tmp_path_factory.mktemp("authority")
    folders = {"a": folder / "a", "b": folder / "b", "*": folder / "every"}
    make_keys(folders["a"], job="a")
    for job in ("b", "*"):
        make_keys(folders[job], job=job, authority=folders["a"])
    return folders


@pytest.mark.parametrize("role", ["worker", "experts", "directory"])
def test_an_impostor_of_a_parameter_server_is_refused(jobs: dict[str, Path], role: str) -> None:
    asked: list[object] = []
    verbs = [Verb(name, asked.append) for name in ("init", "pull", "describe")]
    with (
        Server(verbs, listen=TCP, role=role, keys=jobs["a"]) as server,
        ParameterClient([server.endpoint], keys=jobs["a"]) as client,
        pytest.raises(Unauthorized, match=f"has role '{role}', but role 'parameters' was requested"),
    ):
        client.init("bias", (2,))
    assert asked == []


def test_a_directory_and_an_expert_must_show_their_roles(jobs: dict[str, Path]) -> None:
    from anabranch.experts import RemoteExpert

    with Server([], listen=TCP, role="worker", keys=jobs["a"]) as server:
        with pytest.raises(Unauthorized, match="'directory' was requested"):
            Directory(server.endpoint, keys=jobs["a"]).lookup(["ffn.0"])
        with pytest.raises(Unauthorized, match="'experts' was requested"):
            RemoteExpert("ffn.0", server.endpoint, keys=jobs["a"])(torch.ones(1, 2))


def test_the_role_is_demanded_of_a_connection_that_is_used_again(jobs: dict[str, Path]) -> None:
    with Server([ECHO], listen=TCP, role="experts", keys=jobs["a"]) as server, Client(keys=jobs["a"]) as client:
        assert client.call(Request(server.endpoint, "echo", role="experts"), soon())
        with pytest.raises(Unauthorized, match="'directory' was requested"):
            client.call(Request(server.endpoint, "echo", role="directory"), soon())


# --- jobs --------------------------------------------------------------------------------------------------------


def test_jobs_of_one_authority_are_strangers(jobs: dict[str, Path]) -> None:
    with Server([ECHO], listen=TCP, keys=jobs["a"]) as server:
        for job in ("a", "*"):
            with Client(keys=jobs[job]) as client:
                assert client.call(Request(server.endpoint, "echo"), soon()).payload == b"a"
        with Client(keys=jobs["b"]) as client, pytest.raises(Unauthorized, match="does not belong to job 'b'"):
            client.call(Request(server.endpoint, "echo"), soon())


def test_the_server_too_refuses_another_job(jobs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([ECHO], listen=TCP, keys=jobs["a"]) as server:
        # A client that does not look whom it asks.
        monkeypatch.setattr("anabranch.transport.sockets.job_of_keys", lambda keys, role: "*")
        with Client(keys=jobs["b"]) as client, pytest.raises(Unauthorized, match="job 'b' does not belong to job 'a'"):
            client.call(Request(server.endpoint, "echo"), soon())


def test_a_parameter_server_for_every_job_serves_no_named_one(jobs: dict[str, Path]) -> None:
    with ParameterServer(listen=TCP, keys=jobs["*"]) as server:
        with ParameterClient([server.endpoint], keys=jobs["*"]) as client:
            client.init("bias", (2,))
        with (
            ParameterClient([server.endpoint], keys=jobs["a"]) as client,
            pytest.raises(Unauthorized, match="anabranch keys DIR --job a"),
        ):
            client.pull("bias")


def test_in_a_directory_for_every_job_each_sees_its_own_uids(jobs: dict[str, Path]) -> None:
    with DirectoryServer(TCP, keys=jobs["*"]) as server:
        announce = {job: Directory(server.endpoint, role="experts", keys=jobs[job]) for job in jobs}
        announce["a"].announce(["ffn.0", "ffn.1"], "tcp://10.0.0.1:7000", ttl=30.0)
        announce["b"].announce(["ffn.0"], "tcp://10.0.0.2:7000", ttl=30.0)
        announce["*"].announce(["ffn.1", "ffn.7"], "tcp://10.0.0.3:7000", ttl=30.0)
        announce["b"].withdraw(["ffn.1"], "tcp://10.0.0.1:7000")
        seen = {job: Directory(server.endpoint, keys=jobs[job]) for job in jobs}
        assert seen["a"].lookup(["ffn.0", "ffn.1", "ffn.7"]) == {
            "ffn.0": "tcp://10.0.0.1:7000",
            "ffn.1": "tcp://10.0.0.1:7000",
            "ffn.7": "tcp://10.0.0.3:7000",
        }
        assert seen["b"].lookup(["ffn.0"]) == {"ffn.0": "tcp://10.0.0.2:7000"}
        assert {job: each.active(["ffn"])["ffn"] for job, each in seen.items()} == {
            "a": [0, 1, 7],
            "b": [0, 1, 7],
            "*": [1, 7],
        }


def test_certificates_name_their_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys_command(tmp_path / "one", job="nightly.3")
    assert job_of_keys(tmp_path / "one", "worker") == "nightly.3"
    assert "every job" not in capsys.readouterr().err
    keys_command(tmp_path / "two", job="*")
    assert job_of_keys(tmp_path / "two", "experts") == "*"
    assert "valid for every job of this authority" in capsys.readouterr().err
    with pytest.raises(ValueError, match="not a job name"):
        make_keys(tmp_path / "three", job="a/b")
    with pytest.raises(ValueError, match=r"holds no authority\.pem"):
        make_keys(tmp_path / "three", authority=tmp_path)


def test_an_authority_that_signs_elsewhere_keeps_its_key(jobs: dict[str, Path]) -> None:
    assert not (jobs["b"] / "authority.key").exists()
    assert (jobs["b"] / "authority.pem").read_bytes() == (jobs["a"] / "authority.pem").read_bytes()
    with pytest.raises(ValueError, match="a different authority"):
        make_keys(jobs["b"], roles=[], authority=make_keys(jobs["b"] / "other", roles=[])["authority"].parent)


# --- private keys ------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    make_keys(folder, roles=["worker"])
    return folder


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o604, 0o660, 0o610, 0o400, 0o600, 0o440, 0o640])
def test_a_private_key_is_for_us_or_a_group_of_ours_alone(
    own: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = own / "worker.pem"
    key.chmod(mode)
    refusal = f"mode {mode:04o}, open to other users; close it with: chmod 600 {key}"
    with nullcontext() if mode in (0o400, 0o600, 0o440, 0o640) else pytest.raises(ValueError, match=refusal):
        Client(keys=own).close()
    monkeypatch.setattr(os, "getegid", lambda: 54321)
    monkeypatch.setattr(os, "getgroups", lambda: [54321])
    with pytest.raises(ValueError, match=refusal) if mode & 0o077 else nullcontext():
        Client(keys=own).close()


def test_the_target_of_a_link_counts(own: Path, tmp_path: Path) -> None:
    """As Kubernetes mounts a secret: links in a sticky directory, whose own modes say nothing."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    mounted.chmod(0o1777)
    for name in ("authority.pem", "worker.pem"):
        (mounted / name).symlink_to(own / name)
    (own / "worker.pem").chmod(0o440)
    Client(keys=mounted).close()
    (own / "worker.pem").chmod(0o444)
    with pytest.raises(ValueError, match="mode 0444"):
        Client(keys=mounted)


def test_where_others_could_put_their_own_authority_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, mode in ((own, 0o770), (own / "authority.pem", 0o664)):
        before = path.stat().st_mode
        path.chmod(before | 0o002)
        with pytest.raises(ValueError, match=f"any user can replace the certificates; close it with: chmod o-w {path}"):
            Client(keys=own)
        path.chmod(mode)
        Client(keys=own).close()  # a group of ours
        with monkeypatch.context() as patch:
            patch.setattr(os, "getegid", lambda: 54321)
            patch.setattr(os, "getgroups", lambda: [54321])
            with pytest.raises(ValueError, match=f"users of group .* can replace .* chmod g-w {path}"):
                Client(keys=own)
        path.chmod(before)


def test_an_authoritys_key_that_others_can_read_signs_nothing(own: Path) -> None:
    (own / "authority.key").chmod(0o644)
    with pytest.raises(ValueError, match=r"chmod 600 .*authority\.key"):
        make_keys(own, roles=["experts"])
    assert stat.S_IMODE((own / "worker.pem").stat().st_mode) == 0o600
