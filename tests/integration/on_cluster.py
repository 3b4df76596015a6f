"""Questions that several tests ask of the test cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.testbed.host import wait_until

if TYPE_CHECKING:
    from tests.testbed.cluster import Cluster


def exists(cluster: Cluster, path: str, machine: str = "login") -> bool:
    """Whether `path` is on a machine; on global storage, if none is named."""
    return cluster.run(machine, ["test", "-e", path], check=False).returncode == 0


def own_words(output: str) -> str:
    """What a job's script said, without what the product added to its output."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("beeond: "))


def given_up(cluster: Cluster, job: int, node: str, timeout_s: float = 90) -> str:
    """What the job is told of why it has no file system, once a node's Prolog has given up.

    From the event log: where the job is told it is gone with the job, which may end before a test has looked.
    """

    def probe() -> tuple[bool, str]:
        *lines, _ = cluster.read(node, f"/var/log/beeond-ctl/jobs/{job}.jsonl").split("\n")
        found = [event["message"] for event in map(json.loads, lines) if event["event"] == "gave-up"]
        return bool(found), "".join(found)

    return wait_until(f"{node} to give up", probe, timeout_s)


def verdicts(cluster: Cluster, machine: str) -> dict[str, tuple[str, str]]:
    """What `check` finds there: verdict and text by subject."""
    done = cluster.run(machine, ["beeond-ctl", "check", "--json"], check=False)
    return {finding["subject"]: (finding["verdict"], finding["text"]) for finding in json.loads(done.stdout)}
