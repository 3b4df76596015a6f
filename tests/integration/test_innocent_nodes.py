"""Nodes stay in service where a job gets no file system and they are not at fault."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import NODES, PAUSED, hooked, paused, says, settled
from tests.integration.on_cluster import exists, given_up
from tests.integration.site_config import CONFIG
from tests.integration.test_main_job import ready  # noqa: F401 - before and after each test
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.gluster]

GLUSTER = "--beeond=backend=glusterfs"
SCRIPT = "#!/bin/sh\ntouch /global/alice/ran\n"


def ended(cluster: Cluster, job: int) -> None:
    """Wait until nothing of the job is left on any node."""
    cluster.run("ctl", ["scancel", str(job)], check=False)
    for node in NODES:
        wait_for(partial(settled, cluster, node), 90)


def drained(cluster: Cluster) -> dict[str, str]:
    """The nodes that are out of service, with their reasons."""
    states = {node: cluster.node_state(node) for node in NODES}
    return {node: state.reason for node, state in states.items() if "DRAIN" in state.flags}


@contextmanager
def another_secret(cluster: Cluster, node: str) -> Iterator[None]:
    """A node that has missed a rotation."""
    path = "/etc/beeond-ctl/secret"
    own, put = cluster.read(node, path), ["install", "-m", "600", "/dev/stdin", path]
    cluster.run(node, put, input=secrets.token_hex(32) + "\n")
    try:
        yield
    finally:
        cluster.run(node, put, input=own)


def test_a_leader_that_nobody_can_reach_drains_itself_and_nobody_else(cluster: Cluster) -> None:
    before = cluster.snapshots()
    with another_secret(cluster, "n1"):
        job = cluster.submit("alice", SCRIPT, "-N3", GLUSTER)
        wait_for(partial(says, cluster, "n1", "none of the other nodes has ever reached n1"), 60)
        for node in ("n2", "n3"):
            assert "leader n1 was not reached" in given_up(cluster, job, node)
        ended(cluster, job)
    assert list(drained(cluster)) == ["n1"]
    assert not exists(cluster, "/global/alice/ran")
    cluster.resume("n1")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_of_most_nodes_that_do_not_come_in_time_none_is_drained(cluster: Cluster) -> None:
    before = cluster.snapshots()
    with paused(cluster, "n2", "prolog", "preparing"), paused(cluster, "n3", "prolog", "preparing"):
        job = cluster.submit("alice", SCRIPT, "-N3", GLUSTER)
        told = given_up(cluster, job, "n1")
        assert "n[2-3] did not come to 'prepared'" in told
        assert "these are most of the job's nodes, so none is drained on another's word" in told
        for node in ("n2", "n3"):
            cluster.run(node, ["rm", PAUSED])
    ended(cluster, job)
    assert drained(cluster) == {}
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def asking(cluster: Cluster) -> set[int]:
    """The processes on n1 that ask slurmctld about a job."""
    return {process.pid for process in cluster.processes("n1", "scontrol show job")}


def test_slurmctld_that_is_silent_for_a_while_costs_time_alone(cluster: Cluster) -> None:
    cluster.write_config(CONFIG.format(kind="directory", more="").replace("meet = 12", "meet = 60"))
    before = cluster.snapshots()
    option = "--beeond-stage-out=out:/global/alice/silent-%x"
    with paused(cluster, "n1", "prolog", "preparing"):
        job = cluster.submit("alice", "#!/bin/sh\ntrue\n", "-N2", GLUSTER, option)
        wait_for(partial(exists, cluster, PAUSED, "n1"), 30)
        cluster.freeze("ctl", "slurmctld")
        try:
            cluster.run("n1", ["rm", PAUSED])
            wait_for(lambda: bool(asking(cluster)), 20)
            first = asking(cluster)
            wait_for(lambda: bool(asking(cluster) - first), 40)  # it was told nothing, and asks again
        finally:
            cluster.thaw("ctl", "slurmctld")
        assert cluster.wait_job(job, timeout_s=60)["JobState"] == "COMPLETED", drained(cluster)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_slurmctld_that_stays_silent_fails_the_job_and_drains_no_node(cluster: Cluster) -> None:
    before = cluster.snapshots()
    option = "--beeond-stage-out=out:/global/alice/silent-%x"
    with paused(cluster, "n1", "prolog", "preparing"):
        job = cluster.submit("alice", SCRIPT, "-N3", GLUSTER, option)
        wait_for(partial(exists, cluster, PAUSED, "n1"), 30)
        cluster.freeze("ctl", "slurmctld")
        try:
            cluster.run("n1", ["rm", PAUSED])
            for node in NODES:
                assert "n1: Slurm does not answer (scontrol" in given_up(cluster, job, node)
        finally:
            cluster.thaw("ctl", "slurmctld")
    ended(cluster, job)
    assert drained(cluster) == {}
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


TAKE = """
import socket, sys
held = []
for port in map(int, sys.argv[1:]):
    held.append(socket.socket())
    held[-1].bind(("", port))
    held[-1].listen()
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def taken_by_bob(cluster: Cluster, node: str, ports: range) -> Iterator[None]:
    """A process of another user's on the node that listens on `ports`."""
    argv = cluster.exec_argv(node, [sys.executable, "-Ic", TAKE, *map(str, ports)], user="bob")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield
        process.stdin.close()


