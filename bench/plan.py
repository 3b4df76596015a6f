"""The plan of a job of 10,000 nodes, each measurement in a process of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from bench.row import Row

NODES = 10_000
ROUNDS = 5
LIST = f"n[00001-{NODES:05}]"

_CODE = """
import json, resource, sys, time
from dataclasses import asdict
from beeond_ctl import backends, slurm, state
from beeond_ctl.config import SiteConfig
from beeond_ctl.plan import Job, make_plan
from beeond_ctl.request import parse_options
what, folded = sys.argv[1:]
config = SiteConfig.model_validate({"storage": {"kind": "directory", "paths": ["/nvme0/beeond", "/nvme1/beeond"]}})
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
start = time.perf_counter()
nodes = slurm.expand_nodes(folded)
expanded = time.perf_counter()
job = Job(123456, 2001, 2001, "alice")
made = make_plan(config, parse_options([("beeond", "capacity=1PiB")]), job, nodes)
backend, keys = backends.get(made.backend), backends.Keys("0" * 64)
size = 0
for node in nodes if what == "all" else nodes[:1]:
    for service in backend.services(made, node, keys):
        size += sum(len(file.content) for file in service.files)
    if what == "one":
        mount = backend.mount(made, node, keys)
        size += sum(len(file.content) for file in mount.service.files)
planned = time.perf_counter()
kept = state.State(job, nodes, nodes[0], "", config.model_dump(mode="json"))
json.dumps(asdict(kept))
saved = time.perf_counter()
print(json.dumps({
    "expand": expanded - start, "plan": planned - start, "state": saved - planned, "bytes": size,
    "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "base": base,
}))
"""


def rows() -> list[Row]:
    """Time and memory, for one node and for all."""
    one, every = _measure("one"), _measure("all")
    return [
        Row("plan: node list, one node's services and mount, volume files", one["plan"], "s", goal=1.0),
        Row("of that: the node list", one["expand"], "s"),
        Row(
            "peak memory of that process",
            one["rss"],
            "MiB",
            "with the imports alone",
            one["base"],
            goal=200.0,
        ),
        Row("plan: node list, all services of all nodes", every["plan"], "s", goal=1.0),
        Row(
            "peak memory of that process",
            every["rss"],
            "MiB",
            "with the imports alone",
            every["base"],
            goal=200.0,
        ),
        Row("a client's volume file", one["bytes"] / 2**20, "MiB"),
        Row("the state of one node as text, once for each step", one["state"] * 1000, "ms"),
    ]


def _measure(what: str) -> dict[str, float]:
    found = []
    for _ in range(ROUNDS):
        argv = [sys.executable, "-c", _CODE, what, LIST]
        found.append(json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout))
    return {name: statistics.median(measured[name] for measured in found) for name in found[0]}
