"""The test cluster itself: a Slurm cluster, faults that are faults, and nothing seen from outside."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.testbed import Cluster, CommandError, TestbedError, WaitError, host, node, product, snapshot
from tests.testbed.cluster import WORK

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces, mounts and loop devices need root"),
]

NAME = f"tb{os.getpid()}"
HOOKS = [
    "job_process",
    "pools",
    "job_teardown",
    "setup",
    "data_in",
    "real_size",
    "paths",
    "pre_run",
    "post_run",
]
HOOKS += ["data_out", "get_status", "test_data_in", "test_data_out"]
BURST_BUFFER = "\n".join(f"function slurm_bb_{hook}() return slurm.SUCCESS end" for hook in HOOKS)


@pytest.fixture(scope="module")
def bed() -> Iterator[Cluster]:
    with Cluster.up(NAME) as cluster:
        yield cluster


@pytest.fixture
def scratch() -> Iterator[Cluster]:
    """A name for a cluster of the test's own, taken down afterwards whatever happened to it."""
    cluster = Cluster(f"{NAME}-x")
    yield cluster
    cluster.down()


def namespaces(process: host.Process) -> set[str]:
    return {os.readlink(f"/proc/{process.pid}/ns/{kind}") for kind in ("mnt", "net", "pid", "uts", "ipc")}


def processes_in(made: set[str]) -> list[host.Process]:
    """Whoever is in one of these namespaces. Once they are gone, others may have their numbers."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                process = host.Process.of(int(entry))
                if made & namespaces(process):
                    found.append(process)
            except OSError:  # gone, or not ours to look at
                continue
    return found


def mounts_of_this_machine() -> list[str]:
    """What is mounted, but for what unit tests that run at the same time mount in their own directories."""
    return [line for line in host.mount_table() if "/beeond-test-" not in line and "/dev/shm/" not in line]


def traces(name: str) -> list[str]:
    """What this machine shows of a cluster that is not up."""
    found = [line for line in mounts_of_this_machine() if f"/{name}/" in line]
    found += [loop.backing_file for loop in host.loops() if f"/{name}/" in loop.backing_file]
    found += [str(WORK / name)] if (WORK / name).exists() else []
    return found


# -- up and down --------------------------------------------------------------------------------------


def test_down_leaves_no_process_namespace_mount_loop_device_or_file(scratch: Cluster) -> None:
    mounts, interfaces = mounts_of_this_machine(), set(os.listdir("/sys/class/net"))
    accounts, slurm_files = Path("/etc/passwd").read_bytes(), sorted(Path("/etc/slurm").rglob("*"))
    cluster = Cluster.up(scratch.name, nodes=2)
    cluster.run(
        "n1", ["sh", "-c", "truncate -s 64M /nvme/i; losetup -f /nvme/i; mount -t tmpfs t /mnt; sleep 999 &"]
    )
    hub = cluster.record.process("hub")
    assert hub is not None
    inits = [cluster.init(machine.name) for machine in cluster.machines()]
    processes = [hub, *inits, *(process for init in inits for process in host.processes_of(init))]
    made = set().union(*map(namespaces, [hub, *inits])) - namespaces(host.Process.of(os.getpid()))
    assert len(processes) > 12
    assert len(made) == 5 * (1 + len(inits))
    assert any(loop.backing_file == "/nvme/i" for loop in host.loops())

    assert mounts_of_this_machine() == mounts, "its mounts are seen from outside"
    assert set(os.listdir("/sys/class/net")) == interfaces, "its network is seen from outside"

    processes += processes_in(made)
    cluster.down()
    assert [process for process in processes if process.alive()] == []
    assert traces(scratch.name) == []
    assert not any(loop.backing_file == "/nvme/i" for loop in host.loops())
    assert mounts_of_this_machine() == mounts
    assert Path("/etc/passwd").read_bytes() == accounts
    assert sorted(Path("/etc/slurm").rglob("*")) == slurm_files
    cluster.down()  # twice is no error


@pytest.mark.parametrize("entries", [1, 2, 3, 6, 7])
def test_an_up_that_was_killed_is_cleaned_by_down(scratch: Cluster, entries: int) -> None:
    """Killed once so many entries are in the record: cluster, hub, first machine, last machine, up."""
    argv = [sys.executable, "-m", "tests.testbed", "up", "--name", scratch.name]
    up = subprocess.Popen(argv, cwd=product.PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def recorded() -> tuple[bool, int]:
        path = scratch.record.path
        count = len(path.read_text().splitlines()) if path.exists() else 0
        return count >= entries, count

    host.wait_until(f"{entries} entries in the record", recorded, 20, 0.001)
    up.send_signal(signal.SIGKILL)
    up.wait()
    recorded_processes = [
        host.Process(int(entry["pid"]), int(entry["start"])) for entry in scratch.record.entries("process")
    ]
    assert scratch.work.exists()
    if entries < 7:
        with pytest.raises(TestbedError, match="is not up"):
            Cluster.attach(scratch.name)
    with pytest.raises(TestbedError, match="down --name"):
        Cluster.up(scratch.name)
    scratch.down()
    assert [process for process in recorded_processes if process.alive()] == []
    assert traces(scratch.name) == []


def test_loop_devices_of_others_are_not_the_testbeds_to_detach(scratch: Cluster, tmp_path: Path) -> None:
    """A machine of which only the first process exists still has this machine's mounts, and their devices."""
    (tmp_path / "others").write_bytes(bytes(1 << 20))
    argv = ["losetup", "--find", "--show", str(tmp_path / "others")]
    device = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    try:
        assert snapshot.devices(host.Process.of(os.getpid())) == set()
        scratch.work.mkdir(parents=True)
        scratch.record.write("cluster", nodes=1)
        with subprocess.Popen(["sleep", "992"]) as stub:
            process = host.Process.of(stub.pid)
            scratch.record.write("process", role="n1", pid=process.pid, start=process.start)
            scratch.down()
            stub.kill()
        assert device in [f"/dev/{loop.device}" for loop in host.loops()]
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_an_up_that_fails_says_why_and_leaves_nothing(scratch: Cluster) -> None:
    with pytest.raises(TestbedError, match=r"ctl.*failed") as caught:
        Cluster.up(scratch.name, nodes=1, slurm_extra="NoSuchKey=1")
    assert "NoSuchKey" in str(caught.value)
    assert traces(scratch.name) == []


