"""Whose the id of an instance is: Slurm's, or that of `beeond-ctl up`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from beeond_ctl import events
from beeond_ctl.plan import FIRST_OWN_ID, OLD_OWN_IDS

if TYPE_CHECKING:
    from beeond_ctl.config import SiteConfig


def without_slurm(config: SiteConfig, job_id: int) -> bool:
    """Whether `up` made the instance. An old id may be that of a federation's job: the event log has what began it."""
    if job_id not in OLD_OWN_IDS:
        return job_id >= FIRST_OWN_ID
    logged = events.last_run(events.read(config.paths.log, job_id))
    return bool(logged) and logged[0].get("event") == "up"
