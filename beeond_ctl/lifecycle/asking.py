"""What the leader asks Slurm while a file system comes up; that slurmctld is silent is no node's fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from beeond_ctl import slurm
from beeond_ctl.errors import EndedError, NodeError, OutsideError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from beeond_ctl.lifecycle.here import Here

_T = TypeVar("_T")

_AGAIN_S: Final = 0.5
_LATE_S: Final = 2 * slurm.TIMEOUT_S
"""What the leader is asking when its deadline passes may take that long."""


def answered(here: Here, question: Callable[[], _T], *, check: Callable[[], object] = bool) -> _T:
    """The answer to `question`, which is asked again for `deadlines.meet`; `check` may end that by raising something.

    Raises NodeError where this node lacks Slurm's commands, OutsideError when there is no answer, what else it raises.
    """
    for name in ("scontrol", "squeue"):
        slurm.command(here.config.slurm.path, name)
    try:
        return slurm.patiently(question, within_s=here.config.deadlines.meet, pause_s=_AGAIN_S, check=check)
    except EndedError:
        raise
    except NodeError as error:
        text = f"Slurm does not answer ({one_line(error)})"
        raise OutsideError(f"{text}; when it does, submit the job again") from error


def patience_s(here: Here, *, leads: bool) -> float:
    """How long to wait at the meeting that the leader comes to when it is `answered`."""
    return here.config.deadlines.meet + (0 if leads else _LATE_S)
