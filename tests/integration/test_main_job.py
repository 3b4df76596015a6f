"""The product doing its job: real Slurm, real parallel file system, real nodes."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.site_config import CONFIG
from tests.testbed import CommandError
from tests.trees import AWKWARD, compare
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2", "n3")


@pytest.fixture(autouse=True)
def ready(cluster: Cluster) -> Iterator[None]:
    """The cluster as a site has it; afterwards no trace of a job, whatever the test did."""
    cluster.write_config(CONFIG.format(kind="directory", more=""))
    cluster.wait_idle()
    yield
    left = {node: cluster.run(node, ["ls", "-A", "/nvme/beeond"]).stdout.split() for node in NODES}
    tidy(cluster, left)
    assert not any(left.values()), left


def tidy(cluster: Cluster, left: dict[str, list[str]]) -> None:
    """Let one failure not be the next test's: nothing queued, nothing kept, nothing drained."""
    cluster.run("ctl", ["scancel", "--user=alice,bob"], check=False)
    for job in sorted({name.removeprefix("job-") for names in left.values() for name in names}):
        cluster.run(
            "ctl", ["beeond-ctl", "recover", job, "--nodes", "n[1-3]", "--discard", "--yes"], check=False
        )
    for node in NODES:
        wait_for(partial(lacks, cluster, node, "COMPLETING"), 40)
        if "DRAIN" in cluster.node_state(node).flags:
            cluster.resume(node)


def said(output: str) -> str:
    """What the job itself said: what we add to its output is left out."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("beeond: "))


def make_tree(cluster: Cluster, path: str, *, user: str = "alice", files: int = 50) -> None:
    cluster.run("login", ["rm", "-rf", path])
    cluster.run("login", ["sh", "-c", AWKWARD, "sh", path, str(files)], user=user)


def new_directory(cluster: Cluster, path: str) -> None:
    cluster.run("login", ["rm", "-rf", path])
    cluster.run("login", ["mkdir", path], user="alice")


def assert_same(cluster: Cluster, source: str, destination: str) -> None:
    assert cluster.run("login", compare(source, destination)).stdout == ""


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
    assert said(output).splitlines() == ["mount alice 700", jobid[0], *["n1 n2 n3 "] * 3]
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


@contextmanager
def scratch_devices(cluster: Cluster, nodes: tuple[str, ...]) -> Iterator[None]:
    """An empty block device /dev/scratch on each node."""
    try:
        for node in nodes:
            cluster.run(node, ["truncate", "-s", "600M", "/nvme/disk"])
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


def test_a_whole_device_keeps_what_is_owed_over_a_reboot_and_is_empty_afterwards(cluster: Cluster) -> None:
    new_directory(cluster, "/global/alice/target")
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    with scratch_devices(cluster, ("n1", "n2")):
        cluster.write_config(CONFIG.format(kind="device", more='devices = ["/dev/scratch"]'))
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
    assert said(output).split() == ["xfs", "alice", "700"]
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
        touch /global/project/here-{user}
        for i in $(seq 300); do [ -e /global/project/here-{other} ] && break; sleep 0.1; done
        ls /mnt/beeond/*/ 2>&1 | grep -c 'Permission denied'
        [ $(ls -d /mnt/beeond/*/ | wc -l) = 2 ] && echo both
        """
    cluster.run("login", ["rm", "-f", "/global/project/here-alice", "/global/project/here-bob"])
    jobs = {
        user: cluster.submit(user, script.format(user=user, other=other))
        for user, other in (("alice", "bob"), ("bob", "alice"))
    }
    for user, job in jobs.items():
        assert cluster.wait_job(job)["JobState"] == "COMPLETED", cluster.job_output(job)
        assert said(cluster.job_output(job)).split() == ["1", "both"], user
    cluster.wait_idle()
    for user in jobs:
        for node in NODES:
            assert cluster.read("login", f"/global/{user}/pair/{node}") == f"{user}\n"
    cluster.run("login", ["rm", "-f", "/global/project/here-alice", "/global/project/here-bob"])
    cluster.wait_clean(before, timeout_s=10)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--beeond=strip-count=4", ["strip-count", "stripe-count"]),
        ("--beeond-stage-in=/global/alice/x:../up", ["climbs out", ".."]),
        ("--beeond-stage-in=relative:in", ["absolute"]),
        ("--beeond=backend=lustre", ["lustre", "glusterfs"]),
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