def test_two_clusters_side_by_side_do_not_meet(bed: Cluster, scratch: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "burst_buffer.lua"
    script.write_text(BURST_BUFFER)
    other = Cluster.up(scratch.name, nodes=1, burst_buffer=script)
    assert {bed.name, other.name} <= set(Cluster.names())
    assert other.run("ctl", ["scontrol", "show", "burst"]).stdout.startswith("Name=lua")
    assert "n1" in other.run_job("bob", "#!/bin/sh\n#BB_LUA anything\ntouch /global/bob/here; hostname\n")
    assert not bed.path("n1", "/global/bob/here").exists()
    key = "/etc/munge/munge.key"
    assert bed.read("n1", key) != other.read("n1", key)
    # the same address in both, and never the other's host: the host keys differ
    assert bed.run("ctl", ["ssh", "n1", "cat", key]).stdout == bed.read("n1", key)
    assert other.run("ctl", ["ssh", "n1", "cat", key]).stdout == other.read("n1", key)
    other.down()
    assert bed.run("n1", ["ssh", "n2", "hostname"]).stdout == "n2\n"


# -- a Slurm cluster ----------------------------------------------------------------------------------


def test_a_job_of_two_nodes_runs_as_its_user_and_sees_global_storage(bed: Cluster) -> None:
    script = "#!/bin/bash\nid -un; id -Gn; pwd; srun sh -c 'hostname > /global/project/$SLURM_PROCID'\n"
    output = bed.run_job("alice", script, "-N2")
    assert output.splitlines() == ["alice", "alice project", "/global/alice"]
    seen = [bed.read(name, f"/global/project/{rank}") for name in ("login", "n3") for rank in (0, 1)]
    assert seen == ["n1\n", "n2\n", "n1\n", "n2\n"]


def test_two_users_jobs_run_on_the_same_nodes_at_once(bed: Cluster) -> None:
    """Each waits for the other's sign: they can only end together."""
    bed.run("n1", ["rm", "-f", "/global/project/alice", "/global/project/bob"])
    script = "#!/bin/sh\ntouch /global/project/{}\nuntil [ -e /global/project/{} ]; do sleep 0.1; done\n"
    first = bed.submit("alice", script.format("alice", "bob"), "-N3")
    second = bed.submit("bob", script.format("bob", "alice"), "-N3")
    done = [bed.wait_job(job, "COMPLETED", timeout_s=20) for job in (first, second)]
    assert [job["NodeList"] for job in done] == ["n[1-3]", "n[1-3]"]


def test_a_job_that_slurm_refuses_or_holds_is_told_at_once(bed: Cluster) -> None:
    with pytest.raises(CommandError) as refused:
        bed.submit("alice", "#!/bin/sh\n", "-w", "n99")
    assert "Invalid node name specified" in refused.value.stderr
    held = bed.submit("alice", "#!/bin/sh\n", "--hold")
    with pytest.raises(TestbedError, match=r"PENDING .JobHeldUser."):
        bed.wait_job(held)
    assert bed.wait_job(held, "PENDING")["JobState"] == "PENDING"
    bed.run("ctl", ["scancel", str(held)])
    with pytest.raises(TestbedError, match=r"is CANCELLED .*, not COMPLETED"):
        bed.wait_job(held, "COMPLETED")


def test_a_failed_prolog_drains_the_node_and_resume_gives_it_back(bed: Cluster) -> None:
    node.put(bed.path("n1", "/"), "etc/slurm/prolog.d/50-bad", "#!/bin/sh\nexit 1\n", 0o755)
    job = bed.submit("alice", "#!/bin/sh\n", "-w", "n1")
    state = bed.wait_node("n1", {"IDLE", "DRAIN"})
    assert state.reason == "Prolog error"
    with pytest.raises(TestbedError, match="held"):
        bed.wait_job(job)
    bed.path("n1", "/etc/slurm/prolog.d/50-bad").unlink()
    bed.run("ctl", ["scancel", str(job)])
    bed.resume("n1")
    assert bed.run_job("alice", "#!/bin/sh\nhostname\n", "-w", "n1") == "n1\n"


def test_root_reaches_nodes_by_ssh_with_strict_host_keys_and_not_from_the_login_node(bed: Cluster) -> None:
    strict = ["ssh", "-o", "StrictHostKeyChecking=yes", "-o", "UserKnownHostsFile=/dev/null"]
    for machine in bed.machines():
        assert bed.run("ctl", [*strict, machine.name, "hostname"]).stdout == f"{machine.name}\n"
    assert bed.run("n1", [*strict, "n3", "hostname"]).stdout == "n3\n"
    with pytest.raises(CommandError, match="Permission denied"):
        bed.run("login", [*strict, "n1", "true"])
    with pytest.raises(CommandError, match=r"Permission denied|Could not open"):
        bed.run("n1", [*strict, "n2", "true"], user="alice")


def test_users_and_hosts_are_those_of_the_cluster_alone(bed: Cluster) -> None:
    assert bed.run("n2", ["getent", "passwd", "alice"]).stdout.startswith("alice:x:2001:2001:")
    assert b"\nalice:" not in Path("/etc/passwd").read_bytes()
    assert bed.run("login", ["getent", "hosts", "n3"]).stdout.split()[0] == bed.machines()[-1].address
    assert bed.run("n1", ["ls", "-A", "/home", "/var/tmp"]).stdout.split() == ["/home:", "/var/tmp:"]
    with pytest.raises(CommandError, match="Permission denied"):
        bed.run("n1", ["ls", "/global/bob"], user="alice")


def test_what_a_node_runs_and_mounts_is_its_own(bed: Cluster) -> None:
    mounts = mounts_of_this_machine()
    bed.run(
        "n1",
        ["sh", "-c", "mount -t tmpfs mine /mnt; touch /mnt/a /etc/b /run/c; sleep 998 & echo $! >/tmp/pid"],
    )
    pid = int(bed.read("n1", "/tmp/pid"))
    assert pid < 10000, "process ids are not the node's own"
    assert bed.processes("n2", "sleep 998") == []
    assert not any(bed.path("n2", path).exists() for path in ("/mnt/a", "/etc/b", "/run/c"))
    assert not any(Path(path).exists() for path in ("/mnt/a", "/etc/b", "/run/c"))
    assert mounts_of_this_machine() == mounts
    assert bed.kill("n1", pid) == [pid]
    bed.run("n1", ["sh", "-c", "umount /mnt; rm /etc/b /run/c /tmp/pid"])


def test_fuse_and_loop_devices_work_inside_a_node(bed: Cluster) -> None:
    script = (
        "truncate -s 64M /nvme/i && mkfs.ext4 -q /nvme/i && mount -o loop /nvme/i /mnt && echo ok >/mnt/f"
    )
    bed.run("n1", ["sh", "-c", script])
    assert bed.snapshot("n1").loops == ("/nvme/i",)
    assert bed.snapshot("n2").loops == ()
    bed.run("n1", ["sh", "-c", "umount /mnt; rm /nvme/i"])
    assert stat.S_ISCHR(bed.path("n1", "/dev/fuse").stat().st_mode)


def test_run_gives_back_any_bytes_and_ends_what_takes_too_long(bed: Cluster) -> None:
    name = b"\xff\n\x01 name"
    done = bed.run("n1", ["sh", "-c", "cat; printf ' \\377'"], input=name)
    assert os.fsencode(done.stdout) == name + b" \xff"
    with pytest.raises(WaitError, match=r"n1: sleep 997: not done in 1.2 s"):
        bed.run("n1", ["sleep", "997"], timeout_s=0.3)
    host.wait_until("sleep to go", lambda: (not bed.processes("n1", "sleep 997"), ""), 5)
    with pytest.raises(CommandError, match="n1: sh -c echo why >&2; exit 3: exit 3: why") as caught:
        bed.run("n1", ["sh", "-c", "echo why >&2; exit 3"])
    assert caught.value.returncode == 3


def test_the_command_line_runs_submits_and_shows(bed: Cluster, tmp_path: Path) -> None:
    def testbed(*argv: str) -> str:
        full = [sys.executable, "-m", "tests.testbed", *argv]
        return subprocess.run(full, cwd=product.PROJECT, capture_output=True, text=True, check=True).stdout

    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nid -un; echo $SLURM_JOB_NAME\n")
    named = ("--name", bed.name)
    assert testbed("exec", *named, "n1", "--user", "bob", "--", "sh", "-c", "id -un") == "bob\n"
    lines = testbed("submit", *named, "--user", "bob", "--wait", str(script), "-J", "it").splitlines()
    assert lines[1:] == ["bob", "it", "COMPLETED"]
    assert "n3       compute" in testbed("status", *named)
    assert "slurmd version" in testbed("status", *named, "--logs", "1000")
    assert bed.name in testbed("list").split()


# -- faults -------------------------------------------------------------------------------------------


def test_kill_freeze_and_thaw_hit_the_process_meant(bed: Cluster) -> None:
    bed.run("n1", ["sh", "-c", "sleep 996 >/dev/null 2>&1 & sleep 995 >/dev/null 2>&1 &"])

    def begun() -> tuple[bool, list[host.Process]]:
        found = bed.processes("n1", "^sleep 99[56]$")  # a shell that was forked is still to become it
        return len(found) == 2, found

    host.wait_until("both to run", begun, 5)
    (victim,) = bed.processes("n1", "^sleep 996$")

    def state() -> str:
        return Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0]

    bed.freeze("n1", "^sleep 996$")
    host.wait_until("the process to be stopped", lambda: (state() == "T", state()), 5)
    bed.thaw("n1", "^sleep 996$")
    host.wait_until("the process to go on", lambda: (state() == "S", state()), 5)
    bed.kill("n1", victim.inner_pid())
    host.wait_until("the process to end", lambda: (not victim.alive(), ""), 5)
    assert len(bed.processes("n1", "^sleep 995$")) == 1
    bed.kill("n1", "^sleep 995$")
    with pytest.raises(TestbedError, match="n1: no process 'sleep 996'"):
        bed.kill("n1", "sleep 996")


