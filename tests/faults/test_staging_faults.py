"""Staging under faults: whatever fails, wherever it is killed, nothing is lost, half-written or reported wrongly."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.staging import _native
from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.journal import _read
from beeond_ctl.staging.local import copy_local
from beeond_ctl.staging.worker import serve
from tests.faults import trees
from tests.faults.injected import (
    CALLS,
    ERRNOS,
    RUNS,
    assert_same,
    await_end,
    children_after,
    children_with,
    each_time_a_child_stops,
    frozen_child,
)
from tests.unit import copying
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beeond_ctl.staging.transfer import Summary

# By Python alone; by the compiled part, with files that have no name until they are proved, where Linux is older, and
# where there is no such thing; and there into a place that is removed as a whole if not all is proved.
WAYS = (
    {"BEEOND_CTL_NATIVE": "0"},
    {"BEEOND_CTL_NATIVE": "1"},
    {"BEEOND_CTL_NATIVE": "1", "FAULT_NO_EMPTY_PATH": "1"},
    {"BEEOND_CTL_NATIVE": "1", "FAULT_NO_NAMELESS": "1"},
    {"BEEOND_CTL_NATIVE": "1", "FAULT_NO_NAMELESS": "1", "ALL_OR_NOTHING": "1"},
)
RESUMABLE = WAYS[:-1]


def stage(area: Path, way: Mapping[str, str] | None = None) -> Summary:
    """One run; of all or nothing, nothing is left when it is not proved."""
    journal = area / "journal"
    journal.mkdir(exist_ok=True)
    job = Job(
        os.fsencode(area / "source"),
        os.fsencode(area / "target"),
        all_or_nothing="ALL_OR_NOTHING" in (way or {}),
    )
    summary = _copied(job, journal)
    if job.all_or_nothing and not summary.proved:
        for each in (area / "target", journal):
            shutil.rmtree(each, ignore_errors=True)
    return summary


def _copied(job: Job, journal: Path) -> Summary:
    return copy_local(job, journal_dir=journal, workers=2, stall_timeout_s=60, progress_every_s=0.02)


def assert_nothing_half_done(area: Path, before: dict[bytes, bytes]) -> None:
    """Every name at the destination holds what the source holds, or what was there before."""
    source, target = (trees.files_in(os.fsencode(area / each)) for each in ("source", "target"))
    for name, content in target.items():
        if not os.path.basename(name).startswith(b".beeond-ctl.") and b".newer-" not in name:
            assert content in (source.get(name), before.get(name)), name


@pytest.mark.parametrize("seed", range(RUNS))
def test_one_failing_call_is_reported_and_the_next_run_completes(
    seed: int, area: Path, injector: Path
) -> None:
    rng = random.Random(seed)
    trees.build(os.fsencode(area / "source"), seed)
    way = WAYS[seed % len(WAYS)]
    call, number, code = rng.choice(CALLS), int(rng.expovariate(0.03)) + 1, rng.choice(ERRNOS)
    before = trees.snapshot(os.fsencode(area / "source"))
    faults = {
        "LD_PRELOAD": str(injector),
        "FAULT": f"{call}:{number}:{code}",
        **way,
    }
    if rng.random() < 0.3:
        faults["FAULT_STICKY"] = "1"
    with children_with(**faults):
        summary = stage(area, way)
    fault = f"{call} {number} {code}: {summary.problems()}"
    assert trees.snapshot(os.fsencode(area / "source")) == before, fault
    if (area / "target").exists():
        assert_nothing_half_done(area, {})
    if summary.proved:
        assert summary.problems() == [], fault
        assert_same(area)
    else:
        assert summary.problems() != [], fault
    again = stage(area)
    assert again.proved, (fault, again.problems())
    assert_same(area)


@pytest.mark.parametrize("way", WAYS)
def test_a_byte_that_is_written_wrongly_is_found_by_reading_back(
    way: dict[str, str], area: Path, injector: Path
) -> None:
    (area / "source").mkdir()
    for number in range(20):
        (area / "source" / f"file{number}").write_bytes(os.urandom(4000))
    job = Job(
        os.fsencode(area / "source"), os.fsencode(area / "target"), all_or_nothing="ALL_OR_NOTHING" in way
    )
    (area / "journal").mkdir()
    with children_with(LD_PRELOAD=str(injector), FAULT="write:5:-2", **way):
        summary = _copied(job, area / "journal")
    assert {cause for cause, _ in summary.failures} == {"mismatch"}
    assert 1 <= summary.failed <= 2  # each of the copiers has a fifth write
    assert summary.copied + summary.failed == 20
    assert_nothing_half_done(area, {})
    assert trees.leftovers(os.fsencode(area / "target")) == []
    assert stage(area).copied == summary.failed
    assert_same(area)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINVAL])
def test_a_directory_above_the_destination_that_could_not_be_synced_proves_nothing(
    code: int, area: Path, injector: Path
) -> None:
    trees.build(os.fsencode(area / "source"), 1, entries=5)
    with children_with(LD_PRELOAD=str(injector), FAULT=f"sync:1:{code}"):
        summary = stage(area)
    assert summary.proved == (code == errno.EINVAL), summary.problems()  # that there is no such thing here
    assert stage(area).proved
    assert_same(area)


def test_the_native_part_is_built_and_makes_no_call_that_faults_cannot_reach(injector: Path) -> None:
    assert _native.__file__ is not None
    called = _symbols("--undefined-only", _native.__file__)
    harmless = {
        "fcntl64",
        "fdopendir",
        "readdir64",
        "rewinddir",
        "closedir",
        "posix_fadvise64",
        "prctl",
    }  # read, or own process
    memory = {
        "malloc",
        "calloc",
        "realloc",
        "posix_memalign",
        "madvise",
        "free",
        "memcpy",
        "memset",
        "strlen",
        "strnlen",
        "strcmp",
        "strncmp",
        "memcmp",
    }
    rest = {name for name in called if not name.startswith(("_", "Py"))} - harmless - memory - {"geteuid"}
    assert {"openat64", "read", "write", "renameat", "fstat64", "close"} <= rest
    assert rest <= _symbols("--defined-only", str(injector))


def _symbols(which: str, library: str) -> set[str]:
    listing = subprocess.run(["nm", "-D", which, library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listing.splitlines()}


@pytest.mark.parametrize("native", ["0", "1"])
def test_what_flushes_keep_is_left_out_where_listings_tell_no_kinds(
    native: str, area: Path, injector: Path
) -> None:
    for name in (".beeond-flush/id", "dir/.beeond-flush"):
        (area / "source" / name).mkdir(parents=True)
        (area / "source" / name / "file").write_text("x")
    (area / "journal").mkdir()
    source = os.fsencode(area / "source")
    job = Job(source, os.fsencode(area / "target"), flushes=source + b"/.beeond-flush")
    with children_with(LD_PRELOAD=str(injector), FAULT_NO_KINDS="1", BEEOND_CTL_NATIVE=native):
        assert copy_local(job, journal_dir=area / "journal", workers=1).proved
    assert set(trees.files_in(os.fsencode(area / "target"))) == {b"dir/.beeond-flush/file"}


@pytest.mark.parametrize(("way", "proved"), [*zip(WAYS, (False, True, True, False, True), strict=True)])
def test_an_ordinary_file_gets_its_name_without_being_renamed_where_that_can_be(
    way: dict[str, str], proved: bool, area: Path, injector: Path
) -> None:
    (area / "source").mkdir()
    for number in range(20):
        (area / "source" / f"file{number}").write_text("x")
    if "ALL_OR_NOTHING" in way:  # as with $BEEOND itself
        (area / "target").mkdir()
    fault = f"rename:1:{errno.EIO}"
    with children_with(LD_PRELOAD=str(injector), FAULT=fault, FAULT_STICKY="1", **way):
        assert stage(area, way).proved == proved
    assert trees.leftovers(os.fsencode(area / "target")) == []
    assert stage(area).proved
    source, target = (trees.files_in(os.fsencode(area / each)) for each in ("source", "target"))
    assert target == source


@pytest.mark.parametrize("way", RESUMABLE)
def test_a_copier_that_hangs_is_killed_and_what_it_had_is_reported(
    way: dict[str, str], area: Path, injector: Path
) -> None:
    trees.build(os.fsencode(area / "source"), 1)
    (area / "journal").mkdir()
    job = Job(os.fsencode(area / "source"), os.fsencode(area / "target"))
    transfer = Coordinator(job, Begun(job, None, area / "journal", 1), ["n1"])
    with children_with(LD_PRELOAD=str(injector), FAULT="write:9:-1", **way):
        serve(
            lambda: transfer.take("n1"),
            lambda result: transfer.report("n1", result),
            None,
            threading.Event(),
            processes=1,
            work_timeout_s=0.5,
        )
    transfer.close()
    assert not transfer.summary().proved
    assert "lost" in {cause for cause, _ in transfer.summary().failures}
    assert stage(area).proved
    assert_same(area)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("call", ["write", "utime"])
def test_half_a_file_that_a_killed_copier_left_under_its_own_name_is_replaced_and_not_kept(
    call: str, there: bool, area: Path, injector: Path
) -> None:
    """Where nothing was before, it is no newer version of anything; also in a directory that was there, and empty."""
    (area / "source").mkdir()
    for number in range(40):
        (area / "source" / f"file{number}").write_bytes(os.urandom(500))
        os.utime(area / "source" / f"file{number}", (1, 1))
    if there:
        (area / "target").mkdir(mode=0o555)
    (area / "journal").mkdir()
    once = {"FAULT": f"{call}:19:0", "FAULT_ONCE": str(area / "once")}
    job = Job(os.fsencode(area / "source"), os.fsencode(area / "target"), all_or_nothing=True)
    with children_with(LD_PRELOAD=str(injector), **once, **WAYS[-1]):
        summary = _copied(job, area / "journal")
    assert (area / "once").exists()
    assert summary.proved, summary.problems()
    source, target = (trees.files_in(os.fsencode(area / each)) for each in ("source", "target"))
    assert target == source


def test_a_big_file_that_gets_shorter_under_a_copier_is_begun_again(area: Path, injector: Path) -> None:
    (area / "source").mkdir()
    with open(area / "source/big", "wb") as file:
        for _ in range(130):
            file.write(os.urandom(1 << 20))
    summaries = []
    transfer = threading.Thread(target=lambda: summaries.append(stage(area)))
    once = {"FAULT": "write:10:-3", "FAULT_ONCE": str(area / "once")}
    with children_with(LD_PRELOAD=str(injector), **once):
        transfer.start()
        pid = frozen_child()
        os.truncate(area / "source/big", 100)
        os.kill(pid, signal.SIGCONT)
        transfer.join()
    [summary] = summaries
    assert summary.proved, summary.problems()
    assert (summary.copied, summary.bytes) == (1, 100)
    assert_same(area)


def test_a_file_that_keeps_changing_is_reported_and_not_left_behind(area: Path, injector: Path) -> None:
    """Whenever something is written of it, or said."""
    (area / "source").mkdir()
    path = area / "source/log"
    path.write_bytes(bytes(5 << 20))
    times = itertools.count(1)
    summaries = []
    transfer = threading.Thread(target=lambda: summaries.append(stage(area)))
    with children_with(LD_PRELOAD=str(injector), FAULT="write:1:-3", FAULT_STICKY="1"):
        transfer.start()
        each_time_a_child_stops(lambda: os.utime(path, ns=(0, next(times))), transfer)
    [summary] = summaries
    assert {cause for cause, _ in summary.failures} == {"changed"}
    assert list((area / "target").iterdir()) == []


_PROGRAM = """
import sys
from pathlib import Path
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.journal import _read
from beeond_ctl.staging.local import copy_local
from beeond_ctl.staging.job import Job
from beeond_ctl.staging import spawn
print("go", flush=True)
area = Path(sys.argv[1])
spawn._ENVIRONMENT = {**spawn._ENVIRONMENT, **dict(each.split("=", 1) for each in sys.argv[2:])}
copy_local(Job(bytes(area / "source"), bytes(area / "target")), journal_dir=area / "journal", workers=2)
"""


@pytest.mark.parametrize("seed", range(RUNS))
def test_killed_at_any_moment_the_transfer_resumes_where_it_was(
    seed: int, area: Path, injector: Path
) -> None:
    rng = random.Random(seed)
    trees.build(os.fsencode(area / "source"), seed, entries=300)
    (area / "journal").mkdir()
    way = {**RESUMABLE[seed % len(RESUMABLE)], "LD_PRELOAD": str(injector)}
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(area), *(f"{key}={value}" for key, value in way.items())],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert program.stdout is not None
    program.stdout.readline()
    children = children_after(program, rng.uniform(0.0, 0.2))
    victim = rng.choice([program.pid, *children])
    with contextlib.suppress(ProcessLookupError):  # it was quicker
        os.kill(victim, signal.SIGKILL)
    program.send_signal(signal.SIGCONT)
    program.wait()
    program.stdout.close()
    await_end(children)
    journal = next((area / "journal").glob("*.journal"), None)
    if journal is not None and rng.random() < 0.3:
        os.truncate(
            journal, rng.randint(min(_start(journal), journal.stat().st_size), journal.stat().st_size)
        )
    if (area / "target").exists():
        assert_nothing_half_done(area, {})
    done = set(trees.files_in(os.fsencode(area / "target")))
    summary = stage(area)
    assert summary.proved, summary.problems()
    assert_same(area)
    third = stage(area)
    assert third.proved
    assert third.copied == 0
    assert third.bytes == 0
    assert done <= set(trees.files_in(os.fsencode(area / "target"))) | {
        name for name in done if os.path.basename(name).startswith(b".beeond-ctl.")
    }


@pytest.mark.parametrize("nth", [1, 9, 40])
@pytest.mark.parametrize("gone", [0, 40])
def test_killed_while_it_removes_what_a_killed_run_left_the_next_one_goes_on(
    gone: int, nth: int, area: Path, injector: Path
) -> None:
    """In directories that are at the source, and in those that are there no longer."""
    for number in range(50):
        (area / "source" / f"d{number}").mkdir(parents=True)
        (area / "source" / f"d{number}" / "file").write_text(str(number))
    killed = copying.coordinator(area, "n1", durable=True)
    copying.next_work(killed, "n1")  # all directories are on record
    copying.kill(killed)
    token = copying.token_of(area)
    for number in range(50):
        (area / "target" / f"d{number}").mkdir(parents=True)
        (area / "target" / f"d{number}" / f".beeond-ctl.{token}.x").touch()
    for number in range(gone):
        shutil.rmtree(area / "source" / f"d{number}")
    once = {"FAULT": f"unlink:{nth}:-1", "FAULT_ONCE": str(area / "once"), "LD_PRELOAD": str(injector)}
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(area), *(f"{key}={value}" for key, value in once.items())],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        wait_for((area / "once").exists, 20)  # a copier is frozen where it would remove one
        children = children_after(program, 0)
    finally:
        program.kill()
    program.communicate()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    await_end(children)
    assert trees.leftovers(os.fsencode(area / "target"))
    summary = stage(area)
    assert summary.proved, summary.problems()
    assert trees.leftovers(os.fsencode(area / "target")) == []


def _start(journal: Path) -> int:
    """Bytes of what is on disk before the first file is copied."""
    fd = os.open(journal, os.O_RDONLY)
    ends = [end for kind, _, end in _read(fd, None) if kind in ("header", "run", "root")]
    os.close(fd)
    return max(ends, default=0)
