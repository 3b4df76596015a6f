"""Sweep: removing what a crash or a reboot left behind on this node, and telling what has to stay.

What is swept is known by state file, record on the device, place and token: never by a process's name. Live instances
and those of other programs are not looked at twice. Data that is owed a stage-out is never wiped here, unless the site
has said for how long it waits for its owner. `docs/lifecycle.md`, section "Sweep", has the order and the reasons.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from beeond_ctl import config as configuration
from beeond_ctl import hints, logs, mounts, slurm, storage, supervisor
from beeond_ctl import state as states
from beeond_ctl.errors import BeeondError, NodeError, RetainedError, one_line
from beeond_ctl.lifecycle import claims, guard, proof, recover, steps, teardown
from beeond_ctl.lifecycle.here import Here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from beeond_ctl.config import SiteConfig
    from beeond_ctl.state import State

VERDICTS: Final = ("live", "kept", "expired", "removed", "later", "unknown", "stuck")
"""live: left alone. kept: owed a stage-out. expired: kept for longer than the site allows. removed: or would be.
later: no time left. unknown: Slurm, who alone knows whether the job lives, did not answer. stuck: needs a person."""
BAD: Final = frozenset(["expired", "unknown", "stuck"])
_REASON: Final = "beeond: sweep: "
_EXPIRED: Final = "expired"
"""In the run directory: when each job's kept data was first found past its age."""
_DAY_S: Final = 86400.0
_SURE_S: Final = 3600.0
"""How long kept data has to be found past its age, by a clock that nobody sets, before it is given up: at boot the time
of day may be off by years until it is set."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing that was looked at; `verdict` is one of VERDICTS."""

    what: str
    verdict: str
    text: str


@dataclass(slots=True)
class _Sweep:
    """One run over this node. `silent` once Slurm did not answer: nobody waits for it twice."""

    config: SiteConfig
    dry_run: bool
    deadline: float
    silent: str = ""

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


def sweep(config: SiteConfig, *, dry_run: bool = False, deadline_s: float | None = None) -> list[Leftover]:
    """Sweep this node. Reports everything of ours that was there; with `dry_run` changes nothing.

    Begins nothing after `deadline_s` seconds, and gives what it has begun no longer than that, or what its own
    deadlines say where that is less. What is stuck takes the node out of service, and what no longer is gives it back.
    """
    run = _Sweep(config, dry_run, time.monotonic() + (deadline_s or 7 * 86400))
    # Before the states: a process that belongs to none of them has then outlived its own.
    marked = supervisor.marked()
    jobs = {state.job.job_id for state in states.read_all(config.paths.run)}
    jobs |= {record.job_id for record in storage.read_records(config)}
    jobs |= _numbers(os.path.join(config.paths.run, "jobs"))
    found = [_guarded(run, job_id, f"job {job_id}", _job) for job_id in sorted(jobs)]
    for home in storage.strays(config):
        found.append(_guarded(run, int(home.rpartition("-")[2]), home, _stray))
    for job_id in sorted(_numbers(config.mount.root) - jobs):
        found.append(_guarded(run, job_id, f"{config.mount.root}/{job_id}", _point))
    for loop in storage.loops(config):
        if loop.job_id not in jobs:
            found.append(_guarded(run, loop.job_id, f"{loop.device} on {loop.image}", partial(_loop, loop)))
    found += _processes(run, marked)
    found += [Leftover(f"claim of {name}", "removed", "its job is gone") for name in _claims(run)]
    found += _old_logs(run, jobs)
    shown = [item for item in found if item is not None]
    if not dry_run:
        _forget_unexpired(run, shown)
        hints.forget_stale(config.paths.run)
        guard.count_sweep(config, [item.verdict for item in shown])
        _tell_slurm(config, [f"{item.what}: {item.text}" for item in shown if item.verdict == "stuck"])
    return shown


def _numbers(directory: str) -> set[int]:
    try:
        return {int(name) for name in os.listdir(directory) if name.isdigit()}
    except OSError:
        return set()