def test_cut_takes_the_network_of_one_node_away_and_restore_gives_it_back(bed: Cluster) -> None:
    ssh = ["ssh", "-o", "ConnectTimeout=1", "n2", "hostname"]
    bed.cut("n2")
    with pytest.raises(CommandError, match=r"timed out|No route"):
        bed.run("ctl", ssh)
    assert bed.run("ctl", ["ssh", "n3", "hostname"]).stdout == "n3\n"
    bed.restore("n2")
    assert bed.run("ctl", ["ssh", "n2", "hostname"]).stdout == "n2\n"


def test_reboot_ends_every_process_empties_run_and_keeps_the_device(bed: Cluster) -> None:
    script = """
        touch /nvme/kept /etc/kept /run/lost /tmp/lost /dev/shm/lost
        mount -t tmpfs lost /mnt; truncate -s 64M /nvme/image; losetup -f /nvme/image
        sleep 994 >/dev/null 2>&1 &
    """
    bed.run("n3", ["sh", "-c", script])
    old = [bed.init("n3"), *host.processes_of(bed.init("n3"))]
    bed.reboot("n3")
    assert [process for process in old if process.alive()] == []
    assert bed.path("n3", "/nvme/kept").exists()
    assert bed.path("n3", "/etc/kept").exists()
    assert not any(bed.path("n3", path).exists() for path in ("/run/lost", "/tmp/lost", "/dev/shm/lost"))
    assert not any(line.startswith("/mnt ") for line in bed.snapshot("n3").mounts)
    assert bed.snapshot("n3").loops == ()
    bed.run("n3", ["rm", "/nvme/kept", "/nvme/image", "/etc/kept"])
    bed.wait_idle()
    output = bed.run_job("alice", "#!/bin/sh\nsrun hostname\n", "-N3")
    assert sorted(output.split()) == ["n1", "n2", "n3"]


