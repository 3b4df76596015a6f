"""The warning that stage-out will take longer than the time limit leaves, at the end of a command that has copied.

By itself the job is told by the watch; but whoever types such a command is looking now.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOK_S: Final = 1.0


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
    text = estimate.warning(estimate.stage_out(found, mount, within_s=_LOOK_S), left_s)
    if text:
        sys.stderr.write(f"beeond-ctl: warning: {text}\n")
        sys.stderr.flush()
