"""Events of ended jobs in the site's directory on global storage: DIRECTORY/JOBID/NODE.jsonl, written by each node.

So a user finds the report of their job on a login node, where neither the nodes' logs nor ssh to them can be had. A
file may be read by root and the job's user alone, and where it had to be given to that user, may hold anything. Knows
nothing of what the events mean.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import events, userfiles
from beeond_ctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ENDING: Final = ".jsonl"
MAX_FILES: Final = 20_000
"""More nodes no job has."""


def publish(directory: str, job_id: int, uid: int, node: str, logged: Sequence[Mapping[str, Any]]) -> None:
    """Put the events of one node there, in place of those of before. Raises OSError, NodeError."""
    with userfiles.own_directory(directory) as top:
        name = str(job_id)
        userfiles.make_directory(name, top)
        with userfiles.own_directory(name, top) as place:
            data = b"".join(json.dumps(event).encode() + b"\n" for event in logged)
            userfiles.write(place, node + _ENDING, data, uid, keep=False)


def collect(directory: str, job_id: int) -> dict[str, list[dict[str, Any]]]:
    """The events of a job by node; nothing where none are there.

    Raises UsageError when the job is another user's, NodeError or OSError when the directory is not what it should be.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    with userfiles.own_directory(directory) as top:
        try:
            with userfiles.own_directory(str(job_id), top) as place:
                for name in sorted(os.listdir(place))[:MAX_FILES]:
                    if name.endswith(_ENDING) and not name.startswith("."):
                        found[name.removesuffix(_ENDING)] = events.parse(userfiles.read(place, name))
        except FileNotFoundError:
            return {}
        except PermissionError:
            raise UsageError(
                f"job {job_id} is not yours; only its user and root may see its report"
            ) from None
    return found
