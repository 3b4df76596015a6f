"""What Prolog and Epilog cost a job that did not ask for a file system: their price to everybody else."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from bench.row import Row, process_s
from tests.testbed import Cluster

ROUNDS = 400
JOBS = 20
NAME = "bench"
SLURM = Path(__file__).resolve().parents[1] / "slurm"
ENV = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "4242", "SLURM_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1"}
GOAL_MS = 5.0


def rows() -> list[Row]:
    """Each script by itself, then whole jobs on a cluster with and without the scripts."""
    return [*_alone(), _in_cluster()]


def _alone() -> list[Row]:
    with tempfile.TemporaryDirectory() as place:
        empty = Path(place) / "empty"
        empty.write_text("#!/bin/sh\nexit 0\n")
        empty.chmod(0o755)
        cases = {
            "prolog": str(SLURM / "prolog.d" / "50-beeond"),
            "epilog": str(SLURM / "epilog.d" / "50-beeond"),
            "empty": str(empty),
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(ROUNDS):
            for name, path in cases.items():
                times[name].append(process_s([path], ENV) * 1000)
    median = {name: statistics.median(found) for name, found in times.items()}
    peer = "a shell script with nothing in it"
    return [
        Row("Prolog script, from exec to return", median["prolog"], "ms", peer, median["empty"], GOAL_MS),
        Row("Epilog script, from exec to return", median["epilog"], "ms", peer, median["empty"], GOAL_MS),
    ]


def _in_cluster() -> Row:
    """`srun -N1 true` with both scripts installed, and with neither; alternating."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with Cluster.up(NAME, nodes=1, with_product=True) as cluster:
        scripts = [cluster.path("n1", f"/etc/slurm/{kind}.d/50-beeond") for kind in ("prolog", "epilog")]
        for number in range(2 * JOBS + 2):
            installed = number % 2 == 0
            for script in scripts:
                aside = script.parent.parent / f"{script.parent.name}-aside"
                if installed and aside.exists():
                    os.rename(aside, script)
                elif not installed and script.exists():
                    os.rename(script, aside)
            start = time.perf_counter()
            cluster.run("login", ["srun", "-N1", "true"], user="alice")
            seconds = time.perf_counter() - start
            cluster.wait_idle()
            if number > 1:  # the first of each warm the caches
                times[installed].append(seconds * 1000)
    with_both, with_neither = (statistics.median(times[key]) for key in (True, False))
    return Row(
        f"`srun -N1 true` with both scripts, {JOBS} jobs", with_both, "ms", "with neither", with_neither
    )
