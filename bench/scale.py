"""Bring-up by number of nodes. They all share this machine's cores, which real nodes do not: an upper bound."""

from __future__ import annotations

import os

from bench import measured
from bench.row import Row

COUNTS = (2, 4, 8, 16)
JOBS = 4


def rows() -> list[Row]:
    """One cluster of the largest size; jobs on parts of it."""
    found = []
    cores = os.cpu_count()
    with measured.cluster(max(COUNTS), device_size="1G") as cluster:
        base = 0.0
        for count in COUNTS:
            prologs, epilogs = measured.jobs(cluster, count, JOBS)
            up, down = measured.slowest(prologs), measured.slowest(epilogs)
            base = base or up
            peer = "" if count == COUNTS[0] else f"with {COUNTS[0]} nodes"
            found += [
                Row(
                    f"{count} nodes on {cores} cores: Prolog, the slowest node",
                    up,
                    "s",
                    peer,
                    base if peer else None,
                ),
                Row(f"{count} nodes on {cores} cores: Epilog, the slowest node", down, "s"),
            ]
    return found
