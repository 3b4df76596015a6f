"""Deleting under faults: what happens at the worst moment."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from beeond_ctl.staging.job import Identity, Job
from beeond_ctl.staging.local import copy_local
from tests.faults import trees
from tests.faults.injected import ERRNOS, RUNS, children_with, frozen_child

USER = Identity(65534, 65534, (65534,))


@pytest.mark.root
def test_nothing_outside_is_opened_up_through_a_link_that_takes_a_directorys_place(
    area: Path, injector: Path
) -> None:
    """A neighbour who may write there swaps a closed directory for a link, just before it would be opened up."""
    area.chmod(0o755)
    shutil.copy(injector, area / "inject.so")  # where the user can read it
    (area / "inject.so").chmod(0o755)
    for name in ("source", "target/gone/deep", "outside"):
        (area / name).mkdir(parents=True)
    subprocess.run(
        ["chown", "-R", f"{USER.uid}:{USER.gid}", *map(area.joinpath, ("source", "target", "outside"))],
        check=True,
    )
    (area / "outside").chmod(0o500)
    (area / "target/gone").chmod(0)
    (area / "journal").mkdir()
    job = Job(bytes(area / "source"), bytes(area / "target"), ("delete",))
    transfer = threading.Thread(target=lambda: copy_local(job, USER, journal_dir=area / "journal", workers=1))
    with children_with(LD_PRELOAD=str(area / "inject.so"), FAULT="unlock:1:-3"):
        transfer.start()
        pid = frozen_child()
        (area / "target/gone").rename(area / "aside")
        (area / "target/gone").symlink_to(area / "outside")
        os.kill(pid, signal.SIGCONT)
        transfer.join()
    assert (area / "outside").stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize("error", [0, errno.EIO, errno.EACCES])
def test_a_name_that_the_scanner_has_tried_does_not_stay(area: Path, injector: Path, error: int) -> None:
    trees.build(bytes(area / "source"), 1, entries=10)
    (area / "journal").mkdir()
    job = Job(bytes(area / "source"), bytes(area / "target"))

    def run() -> bool:
        return copy_local(job, journal_dir=area / "journal", workers=1).proved

    with children_with(LD_PRELOAD=str(injector), FAULT=f"unlink:1:{error}"):
        assert not run()  # the copier that removes it then has the same fault
    assert len(trees.leftovers(bytes(area / "target"))) == (not error)
    assert run()
    assert trees.leftovers(bytes(area / "target")) == []
    assert trees.snapshot(bytes(area / "target")) == trees.snapshot(bytes(area / "source"))


@pytest.mark.parametrize("native", ["0", "1"])
def test_wherever_a_listing_ends_early_what_is_wanted_stays(area: Path, injector: Path, native: str) -> None:
    trees.build(bytes(area / "source"), 2, entries=30)
    (area / "journal").mkdir()
    job = Job(bytes(area / "source"), bytes(area / "target"), ("update", "delete"))
    way = {"BEEOND_CTL_NATIVE": native}
    assert copy_local(job, journal_dir=area / "journal", workers=1).proved
    wanted, proved = trees.snapshot(bytes(area / "source")), []
    for nth in range(1, 90, 2):
        (area / "target/surplus").mkdir(parents=True, exist_ok=True)
        (area / "target/surplus/x").write_text("x")
        with children_with(**way, LD_PRELOAD=str(injector), FAULT=f"list:{nth}:{errno.ENOENT}"):
            proved.append(copy_local(job, journal_dir=area / "journal", workers=1).proved)
        assert wanted.keys() <= trees.snapshot(bytes(area / "target")).keys(), nth
    assert {True, False} <= set(proved)
    assert copy_local(job, journal_dir=area / "journal", workers=1).proved
    assert trees.snapshot(bytes(area / "target")) == wanted


def change(area: Path, rng: random.Random) -> None:
    """Give the destination surplus at random places, some of it for what goes at the source."""
    dirs = [Path(each) for each, _, _ in os.walk(area / "target")]
    for number in range(4):
        trees.build(bytes(rng.choice(dirs) / f"surplus{number}"), rng.randrange(1 << 30), entries=15)
    files = sorted(path for path in (area / "source").rglob("*") if not path.is_dir() or path.is_symlink())
    for path in rng.sample(files, 5):
        path.unlink()
        if rng.random() < 0.5:
            trees.write(bytes(path), rng)
            os.utime(path, (time.time() - 60,) * 2)  # else what is at the destination is newer, and stays


@pytest.mark.parametrize("seed", range(RUNS))
def test_wherever_deleting_fails_or_is_killed_only_surplus_goes_and_the_next_run_ends_it(
    seed: int, area: Path, injector: Path
) -> None:
    rng = random.Random(seed)
    trees.build(bytes(area / "source"), seed)
    (area / "journal").mkdir()
    job = Job(bytes(area / "source"), bytes(area / "target"), ("delete", *rng.choice(((), ("update",)))))
    assert copy_local(job, journal_dir=area / "journal", workers=2).proved
    old = trees.files_in(bytes(area / "target"))
    change(area, rng)
    wanted, new = trees.snapshot(bytes(area / "source")), trees.files_in(bytes(area / "source"))
    call, nth = rng.choice(("unlink", "unlink", "unlink", "stat", "open", "chmod")), rng.randrange(1, 60)
    fault = f"{call}:{nth}:{rng.choice((0, 0, *ERRNOS))}"
    sticky = {"FAULT_STICKY": "1"} if rng.random() < 0.3 else {}
    with children_with(LD_PRELOAD=str(injector), FAULT=fault, **sticky):
        summary = copy_local(job, journal_dir=area / "journal", workers=2)
    assert trees.snapshot(bytes(area / "source")) == wanted, fault
    there = trees.files_in(bytes(area / "target"))
    for name, content in new.items():
        if summary.proved or name in old:
            assert there[name] in ((content,) if summary.proved else (content, old.get(name))), (fault, name)
    assert summary.proved == (not summary.problems()), fault
    if not summary.proved:
        again = copy_local(job, journal_dir=area / "journal", workers=2)
        assert again.proved, (fault, again.problems())
    assert trees.leftovers(bytes(area / "target")) == [], fault
    assert trees.snapshot(bytes(area / "target")) == wanted, fault
