"""Where a transfer that a user types runs: on all nodes of the job, or here. Joins `step` with `staging.spread`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from beeond_ctl.staging.spread import Others
    from beeond_ctl.step import Allocation

_WORKER: Final = (sys.executable, "-I", "-X", "utf8", "-m", "beeond_ctl.staging.spread")
_RELAYED: Final = "BEEOND_CTL_RELAYED"
"""Set for a command that was passed on already: where node and host names do not fit it must not go round."""

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _allocation() -> Allocation | None:
    """The job that we are in. Outside of any, what would know is not even read in."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    from beeond_ctl.step import allocation

    return allocation(os.environ)


def others(workers: int | None, *, here: bool, nice: int = 0) -> Others | None:
    """The other nodes of the job that we are in, to copy with; None where there are none, or with `here`."""
    job = None if here else _allocation()
    if job is None or job.here not in job.nodes or not job.others:
        return None
    from beeond_ctl import step
    from beeond_ctl.staging.spread import Others

    return Others(
        job.here, job.others, partial(step.start, job, job.others, _WORKER), processes=workers, nice=nice
    )


def relayed(*, here: bool) -> int | None:
    """In a shell that is in a job but on none of its nodes (`salloc`): run this same command on the first one.

    Its exit code; None where there is nothing to relay. srun would end the command at once at a Ctrl-C, so it does not
    get any: what stops us goes through it as SIGUSR1, and the command stops in order. Raises NodeError.
    """
    job = None if here else _allocation()
    if job is None or job.here in job.nodes or _RELAYED in os.environ:
        return None
    from beeond_ctl import step
    from beeond_ctl.cli.stage import working_directory

    command = (sys.executable, "-I", "-X", "utf8", sys.argv[0], *sys.argv[1:])
    line = step.argv(job, job.nodes[:1], command, os.environ)
    line[line.index("--chdir=/")] = f"--chdir={working_directory()}"
    got: list[int] = []
    try:
        relay = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            env=step.environment(os.environ) | {_RELAYED: "1"},
            start_new_session=True,
        )
    except OSError as error:
        raise NodeError(
            f"{line[0]} cannot be started: {error.strerror}; use --here to copy on this machine"
        ) from error

    def pass_on(number: int, _: object) -> None:
        if not got:
            relay.send_signal(signal.SIGUSR1)
        got.append(number)

    before = {number: signal.signal(number, pass_on) for number in _FORWARDED}
    try:
        code = relay.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + got[0] if got else code
