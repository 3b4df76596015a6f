"""A job that fills its file system, or whose device somebody else fills, has all of its results in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import (
    HOLD,
    RESULT,
    assert_all_is_there,
    hooked,
    kept,
    let_go,
    recover,
    running,
    says,
    working,
)
from tests.integration.site_config import CONFIG
from tests.integration.test_main_job import ready  # noqa: F401 - before and after each test

if TYPE_CHECKING:
    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

FILL = f"""#!/usr/bin/python3
import os, subprocess
top = os.environ["BEEOND"]
os.mkdir(top + "/out")
for i in range(40):
    with open(f"{{top}}/out/{{i}}", "w") as file:
        file.write(str(i))

def full(name):
    end = 0
    for size in (1 << 20, 1 << 12, 1):
        try:
            file = os.open(name, os.O_WRONLY | os.O_CREAT)
            while True:
                end += os.pwrite(file, bytes(size), end)
        except OSError as error:
            assert error.errno == 28, error

def refused(make, names):  # each brick takes its own
    for name in names:
        try:
            make(name)
        except OSError as error:
            assert error.errno == 28, error
            yield name

for i in range(12):
    full(f"{{top}}/big{{i}}")
names = [f"{{top}}/d{{i}}" for i in range(200)]
assert len(list(refused(os.mkdir, names))) > 100
subprocess.run(["sh", "-c", {HOLD!r}])
print(len(os.listdir(top + "/out")), open(top + "/out/7").read())
"""
"""A job that writes 40 files, and then fills all that there is, also for directories; it sees no error but ENOSPC."""


def filling(cluster: Cluster, *options: str) -> int:
    cluster.write_config(CONFIG.format(kind="image", more='capacity = "320MiB"'))
    cluster.run("login", ["rm", "-rf", RESULT, "/global/alice/begun"])
    job = cluster.submit("alice", FILL, f"--beeond-stage-out=out:{RESULT}/a/b", *options)
    running(cluster, job)
    return job


def assert_it_has_all(cluster: Cluster, job: int) -> None:
    listing = cluster.run("login", ["sh", "-c", f"cat {RESULT}/a/b/* | wc -c; ls -A {RESULT}/a/b | wc -l"])
    assert listing.stdout.split() == ["70", "40"]
    assert "40 7\n" in cluster.job_output(job)


@pytest.mark.parametrize(
    "options", [("-N2", "-w", "n[1-2]"), ("-N1", "-w", "n1")], ids=["glusterfs", "local"]
)
def test_a_full_file_system_is_staged_out_and_leaves_clean_nodes(
    cluster: Cluster, options: tuple[str, ...]
) -> None:
    before = cluster.snapshots()
    job = filling(cluster, *options)
    flush = f"export BEEOND=/mnt/beeond/{job} SLURM_JOB_ID={job}; beeond-ctl flush --wait out/7"
    told = cluster.run("n1", ["sh", "-c", flush], user="alice", check=False).stderr
    assert "No space left on device; remove something there, or leave it to the stage-out\n" in told
    status = cluster.run("n1", ["beeond-ctl", "status", str(job)], user="alice").stdout
    assert "health     ok" in status
    let_go(cluster)
    assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    cluster.wait_idle()
    assert_it_has_all(cluster, job)
    cluster.wait_clean(before, timeout_s=10)


def test_a_full_file_system_whose_stage_out_failed_is_recovered(cluster: Cluster) -> None:
    before = cluster.snapshots()
    job = filling(cluster, "-N2", "-w", "n[1-2]")
    cluster.run("login", ["mkdir", "-m", "000", RESULT], user="alice")
    let_go(cluster)
    kept(cluster, job, ("n1", "n2"))
    assert "permission denied" in cluster.node_state("n1").reason
    cluster.run("login", ["chmod", "700", RESULT], user="alice")
    recover(cluster, job, "--nodes", "n[1-2]")
    cluster.wait_idle()
    assert_it_has_all(cluster, job)
    cluster.wait_clean(before, timeout_s=10)


def test_devices_that_somebody_else_has_filled_are_staged_out_from(cluster: Cluster) -> None:
    before = cluster.snapshots()
    job = working(cluster, "--beeond=backend=glusterfs")
    for node in ("n1", "n2", "n3"):
        cluster.fill(node)
    try:
        let_go(cluster)
        assert cluster.wait_job(job)["JobState"] == "COMPLETED"
        cluster.wait_idle()
    finally:
        for node in ("n1", "n2", "n3"):
            cluster.unfill(node)
    assert_all_is_there(cluster)
    cluster.wait_clean(before, timeout_s=10)


def test_a_device_that_dies_while_data_is_staged_out_proves_nothing(cluster: Cluster) -> None:
    cluster.write_config(CONFIG.format(kind="image", more='capacity = "320MiB"'))
    before = cluster.snapshots()
    # XFS_IOC_GOINGDOWN: what a device that fails makes of its file system, when all is on it. A brick lives on, and its
    # files are not listed any more.
    dies = """if (phase, when) == ("staging-out", "copied"):
        import fcntl, struct
        directory = os.open(self.plan.targets[0].data, os.O_RDONLY)
        fcntl.ioctl(directory, 0x8004587D, struct.pack("I", 0))
        os.close(directory)"""
    job = working(cluster, "--beeond=backend=glusterfs")
    with hooked(cluster, "n2", "epilog", dies):
        let_go(cluster)
        cluster.wait_job(job)
        kept(cluster, job, ("n1", "n2", "n3"))
    for node in ("n1", "n2", "n3"):
        assert says(cluster, node, f"n2: /nvme/beeond/job-{job} takes no data")
    cluster.run("login", ["rm", "-rf", RESULT])
    recover(cluster, job)
    cluster.wait_idle()
    assert_all_is_there(cluster)
    cluster.wait_clean(before, timeout_s=10)
