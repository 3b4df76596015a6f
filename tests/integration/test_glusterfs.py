"""Real bricks and FUSE clients on three hosts, described by the backend, run by the supervisor, on prepared storage."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import mounts, storage, supervisor
from beeond_ctl.backends import File, Keys, Mounted, Service, glusterfs
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError
from beeond_ctl.plan import Job, Plan, make_plan
from beeond_ctl.request import Request
from tests.integration.lan import NEEDS, Lan
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.gluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(
        not all(map(shutil.which, (*NEEDS, *glusterfs.PROGRAMS))), reason="needs GlusterFS and iproute2"
    ),
]

KEYS = Keys(authentication="5ecret" * 10)
TOKEN = "a-token-of-this-test"
JOB = Job(job_id=7, uid=0, gid=0, user="root")
POINT = "/run/mount/7"
RUN = "/run/beeond-ctl"

_running: list[supervisor.Process] = []  # on a host


# --- what is called on the hosts --------------------------------------------------------------------------


def make(names: tuple[str, ...], targets: int = 1, kind: str = "directory") -> Plan:
    config = SiteConfig.model_validate({
        "storage": {"kind": kind, "paths": [f"/mnt/nvme{index}" for index in range(targets)], "capacity": "512MiB"},
        "mount": {"root": "/run/mount"},
        "paths": {"run": RUN},
    })  # fmt: skip
    return make_plan(config, Request(), JOB, names, block=24000)


def furnish(_name: str, plan: Plan) -> None:
    for base in plan.config.storage.paths:
        os.makedirs(base, exist_ok=True)


def start(plan: Plan, services: tuple[Service, ...]) -> None:
    pairs = [
        (
            service,
            supervisor.start(
                service, token=TOKEN, search_path=plan.config.backend.path, record=_running.append
            ),
        )
        for service in services
    ]
    supervisor.wait_ready(pairs, deadline_s=20)


def prepare(name: str, plan: Plan) -> None:
    storage.prepare(plan, name)


def serve(name: str, plan: Plan) -> float:
    began = time.monotonic()
    start(plan, glusterfs.services(plan, name, KEYS))
    return time.monotonic() - began


def mount(name: str, plan: Plan) -> float:
    began = time.monotonic()
    how = glusterfs.mount(plan, name, KEYS)
    assert how.service
    mounts.make_point(how.point)
    start(plan, (how.service,))
    return time.monotonic() - began


def unmount(_name: str, plan: Plan) -> list[str]:
    ended = mounts.unmount(plan.mount_point, deadline_s=10)
    mounts.remove_point(plan.mount_point)
    return ended


def stop(_name: str) -> list[str]:
    killed = supervisor.stop(_running, token=TOKEN, timeout_s=10)
    _running.clear()
    return killed


def wipe(_name: str, plan: Plan) -> int:
    return sum(receipt.files for receipt in storage.wipe(plan, "delete", deadline_s=60))


def pid_of(part: str) -> int:
    return next(process.pid for process in _running if part in process.name)


def kill(part: str, number: int) -> None:
    os.kill(pid_of(part), number)


def write(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def outcome(path: str) -> tuple[str, float]:
    """How creating a file at `path` ends, and after how many seconds."""
    began = time.monotonic()
    try:
        write(path, b"x")
        result = "done"
    except OSError as error:
        result = errno.errorcode[error.errno or 0]
    return result, time.monotonic() - began


# --- tests ------------------------------------------------------------------------------------------------


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Lan]:
    with Lan(tmp_path, 3) as made:
        yield made


def up(lan: Lan, plan: Plan) -> tuple[float, float]:
    lan.all(furnish, plan)
    lan.all(prepare, plan)
    return max(lan.all(serve, plan)), max(lan.all(mount, plan))


def down(lan: Lan, plan: Plan) -> None:
    lan.all(unmount, plan)
    lan.all(stop)
    lan.all(wipe, plan)


@pytest.fixture
def instance(lan: Lan) -> Plan:
    plan = make(lan.names)
    up(lan, plan)
    return plan


def spread(name: str, entries: list[str]) -> None:
    """Make a directory and a file for each of `entries`, named after this host too."""
    for entry in entries:
        os.mkdir(f"{POINT}/{entry}-{name}")
        write(f"{POINT}/{entry}-{name}/file", name.encode())
        write(f"{POINT}/{entry}-{name}.file", name.encode())


def listed(_name: str) -> list[tuple[str, list[str]]]:
    return sorted((root, sorted(files)) for root, _, files in os.walk(POINT))


def test_nodes_that_mount_at_once_agree_on_a_fresh_file_system(lan: Lan) -> None:
    for targets in (1, 3):
        plan = make(lan.names, targets=targets)
        for _ in range(4):
            up(lan, plan)
            lan.all(spread, [f"d{number}" for number in range(10)])
            first, second, third = lan.all(listed)
            assert first == second == third
            assert len(first) == 1 + 30
            assert sum(len(files) for _, files in first) == 60
            down(lan, plan)


def test_down_leaves_nothing(lan: Lan, instance: Plan, tmp_path: Path) -> None:
    lan.all(spread, ["d"])
    down(lan, instance)
    for host in lan.hosts:
        assert host.call(mounts.mount_at, POINT) is None
        assert host.call(supervisor.find, TOKEN) == []
        assert host.run("ss", "-Hltn") == ""
    assert [path.name for path in tmp_path.glob("disk*/*/*")] == []


def made_by_a_difficult_user() -> None:
    base = Path(POINT)
    for name in (b"a b", b"new\nline", b"\xff\xfe not UTF-8", b".meta", b"'\"$(reboot)`*?", b"\xe4" * 255):
        path = os.path.join(os.fsencode(POINT), name)
        os.mkdir(path)
        with open(os.path.join(path, b"f"), "wb") as file:
            file.write(name)
    plain = base / "plain"
    plain.write_bytes(b"data")
    os.setxattr(plain, "user.note", bytes(range(256)))
    for number in range(150):  # more than GlusterFS's own limit
        os.link(plain, base / f"link{number}")
    os.symlink("/etc/passwd", base / "out")
    os.symlink("plain", base / "in")
    with open(base / "holes", "wb") as file:
        file.seek(1 << 30)
        file.write(b"end")
    os.utime(plain, ns=(1_234_567_890_123_456_789, 1_111_111_111_987_654_321))
    plain.chmod(0o640)
    os.chown(plain, 2001, 2002)
    os.mkfifo(base / "fifo")


def seen_of_a_difficult_user() -> dict[str, Any]:
    base, directories = Path(POINT), []
    for name in os.listdir(os.fsencode(POINT)):
        if os.path.isdir(os.path.join(os.fsencode(POINT), name)):
            with open(os.path.join(os.fsencode(POINT), name, b"f"), "rb") as file:
                assert file.read() == name
            directories.append(name)
    status = os.stat(base / "plain")
    with open(base / "holes", "rb") as file:
        first_data = os.lseek(file.fileno(), 0, os.SEEK_DATA)
    return {
        "directories": directories,
        "data": first_data,
        "xattr": os.getxattr(base / "plain", "user.note"),
        "links": status.st_nlink,
        "same": os.stat(base / "link149").st_ino == status.st_ino,
        "mtime": status.st_mtime_ns,
        "mode": oct(status.st_mode),
        "owner": (status.st_uid, status.st_gid),
        "out": os.readlink(base / "out"),
        "blocks": os.stat(base / "holes").st_blocks * 512 < 1 << 20,
    }


def test_what_users_put_on_one_node_is_there_on_another(lan: Lan, instance: Plan) -> None:
    lan.hosts[0].call(made_by_a_difficult_user)
    seen = lan.hosts[2].call(seen_of_a_difficult_user)
    assert len(seen.pop("directories")) == 6
    assert seen.pop("data") > 1 << 29
    assert seen == {
        "xattr": bytes(range(256)), "links": 151, "same": True, "mtime": 1_111_111_111_987_654_321,
        "mode": "0o100640", "owner": (2001, 2002), "out": "/etc/passwd", "blocks": True,
    }  # fmt: skip


def test_acls_hold_on_another_node(lan: Lan, instance: Plan) -> None:
    lan.hosts[0].call(write, f"{POINT}/secret", b"s")
    lan.hosts[0].run("chmod", "600", f"{POINT}/secret")
    as_user = ("setpriv", "--reuid=2001", "--regid=2001", "--clear-groups", "cat", f"{POINT}/secret")
    assert "Permission denied" in lan.hosts[1].run(*as_user, check=False)
    lan.hosts[0].run("setfacl", "-m", "u:2001:r", f"{POINT}/secret")
    assert lan.hosts[1].run(*as_user) == "s"


def test_a_change_is_seen_by_the_others_at_once(lan: Lan, instance: Plan) -> None:
    first, second = lan.hosts[:2]
    path = f"{POINT}/shared"
    for number in range(50):
        data = f"{number}".encode() * (number + 1)
        first.call(write, path, data)
        assert second.call(read, path) == data
        assert second.call(os.path.getsize, path) == len(data)
        second.call(os.rename, path, f"{path}.old")
        assert not first.call(os.path.exists, path)
        first.call(os.unlink, f"{path}.old")
        assert not second.call(os.path.exists, f"{path}.old")


def test_what_was_read_before_is_not_shown_again_when_another_node_has_changed_it(
    lan: Lan, instance: Plan
) -> None:
    path = f"{POINT}/state"
    for number in range(
        10
    ):  # of the same size each time: the kernel itself drops pages of a file whose size changed
        data = b"%04d" % number
        lan.hosts[number % 3].call(write, path, data)
        assert [host.call(read, path) for host in lan.hosts] == [data] * 3


def open_for_long(path: str) -> None:
    globals()["_kept"] = open(path, "r+b", buffering=0)  # noqa: SIM115 - it stays open between calls


def write_kept(data: bytes, offset: int) -> None:
    globals()["_kept"].seek(offset)
    globals()["_kept"].write(data)


def test_nodes_write_parts_of_one_file_at_once(lan: Lan, instance: Plan) -> None:
    lan.hosts[0].call(write, f"{POINT}/one", b"")
    for host in lan.hosts:
        host.call(open_for_long, f"{POINT}/one")
    expected = b""
    for number in range(60):  # several writers to each page
        data = b"%04d" % number * 250
        lan.hosts[number % 3].call(write_kept, data, len(expected))
        expected += data
    for host in lan.hosts:
        assert host.call(read, f"{POINT}/one") == expected


def lock(path: str, kind: str) -> bool:
    import fcntl

    file = open(path, "r+b")  # noqa: SIM115 - held until the host goes
    globals().setdefault("_locks", []).append(file)
    try:
        getattr(fcntl, kind)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", ["lockf", "flock"])
def test_a_lock_of_one_node_is_held_against_another(lan: Lan, instance: Plan, kind: str) -> None:
    lan.hosts[0].call(write, f"{POINT}/locked", b"x")
    assert lan.hosts[0].call(lock, f"{POINT}/locked", kind)
    assert not lan.hosts[1].call(lock, f"{POINT}/locked", kind)


def try_client(plan: Plan, name: str, text: str) -> str:
    """What a client with the volume file `text` gets from creating a file. As root: from a privileged port."""
    other = "/run/other"
    service = glusterfs.mount(plan, name, KEYS).service
    assert service
    service = dataclasses.replace(
        service,
        name="other client",
        argv=(*service.argv[:-1], other),
        ready=Mounted(other, "fuse.glusterfs"),
        files=(File(service.files[0].path, text),),
    )
    mounts.make_point(other)
    try:
        start(plan, (service,))
        result, _ = outcome(f"{other}/from-{name}")
    except NodeError:
        result = "refused"
    mounts.unmount(other, deadline_s=10)
    mounts.remove_point(other)
    return result


@pytest.mark.parametrize("how", ["wrong password", "no password", "other user"])
def test_a_client_without_the_password_is_refused(lan: Lan, how: str) -> None:
    plan = make(lan.names)
    lan.all(furnish, plan)
    lan.all(prepare, plan)
    lan.all(serve, plan)
    text = glusterfs.client_volume(plan, KEYS)
    forged = {
        "wrong password": text.replace(KEYS.authentication, "5ecret"),
        "no password": "\n".join(line for line in text.splitlines() if "option username" not in line),
        "other user": text.replace('option username "beeond"', 'option username "root"'),
    }[how]
    assert forged != text
    assert lan.hosts[1].call(try_client, plan, lan.hosts[1].name, forged) in {"refused", "ENOTCONN"}
    assert lan.hosts[1].call(try_client, plan, lan.hosts[1].name, text) == "done"


def contents(directory: str) -> bytes:
    return b"".join(path.read_bytes() for path in Path(directory).rglob("*") if path.is_file())


def test_the_password_is_in_the_volume_files_only(lan: Lan, instance: Plan) -> None:
    secret = KEYS.authentication.encode()
    host = lan.hosts[0]
    assert secret in host.call(read, f"{RUN}/jobs/7/client.vol")
    assert host.run("find", f"{RUN}/jobs/7", "-name", "*.vol", "-perm", "/077") == ""
    assert secret not in host.call(contents, f"{RUN}/jobs/7/logs")
    assert KEYS.authentication not in host.run(
        "sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ", check=False
    )


@pytest.mark.parametrize("name", [".meta", ".meta/graphs/active", ".gfid", ".glusterfs"])
def test_the_client_shows_nothing_of_its_inside_to_users(lan: Lan, instance: Plan, name: str) -> None:
    assert not lan.hosts[0].call(os.path.lexists, f"{POINT}/{name}")


def file_names(_name: str) -> set[str]:
    return {path.name for path in Path(POINT).iterdir()}


def test_no_node_goes_on_without_a_brick(lan: Lan, instance: Plan) -> None:
    lan.all(spread, [f"d{number}" for number in range(5)])
    names = lan.hosts[0].call(file_names, "")
    lan.hosts[2].call(kill, "brick", signal.SIGKILL)
    for host in lan.hosts:
        wait_for(lambda host=host: host.call(mounts.mount_at, POINT) is None, 5)  # type: ignore[misc]
    # What the Epilog does then: start again what has died, and find everything in its place.
    lan.hosts[2].call(serve, lan.hosts[2].name, instance)
    lan.all(mount, instance)
    assert lan.all(file_names) == [names] * 3
    down(lan, instance)


def test_a_silent_node_is_given_up_in_time(lan: Lan, instance: Plan) -> None:
    lan.all(spread, [f"d{number}" for number in range(5)])
    lan.cut(lan.hosts[2])
    began = time.monotonic()
    wait_for(lambda: lan.hosts[0].call(mounts.mount_at, POINT) is None, 45)
    assert time.monotonic() - began > 5  # a node that is only busy is not given up


def test_a_killed_client_is_unmounted(lan: Lan, instance: Plan) -> None:
    host = lan.hosts[0]
    host.call(kill, "client", signal.SIGKILL)
    assert host.call(outcome, f"{POINT}/x")[0] in {
        "ENOTCONN",
        "ECONNABORTED",
    }  # the latter while it is ending
    host.call(unmount, host.name, instance)
    assert host.call(mounts.mount_at, POINT) is None


def sit_in(point: str) -> int:
    """Start a process in `point` that reads all files there once it is told to."""
    script = "echo ready; read go; exec cat *"
    child = subprocess.Popen(
        ["sh", "-c", script], cwd=point, stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=2001
    )
    assert child.stdout
    child.stdout.readline()
    globals()["_sitter"] = child
    return child.pid


def go() -> None:
    globals()["_sitter"].stdin.write(b"\n")
    globals()["_sitter"].stdin.close()


def waits(pid: int) -> bool:
    return Path(f"/proc/{pid}/wchan").read_text().startswith(("fuse", "request_wait", "__fuse"))


def timed_unmount(plan: Plan) -> tuple[list[str], float]:
    began = time.monotonic()
    return unmount("", plan), time.monotonic() - began


@pytest.mark.parametrize("part", ["brick", "client"])
def test_unmounting_does_not_wait_for_a_frozen_server(lan: Lan, instance: Plan, part: str) -> None:
    first, *others = lan.hosts
    for number in range(9):
        first.call(write, f"{POINT}/f{number}", b"x")
    pid = first.call(sit_in, POINT)
    for host in others if part == "brick" else (first,):
        host.call(kill, part, signal.SIGSTOP)
    first.call(go)
    wait_for(lambda: first.call(waits, pid), 20)
    ended, seconds = first.call(timed_unmount, instance)
    assert any(f"(pid {pid}, " in name for name in ended)
    assert seconds < 15
    lan.all(stop)


@pytest.mark.parametrize("kind", ["directory", "image"])
def test_a_retained_instance_serves_the_same_data_again(lan: Lan, kind: str) -> None:
    plan = make(lan.names, targets=2, kind=kind)
    up(lan, plan)
    lan.all(spread, ["d"])
    before = lan.hosts[0].call(listed, "")
    lan.all(unmount, plan)
    lan.all(stop)
    lan.all(retain, plan)
    lan.all(attach, plan)
    lan.all(serve, dataclasses.replace(plan, block=24016))
    lan.all(mount, dataclasses.replace(plan, block=24016))
    assert lan.all(listed) == [before] * 3
    assert lan.hosts[1].call(read, f"{POINT}/d-10.99.0.3.file") == b"10.99.0.3"
    down(lan, plan)


def retain(_name: str, plan: Plan) -> None:
    storage.detach(plan, deadline_s=10)
    storage.set_phase(plan, "retained")


def attach(_name: str, plan: Plan) -> None:
    storage.attach(plan, deadline_s=10)


def test_a_taken_port_is_told_with_the_service_and_the_cause(lan: Lan) -> None:
    plan = make(lan.names)
    lan.all(furnish, plan)
    lan.all(prepare, plan)
    host = lan.hosts[0]
    host.call(take_port, host.name, plan.block)
    with pytest.raises(
        NodeError, match=r"glusterfs brick-0 ended while it started: .*Address already in use"
    ):
        host.call(serve, host.name, plan)


def take_port(address: str, port: int) -> None:
    globals()["_taken"] = socket.create_server((address, port))


def test_three_nodes_are_up_in_a_moment(lan: Lan, record_property: Callable[[str, object], None]) -> None:
    plan = make(lan.names)
    taken = []
    for _ in range(3):  # the best of them says how long it takes, the others how busy the machine is
        taken.append(up(lan, plan))
        down(lan, plan)
    served, mounted = min(taken, key=sum)
    record_property("seconds", {"bricks": served, "mounts": mounted})
    assert served + mounted < 1
