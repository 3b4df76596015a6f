"""Every script in examples/ runs as it is, and does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testbed.host import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def ready(cluster: Cluster) -> Iterator[None]:
    """Idle nodes before an example, and no trace of its file system after it."""
    cluster.wait_idle()
    before = cluster.snapshots()
    yield
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def as_alice(cluster: Cluster, script: str) -> str:
    return cluster.run("login", ["sh", "-euc", script], user="alice").stdout


def run(cluster: Cluster, name: str) -> tuple[int, str]:
    """Job id and output of an example that completed."""
    job = cluster.submit("alice", (EXAMPLES / name).read_text())
    assert cluster.wait_job(job)["JobState"] == "COMPLETED", cluster.job_output(job)
    return job, cluster.job_output(job)


def test_every_example_is_listed_and_tested() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.sh")}
    listing, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert {name for name in scripts if f"]({name})" in listing and f'"{name}"' in tests} == scripts


def test_hello_every_node_reads_what_the_others_wrote(cluster: Cluster) -> None:
    job, output = run(cluster, "hello.sh")
    lines = output.splitlines()
    assert lines[0] == f"job {job} on n[1-3] has /mnt/beeond/{job}"
    for task in range(3):
        told = [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{task}: hello")]
        assert told == [f"hello from n{number}" for number in (1, 2, 3)]
    mounts = [line.split() for line in lines if "fuse.glusterfs" in line]
    assert [words[-1] for words in mounts] == [f"/mnt/beeond/{job}"] * 3


def test_stage_brings_the_input_in_and_the_result_back(cluster: Cluster) -> None:
    as_alice(
        cluster,
        "rm -rf case7 results; mkdir -p case7/deep case7/empty; cd case7;"
        r" for i in $(seq 40); do echo $i > deep/$i; done; echo odd > "
        r'"$(printf "new\nline \377")"; head -c 3M /dev/urandom > big',
    )
    job, output = run(cluster, "stage.sh")
    assert output.splitlines() == ["input: 42 files", "result: 42 checksums"]
    assert as_alice(cluster, f"ls results/{job}") == "checksums\n"
    checked = as_alice(cluster, f"cd case7; sha256sum --quiet -c ../results/{job}/checksums; echo all right")
    assert checked == "all right\n"


def test_one_node_leaves_one_file_and_nothing_else(cluster: Cluster) -> None:
    job, output = run(cluster, "one-node.sh")
    assert output.splitlines() == [
        f"/mnt/beeond/{job} is xfs, for alice, mode 700",
        "packed 1000 notes",
    ]
    assert as_alice(cluster, f"tar -xOf notes-{job}.tar notes/1 notes/1000") == "note 1\nnote 1000\n"
    assert as_alice(cluster, "ls -d notes*") == f"notes-{job}.tar\n"
    as_alice(cluster, f"rm notes-{job}.tar")


def test_array_keeps_its_jobs_apart(cluster: Cluster) -> None:
    as_alice(
        cluster,
        "rm -rf sweep sweep-results; for i in 1 2 3; do mkdir -p sweep/$i; seq $i > sweep/$i/data; done",
    )
    array = cluster.submit("alice", (EXAMPLES / "array.sh").read_text())
    wait_until("the array to end", lambda: (not cluster.run("ctl", ["squeue", "-h"]).stdout, ""), 60)
    outputs = [cluster.read("login", f"/global/alice/array-{array}_{task}.out") for task in (1, 2, 3)]
    assert as_alice(cluster, "ls sweep-results").split() == [f"{array}_{task}" for task in (1, 2, 3)]
    assert outputs == [f"task {task}: {2 * task} lines counted on n[1-2]\n" for task in (1, 2, 3)]
    totals = as_alice(cluster, "cat sweep-results/*/total").split()
    assert totals == ["2", "4", "6"]  # each of two nodes counted all lines of its task