def exists(cluster: Cluster, path: str, machine: str = "login") -> bool:
    return cluster.run(machine, ["test", "-e", path], check=False).returncode == 0


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


@pytest.mark.parametrize("case", ["forbidden", "read-only", "below a file"])
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
    }[case]
    before = cluster.snapshots()
    if case == "read-only":
        cluster.readonly("/global/alice/target")
    try:
        job = cluster.submit(
            "alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N2", f"--beeond-stage-out=out:{place}"
        )
        assert cluster.wait_job(job)["JobState"] == "FAILED"
    finally:
        if case == "read-only":
            cluster.writable("/global/alice/target")
    assert place in cluster.job_output(job)
    assert not exists(cluster, "/global/alice/ran")
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


HOLD = "touch /global/alice/begun; while [ -e /global/alice/begun ]; do sleep 0.1; done\n"
"""The end of a script that runs until the test lets it go."""


def running(cluster: Cluster, *jobs: int) -> None:
    """Wait until the job that holds has come so far."""
    for job in jobs:
        cluster.wait_job(job, "RUNNING")
    wait_for(lambda: exists(cluster, "/global/alice/begun"), 30)


def test_stage_out_that_cannot_be_proved_keeps_the_data_until_recover(cluster: Cluster) -> None:
    make_tree(cluster, "/global/alice/tree", files=30)
    new_directory(cluster, "/global/alice/target")
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    job = cluster.submit(
        "alice", f'#!/bin/sh\nrsync -aHX /global/alice/tree/ "$BEEOND/out/"\n{HOLD}', "-N3",
        "--beeond-stage-out=out:/global/alice/target/%x", "--job-name=kept",
    )  # fmt: skip
    running(cluster, job)
    cluster.readonly("/global/alice/target")
    try:
        cluster.run("login", ["rm", "/global/alice/begun"])
        assert cluster.wait_job(job)["JobState"] == "COMPLETED"
        kept(cluster, job, NODES)
        reason = cluster.node_state("n1").reason
        assert "read-only" in reason.lower()
        told = cluster.job_output(job).splitlines()[-1]
        assert told.startswith("beeond: stage-out is NOT complete")
        assert f"beeond-ctl recover {job} --nodes n[1-3]" in told
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


