"""How fast staging is beside `cp -a`, `rsync -a` and, where they are installed, `rclone`, `fpsync` and `dcp`.

    python -m bench.staging [--files 100000] [--big 8] [--rounds 3] [--area /dev/shm]

Same tree, same run, page cache in the same state (everything is in memory), medians; ours and the peer's runs take
turns. Each program is a process of its own, its start included. Processor time is that of all its processes: it says
more than the clock where something else runs meanwhile.
"""

from __future__ import annotations

import compileall
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import beeond_ctl
from bench import slow_calls
from bench.row import Row
from tests.faults import through_fs

if TYPE_CHECKING:
    from collections.abc import Callable

_COPY = """
import os, resource, sys
from beeond_ctl.staging import spawn
from beeond_ctl.staging.local import copy_local
from beeond_ctl.staging.job import Job
source, target, journal, flags, preload, until = sys.argv[1:]
if preload:
    spawn._ENVIRONMENT = {**spawn._ENVIRONMENT, **dict(item.split("=") for item in preload.split())}
job = Job(source.encode(), target.encode(), tuple(flags.split()))

def stop(now):
    if now.scanned and now.bytes_done >= float(until) * now.bytes_total:
        raise KeyboardInterrupt

try:
    summary = copy_local(job, journal_dir=journal, **(dict(progress=stop, progress_every_s=0.005) if until else {}))
except KeyboardInterrupt:
    os._exit(0)
print(*(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
sys.stdout.flush()
os._exit(not summary.proved)
"""
_COMMAND = Path(sys.prefix) / "bin" / "beeond-ctl"
_LIMIT_MIB = 1024
_MANY = 10_000_000


@dataclass(frozen=True, slots=True)
class Time:
    """By the clock, and of processors."""

    s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """We took `time` where `peer` took `peer_time`; `goal` is the ratio of rates to reach, 0 for none."""

    what: str
    time: Time
    peer: str
    peer_time: Time
    goal: float


class Bench:
    """A place to copy in, and what was measured there."""

    def __init__(self, area: Path, rounds: int) -> None:
        self.area, self.rounds = area, rounds
        self.size = 0
        """Bytes that a copy of what is being copied takes."""
        self.journal = area / "journal"
        self.rows: list[Measured] = []
        self.missing: list[str] = []

    # Each of these copies `source` to `target`.

    def ours(self, source: Path, target: Path, flags: str = "", preload: str = "", until: str = "") -> float:
        """With this package, until that part of the bytes is there, if not to the end; returns the memory of the two
        processes that know the whole transfer, in MiB."""
        self.journal.mkdir(exist_ok=True)
        argv = [
            sys.executable,
            "-c",
            _COPY,
            str(source),
            str(target),
            str(self.journal),
            flags,
            preload,
            until,
        ]
        told = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
        return sum(map(int, told.split())) / 1024

    def program(self, argv: list[str | Path]) -> None:
        """Any other program."""
        subprocess.run(argv, check=True, capture_output=True)

    def cp(self, source: Path, target: Path) -> None:
        """With cp."""
        subprocess.run(["cp", "-a", source, target], check=True)

    def rsync(self, source: Path, target: Path, environment: dict[str, str] | None = None) -> None:
        """With rsync."""
        subprocess.run(["rsync", "-a", f"{source}/", f"{target}/"], check=True, env=environment)

    def forget(self) -> None:
        """Remove the copy and the journal."""
        shutil.rmtree(self.area / "target", ignore_errors=True)
        shutil.rmtree(self.journal, ignore_errors=True)

    def once(self, act: Callable[[], object], before: Callable[[], object]) -> Time:
        """How long `act` takes; `before` is not counted.

        On a virtual machine memory that was free for a while may be the host's, and the first to touch it waits ten
        times as long as the next: so that this is neither program's, all that a copy takes is touched before.
        """
        before()
        if self.size:
            mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
        used, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        act()
        s, now = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        return Time(s, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)

    def compare(
        self,
        what: str,
        ours: Callable[[], object],
        peer: str,
        theirs: Callable[[], object],
        goal: float,
        *,
        before: Callable[[], object] | None = None,
        before_theirs: Callable[[], object] | None = None,
    ) -> tuple[Time, Time]:
        """Measure both in turns and note the medians; `before` prepares for each (`before_theirs` for the peer)."""
        first = before or self.forget
        times: tuple[list[Time], list[Time]] = [], []
        for _ in range(self.rounds):
            times[0].append(self.once(ours, first))
            times[1].append(self.once(theirs, before_theirs or first))
        mine, other = _median(times[0]), _median(times[1])
        self.row(what, mine, peer, other, goal)
        return mine, other

    def row(self, what: str, ours: Time, peer: str, theirs: Time, goal: float) -> None:
        """Note that we took `ours` where `peer` took `theirs`; `goal` is the ratio of rates to reach."""
        ratio = theirs.s / ours.s
        self.rows.append(Measured(what, ours, peer, theirs, goal))
        told = f"goal {goal} x" + ("" if ratio >= goal else "  (not reached)") if goal else ""
        click.echo(
            f"{what:<58} {ours.s:8.3f} s {ours.cpu_s:8.2f} cpu s   "
            f"{peer:<10} {theirs.s:8.3f} s {theirs.cpu_s:8.2f} cpu s   {ratio:6.2f} x   {told}"
        )


