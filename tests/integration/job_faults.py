"""Faults of whole jobs, the same over every parallel file system that nodes share.

A file that takes these tests has a fixture `site`, and says where it kills hooks (KILLS) and cancels jobs (CANCELS).
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.integration.on_cluster import exists, given_up
from tests.trees import AWKWARD, compare
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

NODES = ("n1", "n2", "n3")


class Configure(Protocol):
    """Has the cluster's storage be of another kind, with more settings of `[storage]`."""

    def __call__(self, kind: str, storage: str = "") -> None: ...


@dataclass(frozen=True)
class Site:
    """A cluster whose jobs get the file system to be tested by `option`, or by staging alone.

    `server` finds what serves on every node by its command line, `service` is a part of its name in state and messages.
    """

    cluster: Cluster
    option: str
    server: str
    service: str
    configure: Configure


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kill and cancel where the file says that takes these tests."""
    hook = re.match(r"test_an?_(prolog|epilog)_killed", metafunc.function.__name__)
    if hook:
        metafunc.parametrize(("node", "phase", "when"), metafunc.module.KILLS[hook[1]])
    if "cancelled_in" in metafunc.fixturenames:
        metafunc.parametrize("cancelled_in", metafunc.module.CANCELS)


# --- asking and putting back ------------------------------------------------------------------------------


def tidy(cluster: Cluster, left: dict[str, list[str]]) -> None:
    """Let one failure not be the next test's: nothing queued, nothing kept, nothing drained."""
    for user in ("alice", "bob"):
        cluster.run("ctl", ["scancel", f"--user={user}"], check=False)
    names = {name for each in left.values() for name in each if name.startswith("job-")}
    for job in sorted(name.removeprefix("job-") for name in names):
        cluster.run(
            "ctl", ["beeond-ctl", "recover", job, "--nodes", "n[1-3]", "--discard", "--yes"], check=False
        )
    for node in NODES:
        wait_for(partial(lacks, cluster, node, "COMPLETING"), 40)
        if "DRAIN" in cluster.node_state(node).flags:
            cluster.resume(node)


def make_tree(cluster: Cluster, path: str, *, user: str = "alice", files: int = 50) -> None:
    cluster.run("login", ["rm", "-rf", path])
    cluster.run("login", ["sh", "-c", AWKWARD, "sh", path, str(files)], user=user)


def new_directory(cluster: Cluster, path: str) -> None:
    cluster.run("login", ["rm", "-rf", path])
    cluster.run("login", ["mkdir", path], user="alice")


def assert_same(cluster: Cluster, source: str, destination: str) -> None:
    assert cluster.run("login", compare(source, destination)).stdout == ""


@contextmanager
def scratch_devices(cluster: Cluster, nodes: tuple[str, ...]) -> Iterator[None]:
    """An empty block device /dev/scratch on each node."""
    try:
        for node in nodes:
            cluster.run(node, ["truncate", "-s", "1500M", "/nvme/disk"])
            plug_in(cluster, node)
        yield
    finally:
        for node in nodes:
            cluster.run(
                node, ["sh", "-c", "losetup -d /dev/scratch; rm -f /dev/scratch /nvme/disk"], check=False
            )


def plug_in(cluster: Cluster, node: str) -> None:
    cluster.run(node, ["sh", "-c", 'ln -sfn "$(losetup --find --show /nvme/disk)" /dev/scratch'])


def carries_nothing(cluster: Cluster, node: str) -> bool:
    return cluster.run(node, ["blkid", "-p", "/dev/scratch"], check=False).returncode == 2