def _guarded(
    run: _Sweep, job_id: int, what: str, look: Callable[[_Sweep, int, str], Leftover | None]
) -> Leftover | None:
    """What `look` says, under the job's lock: a Prolog, Epilog or recover at work is not disturbed."""
    if run.left_s() <= 0:
        return Leftover(what, "later", "no time left; the next sweep goes on")
    try:
        with states.locked(run.config.paths.run, job_id, "sweep again"):
            return look(run, job_id, what)
    except RetainedError as error:
        return Leftover(what, "kept", one_line(error))
    except _SlurmIsSilentError as error:
        return Leftover(what, "unknown", one_line(error))
    except NodeError as error:
        busy = "another beeond-ctl works on it" in str(error)
        return Leftover(what, "live" if busy else "stuck", one_line(error))
    except (BeeondError, OSError) as error:
        return Leftover(what, "stuck", one_line(error))


class _SlurmIsSilentError(NodeError):
    pass


def _alive(run: _Sweep, job_id: int, state: State | None = None) -> bool:
    """Whether the job still has its nodes. Raises _SlurmIsSilentError."""
    if not run.silent:
        try:
            return bool(recover.alive(run.config, job_id, state))
        except NodeError as error:
            run.silent = one_line(error)
    raise _SlurmIsSilentError(run.silent)


# --- jobs -------------------------------------------------------------------------------------------------


def _job(run: _Sweep, job_id: int, what: str) -> Leftover | None:
    root = run.config.paths.run
    state = states.read(root, job_id)
    records = recover.recorded(run.config, job_id)
    if state is None and states.run_dir(root, job_id).exists():
        found = _without_state(run, job_id, what)
        if found is not None or not records:
            return found or Leftover(what, "removed", str(states.run_dir(root, job_id)))
    if state is None and not records:
        return None  # its own Epilog was quicker
    if state is None and not any(record.phase == "retained" for record in records):
        state = recover.state_of(records)
        return _dead(run, Here(configuration.recorded(state.config, job_id), state), what, fresh=True)
    if state is None or state.phase == "retained":
        return _retained(run, job_id, what, state, records)
    if _alive(run, job_id, state):
        return Leftover(what, "live", state.phase)
    return _dead(run, Here(configuration.recorded(state.config, job_id), state), what, fresh=False)


def _without_state(run: _Sweep, job_id: int, what: str) -> Leftover | None:
    """Remove a run directory without a state: a crash just after it was made, or while it was removed at the end.

    In both cases there is nothing else; whatever is mounted in it nonetheless is ours. None when it was removed.
    """
    directory = states.run_dir(run.config.paths.run, job_id)
    if os.listdir(directory) and _alive(run, job_id):
        return Leftover(what, "live", f"{directory} has no state")
    if run.dry_run:
        return Leftover(what, "removed", str(directory))
    _end_those_of(run, directory)
    logs.remove(directory / "logs")  # whoever still has one open may go on
    mounts.unmount(str(directory), deadline_s=_deadline_s(run, run.config.deadlines.stop))
    shutil.rmtree(directory)
    return None


def _end_those_of(run: _Sweep, directory: Path) -> None:
    """End processes of an instance whose state is gone from `directory`, where their logs are. Raises NodeError."""
    known = {state.token for state in states.read_all(run.config.paths.run)}
    for token, processes in supervisor.marked().items():
        if token not in known and any(supervisor.uses(process, directory) for process in processes):
            supervisor.stop(processes, token=token, timeout_s=_deadline_s(run, run.config.deadlines.stop))


def _dead(run: _Sweep, here: Here, what: str, *, fresh: bool) -> Leftover:
    """Remove what a dead job left, or keep what is owed. Raises RetainedError, NodeError."""
    phase, keep = here.state.phase, here.owed and here.serves
    if keep and fresh:
        recover.see_that_nothing_is_lost(here, storage.absent(here.first_plan))
    if run.dry_run:
        return Leftover(what, "kept" if keep else "removed", f"left in phase {phase}")
    if fresh:
        states.create(run.config.paths.run, here.state)
    here.events.log("sweep", phase=phase)
    if keep and here.state.rebooted:
        here.events.log("rebooted", nodes=[here.node])
    _hurry(run, here)
    with guard.accounted(run.config, here.node, here.state.job.job_id, ends=True):
        if keep:
            steps.unmount(here)
            steps.stop(here, keep=True)
            with guard.draining(run.config, here.node, here.state.job.job_id):
                teardown.retain(here, "the job's Epilog did not run to its end on this node")
        steps.remove_instance(here)
        steps.forget(here)
    return Leftover(what, "removed", f"left in phase {phase}")


