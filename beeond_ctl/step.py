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
    """A job, seen from one of its processes. `here` is this machine's name, which may be none of `nodes` (salloc)."""

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
    if environ.get("BEEOND_JOB_ID") == job_id and environ.get("BEEOND_NODES"):
        folded = environ["BEEOND_NODES"]
    if not re.fullmatch(r"[0-9]{1,10}", job_id) or not folded:
        return None
    try:
        nodes = expand_nodes(folded)
    except NodeError:
        return None
    here = environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    return Allocation(int(job_id), nodes, here)


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
    return [
        found, f"--jobid={of.job_id}", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1", f"--nodelist={fold_nodes(nodes)}", "--mem=0", "--gres=none", "--mpi=none", "--no-kill",
        "--kill-on-bad-exit=0", "--wait=0", f"--immediate={_START_S}", "--job-name=beeond-ctl", "--chdir=/", "--quiet",
        *program,
    ]  # fmt: skip


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what srun would take for the options of this step."""
    kept = {name: value for name, value in environ.items() if not _NOT_FOR_STEPS.match(name)}
    return kept | {name: environ[name] for name in ("SLURM_CONF",) if name in environ}


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