def _median(times: list[Time]) -> Time:
    return Time(statistics.median(each.s for each in times), statistics.median(each.cpu_s for each in times))


def small_files(root: Path, count: int) -> None:
    """`count` files of 4 KiB, a thousand in a directory."""
    block = os.urandom(4096)
    for number in range(count):
        if number % 1000 == 0:
            directory = root / f"d{number // 1000}"
            directory.mkdir(parents=True)
        (directory / f"f{number}").write_bytes(number.to_bytes(8, "big") + block[8:])


def big_files(root: Path, count: int) -> None:
    """`count` files of 1 GiB."""
    root.mkdir()
    block = os.urandom(1 << 20)
    for number in range(count):
        with open(root / f"big{number}", "wb") as file:
            for part in range(1024):
                file.write(part.to_bytes(8, "big") + block[8:])


def nothing() -> None:
    """Leave all as it is."""


def bench_small(bench: Bench, count: int) -> None:
    """Many small files: anew, again, resumed."""
    source, target = bench.area / "small", bench.area / "target"
    small_files(source, count)
    bench.size = 2 * count * 4096  # names take as much as their contents
    name = f"{count} x 4 KiB"

    def copy() -> None:
        bench.ours(source, target)

    def rsync() -> None:
        bench.rsync(source, target)

    bench.compare(
        f"{name}, without verification",
        lambda: bench.ours(source, target, "metadata-only"),
        "cp -a",
        lambda: bench.cp(source, target),
        1.5,
    )
    whole, _ = bench.compare(f"{name}, with verification", copy, "rsync -a", rsync, 1.5)
    bench.forget()
    copy()
    bench.compare(f"{name}, again, nothing changed (journal)", copy, "rsync -a", rsync, 2, before=nothing)
    bench.compare(
        f"{name}, again, nothing changed (+update)",
        lambda: bench.ours(source, target, "update"),
        "rsync -a",
        rsync,
        2,
        before=lambda: shutil.rmtree(bench.journal, ignore_errors=True),
    )
    if _COMMAND.exists():
        bench.compare(
            f"{name}, the same (beeond-ctl stage in --update)",
            lambda: bench.program([_COMMAND, "stage", "in", "--update", "--quiet", "--here", source, target]),
            "rsync -a",
            rsync,
            0,
            before=nothing,
        )
    _resume(bench, source, f"{name}, the last tenth after 90 %", whole)
    bench.forget()
    shutil.rmtree(source)


def bench_resume(bench: Bench, count: int = 1000, size: int = 4 << 20) -> None:
    """The last tenth of files whose contents weigh more than their names."""
    source, target = bench.area / "resume", bench.area / "target"
    block = os.urandom(size)
    bench.size = count * size
    for number in range(count):
        directory = source / f"d{number % 10}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}").write_bytes(number.to_bytes(8, "big") + block[8:])
    whole = _median(
        [bench.once(lambda: bench.ours(source, target), bench.forget) for _ in range(bench.rounds)]
    )
    _resume(bench, source, f"{count} x {size >> 20} MiB, the last tenth after 90 %", whole)
    bench.forget()
    shutil.rmtree(source)


