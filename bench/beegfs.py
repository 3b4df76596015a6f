"""BeeGFS: from the first server's start to Online and Good, to a mount, and down; growth; and a job of 4,096 nodes.

With BEEGFS_HOME=PREFIX the daemons are the real ones in that directory, else stand-ins; the rows say which. Stand-ins
take BeeGFS's fixed intervals, and Python's start besides, so they show growth and the order of things, and no goal
is theirs.
The kernel client is a stand-in wherever the kernel has no module for it: a mount here is a bind mount.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import beegfs_bare, measured
from bench.row import Row
from tests.integration import test_beegfs as beegfs
from tests.standins.beegfs import programs

if TYPE_CHECKING:
    from tests.testbed import Cluster

COUNTS = (2, 4, 8, 16)
BARE = "the same daemons, started at once by hand"
PAIRS = 4
JOBS = 3
INTERVAL_S = 3.0
"""From registration to Online and Good, fixed in BeeGFS."""
STOCK_UP_S, STOCK_DOWN_S = 4.6, 13.3
STOCK = "stock beeond -P, 4 nodes, as measured elsewhere"
SIMULATION = Path(__file__).with_name("beegfs_sim.py")


def rows() -> list[Row]:
    """Both generations if they are stand-ins, else the real one."""
    home = os.environ.get("BEEGFS_HOME", "")
    editions = (programs.real_edition(Path(home)),) if home else ("7.4", "8")
    found = []
    with measured.cluster(max(COUNTS), device_size="2G") as cluster:
        for edition in editions:
            found += _edition(cluster, edition, home)
    return [*found, *_simulation()]


def _edition(cluster: Cluster, edition: str, home: str) -> list[Row]:
    nodes = tuple(cluster.nodes())
    beegfs.furnish(cluster, edition, haste=False, nodes=nodes, start=60, silence=20)
    for node in nodes:
        if home:
            place, mounter = cluster.path(node, beegfs.BIN), cluster.path(node, "/usr/sbin")
            programs.install_real(place, Path(home), edition, mounter)
        cluster.run(node, ["beeond-ctl", "prepare"])
    what, found, first = "real" if home else "stand-ins", [], 0.0
    if home:
        beegfs_bare.seconds(cluster, nodes, edition)  # the directories are there from now on
    for count in COUNTS:
        times = [_job(cluster, count) for _ in range(JOBS)]
        bare = [beegfs_bare.seconds(cluster, nodes[:count], edition) for _ in range(JOBS if home else 0)]
        middle = {name: statistics.median(each[name] for each in times) for name in times[0]}
        first = first or middle["usable"]
        name = f"{edition} ({what}), {count} nodes"
        if count == PAIRS:
            alone = _own_stop(cluster, nodes[0])
            found += [
                Row(f"{name}: first server's start to all Online and Good", middle["usable"], "s",
                    "BeeGFS's own interval", INTERVAL_S,
                    1.1 * INTERVAL_S if home else None),
                Row("  the same", middle["usable"], "s", STOCK, STOCK_UP_S),
                Row(f"{name}: stop and wipe", middle["down"], "s", "one daemon's own stop, the slowest",
                    alone, 1.1 * alone),
                Row("  the same", middle["down"], "s", STOCK, STOCK_DOWN_S),
            ]  # fmt: skip
            if edition == "7.4":
                found.append(
                    Row(
                        f"{name}: first server's start to mounted",
                        middle["mounted"],
                        "s",
                        STOCK,
                        STOCK_UP_S,
                        0.5,
                    )
                )
        growth = f"{name}: growth, to all Online and Good"
        peer = "" if count == COUNTS[0] else f"with {COUNTS[0]} nodes"
        found.append(Row(growth, middle["usable"], "s", peer, first if peer else None))
        if bare:
            by_hand = statistics.median(bare)
            found.append(Row("  the same", middle["usable"], "s", BARE, by_hand, 1.1 * by_hand))
    if home:
        beegfs_bare.remove(cluster, nodes)
    return found


def _job(cluster: Cluster, count: int) -> dict[str, float]:
    """Seconds of one job on `count` nodes, by its event logs: all machines have this one's clock."""
    option = "--beeond=backend=beegfs"
    told = cluster.run(
        "login", ["srun", f"-N{count}", option, "printenv", "SLURM_JOB_ID"], user="alice"
    ).stdout
    cluster.wait_idle()
    job = int(told.split()[0])
    logs = [found for node in cluster.nodes() if (found := beegfs.events(cluster, node, job))]
    lead = next(found for found in logs if any(event.get("step") == "becoming usable" for event in found))
    began = min(_begin(found, "starting") for found in logs)
    stopping = [beegfs.step(found, "stopping") for found in logs]
    return {
        "usable": beegfs.step(lead, "becoming usable")["t"] - began,
        "mounted": max(beegfs.step(found, "mounting")["t"] for found in logs) - began,
        "down": max(beegfs.step(found, "wiping")["t"] for found in logs)
        - min(event["t"] - event["seconds"] for event in stopping),
    }


def _own_stop(cluster: Cluster, node: str) -> float:
    """Seconds that the slowest daemon of a job on `node` alone takes to end by SIGTERM."""
    job = beegfs.begin(cluster, "true", "-N1", "-w", node, "--beeond=backend=beegfs")
    processes = json.loads(cluster.read(node, f"/run/beeond-ctl/jobs/{job}/state.json"))["processes"]
    slowest = 0.0
    for name in ("beegfs-meta", "beegfs-storage", "beegfs-mgmtd"):
        pid = processes[name][0]
        since = time.perf_counter()
        cluster.run(node, ["sh", "-c", f"kill {pid}; while kill -0 {pid} 2>&-; do sleep 0.01; done"])
        slowest = max(slowest, time.perf_counter() - since)
    beegfs.finish(cluster, job)
    cluster.wait_idle()
    return slowest


def _begin(found: list[dict[str, Any]], phase: str) -> float:
    return float(next(event["t"] for event in found if event.get("phase") == phase))


def _simulation() -> list[Row]:
    found = []
    for count in (64, 1024, 4096):
        done = subprocess.run(
            [sys.executable, str(SIMULATION), str(count)], check=True, stdout=subprocess.PIPE, timeout=200
        )
        times = json.loads(done.stdout)
        found += [
            Row(f"{count} nodes, simulated: all meetings of a bring-up", times["meetings"], "s"),
            Row(
                f"{count} nodes: one question to mgmtd, program and reading its list", times["question"], "s"
            ),
            Row(f"{count} nodes: questions until Online and Good, all by the leader", times["questions"], ""),
        ]
    return found
