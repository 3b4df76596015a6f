"""Further names of files where the destination makes no hard links."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.staging.wire import PIECE
from tests.faults import trees
from tests.faults.injected import children_with
from tests.faults.test_shared_scan import Two

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("native", ["0", "1"])
def test_names_that_cannot_be_links_are_copied_by_whoever_is_idle_and_in_pieces(
    area: Path, injector: Path, native: str
) -> None:
    """One copier with one work would take too long for what may be any number of bytes."""
    (area / "source" / "dir").mkdir(parents=True)
    (area / "source" / "some").write_bytes(os.urandom(9 << 20))
    with (area / "source" / "big").open("wb") as file:
        file.write(b"x")
        file.truncate(2 * PIECE + 1)
    (area / "source" / "link").symlink_to("some")
    for number in range(5):
        os.link(area / "source" / "some", area / "source" / "dir" / f"some{number}")
    for name in ("big", "link"):
        os.link(area / "source" / name, area / "source" / "dir" / name, follow_symlinks=False)
    fault = {"FAULT": f"link:1:{errno.EPERM}", "FAULT_STICKY": "1", "BEEOND_CTL_NATIVE": native}
    with children_with(LD_PRELOAD=str(injector), **fault):
        two = Two(area)
        summary = two.run()
        assert summary.proved, summary.problems()
        assert (summary.copied, summary.skipped, summary.failed) == (10, 0, 0)
        assert summary.notes["links"].count == 7
        assert two.kinds["apart"] == 6
        assert two.kinds["piece"] == 2 * 3
        source, target = (trees.files_in(os.fsencode(area / each)) for each in ("source", "target"))
        assert source == target
        assert (area / "target" / "dir" / "link").is_symlink()
        assert trees.leftovers(os.fsencode(area / "target")) == []
        assert Two(area).run().proved
