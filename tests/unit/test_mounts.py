"""The mount table, mount points, and unmounting what real processes hold."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import mounts
from beeond_ctl.aside import tried
from beeond_ctl.errors import NodeError
from tests.testbed import host
from tests.unit.holding import ending, started
from tests.unit.root_directory import needs_root, root_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_root

USER = 2001
"""Whose job it is; nobody of that number need be known."""


@pytest.fixture
def base() -> Iterator[Path]:
    with root_directory() as path:
        yield path


@pytest.fixture
def mounted(base: Path) -> str:
    """A bind mount of BASE/source, on a device that much else is on, too."""
    (base / "source").mkdir()
    point = str(base / "point")
    mounts.make_point(point)
    mounts.bind(str(base / "source"), point)
    return point


def test_a_mount_is_found_whatever_its_name(base: Path) -> None:
    point = base / "a b\\\t\n\r\f\x85\udcff"
    point.mkdir()
    mounts.mount("-t", "tmpfs", "tmpfs", os.fsencode(point).decode(errors="surrogateescape"))
    found = mounts.mount_at(str(point))
    assert found is not None
    assert found.fstype == "tmpfs"
    assert [mount.point for mount in mounts.below(str(base))] == [str(point)]
    assert mounts.below(str(base)[:-1]) == []
    assert mounts.unmount(str(point), deadline_s=10) == []
    assert mounts.mount_at(str(point)) is None


def test_a_bind_mount_has_no_devices_and_no_set_user_id(mounted: str) -> None:
    options = next(line for line in host.mount_table() if f" {mounted} " in line)
    assert {"nosuid", "nodev"} <= set(options.split()[5].split(","))


def test_a_mount_point_is_nobodys_until_something_is_mounted(base: Path) -> None:
    mounts.make_point(str(base / "deep/er/42"))
    assert (base / "deep/er/42").stat().st_mode & 0o777 == 0
    assert (base / "deep/er").stat().st_mode & 0o777 == 0o755
    mounts.remove_point(str(base / "deep/er/42"))
    mounts.remove_point(str(base / "deep/er/42"))
    assert not (base / "deep/er/42").exists()


def test_a_mount_point_below_a_directory_that_others_may_write_is_refused(base: Path) -> None:
    (base / "open").mkdir()
    (base / "open").chmod(0o775)
    with pytest.raises(NodeError, match=r"open may be written by others than root; run `chmod go-w"):
        mounts.make_point(str(base / "open/42"))
    (base / "theirs").mkdir()
    os.chown(base / "theirs", 2001, 0)
    with pytest.raises(NodeError, match="theirs belongs to uid 2001"):
        mounts.make_point(str(base / "theirs/42"))
    (base / "link").symlink_to(base)
    with pytest.raises(NodeError, match="link is a symbolic link"):
        mounts.make_point(str(base / "link/42"))
    assert not (base / "42").exists()


def test_a_mount_point_in_use_is_refused(mounted: str) -> None:
    with pytest.raises(NodeError, match="something is mounted there"):
        mounts.make_point(mounted)


HOLD = {
    "cwd": "import os, sys; os.chdir(sys.argv[1])",
    "file": "import sys; f = open(sys.argv[1] + '/file')",
    "directory": "import os, sys; f = os.open(sys.argv[1], os.O_RDONLY)",
    "mapping": "import sys, mmap\nwith open(sys.argv[1] + '/file') as f: m = mmap.mmap(f.fileno(), 0, prot=1)",
}


@pytest.fixture(autouse=True)
def who_is_told_to_end_is_given_time_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may be a while before it runs."""
    monkeypatch.setattr(mounts, "_TERM_S", 30.0)


