"""The warning that stage-out will take longer than the job's time limit leaves. Printed where the user is looking.

Nothing of ours runs during a job that could say it by itself: the commands that a job types say it on their stderr,
which is the job's output.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from beeond_ctl.cli.progress import duration
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beeond_ctl.estimate import Estimate


_LOOK_S: Final = 1.0


def told(estimate: Estimate) -> str:
    """The estimate as a person says it."""
    size = f"{estimate.entries} entries, {format_size(estimate.size)}"
    more = "" if estimate.complete else " or more"
    if estimate.seconds is None:
        return f"{size}{more}; nothing was copied yet that would tell a rate"
    return f"about {duration(estimate.seconds)}{more} for {size}, at the rate of {estimate.rate_of}"


def warning(estimate: Estimate | None, left_s: float | None) -> str:
    """What to say if the time limit is nearer than the end of a stage-out that began now; else nothing."""
    if estimate is None or estimate.seconds is None or left_s is None or estimate.seconds <= left_s:
        return ""
    return (
        f"the stage-out of this job will take {told(estimate)}, and its time limit is {duration(left_s)} away; "
        "stage-out goes on after the limit, but holds the nodes: flush now what is finished"
    )


def warn(environ: Mapping[str, str]) -> None:
    """Print the warning if it is due. For the end of a command that has copied in a job; never fails it."""
    mount, job_id = environ.get("BEEOND", ""), environ.get("BEEOND_JOB_ID", "")
    if not mount or not job_id.isdigit() or environ.get("SLURM_JOB_ID") != job_id:
        return
    from beeond_ctl import estimate
    from beeond_ctl.cli.stage import hint

    found = hint(mount)
    left_s = estimate.time_left_s(int(job_id), environ) if found.get("places") else None
    if left_s is None:
        return
    text = warning(estimate.stage_out(found, mount, within_s=_LOOK_S), left_s)
    if text:
        sys.stderr.write(f"beeond-ctl: warning: {text}\n")
        sys.stderr.flush()