def test_a_server_whose_port_a_user_has_taken_fails_the_job_and_drains_no_node(cluster: Cluster) -> None:
    before = cluster.snapshots()
    with paused(cluster, "n2", "prolog", "starting"):
        job = cluster.submit("alice", SCRIPT, "-N3", GLUSTER)
        wait_for(partial(exists, cluster, PAUSED, "n2"), 30)
        block = json.loads(cluster.read("n2", f"/run/beeond-ctl/jobs/{job}/state.json"))["block"]
        with taken_by_bob(cluster, "n2", range(block, block + 15)):
            cluster.run("n2", ["rm", PAUSED])
            for node in NODES:
                told = given_up(cluster, job, node)
                assert "n2: ports of this job were taken after it had claimed them (bob has port" in told
                assert "glusterfs brick-0 ended" in told
    ended(cluster, job)
    assert drained(cluster) == {}
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_a_user_who_is_in_the_way_of_the_probe_fails_the_job_and_drains_no_node(cluster: Cluster) -> None:
    """GlusterFS's root is the user's before it is mounted: a process of another job's on n3 comes before n2."""
    before = cluster.snapshots()
    with paused(cluster, "n2", "prolog", "mounting"):
        job = cluster.submit("alice", SCRIPT, "-N3", GLUSTER)
        wait_for(partial(exists, cluster, PAUSED, "n2"), 30)
        mark = f"/mnt/beeond/{job}/.beeond-probe-n2"
        wait_for(lambda: cluster.run("n3", ["mkdir", mark], user="alice", check=False).returncode == 0, 30)
        cluster.run("n2", ["rm", PAUSED])
        told = {node: given_up(cluster, job, node) for node in NODES}
        # Who comes when all is over hears only that it is.
        assert "a process of the job's user may have done that" in told["n2"], told
    ended(cluster, job)
    assert drained(cluster) == {}
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


SLOW_PROBE = f"""if (phase, when) == ("mounting", "after"):
        from beeond_ctl.lifecycle import probe
        def slowly(*arguments, write=probe.write):
            open("{PAUSED}", "w").close()
            while os.path.exists("{PAUSED}"):
                time.sleep(0.02)
            write(*arguments)
        probe.write = slowly"""


def test_a_local_root_is_not_the_users_before_it_has_been_probed(cluster: Cluster) -> None:
    before = cluster.snapshots()
    with hooked(cluster, "n1", "prolog", SLOW_PROBE):
        script = "#!/bin/sh\nstat -c '%U %a' \"$BEEOND\"\n"
        job = cluster.submit("alice", script, "-N1", "-w", "n1", "--beeond=backend=local")
        wait_for(partial(exists, cluster, PAUSED, "n1"), 30)
        tried = cluster.run("n1", ["mkdir", f"/mnt/beeond/{job}/mine"], user="alice", check=False)
        cluster.run("n1", ["rm", PAUSED])
        assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    assert "Permission denied" in tried.stderr
    assert cluster.job_output(job).split() == ["alice", "700"]
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)
