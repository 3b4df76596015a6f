"""Parts of a transfer, for tests of single steps: a copier without a scanner, a coordinator whose nodes a test is."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl.staging import copier
from beeond_ctl.staging.begin import Begun
from beeond_ctl.staging.coordinator import Coordinator
from beeond_ctl.staging.job import Identity, Job
from beeond_ctl.staging.worker import serve

if TYPE_CHECKING:
    from pathlib import Path

    from beeond_ctl.staging.transfer import Summary

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
        "folds": False, "hidden": "",
        "durable": False, "inodes": inodes, "source": str(area / "source"), "destination": str(area / "target"),
    }  # fmt: skip
    return copier.Copier({**setup, **more})


def coordinator(area: Path, *nodes: str, user: Identity | None = None, **more: Any) -> Coordinator:
    (area / "journal").mkdir(exist_ok=True)
    job = Job(bytes(area / "source"), bytes(area / "target"), **more)
    return Coordinator(job, Begun(job, user, area / "journal"), nodes)


def next_work(transfer: Coordinator, node: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while "wait" in (answer := transfer.take(node)):
        assert time.monotonic() < deadline
        transfer.wait(0.05)
    return answer


def finish(transfer: Coordinator, *nodes: str, user: Identity | None = None) -> Summary:
    """Serve `nodes` until the transfer has ended."""
    stop = threading.Event()
    threads = [
        threading.Thread(
            target=serve,
            args=(
                lambda node=node: transfer.take(node),
                lambda result, node=node: transfer.report(node, result),
            ),
            kwargs={"user": user, "stop": stop, "processes": 1, "pause": transfer.wait},
        )
        for node in nodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transfer.close()
    return transfer.summary()
