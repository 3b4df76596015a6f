"""What a reboot or a crash leaves, and `beeond-ctl sweep` that finds it."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import Site, settled
from tests.integration.site_config import CONFIG
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

HOLD = """#!/bin/sh
mkdir "$BEEOND/out"; echo result > "$BEEOND/out/$SLURM_JOB_ID"
touch /global/alice/begun
while [ -e /global/alice/begun ]; do sleep 0.1; done
"""


@pytest.fixture(autouse=True)
def site(cluster: Cluster) -> Site:
    """Jobs may have GlusterFS, and no deadline is long."""

    def configure(kind: str, storage: str = "") -> None:
        cluster.write_config(CONFIG.format(kind=kind, more=storage))

    configure("directory")
    return Site(cluster, "--beeond=backend=glusterfs", "glusterfsd", "glusterfs brick", configure)


def swept(
    cluster: Cluster, node: str, *options: str, env: dict[str, str] | None = None
) -> list[tuple[str, str]]:
    done = cluster.run(node, ["beeond-ctl", "sweep", "--json", *options], check=False, env=env)
    return [(item["what"], item["verdict"]) for item in json.loads(done.stdout)]


def begun(cluster: Cluster) -> bool:
    return cluster.run("login", ["test", "-e", "/global/alice/begun"], check=False).returncode == 0


def held(cluster: Cluster, *options: str, nodes: str = "n[1-2]") -> int:
    """A job, of n1 and n2 by default, that has written its result and waits."""
    cluster.wait_idle()
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    job = cluster.submit("alice", HOLD, "-w", nodes, *options)
    cluster.wait_job(job, "RUNNING")
    wait_for(partial(begun, cluster), 30)
    return job


def put_back(cluster: Cluster, job: int) -> None:
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    cluster.run("ctl", ["scancel", str(job)], check=False)
    for node in ("n1", "n2"):
        wait_for(partial(settled, cluster, node), 90)
        if "DRAIN" in cluster.node_state(node).flags:
            cluster.resume(node)
    cluster.wait_idle()


@pytest.fixture(scope="module", autouse=True)
def nothing_of_other_tests(cluster: Cluster) -> None:
    """A node that another test has rebooted may still hold what nobody is owed."""
    for node in ("n1", "n2", "n3"):
        cluster.run(node, ["beeond-ctl", "sweep"], check=False)


def test_a_live_instance_is_left_alone(cluster: Cluster) -> None:
    job = held(cluster, "--beeond")
    assert swept(cluster, "n1") == [(f"job {job}", "live")]
    assert swept(cluster, "n3") == []
    # Whoever types it may see other jobs only, or look at another cluster.
    for env in ({"SQUEUE_PARTITION": "other"}, {"SQUEUE_USERS": "bob"}, {"SLURM_CLUSTERS": "elsewhere"}):
        assert swept(cluster, "n1", env=env) == [(f"job {job}", "live")], env
    for options in ([], ["--discard", "--yes"]):
        refused = cluster.run(
            "ctl", ["beeond-ctl", "recover", str(job), "-w", "n[1-2]", *options], check=False
        )
        assert refused.returncode == 1
        assert "not over (RUNNING)" in refused.stdout
    assert cluster.read("n2", f"/mnt/beeond/{job}/out/{job}") == "result\n"
    cluster.run("login", ["rm", "/global/alice/begun"])
    assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    cluster.wait_idle()


def test_a_reboot_leaves_data_that_nobody_is_owed_and_sweep_removes_it(cluster: Cluster) -> None:
    cluster.run("n2", ["sh", "-c", "rm -f /run/beeond-ctl/metrics.json*"])  # another test's, lost by a reboot
    before = cluster.snapshots()
    job = held(cluster, "--beeond")
    try:
        cluster.reboot("n2")
        assert cluster.run("n2", ["ls", "/nvme/beeond"]).stdout.split() == [f"job-{job}"]
        assert swept(cluster, "n2", "--dry-run") == [(f"job {job}", "removed")]
        assert cluster.run("n2", ["ls", "/nvme/beeond"]).stdout.split() == [f"job-{job}"]
        assert swept(cluster, "n2") == [(f"job {job}", "removed")]
        assert cluster.run("n2", ["ls", "/nvme/beeond"]).stdout == ""
        assert swept(cluster, "n2") == []
    finally:
        put_back(cluster, job)
    cluster.wait_clean(before, timeout_s=10)


@pytest.mark.parametrize(("node", "other"), [("n2", "n1")])
def test_a_reboot_leaves_data_that_is_owed_and_sweep_keeps_it_for_recover(
    site: Site, node: str, other: str
) -> None:
    cluster = site.cluster
    cluster.run("login", ["rm", "-rf", "/global/alice/owed"])
    job = held(cluster, "--beeond-stage-out=out:/global/alice/owed")
    try:
        cluster.reboot(node)
        assert swept(cluster, node) == [(f"job {job}", "kept")]
        assert f"beeond-ctl recover {job} --nodes 'n[1-2]'" in cluster.node_state(node).reason
        assert swept(cluster, node) == [(f"job {job}", "kept")]
        cluster.run("login", ["rm", "/global/alice/begun"])
        cluster.run("ctl", ["scancel", str(job)], check=False)
        wait_for(lambda: "retained" in cluster.run(other, ["beeond-ctl", "status"]).stdout, 90)
        cluster.run("ctl", ["beeond-ctl", "recover", str(job), "--nodes", "n[1-2]"], timeout_s=120)
        assert cluster.read("login", f"/global/alice/owed/{job}") == "result\n"
        assert f"proved; {node} WAS REBOOTED before" in cluster.job_output(job)
        assert swept(cluster, "n1") == swept(cluster, "n2") == []
    finally:
        put_back(cluster, job)


def test_an_instance_that_lost_its_state_is_found_by_place_and_token(site: Site) -> None:
    cluster = site.cluster
    site.configure("image", 'capacity = "600MiB"')
    before = cluster.snapshots(["n3"])
    job = held(cluster, site.option, nodes="n3")
    try:
        cluster.run("n3", ["rm", f"/run/beeond-ctl/jobs/{job}/state.json"])
        assert {verdict for _, verdict in swept(cluster, "n3")} == {"live", "unknown"}
        assert cluster.read("n3", f"/mnt/beeond/{job}/out/{job}") == "result\n"
        cluster.run("login", ["rm", "/global/alice/begun"])
        cluster.wait_job(job, "COMPLETED")  # its Epilog knows of nothing
        assert cluster.processes("n3", site.server)
        found = swept(cluster, "n3")
        assert (f"job {job}", "removed") in found
        assert {verdict for _, verdict in found} == {"removed"}
        cluster.wait_clean(before)
        assert swept(cluster, "n3") == []
    finally:
        cluster.run("login", ["rm", "-f", "/global/alice/begun"])
        cluster.run("n3", ["beeond-ctl", "sweep"], check=False)
        cluster.wait_idle()


def test_a_directory_that_nobody_knows_is_removed_if_empty_and_told_if_not(cluster: Cluster) -> None:
    cluster.run("n3", ["mkdir", "-p", "/nvme/beeond/job-9999998", "/nvme/beeond/job-9999999/data"])
    try:
        assert swept(cluster, "n3") == [
            ("/nvme/beeond/job-9999998", "removed"),
            ("/nvme/beeond/job-9999999", "stuck"),
        ]
        assert cluster.run("n3", ["beeond-ctl", "sweep"], check=False).returncode == 1
        assert cluster.run("n3", ["ls", "/nvme/beeond"]).stdout.split() == ["job-9999999"]
        assert "/nvme/beeond/job-9999999: has no readable record" in cluster.node_state("n3").reason
    finally:
        cluster.run("n3", ["rm", "-rf", "/nvme/beeond/job-9999999"])
    assert swept(cluster, "n3") == []
    cluster.wait_node("n3", "IDLE")
