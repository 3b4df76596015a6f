"""What the instances of one node may not share: port blocks and mount points.

Two jobs that start at the same moment would both find a block free, since neither has bound its ports yet. A claim is
a file that holds the job's id; that of a job without a run directory is stale. Foreign services are found by trying
to bind.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from beeond_ctl import listeners
from beeond_ctl.errors import UserError
from beeond_ctl.plan import BLOCK
from beeond_ctl.state import run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@contextmanager
def _claims(root: str) -> Iterator[Path]:
    directory = Path(root) / "claims"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield directory
    finally:
        os.close(descriptor)


def _owner(root: str, path: Path) -> int | None:
    """The living job that holds the claim at `path`."""
    with suppress(FileNotFoundError):
        text = path.read_text()
        if text.isdigit() and run_dir(root, int(text)).exists():
            return int(text)
    return None


def claim_ports(root: str, job_id: int, blocks: Sequence[int]) -> list[int]:
    """Claim those of `blocks` (first ports) that are free on this node, and return them."""
    free = []
    with _claims(root) as directory:
        for block in blocks:
            path = directory / f"port-{block}"
            if _owner(root, path) in (None, job_id) and _bindable(block):
                path.write_text(str(job_id))
                free.append(block)
    return free


def taken(block: int) -> str:
    """Which users have ports of `block`, which was free when it was claimed, to be told; empty if none is seen to."""
    return listeners.strangers(range(block, block + BLOCK))


def keep_ports(root: str, job_id: int, block: int) -> None:
    """Give up the job's port blocks but for `block`."""
    with _claims(root) as directory:
        for path in directory.glob("port-*"):
            if path.name != f"port-{block}" and path.read_text() == str(job_id):
                path.unlink()


def claim_mount(root: str, job_id: int, point: str) -> None:
    """Claim the mount point for the job. Raises UserError when another job on this node has it."""
    with _claims(root) as directory:
        path = directory / ("mount" + point.replace("%", "%%").replace("/", "%s"))
        owner = _owner(root, path)
        if owner not in (None, job_id):
            raise UserError(
                f"--beeond: mount={point} is in use by job {owner} on a node of this job; choose another or none"
            )
        path.write_text(str(job_id))


def stale(root: str, *, remove: bool) -> list[str]:
    """The claims of jobs that are gone, by what they claim; with `remove`, they are gone too."""
    found = []
    with _claims(root) as directory:
        for path in sorted(directory.iterdir()):
            if _owner(root, path) is None:
                found.append(path.name.replace("%s", "/").replace("%%", "%"))
                if remove:
                    path.unlink()
    return found


def release(root: str, job_id: int) -> None:
    """Give up all claims of the job."""
    with _claims(root) as directory:
        for path in directory.iterdir():
            if path.read_text() == str(job_id):
                path.unlink()


def _bindable(block: int) -> bool:
    # The last port of a block is the rendezvous', which may be listening already.
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM)
    return all(_free(port, kind) for port in range(block, block + BLOCK - 1) for kind in kinds)


def _free(port: int, kind: int) -> bool:
    with socket.socket(socket.AF_INET, kind) as probe:
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