def test_kept_data_survives_a_reboot_and_can_be_discarded(cluster: Cluster) -> None:
    new_directory(cluster, "/global/alice/target")
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    jobs = [
        cluster.submit(
            "alice", f'#!/bin/sh\nmkdir "$BEEOND/out"; echo {i} > "$BEEOND/out/f"\n{HOLD}',
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
    assert cluster.read("login", "/global/alice/target/0/f") == "0\n"
    assert cluster.run("login", ["ls", "/global/alice/target"]).stdout.split() == ["0"]
    cluster.wait_idle()


def test_a_cancelled_job_is_staged_out(cluster: Cluster) -> None:
    before = cluster.snapshots()
    cluster.run("login", ["rm", "-rf", "/global/alice/cancelled", "/global/alice/begun"])
    job = cluster.submit(
        "alice",
        '#!/bin/sh\nmkdir "$BEEOND/out"; echo 1 > "$BEEOND/out/f"; touch /global/alice/begun; sleep 600\n',
        "-N2", "--beeond-stage-out=out:/global/alice/cancelled",
    )  # fmt: skip
    wait_for(lambda: exists(cluster, "/global/alice/begun"), 30)
    cluster.run("login", ["scancel", str(job)], user="alice")
    assert cluster.wait_job(job)["JobState"] == "CANCELLED"
    cluster.wait_idle()
    assert cluster.read("login", "/global/alice/cancelled/f") == "1\n"
    cluster.wait_clean(before, timeout_s=10)


def test_a_job_at_its_time_limit_is_staged_out(cluster: Cluster) -> None:
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


def test_cancelling_during_stage_in_ends_it_and_leaves_clean_nodes(cluster: Cluster) -> None:
    cluster.run(
        "login",
        ["sh", "-c", LARGE, "/global/alice/large"],
        user="alice",
    )  # fmt: skip
    before = cluster.snapshots()
    job = cluster.submit("alice", "#!/bin/sh\ntrue\n", "-N3", "--beeond-stage-in=/global/alice/large:in")
    log = f"/var/log/beeond-ctl/jobs/{job}.jsonl"
    wait_for(lambda: '"staging-in"' in read_or_empty(cluster, "n1", log), 30)
    cluster.run("login", ["scancel", str(job)], user="alice")
    cluster.wait_job(job, timeout_s=60)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)
    events = [json.loads(line) for line in cluster.read("n1", log).splitlines()]
    assert not any(event.get("phase") == "ready" for event in events)
    cluster.run("login", ["rm", "-rf", "/global/alice/large"])


def test_a_brick_killed_during_the_job_loses_nothing(cluster: Cluster) -> None:
    cluster.run("login", ["rm", "-rf", "/global/alice/brick", "/global/alice/begun"])
    job = cluster.submit(
        "alice",
        """\
        #!/bin/sh
        mkdir "$BEEOND/out"; for i in $(seq 40); do echo $i > "$BEEOND/out/$i"; done
        touch /global/alice/begun
        while [ -e /global/alice/begun ]; do sleep 0.1; done
        """,
        "-N3", "--beeond-stage-out=out:/global/alice/brick",
    )  # fmt: skip
    wait_for(lambda: exists(cluster, "/global/alice/begun"), 30)
    cluster.kill("n2", "glusterfsd")
    cluster.run("login", ["rm", "/global/alice/begun"])
    cluster.wait_job(job, timeout_s=60)
    cluster.wait_idle()
    listing = cluster.run(
        "login", ["sh", "-c", "cat /global/alice/brick/* | sort -n | tail -1; ls /global/alice/brick | wc -l"]
    )
    assert listing.stdout.split() == ["40", "40"]


def test_a_node_cut_off_before_the_epilog_keeps_all_data(cluster: Cluster) -> None:
    cluster.run("login", ["rm", "-rf", "/global/alice/cut", "/global/alice/begun"])
    job = cluster.submit(
        "alice",
        """\
        #!/bin/sh
        mkdir "$BEEOND/out"; for i in $(seq 40); do echo $i > "$BEEOND/out/$i"; done
        touch /global/alice/begun
        while [ -e /global/alice/begun ]; do sleep 0.1; done
        """,
        "-N3", "--beeond-stage-out=out:/global/alice/cut",
    )  # fmt: skip
    wait_for(lambda: exists(cluster, "/global/alice/begun"), 30)
    cluster.cut("n3")
    try:
        cluster.run("login", ["rm", "/global/alice/begun"])
        kept(cluster, job, ("n1", "n2"))
    finally:
        cluster.restore("n3")
    kept(cluster, job, ("n3",), timeout_s=150)
    recover(cluster, job, "--nodes", "n[1-3]")
    for node in NODES:
        wait_for(partial(lacks, cluster, node, "DRAIN"), 20)
    listing = cluster.run(
        "login", ["sh", "-c", "cat /global/alice/cut/* | sort -n | tail -1; ls /global/alice/cut | wc -l"]
    )
    assert listing.stdout.split() == ["40", "40"]


def test_a_node_whose_device_is_unusable_is_drained_with_the_reason_and_no_other(cluster: Cluster) -> None:
    before = cluster.snapshots()
    cluster.run("n2", ["chmod", "777", "/nvme/beeond"])
    try:
        job = cluster.submit("alice", "#!/bin/sh\ntrue\n", "-N3", "--beeond")
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


DEADLY = """#!{python} -I
import os, signal, sys
from beeond_ctl import cli, mounts
from beeond_ctl.lifecycle.here import Here

def make_point(path, make=mounts.make_point):
    make(path)
    os.kill(os.getpid(), signal.SIGKILL)

def enter(self, phase, announce=Here.enter):
    if phase == "{phase}" and "{when}" == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    announce(self, phase)
    if phase == "{phase}" and "{when}" == "after":
        os.kill(os.getpid(), signal.SIGKILL)

if os.path.isdir("/run/beeond-ctl/jobs/" + os.environ["SLURM_JOB_ID"]) or "{hook}" == "prolog":
    Here.enter = enter
    if "{when}" == "within":
        mounts.make_point = make_point
    sys.argv = ["beeond-ctl", "{hook}"]
    cli.main()
"""
"""A Prolog or Epilog that is killed just before or after it has written down that a phase begins, or, "within",
when it has made the mount point and the state does not say so yet."""


@contextmanager
def deadly(cluster: Cluster, node: str, hook: str, phase: str, when: str) -> Iterator[None]:
    script = f"/etc/slurm/{hook}.d/50-beeond"
    original = cluster.read(node, script)
    text = DEADLY.format(python=sys.executable, hook=hook, phase=phase, when=when)
    cluster.run(node, ["tee", script], input=text)
    try:
        yield
    finally:
        cluster.run(node, ["tee", script], input=original)


@pytest.mark.parametrize(
    ("node", "phase", "when"),
    [
        ("n2", "preparing", "after"),
        ("n2", "starting", "before"),
        ("n2", "mounting", "before"),
        ("n2", "ready", "before"),
        ("n2", "ready", "after"),
        ("n1", "mounting", "after"),
        ("n2", "mounting", "within"),
    ],
)
def test_a_prolog_killed_in_any_phase_is_cleaned_up_after(
    cluster: Cluster, node: str, phase: str, when: str
) -> None:
    before = cluster.snapshots()
    with deadly(cluster, node, "prolog", phase, when):
        job = cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", "--beeond")
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


@pytest.mark.parametrize(
    ("node", "phase", "when"),
    [
        ("n2", "staging-out", "after"),
        ("n1", "staging-out", "after"),
        ("n2", "unmounting", "after"),
        ("n2", "wiping", "after"),
        ("n1", "unmounting", "before"),
    ],
)
def test_an_epilog_killed_in_any_phase_loses_nothing(
    cluster: Cluster, node: str, phase: str, when: str
) -> None:
    before = cluster.snapshots()
    cluster.run("login", ["rm", "-rf", "/global/alice/killed"])
    with deadly(cluster, node, "epilog", phase, when):
        job = cluster.submit(
            "alice",
            '#!/bin/sh\nmkdir "$BEEOND/out"; for i in $(seq 40); do echo $i > "$BEEOND/out/$i"; done\n',
            "-N3", "--beeond-stage-out=out:/global/alice/killed",
        )  # fmt: skip
        cluster.wait_job(job)
        for name in NODES:
            wait_for(partial(lacks, cluster, name, "COMPLETING"), 60)
    assert "DRAIN" in cluster.node_state(node).flags
    recover(cluster, job, "--nodes", "n[1-3]")
    listing = cluster.run(
        "login", ["sh", "-c", "cd /global/alice/killed && cat * | sort -n | tail -1; ls -A | wc -l"]
    )
    assert listing.stdout.split() == ["40", "40"]
    for name in NODES:
        if "DRAIN" in cluster.node_state(name).flags:
            cluster.resume(name)
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


def read_or_empty(cluster: Cluster, node: str, path: str) -> str:
    return cluster.run(node, ["cat", path], check=False).stdout
