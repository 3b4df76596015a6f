"""Components of a heterogeneous job that share one file system: n1 has it, n2 and n3 are guests."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import HOLD, NODES, PAUSED, deadly, kept, paused, recover, tidy
from tests.integration.on_cluster import exists, own_words
from tests.integration.site_config import CONFIG
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.gluster]

OUT = "/global/alice/shared"
GUESTS = ("n2", "n3")
WRITE = "srun --het-group=1 sh -c 'echo kept > \"$BEEOND/$SLURMD_NODENAME\"'\n"


@pytest.fixture(autouse=True)
def ready(cluster: Cluster) -> Iterator[None]:
    """Nodes without storage among the guests, and no trace of a job afterwards."""
    text = CONFIG.format(kind="directory", more='without = ["n2"]').replace("meet = 12", "meet = 8")
    cluster.write_config(text)
    cluster.run("login", ["rm", "-rf", OUT, "/global/alice/begun"])
    cluster.wait_idle()
    before = cluster.snapshots()
    yield
    left = {
        node: cluster.run(node, ["ls", "-A", "/nvme/beeond"], check=False).stdout.split() for node in NODES
    }
    tidy(cluster, left)
    assert not any(left.values()), left
    cluster.wait_clean(before, timeout_s=10)


def submit(
    cluster: Cluster, script: str, host: str = "--beeond=share=1", guest: str = "--beeond=join=0"
) -> int:
    """A job of n1 and a component of two nodes."""
    stage_out = f"--beeond-stage-out=.:{OUT}" if host else ""
    head = f"#!/bin/sh\n#SBATCH -w n1 -N1 -o shared-%j.out {host} {stage_out}\n#SBATCH hetjob\n"
    return cluster.submit("alice", f"{head}#SBATCH -N2 --ntasks-per-node=1 {guest}\n{script}")


def begun(cluster: Cluster, script: str, *options: str) -> int:
    """A job that has run `script`, and waits."""
    job = submit(cluster, script + HOLD, *options)
    wait_for(partial(exists, cluster, "/global/alice/begun"), 40)
    return job


def finish(cluster: Cluster) -> None:
    cluster.run("login", ["rm", "/global/alice/begun"])


def over(cluster: Cluster, job: int) -> bool:
    return not cluster.run("ctl", ["squeue", "-h", "-j", str(job)]).stdout


def output(cluster: Cluster, job: int) -> str:
    wait_for(partial(over, cluster, job), 60)
    return own_words(cluster.output(f"/global/alice/shared-{job}.out"))


def reasons(cluster: Cluster) -> str:
    """Why nodes are out of service."""
    return cluster.run("ctl", ["sinfo", "-h", "-N", "-o", "%E"]).stdout.replace("none\n", "")


def has_left(cluster: Cluster, node: str) -> bool:
    return not cluster.processes(node, "glusterfs")


def test_a_component_sees_and_changes_the_files_of_another(cluster: Cluster) -> None:
    cluster.run("login", ["sh", "-c", "rm -rf source; mkdir source; echo in > source/f"], user="alice")
    job = submit(
        cluster,
        'echo "$BEEOND $BEEOND_JOB_ID $BEEOND_NODES $(cat "$BEEOND/in/f")" > "$BEEOND/told"\n'
        "srun --het-group=1 sh -c '"
        'echo "$BEEOND $BEEOND_JOB_ID $BEEOND_NODES $(cat "$BEEOND/in/f")" | cmp - "$BEEOND/told" || exit 1;'
        'head -c 5000000 /dev/urandom > "$BEEOND/$SLURMD_NODENAME"\'\n'
        'cd "$BEEOND"; md5sum n2 n3; srun --het-group=1 -N1 -n1 beeond-ctl status\n',
        host="--beeond=share=1 --beeond-stage-in=/global/alice/source:in",
    )
    sums, _, status = output(cluster, job).partition(f"job {job + 1}  ready")
    assert f"/mnt/beeond/{job}\n" in status
    there = cluster.run("login", ["md5sum", *GUESTS], cwd=OUT).stdout
    assert there == sums
    assert cluster.read("login", f"{OUT}/told") == f"/mnt/beeond/{job} {job} n1 in\n"
    assert reasons(cluster) == ""


def test_who_joins_a_component_that_has_no_file_system_is_told_so(cluster: Cluster) -> None:
    job = submit(cluster, "srun --het-group=0,1 true", host="")
    assert "component 0 does not share with this one" in output(cluster, job)
    assert reasons(cluster) == ""


def test_who_comes_uninvited_is_named_and_no_node_is_at_fault(cluster: Cluster) -> None:
    third = "#SBATCH hetjob\n#SBATCH -N1 --beeond=join=0\n"
    said = output(cluster, submit(cluster, f"{third}true", guest="-N1"))
    assert "not all components of share=1 have joined" in said
    assert re.search(r"'n[23]' at \S+ came, but is not a node of this job", said)
    assert reasons(cluster) == ""


def test_a_leader_that_waits_for_guests_who_have_not_joined_is_not_at_fault(cluster: Cluster) -> None:
    said = output(cluster, submit(cluster, "srun --het-group=0,1 true", guest=""))
    assert "not all components of share=1 have joined" in said
    assert reasons(cluster) == ""


def test_a_guest_that_is_cancelled_leaves_at_once_and_stage_out_waits_for_the_last(cluster: Cluster) -> None:
    third = "#SBATCH hetjob\n#SBATCH -N1 --beeond=join=0\n"
    write = WRITE.replace("group=1", "group=1,2")
    job = begun(
        cluster,
        f"{third}{write}srun --het-group=2 sleep 100 &\n",
        "--beeond=share=1+2",
        "-N1 --beeond=join=0",
    )
    cluster.run("login", ["scancel", f"{job}+1"], user="alice")
    wait_for(lambda: any(has_left(cluster, node) for node in GUESTS), 20)
    assert not exists(cluster, OUT)
    cluster.run("login", ["scancel", str(job)], user="alice")
    wait_for(partial(over, cluster, job), 40)
    assert cluster.run("login", ["ls", OUT]).stdout.split() == [*GUESTS]
    assert reasons(cluster) == ""


def test_the_data_stays_while_a_guest_may_still_write(cluster: Cluster) -> None:
    job = begun(cluster, WRITE)
    with paused(cluster, "n3", "epilog", "unmounting"):
        finish(cluster)
        wait_for(partial(exists, cluster, PAUSED, "n3"), 40)
        kept(cluster, job, ("n1",))
        assert f"component 1 (job {job + 1}) is COMPLETING" in reasons(cluster)
        assert not exists(cluster, OUT)
        cluster.run("n3", ["rm", PAUSED])
        wait_for(partial(over, cluster, job), 40)
    recover(cluster, job)
    assert cluster.run("login", ["ls", OUT]).stdout.split() == [*GUESTS]


def test_a_guest_killed_in_its_prolog_fails_the_job_for_all(cluster: Cluster) -> None:
    with deadly(cluster, "n2", "prolog", "mounting", "within"):
        job = submit(cluster, "touch /global/alice/begun\n")
        wait_for(lambda: "DRAIN" in cluster.node_state("n2").flags, 40)
        cluster.run("login", ["scancel", str(job)], user="alice")
        wait_for(partial(over, cluster, job), 40)
    assert not exists(cluster, "/global/alice/begun")
    assert "n2" not in cluster.node_state("n1").reason
    cluster.wait_node("n2", {"IDLE", "DRAIN"})


def test_a_guest_killed_in_its_epilog_is_swept_and_the_data_stays_until_recover(cluster: Cluster) -> None:
    with deadly(cluster, "n2", "epilog", "unmounting", "before"):
        job = begun(cluster, WRITE)
        finish(cluster)
        kept(cluster, job, ("n1",))
        wait_for(partial(over, cluster, job), 40)
    assert "n2 is drained by its Epilog" in reasons(cluster)
    assert f"removed   job {job + 1}  " in cluster.run("n2", ["beeond-ctl", "sweep"]).stdout
    recover(cluster, job)
    assert cluster.run("login", ["ls", OUT]).stdout.split() == [*GUESTS]
