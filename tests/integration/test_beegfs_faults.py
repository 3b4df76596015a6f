"""Faults of whole jobs over the stand-ins for BeeGFS 7.4: those that any file system has, and BeeGFS's own."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import (  # noqa: F401 - they are to run here
    NODES,
    PAUSED,
    Site,
    assert_all_is_there,
    kept,
    let_go,
    pytest_generate_tests,
    recover,
    test_a_cancelled_job_is_staged_out,
    test_a_full_device_is_told_by_its_node_before_the_job_runs,
    test_a_job_cancelled_while_its_file_system_comes_up_leaves_nothing,
    test_a_node_cut_off_while_data_is_staged_out_keeps_it,
    test_a_prolog_killed_in_any_phase_is_cleaned_up_after,
    test_a_server_that_hangs_while_the_file_system_comes_up_drains_its_node_alone,
    test_an_epilog_killed_in_any_phase_loses_nothing,
    tidy,
    working,
)  # fmt: skip
from tests.integration.on_cluster import exists
from tests.integration.test_beegfs import CLIENT, begin, drained, events, finish, furnish, replace, seconds
from tests.standins.beegfs import programs
from tests.testbed import TestbedError, product
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

EDITION = "7.4"
KILLS = {
    "prolog": [
        ("n1", "starting", "after"),
        ("n2", "mounting", "within"),
        ("n1", "mounting", "after"),
    ],
    "epilog": [
        ("n1", "staging-out", "after"),
        ("n2", "stopping", "after"),
    ],
}
CANCELS = ["starting"]


@pytest.fixture(scope="module")
def furnished(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """Stand-ins and prepared metadata on all nodes; gone afterwards."""
    prepare(cluster, request.module.EDITION, "directory")
    yield
    for node in NODES:
        places = (
            "/opt/beegfs /nvme/beeond/metadata-* /var/lib/beeond-ctl /usr/sbin/mount.beegfs /usr/sbin/umount"
        )
        cluster.run(node, ["sh", "-c", f"rm -rf {places} {programs.HASTE}"])
    cluster.write_config(product.config())


CAPACITY = 'capacity = "1GiB"'


def prepare(cluster: Cluster, edition: str, kind: str, storage: str = CAPACITY, size: str = "1GiB") -> None:
    """Make on all nodes what metadata is copied from; a busy machine may take its time for it."""
    furnish(cluster, edition, start=60, kind=kind, storage=storage, meta_size=size)
    for node in NODES:
        cluster.run(node, ["beeond-ctl", "prepare"])


@pytest.fixture
def site(cluster: Cluster, furnished: None, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Jobs have BeeGFS; afterwards no trace of them, whatever the test did, but for what metadata is copied from."""

    def configure(kind: str, storage: str = CAPACITY) -> None:
        size = "512MiB" if kind == "device" else "1GiB"
        if kind == "device":  # it is in another place
            prepare(cluster, edition, kind, storage, size)
        furnish(cluster, edition, kind=kind, storage=storage, meta_size=size)

    edition = request.module.EDITION
    configure("directory")
    cluster.wait_idle()
    yield Site(
        cluster,
        "--beeond=backend=beegfs,meta=all",
        r"programs\.py \S+ beegfs-(storage|helperd)",
        "beegfs-storage",
        configure,
    )
    for node in NODES:
        cluster.run(node, ["rm", "-f", PAUSED, programs.STUBBORN])
    end_clients(cluster)
    configure("directory")
    left = {node: jobs_on(cluster, node) for node in NODES}
    tidy(cluster, left)
    assert not any(left.values()), left


def jobs_on(cluster: Cluster, node: str) -> list[str]:
    names = cluster.run(node, ["ls", "-A", "/nvme/beeond"]).stdout.split()
    return [name for name in names if name.startswith("job-")]


# --- the management service -------------------------------------------------------------------------------


