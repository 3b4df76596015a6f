"""A source whose every metadata call waits, looked at by one node and by several.

Nodes are threads of one program here, each with copiers of its own, in which as in the scanner every metadata call
takes 20 ms longer (see slow_calls.c): so much that eight nodes mostly wait, instead of sharing two processors.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from beeond_ctl.staging import spawn
from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Job
from beeond_ctl.staging.worker import serve
from bench import slow_calls
from bench.row import Row
from bench.staging import small_files

FILES, NODES, COPIERS, DELAY_US = 10_000, 8, 2, 20_000


def rows() -> list[Row]:
    """Anew, and once more with nothing changed."""
    area = Path(tempfile.mkdtemp(prefix="scan-bench-", dir="/dev/shm"))
    environment = spawn._ENVIRONMENT
    try:
        small_files(area / "source", FILES)
        slow = slow_calls.environment(area, DELAY_US)
        spawn._ENVIRONMENT = {**environment, **slow}
        found = []
        for flags, what in (((), "anew"), (("update",), "again with +update, nothing changed")):
            times = []
            for nodes in (1, NODES):
                if not flags:
                    shutil.rmtree(area / "target", ignore_errors=True)
                times.append(_stage(area, nodes, flags))
            (one_scan, one), (many_scan, many) = times
            name = f"{FILES} files, 20 ms more in each metadata call, {NODES} nodes, {what}"
            found += [
                Row(f"{name}: until all is looked at", many_scan, "s", "by one node", one_scan),
                Row("- until all is copied", many, "s", "by one node", one),
            ]
        return found
    finally:
        spawn._ENVIRONMENT = environment
        shutil.rmtree(area)


def _stage(area: Path, count: int, flags: tuple[str, ...]) -> tuple[float, float]:
    """Seconds until the source has been scanned, and until all is done. Raises RuntimeError if it is not proved."""
    shutil.rmtree(area / "journal", ignore_errors=True)
    (area / "journal").mkdir()
    nodes = [f"n{number}" for number in range(count)]
    job = Job(os.fsencode(area / "source"), os.fsencode(area / "target"), flags, durable=False)
    begun = time.monotonic()
    transfer = Coordinator(job, Begun(job, None, area / "journal", count), nodes)

    def copy(node: str) -> None:
        serve(
            lambda: transfer.take(node), lambda result: transfer.report(node, result), None, threading.Event(),
            processes=COPIERS, pause=transfer.wait,
        )  # fmt: skip

    threads = [threading.Thread(target=copy, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    while not transfer.progress().scanned:
        transfer.wait(0.05)
    scanned_s = time.monotonic() - begun
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - begun
    transfer.close()
    if not transfer.summary().proved:
        raise RuntimeError(f"not copied: {transfer.summary().problems()}")
    return scanned_s, took_s
