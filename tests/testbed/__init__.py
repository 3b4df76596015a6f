"""A real Slurm cluster on one machine, in namespaces: no containers, no systemd, nothing visible outside.

    from tests.testbed import Cluster
    with Cluster.up("mine") as cluster:
        jobid = cluster.submit("alice", "#!/bin/sh\\nsrun hostname\\n", "-N2")
        cluster.wait_job(jobid)

It must not know what the product does with a job: it installs files that it is given (`product`) and
otherwise behaves as a site would. Only Python's standard library is used, so that any python3 can run it.
"""

from tests.testbed.cluster import Cluster
from tests.testbed.host import CommandError, TestbedError, WaitError
from tests.testbed.snapshot import Snapshot

__all__ = ["Cluster", "CommandError", "Snapshot", "TestbedError", "WaitError"]
