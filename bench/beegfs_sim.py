"""Bring-up of BeeGFS in a job of thousands of nodes: its meetings, and the leader's questions to mgmtd.

    python bench/beegfs_sim.py NODES

The meetings are those of `bench/rendezvous_sim.py`, with their real leader; a bring-up of BeeGFS has eight of them.
The list is as mgmtd's tool prints it, with all servers Online after 3.0 s; a process is started for each question, as
the leader does, and what it prints is read by the product. Nobody else asks: the other nodes wait at a meeting.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from beeond_ctl.backends import Keys, beegfs
from beeond_ctl.config import SiteConfig
from beeond_ctl.plan import Job, Plan, make_plan
from beeond_ctl.request import Request
from bench.rendezvous_sim import POINTS

MEETINGS = 8
"""prepared, managed, serving, registered, settled, mounted, probed, ready."""
ONLINE_S = 3.0
EARLY_S, PAUSE_S = 0.3, 0.05
"""Between two questions, before and when Online is due, as in `beeond_ctl.lifecycle.steps`."""


def listing(plan: Plan, *, online: bool) -> bytes:
    """What `beegfs-ctl --listtargets` prints of the storage servers of a job."""
    state = "Online" if online else "Probably-offline"
    lines = [
        f"{index:>8} {state:>16}         Good   beegfs-storage {node} [ID: {index}]"
        for index, node in enumerate(plan.nodes, 1)
    ]
    return "\n".join(["TargetID     Reachability  Consistency   NodeID", *lines, ""]).encode()


def main(count: int) -> None:
    """Print times as JSON."""
    nodes = tuple(f"n{number:05}" for number in range(1, count + 1))
    config = SiteConfig.model_validate({"backend": {"default": "beegfs", "allowed": ["beegfs"]}})
    made = make_plan(config, Request(), Job(1, 2001, 2001, "alice"), nodes, block=24000)
    plan = Plan(made.config, made.request, made.job, made.nodes, made.backend, made.block, "7.4")
    question = beegfs.usable(plan, Keys("0" * 64))[0]
    took, asked, text = 0.0, 0, {online: listing(plan, online=online) for online in (False, True)}
    began = time.perf_counter()
    missing = dict.fromkeys(nodes, "")
    while missing:
        since = time.perf_counter()
        printed = subprocess.run(
            ["cat"], input=text[since - began >= ONLINE_S], stdout=subprocess.PIPE, check=True
        )
        missing = question.missing(printed.stdout)
        took, asked = took + time.perf_counter() - since, asked + 1
        early = time.perf_counter() + EARLY_S < began + question.due_s
        time.sleep(EARLY_S if early else PAUSE_S)
    simulation = Path(__file__).with_name("rendezvous_sim.py")
    done = subprocess.run(
        [sys.executable, str(simulation), "--run", str(count)], check=True, stdout=subprocess.PIPE
    )
    times = json.loads(done.stdout)
    later = [times[point] for point in POINTS[1:]]
    meetings = times[POINTS[0]] + (MEETINGS - 1) * sum(later) / len(later)
    sys.stdout.write(
        json.dumps(
            {
                "meetings": meetings,
                "question": took / asked,
                "questions": asked,
                "leader": times["leader CPU"],
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