def test_a_node_that_is_off_is_missed_by_slurm_and_taken_back_when_it_is_on(bed: Cluster) -> None:
    bed.power_off("n3")
    with pytest.raises(TestbedError, match=r"n3 of cluster .* is not running"):
        bed.run("n3", ["true"])
    bed.power_on("n3")
    bed.wait_idle()


@pytest.mark.parametrize("where", ["n1", "global"])
def test_a_full_device_says_enospc_until_it_is_emptied(bed: Cluster, where: str) -> None:
    path = {"n1": "/nvme/new", "global": "/global/project/new"}[where]
    write = ["sh", "-c", f"head -c 1000000 /dev/zero > {path}"]
    bed.fill(where)
    with pytest.raises(CommandError, match="No space left on device"):
        bed.run("n1", write)
    bed.unfill(where)
    bed.run("n1", write)
    bed.run("n1", ["rm", path])


def test_a_read_only_directory_of_global_storage_is_so_everywhere_for_root_too_until_undone(
    bed: Cluster,
) -> None:
    directory = "/global/alice/results"
    bed.run("login", ["mkdir", directory], user="alice")
    before = bed.snapshots()
    bed.readonly(directory)
    for name, user in (("n1", "alice"), ("n2", None), ("login", "alice")):
        with pytest.raises(CommandError, match="Read-only file system"):
            bed.run(name, ["touch", f"{directory}/file"], user=user)
    bed.run("n1", ["touch", "/global/alice/beside"], user="alice")
    bed.reboot("n2")
    with pytest.raises(CommandError, match="Read-only file system"):
        bed.run("n2", ["touch", f"{directory}/file"])
    bed.writable(directory)
    bed.run("n2", ["touch", f"{directory}/file"], user="alice")
    bed.wait_clean(before)
    bed.wait_idle()