def hold(point: str, how: str, *, uid: int = USER, within: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    Path(point, "file").write_text("x")
    script = HOLD[how] + "\nimport time\nprint(1, flush=True)\ntime.sleep(600)"
    return started([*within, sys.executable, "-c", script, point], uid)


@pytest.mark.parametrize("how", HOLD)
def test_who_holds_a_mount_is_named_and_ended_and_nobody_else(base: Path, mounted: str, how: str) -> None:
    holder, neighbour = hold(mounted, how), hold(str(base), how)
    with ending(holder, neighbour):
        assert [f"(pid {holder.pid}, uid {USER})" in name for name in mounts.holders(mounted)] == [True]
        ended = mounts.unmount(mounted, deadline_s=60, uid=USER)
        assert len(ended) == 1
        assert f"(pid {holder.pid}, uid {USER})" in ended[0]
        assert mounts.mount_at(mounted) is None
        assert holder.wait(60) == -15
        assert neighbour.poll() is None


HAND_OVER = """
import os, socket, sys
file = os.open(sys.argv[1] + "/file", os.O_RDONLY)
socket.send_fds(socket.socket(fileno=int(sys.argv[2])), [b"x"], [file])
"""
TAKE = """
import socket, sys, time
_, kept, _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)
assert kept
print(1, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "within", [(), ("unshare", "-m", "--propagation", "slave")], ids=["here", "elsewhere"]
)
@pytest.mark.parametrize("uid", [0, 1, 2002])
def test_who_was_handed_a_descriptor_is_named_and_lives(
    mounted: str, uid: int, within: tuple[str, ...]
) -> None:
    Path(mounted, "file").write_text("x")
    ours, theirs = socket.socketpair()
    hand = [sys.executable, "-c", HAND_OVER, mounted, str(ours.fileno())]
    subprocess.run(hand, user=USER, group=USER, check=True, pass_fds=[ours.fileno()])
    take = [*within, "setpriv", f"--reuid={uid}", sys.executable, "-c", TAKE, str(theirs.fileno())]
    daemon, holder = started(take, 0, theirs.fileno()), hold(mounted, "file")
    with ours, theirs, ending(daemon, holder):
        with pytest.raises(NodeError, match=rf"held by .*\(pid {daemon.pid}, .*\), not the job's") as caught:
            mounts.unmount(mounted, deadline_s=60, uid=USER)
        assert f"(pid {holder.pid}, uid {USER}); held by" in str(caught.value)
        assert holder.wait(60) == -15
        assert daemon.poll() is None
        assert mounts.mount_at(mounted) is None


@pytest.mark.parametrize(("uid", "ends"), [(0, False), (1, False), (65534, False), (USER, True)])
def test_where_the_user_is_not_known_no_account_of_the_system_loses_a_process(
    mounted: str, uid: int, ends: bool
) -> None:
    holder = hold(mounted, "file", uid=uid)
    with ending(holder):
        if ends:
            mounts.unmount(mounted, deadline_s=10)
        else:
            with pytest.raises(NodeError, match="not the job's"):
                mounts.unmount(mounted, deadline_s=10)
        assert (holder.poll() is not None) == ends


def test_where_the_job_is_roots_nobody_loses_a_process(mounted: str) -> None:
    holders = [hold(mounted, "file", uid=uid) for uid in (0, USER)]
    with ending(*holders):
        with pytest.raises(NodeError, match="not the job's") as caught:
            mounts.unmount(mounted, deadline_s=60, uid=0)
        assert all(f"pid {holder.pid}, " in str(caught.value) for holder in holders)
        assert [holder.poll() for holder in holders] == [None, None]


def test_of_very_many_holders_only_some_are_named(mounted: str) -> None:
    many = [subprocess.Popen(["sleep", "600"], cwd=mounted) for _ in range(20)]
    with ending(*many), pytest.raises(NodeError, match="and 12 more, not the job's") as caught:
        mounts.unmount(mounted, deadline_s=60, uid=USER)
    assert len(str(caught.value)) < 500


CONTAINED = """
import ctypes, os, sys, time
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print(1, flush=True)
sys.stdin.readline()
os.setgid(5)
os.setuid(5)
held = open(sys.argv[1] + "/file")
print(1, flush=True)
time.sleep(600)
"""


def test_a_process_in_a_container_of_the_users_is_the_users_whatever_its_number(mounted: str) -> None:
    Path(mounted, "file").write_text("x")
    holder = subprocess.Popen(
        [sys.executable, "-c", CONTAINED, mounted],
        user=USER,
        group=USER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with ending(holder):
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == b"1\n"
        for name in ("uid_map", "gid_map"):  # as newuidmap(1) writes it for /etc/subuid
            Path(f"/proc/{holder.pid}/{name}").write_text("0 100000 1000\n")
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"1\n"
        assert os.stat(f"/proc/{holder.pid}/task").st_uid == 100005
        assert f"(pid {holder.pid}, " in mounts.unmount(mounted, deadline_s=60, uid=USER)[0]
        assert holder.wait(60) == -15


def test_a_strangers_file_of_any_name_hides_no_holder(base: Path, mounted: str) -> None:
    odd = base / "\r \f\x85"
    odd.mkdir()
    stranger, holder = hold(str(odd), "mapping"), hold(mounted, "mapping")
    with ending(stranger, holder):
        assert [f"(pid {holder.pid}, uid {USER})" in name for name in mounts.holders(mounted)] == [True]


def test_a_holder_that_ignores_sigterm_is_killed(mounted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_TERM_S", 0.5)
    child = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo 1; while :; do read x; done"], cwd=mounted, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, user=USER,
    )  # fmt: skip
    assert child.stdout
    child.stdout.readline()
    assert f"(pid {child.pid}, uid {USER})" in mounts.unmount(mounted, deadline_s=60, uid=USER)[0]
    assert child.wait(60) == -9


@pytest.mark.parametrize("propagation", ["slave", "private"])  # private: unmounting here succeeds at once
def test_a_holder_in_another_mount_namespace_is_ended(mounted: str, propagation: str) -> None:
    child = hold(mounted, "cwd", within=("unshare", "-Urm", "--propagation", propagation))
    with ending(child):
        assert len(mounts.holders(mounted)) == 1
        assert f"(pid {child.pid}, uid {USER})" in mounts.unmount(mounted, deadline_s=60, uid=USER)[0]
        assert mounts.mount_at(mounted) is None
        assert child.wait(60) == -15


def test_what_is_mounted_at_a_second_place_is_not_held_by_who_uses_it_there(base: Path, mounted: str) -> None:
    (base / "second").mkdir()
    mounts.bind(str(base / "source"), f"{base}/second")
    neighbours = [
        hold(f"{base}/second", "file"),
        hold(f"{base}/second", "file", within=("unshare", "-Urm", "--propagation", "private")),
    ]
    with ending(*neighbours):
        assert mounts.unmount(mounted, deadline_s=60, uid=USER) == []
        assert [neighbour.poll() for neighbour in neighbours] == [None, None]


def test_what_a_user_mounted_inside_goes_with_it(mounted: str) -> None:
    for name in ("a", "a/b"):
        Path(mounted, name).mkdir(parents=True)
        mounts.mount("-t", "tmpfs", "tmpfs", f"{mounted}/{name}")
    mounts.bind(mounted, mounted)  # one on top of the other
    mounts.unmount(mounted, deadline_s=10)
    assert mounts.below(mounted) == []


def test_what_a_user_mounted_on_it_is_taken_away_alone(mounted: str) -> None:
    os.mkdir(f"{mounted}/sub")
    for point in (f"{mounted}/sub", mounted):
        mounts.mount("-t", "tmpfs", "theirs", point)
    assert mounts.uncover(mounted, deadline_s=10) == [f"theirs on {mounted}", f"theirs on {mounted}/sub"]
    assert [mount.point for mount in mounts.below(mounted)] == [mounted]
    assert os.path.isdir(f"{mounted}/sub")
    assert mounts.uncover(mounted, deadline_s=10) == []


def test_no_link_that_a_user_puts_in_the_way_is_followed(base: Path, mounted: str) -> None:
    (base / "foreign/sub").mkdir(parents=True)
    os.makedirs(f"{mounted}/x/sub")
    for point in (f"{base}/foreign/sub", f"{mounted}/x/sub"):
        mounts.mount("-t", "tmpfs", "theirs", point)
    found = mounts.below(mounted)[-1]
    os.rename(f"{mounted}/x", f"{mounted}/y")
    os.symlink(base / "foreign", f"{mounted}/x")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):  # as it was named a moment ago
        tried_in_child(found.point)
    assert mounts.mount_at(f"{base}/foreign/sub") is not None
    mounts.unmount(mounted, deadline_s=10)  # finds it where it is now
    assert mounts.below(mounted) == []
    assert mounts.mount_at(f"{base}/foreign/sub") is not None


UNMOUNT = """
import sys
from beeond_ctl import mounts
mounts._umount(sys.argv[1], 0)
print(1, flush=True)
sys.stdin.read()
"""


def test_who_has_unmounted_something_keeps_nothing_busy_until_it_ends(mounted: str) -> None:
    os.mkdir(f"{mounted}/sub")
    mounts.mount("-t", "tmpfs", "theirs", f"{mounted}/sub")
    with ending(started([sys.executable, "-c", UNMOUNT, f"{mounted}/sub"], 0, stdin=subprocess.PIPE)):
        tried_in_child(mounted)
    assert mounts.mount_at(mounted) is None


def tried_in_child(point: str) -> None:
    if wrong := tried(lambda: mounts._umount(point, 0), within_s=10):
        raise OSError(wrong)


def test_what_nobody_is_seen_to_hold_is_tried_again_for_a_while(
    mounted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = os.open(
        mounted, os.O_RDONLY
    )  # as the kernel holds what it still has to close: it is no process's
    take_off, answers = mounts._take_off, list[str]()

    def count(mounted: mounts.MountInfo, flags: int, within_s: float) -> str:
        if len(answers) == 2 * mounts._TRIES:
            os.close(directory)
        answers.append(take_off(mounted, flags, within_s))
        return answers[-1]

    monkeypatch.setattr(mounts, "_take_off", count)
    monkeypatch.setattr(mounts, "_NOBODY_S", 60.0)
    monkeypatch.setattr(mounts, "_UNSEEN_S", 0.05)
    assert mounts.unmount(mounted, deadline_s=60) == []
    assert mounts.mount_at(mounted) is None
    assert answers[-1] == ""
    assert all("busy" in answer for answer in answers[:-1])


def test_a_mount_that_cannot_be_undone_is_detached_and_told(
    mounted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "_NOBODY_S", 2.0)
    directory = os.open(mounted, os.O_RDONLY)  # we hold it ourselves, and do not end ourselves
    try:
        began = time.monotonic()
        with pytest.raises(NodeError, match=r"could not be unmounted .*busy.*was detached"):
            mounts.unmount(mounted, deadline_s=60)
        assert time.monotonic() - began < 10
        assert mounts.mount_at(mounted) is None
    finally:
        os.close(directory)


MOUNT_AGAIN = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
for number in range(10**6):
    done = libc.mount(b"again", sys.argv[1].encode(), b"tmpfs", 0, b"")
    if number == 0:
        assert done == 0
        print(1, flush=True)
    time.sleep(0.001)  # less than unmounting takes
"""


@contextmanager
def mounting_again_and_again(mounted: str) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody who does so below `mounted`; what the caller does about it must give up."""
    os.mkdir(f"{mounted}/sub")
    again = started([sys.executable, "-c", MOUNT_AGAIN, f"{mounted}/sub"], 0)
    with ending(again):
        yield again


@contextmanager
def giving_up() -> Iterator[None]:
    """What is done with a deadline of 2 s ends in time, with what is wrong."""
    began = time.monotonic()
    with pytest.raises(NodeError, match=r"/point/sub could not be unmounted \(out of time"):
        yield
    assert time.monotonic() - began < 6


def test_who_mounts_again_and_again_does_not_keep_us(mounted: str) -> None:
    with mounting_again_and_again(mounted) as again:
        with giving_up():
            mounts.unmount(mounted, deadline_s=2, uid=USER)
        assert again.poll() is None
        time.sleep(0.1)  # it goes on
        assert mounts.below(mounted) == []
        assert not os.path.lexists(mounted)


def test_who_covers_it_again_and_again_does_not_keep_us(mounted: str) -> None:
    with mounting_again_and_again(mounted):
        with giving_up():
            mounts.uncover(mounted, deadline_s=2)
        assert mounts.below(mounted)[0].point == mounted
    subprocess.run(["umount", "--lazy", mounted], check=True)
