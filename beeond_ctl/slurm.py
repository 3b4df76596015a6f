"""What we ask of and tell Slurm: its environment of Prolog and Epilog, and `scontrol`.

Knows nothing of instances.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from typing import Final, TYPE_CHECKING

from beeond_ctl.errors import NodeError
from beeond_ctl.plan import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TIMEOUT_S: Final = 20.0
"""For one call of a Slurm command; slurmctld may be busy."""

REQUEST_VARIABLE: Final = "SPANK_BEEOND_REQUEST"
"""`spank_job_control_setenv("BEEOND_REQUEST")` arrives in Prolog and Epilog under this name."""


@dataclass(frozen=True, slots=True)
class Prolog:
    """What the environment of Prolog and Epilog says."""

    job: Job
    nodes: tuple[str, ...]
    node: str


def prolog(environ: Mapping[str, str]) -> Prolog:
    """Read Slurm's part of a Prolog's or Epilog's environment. Raises NodeError when something is missing."""
    uid, gid = _number(environ, "SLURM_JOB_UID"), _number(environ, "SLURM_JOB_GID")
    user = environ.get("SLURM_JOB_USER") or _user_name(uid)
    # SLURM_JOB_NODELIST is only there from some release after 22.05 on; SLURM_NODELIST in all.
    folded = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not folded:
        raise NodeError(
            "SLURM_NODELIST is not in the environment; this command is for Slurm's Prolog and Epilog"
        )
    nodes = expand_nodes(folded)
    node = environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    if node not in nodes:
        raise NodeError(
            f"{node}: is not in the job's node list {folded}; does SLURMD_NODENAME fit slurm.conf?"
        )
    restart = _number(environ, "SLURM_JOB_RESTART_COUNT", "0")
    return Prolog(Job(_number(environ, "SLURM_JOB_ID"), uid, gid, user, restart), nodes, node)


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise NodeError(
            f"{name} is {text!r} in the environment; this command is for Slurm's Prolog and Epilog"
        )
    return int(text)


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise NodeError(
            f"user {uid} is not known on this node; look at its user database (getent passwd {uid})"
        ) from None


def expand_nodes(folded: str) -> tuple[str, ...]:
    """Node names in Slurm's order of `n[1-3,7]`. Raises NodeError when `folded` is no node list.

    ClusterShell sorts as Slurm does: within one job's list the first node is the same everywhere, which is all we need.
    """
    if re.fullmatch(r"[A-Za-z0-9.-]+", folded):
        return (folded,)
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return tuple(NodeSet(folded, resolver=_no_groups()))
    except NodeSetException as error:
        raise NodeError(f"{folded!r} is not a node list: {error}") from None


def fold_nodes(nodes: Sequence[str]) -> str:
    """`nodes` in short: `n[1-3,7]`."""
    if len(nodes) == 1:
        return nodes[0]
    from ClusterShell.NodeSet import NodeSet

    return str(NodeSet.fromlist(list(nodes), resolver=_no_groups()))


def _no_groups() -> object:
    from ClusterShell.NodeUtils import GroupResolver

    return GroupResolver()


def command(path: Sequence[str], name: str) -> str:
    """Where Slurm's command `name` is. Raises NodeError."""
    found = shutil.which(name, path=os.pathsep.join(path))
    if found is None:
        raise NodeError(f"{name} is not in {':'.join(path)}; set slurm.path in the configuration")
    return found


def run(path: Sequence[str], name: str, *arguments: str) -> str:
    """What Slurm's command prints. Raises NodeError with its own words when it fails or does not answer."""
    try:
        done = subprocess.run(
            [command(path, name), *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NodeError(f"{name} {arguments[0]}: no answer from slurmctld within {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise NodeError(f"{name} {' '.join(arguments[:3])}: {' '.join(done.stderr.split()) or 'failed'}")
    return done.stdout


def drain(path: Sequence[str], node: str, reason: str) -> None:
    """Take `node` out of service with a `reason` that a person can act on. Raises NodeError.

    Slurm keeps the reason of a node that is drained already when its Prolog or Epilog fails afterwards.
    """
    text = re.sub(r"[^ -~]", "?", reason)[:1000]
    run(path, "scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={text}")


def reason(path: Sequence[str], node: str) -> str:
    """Why `node` is out of service; empty where it is not. Raises NodeError."""
    match = re.search(
        r"^\s*Reason=(.*?)(?: \[\S+@\S+\])?$", run(path, "scontrol", "show", "node", node), re.MULTILINE
    )
    return match[1] if match else ""


def resume(path: Sequence[str], node: str) -> None:
    """Return `node` to service. Raises NodeError."""
    run(path, "scontrol", "update", f"NodeName={node}", "State=RESUME")


def job_fields(path: Sequence[str], job_id: int) -> dict[str, str]:
    """The fields of `scontrol show job`; empty when Slurm no longer knows it. Raises NodeError when it does not answer.

    Values with spaces are cut at the first one, except the job name, which comes second on the first line.
    """
    try:
        text = run(path, "scontrol", "show", "job", str(job_id))
    except NodeError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    values = dict(re.findall(r"(\w+)=(\S*)", text))
    name = re.search(r"JobName=(.*)$", text, re.MULTILINE)
    if name:
        values["JobName"] = name[1]
    return values


def job_wants_us(path: Sequence[str], job_id: int) -> bool:
    """Whether the job is still to run: false once it was cancelled, requeued or has ended.

    A slurmctld that does not answer says nothing: the job counts as alive.
    """
    try:
        state = job_fields(path, job_id).get("JobState", "")
    except NodeError:
        return True
    return state in {"RUNNING", "CONFIGURING", "SUSPENDED"}
