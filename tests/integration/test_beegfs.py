"""The whole job over stand-ins for BeeGFS's programs, which serve nothing but are as awkward as the real ones.

What they cannot show - times of real servers, the kernel client - needs BEEGFS_HOME and is skipped without it.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.standins.beegfs import programs
from tests.testbed import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2", "n3")
BIN = "/opt/beegfs/sbin"
CONFIG = f"""
[storage]
kind = "{{kind}}"
paths = ["/nvme/beeond"]
capacity = "1GiB"
[backend]
default = "beegfs"
allowed = ["beegfs", "local"]
path = ["{BIN}", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
[beegfs]
meta_size = "1GiB"
stripe_directories = [1, 8]
[deadlines]
meet = 12
start = 8
stop = 10
silence = 4
"""


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with Cluster.up("beegfs", nodes=3, with_product=True) as cluster:
        yield cluster


@pytest.fixture
def cluster(made: Cluster) -> Iterator[Cluster]:
    """A site with BeeGFS 7.4; afterwards every node as before, but for what metadata is copied from."""
    furnish(made, "7.4")
    made.wait_idle()
    yield made
    made.run("ctl", ["scancel", "--user=alice,bob"], check=False)
    for node in NODES:
        wait_for(partial(settled, made, node))
        if "DRAIN" in made.node_state(node).flags:
            made.resume(node)
    left = {node: made.run(node, ["ls", "-A", "/nvme/beeond"]).stdout.split() for node in NODES}
    assert not [name for names in left.values() for name in names if name.startswith("job-")], left


def furnish(cluster: Cluster, edition: str, kind: str = "directory", nodes: tuple[str, ...] = NODES) -> None:
    cluster.write_config(CONFIG.format(kind=kind))
    for node in nodes:
        cluster.run(node, ["rm", "-rf", BIN])
        programs.install(cluster.path(node, BIN), edition, cluster.path(node, "/usr/sbin"))


def replace(cluster: Cluster, node: str, program: str, script: str) -> None:
    """Have `program` be a shell script; $real is the stand-in."""
    path = cluster.path(node, f"{BIN}/{program}")
    real = path.with_name(f"{program}.real")
    path.rename(real)
    path.write_text(f"#!/bin/sh\nreal={BIN}/{program}.real\n{script}\n")
    path.chmod(0o755)


def wait_for(condition: Callable[[], bool], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def settled(cluster: Cluster, node: str) -> bool:
    return "COMPLETING" not in cluster.node_state(node).flags


def kept(cluster: Cluster, node: str, job: int) -> bool:
    return f"beeond-ctl recover {job} --nodes" in cluster.node_state(node).reason


def events(cluster: Cluster, node: str, job: int) -> list[dict[str, Any]]:
    text = cluster.read(node, f"/var/log/beeond-ctl/jobs/{job}.jsonl")
    return [json.loads(line) for line in text.splitlines()]


def seconds(found: list[dict[str, Any]], step: str) -> float:
    return float(next(event["seconds"] for event in found if event.get("step") == step))


def drained(cluster: Cluster, node: str) -> str:
    """The reason for which `node`, and no other, is drained."""
    wait_for(lambda: "DRAIN" in cluster.node_state(node).flags)
    for other in NODES:
        wait_for(partial(settled, cluster, other))
        assert ("DRAIN" in cluster.node_state(other).flags) == (other == node), cluster.node_state(other)
    return cluster.node_state(node).reason


def template(cluster: Cluster) -> None:
    """Have the metadata images' original on every node, as an idle node has: it is not what a job leaves."""
    for node in NODES:
        cluster.run(node, ["beeond-ctl", "prepare"])


@pytest.mark.parametrize(("edition", "kind"), [("7.4", "directory"), ("8", "image")])
def test_a_job_has_its_file_system_on_all_nodes_and_leaves_nothing(
    cluster: Cluster, edition: str, kind: str
) -> None:
    furnish(cluster, edition, kind)
    template(cluster)
    cluster.run(
        "login",
        ["sh", "-c", "rm -rf in out; mkdir in; echo hello > in/file"],
        user="alice",
        cwd="/global/alice",
    )
    before = cluster.snapshots()
    output = cluster.run_job(
        "alice",
        """\
        #!/bin/sh
        set -e
        stat -c '%U %a' "$BEEOND" "$BEEOND/stripe_8"
        cat "$BEEOND/in/file"
        mkdir "$BEEOND/made"
        srun sh -c 'hostname > "$BEEOND/made/$SLURMD_NODENAME"'
        echo "job $BEEOND_JOB_ID"
        """,
        "-N3", "--ntasks-per-node=1", "--beeond=meta=2,stripe-count=2",
        "--beeond-stage-in=/global/alice/in:in", "--beeond-stage-out=made:/global/alice/out",
    )  # fmt: skip
    lines = output.split("\n")
    assert lines[:3] == ["alice 700", "alice 700", "hello"]
    job = int(lines[3].split()[1])
    cluster.wait_idle()
    assert cluster.run("login", ["ls", "/global/alice/out"]).stdout.split() == list(NODES)
    cluster.wait_clean(before, timeout_s=10)
    for node in NODES:
        found = events(cluster, node, job)
        # One stand-in takes STOP_S to end: all at once take no longer.
        assert programs.STOP_S <= seconds(found, "stopping") < programs.STOP_S * 1.5
    waited = seconds(events(cluster, "n1", job), "registering")
    if edition == "8":
        assert programs.ONLINE_S * 0.9 < waited < programs.ONLINE_S * 1.1
    else:
        assert waited < 0.5


def test_the_directories_of_a_metadata_server_are_not_made_in_a_job(cluster: Cluster) -> None:
    template(cluster)
    before = cluster.snapshots()
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    job = cluster.submit("alice", "#!/bin/sh\ntouch begun; sleep 60\n", "-N2", "--beeond=meta=all")
    wait_for(lambda: cluster.path("login", "/global/alice/begun").exists())
    run = f"/run/beeond-ctl/jobs/{job}"
    for node in cluster.job(job)["NodeList"].removeprefix("n[").removesuffix("]").split("-"):
        assert "made the directories" not in cluster.read(f"n{node}", f"{run}/logs/beegfs-meta.log")
        count = cluster.run(f"n{node}", ["sh", "-c", f"find {run}/metadata -type d | wc -l"]).stdout
        assert int(count) > 66000
    cluster.run("login", ["scancel", str(job)], user="alice")
    cluster.wait_job(job)
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)