# -- is it clean? -------------------------------------------------------------------------------------


def test_a_snapshot_shows_everything_that_is_left_behind(bed: Cluster) -> None:
    before = bed.snapshots()
    assert bed.snapshot("n1").diff(before[0]) == []
    listen = "import socket,time; s=socket.socket(); s.bind(('',4711)); s.listen(); time.sleep(993)"
    script = f"""
        mkdir -p /var/lib/new "/mnt/a b"; touch /run/new /opt/new /nvme/new
        mount -t tmpfs x "/mnt/a b"; truncate -s 64M /nvme/i; losetup -f /nvme/i
        /usr/bin/python3 -c "{listen}" >/dev/null 2>&1 &
    """
    bed.run("n1", ["sh", "-c", script])

    def changes() -> tuple[bool, list[str]]:
        lines = bed.snapshot("n1").diff(before[0])
        return any("4711" in line for line in lines if "ports" in line), lines

    lines = host.wait_until("the port to be seen", changes, 5)
    for part in (
        "+ processes: uid 0: /usr/bin/python3 -c import socket",
        "+ mounts: /mnt/a\\040b tmpfs",
        "+ ports: tcp 00000000:4711",
        "+ loops: /nvme/i",
        "+ files: /run/new -rw-r--r-- 0:0",
        "+ files: /opt/new ",
        "+ files: /nvme/new ",
        "+ files: /var/lib/new drwxr-xr-x 0:0",
    ):
        assert [line for line in lines if line.startswith(f"n1: {part}")], part
    with pytest.raises(WaitError, match="/nvme/new"):
        bed.wait_clean(before, timeout_s=0.2)
    bed.kill("n1", "time.sleep.993")
    undo = 'umount "/mnt/a b"; rmdir "/mnt/a b" /var/lib/new; losetup -D 2>/dev/null; true'
    for loop in host.loops_on(snapshot.devices(bed.init("n1"))):
        host.detach(loop)
    bed.run("n1", ["sh", "-c", undo.replace("losetup -D 2>/dev/null; ", "")])
    bed.run("n1", ["rm", "/run/new", "/opt/new", "/nvme/new", "/nvme/i"])
    bed.wait_clean(before)


