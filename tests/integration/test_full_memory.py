"""What lies in /run is memory of the node's: a job does not fill it, and ends well where somebody else has."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import (
    RESULT,
    assert_all_is_there,
    lacks,
    let_go,
    recover,
    running,
    says,
    working,
)
from tests.integration.site_config import CONFIG
from tests.integration.test_main_job import ready  # noqa: F401 - before and after each test
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

GLUSTER = "--beeond=backend=glusterfs"
STORM = """#!/usr/bin/python3
import os, time
file, end = os.open(os.environ["BEEOND"] + "/f", os.O_RDWR | os.O_CREAT), 0
try:
    while True:
        end += os.pwrite(file, bytes(1 << 20), end)
except OSError:
    pass
failed = 0
while failed < 6000:
    try:
        end += os.pwrite(file, bytes(4096), end)
    except OSError:
        failed += 1
open("/global/alice/begun", "w").close()
while os.path.exists("/global/alice/begun"):
    time.sleep(0.1)
"""
"""A job that goes on writing on a full file system, until there are some MiB of messages about it."""


def kib(cluster: Cluster, path: str) -> int:
    return int(cluster.run("n1", ["du", "-skx", path]).stdout.split()[0])


def test_a_job_that_writes_on_a_full_file_system_fills_nothing_of_the_nodes(cluster: Cluster) -> None:
    cluster.write_config(CONFIG.format(kind="image", more='capacity = "400MiB"'))
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    before = cluster.snapshots()
    job = cluster.submit("alice", STORM, "-N1", "-w", "n1", GLUSTER)
    running(cluster, job)
    logs = f"/run/beeond-ctl/jobs/{job}/logs"
    first = cluster.run("n1", ["head", "-c", "4096", f"{logs}/brick-0.log"]).stdout
    assert "No space left on device" in first
    assert kib(cluster, logs) <= 8 * 1024
    assert kib(cluster, "/run") <= 1024  # without other file systems below it
    let_go(cluster)
    assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


@contextmanager
def full_run(cluster: Cluster) -> Iterator[None]:
    """A node's /run without any room; it would be too large to fill as it is."""
    size = cluster.run("n1", ["findmnt", "-bno", "SIZE", "/run"]).stdout.strip()
    used = cluster.run("n1", ["findmnt", "-bno", "USED", "/run"]).stdout.strip()
    cluster.run("n1", ["mount", "-o", f"remount,size={int(used) + 65536}", "/run"])
    try:
        cluster.run("n1", ["sh", "-c", "cat /dev/zero > /run/full"], check=False)
        yield
    finally:
        cluster.run("n1", ["rm", "-f", "/run/full"])
        cluster.run("n1", ["mount", "-o", f"remount,size={size}", "/run"])


def test_a_job_ends_as_ever_on_a_node_whose_run_is_full(cluster: Cluster) -> None:
    before = cluster.snapshots()
    job = working(cluster, GLUSTER)
    with full_run(cluster):
        let_go(cluster)
        cluster.wait_job(job)
        cluster.wait_idle()
    assert_all_is_there(cluster)
    cluster.wait_clean(before, timeout_s=10)


def test_where_nothing_can_be_written_down_all_the_same_is_stopped_and_the_data_kept(
    cluster: Cluster,
) -> None:
    before = cluster.snapshots()
    job = working(cluster, GLUSTER)
    cluster.run("n1", ["rm", f"/run/beeond-ctl/jobs/{job}/reserve"])
    with full_run(cluster):
        let_go(cluster)
        cluster.wait_job(job)
        wait_for(partial(says, cluster, "n1", "cannot be written (No space left on device)"), 60)
        wait_for(partial(lacks, cluster, "n1", "COMPLETING"), 60)
        assert cluster.processes("n1", "glusterfs") == []
        assert cluster.run("n1", ["findmnt", f"/mnt/beeond/{job}"], check=False).returncode != 0
        cluster.run("n1", ["test", "-d", f"/nvme/beeond/job-{job}"])
    cluster.run("login", ["rm", "-rf", RESULT])
    recover(cluster, job, "--nodes", "n[1-3]")
    assert_all_is_there(cluster)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)
