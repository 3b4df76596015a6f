"""From within a job: which nodes it has, and how to start a program of the user's on them beside the user's own.

For commands that users type. What root asks of Slurm is in `slurm`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from beeond_ctl.errors import NodeError
from beeond_ctl.slurm import expand_nodes, fold_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PATH: Final = "/usr/bin:/opt/slurm/bin:/usr/local/bin"
_START_S: Final = 30
_NOT_FOR_STEPS: Final = re.compile(r"(SLURM|SRUN|SBATCH|SALLOC|SPANK)_|SLURMD_")
"""What Slurm sets for the step or job that we are in, and would take for options of the next one."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job, seen from one of its processes. `here` is this machine's name, which may be none of `nodes` (salloc).

    Of a heterogeneous job it is the component whose instance it is, or that the process belongs to.
    """

    job_id: int
    nodes: tuple[str, ...]
    here: str

    @property
    def others(self) -> tuple[str, ...]:
        """The nodes but this one."""
        return tuple(node for node in self.nodes if node != self.here)


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The job that we are in; None outside of any, or where its nodes cannot be told."""
    job_id = environ.get("SLURM_JOB_ID", "")
    folded = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    components = _components(environ)
    instance = environ.get("BEEOND_JOB_ID", "")
    if instance in (job_id, *components) and environ.get("BEEOND_NODES"):
        job_id, folded = instance, environ["BEEOND_NODES"]
    else:
        named = {
            each: environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}") for each, group in components.items()
        }
        job_id = next((each for each, nodes in named.items() if nodes == folded), job_id)
    if not re.fullmatch(r"[0-9]{1,10}", job_id) or not folded:
        return None
    try:
        nodes = expand_nodes(folded)
    except NodeError:
        return None
    here = environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    return Allocation(int(job_id), nodes, here)


def _components(environ: Mapping[str, str]) -> dict[str, str]:
    """Job ids of the components of the heterogeneous job that we are in, with their numbers; none in any other job."""
    found = {
        value: name.rpartition("_")[2]
        for name, value in environ.items()
        if re.fullmatch(r"SLURM_JOB_ID_HET_GROUP_[0-9]{1,3}", name)
    }
    return found if environ.get("SLURM_JOB_ID") in found else {}  # else they are left from a job further out


def argv(
    of: Allocation, nodes: Sequence[str], program: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """The command line that runs `program` once on each of `nodes`. Raises NodeError where there is no srun.

    `--overlap`: beside the user's own steps, which neither wait for it nor lose processors or memory to it; without
    `--exact` it may use all that the job has on a node (srun(1), and seen on 22.05). A node that dies ends only its
    part.
    """
    path = environ.get("PATH", "")
    found = shutil.which("srun", path=f"{path}:{_PATH}")
    if found is None:
        raise NodeError("srun is not in $PATH; add it, or use --here")
    group = _components(environ).get(str(of.job_id))  # to srun such a job has its first component's id
    which = (
        [f"--jobid={of.job_id}"]
        if group is None
        else [f"--jobid={environ['SLURM_JOB_ID']}", f"--het-group={group}"]
    )
    return [
        found, *which, "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1", f"--nodelist={fold_nodes(nodes)}", "--mem=0", "--gres=none", "--mpi=none", "--no-kill",
        "--kill-on-bad-exit=0", "--wait=0", f"--immediate={_START_S}", "--job-name=beeond-ctl", "--chdir=/", "--quiet",
        *program,
    ]  # fmt: skip


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what srun would take for the options of this step."""
    kept = {name: value for name, value in environ.items() if not _NOT_FOR_STEPS.match(name)}
    # Without SLURM_HET_SIZE srun finds no component to start anything on (22.05). What it starts may start more.
    shown = (
        r"SLURM_CONF|SLURM_HET_SIZE|SLURM_JOB_(ID|NODELIST)_HET_GROUP_[0-9]+"
        if _components(environ)
        else "SLURM_CONF"
    )
    return kept | {name: value for name, value in environ.items() if re.fullmatch(shown, name)}


def start(
    of: Allocation, nodes: Sequence[str], program: Sequence[str], stdin: bytes
) -> subprocess.Popen[bytes]:
    """Run `program` on `nodes`, each with `stdin`; srun ends with the last. Raises OSError, NodeError."""
    process = subprocess.Popen(
        argv(of, nodes, program, os.environ),
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
        env=environment(os.environ), start_new_session=True,  # Ctrl-C is for us, who then stop it in order
    )  # fmt: skip
    assert process.stdin is not None  # noqa: S101
    with suppress(BrokenPipeError), process.stdin as stream:  # it has ended already, and says why
        stream.write(stdin)
    return process
