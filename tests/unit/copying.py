"""Parts of a transfer, for tests of single steps: a copier without a scanner, a coordinator whose nodes a test is."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl.staging import copier, wire
from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Identity, Job
from beeond_ctl.staging.journal import records
from beeond_ctl.staging.wire import PIECE
from beeond_ctl.staging.worker import serve
from tests.faults import trees
from tests.testbed.host import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from beeond_ctl.staging.transfer import Summary
    from beeond_ctl.staging.worker import Copier

SCAN: dict[str, Any] = {
    "source": "/", "destination": "/", "flags": [], "token": "0", "run": 1, "only": "", "flushes": "",
    "alone": False, "nodes": 1, "journal": None, "header": {"live": False},
}  # fmt: skip
"""What a scanner is told."""

by_both = pytest.mark.usefixtures("engine")
"""What holds with the native part and without it."""


def worker(area: Path, **more: Any) -> copier.Copier:
    """One from `source` to `target` in `area`; `more` is what its setup says otherwise."""
    for name in ("source", "target"):
        (area / name).mkdir(exist_ok=True)
    inodes = [(area / name).stat().st_ino for name in ("source", "target")]
    setup = {
        "token": "0", "run": 1, "flags": [], "single": None, "fresh": False, "root_made": False, "direct": False,
        "root_mode": None, "clock": "", "again": False, "private": False, "marker": "", "places": [None, None],
        "folds": False, "hidden": "", "tokens": [],
        "durable": False, "inodes": inodes, "source": str(area / "source"), "destination": str(area / "target"),
    }  # fmt: skip
    return copier.Copier({**setup, **more})


def coordinator(area: Path, *nodes: str, user: Identity | None = None, **more: Any) -> Coordinator:
    (area / "journal").mkdir(exist_ok=True)
    job = Job(bytes(area / "source"), bytes(area / "target"), **more)
    return Coordinator(job, Begun(job, user, area / "journal", len(nodes)), nodes)


def token_of(area: Path) -> str:
    """What all temporary names of the transfer in `area` have in them."""
    [path] = (area / "journal").glob("*.journal")
    fd = os.open(path, os.O_RDONLY)
    try:
        return str(next(wire.loads(text)["token"] for kind, text in records(fd) if kind == "header"))
    finally:
        os.close(fd)


def next_work(transfer: Coordinator, node: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20 * PATIENCE
    while "wait" in (answer := transfer.take(node)):
        assert time.monotonic() < deadline
        transfer.wait(0.05)
    return answer


def finish(transfer: Coordinator, *nodes: str, user: Identity | None = None, processes: int = 1) -> Summary:
    """Serve `nodes` until the transfer has ended."""
    stop = threading.Event()
    threads = [
        threading.Thread(
            target=serve,
            args=(
                lambda node=node: transfer.take(node),
                lambda result, node=node: transfer.report(node, result),
            ),
            kwargs={"user": user, "stop": stop, "processes": processes, "pause": transfer.wait},
        )
        for node in nodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfer.close()
    return transfer.summary()


def take_until(
    transfer: Coordinator, node: str, doer: Copier, kind: str, index: int = -1,
    *, passing: Collection[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Do what `node` is given until it is work of this `kind` (and on this piece), which is only taken.

    `passing` are the kinds that may come before, if not any may.
    """
    while True:
        work: dict[str, Any] = next_work(transfer, node)["work"]
        assert passing is None or work["kind"] in passing, work["kind"]
        if work["kind"] == kind and (index < 0 or work["fields"][1] == str(index)):
            return work
        transfer.report(node, doer.run(work))


def kill(transfer: Coordinator) -> None:
    """Leave a transfer, of which some work may be out, as it is."""
    transfer.cancel("test")
    transfer.close()


def holey(path: Path) -> None:
    """A file of four pieces, with something in each, that takes next to no room and time."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        for index in range(4):
            file.seek(index * PIECE)
            file.write(b"piece %d" % index)
        file.truncate(3 * PIECE + 4096)


def opened_below(top: Path) -> list[str]:
    """What this process has open of `top`; threads that still end close files meanwhile."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(str(top))]


def assert_copied(area: Path, summary: Summary) -> None:
    assert summary.proved, summary.problems()
    same = trees.snapshot(bytes(area / "target")) == trees.snapshot(bytes(area / "source"))
    assert same  # nobody wants to see the difference