def _retained(
    run: _Sweep, job_id: int, what: str, state: State | None, records: list[storage.Record]
) -> Leftover:
    """Say what is kept, and for how long; give it up if it is older than the site wants it."""
    why = f"{state.reason}; " if state is not None and state.reason else ""
    text = why + teardown.recovery(job_id, state.nodes if state is not None else records[0].nodes)
    limit, since = run.config.sweep.kept_days, storage.changed_at(records)
    if limit is None or since is None or time.time() - since < limit * _DAY_S:
        return Leftover(what, "kept", text)
    days = f"kept for {(time.time() - since) / _DAY_S:.0f} days, sweep.kept_days is {limit:g}"
    if not run.config.sweep.remove_expired:
        return Leftover(what, "expired", f"{days}; {text}")
    left_s = _SURE_S - _expired_for_s(run, job_id)
    if left_s > 0:
        when = f"given up by a sweep in {math.ceil(left_s / 60)} minutes or later"
        return Leftover(what, "expired", f"{days}: {when}; {text}")
    if not run.dry_run:
        fresh = state is None
        state = state or recover.state_of(records)
        here = Here(configuration.recorded(state.config, job_id), state)
        if fresh:
            states.create(run.config.paths.run, state)
        here.events.log("sweep", phase=state.phase, expired=days)
        _hurry(run, here)
        state.given_up = True
        here.save()  # before the wipe: what is left of a wipe that is cut off is not taken for kept data
        with guard.accounted(run.config, here.node, job_id, ends=True):
            steps.remove_instance(here)
            steps.forget(here)
        if run.config.slurm.resume_after_recover:
            with guard.changing_reasons(run.config):
                slurm.undrain(run.config.slurm.path, here.node, guard.drain_prefix(job_id))
    return Leftover(what, "removed", f"{days}: given up, as sweep.remove_expired says")


def _expired_for_s(run: _Sweep, job_id: int) -> float:
    """For how long sweeps since boot have found the job's data past its age, by the clock that runs since boot."""
    mark, now = Path(run.config.paths.run, _EXPIRED, str(job_id)), time.clock_gettime(time.CLOCK_BOOTTIME)
    with suppress(FileNotFoundError, ValueError):
        for_s = now - float(mark.read_text())
        if for_s >= 0:
            return for_s
    if not run.dry_run:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        states.write_atomically(mark, f"{now}\n")
    return 0.0


def _forget_unexpired(run: _Sweep, found: Sequence[Leftover]) -> None:
    """Forget what is no longer found past its age: the clock was wrong, or the data is gone."""
    expired = {item.what for item in found if item.verdict in {"expired", "later"}}
    for job_id in _numbers(os.path.join(run.config.paths.run, _EXPIRED)):
        if f"job {job_id}" not in expired:
            Path(run.config.paths.run, _EXPIRED, str(job_id)).unlink(missing_ok=True)


def _hurry(run: _Sweep, here: Here) -> None:
    """Let no step take longer than there is time."""
    deadlines = here.config.deadlines
    shorter = {name: _deadline_s(run, getattr(deadlines, name)) for name in ("start", "stop", "wipe")}
    here.config = here.config.model_copy(update={"deadlines": deadlines.model_copy(update=shorter)})


def _deadline_s(run: _Sweep, usual_s: float) -> float:
    return max(1.0, min(usual_s, run.left_s()))


# --- what belongs to no job that is known -----------------------------------------------------------------


def _stray(run: _Sweep, job_id: int, home: str) -> Leftover | None:
    """A job's directory on a device without a readable record: empty after a crash in the first moment."""
    del job_id
    if home not in storage.strays(run.config):
        return None  # its Prolog or Epilog was at work
    if not storage.stray_is_empty(run.config, home):
        return Leftover(home, "stuck", "has no readable record; look at what it holds before you remove it")
    if not run.dry_run:
        storage.remove_stray(run.config, home, deadline_s=_deadline_s(run, run.config.deadlines.wipe))
    return Leftover(home, "removed", "empty")