def test_a_whole_device_keeps_what_is_owed_over_a_reboot_and_is_empty_afterwards(site: Site) -> None:
    cluster = site.cluster
    new_directory(cluster, "/global/alice/target")
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    with scratch_devices(cluster, ("n1", "n2")):
        site.configure("device", 'devices = ["/dev/scratch"]')
        before = cluster.snapshots()
        job = cluster.submit(
            "alice", f'#!/bin/sh\nmkdir "$BEEOND/out"; echo hi > "$BEEOND/out/f"\n{HOLD}',
            "-N2", "-w", "n[1-2]", "--beeond-stage-out=out:/global/alice/target/done",
        )  # fmt: skip
        running(cluster, job)
        cluster.readonly("/global/alice/target")
        try:
            cluster.run("login", ["rm", "/global/alice/begun"])
            kept(cluster, job, ("n1", "n2"))
            cluster.reboot("n1")
            plug_in(cluster, "n1")
        finally:
            cluster.writable("/global/alice/target")
        assert not carries_nothing(cluster, "n1")
        recover(cluster, job, "--nodes", "n[1-2]")
        assert cluster.read("login", "/global/alice/target/done/f") == "hi\n"
        assert carries_nothing(cluster, "n1")
        assert carries_nothing(cluster, "n2")
        cluster.wait_idle()
        cluster.wait_clean(before, timeout_s=10)


def lacks(cluster: Cluster, node: str, flag: str) -> bool:
    return flag not in cluster.node_state(node).flags


def says(cluster: Cluster, node: str, words: str) -> bool:
    return words in cluster.node_state(node).reason


def kept(cluster: Cluster, job: int, nodes: tuple[str, ...], timeout_s: float = 40) -> None:
    """Wait until `nodes` are drained with a reason that names the command for `job`."""
    for node in nodes:
        cluster.wait_node(node, {"IDLE", "DRAIN"}, timeout_s=timeout_s)
        wait_for(partial(says, cluster, node, f"beeond-ctl recover {job} --nodes"), 40)


