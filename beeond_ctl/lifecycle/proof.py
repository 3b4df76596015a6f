"""Which stage-outs are proved, written down where it outlives the instance: by each node, before it acts on it.

The leader may be lost as soon as it has told one node, which wipes its part. The others then learn it from that node.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from beeond_ctl.aside import tried
from beeond_ctl.errors import NodeError
from beeond_ctl.events import EventLog

if TYPE_CHECKING:
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.lifecycle.here import Here
    from beeond_ctl.state import State

IN_MEMORY: Final = "proved"
"""In paths.run: a file for each job whose event log could not be written."""


def name(state: State) -> str:
    """How a proof names the last stage-out that this node had a part in."""
    return f"{state.job.run_id}.{state.attempt}"


def keep(here: Here) -> None:
    """Write into the event log that the stage-out is proved; it is on the disk afterwards.

    A log that is full, or does not answer, is no reason to keep data that is proved: then it is told to the journal,
    and remembered in memory. So a power cut of all nodes that know it could still leave others with data that only
    `--discard` removes, but nothing is lost. Raises NodeError where there is no room in memory either.
    """
    config, job = here.config, here.state.job
    log = EventLog(config.paths.log, job.job_id, here.node)
    trouble = tried(
        lambda: log.keep("proved", run=job.run_id, attempt=here.state.attempt),
        within_s=config.deadlines.silence / 2,  # the leader is heard of again in time
    )
    if not trouble:
        return
    here.events.log("not-logged", message=trouble)
    path = Path(config.paths.run, IN_MEMORY, str(job.job_id))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{name(here.state)}\n")
    except OSError as error:
        raise NodeError(
            f"{here.node}: the proof of job {job.job_id} cannot be written to its event log ({trouble}), nor to {path} "
            f"({error.strerror}); make room there"
        ) from None


def in_memory(config: SiteConfig, job_id: int) -> list[str]:
    """The names of proofs that the job's event log could not take."""
    with suppress(OSError):
        return Path(config.paths.run, IN_MEMORY, str(job_id)).read_text().split()
    return []
