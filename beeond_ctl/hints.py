"""What the user of an instance may know of it on this node: a file for each, for `status` without privileges.

The state file is root's alone, since it tells how to take the instance down. Losing a hint loses nothing.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from beeond_ctl import userfiles
from beeond_ctl.errors import NodeError
from beeond_ctl.state import run_dir


def _directory(root: str) -> Path:
    return Path(root) / "users"


def write(root: str, job_id: int, uid: int, facts: dict[str, Any]) -> None:
    """Let user `uid` know `facts`, which JSON has to be able to say. A hint that cannot be written is left out."""
    directory = _directory(root)
    with suppress(OSError, NodeError):
        userfiles.make_directory(str(directory))
        with userfiles.own_directory(str(directory)) as opened:
            userfiles.write(opened, str(job_id), json.dumps(facts).encode(), uid, keep=True)


def remove(root: str, job_id: int) -> None:
    """Remove the hint of a job; a no-op where there is none."""
    with suppress(FileNotFoundError):
        (_directory(root) / str(job_id)).unlink()


def read_all(root: str) -> list[dict[str, Any]]:
    """What this process's user may know, by job id."""
    found = []
    with suppress(OSError, NodeError), userfiles.own_directory(str(_directory(root))) as opened:
        for name in sorted((name for name in os.listdir(opened) if name.isdigit()), key=int):
            with suppress(OSError, ValueError):
                found.append(json.loads(userfiles.read(opened, name)))
    return found


def forget_stale(root: str) -> None:
    """Remove the hints of jobs that are gone, and what a crash left of one that was being written."""
    with suppress(FileNotFoundError):
        for path in _directory(root).iterdir():
            job = path.name.lstrip(".").partition(".")[0]
            if not job.isdigit() or not run_dir(root, int(job)).exists():
                path.unlink(missing_ok=True)
