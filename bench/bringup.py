"""Bring-up and tear-down with nothing to stage, as Slurm's jobs see them.

The peer does what cannot be left out, and nothing else: on all nodes at once a shell script starts the same daemons
from the same files, waits until every brick listens, mounts, and makes a directory. It agrees on nothing,
proves nothing, and keeps no state. Its tear-down unmounts and, when all have done that (clients end when a brick does),
ends the daemons and removes their data.
"""

from __future__ import annotations

import json
import shlex
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from bench import measured
from bench.row import Row
from tests.testbed import product

if TYPE_CHECKING:
    from tests.testbed import Cluster

NODES = 3
JOBS = 12
GOAL_S = 1.0
PEER = "the same daemons from a shell script"
JOB = "900000"


def rows() -> list[Row]:
    """Three nodes with glusterfs on directories and on images, then one node."""
    with measured.cluster(NODES) as cluster:
        peer_up, peer_down = _peer(cluster)
        prologs, epilogs = measured.jobs(cluster, NODES, JOBS)
        found = [
            Row(
                "glusterfs, 3 nodes: Prolog, the slowest node",
                measured.slowest(prologs),
                "s",
                PEER,
                peer_up,
                GOAL_S,
            ),
            Row("  from the first node's start to the last one's return", measured.span(prologs), "s"),
            Row(
                "glusterfs, 3 nodes: Epilog, the slowest node",
                measured.slowest(epilogs),
                "s",
                PEER,
                peer_down,
                GOAL_S,
            ),
            Row("  from the first node's start to the last one's return", measured.span(epilogs), "s"),
        ]
        prologs, epilogs = measured.jobs(cluster, 1, JOBS)
        found += [
            Row("local, 1 node: Prolog", measured.slowest(prologs), "s"),
            Row("local, 1 node: Epilog", measured.slowest(epilogs), "s"),
        ]
        cluster.write_config(product.config(storage="image"))
        prologs, epilogs = measured.jobs(cluster, NODES, JOBS, "--beeond=capacity=3GiB")
        found += [
            Row("glusterfs on images, 3 nodes: Prolog, the slowest node", measured.slowest(prologs), "s"),
            Row("glusterfs on images, 3 nodes: Epilog, the slowest node", measured.slowest(epilogs), "s"),
        ]
    return found


UP = """
begin=$(date +%s%N)
mkdir -p {data} {logs} {mount}
{brick} > /dev/null 2>&1 < /dev/null & echo $! > {run}/pids
for host in {hosts}; do until (: < /dev/tcp/$host/{port}) 2> /dev/null; do sleep 0.005; done; done
{client} > /dev/null 2>&1 < /dev/null & echo $! >> {run}/pids
until mountpoint -q {mount}; do sleep 0.005; done
mkdir {mount}/$(hostname)
echo $(($(date +%s%N) - begin))
"""
UNMOUNT = """
begin=$(date +%s%N)
umount {mount}
echo $(($(date +%s%N) - begin))
"""
REMOVE = """
begin=$(date +%s%N)
kill $(cat {run}/pids) 2> /dev/null || true
for pid in $(cat {run}/pids); do while [ -e /proc/$pid ]; do sleep 0.005; done; done
rm -r {home} {run}
rmdir {mount}
echo $(($(date +%s%N) - begin))
"""


def _peer(cluster: Cluster) -> tuple[float, float]:
    """Seconds on the slowest node, up and down; medians."""
    ups: list[float] = []
    downs: list[float] = []
    nodes = cluster.nodes()[:NODES]
    with ThreadPoolExecutor(NODES) as pool:

        def slowest_s(script: str) -> float:
            argvs = [["bash", "-euc", script.format(**words[node])] for node in nodes]
            return max(int(done.stdout) for done in pool.map(cluster.run, nodes, argvs)) / 1e9

        for number in range(JOBS + 1):
            words = {node: _furnish(cluster, node) for node in nodes}
            up, down = slowest_s(UP), slowest_s(UNMOUNT) + slowest_s(REMOVE)
            if number:
                ups.append(up)
                downs.append(down)
    return statistics.median(ups), statistics.median(downs)


def _furnish(cluster: Cluster, node: str) -> dict[str, str]:
    """Write the files of the node's daemons, which is not measured, and tell the script's words."""
    argv = ["beeond-ctl", "plan", "-w", f"n[1-{NODES}]", "--job", JOB, "--node", node, "--json"]
    plan = json.loads(cluster.run(node, argv).stdout)
    for path, content in plan["files"].items():
        cluster.path(node, path).parent.mkdir(parents=True, exist_ok=True)
        cluster.path(node, path).write_text(content)
    brick, client = (shlex.join(service["argv"]) for service in plan["services"])
    run, home = f"/run/beeond-ctl/jobs/{JOB}", plan["targets"][0]
    return {
        "brick": brick, "client": client, "run": run, "logs": f"{run}/logs", "home": home, "data": f"{home}/data",
        "mount": plan["mount"], "port": str(plan["ports"]["first"]), "hosts": " ".join(cluster.nodes()[:NODES]),
    }  # fmt: skip