def recover(cluster: Cluster, job: int, *options: str) -> None:
    done = cluster.run("ctl", ["beeond-ctl", "recover", str(job), *options], check=False, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr


def allow_owners_to_recover(cluster: Cluster) -> None:
    """The rule of the admin guide, where `recover` is run."""
    guide = (Path(__file__).parents[2] / "docs/admin-guide.md").read_text()
    (rule,) = re.findall(r"^ {4}(\S+ ALL=\(root\) .*)$", guide, re.MULTILINE)
    place = "/etc/sudoers.d/beeond-ctl"
    cluster.run(
        "ctl", ["install", "-m", "440", "/dev/stdin", place], input=rule.replace("%users", "ALL") + "\n"
    )


def recover_as(cluster: Cluster, user: str, job: int, *options: str) -> int:
    words = ["sudo", "-n", "beeond-ctl", "recover", "--mine", str(job), *options]
    return cluster.run("ctl", words, user=user, check=False, timeout_s=120).returncode


HOLD = "touch /global/alice/begun; while [ -e /global/alice/begun ]; do sleep 0.1; done\n"
"""The end of a script that runs until the test lets it go."""


def running(cluster: Cluster, *jobs: int) -> None:
    """Wait until the job that holds has come so far."""
    for job in jobs:
        cluster.wait_job(job, "RUNNING")
    wait_for(lambda: exists(cluster, "/global/alice/begun"), 60)


def test_stage_out_that_cannot_be_proved_keeps_the_data_until_recover(site: Site) -> None:
    cluster = site.cluster
    make_tree(cluster, "/global/alice/tree", files=30)
    new_directory(cluster, "/global/alice/target")
    new_directory(cluster, "/global/alice/second")
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    job = cluster.submit(
        "alice", f'#!/bin/sh\nrsync -aHX /global/alice/tree/ "$BEEOND/out/"\n{HOLD}', "-N3",
        "--beeond-stage-out=out:/global/alice/target/%x", "--beeond-stage-out=out:/global/alice/second/out",
        "--beeond-stage-out=never-made:/global/alice/second/nothing", "--job-name=kept",
    )  # fmt: skip
    running(cluster, job)
    cluster.readonly("/global/alice/target")
    try:
        cluster.run("login", ["rm", "/global/alice/begun"])
        assert cluster.wait_job(job)["JobState"] == "COMPLETED"
        kept(cluster, job, NODES)
        reason = cluster.node_state("n1").reason
        assert "read-only" in reason.lower()
        assert_same(cluster, "/global/alice/tree", "/global/alice/second/out")  # what can be copied is
        told = cluster.job_output(job).splitlines()[-1]
        assert told.startswith("beeond: stage-out is NOT complete")
        assert f"beeond-ctl recover {job} --nodes 'n[1-3]'" in told
        refused = cluster.run("ctl", ["beeond-ctl", "recover", str(job)], check=False, timeout_s=120)
        assert refused.returncode == 1
        kept(cluster, job, NODES)
    finally:
        cluster.writable("/global/alice/target")
    allow_owners_to_recover(cluster)
    for user, options in (
        ("bob", ["--discard", "--yes"]),
        ("alice", ["--owner", "0"]),
        ("alice", ["--here"]),
    ):
        assert recover_as(cluster, user, job, *options) != 0
        kept(cluster, job, NODES)
    assert recover_as(cluster, "alice", job) == 0
    cluster.wait_idle()
    assert_same(cluster, "/global/alice/tree", "/global/alice/target/kept")


def test_kept_data_survives_a_reboot_and_can_be_discarded(site: Site) -> None:
    cluster = site.cluster
    new_directory(cluster, "/global/alice/target")
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    # A sign that came after a job's file could come after the test has removed the other one's.
    signs, waits = HOLD.split("; ", 1)
    jobs = [
        cluster.submit(
            "alice", f'#!/bin/sh\nmkdir "$BEEOND/out"\n{signs}; echo {i} > "$BEEOND/out/f"\n{waits}',
            "-N2", "-w", "n[1-2]", "--beeond-stage-out=out:/global/alice/target/%x", f"--job-name={i}",
            "--oversubscribe",
        )
        for i in range(2)
    ]  # fmt: skip
    running(cluster, *jobs)
    for job in jobs:
        wait_for(partial(exists, cluster, f"/mnt/beeond/{job}/out/f", "n1"), 30)
    cluster.readonly("/global/alice/target")
    try:
        cluster.run("login", ["rm", "/global/alice/begun"])
        kept(cluster, jobs[0], ("n1", "n2"))
        kept(cluster, jobs[1], ("n1", "n2"))
        for job in jobs:
            states = cluster.run("n1", ["beeond-ctl", "status", str(job), "--json"])
            assert [found["phase"] for found in json.loads(states.stdout)] == ["retained"]
        for node in ("n1", "n2"):  # and with them all that is not on a device, such as the job's name
            cluster.reboot(node)
        states = cluster.run("n1", ["beeond-ctl", "status", str(jobs[0]), "--json"])
        assert "retained" in json.loads(states.stdout)[0]["phase"]
    finally:
        cluster.writable("/global/alice/target")
    recover(cluster, jobs[0], "--nodes", "n[1-2]")
    recover(cluster, jobs[1], "--nodes", "n[1-2]", "--discard", "--yes")
    assert cluster.job_output(jobs[1]).splitlines()[-1] == (
        "beeond: the data that was kept on n[1-2] was GIVEN UP by an admin (recover --discard); "
        "nothing is kept any more"
    )
    assert cluster.read("login", "/global/alice/target/0/f") == "0\n"
    assert cluster.run("login", ["ls", "/global/alice/target"]).stdout.split() == ["0"]
    cluster.wait_idle()


def test_a_cancelled_job_is_staged_out(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    cluster.run("login", ["rm", "-rf", "/global/alice/cancelled", "/global/alice/begun"])
    job = cluster.submit(
        "alice",
        '#!/bin/sh\nmkdir "$BEEOND/out"; echo 1 > "$BEEOND/out/f"; touch /global/alice/begun; sleep 600\n',
        "-N2", "--beeond-stage-out=out:/global/alice/cancelled",
    )  # fmt: skip
    wait_for(lambda: exists(cluster, "/global/alice/begun"), 60)
    cluster.run("login", ["scancel", str(job)], user="alice")
    assert cluster.wait_job(job)["JobState"] == "CANCELLED"
    cluster.wait_idle()
    assert cluster.read("login", "/global/alice/cancelled/f") == "1\n"
    cluster.wait_clean(before, timeout_s=10)


def test_a_job_at_its_time_limit_is_staged_out(site: Site) -> None:
    cluster = site.cluster
    job = cluster.submit(
        "alice", '#!/bin/sh\nmkdir "$BEEOND/out"; echo 1 > "$BEEOND/out/f"; sleep 600\n',
        "-N2", "-t", "00:01:00", "--beeond-stage-out=out:/global/alice/timeout",
    )  # fmt: skip
    wait_for(partial(exists, cluster, f"/mnt/beeond/{job}/out/f", "n1"), 30)
    cluster.expire(job)
    assert cluster.wait_job(job, timeout_s=120)["JobState"] == "TIMEOUT"
    cluster.wait_idle()
    assert cluster.read("login", "/global/alice/timeout/f") == "1\n"


LARGE = "mkdir -p $0; for i in 1 2 3 4 5; do head -c 300M /dev/urandom >$0/$i; done"
"""A shell script that makes what takes a while to copy."""


def test_cancelling_during_stage_in_ends_it_and_leaves_clean_nodes(site: Site) -> None:
    cluster = site.cluster
    cluster.run(
        "login",
        ["sh", "-c", LARGE, "/global/alice/large"],
        user="alice",
    )  # fmt: skip
    before = cluster.snapshots()
    job = cluster.submit("alice", "#!/bin/sh\ntrue\n", "-N3", "--beeond-stage-in=/global/alice/large:in")
    log = f"/var/log/beeond-ctl/jobs/{job}.jsonl"
    wait_for(lambda: '"staging-in"' in read_or_empty(cluster, "n1", log), 30)
    wait_for(lambda: exists(cluster, f"/nvme/beeond/job-{job}/journal", "n1"), 10)  # /run is memory
    cluster.run("login", ["scancel", str(job)], user="alice")
    cluster.wait_job(job, timeout_s=60)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)
    events = [json.loads(line) for line in cluster.read("n1", log).splitlines()]
    assert not any(event.get("phase") == "ready" for event in events)
    cluster.run("login", ["rm", "-rf", "/global/alice/large"])


def working(cluster: Cluster, *options: str) -> int:
    """A job that has written 40 files, to be staged out to RESULT, and waits until it is let go (`let_go`)."""
    cluster.run("login", ["rm", "-rf", RESULT, "/global/alice/begun"])
    text = f'#!/bin/sh\nmkdir "$BEEOND/out"; for i in $(seq 40); do echo $i > "$BEEOND/out/$i"; done\n{HOLD}'
    job = cluster.submit("alice", text, "-N3", f"--beeond-stage-out=out:{RESULT}", *options)
    wait_for(lambda: exists(cluster, "/global/alice/begun"), 60)
    return job


RESULT = "/global/alice/result"


def let_go(cluster: Cluster) -> None:
    cluster.run("login", ["rm", "/global/alice/begun"])


def assert_all_is_there(cluster: Cluster) -> None:
    listing = cluster.run(
        "login", ["sh", "-c", f"cat {RESULT}/* | sort -n | tail -1; ls -A {RESULT} | wc -l"]
    )
    assert listing.stdout.split() == ["40", "40"]


def test_a_server_killed_during_the_job_loses_nothing(site: Site) -> None:
    cluster = site.cluster
    job = working(cluster)
    cluster.kill("n2", site.server)
    let_go(cluster)
    cluster.wait_job(job, timeout_s=60)
    cluster.wait_idle()
    assert_all_is_there(cluster)


def test_a_server_that_dies_while_data_is_staged_out_proves_nothing(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    die = f"""if (phase, when) == ("staging-out", "copied"):
        name = next(name for name in self.state.processes if "{site.service}" in name)
        supervisor.kill(supervisor.Process(name, *self.state.processes[name]))"""
    job = working(cluster)
    with hooked(cluster, "n2", "epilog", die):
        let_go(cluster)
        cluster.wait_job(job)
        kept(cluster, job, NODES)
    for node in NODES:
        assert f"n2: {site.service}" in cluster.node_state(node).reason
    cluster.run("login", ["rm", "-rf", RESULT])
    recover(cluster, job)
    assert_all_is_there(cluster)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_a_node_cut_off_before_the_epilog_keeps_all_data(site: Site) -> None:
    cluster = site.cluster
    job = working(cluster)
    cluster.cut("n3")
    try:
        let_go(cluster)
        kept(cluster, job, ("n1", "n2"))
    finally:
        cluster.restore("n3")
    cluster.run(
        "ctl", ["scontrol", "reconfigure"]
    )  # slurmd says what it has; by itself slurmctld would take minutes
    kept(cluster, job, ("n3",), timeout_s=150)
    recover(cluster, job, "--nodes", "n[1-3]")
    for node in NODES:
        wait_for(partial(lacks, cluster, node, "DRAIN"), 20)
    assert_all_is_there(cluster)


def test_a_node_cut_off_while_data_is_staged_out_keeps_it(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    job = working(cluster)
    with paused(cluster, "n3", "epilog", "staging-out"):
        let_go(cluster)
        wait_for(partial(exists, cluster, PAUSED, "n3"), 40)
        cluster.cut("n3")
        try:
            cluster.run("n3", ["rm", PAUSED])
            kept(cluster, job, ("n1", "n2"))
            wait_for(partial(retained, cluster, "n3", job), 60)
        finally:
            cluster.restore("n3")
    for node in NODES:
        wait_for(partial(settled, cluster, node), 90)
    recover(cluster, job, "--nodes", "n[1-3]")
    assert_all_is_there(cluster)
    if "DRAIN" in cluster.node_state("n3").flags:  # nobody could hear why
        cluster.resume("n3")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def retained(cluster: Cluster, node: str, job: int) -> bool:
    states = json.loads(
        cluster.run(node, ["beeond-ctl", "status", str(job), "--json"], check=False).stdout or "[]"
    )
    return [state["phase"] for state in states] == ["retained"]


def test_a_job_that_is_requeued_is_staged_out_and_begins_again(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    job = working(cluster, "-N1", "-w", "n1", "--requeue", site.option)
    cluster.run("ctl", ["scontrol", "requeue", str(job)])
    cluster.wait_job(job, "PENDING")
    wait_for(lambda: exists(cluster, f"{RESULT}/40"), 40)
    assert_all_is_there(cluster)
    cluster.run("login", ["rm", "-rf", RESULT, "/global/alice/begun"])
    # As long as slurmd knows the job, for two minutes, it runs no second Prolog for it.
    cluster.run("ctl", ["scontrol", "update", f"JobId={job}", "StartTime=now", "ReqNodeList=n2"])
    running(cluster, job)
    let_go(cluster)
    assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    assert_all_is_there(cluster)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_a_job_cancelled_while_its_file_system_comes_up_leaves_nothing(site: Site, cancelled_in: str) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    with paused(cluster, "n2", "prolog", cancelled_in):
        job = cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", site.option)
        wait_for(partial(exists, cluster, PAUSED, "n2"), 30)
        cluster.run("login", ["scancel", str(job)], user="alice")
        cluster.run("n2", ["rm", PAUSED])
        assert cluster.wait_job(job)["JobState"] == "CANCELLED"
    cluster.wait_idle()
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_clean(before, timeout_s=10)


@pytest.mark.parametrize("lost", ["n1", "n3"])
def test_a_node_cut_off_while_the_file_system_comes_up_is_named_and_left_clean(site: Site, lost: str) -> None:
    """The leader, n1, drains who is lost; nobody can drain the leader itself."""
    cluster = site.cluster
    before = cluster.snapshots()
    with paused(cluster, lost, "prolog", "mounting"):
        job = cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", site.option)
        wait_for(partial(exists, cluster, PAUSED, lost), 30)
        cluster.cut(lost)
        try:
            cluster.run(lost, ["rm", PAUSED])
            if lost != "n1":
                wait_for(partial(says, cluster, lost, f"job {job}: "), 40)
            for node in set(NODES) - {lost}:
                told = given_up(cluster, job, node)
                assert f"{lost} has not been heard from" in told or f"{lost} closed its connection" in told, (
                    told
                )
        finally:
            cluster.restore(lost)
    cluster.run("ctl", ["scancel", str(job)])
    for node in NODES:
        wait_for(partial(settled, cluster, node), 90)
        if node != lost:
            assert "DRAIN" not in cluster.node_state(node).flags
    assert not exists(cluster, "/global/alice/ran")
    if "DRAIN" in cluster.node_state(lost).flags:
        cluster.resume(lost)
    else:
        assert lost == "n1"
    cluster.wait_clean(before, timeout_s=10)


def test_a_leader_that_hears_none_of_the_others_drains_itself_and_nobody_else(site: Site) -> None:
    """As when its network is down while Slurm, on another one, still reaches it."""
    cluster = site.cluster
    before = cluster.snapshots()
    others = ("n2", "n3")
    with paused(cluster, "n1", "prolog", "mounting"):
        job = cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", site.option)
        wait_for(partial(exists, cluster, PAUSED, "n1"), 30)
        for node in others:
            cluster.freeze(node, "beeond-ctl prolog")
        try:
            cluster.run("n1", ["rm", PAUSED])
            wait_for(partial(says, cluster, "n1", "hears none of the other nodes"), 40)
        finally:
            for node in others:
                cluster.thaw(node, "beeond-ctl prolog")
    cluster.run("ctl", ["scancel", str(job)])
    for node in NODES:
        wait_for(partial(settled, cluster, node), 90)
    for node in others:
        assert "DRAIN" not in cluster.node_state(node).flags, cluster.node_state(node).reason
    assert not exists(cluster, "/global/alice/ran")
    cluster.resume("n1")
    cluster.wait_idle()
    cluster.wait_clean(before)


def test_a_server_that_hangs_while_the_file_system_comes_up_drains_its_node_alone(site: Site) -> None:
    """The others' probes hang as well: each of them might blame itself, or whoever else is in the file system."""
    cluster = site.cluster
    before = cluster.snapshots()
    with paused(cluster, "n1", "prolog", "mounting"):
        job = cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", site.option)
        wait_for(partial(exists, cluster, PAUSED, "n1"), 30)
        cluster.freeze("n2", site.server)
        cluster.run("n1", ["rm", PAUSED])
        wait_for(partial(says, cluster, "n2", f"job {job}: "), 60)
    cluster.run("ctl", ["scancel", str(job)])
    for node in NODES:
        wait_for(partial(settled, cluster, node), 90)
    for node in ("n1", "n3"):
        assert "DRAIN" not in cluster.node_state(node).flags, cluster.node_state(node).reason
    assert not exists(cluster, "/global/alice/ran")
    cluster.resume("n2")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def settled(cluster: Cluster, node: str) -> bool:
    return not {"COMPLETING", "DOWN", "NOT_RESPONDING"} & cluster.node_state(node).flags


def test_a_full_device_is_told_by_its_node_before_the_job_runs(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    site.configure("image")
    cluster.fill("n2")
    try:
        cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", site.option)
        wait_for(partial(says, cluster, "n2", "/nvme/beeond has "), 40)
    finally:
        cluster.unfill("n2")
    for node in NODES:
        wait_for(partial(lacks, cluster, node, "COMPLETING"), 40)
        assert ("DRAIN" in cluster.node_state(node).flags) == (node == "n2")
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_clean(before, timeout_s=10)


def test_a_node_whose_device_is_unusable_is_drained_with_the_reason_and_no_other(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    cluster.run("n2", ["chmod", "777", "/nvme/beeond"])
    try:
        job = cluster.submit("alice", "#!/bin/sh\ntrue\n", "-N3", site.option)
        cluster.wait_node("n2", {"IDLE", "DRAIN"}, timeout_s=40)
        assert "/nvme/beeond" in cluster.node_state("n2").reason
        for node in ("n1", "n3"):
            assert "DRAIN" not in cluster.node_state(node).flags
        cluster.run("ctl", ["scancel", str(job)])
    finally:
        cluster.run("n2", ["chmod", "700", "/nvme/beeond"])
    wait_for(lambda: "COMPLETING" not in cluster.node_state("n2").flags, 30)
    cluster.resume("n2")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


HOOK = """#!{python} -I
import os, signal, sys, time
from beeond_ctl import cli, mounts, supervisor
from beeond_ctl.lifecycle import stage
from beeond_ctl.lifecycle.here import Here

def here(self, phase, when):
    {there}

def enter(self, phase, announce=Here.enter):
    here(self, phase, "before")
    announce(self, phase)
    here(self, phase, "after")

def make_point(path, make=mounts.make_point):
    make(path)
    here(None, "mounting", "within")

def prove(self, team, prove=stage.Stage._prove_together):
    here(self._here, "staging-out", "copied")
    prove(self, team)

if os.path.isdir("/run/beeond-ctl/jobs/" + os.environ["SLURM_JOB_ID"]) or "{hook}" == "prolog":
    Here.enter, mounts.make_point, stage.Stage._prove_together = enter, make_point, prove
    sys.argv = ["beeond-ctl", "{hook}"]
    cli.main()
"""
"""A Prolog or Epilog that does `there` whenever it is somewhere: just "before" or "after" it has written down that a
phase begins; "within", when it has made the mount point and the state does not say so yet; "copied", when all is staged
out and nothing of it proved."""


@contextmanager
def hooked(cluster: Cluster, node: str, hook: str, there: str) -> Iterator[None]:
    script = f"/etc/slurm/{hook}.d/50-beeond"
    original = cluster.read(node, script)
    cluster.run(node, ["tee", script], input=HOOK.format(python=sys.executable, hook=hook, there=there))
    try:
        yield
    finally:
        cluster.run(node, ["tee", script], input=original)


def deadly(cluster: Cluster, node: str, hook: str, phase: str, when: str) -> AbstractContextManager[None]:
    """A hook that is killed there."""
    there = f"if (phase, when) == {(phase, when)}: os.kill(os.getpid(), signal.SIGKILL)"
    return hooked(cluster, node, hook, there)


PAUSED = "/run/paused"


def paused(cluster: Cluster, node: str, hook: str, phase: str) -> AbstractContextManager[None]:
    """A hook that makes PAUSED at the beginning of `phase`, and goes on when that is gone."""
    there = f"""if (phase, when) == {(phase, "after")}:
        open("{PAUSED}", "w").close()
        while os.path.exists("{PAUSED}"):
            time.sleep(0.02)"""
    return hooked(cluster, node, hook, there)


def test_a_prolog_killed_in_any_phase_is_cleaned_up_after(
    site: Site, node: str, phase: str, when: str
) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    with deadly(cluster, node, "prolog", phase, when):
        job = cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", site.option)
        wait_for(lambda: "DRAIN" in cluster.node_state(node).flags, 40)
        cluster.run("ctl", ["scancel", str(job)])
        for name in NODES:
            wait_for(partial(lacks, cluster, name, "COMPLETING"), 40)
    assert not exists(cluster, "/global/alice/ran")
    for other in set(NODES) - {node}:
        assert "DRAIN" not in cluster.node_state(other).flags
    cluster.resume(node)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_an_epilog_killed_in_any_phase_loses_nothing(site: Site, node: str, phase: str, when: str) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    job = working(cluster)
    with deadly(cluster, node, "epilog", phase, when):
        let_go(cluster)
        cluster.wait_job(job)
        for name in NODES:
            wait_for(partial(lacks, cluster, name, "COMPLETING"), 60)
    assert "DRAIN" in cluster.node_state(node).flags
    recover(cluster, job, "--nodes", "n[1-3]")
    assert_all_is_there(cluster)
    for name in NODES:
        if "DRAIN" in cluster.node_state(name).flags:
            cluster.resume(name)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def read_or_empty(cluster: Cluster, node: str, path: str) -> str:
    return cluster.run(node, ["cat", path], check=False).stdout
