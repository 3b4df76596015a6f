"""Questions that several tests ask of the test cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.testbed.cluster import Cluster


def exists(cluster: Cluster, path: str, machine: str = "login") -> bool:
    """Whether `path` is on a machine; on global storage, if none is named."""
    return cluster.run(machine, ["test", "-e", path], check=False).returncode == 0


def own_words(output: str) -> str:
    """What a job's script said, without what the product added to its output."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("beeond: "))


def verdicts(cluster: Cluster, machine: str) -> dict[str, tuple[str, str]]:
    """What `check` finds there: verdict and text by subject."""
    done = cluster.run(machine, ["beeond-ctl", "check", "--json"], check=False)
    return {finding["subject"]: (finding["verdict"], finding["text"]) for finding in json.loads(done.stdout)}
