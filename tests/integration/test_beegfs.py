"""The whole job over BeeGFS: stand-ins for its programs, which serve nothing but are as awkward as the real ones.

With BEEGFS_HOME=PREFIX the last test runs the real programs in that directory (its sbin or bin), of either generation.
Most tests let the stand-ins hurry; those that look at times do not.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.job_faults import kept, lacks, recover
from tests.integration.on_cluster import exists
from tests.standins.beegfs import programs
from tests.testbed import product
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2", "n3")
BIN = "/opt/beegfs/sbin"
CONFIG = f"""
[storage]
kind = "{{kind}}"
paths = ["/nvme/beeond"]
{{storage}}
[backend]
default = "beegfs"
allowed = ["beegfs", "local"]
path = ["{BIN}", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
[beegfs]
meta_size = "{{meta_size}}"
stripe_directories = [1, 8]
{{beegfs}}
[deadlines]
meet = 12
start = {{start}}
stop = {{stop}}
silence = {{silence}}
[staging]
job_check = 1
"""


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with BeeGFS's stand-ins and prepared metadata, for this file's tests; put back afterwards."""
    furnish(cluster, "7.4", start=60)
    for node in NODES:
        cluster.run(node, ["beeond-ctl", "prepare"])
    yield cluster
    for node in NODES:
        script = f"rm -rf /opt/beegfs /nvme/beeond/metadata-* /usr/sbin/mount.beegfs /usr/sbin/umount {programs.HASTE}"
        cluster.run(node, ["sh", "-c", script])
    cluster.write_config(product.config())


@pytest.fixture(autouse=True)
def tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """A site with BeeGFS 7.4; afterwards every node as before, but for what metadata is copied from."""
    if "site" not in request.fixturenames:
        yield
        return
    made: Cluster = request.getfixturevalue("site")
    furnish(made, "7.4")
    made.wait_idle()
    yield
    for user in ("alice", "bob"):
        made.run("ctl", ["scancel", f"--user={user}"], check=False)
    for node in NODES:
        wait_for(partial(lacks, made, node, "COMPLETING"), 40)
        if "DRAIN" in made.node_state(node).flags:
            made.resume(node)
        wait_for(partial(no_client, made, node), 20)
    left = {node: made.run(node, ["ls", "-A", "/nvme/beeond"]).stdout.split() for node in NODES}
    assert not [name for names in left.values() for name in names if name.startswith("job-")], left


CLIENT = r"programs\.py \S+ mount\.beegfs"


def no_client(cluster: Cluster, node: str) -> bool:
    """Whether no stand-in of the kernel's client is left: it ends some time after it was unmounted."""
    return not cluster.processes(node, CLIENT)


def furnish(
    cluster: Cluster, edition: str, *, haste: bool = True, nodes: tuple[str, ...] = NODES, **config: object
) -> None:
    """Install stand-ins of `edition`; with `haste` nothing of them takes its time, and no deadline is long."""
    usual: dict[str, object] = {
        "kind": "directory", "storage": 'capacity = "1GiB"', "meta_size": "1GiB", "beegfs": "",
        "start": 6 if haste else 15, "stop": 6 if haste else 10, "silence": 4,
    }  # fmt: skip
    cluster.write_config(CONFIG.format(**(usual | config)))
    for node in nodes:
        cluster.run(node, ["rm", "-rf", BIN])
        programs.install(cluster.path(node, BIN), edition, cluster.path(node, "/usr/sbin"))
        mark = cluster.path(node, str(programs.HASTE))
        mark.touch() if haste else mark.unlink(missing_ok=True)


def replace(cluster: Cluster, node: str, program: str, script: str) -> None:
    """Have `program`, of BIN where it says nothing else, be a shell script; $real is the stand-in."""
    place = os.path.join(BIN, program)
    path = cluster.path(node, place)
    path.rename(f"{path}.real")
    path.write_text(f"#!/bin/sh\nreal={place}.real\n{script}\n")
    path.chmod(0o755)


def begin(cluster: Cluster, script: str, *options: str) -> int:
    """Submit a job that waits when it has run `script`, until `finish`."""
    cluster.run("login", ["rm", "-f", "/global/alice/begun"])
    text = f"#!/bin/sh\n{script}\ntouch /global/alice/begun\nwhile [ -e /global/alice/begun ]; do sleep 0.1; done\n"
    job = cluster.submit("alice", text, *options)
    wait_for(lambda: exists(cluster, "/global/alice/begun"), 40)
    return job


def finish(cluster: Cluster, job: int) -> None:
    cluster.run("login", ["rm", "/global/alice/begun"])
    cluster.wait_job(job)


def events(cluster: Cluster, node: str, job: int) -> list[dict[str, Any]]:
    text = cluster.read(node, f"/var/log/beeond-ctl/jobs/{job}.jsonl")
    return [json.loads(line) for line in text.splitlines()]


def step(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(event for event in found if event.get("step") == name)


def seconds(found: list[dict[str, Any]], name: str) -> float:
    return float(step(found, name)["seconds"])


def drained(cluster: Cluster, node: str, timeout_s: float = 40) -> str:
    """The reason for which `node`, and no other, is drained."""
    wait_for(lambda: "DRAIN" in cluster.node_state(node).flags, timeout_s)
    for other in NODES:
        wait_for(partial(lacks, cluster, other, "COMPLETING"), timeout_s)
        assert ("DRAIN" in cluster.node_state(other).flags) == (other == node), cluster.node_state(other)
    return cluster.node_state(node).reason


def management(cluster: Cluster, job: int, node: str = "n1", edition: str = "7.4") -> dict[str, Any]:
    """What the stand-in for mgmtd was told."""
    name = "mgmtd/state.json" if edition == "7.4" else "mgmtd.sqlite"
    return dict(json.loads(cluster.read(node, f"/nvme/beeond/job-{job}/data/{name}")))


# --- a file system of the site's own on the same node -----------------------------------------------------

PERMANENT = """
mkdir -p /srv/beegfs/storage /srv/beegfs/log /etc/beegfs /mnt/permanent
echo permanent > /etc/beegfs/conn.auth
for name in mgmtd meta storage helperd client; do echo 'sysMgmtdHost = nowhere' > /etc/beegfs/beegfs-$name.conf; done
echo 'db-file = "/nowhere"' > /etc/beegfs/beegfs-mgmtd.toml
cd /
set -- connAuthFile=/etc/beegfs/conn.auth runDaemonized=true
{bin}/beegfs-mgmtd cfgFile=/dev/null storeMgmtdDirectory=/srv/beegfs/mgmtd logStdFile=/srv/beegfs/log/mgmtd "$@"
{bin}/beegfs-storage cfgFile=/dev/null sysMgmtdHost={node} storeStorageDirectory=/srv/beegfs/storage \
    logStdFile=/srv/beegfs/log/storage "$@"
mount -t tmpfs beegfs_nodev /mnt/permanent
echo data > /mnt/permanent/file
"""


def permanent(cluster: Cluster, node: str, home: Path | None = None) -> None:
    """Run a permanent BeeGFS 7.4 on `node`, on its usual ports, with its files in /etc and a mount."""
    programs.install(cluster.path(node, "/srv/bin"), "7.4", None)
    if home is not None:
        programs.install_real(cluster.path(node, "/srv/bin"), home, "7.4", cluster.path(node, "/srv/bin"))
    cluster.run(node, ["sh", "-euc", PERMANENT.format(bin="/srv/bin", node=node)])
    wait_for(lambda: ":8003" in cluster.run(node, ["ss", "-ltn"]).stdout, 10)


def remove_permanent(cluster: Cluster, node: str) -> None:
    cluster.kill(node, r"beegfs-\w+ cfgFile=/dev/null")
    cluster.run(node, ["sh", "-c", "umount /mnt/permanent; rm -rf /mnt/permanent /srv/* /etc/beegfs"])


@pytest.mark.parametrize(("edition", "kind"), [("7.4", "directory"), ("8", "image")])
def test_a_job_has_its_file_system_on_all_nodes_and_leaves_nothing_of_its_own_and_all_of_another(
    site: Cluster, edition: str, kind: str
) -> None:
    cluster = site
    furnish(cluster, edition, haste=False, kind=kind)
    cluster.run(
        "login",
        ["sh", "-c", "rm -rf in out; mkdir in; echo hello > in/file"],
        user="alice",
        cwd="/global/alice",
    )
    permanent(cluster, "n1")
    try:
        before = cluster.snapshots()
        output = cluster.run_job(
            "alice",
            """\
            #!/bin/sh
            set -e
            stat -c '%U %a' "$BEEOND" "$BEEOND/stripe_8" "$BEEOND/stripe_2"
            cat "$BEEOND/in/file"
            mkdir "$BEEOND/made"
            srun sh -c 'hostname > "$BEEOND/made/$SLURMD_NODENAME"'
            echo "job $BEEOND_JOB_ID"
            """,
            "-N3", "--ntasks-per-node=1", "--beeond=meta=2,stripe-count=2,stripe-dirs=2,chunk-size=1GiB",
            "--beeond-stage-in=/global/alice/in:in", "--beeond-stage-out=made:/global/alice/out",
        )  # fmt: skip
        cluster.wait_idle()
        assert cluster.run("login", ["ls", "/global/alice/out"]).stdout.split() == list(NODES)
        cluster.wait_clean(before, timeout_s=10)
    finally:
        remove_permanent(cluster, "n1")
    lines = output.split("\n")
    assert lines[:4] == ["alice 700", "alice 700", "alice 700", "hello"]
    job = int(lines[4].split()[1])
    for node in NODES:
        found = events(cluster, node, job)
        # What is wiped is not waited for: one stand-in takes STOP_S to end in order.
        assert seconds(found, "stopping") < programs.STOP_S / 2
        asked = [event for event in found if "asked" in event]
        assert bool(asked) == (node == "n1"), "mgmtd is asked by the leader alone"
    found = events(cluster, "n1", job)
    since = step(found, "becoming usable")["t"] - step(found, "registering")["t"]
    assert since > programs.ONLINE_S * 0.8
    assert seconds(found, "becoming usable") < programs.ONLINE_S * 1.1
    assert step(found, "registering")["asked"] == (2 if edition == "7.4" else 1), "who serves is registered"
    mounted, usable = step(found, "mounting")["t"], step(found, "becoming usable")["t"]
    assert (mounted < usable) == (edition == "7.4"), "7.4 mounts before all is Online, 8 cannot"


def test_what_dies_in_a_job_is_started_again_and_metadata_was_ready_made(site: Cluster) -> None:
    cluster = site
    before = cluster.snapshots()
    cluster.run("login", ["rm", "-rf", "/global/alice/killed"])
    job = begin(
        cluster, 'mkdir "$BEEOND/out"; echo 1 > "$BEEOND/out/f"', "-N3", "--beeond=meta=all",
        "--beeond-stage-out=out:/global/alice/killed",
    )  # fmt: skip
    run = f"/run/beeond-ctl/jobs/{job}"
    for node in NODES:
        assert "made the directories" not in cluster.read(node, f"{run}/logs/beegfs-meta.log")
    count = cluster.run("n2", ["sh", "-c", f"find {run}/metadata -type d | wc -l"]).stdout
    assert int(count) > 66000
    cluster.kill("n2", r"programs\.py 7\.4 beegfs-(storage|helperd)")
    finish(cluster, job)
    cluster.wait_idle()
    assert cluster.read("login", "/global/alice/killed/f") == "1\n"
    revived = [event["services"] for event in events(cluster, "n2", job) if event["event"] == "revived"]
    assert revived == [["beegfs-storage", "beegfs-helperd"]]
    cluster.wait_clean(before, timeout_s=10)


def test_what_was_prepared_is_not_made_again(site: Cluster) -> None:
    (path,) = site.path("n1", "/nvme/beeond").glob("metadata-*")
    made = path.stat()
    site.run("n1", ["beeond-ctl", "prepare"])
    site.run_job("alice", "#!/bin/sh\n", "-N1", "-w", "n1", "--beeond=backend=beegfs")
    site.wait_idle()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


def test_two_instances_share_nodes(site: Cluster) -> None:
    cluster = site
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


def test_a_node_without_storage_mounts_and_has_no_part_in_what_is_kept(site: Cluster) -> None:
    cluster = site
    furnish(cluster, "8", storage='without = ["n1", "gpu*"]')
    cluster.run("n1", ["rm", "-r", BIN])  # it has no servers to run
    before = cluster.snapshots()
    cluster.run("login", ["sh", "-c", "rm -rf target; mkdir target"], user="alice", cwd="/global/alice")
    job = begin(
        cluster, 'mkdir "$BEEOND/out"; srun -N3 sh -c \'echo kept > "$BEEOND/out/$SLURMD_NODENAME"\'', "-N3",
        "--beeond=meta=1", "--beeond-stage-out=out:/global/alice/target/out",
    )  # fmt: skip
    assert not cluster.processes("n1", r"programs\.py 8 beegfs-(mgmtd|meta|storage)")
    assert cluster.processes("n2", r"programs\.py 8 beegfs-mgmtd")
    assert not any(
        name.startswith("job-") for name in cluster.run("n1", ["ls", "/nvme/beeond"]).stdout.split()
    )
    cluster.readonly("/global/alice/target")
    try:
        finish(cluster, job)
        kept(cluster, job, ("n2", "n3"))
        cluster.wait_node("n1", {"IDLE"})
        for server in ("mgmtd", "meta", "storage"):  # what is kept was written to its end
            log = f"/run/beeond-ctl/jobs/{job}/logs/beegfs-{server}.log"
            assert "All components stopped" in cluster.read("n2", log)
        cluster.reboot("n1")
        cluster.reboot("n2")
    finally:
        cluster.writable("/global/alice/target")
    for node in ("n1", "n2"):
        for path, mode in product.DIRECTORIES.items():  # as at a site's boot
            cluster.path(node, path).mkdir(mode, parents=True, exist_ok=True)
        wait_for(partial(lacks, cluster, node, "REBOOT"), 30)
    recover(cluster, job, "--nodes", "n[1-3]")
    listing = cluster.run("login", ["ls", "/global/alice/target/out"]).stdout.split()
    assert listing == list(NODES)
    for node in NODES:
        if "DRAIN" in cluster.node_state(node).flags:
            cluster.resume(node)
    cluster.wait_idle()
    cluster.wait_clean([then for then in before if then.node == "n3"], timeout_s=10)


def test_guests_of_another_component_are_clients_and_run_no_server(site: Cluster) -> None:
    cluster = site
    furnish(cluster, "8")
    cluster.run("login", ["rm", "-rf", "/global/alice/shared"])
    before = cluster.snapshots()
    job = begin(
        cluster,
        "#SBATCH -N1 -w n1 --beeond=share=1 --beeond-stage-out=out:/global/alice/shared\n"
        "#SBATCH hetjob\n#SBATCH -N2 --ntasks-per-node=1 --beeond=join=0\n"
        'mkdir "$BEEOND/out"; srun --het-group=1 sh -c \'hostname > "$BEEOND/out/$SLURMD_NODENAME"\'',
    )
    for node, count in (("n1", 3), ("n2", 0), ("n3", 0)):
        assert len(cluster.processes(node, r"programs\.py 8 beegfs-(mgmtd|meta|storage)")) == count
    finish(cluster, job)
    wait_for(lambda: exists(cluster, "/global/alice/shared/n3"), 30)
    cluster.wait_idle()
    assert cluster.run("login", ["ls", "/global/alice/shared"]).stdout.split() == ["n2", "n3"]
    cluster.wait_clean(before, timeout_s=10)


def test_what_site_and_user_choose_is_laid_out(site: Cluster) -> None:
    cluster = site
    more = 'licensed = true\nconf_dir = "/etc/beegfs-more"\nprefer_local = true\n'
    for node in (*NODES, "login"):
        cluster.run(node, ["mkdir", "-p", "/etc/beegfs-more"])
        cluster.path(node, "/etc/beegfs-more/beegfs-storage.conf").write_text("tuneNumWorkers = 3\n")
    furnish(cluster, "7.4", beegfs=more + 'pools = {quick = ["/nvme/beeond"]}')
    job = begin(cluster, 'ls "$BEEOND"', "-N3", "--beeond=storage=2,stripe-count=2,chunk-size=512k")
    assert cluster.job_output(job).split() == ["quick", "stripe_1", "stripe_8"]
    told = management(cluster, job)
    assert told["pools"] == {"2": ["quick", "1,2"]}
    assert told["patterns"] == {
        "/": ["512k", 2, "2"], "/quick": ["512k", 2, "2"], "/stripe_1": ["512k", 1, "2"],
        "/stripe_8": ["512k", 2, "2"],
    }  # fmt: skip
    run = f"/run/beeond-ctl/jobs/{job}"
    assert "tuneNumWorkers = 3\n" in cluster.read("n2", f"{run}/beegfs-storage.conf")
    assert cluster.read("n2", f"{run}/beegfs-preferred-storage") == "2\n"
    assert not cluster.processes("n3", r"programs\.py 7\.4 beegfs-storage")
    finish(cluster, job)
    cluster.wait_idle()
    furnish(cluster, "7.4", beegfs="licensed = true")
    job = begin(cluster, "true", "-N2", "--beeond=mirror=yes")
    told = management(cluster, job, cluster.job(job)["NodeList"].replace("[", "").split("-")[0].split(",")[0])
    assert told["mirrored"] == ["storage", "meta", "root"]
    assert told["patterns"]["/"] == ["1m", 1, "1", "mirrored"]
    finish(cluster, job)
    for node in (*NODES, "login"):
        cluster.run(node, ["rm", "-r", "/etc/beegfs-more"])


# --- faults -----------------------------------------------------------------------------------------------

FAULTS = {
    "a daemon that forks and then is gone": (
        "n2", "beegfs-storage", "(sleep 0.2) & exit 0", ["beegfs-storage", "ended while it started"],
    ),
    "no management": ("n1", "beegfs-mgmtd", "exit 2", ["beegfs-mgmtd", "ended while it started"]),
    "a silent management": (
        "n1", "beegfs-mgmtd",
        'shift=$(sed -n "s/^connPortShift = //p" "${1#cfgFile=}")\n'
        "exec python3 -c \"import socket,time; s=socket.create_server(('', 8008+$shift)); time.sleep(600)\"",
        ["beegfs-mgmtd on n1 listens and does not answer"],
    ),
    "a key of another file system": (
        "n3", "beegfs-storage",
        'conf=${1#cfgFile=}; echo other > "$conf.key"; sed -i "s#^connAuthFile.*#connAuthFile = $conf.key#" "$conf"\n'
        'exec "$real" "$@"',
        ["beegfs-storage", "Soft disconnect", "site secret"],
    ),
    "a setting that it does not know": (
        "n2", "beegfs-meta", 'echo "tuneNonsense = 1" >> "${1#cfgFile=}"\nexec "$real" "$@"',
        ["beegfs-meta", "tuneNonsense", "beegfs.settings"],
    ),
    "a server that listens and never registered": (
        "n2", "beegfs-storage",
        'shift=$(sed -n "s/^connPortShift = //p" "${1#cfgFile=}")\n'
        "exec python3 -c \"import socket,time; s=socket.create_server(('', 8003+$shift)); time.sleep(600)\"",
        ["n2: storage server not registered"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_server_is_named_and_leaves_nothing(site: Cluster, fault: str) -> None:
    cluster = site
    node, program, script, words = FAULTS[fault]
    before = cluster.snapshots()
    replace(cluster, node, program, script)
    cluster.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", "--beeond=meta=all")
    reason = drained(cluster, node)
    for word in words:
        assert word in reason, reason
    furnish(cluster, "7.4")
    cluster.wait_clean(before, timeout_s=15)
    assert not exists(cluster, "/global/alice/ran")


def test_a_port_that_was_taken_meanwhile_fails_the_job_and_drains_no_node(site: Cluster) -> None:
    """Every port was free when the node claimed it: whoever has it now is not the node's fault."""
    before = site.snapshots()
    replace(
        site, "n2", "beegfs-storage",
        'conf=${1#cfgFile=}; shift=$(sed -n "s/^connPortShift = //p" "$conf")\n'
        "python3 -c \"import socket,time; s=socket.create_server(('', 8003+$shift)); time.sleep(600)\" &\n"
        'until ss -Hltn | grep -q ":$((8003+shift)) "; do sleep 0.05; done; exec "$real" "$@"',
    )  # fmt: skip
    job = site.submit("alice", "#!/bin/sh\ntouch /global/alice/ran\n", "-N3", "--beeond=meta=all")
    assert site.wait_job(job)["JobState"] == "FAILED"
    told = site.job_output(job)
    assert "n2: ports of this job were taken after it had claimed them" in told
    assert "already in use" in told
    site.wait_idle()
    furnish(site, "7.4")
    site.wait_clean(before, timeout_s=15)
    assert not exists(site, "/global/alice/ran")


def test_a_tool_that_sets_nothing_and_exits_1_is_found_out(site: Cluster) -> None:
    cluster = site
    furnish(cluster, "8")
    before = cluster.snapshots()
    replace(
        cluster, "n1", "beegfs", 'case "$*" in *" entry set "*) echo done; exit 1;; esac\nexec "$real" "$@"'
    )
    cluster.submit("alice", "#!/bin/sh\n", "-N3", "--beeond")
    reason = drained(cluster, "n1")
    assert "stripe patterns were not set: / has RAID0 (4x512K)" in reason
    furnish(cluster, "8")
    cluster.wait_clean(before, timeout_s=15)


def test_a_node_without_the_kernel_module_is_told_what_to_do(site: Cluster) -> None:
    cluster = site
    before = cluster.snapshots()
    cluster.run("n3", ["rm", "/usr/sbin/mount.beegfs"])
    cluster.submit("alice", "#!/bin/sh\n", "-N3", "--beeond")
    reason = drained(cluster, "n3")
    assert "unknown filesystem type" in reason
    assert "modprobe beegfs" in reason
    furnish(cluster, "7.4")
    cluster.wait_clean(before, timeout_s=15)


def test_a_node_with_another_generation_is_named(site: Cluster) -> None:
    cluster = site
    before = cluster.snapshots()
    furnish(cluster, "8", nodes=("n3",))
    cluster.submit("alice", "#!/bin/sh\n", "-N3", "--beeond")
    reason = drained(cluster, "n3")
    assert "beegfs 7.4 is on n1 and n3 has 8" in reason
    furnish(cluster, "7.4")
    cluster.wait_clean(before, timeout_s=15)


def test_a_user_mistake_rolls_back_without_a_client_outliving_the_servers(site: Cluster) -> None:
    cluster = site
    before = cluster.snapshots()
    job = cluster.submit("alice", "#!/bin/sh\n", "-N3", "--beeond-stage-in=/global/alice/nowhere:in")
    assert cluster.wait_job(job)["JobState"] == "FAILED"
    cluster.wait_idle()
    cluster.wait_clean(before, timeout_s=10)
    found = [events(cluster, node, job) for node in NODES]
    ends = [step(each, "unmounting")["t"] for each in found]
    begins = [next(event["t"] for event in each if event.get("phase") == "stopping") for each in found]
    assert max(ends) <= min(begins)


# --- the real thing ---------------------------------------------------------------------------------------

HOME = os.environ.get("BEEGFS_HOME", "")


@pytest.mark.skipif(not HOME, reason="needs real BeeGFS; set BEEGFS_HOME to the directory that has its sbin")
def test_real_daemons_are_up_laid_out_and_gone(site: Cluster, record_property: pytest.FixtureRequest) -> None:
    cluster, home = site, Path(HOME)
    edition = programs.real_edition(home)
    furnish(cluster, edition, haste=False)
    for node in NODES:
        programs.install_real(cluster.path(node, BIN), home, edition, cluster.path(node, "/usr/sbin"))
    cluster.run("login", ["rm", "-rf", "/global/alice/out"])
    if edition == "7.4":
        permanent(cluster, "n1", home)
    try:
        before = cluster.snapshots()
        job = begin(
            cluster, 'mkdir "$BEEOND/out"; echo real > "$BEEOND/out/f"', "-N3", "--beeond=meta=2,stripe-count=2",
            "--beeond-stage-out=out:/global/alice/out",
        )  # fmt: skip
        state = json.loads(cluster.read("n1", f"/run/beeond-ctl/jobs/{job}/state.json"))
        tool = Tool(cluster, edition, job, int(state["block"]))
        assert tool.states() == {("meta", 1), ("meta", 2), ("storage", 1), ("storage", 2), ("storage", 3)}
        assert tool.stripes("/") == 2
        assert tool.stripes("/stripe_1") == 1
        assert tool.stripes("/stripe_8") == 3
        if programs.can_mount():
            assert "beegfs" in cluster.run("n2", ["findmnt", "-no", "FSTYPE", f"/mnt/beeond/{job}"]).stdout
        finish(cluster, job)
        cluster.wait_idle()
        assert cluster.read("login", "/global/alice/out/f") == "real\n"
        cluster.wait_clean(before, timeout_s=15)
    finally:
        if edition == "7.4":
            remove_permanent(cluster, "n1")
    found = events(cluster, "n1", job)
    for name in ("starting", "registering", "starting the last", "becoming usable", "arranging", "stopping"):
        record_property(name, step(found, name)["seconds"])  # type: ignore[operator]


class Tool:
    """BeeGFS's own tool, asked by the test."""

    def __init__(self, cluster: Cluster, edition: str, job: int, block: int) -> None:
        self.cluster, self.edition, run = cluster, edition, f"/run/beeond-ctl/jobs/{job}"
        self.start = [f"{BIN}/beegfs-ctl", f"--cfgFile={run}/beegfs-ctl.conf"]
        if edition == "8":
            self.start = [
                f"{BIN}/beegfs", "--mgmtd-addr", f"n1:{block + 7}", "--tls-disable", "--output", "json",
                "--auth-file", f"{run}/beegfs-auth", "--mount=none",
            ]  # fmt: skip

    def ask(self, *words: str) -> str:
        return self.cluster.run("n1", [*self.start, *words], check=False).stdout

    def states(self) -> set[tuple[str, int]]:
        """Kind and number of all that is Online and Good."""
        if self.edition == "8":
            kinds = {2: "meta", 3: "storage"}
            return {
                (kinds[target["type"]], target["id"]["num_id"])
                for target in json.loads(self.ask("target", "list", "--state"))
                if (target["reachability"], target["consistency"]) == ("Online", "Good")
            }
        lines = {
            kind: self.ask("--listtargets", f"--nodetype={kind}", "--state") for kind in ("meta", "storage")
        }
        words = [(kind, line.split()) for kind, text in lines.items() for line in text.splitlines()]
        return {(kind, int(found[0])) for kind, found in words if found[1:3] == ["Online", "Good"]}

    def stripes(self, path: str) -> int:
        """Number of targets for new files in a directory."""
        if self.edition == "8":
            shown = json.loads(self.ask("entry", "info", path))[0]["stripe_pattern"]
            return int(shown.partition("(")[2].partition("x")[0])
        text = self.ask("--getentryinfo", "--unmounted", path)
        return int(text.partition("desired:")[2].split()[0])
