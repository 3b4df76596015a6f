"""Stage-in with the list that was made while the job was pending, beside the walk that it does without.

On a tree in memory, and with 5 ms more in each metadata call of each program (see slow_calls.c): what a distant file
server costs. Two things are measured: how long it takes until everything has been handed out, which is what many
nodes wait for, and whole transfers, by so many copying processes as a few nodes have; here they share two processors.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

from beeond_ctl.staging import spawn
from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.look import look
from beeond_ctl.staging.worker import serve
from bench import slow_calls
from bench.row import Row
from bench.staging import small_files

FILES, COPIERS, DELAY_US, ROUNDS = 100_000, 16, 5000, 3


class _Place:
    """A tree, its list, and a place to copy it to."""

    def __init__(self, area: Path, count: int) -> None:
        self.area, self.count, self.list = area, count, area / "lists" / "1.0.list"
        small_files(area / "source", count)
        time.sleep(2.1)  # what has just changed is not listed
        (area / "lists").mkdir(mode=0o700)
        seen = look(str(area / "source"), time.monotonic() + 600, str(self.list))
        if seen.unlisted:
            raise RuntimeError(f"there is no list: {seen.unlisted}")
        self.kept = self.list.read_bytes()

    def job(self, *, listed: bool) -> Job:
        """A transfer, with nothing of the last one in its way."""
        for name in ("target", "journal"):
            shutil.rmtree(self.area / name, ignore_errors=True)
            (self.area / name).mkdir()
        self.list.write_bytes(self.kept)
        source, target = (os.fsencode(self.area / name) for name in ("source", "target"))
        return Job(source, target, durable=False, listed=os.fsencode(self.list) if listed else b"")

    def hand_out(self, *, listed: bool) -> float:
        """Seconds until all that there is to do has been told, to somebody who takes it at once."""
        job, begun = self.job(listed=listed), time.monotonic()
        transfer = Coordinator(job, Begun(job, None, self.area / "journal", 1), ["here"])
        while not transfer.progress().scanned:
            if "wait" in transfer.take("here"):
                transfer.wait(0.05)
        took, told = time.monotonic() - begun, transfer.progress().entries_total
        transfer.cancel("measured")
        transfer.close()
        if told != self.count or bool(transfer.listed) != listed:
            raise RuntimeError(f"{told} files were handed out, {transfer.listed}")
        return took

    def copy(self, *, listed: bool) -> float:
        """Seconds that the whole takes."""
        job, begun = self.job(listed=listed), time.monotonic()
        transfer = Coordinator(job, Begun(job, None, self.area / "journal", 1), ["here"])
        serve(
            lambda: transfer.take("here"), lambda result: transfer.report("here", result), None, threading.Event(),
            processes=COPIERS, pause=transfer.wait,
        )  # fmt: skip
        took = time.monotonic() - begun
        transfer.close()
        if not transfer.summary().proved or bool(transfer.listed) != listed:
            raise RuntimeError(f"not copied: {transfer.summary().problems()}, {transfer.listed}")
        return took


def rows() -> list[Row]:
    """Both measures, in memory and with slow calls."""
    area = Path(tempfile.mkdtemp(prefix="listed-bench-", dir="/dev/shm"))
    environment = spawn._ENVIRONMENT
    try:
        slow = slow_calls.environment(area, DELAY_US)
        place = _Place(area, FILES)
        found = []
        for where, more, rounds in (("in memory", {}, ROUNDS), ("5 ms more in each metadata call", slow, 1)):
            spawn._ENVIRONMENT = {**environment, **more}
            for what, measure in (
                (f"{FILES} x 4 KiB, {where}: handed out from the list", place.hand_out),
                (f"- copied by {COPIERS} processes", place.copy),
            ):
                times = [[measure(listed=listed) for listed in (True, False)] for _ in range(rounds)]
                ours, peer = (statistics.median(each) for each in zip(*times, strict=True))
                found.append(Row(what, ours, "s", "by a walk", peer))
        return found
    finally:
        spawn._ENVIRONMENT = environment
        shutil.rmtree(area)
