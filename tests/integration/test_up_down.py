"""`beeond-ctl up` and `down`: an instance without Slurm, over each launcher."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2", "n3")
LAUNCHERS = ("pdsh", "ssh")


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    cluster.wait_idle()
    before = cluster.snapshots()
    yield
    cluster.wait_clean(before, timeout_s=10)


def beeond(cluster: Cluster, *words: str, code: int = 0) -> str:
    done = cluster.run("ctl", ["beeond-ctl", *words], check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_is_asked_for_goes_in_is_seen_everywhere_and_comes_out(cluster: Cluster, launcher: str) -> None:
    cluster.run("login", ["rm", "-rf", "/global/alice/up", "/global/alice/up-back"])
    cluster.run("login", ["sh", "-c", "mkdir /global/alice/up; echo data > /global/alice/up/f"], user="alice")
    cluster.run("ctl", ["tee", "/root/nodes"], input="n1\nn2 slots=2\nn3:2\n")
    told = beeond(
        cluster, "up", "--nodefile", "/root/nodes", "--user", "alice", "--launcher", launcher,
        "--beeond-stage-in", "/global/alice/up:in", "--beeond-stage-out", ".:/global/alice/up-back",
    )  # fmt: skip
    run_id, point = told.split()
    for node in NODES:
        assert cluster.run(node, ["cat", f"{point}/in/f"], user="alice").stdout == "data\n"
        cluster.run(node, ["touch", f"{point}/{node}"], user="alice")
    assert cluster.run("n1", ["ls", point], user="bob", check=False).returncode != 0
    beeond(cluster, "down", run_id, "--nodes", "n[1-3]", "--launcher", launcher)
    assert cluster.run("login", ["ls", "/global/alice/up-back"]).stdout.split() == ["in", *NODES]
    assert beeond(cluster, "down", run_id, "--nodes", "n[1-3]", "--launcher", launcher) == "n[1-3]: done\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_node_that_cannot_be_reached_is_named_and_nothing_is_left(cluster: Cluster, launcher: str) -> None:
    cluster.write_config(
        '[storage]\nkind = "directory"\npaths = ["/nvme/beeond"]\n[deadlines]\nmeet = 5\nsilence = 3\n'
    )
    cluster.cut("n3")
    try:
        told = beeond(cluster, "up", "-w", "n[1-3]", "--user", "alice", "--launcher", launcher, code=1)
    finally:
        cluster.restore("n3")
        cluster.wait_idle()
    assert re.search(r"^n3: ", told, re.MULTILINE)
    assert "n3 did not come" in told


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_host_key_that_is_not_known_is_refused_and_named(cluster: Cluster, launcher: str) -> None:
    kept = cluster.read("ctl", "/etc/ssh/ssh_known_hosts")
    without = "".join(line for line in kept.splitlines(keepends=True) if not line.startswith("n2,"))
    cluster.run("ctl", ["tee", "/etc/ssh/ssh_known_hosts"], input=without)
    try:
        told = beeond(cluster, "up", "-w", "n2", "--user", "alice", "--launcher", launcher, code=1)
    finally:
        cluster.run("ctl", ["tee", "/etc/ssh/ssh_known_hosts"], input=kept)
    assert re.search(r"^n2: .*[Hh]ost key", told, re.MULTILINE)


def test_a_missing_source_is_told_once_and_nothing_is_left(cluster: Cluster) -> None:
    told = beeond(
        cluster,
        "up",
        "-w",
        "n[1-2]",
        "--user",
        "alice",
        "--beeond-stage-in",
        "/global/alice/nowhere:in",
        code=1,
    )
    assert "/global/alice/nowhere" in told


def test_down_leaves_jobs_of_slurm_alone(cluster: Cluster) -> None:
    assert "Epilog" in beeond(cluster, "down", "17", "-w", "n[1-2]", code=1)