def test_a_server_that_was_killed_is_started_again_for_the_stage_out(cluster: Cluster) -> None:
    script = (
        '#!/bin/sh\nmkdir "$BEEOND/out"; echo 1 > "$BEEOND/out/f"; touch begun\n'
        "while [ -e begun ]; do sleep 0.1; done\n"
    )
    cluster.run("login", ["rm", "-rf", "/global/alice/begun", "/global/alice/killed"])
    job = cluster.submit("alice", script, "-N3", "--beeond-stage-out=out:/global/alice/killed")
    wait_for(lambda: cluster.path("login", "/global/alice/begun").exists())
    cluster.kill("n2", r"programs\.py 7\.4 beegfs-storage")
    cluster.run("login", ["rm", "/global/alice/begun"])
    cluster.wait_job(job)
    cluster.wait_idle()
    assert cluster.read("login", "/global/alice/killed/f") == "1\n"
    revived = [event["services"] for event in events(cluster, "n2", job) if event["event"] == "revived"]
    assert revived == [["beegfs-storage"]]


def test_what_was_prepared_is_not_made_again(cluster: Cluster) -> None:
    cluster.run("n1", ["sh", "-c", "rm -f /nvme/beeond/metadata-*"])
    template(cluster)
    (path,) = cluster.path("n1", "/nvme/beeond").glob("metadata-*")
    made = path.stat()
    template(cluster)
    cluster.run_job("alice", "#!/bin/sh\n", "-N1", "-w", "n1", "--beeond=backend=beegfs")
    cluster.wait_idle()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


def test_two_instances_share_nodes(cluster: Cluster) -> None:
    template(cluster)
    before = cluster.snapshots()
    script = (
        '#!/bin/sh\necho {0} > "$BEEOND/f"; touch /global/project/{0}\n'
        'until [ -e /global/project/{1} ]; do sleep 0.1; done; cat "$BEEOND/f"\n'
    )
    cluster.run("login", ["rm", "-f", "/global/project/alice", "/global/project/bob"])
    jobs = {
        user: cluster.submit(user, script.format(user, other), "-N3", "--oversubscribe", "--beeond=meta=all")
        for user, other in (("alice", "bob"), ("bob", "alice"))
    }
    for user, job in jobs.items():
        assert cluster.wait_job(job)["JobState"] == "COMPLETED", cluster.job_output(job)
        assert cluster.job_output(job) == f"{user}\n"
    cluster.wait_idle()
    cluster.run("login", ["rm", "-f", "/global/project/alice", "/global/project/bob"])
    cluster.wait_clean(before, timeout_s=10)