def _point(run: _Sweep, job_id: int, point: str) -> Leftover | None:
    """A mount, or a mount point, of a job that has no state here any more. The directory above it is ours alone."""
    root = run.config.paths.run
    if states.run_dir(root, job_id).exists():
        return None  # its own tear-down goes by its state
    if any(state.instance.job_id == job_id for state in states.read_all(root)):
        return None  # that of a guest, which has a state
    mounted = mounts.mount_at(point) is not None
    if mounted and _alive(run, job_id):
        return Leftover(point, "live", "mounted, and its job lives")
    if not mounted:
        try:
            if run.dry_run:
                return Leftover(point, "removed", "empty mount point") if not os.listdir(point) else None
            os.rmdir(point)
        except OSError:  # holds something, or is no directory: not what we make
            return None
        return Leftover(point, "removed", "empty mount point")
    text = "mounted without a state"
    if not run.dry_run:
        ended = mounts.unmount(point, deadline_s=_deadline_s(run, run.config.deadlines.stop))
        mounts.remove_point(point)
        text += f"; ended {', '.join(ended)}" if ended else ""
    return Leftover(point, "removed", text)


def _loop(loop: storage.Loop, run: _Sweep, job_id: int, what: str) -> Leftover | None:
    """A loop device on an image of a job that has no state here any more."""
    if states.run_dir(run.config.paths.run, job_id).exists():
        return None
    if not run.dry_run:
        storage.free_loop(loop)
    return Leftover(what, "removed", "its job has no state")


def _processes(run: _Sweep, marked: dict[str, list[supervisor.Process]]) -> Iterator[Leftover]:
    """Processes with the token of an instance that has no state here any more."""
    if not marked:
        return
    known = {state.token for state in states.read_all(run.config.paths.run)}
    unreadable = len(known) < len(_numbers(os.path.join(run.config.paths.run, "jobs")))
    for token, processes in marked.items():
        left = [process for process in processes if supervisor.alive(process)]
        if token in known or not left:
            continue
        what = "processes " + ", ".join(f"{process.name} (pid {process.pid})" for process in left)
        if unreadable:
            yield Leftover(what, "unknown", "may belong to a job whose state cannot be read")
            continue
        try:
            if not run.dry_run:
                supervisor.stop(left, token=token, timeout_s=_deadline_s(run, run.config.deadlines.stop))
        except NodeError as error:
            yield Leftover(what, "stuck", one_line(error))
        else:
            yield Leftover(what, "removed", "their instance has no state")


def _claims(run: _Sweep) -> list[str]:
    root = run.config.paths.run
    if not os.path.isdir(root):
        return []
    for job_id in _numbers(os.path.join(root, "locks")):
        # Taking the lock of a job that is gone, and letting go of it, removes its file.
        if not run.dry_run and not states.run_dir(root, job_id).exists():
            with suppress(NodeError), states.locked(root, job_id, ""):
                pass
    return claims.stale(root, remove=not run.dry_run)


def _old_logs(run: _Sweep, jobs: set[int]) -> Iterator[Leftover]:
    """Event logs past their age, but for those of jobs that are still here: `recover` reads the proof in them."""
    for what, directory, suffix in (
        ("event logs", f"{run.config.paths.log}/jobs", ".jsonl"),
        ("proofs", f"{run.config.paths.run}/{proof.IN_MEMORY}", ""),
    ):
        oldest, count = time.time() - run.config.sweep.log_days * _DAY_S, 0
        with suppress(FileNotFoundError):
            for entry in os.scandir(directory):
                name = entry.name.removesuffix(suffix)
                if not name.isdigit() or name + suffix != entry.name or int(name) in jobs:
                    continue
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    count += 1
                    if not run.dry_run:
                        os.unlink(entry.path)
        if count:
            text = f"{count} older than {run.config.sweep.log_days:g} days"
            yield Leftover(f"{what} in {directory}", "removed", text)


# --- Slurm ------------------------------------------------------------------------------------------------


def _tell_slurm(config: SiteConfig, stuck: list[str]) -> None:
    """Take the node out of service for what is stuck, and give it back when nothing is.

    A file remembers that it was this that drained the node, so that a clean node need not ask slurmctld each time.
    """
    mark, node = Path(config.paths.run) / "sweep-drained", slurm.node_name(os.environ)
    # What slurmctld does not hear now is told when it answers again: the next sweep finds the same.
    with suppress(NodeError, OSError), guard.changing_reasons(config):
        if stuck:
            for text in stuck:
                slurm.drain(config.slurm.path, node, _REASON + text)
            mark.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            mark.touch(mode=0o600)
        elif mark.exists():
            slurm.undrain(config.slurm.path, node, _REASON)
            mark.unlink()
