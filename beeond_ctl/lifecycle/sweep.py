"""Sweep: removing what a crash or a reboot left behind on this node, and telling what has to stay.

What is swept is known by state file, record on the device, and token: never by a process's name. Live instances and
those of other programs are not looked at twice. Data that is owed a stage-out is never wiped here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from beeond_ctl import state as states
from beeond_ctl import storage
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import BeeondError, NodeError, RetainedError, one_line
from beeond_ctl.lifecycle import claims, guard, recover, steps, teardown
from beeond_ctl.lifecycle.here import Here

if TYPE_CHECKING:
    from beeond_ctl.state import State


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing that was looked at: "live", "kept", "removed" (or would be), or "stuck"."""

    what: str
    verdict: str
    text: str


def sweep(config: SiteConfig, *, dry_run: bool = False) -> list[Leftover]:
    """Sweep this node. Reports everything of ours that was there; with `dry_run` changes nothing."""
    jobs = {state.job.job_id for state in states.read_all(config.paths.run)}
    jobs |= {record.job_id for record in storage.read_records(config)}
    jobs |= _unreadable(config)
    found = [_look(config, job_id, dry_run=dry_run) for job_id in sorted(jobs)]
    for home in storage.strays(config):
        found.append(_stray(config, home, dry_run=dry_run))
    if not dry_run:
        claims.forget_stale(config.paths.run)
    return found


def _unreadable(config: SiteConfig) -> set[int]:
    root = os.path.join(config.paths.run, "jobs")
    return {int(name) for name in os.listdir(root) if name.isdigit()} if os.path.isdir(root) else set()


def _look(config: SiteConfig, job_id: int, *, dry_run: bool) -> Leftover:
    what = f"job {job_id}"
    try:
        with states.locked(config.paths.run, job_id, "sweep again"):
            state = states.read(config.paths.run, job_id)
            if state is None and states.run_dir(config.paths.run, job_id).exists():
                return _without_state(config, job_id, dry_run=dry_run)
            if state is not None and state.phase == "retained":
                return Leftover(what, "kept", f"{state.reason}; {teardown.recovery(job_id, state.nodes)}")
            if state is not None and recover.alive(config, job_id):
                return Leftover(what, "live", state.phase)
            return _dead(config, job_id, state, dry_run=dry_run)
    except RetainedError as error:
        return Leftover(what, "kept", one_line(error))
    except NodeError as error:
        busy = "another beeond-ctl works on it" in str(error)
        return Leftover(what, "live" if busy else "stuck", one_line(error))
    except (BeeondError, OSError) as error:
        return Leftover(what, "stuck", one_line(error))


def _without_state(config: SiteConfig, job_id: int, *, dry_run: bool) -> Leftover:
    """A run directory without a state: a crash between making the one and writing the other. Nothing else was made."""
    directory = states.run_dir(config.paths.run, job_id)
    if os.listdir(directory):
        return Leftover(f"job {job_id}", "stuck", f"{directory} has no state; look at it and remove it")
    if not dry_run:
        directory.rmdir()
    return Leftover(f"job {job_id}", "removed", str(directory))


def _dead(config: SiteConfig, job_id: int, state: State | None, *, dry_run: bool) -> Leftover:
    """Remove what a dead job left, or keep what is owed. Raises RetainedError, NodeError."""
    what = f"job {job_id}"
    if state is None:
        records = recover.recorded(config, job_id)
        if not records:
            return Leftover(what, "removed", "by its own Epilog, meanwhile")
        if any(record.phase == "retained" for record in records):
            return Leftover(what, "kept", teardown.recovery(job_id, records[0].nodes))
        state = recover.state_of(records)
        fresh = True
    else:
        fresh = False
    here = Here(SiteConfig.model_validate(state.config), state)
    keep = here.owed
    if dry_run:
        return Leftover(what, "kept" if keep else "removed", f"left in phase {state.phase}")
    with guard.draining(config, here.node, job_id):
        if fresh:
            states.create(config.paths.run, state)
        here.events.log("sweep", phase=state.phase)
        if keep:
            steps.unmount(here)
            steps.stop(here)
            teardown.retain(here, "the job's Epilog did not run to its end on this node")
        steps.remove_instance(here)
        steps.forget(here)
    return Leftover(what, "removed", f"left in phase {state.phase}")


def _stray(config: SiteConfig, home: str, *, dry_run: bool) -> Leftover:
    """A job's directory on a device without a readable record: empty after a crash in the first moment."""
    try:
        # Under the lock, for a Prolog makes the record a moment after the directory.
        with states.locked(config.paths.run, int(home.rpartition("-")[2]), "sweep again"):
            if home not in storage.strays(config):
                return Leftover(home, "live", "its Prolog or Epilog was at work")
            if os.listdir(home):
                return Leftover(
                    home, "stuck", "has no readable record; look at what it holds before you remove it"
                )
            if not dry_run:
                os.rmdir(home)
    except NodeError as error:
        return Leftover(home, "live", one_line(error))
    except OSError as error:
        return Leftover(home, "stuck", one_line(error))
    return Leftover(home, "removed", "empty")
