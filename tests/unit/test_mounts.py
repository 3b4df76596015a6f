"""The mount table, mount points, and unmounting what real processes hold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import mounts
from beeond_ctl.aside import tried
from beeond_ctl.errors import NodeError
from tests.testbed import host
from tests.unit.root_directory import needs_root, root_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_root


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


def hold(point: str, how: str) -> subprocess.Popen[bytes]:
    Path(point, "file").write_text("x")
    script = HOLD[how] + "\nimport time\nprint(1, flush=True)\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", script, point], stdout=subprocess.PIPE)
    assert child.stdout
    assert child.stdout.readline() == b"1\n"
    return child


@pytest.mark.parametrize("how", HOLD)
def test_who_holds_a_mount_is_named_and_ended_and_nobody_else(base: Path, mounted: str, how: str) -> None:
    holder, neighbour = hold(mounted, how), hold(str(base), how)
    try:
        assert [f"(pid {holder.pid}, root)" in name for name in mounts.holders(mounted)] == [True]
        ended = mounts.unmount(mounted, deadline_s=10)
        assert len(ended) == 1
        assert f"(pid {holder.pid}, root)" in ended[0]
        assert mounts.mount_at(mounted) is None
        assert holder.wait(10) == -15
        assert neighbour.poll() is None
    finally:
        for child in (holder, neighbour):
            child.kill()
            child.wait()


def test_a_strangers_file_of_any_name_hides_no_holder(base: Path, mounted: str) -> None:
    odd = base / "\r \f\x85"
    odd.mkdir()
    stranger, holder = hold(str(odd), "mapping"), hold(mounted, "mapping")
    try:
        assert [f"(pid {holder.pid}, root)" in name for name in mounts.holders(mounted)] == [True]
    finally:
        for child in (stranger, holder):
            child.kill()
            child.wait()


def test_a_holder_that_ignores_sigterm_is_killed(mounted: str) -> None:
    child = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo 1; while :; do read x; done"], cwd=mounted, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout
    child.stdout.readline()
    assert f"(pid {child.pid}, root)" in mounts.unmount(mounted, deadline_s=10)[0]
    assert child.wait(10) == -9


def test_a_holder_in_another_mount_namespace_is_ended(mounted: str) -> None:
    child = subprocess.Popen(
        ["unshare", "-m", "--propagation", "slave", "sh", "-c", f"cd {mounted} && echo 1 && exec sleep 60"],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout
        child.stdout.readline()
        assert len(mounts.holders(mounted)) == 1
        mounts.unmount(mounted, deadline_s=10)
        assert mounts.mount_at(mounted) is None
    finally:
        child.kill()
        child.wait()


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


def tried_in_child(point: str) -> None:
    if wrong := tried(lambda: mounts._umount(point, 0), within_s=10):
        raise OSError(wrong)


def test_a_mount_that_cannot_be_undone_is_detached_and_told(mounted: str) -> None:
    directory = os.open(mounted, os.O_RDONLY)  # we hold it ourselves, and do not end ourselves
    try:
        began = time.monotonic()
        with pytest.raises(NodeError, match=r"could not be unmounted .*busy.*was detached"):
            mounts.unmount(mounted, deadline_s=10)
        assert time.monotonic() - began < 10
        assert mounts.mount_at(mounted) is None
    finally:
        os.close(directory)