def test_clients_can_be_unmounted_though_the_management_has_died(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    job = begin(cluster, "true", "-N3", site.option)
    cluster.kill("n1", r"programs\.py \S+ beegfs-mgmtd")
    finish(cluster, job)
    cluster.wait_idle()
    assert "beegfs-mgmtd" in next(
        event["services"] for event in events(cluster, "n1", job) if event["event"] == "revived"
    )
    for node in NODES:
        assert seconds(events(cluster, node, job), "unmounting") < programs.LEAVE_S / 2
    cluster.wait_clean(before, timeout_s=10)


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_management_that_died_or_hangs_in_the_job_loses_nothing_and_holds_up_nothing_for_ever(
    site: Site, fault: str
) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    job = working(cluster)
    getattr(cluster, fault)("n1", r"programs\.py \S+ beegfs-mgmtd ")
    let_go(cluster)
    cluster.wait_job(job)
    cluster.wait_idle()
    assert_all_is_there(cluster)
    cluster.wait_clean(before, timeout_s=10)


def test_a_server_that_hangs_in_the_job_keeps_the_data_until_recover(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    job = working(cluster)
    in_background(cluster, "n1", f"cd /mnt/beeond/{job} && exec sleep 600")
    cluster.freeze("n2", r"programs\.py \S+ beegfs-storage ")
    for node in NODES:
        wait_for(partial(hangs, cluster, node, f"/mnt/beeond/{job}"), 20)
    let_go(cluster)
    cluster.wait_job(job)
    kept(cluster, job, NODES)
    for node in NODES:
        assert "does not answer" in cluster.node_state(node).reason
        assert not cluster.processes(node, r"programs\.py \S+ beegfs-")
        assert not exists(cluster, f"/mnt/beeond/{job}", node)
    recover(cluster, job)
    assert_all_is_there(cluster)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def in_background(cluster: Cluster, node: str, script: str) -> None:
    """Run `script` as alice, outside of any job, and do not wait for it."""
    cluster.run(node, ["sh", "-c", 'setsid sh -c "$0" >/dev/null 2>&1 &', script], user="alice")


def hangs(cluster: Cluster, node: str, path: str) -> bool:
    """Whether who opens the directory waits: the client has found a server silent, and has the kernel ask it before."""
    (client,) = cluster.processes(node, rf"{CLIENT} \S+ {path} ")
    opened = set()
    for file in Path(f"/proc/{client.pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            opened.add(os.readlink(file))
    return "anon_inode:[fanotify]" in opened


def end_clients(cluster: Cluster) -> None:
    """As the kernel does with clients that are unmounted and cannot tell mgmtd, after a while."""
    for node in NODES:
        with suppress(TestbedError):
            cluster.kill(node, CLIENT)


def test_a_server_that_does_not_end_is_killed_in_time_and_its_data_kept(site: Site) -> None:
    cluster = site.cluster
    before = cluster.snapshots()
    cluster.run("n2", ["touch", programs.STUBBORN])
    cluster.run("login", ["rm", "-rf", "/global/alice/target"])
    cluster.run("login", ["mkdir", "/global/alice/target"], user="alice")
    options = ("-N3", site.option, "--beeond-stage-out=out:/global/alice/target/out")
    job = begin(cluster, 'mkdir "$BEEOND/out"; echo 1 > "$BEEOND/out/f"', *options)
    cluster.readonly("/global/alice/target")
    try:
        finish(cluster, job)
        kept(cluster, job, NODES)
    finally:
        cluster.writable("/global/alice/target")
    cluster.run("n2", ["rm", programs.STUBBORN])
    (stopped,) = (event for event in events(cluster, "n2", job) if event.get("step") == "stopping")
    assert {"beegfs-meta", "beegfs-storage"} <= set(stopped["killed"])
    recover(cluster, job)
    assert cluster.read("login", "/global/alice/target/out/f") == "1\n"
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


# --- bring-up ---------------------------------------------------------------------------------------------

KILL_SERVER = '"$real" "$@" || exit; kill -9 $(pgrep -f "[p]rograms.py [^ ]* beegfs-storage")'
WRONG = {
    "a server that hangs while it starts": (
        "n2", "beegfs-storage", 'kill -STOP $$; exec "$real" "$@"', "beegfs-storage: not ready after 6 s",
    ),
    "a mount that hangs": ("n3", "/usr/sbin/mount.beegfs", "exec sleep 600", "mount was not done after 6 s"),
    "a server that dies when its node has mounted": ("n2", "/usr/sbin/mount.beegfs", KILL_SERVER, "storage"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_goes_wrong_while_the_file_system_comes_up_is_its_nodes_fault_alone_and_leaves_nothing(
    site: Site, fault: str
) -> None:
    cluster = site.cluster
    node, program, script, words = WRONG[fault]
    before = cluster.snapshots()
    replace(cluster, node, program, script)
    cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", site.option)
    reason = drained(cluster, node)
    assert words in reason, reason
    cluster.run(node, ["rm", "-f", "/usr/sbin/mount.beegfs.real"])
    site.configure("directory")
    cluster.wait_clean(before, timeout_s=15)
    assert not exists(cluster, "/global/alice/ran")


LAYOUT = 'case "$*" in *setpattern*|*"entry set"*) touch /global/alice/laying-out; {then};; esac; exec "$real" "$@"'
# The program that is replaced becomes the server, under the same process id.
STOPPED = '( until [ -e /global/alice/laying-out ]; do sleep 0.05; done; kill -STOP $$ ) & exec "$real" "$@"'


@pytest.mark.parametrize("hangs", [True, False])
def test_a_file_system_that_cannot_be_laid_out_is_the_fault_of_who_has_the_server_that_hangs(
    site: Site, request: pytest.FixtureRequest, hangs: bool
) -> None:
    """The tool of BeeGFS waits for it on the leader, which is at fault only if all servers are well."""
    cluster = site.cluster
    before = cluster.snapshots()
    tool = "beegfs" if request.module.EDITION == "8" else "beegfs-ctl"
    replace(cluster, "n1", tool, LAYOUT.format(then="exec sleep 600" if hangs else "exec false"))
    if hangs:
        replace(cluster, "n2", "beegfs-meta", STOPPED)
    job = cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", site.option)
    reason = drained(cluster, "n2" if hangs else "n1")
    assert ("beegfs-meta is stopped" if hangs else "did not come up") in reason, reason
    cluster.run("login", ["rm", "/global/alice/laying-out"])
    site.configure("directory")
    cluster.wait_clean(before, timeout_s=15)
    assert not exists(cluster, "/global/alice/ran")
    # Nobody's manager ended before all had unmounted.
    assert not [
        node
        for node in NODES
        if any(each["event"] == "roll-back alone" for each in events(cluster, node, job))
    ]


# --- what holds a mount -----------------------------------------------------------------------------------


def test_a_mount_that_cannot_be_let_go_of_leaves_nothing_else_behind(site: Site) -> None:
    cluster = site.cluster
    job = working(cluster)
    held = cluster.run(
        "n2",
        ["sh", "-c", f"truncate -s 1M /mnt/beeond/{job}/held; losetup -f --show /mnt/beeond/{job}/held"],
    )
    try:
        let_go(cluster)
        cluster.wait_job(job)
        reason = drained(cluster, "n2")
        assert f"/mnt/beeond/{job} could not be unmounted" in reason
        assert_all_is_there(cluster)
        assert not cluster.processes("n2", r"programs\.py \S+ beegfs-")
        assert not jobs_on(cluster, "n2")
        assert not exists(cluster, f"/run/beeond-ctl/jobs/{job}", "n2")
    finally:
        cluster.run("n2", ["losetup", "-d", held.stdout.strip()])