def _resume(bench: Bench, source: Path, what: str, whole: Time) -> None:
    target, hidden = bench.area / "target", bench.area / "hidden"

    def without_a_tenth() -> None:
        bench.forget()
        hidden.mkdir()
        directories = sorted(source.iterdir())
        for directory in directories[: len(directories) // 10]:
            directory.rename(hidden / directory.name)
        bench.ours(source, target)
        for directory in hidden.iterdir():
            directory.rename(source / directory.name)
        hidden.rmdir()

    rest = _median(
        [bench.once(lambda: bench.ours(source, target), without_a_tenth) for _ in range(bench.rounds)]
    )
    bench.row(what, rest, "the whole", whole, 10)


def _stopped(
    bench: Bench, source: Path, target: Path, what: str, whole: Time, forget: Callable[[], None]
) -> None:
    """What is left to do of one that was stopped when 90 % of the bytes were there."""

    def most() -> None:
        forget()
        bench.ours(source, target, until="0.9")

    bench.size //= 10  # the rest of it is in use
    rest = _median([bench.once(lambda: bench.ours(source, target), most) for _ in range(bench.rounds)])
    bench.size *= 10
    bench.row(f"{what}, resumed when it was stopped at 90 %", rest, "the whole", whole, 10)


def bench_big(bench: Bench, count: int) -> None:
    """Big files."""
    source, target = bench.area / "big", bench.area / "target"
    big_files(source, count)
    bench.size = count << 30
    name = f"{count} x 1 GiB"
    for flags, what, goal in (("metadata-only", "without verification", 1.0), ("", "with verification", 0.5)):
        whole, _ = bench.compare(
            f"{name}, {what}",
            partial(bench.ours, source, target, flags),
            "cp -a",
            lambda: bench.cp(source, target),
            goal,
        )
    _stopped(bench, source, target, name, whole, bench.forget)
    bench.forget()
    shutil.rmtree(source)


def bench_slow(bench: Bench, count: int, delay_us: int = 5000) -> None:
    """Every metadata call of both programs takes 5 ms longer (see slow_calls.c)."""
    source, target = bench.area / "slow", bench.area / "target"
    small_files(source, count)
    slow = slow_calls.environment(bench.area, delay_us)
    preload = " ".join(f"{key}={value}" for key, value in slow.items())
    bench.compare(
        f"{count} x 4 KiB, {delay_us / 1000:g} ms more in each metadata call",
        lambda: bench.ours(source, target, "", preload),
        "rsync -a",
        lambda: bench.rsync(source, target, {**os.environ, **slow}),
        20,
    )
    bench.forget()
    shutil.rmtree(source)


def bench_slow_fs(bench: Bench, count: int, delay_us: int = 5000) -> None:
    """Source and destination on a FUSE file system that sleeps 5 ms in each metadata call (see through_fs.c), ten files
    in a directory. Within one directory the kernel lets only one name be made at a time, whoever asks."""
    what = f"{count} x 4 KiB, on a FUSE file system that sleeps {delay_us / 1000:g} ms"
    if why := through_fs.missing():
        bench.missing.append(f"{what} ({why})")
        return
    with through_fs.mounted(bench.area, delay_us=delay_us) as (below, mount):
        for number in range(count):
            directory = below / "slow" / f"d{number // 10}"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"f{number}").write_bytes(os.urandom(4096))
        source, target = mount / "slow", mount / "target"

        def forget() -> None:
            shutil.rmtree(below / "target", ignore_errors=True)
            shutil.rmtree(bench.journal, ignore_errors=True)
            time.sleep(1.1)  # so long the kernel believes what it knew of the last copy

        whole, _ = bench.compare(
            what,
            lambda: bench.ours(source, target),
            "rsync -a",
            lambda: bench.rsync(source, target),
            20,
            before=forget,
        )
        _stopped(bench, source, target, what, whole, forget)
    for path in (below, bench.journal):
        shutil.rmtree(path, ignore_errors=True)


def bench_peers(bench: Bench, count: int) -> None:
    """Other movers, for a look; no goal."""
    source, target = bench.area / "small", bench.area / "target"
    small_files(source, count)
    peers: dict[str, list[str | Path]] = {
        "rclone": [
            "rclone",
            "copy",
            "--config",
            "/dev/null",
            "--transfers",
            str(os.cpu_count()),
            source,
            target,
        ],
        "fpsync": ["fpsync", "-n", str(os.cpu_count()), f"{source}/", f"{target}/"],
        "dcp": ["dcp", "-p", source, target],
    }
    for name, argv in peers.items():
        if shutil.which(name):
            what, theirs = f"{count} x 4 KiB, with verification", partial(bench.program, argv)
            bench.compare(what, lambda: bench.ours(source, target), name, theirs, 0)
        else:
            bench.missing.append(name)
    bench.forget()
    shutil.rmtree(source)


