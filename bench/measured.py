"""Jobs on a test cluster whose Prolog and Epilog are timed from outside, by the script that Slurm runs."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.testbed import Cluster, TestbedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAME = "bench"
LOG = "/var/log/bench-hooks"

# What Slurm runs in place of the product's script, which it runs in turn. One start of date(1), about a millisecond, is
# in what it measures. All nodes have this machine's clock.
WRAPPER = """\
#!/bin/sh
[ -n "${{SPANK_BEEOND_REQUEST-}}" ] || exit 0
begin=$(/bin/date +%s%N)
/etc/slurm/{kind}-measured
code=$?
echo "$SLURM_JOB_ID {kind} $begin $(/bin/date +%s%N) $code" >> {log}
exit $code
"""


@dataclass(frozen=True, slots=True)
class Times:
    """One script of one job, over its nodes; in seconds."""

    slowest: float
    """The longest that the script took on any node: Python's start included."""
    span: float
    """From its start on the first node to its return on the last one: Slurm does not start it everywhere at once."""


@contextmanager
def cluster(nodes: int, device_size: str = "4G") -> Iterator[Cluster]:
    """A cluster with the product, and with the scripts wrapped."""
    with Cluster.up(NAME, nodes=nodes, with_product=True, device_size=device_size, timeout_s=120) as made:
        for node in made.nodes():
            for kind in ("prolog", "epilog"):
                script = made.path(node, f"/etc/slurm/{kind}.d/50-beeond")
                script.rename(made.path(node, f"/etc/slurm/{kind}-measured"))
                script.write_text(WRAPPER.format(kind=kind, log=LOG))
                script.chmod(0o755)
        yield made


def jobs(made: Cluster, nodes: int, count: int, option: str = "--beeond") -> tuple[list[Times], list[Times]]:
    """Prolog's and Epilog's times of `count` jobs, one after another; one more before them warms the caches.

    Raises TestbedError when a job, its Prolog or its Epilog fails.
    """
    prologs, epilogs = [], []
    for number in range(count + 1):
        output = made.run(
            "login", ["srun", f"-N{nodes}", option, "printenv", "SLURM_JOB_ID"], user="alice"
        ).stdout
        job = output.split()[0]
        prolog, epilog = (_times(made, nodes, job, kind) for kind in ("prolog", "epilog"))
        if number:
            prologs.append(prolog)
            epilogs.append(epilog)
    made.wait_idle()
    return prologs, epilogs


def _times(made: Cluster, nodes: int, job: str, kind: str) -> Times:
    deadline = time.monotonic() + 60
    while True:
        lines = [line.split() for node in made.nodes()[:nodes] for line in made.read(node, LOG).splitlines()]
        found = [line for line in lines if line[:2] == [job, kind]]
        if any(line[4] != "0" for line in found):
            raise TestbedError(f"the {kind} of job {job} failed")
        if len(found) == nodes:
            begins, ends = [int(line[2]) for line in found], [int(line[3]) for line in found]
            longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
            return Times(longest / 1e9, (max(ends) - min(begins)) / 1e9)
        if time.monotonic() > deadline:
            raise TestbedError(f"the {kind} of job {job} has ended on {len(found)} of {nodes} nodes only")
        time.sleep(0.05)


def slowest(found: Sequence[Times]) -> float:
    """The median job's slowest node, in seconds."""
    return statistics.median(times.slowest for times in found)


def span(found: Sequence[Times]) -> float:
    """The median job's time from the first start to the last return, in seconds."""
    return statistics.median(times.span for times in found)
