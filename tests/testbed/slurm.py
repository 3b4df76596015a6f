"""The cluster's Slurm: its configuration as text, and what its commands print as values. Runs nothing."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

HOME = os.environ.get("SLURM_HOME", "")
"""The prefix of the Slurm that clusters run, in place of the distribution's."""
OUR_PLUGINS = "/usr/lib/slurm"  # beside those in HOME, which nodes see read-only

CPUS_PER_NODE = 4  # declared, not real: two users' jobs shall fit on the same nodes at once

JOB_ENDED = frozenset(
    [
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "BOOT_FAIL",
        "DEADLINE",
        "OUT_OF_MEMORY",
    ]
)

# proctrack/linuxproc keeps slurmd away from control groups, which belong to the machine.
# SchedulerParameters: a batch job starts with slurmctld's next tick, a second at most.
# SlurmdTimeout: what a lost node costs a test. MinJobAge: jobs can be asked about for a whole test session.
SLURM_CONF = """\
ClusterName={cluster}
SlurmctldHost=ctl
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmctldDebug=debug
SlurmdDebug=debug
LogTimeFormat=iso8601_ms

ProctrackType=proctrack/linuxproc
PropagateResourceLimits=NONE

PrologFlags=Alloc
Prolog=/etc/slurm/prolog.d/*
Epilog=/etc/slurm/epilog.d/*
PrologEpilogTimeout=300
BatchStartTimeout=300
MessageTimeout=10
TCPTimeout=2
SlurmctldTimeout=30
SlurmdTimeout=15
KillWait=5
UnkillableStepTimeout=60
InactiveLimit=0
Waittime=0
MinJobAge=3600
CompleteWait=0
ReturnToService=2
TreeWidth=64

SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000,bf_interval=1,bf_min_age_reserve=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
{extra}
NodeName={nodes} CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

PLUGSTACK_CONF = "include /etc/slurm/plugstack.conf.d/*.conf\n"

# No plugin of ours asks for control groups, but slurmd wants to know which there are. 22.05 cannot do without.
CGROUP_CONF = "CgroupPlugin=disabled\n" if HOME else "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


@dataclass(frozen=True, slots=True)
class NodeState:
    """What Slurm thinks of a node: e.g. {"IDLE", "DRAIN"} and the reason an admin reads."""

    flags: frozenset[str]
    reason: str

    def __str__(self) -> str:
        return "+".join(sorted(self.flags)) + (f" ({self.reason})" if self.reason else "")


def slurm_conf(cluster: str, nodes: list[str], extra: str = "") -> str:
    """The text of slurm.conf; `extra` lines come last but for nodes and partitions, so they win."""
    if HOME:
        extra += f"\nPluginDir={HOME}/lib/slurm:{OUR_PLUGINS}\n"
    return SLURM_CONF.format(cluster=cluster, nodes=",".join(nodes), cpus=CPUS_PER_NODE, extra=extra)


def parse_show(line: str) -> dict[str, str]:
    """One line of `scontrol -o show job|node` as a dictionary. Values may hold blanks, keys may not."""
    found = list(re.finditer(r"(?:^| )([A-Za-z][A-Za-z0-9_:/]*)=", line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=True)}


def parse_node_state(line: str) -> NodeState:
    """The state of one line of `scontrol -o show node`."""
    facts = parse_show(line)
    reason = re.sub(r" \[[^\[\]]*@\d{4}-\d\d-\d\dT[\d:]+\]$", "", facts.get("Reason", ""))
    flags = frozenset(facts["State"].replace("*", "+NOT_RESPONDING").split("+"))
    # Slurm up to 25.11 without accounting goes on showing the reason of a node that was resumed.
    return NodeState(flags, reason if flags & {"DOWN", "DRAIN", "FAIL"} else "")