def memory_mib(area: Path, count: int) -> tuple[float, float]:
    """MiB that a transfer of `_MANY` files takes on the leader: anew, and resumed when all is proved.

    Reckoned from what `count` files take beyond a tenth of them.
    """
    peaks = []
    for files in (count // 10, count):
        place = Path(tempfile.mkdtemp(prefix="staging-bench-", dir=area))
        try:
            bench = Bench(place, 1)
            for number in range(files):
                if number % 1000 == 0:
                    directory = place / "many" / f"d{number // 1000}"
                    directory.mkdir(parents=True)
                os.close(os.open(directory / f"f{number}", os.O_CREAT | os.O_WRONLY))
            peaks.append([bench.ours(place / "many", place / "target") for _ in range(2)])
        finally:
            shutil.rmtree(place)
    growth = [(more - less) / (count - count // 10) for less, more in zip(*peaks, strict=True)]
    anew, again = (peak + each * (_MANY - count) for peak, each in zip(peaks[1], growth, strict=True))
    return anew, again


def run(
    area: Path, files: int = 100_000, big: int = 8, slow: int = 1000, rounds: int = 3
) -> tuple[list[Measured], list[str]]:
    """Measure everything below `area`; a row for each comparison, and the peers that are not installed."""
    compileall.compile_dir(Path(beeond_ctl.__file__).parent, quiet=2)  # as installed packages are
    place = Path(tempfile.mkdtemp(prefix="staging-bench-", dir=area))
    try:
        bench = Bench(place, rounds)
        if files:
            bench_small(bench, files)
            bench_resume(bench)
        if slow:
            bench.rounds = 1  # the peer takes a minute
            bench_slow(bench, slow)
            bench_slow_fs(bench, slow)
            bench.rounds = rounds
        if files:
            bench_peers(bench, files // 10)
        if big:  # the last, as it takes so much memory that programs are read in from the disk again
            bench_big(bench, big)
        return bench.rows, bench.missing
    finally:
        shutil.rmtree(place)


def _room_for(area: Path) -> int:
    """How many files of 1 GiB memory has room for, with their copies and with 3 GiB to spare: at most 8."""
    text = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2]
    there = os.statvfs(area)
    free = min(int(text.split()[0]) << 10, there.f_bavail * there.f_frsize)
    return max(0, min(8, ((free >> 30) - 3) // 2))


def rows() -> list[Row]:
    """For `python -m bench`. Goals are seconds here: the peer's time by the ratio of rates to reach."""
    area = Path("/dev/shm")
    measured, missing = run(area, big=_room_for(area))
    found = []
    for each in measured:
        goal = each.peer_time.s / each.goal if each.goal else None
        found.append(Row(each.what, each.time.s, "s", each.peer, each.peer_time.s, goal))
        found.append(Row("  processor time", each.time.cpu_s, "s", each.peer, each.peer_time.cpu_s))
    for name in missing:
        click.echo(f"not measured, as it is not there: {name}")
    anew, again = memory_mib(area, 300_000)
    for what, value in (("anew", anew), ("resumed", again)):
        name = f"{_MANY} files, {what}: memory on the leader, reckoned from 300000"
        found.append(Row(name, value, "MiB", goal=_LIMIT_MIB))
    return found


@click.command()
@click.option("--area", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--files", default=100_000, show_default=True, help="Small files; 0 leaves that part out.")
@click.option("--big", default=8, show_default=True, help="Files of 1 GiB; twice as much memory is needed.")
@click.option("--slow", default=1000, show_default=True, help="Small files where metadata calls take 5 ms.")
@click.option("--memory", default=0, show_default=True, help="Files for the measure of memory, e.g. 1000000.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(area: Path, files: int, big: int, slow: int, memory: int, rounds: int, *, as_json: bool) -> None:
    """Measure staging beside its peers."""
    measured, missing = run(area, files, big, slow, rounds)
    for name in missing:
        click.echo(f"not measured, as it is not there: {name}")
    if memory:
        anew, again = memory_mib(area, memory)
        click.echo(f"{_MANY} files, reckoned from {memory}: {anew:.0f} MiB anew, {again:.0f} MiB resumed")
    if as_json:
        click.echo(json.dumps([asdict(each) for each in measured], indent=1))


if __name__ == "__main__":
    main()
