"""A slurmd that is restarted while an Epilog of ours is at work: slurmctld asks it to end the job again."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import (
    PAUSED,
    assert_all_is_there,
    hooked,
    let_go,
    working,
)
from tests.integration.on_cluster import exists
from tests.integration.test_main_job import ready  # noqa: F401 - before and after each test
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

HELD = f"""if (phase, when) == ("staging-out", "copied"):
        open("{PAUSED}", "w").close()
        while os.path.exists("{PAUSED}"):
            time.sleep(0.02)

from beeond_ctl.lifecycle import guard
guard.LOCK_S = 3.0"""
"""An Epilog that is held when all is copied and nothing proved. A Prolog would wait for 3 s."""


def restart_slurmd(cluster: Cluster, node: str) -> None:
    """As after a crash; without what it noted of jobs, which it forgets two minutes after their end."""
    cluster.kill(node, "^/usr/sbin/slurmd")
    again = "rm /var/spool/slurmd/cred_state*; exec /usr/sbin/slurmd >/var/log/testbed-services.log 2>&1"
    cluster.run(node, ["sh", "-c", f"{again} </dev/null"])


def waits(cluster: Cluster, node: str, job: int) -> bool:
    return '"waiting"' in cluster.read(node, f"/var/log/beeond-ctl/jobs/{job}.jsonl")


def states(cluster: Cluster, job: int) -> tuple[str, bool, bool]:
    flags = cluster.node_state("n1").flags
    return cluster.job(job)["JobState"], "COMPLETING" in flags, "DRAIN" in flags


def test_the_second_epilog_waits_until_the_first_has_proved_what_it_copies(cluster: Cluster) -> None:
    before = cluster.snapshots()
    job = working(cluster, "-N1", "-w", "n1", "--beeond=backend=glusterfs")
    with hooked(cluster, "n1", "epilog", HELD):
        let_go(cluster)
        wait_for(partial(exists, cluster, PAUSED, "n1"), 40)
        restart_slurmd(cluster, "n1")
        wait_for(partial(waits, cluster, "n1", job), 120)  # slurmctld asks once a minute
        until = time.monotonic() + 6
        while time.monotonic() < until:
            assert states(cluster, job) == ("COMPLETING", True, False)
            time.sleep(0.2)
        log = cluster.read("n1", f"/var/log/beeond-ctl/jobs/{job}.jsonl")
        assert '"message": "another beeond-ctl works on it (' in log
        assert '"event": "proved"' not in log
        swept = cluster.run("n1", ["beeond-ctl", "sweep"], check=False)
        assert f"job {job}" in swept.stdout
        assert "live" in swept.stdout
        assert swept.returncode == 0
        cluster.run("n1", ["rm", PAUSED])
        cluster.wait_idle()
    assert cluster.job(job)["JobState"] == "COMPLETED"
    assert '"event": "proved"' in cluster.read("n1", f"/var/log/beeond-ctl/jobs/{job}.jsonl")
    assert_all_is_there(cluster)
    cluster.wait_clean(before, timeout_s=10)


KEPT = (
    "beeond: job 4242: data kept, stage-out is not proved (x); "
    "when the cause is gone run: beeond-ctl recover 4242 --nodes n1"
)
BUSY = "beeond: job 4242: job 4242: another beeond-ctl works on it on this node; try again when it has ended"
BROKEN = "beeond: job 4242: /nvme/beeond takes no data"


@pytest.mark.parametrize(
    ("reasons", "left"), [([KEPT, BUSY], ""), ([BROKEN, KEPT], BROKEN), ([BROKEN], BROKEN)]
)
def test_a_reason_that_asks_for_recover_is_taken_back_where_nothing_is_left(
    cluster: Cluster, reasons: list[str], left: str
) -> None:
    drain = ["scontrol", "update", "NodeName=n1", "State=DRAIN", f"Reason={' | '.join(reasons)}"]
    cluster.run("ctl", drain)
    done = cluster.run("ctl", ["beeond-ctl", "recover", "4242", "--nodes", "n1"])
    assert "nothing left of job 4242" in done.stdout
    assert cluster.node_state("n1").reason == left
    assert ("DRAIN" in cluster.node_state("n1").flags) == bool(left)
    if left:
        cluster.resume("n1")
