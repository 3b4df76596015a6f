"""Starting and ending the watch (`beeond_ctl.watch`). Neither fails, nor waits; `docs/lifecycle.md` has its life."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from beeond_ctl import supervisor
from beeond_ctl.backends import File, Service
from beeond_ctl.errors import one_line
from beeond_ctl.plan import FIRST_OWN_ID

if TYPE_CHECKING:
    from beeond_ctl.lifecycle.here import Here

_PATH = ("/usr/bin", "/bin")


def begin(here: Here) -> None:
    """Start the watch where there is something to watch. It gets what it has to know by a file of root's alone."""
    try:
        wanted = here.leads and here.request.stage_out and here.config.slurm.tell_in_output
        if wanted and here.state.job.job_id < FIRST_OWN_ID:
            _start(here)
    except Exception as error:  # noqa: BLE001 - whatever it is: the job can do without
        here.events.log("not-watched", message=one_line(error))


def _start(here: Here) -> None:
    job, run_dir = here.state.job, here.run_dir
    order = {
        "job": job.job_id, "node": here.node, "user": job.user, "uid": job.uid, "gid": job.gid,
        "mount": here.state.mount, "transfers": here.transferred, "slurm": here.config.slurm.path,
        "places": [(each.source, each.destination, each.flags) for each in here.transfers(inward=False)],
        "state": str(run_dir / "state.json"), "token": here.state.token, "log": here.config.paths.log,
    }  # fmt: skip
    path = str(run_dir / "watch.json")
    service = Service(
        "watch",
        ("nice", "-n", "19", sys.executable, "-I", "-X", "utf8", "-m", "beeond_ctl.watch", path),
        log=str(run_dir / "logs/watch.log"),
        files=(File(path, json.dumps(order)),),
        env={name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ},
    )

    def record(process: supervisor.Process) -> None:
        here.state.watch = (process.pid, process.start_time)
        here.save()

    supervisor.start(service, token=here.state.token, search_path=_PATH, record=record)


def end(here: Here) -> None:
    """Have the watch end, before the nodes do anything that its look could be in the way of."""
    if here.state.watch is not None:
        supervisor.ask_to_end(supervisor.Process("watch", *here.state.watch))
