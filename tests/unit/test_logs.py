"""The place of services' logs, on real mounts."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import logs
from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "logs"
    subprocess.run(["umount", "-lq", tmp_path / "logs"], check=False)


def fill(path: Path) -> int:
    """Log until there is no room left; how much that was."""
    with open(path, "ab", buffering=0) as file:
        try:
            while True:
                file.write(b"no space left\n" * 4000)
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017
    return path.stat().st_size


def test_logs_take_no_more_than_their_size_and_none_of_what_is_around_them(place: Path) -> None:
    logs.make(place)
    assert fill(place / "brick-0.log") <= logs.SIZE
    assert fill(place / "client.log") == 0
    assert os.stat(place).st_dev != os.stat(place.parent).st_dev
    assert os.stat(place).st_mode & 0o777 == 0o700


def test_what_a_server_says_that_is_started_again_is_seen_and_what_went_wrong_first_stays(
    place: Path,
) -> None:
    logs.make(place)
    (place / "brick-0.log").write_text("the first error\n")
    with open(place / "brick-0.log", "ab", buffering=0) as brick:
        fill(place / "brick-0.log")
        logs.make(place)
        (place / "client.log").write_text("cannot mount")
        brick.write(b"signal received: 11\n")
    assert (place / "client.log").read_text() == "cannot mount"
    text = (place / "brick-0.log").read_text()
    assert text.startswith("the first error\n")
    assert text.endswith("signal received: 11\n")


def test_short_logs_stay_as_they_are(place: Path) -> None:
    logs.make(place)
    (place / "brick-0.log").write_bytes(bytes(1024**2))
    logs.make(place)
    assert (place / "brick-0.log").stat().st_size == 1024**2


def test_logs_go_even_while_somebody_has_one_open(place: Path) -> None:
    logs.remove(place)
    logs.make(place)
    with open(place / "brick-0.log", "w"):
        logs.remove(place)
        assert not os.path.ismount(place)
        place.rmdir()
    logs.remove(place)


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"gone/logs: no place for the services' logs can be made"):
        logs.make(tmp_path / "gone" / "logs")