def test_kept_data_survives_a_reboot_of_the_managements_node(cluster: Cluster) -> None:
    furnish(cluster, "8")
    cluster.run("login", ["sh", "-c", "rm -rf target begun; mkdir target"], user="alice", cwd="/global/alice")
    script = (
        '#!/bin/sh\nmkdir "$BEEOND/out"; echo kept > "$BEEOND/out/f"; touch begun\n'
        "while [ -e begun ]; do sleep 0.1; done\n"
    )
    job = cluster.submit(
        "alice", script, "-N2", "-w", "n[1-2]",
        "--beeond=meta=all", "--beeond-stage-out=out:/global/alice/target/out",
    )  # fmt: skip
    wait_for(lambda: cluster.path("login", "/global/alice/begun").exists())
    cluster.readonly("/global/alice/target")
    try:
        cluster.run("login", ["rm", "/global/alice/begun"])
        cluster.wait_job(job)
        for node in ("n1", "n2"):
            wait_for(partial(kept, cluster, node, job))
        cluster.reboot("n1")
    finally:
        cluster.writable("/global/alice/target")
    done = cluster.run(
        "ctl", ["beeond-ctl", "recover", str(job), "--nodes", "n[1-2]"], check=False, timeout_s=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert cluster.read("login", "/global/alice/target/out/f") == "kept\n"
    cluster.wait_idle()


# --- faults -----------------------------------------------------------------------------------------------

FAULTS = {
    "a port that was taken meanwhile": (
        "n2", "beegfs-storage", 'sleep 0.2; echo "Binding of port failed: Address already in use" >&2; exit 1',
        ["beegfs-storage", "already in use", "see what has the port"],
    ),
    "a daemon that forks and then is gone": (
        "n2", "beegfs-storage", "(sleep 0.2) & exit 0", ["beegfs-storage", "ended while it started"],
    ),
    "no management": ("n1", "beegfs-mgmtd", "exit 2", ["beegfs-mgmtd", "ended while it started"]),
    "a key of another file system": (
        "n3", "beegfs-storage",
        'conf=${1#cfgFile=}; echo other > "$conf.key"; sed -i "s#^connAuthFile.*#connAuthFile = $conf.key#" "$conf"\n'
        'exec "$real" "$@"',
        ["beegfs-storage", "Authentication", "site secret"],
    ),
    "a setting that it does not know": (
        "n2", "beegfs-meta", 'echo "tuneNonsense = 1" >> "${1#cfgFile=}"\nexec "$real" "$@"',
        ["beegfs-meta", "tuneNonsense"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_server_is_named_and_leaves_nothing(cluster: Cluster, fault: str) -> None:
    node, program, script, words = FAULTS[fault]
    template(cluster)
    before = cluster.snapshots()
    replace(cluster, node, program, script)
    cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", "--beeond=meta=all")
    reason = drained(cluster, node)
    for word in words:
        assert word in reason, reason
    furnish(cluster, "7.4")
    cluster.wait_clean(before, timeout_s=15)
    assert not cluster.path("login", "/global/alice/ran").exists()


def test_a_server_that_never_registers_is_named_by_its_node(cluster: Cluster) -> None:
    template(cluster)
    before = cluster.snapshots()
    # It listens where it should, and never told mgmtd.
    script = (
        'shift=$(sed -n "s/^connPortShift = //p" "${1#cfgFile=}")\n'
        "exec python3 -c \"import socket,time; s=socket.create_server(('', 8003+$shift)); time.sleep(600)\""
    )
    replace(cluster, "n2", "beegfs-storage", script)
    cluster.submit("alice", "#!/bin/sh\n", "-N3", "--beeond")
    reason = drained(cluster, "n2")
    assert "n2: storage server not registered" in reason
    furnish(cluster, "7.4")
    cluster.wait_clean(before, timeout_s=15)


def test_a_node_without_the_kernel_module_is_told_what_to_do(cluster: Cluster) -> None:
    template(cluster)
    before = cluster.snapshots()
    cluster.run("n3", ["rm", "/usr/sbin/mount.beegfs"])
    cluster.submit("alice", "#!/bin/sh\n", "-N3", "--beeond")
    reason = drained(cluster, "n3")
    assert "unknown filesystem type" in reason
    assert "modprobe beegfs" in reason
    furnish(cluster, "7.4")
    cluster.wait_clean(before, timeout_s=15)


def test_a_node_with_another_generation_is_named(cluster: Cluster) -> None:
    template(cluster)
    before = cluster.snapshots()
    furnish(cluster, "8", nodes=("n3",))
    cluster.submit("alice", "#!/bin/sh\n", "-N3", "--beeond")
    reason = drained(cluster, "n3")
    assert "beegfs 7.4 is on n1 and n3 has 8" in reason
    furnish(cluster, "7.4")
    cluster.wait_clean(before, timeout_s=15)


def test_a_user_mistake_rolls_back_without_a_client_outliving_the_servers(cluster: Cluster) -> None:
    template(cluster)
    before = cluster.snapshots()
    job = cluster.submit("alice", "#!/bin/sh\n", "-N3", "--beeond-stage-in=/global/alice/nowhere:in")
    assert cluster.wait_job(job)["JobState"] == "FAILED"
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)
    ends = [
        next(event["t"] for event in events(cluster, node, job) if event.get("step") == "unmounting")
        for node in NODES
    ]
    begins = [
        next(event["t"] for event in events(cluster, node, job) if event.get("phase") == "stopping")
        for node in NODES
    ]
    assert max(ends) <= min(begins)


@pytest.mark.skipif(
    not os.environ.get("BEEGFS_HOME"), reason="needs real BeeGFS; set BEEGFS_HOME to its prefix"
)
def test_real_daemons_are_registered_online_and_good() -> None:
    pytest.skip("not written yet")
