"""One large file into an instance over three nodes, by one of them and by all three: pieces of 64 MiB, verified.

All nodes share this machine's processors, its memory and its one device, which real nodes do not: what is measured is
whether the work is spread, and what these three then leave room for. Each node copies by one process, so that there is
a processor for more than one of them. The processor time says how near the limit is.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from bench.row import Row
from tests.testbed import Cluster

if TYPE_CHECKING:
    from typing import Any

NODES = 3
SIZE_MIB = 8192
_SOURCE = "/global/alice/bench-file"

# Both copies are in the same job. The page cache has the source after the first line.
_SCRIPT = f"""#!/bin/bash
set -eu
cat {_SOURCE} > /dev/null
beeond-ctl stage in --json --quiet --workers 1 --here {_SOURCE} one | tail -n 1
rm "$BEEOND/one"
beeond-ctl stage in --json --quiet --workers 1 {_SOURCE} all | tail -n 1
"""


def rows() -> list[Row]:
    """A cluster of its own."""
    with Cluster.up(
        "bench-spread", nodes=NODES, with_product=True, device_size="12G", timeout_s=120
    ) as cluster:
        source = cluster.path("login", _SOURCE)
        with open(source, "wb") as file:
            block = os.urandom(1 << 20)
            for number in range(SIZE_MIB):
                file.write(number.to_bytes(8, "big") + block[8:])
        begun, busy = time.monotonic(), _busy_s()
        output = cluster.run_job("alice", _SCRIPT, f"-N{NODES}", "--exclusive", "--beeond", timeout_s=800)
        share = (_busy_s() - busy) / (time.monotonic() - begun) / (os.cpu_count() or 1)
        cluster.wait_idle()
    one, every = (_rate(json.loads(line)) for line in output.splitlines() if '"end"' in line)
    return [
        Row(f"one file of {SIZE_MIB} MiB over {NODES} nodes, by all of them", SIZE_MIB / every, "s", "by one of them",
            SIZE_MIB / one, SIZE_MIB / one),
        Row("  of this machine's processors in use meanwhile", 100 * share, "%"),
    ]  # fmt: skip


def _rate(end: dict[str, Any]) -> float:
    """MiB a second. Raises RuntimeError when it did not work."""
    if not end["proved"]:
        raise RuntimeError(f"the copy is not proved: {end['problems']}")
    return float(end["bytes"] / end["seconds"] / (1 << 20))


def _busy_s() -> float:
    """Seconds that the processors of this machine have worked."""
    with open("/proc/stat", encoding="ascii") as file:
        numbers = [int(each) for each in file.readline().split()[1:]]
    return (sum(numbers[:3]) + sum(numbers[5:7])) / os.sysconf("SC_CLK_TCK")
