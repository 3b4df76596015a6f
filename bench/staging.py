"""How fast staging is beside `cp -a`, `rsync -a` and, where they are installed, `rclone` and `fpsync`.

    python -m bench.staging [--files 100000] [--big 8] [--rounds 3] [--area /dev/shm]

Same tree, same run, page cache in the same state (everything is in memory), medians. Each program is a process of its
own, its start included.
"""

from __future__ import annotations

import json
import os
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

from bench.row import Row

if TYPE_CHECKING:
    from collections.abc import Callable

_COPY = """
import sys
from pathlib import Path
from beeond_ctl.staging import spawn
from beeond_ctl.staging.local import copy_local
from beeond_ctl.staging.transfer import Job
source, target, journal, flags, preload = sys.argv[1:]
if preload:
    spawn._ENVIRONMENT = {**spawn._ENVIRONMENT, **dict(item.split("=") for item in preload.split())}
job = Job(source.encode(), target.encode(), tuple(flags.split()))
summary = copy_local(job, journal_dir=Path(journal))
sys.exit(not summary.proved)
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """We took `seconds` where `peer` took `peer_seconds`; `goal` is the ratio of rates to reach, 0 for none."""

    what: str
    seconds: float
    peer: str
    peer_seconds: float
    goal: float


class Bench:
    """A place to copy in, and what was measured there."""

    def __init__(self, area: Path, rounds: int) -> None:
        self.area, self.rounds = area, rounds
        self.journal = area / "journal"
        self.rows: list[Measured] = []

    # Each of these copies `source` to `target`.

    def ours(self, source: Path, target: Path, flags: str = "", preload: str = "") -> None:
        """With this package."""
        self.journal.mkdir(exist_ok=True)
        argv = [sys.executable, "-c", _COPY, str(source), str(target), str(self.journal), flags, preload]
        subprocess.run(argv, check=True)

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

    def median_s(self, act: Callable[[], None], before: Callable[[], None]) -> float:
        """How long `act` takes; `before` is not counted."""
        times = []
        for _ in range(self.rounds):
            before()
            begun = time.monotonic()
            act()
            times.append(time.monotonic() - begun)
        return statistics.median(times)

    def row(self, what: str, ours_s: float, peer: str, peer_s: float, goal: float) -> None:
        """Note that we took `ours_s` where `peer` took `peer_s`; `goal` is the ratio of rates to reach."""
        ratio = peer_s / ours_s
        self.rows.append(Measured(what, ours_s, peer, peer_s, goal))
        mark = "" if ratio >= goal else "  (not reached)"
        click.echo(
            f"{what:<58} {ours_s:8.3f} s   {peer:<10} {peer_s:8.3f} s   {ratio:6.2f} x   goal {goal} x{mark}"
        )


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


def bench_small(bench: Bench, count: int) -> None:
    """Many small files: anew, again, resumed."""
    source, target = bench.area / "small", bench.area / "target"
    small_files(source, count)
    name = f"{count} x 4 KiB"
    cp_s = bench.median_s(lambda: bench.cp(source, target), bench.forget)
    plain_s = bench.median_s(lambda: bench.ours(source, target, "metadata-only"), bench.forget)
    bench.row(f"{name}, without verification", plain_s, "cp -a", cp_s, 1.5)
    rsync_s = bench.median_s(lambda: bench.rsync(source, target), bench.forget)
    whole_s = bench.median_s(lambda: bench.ours(source, target), bench.forget)
    bench.row(f"{name}, with verification", whole_s, "rsync -a", rsync_s, 1.5)
    again_rsync_s = bench.median_s(lambda: bench.rsync(source, target), lambda: None)
    again_s = bench.median_s(lambda: bench.ours(source, target), lambda: None)
    bench.row(f"{name}, again, nothing changed (journal)", again_s, "rsync -a", again_rsync_s, 2)
    update_s = bench.median_s(
        lambda: bench.ours(source, target, "update"), lambda: shutil.rmtree(bench.journal, ignore_errors=True)
    )
    bench.row(f"{name}, again, nothing changed (+update)", update_s, "rsync -a", again_rsync_s, 2)

    def without_a_tenth() -> None:
        bench.forget()
        hidden = bench.area / "hidden"
        hidden.mkdir()
        directories = sorted(source.iterdir())
        for directory in directories[: len(directories) // 10]:
            directory.rename(hidden / directory.name)
        bench.ours(source, target)
        for directory in hidden.iterdir():
            directory.rename(source / directory.name)
        hidden.rmdir()

    resume_s = bench.median_s(lambda: bench.ours(source, target), without_a_tenth)
    bench.row(f"{name}, the last tenth after 90 %", resume_s, "the whole", whole_s, 10)
    bench.forget()
    shutil.rmtree(source)


def bench_big(bench: Bench, count: int) -> None:
    """Big files."""
    source, target = bench.area / "big", bench.area / "target"
    big_files(source, count)
    name = f"{count} x 1 GiB"
    cp_s = bench.median_s(lambda: bench.cp(source, target), bench.forget)
    plain_s = bench.median_s(lambda: bench.ours(source, target, "metadata-only"), bench.forget)
    bench.row(f"{name}, without verification", plain_s, "cp -a", cp_s, 1.0)
    whole_s = bench.median_s(lambda: bench.ours(source, target), bench.forget)
    bench.row(f"{name}, with verification", whole_s, "cp -a", cp_s, 0.5)
    bench.forget()
    shutil.rmtree(source)


def bench_slow(bench: Bench, count: int, delay_us: int = 5000) -> None:
    """Every metadata call of both programs takes 5 ms longer (see slow_calls.c)."""
    library = bench.area / "slow_calls.so"
    code = Path(__file__).with_name("slow_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, code, "-ldl"], check=True)
    source, target = bench.area / "slow", bench.area / "target"
    small_files(source, count)
    slow = {"LD_PRELOAD": str(library), "CALL_DELAY_US": str(delay_us), "CALL_DELAY_BELOW": str(bench.area)}
    preload = " ".join(f"{key}={value}" for key, value in slow.items())
    rsync_s = bench.median_s(lambda: bench.rsync(source, target, {**os.environ, **slow}), bench.forget)
    ours_s = bench.median_s(lambda: bench.ours(source, target, "", preload), bench.forget)
    bench.row(
        f"{count} x 4 KiB, {delay_us / 1000:g} ms more in each metadata call", ours_s, "rsync -a", rsync_s, 20
    )
    bench.forget()
    shutil.rmtree(source)


def bench_peers(bench: Bench, count: int) -> None:
    """Other movers, for a look; no goal."""
    source, target = bench.area / "small", bench.area / "target"
    small_files(source, count)
    ours_s = bench.median_s(lambda: bench.ours(source, target), bench.forget)
    peers: dict[str, list[str | Path]] = {
        "rclone": ["rclone", "copy", "--transfers", str(os.cpu_count()), source, target],
        "fpsync": ["fpsync", "-n", str(os.cpu_count()), source, target],
        "dcp": ["dcp", "-p", source, target],
    }
    for name, argv in peers.items():
        if shutil.which(name):
            peer_s = bench.median_s(partial(bench.program, argv), bench.forget)
            bench.row(f"{count} x 4 KiB, with verification", ours_s, name, peer_s, 0)
    bench.forget()
    shutil.rmtree(source)


def run(area: Path, files: int = 100_000, big: int = 8, slow: int = 1000, rounds: int = 3) -> list[Measured]:
    """Measure everything below `area` and return a row for each comparison."""
    place = Path(tempfile.mkdtemp(prefix="staging-bench-", dir=area))
    try:
        bench = Bench(place, rounds)
        if files:
            bench_small(bench, files)
        if big:
            bench_big(bench, big)
        if slow:
            bench_slow(bench, slow)
        if files:
            bench_peers(bench, files // 10)
        return bench.rows
    finally:
        shutil.rmtree(place)


def rows() -> list[Row]:
    """For `python -m bench`. Goals are seconds here: the peer's time by the ratio of rates to reach."""
    return [
        Row(
            row.what,
            row.seconds,
            "s",
            row.peer,
            row.peer_seconds,
            row.peer_seconds / row.goal if row.goal else None,
        )
        for row in run(Path("/dev/shm"), big=4)
    ]


@click.command()
@click.option("--area", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--files", default=100_000, show_default=True, help="Small files; 0 leaves that part out.")
@click.option("--big", default=8, show_default=True, help="Files of 1 GiB; twice as much memory is needed.")
@click.option("--slow", default=1000, show_default=True, help="Small files where metadata calls take 5 ms.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(area: Path, files: int, big: int, slow: int, rounds: int, *, as_json: bool) -> None:
    """Measure staging beside its peers."""
    measured = run(area, files, big, slow, rounds)
    if as_json:
        click.echo(json.dumps([asdict(each) for each in measured], indent=1))


if __name__ == "__main__":
    main()