def test_an_ordinary_job_leaves_a_node_as_it_was(bed: Cluster) -> None:
    before = bed.snapshots()
    bed.run_job("bob", "#!/bin/sh\nsrun true\n", "-N3")
    bed.wait_clean(before)


# -- the product's files ------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one file for each thing that is installed."""
    for name in (
        "slurm/prolog.d/50-it",
        "slurm/epilog.d/50-it",
        "slurm/plugstack.conf.d/it.conf",
        f"{product.BUILT}/it.so",
        ".venv/bin/beeond-ctl",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(product, "PROJECT", tmp_path)
    monkeypatch.setattr(product, "_environment", lambda: tmp_path / ".venv")
    return tmp_path


def test_the_product_is_installed_as_a_site_would_and_the_secret_not_on_the_login_node(
    project: Path, tmp_path: Path
) -> None:
    for machine in node.machines(1):
        root = tmp_path / "roots" / machine.name
        (root / "usr/bin").mkdir(parents=True)
        (root / "nvme").mkdir()
        product.install(root, machine, "x = 1\n", "ab" * 32)
        product.install(root, machine, "x = 2\n", "cd" * 32)
        assert (root / "etc/beeond-ctl/config.toml").read_text() == "x = 2\n"
        assert (root / "etc/slurm/plugstack.conf.d/it.conf").exists()
        assert os.readlink(root / "usr/bin/beeond-ctl") == str(project / ".venv/bin/beeond-ctl")
        secret = root / "etc/beeond-ctl/secret"
        assert secret.exists() == (machine.role != "login")
        if secret.exists():
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        compute = machine.role == "compute"
        for path in ("etc/slurm/prolog.d/50-it", "etc/slurm/epilog.d/50-it", "nvme/beeond"):
            assert (root / path).exists() == compute


def test_what_of_the_product_does_not_exist_is_named(project: Path, tmp_path: Path) -> None:
    (project / product.BUILT / "it.so").unlink()
    project.chmod(0o700)
    with pytest.raises(
        TestbedError, match=rf"lacks: {product.BUILT}/\*\.so, permission for the cluster's users"
    ):
        product.install(tmp_path, node.machines(1)[0], "", "")
