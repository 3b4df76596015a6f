"""How long the nodes of a large job take to meet; `bench/rendezvous_sim.py` says how that is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.row import Row

SIMULATION = Path(__file__).with_name("rendezvous_sim.py")
COUNTS = (16, 256, 1024)


def rows() -> list[Row]:
    """The first meeting, which has all connections and handshakes in it, and a later one."""
    found = []
    for count in COUNTS:
        argv = [sys.executable, str(SIMULATION), "--run", str(count)]
        done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, timeout=120)
        times = json.loads(done.stdout)
        found += [
            Row(f"{count} nodes: first meeting", times["hello"], "s"),
            Row(f"{count} nodes: the last one", times["ready"], "s"),
        ]
    return found
