"""What a probe of the mount says where the user is at work in it, too."""

from __future__ import annotations

import errno
import os
import subprocess
from functools import partial
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.errors import NodeError
from beeond_ctl.lifecycle import fault, probe
from tests.unit.root_directory import needs_root, root_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs_root

NODE = "n1"
MARK = ".beeond-probe-n1"


@pytest.fixture
def point() -> Iterator[Path]:
    """A file system that is soon full."""
    with root_directory() as top:
        point = top / "mount"
        point.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=8", "tmpfs", str(point)], check=True
        )
        yield point


def fill(point: Path) -> None:
    for number in range(8):
        (point / str(number)).touch()


def fail(point: Path, how: str) -> str:
    """What the probe says when the user has done that."""
    write, check = partial(probe.write, point, NODE), partial(probe.check, point, NODE)
    action = write
    match how:
        case "made before":
            (point / MARK).mkdir()
        case "full":
            with pytest.raises(OSError, match="No space"):
                fill(point)
        case "nothing is mounted":
            subprocess.run(["umount", str(point)], check=True)
        case _:
            action = check
            write()
            tamper(point, how)
    with pytest.raises((NodeError, OSError)) as caught:
        probe.excusing(action)
    return str(caught.value)


def tamper(point: Path, how: str) -> None:
    match how:
        case "renamed":
            (point / MARK).rename(point / "elsewhere")
        case "a link":
            (point / MARK).rename(point / "elsewhere")
            (point / MARK).symlink_to("elsewhere")
        case "a file":
            (point / MARK).rename(point / "elsewhere")
            (point / MARK).touch()
        case "a pipe":
            (point / MARK / "mark").unlink()
            os.mkfifo(point / MARK / "mark")
        case "a foreign one":
            os.chown(point / MARK, 65534, 65534)
        case "more in it":
            (point / MARK / "more").touch()


@pytest.mark.parametrize(
    "how",
    ["made before", "full", "renamed", "a link", "a file", "a pipe", "a foreign one", "more in it"],
)
def test_what_a_user_can_do_to_a_probe_is_known_by_how_it_is_told(point: Path, how: str) -> None:
    assert fail(point, how).endswith(probe.PERHAPS_THE_USERS)


@pytest.mark.parametrize(
    ("number", "excused"), [(errno.EINVAL, True), (errno.EIO, False), (errno.ENOTCONN, False)]
)
def test_what_no_lost_server_says_may_be_the_users_doing(number: int, *, excused: bool) -> None:
    def action() -> None:
        raise OSError(number, "said so", "/mnt")

    with pytest.raises((NodeError, OSError)) as caught:
        probe.excusing(action)
    assert str(caught.value).endswith(probe.PERHAPS_THE_USERS) == excused


def test_a_file_system_that_is_gone_is_none_of_the_users_doing(point: Path) -> None:
    assert not fail(point, "nothing is mounted").endswith(probe.PERHAPS_THE_USERS)


def test_a_file_system_that_stays_full_is_told_so(point: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        fill(point)
    with pytest.raises(NodeError, match="is full; make room"):
        probe.insist(point, 1)


def test_a_device_that_is_full_answers(point: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        fill(point)
    fault._write(point)
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)
    with pytest.raises(OSError, match="Read-only"):
        fault._write(point)
