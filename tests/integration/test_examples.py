"""Every script in examples/ runs as it is, and does what it says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.on_cluster import own_words
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


def over(cluster: Cluster, job: int) -> tuple[bool, str]:
    """Whether no part of the job is in the queue any more, and what is."""
    queued = cluster.run(
        "ctl", ["squeue", "-h", "-j", str(job), "-O", "JobArrayID,State,Reason"], check=False
    ).stdout
    return not queued.strip(), queued


def run(cluster: Cluster, name: str) -> tuple[int, str]:
    """Job id and output of an example that completed."""
    job = cluster.submit("alice", (EXAMPLES / name).read_text())
    assert cluster.wait_job(job)["JobState"] == "COMPLETED", cluster.job_output(job)
    return job, own_words(cluster.job_output(job))


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


def test_many_small_files_come_in_from_everywhere_and_go_out_as_one(cluster: Cluster) -> None:
    as_alice(cluster, "rm -rf samples; for d in $(seq 10); do mkdir -p samples/$d; cd samples/$d;"
             " for f in $(seq 30); do echo $d $f > $f; done; cd ../..; done")  # fmt: skip
    size = sum(len(f"{d} {f}\n") for d in range(1, 11) for f in range(1, 31))
    job, output = run(cluster, "many-small.sh")
    assert output.splitlines() == [f"every node read {size} bytes, three times", "300 files"]
    table = as_alice(cluster, f"cat samples-{job}.tsv; rm samples-{job}.tsv").splitlines()
    assert sorted(table) == sorted(
        f"{len(f'{d} {f}') + 1}\t{d}/{f}" for d in range(1, 11) for f in range(1, 31)
    )


@pytest.mark.skipif(shutil.which("mpicc") is None, reason="needs mpicc; run `make deps`")
def test_mpi_processes_share_one_file_and_have_one_each(cluster: Cluster) -> None:
    if "pmix" not in cluster.run("login", ["sh", "-c", "srun --mpi=list 2>&1"]).stdout:
        pytest.skip("needs a Slurm with PMIx")
    cluster.run(
        "login", ["sh", "-c", "cat > mpi-files.c"], user="alice", input=(EXAMPLES / "mpi-files.c").read_text()
    )
    try:
        job, output = run(cluster, "mpi.sh")
    except AssertionError as error:  # Open MPI 4.1 itself may crash as it starts, once in a long while
        if "Signal: Segmentation fault" not in str(error) or "processes, " in str(error):
            raise
        cluster.wait_idle()
        job, output = run(cluster, "mpi.sh")
    assert re.search(r"^6 processes, 24 MiB: .* all read back and equal$", output, re.MULTILINE)
    own = [f"rank-{rank}" for rank in range(6)]
    assert as_alice(cluster, f"ls mpi-{job}").split() == [*own, "shared"]
    # what the processes wrote to the one file is what they wrote to six
    assert (
        as_alice(cluster, f"cd mpi-{job}; cat {' '.join(own)} | cmp - shared && stat -c %s shared")
        == f"{24 << 20}\n"
    )
    as_alice(cluster, f"rm -r mpi-{job}")


def test_components_of_a_heterogeneous_job_share_the_file_system_of_one(cluster: Cluster) -> None:
    job = cluster.submit("alice", (EXAMPLES / "heterogeneous.sh").read_text())
    wait_until("both components to end", lambda: over(cluster, job), 90)
    output = own_words(cluster.output(f"/global/alice/heterogeneous-{job}.out"))
    assert output == f"n3 has /mnt/beeond/{job} of n[1-2]\n"
    sums = as_alice(cluster, f"cat het-{job}/sum-* het-{job}/total; rm -r het-{job}").split()
    assert list(map(int, sums)) == [sum(range(2, 1001, 2)), sum(range(1, 1001, 2)), sum(range(1001))]


def test_a_job_goes_on_from_the_last_checkpoint_of_the_one_before(cluster: Cluster) -> None:
    as_alice(cluster, "rm -rf simulation; mkdir simulation")
    for start, there in ((0, "step-1 step-2"), (2, "step-1 step-2 step-3 step-4")):
        _, output = run(cluster, "checkpoint.sh")
        said = [line for line in output.splitlines() if line.startswith(("starting", "safe"))]
        assert said == [f"starting after step {start}", f"safe: {there}"]
    assert as_alice(cluster, "cat simulation/step-1 simulation/step-4").split() == ["1", "2", "4", "8"]


def test_interactive_work_is_copied_out_when_salloc_ends(cluster: Cluster) -> None:
    done = cluster.run(
        "login", ["sh", "-c", (EXAMPLES / "interactive.sh").read_text()], user="alice", input=""
    )
    cluster.wait_idle()
    notes = as_alice(cluster, "cat interactive-*/*; rm -r interactive-*")
    assert done.stdout == notes == "n1 sees notes\nn2 sees notes\n"


def test_the_second_job_of_a_chain_takes_up_what_the_first_left(cluster: Cluster) -> None:
    first, second = map(
        int,
        cluster.run("login", ["sh"], user="alice", input=(EXAMPLES / "chain.sh").read_text()).stdout.split(),
    )
    assert cluster.wait_job(second)["JobState"] == "COMPLETED", cluster.job_output(second)
    assert (
        as_alice(cluster, f"cat chain-{first}/sum; rm -r chain-{first}")
        == f"{sum(n * n for n in range(101))}\n"
    )


def test_array_keeps_its_jobs_apart(cluster: Cluster) -> None:
    as_alice(
        cluster,
        "rm -rf sweep sweep-results; for i in 1 2 3; do mkdir -p sweep/$i; seq $i > sweep/$i/data; done",
    )
    array = cluster.submit("alice", (EXAMPLES / "array.sh").read_text())
    wait_until("the array to end", lambda: over(cluster, array), 90)
    outputs = [own_words(cluster.output(f"/global/alice/array-{array}_{task}.out")) for task in (1, 2, 3)]
    assert as_alice(cluster, "ls sweep-results").split() == [f"{array}_{task}" for task in (1, 2, 3)]
    assert outputs == [f"task {task}: {2 * task} lines counted on n[1-2]\n" for task in (1, 2, 3)]
    totals = as_alice(cluster, "cat sweep-results/*/total").split()
    assert totals == ["2", "4", "6"]  # each of two nodes counted all lines of its task
