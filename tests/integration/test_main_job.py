"""The product doing its job: real Slurm, real parallel file system, real nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import NODES, assert_same, kept, make_tree, new_directory, recover, tidy
from tests.integration.on_cluster import exists, own_words
from tests.integration.site_config import CONFIG
from tests.testbed import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def ready(cluster: Cluster) -> Iterator[None]:
    """The cluster as a site has it; afterwards no trace of a job, whatever the test did."""
    cluster.write_config(CONFIG.format(kind="directory", more=""))
    cluster.wait_idle()
    yield
    left = {node: cluster.run(node, ["ls", "-A", "/nvme/beeond"]).stdout.split() for node in NODES}
    tidy(cluster, left)
    assert not any(left.values()), left


def test_a_tree_goes_in_is_seen_everywhere_and_comes_out_the_same(cluster: Cluster) -> None:
    make_tree(cluster, "/global/alice/tree", files=2000)
    cluster.run("login", ["rm", "-rf", "/global/alice/back", "/global/alice/made"])
    before = cluster.snapshots()
    output = cluster.run_job(
        "alice",
        """\
        #!/bin/sh
        #SBATCH -N3 --ntasks-per-node=1
        #SBATCH --beeond
        #SBATCH --beeond-stage-in=/global/alice/tree:in
        #SBATCH --beeond-stage-out=in:/global/alice/back
        #SBATCH --beeond-stage-out=made:/global/alice/made/%j
        set -e
        stat -c 'mount %U %a' "$BEEOND"
        echo "job $BEEOND_JOB_ID nodes $BEEOND_NODES"
        rsync -aHAXn --checksum --itemize-changes --delete /global/alice/tree/ "$BEEOND/in/"
        mkdir "$BEEOND/made"
        srun sh -c 'hostname > "$BEEOND/made/$SLURMD_NODENAME"'
        srun sh -c 'cat "$BEEOND"/made/* | tr "\\n" " "; echo'
        """,
    )
    jobid = re.search(r"job (\d+) nodes (\S+)", output)
    assert jobid is not None
    assert jobid[2] == "n[1-3]"
    assert own_words(output).splitlines() == ["mount alice 700", jobid[0], *["n1 n2 n3 "] * 3]
    cluster.wait_idle()
    assert_same(cluster, "/global/alice/tree", "/global/alice/back")
    listing = cluster.run("login", ["ls", f"/global/alice/made/{jobid[1]}"]).stdout.split()
    assert listing == ["n1", "n2", "n3"]
    cluster.wait_clean(before, timeout_s=10)


def test_an_image_limits_what_a_job_can_take_and_leaves_nothing(cluster: Cluster) -> None:
    cluster.write_config(CONFIG.format(kind="image", more=""))
    before = cluster.snapshots()
    output = cluster.run_job(
        "alice",
        """\
        #!/bin/sh
        #SBATCH -N2
        #SBATCH --beeond=capacity=1GiB
        df --output=size -B1M "$BEEOND" | tail -1
        dd if=/dev/zero of="$BEEOND/big" bs=1M count=700 2>/dev/null && echo fits || echo full
        """,
    )
    size, verdict = output.split()
    assert int(size) <= 1024
    assert verdict == "full"
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_a_job_of_one_node_gets_a_local_directory(cluster: Cluster) -> None:
    before = cluster.snapshots()
    output = cluster.run_job(
        "alice",
        """\
        #!/bin/sh
        #SBATCH -N1 --beeond-stage-out=out:/global/alice/one-%x --job-name=solo
        findmnt -no FSTYPE "$BEEOND"
        stat -c '%U %a' "$BEEOND"
        mkdir "$BEEOND/out"; echo hi > "$BEEOND/out/file"
        """,
    )
    assert own_words(output).split() == ["xfs", "alice", "700"]
    cluster.wait_idle()
    assert cluster.read("login", "/global/alice/one-solo/file") == "hi\n"
    cluster.wait_clean(before, timeout_s=10)


def test_two_users_on_the_same_nodes_neither_collide_nor_see_each_other(cluster: Cluster) -> None:
    before = cluster.snapshots()
    script = """\
        #!/bin/sh
        #SBATCH -N3 -n3 --ntasks-per-node=1 --oversubscribe
        #SBATCH --beeond --beeond-stage-out=.:/global/{user}/pair
        srun sh -c 'echo {user} > "$BEEOND/$SLURMD_NODENAME"'
        together() {{ touch /global/project/$1-{user}; until [ -e /global/project/$1-{other} ]; do sleep 0.1; done; }}
        together here
        ls /mnt/beeond/*/ 2>&1 | grep -c 'Permission denied'
        [ $(ls -d /mnt/beeond/*/ | wc -l) = 2 ] && echo both
        together seen
        """
    forget = ["sh", "-c", "rm -f /global/project/here-* /global/project/seen-*"]
    cluster.run("login", forget)
    jobs = {
        user: cluster.submit(user, script.format(user=user, other=other))
        for user, other in (("alice", "bob"), ("bob", "alice"))
    }
    for user, job in jobs.items():
        assert cluster.wait_job(job)["JobState"] == "COMPLETED", cluster.job_output(job)
        assert own_words(cluster.job_output(job)).split() == ["1", "both"], user
    cluster.wait_idle()
    for user in jobs:
        for node in NODES:
            assert cluster.read("login", f"/global/{user}/pair/{node}") == f"{user}\n"
    cluster.run("login", forget)
    cluster.wait_clean(before, timeout_s=10)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--beeond=strip-count=4", ["strip-count", "stripe-count"]),
        ("--beeond-stage-in=/global/alice/x:../up", ["climbs out", ".."]),
        ("--beeond-stage-in=relative:in", ["absolute"]),
        ("--beeond=backend=lustre", ["lustre", "glusterfs"]),
        (f"--beeond-stage-out=out:/global/alice/{'d' * 256}", ["ddd", "more than 255 bytes"]),
    ],
)
def test_a_bad_option_is_refused_at_the_prompt(cluster: Cluster, option: str, words: list[str]) -> None:
    with pytest.raises(CommandError) as caught:
        cluster.submit("alice", "#!/bin/sh\ntrue\n", option)
    for word in words:
        assert word in caught.value.stderr


@pytest.mark.parametrize("case", ["missing", "unreadable", "symlink to unreadable"])
def test_a_source_that_the_user_cannot_read_fails_the_job_and_drains_nothing(
    cluster: Cluster, case: str
) -> None:
    source = {
        "missing": "/global/alice/nowhere",
        "unreadable": "/global/bob/private",
        "symlink to unreadable": "/global/alice/detour",
    }[case]
    cluster.run(
        "login", ["sh", "-c", "mkdir -p /global/bob/private; echo secret > /global/bob/private/f"], user="bob"
    )
    cluster.run("login", ["ln", "-sfn", "/global/bob/private", "/global/alice/detour"], user="alice")
    before = cluster.snapshots()
    job = cluster.submit(
        "alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N2", f"--beeond-stage-in={source}:in"
    )
    assert cluster.wait_job(job)["JobState"] == "FAILED"
    output = cluster.job_output(job)
    assert source in output
    assert "beeond" in output
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_idle()
    assert all("DRAIN" not in cluster.node_state(node).flags for node in NODES)
    cluster.wait_clean(before, timeout_s=10)


@pytest.mark.parametrize("case", ["forbidden", "read-only", "below a file", "too long with the job's name"])
def test_a_destination_that_the_user_cannot_write_is_told_before_the_job_runs(
    cluster: Cluster, case: str
) -> None:
    cluster.run("login", ["rm", "-rf", "/global/alice/target", "/global/alice/ran"])
    cluster.run("login", ["mkdir", "/global/alice/target"], user="alice")
    cluster.run("login", ["touch", "/global/alice/file"], user="alice")
    place = {
        "forbidden": "/global/bob/theirs",
        "read-only": "/global/alice/target/new/dir",
        "below a file": "/global/alice/file/dir",
        "too long with the job's name": f"/global/alice/target/{'d' * 250}-%x",
    }[case]
    before = cluster.snapshots()
    if case == "read-only":
        cluster.readonly("/global/alice/target")
    try:
        job = cluster.submit(
            "alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N2", "--job-name=longer",
            f"--beeond-stage-out=out:{place}",
        )  # fmt: skip
        assert cluster.wait_job(job)["JobState"] == "FAILED"
    finally:
        if case == "read-only":
            cluster.writable("/global/alice/target")
    assert place.replace("%x", "longer") in cluster.job_output(job)
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_a_destination_that_the_job_makes_lead_into_its_file_system_keeps_the_data_until_it_leads_out(
    cluster: Cluster,
) -> None:
    new_directory(cluster, "/global/alice/target")
    before = cluster.snapshots()
    job = cluster.submit(
        "alice",
        '#!/bin/sh\nmkdir "$BEEOND/out"; echo results >"$BEEOND/out/f"; ln -s "$BEEOND" /global/alice/target/scratch\n',
        "-N2", "-w", "n[1-2]", "--beeond-stage-out=out:/global/alice/target/scratch/saved",
    )  # fmt: skip
    assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    kept(cluster, job, ("n1", "n2"))
    assert "which goes when the job has ended" in cluster.node_state("n1").reason
    cluster.run("login", ["rm", "/global/alice/target/scratch"])
    recover(cluster, job)
    assert cluster.run("login", ["cat", "/global/alice/target/scratch/saved/f"]).stdout == "results\n"
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_a_job_without_an_instance_is_unaffected(cluster: Cluster) -> None:
    before = cluster.snapshots()
    output = cluster.run_job(
        "bob", '#!/bin/sh\necho "[${BEEOND-unset}]"\nls -A /run/beeond-ctl/jobs 2>&1 | wc -l\n'
    )
    assert output.split()[0] == "[unset]"
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)
