"""`beeond-ctl flush`: copy a finished part of the job's results to its place on global storage while the job goes on.

Knows where a path belongs and how a flush is started, watched and shown. How it is copied is `staging`'s, where it is
noted down `flushes`'s.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from beeond_ctl import flushes
from beeond_ctl.cli import stage
from beeond_ctl.errors import NodeError, OutputError, UsageError, UserError, one_line
from beeond_ctl.request import Transfer, check_deletions, printable, show
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from beeond_ctl.staging.job import Job
    from beeond_ctl.staging.transfer import Progress, Summary

_BEGIN_S: Final = 60.0
_LOOK_S: Final = 0.1
_NICE: Final = 10
_KEPT_FLAGS: Final = frozenset(["metadata-only", "update"])


@click.command()
@click.argument("path", required=False)
@click.argument("destination", metavar="[DST]", required=False)
@click.option("--wait", is_flag=True, help="Wait until it is done; without PATH, for all flushes of the job.")
@click.option("--list", "as_list", is_flag=True, help="Show the flushes of this job and how far they are.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, and change nothing.")
@click.option("--workers", type=click.IntRange(1, 256), metavar="N", help="Processes that copy on each node.")
@click.option("--here", is_flag=True, help="Copy on this machine alone, not on all nodes of the job.")
@click.option("--quiet", is_flag=True, help="Show no progress, and nothing at all if all went well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
@click.option("--run", hidden=True, help="This process is the one in the background.")
def flush(
    path: str | None, destination: str | None, *, wait: bool, as_list: bool, dry_run: bool, workers: int | None,
    here: bool, quiet: bool, as_json: bool, run: str | None,
) -> int:  # fmt: skip
    """Copy PATH, a finished file or directory below $BEEOND, to its place on global storage while the job goes on.

    A relative PATH begins at $BEEOND, wherever it is typed. The place follows from --beeond-stage-out of the job, or
    is DST. It is copied in the background by all nodes of the job; --wait waits. Stage-out then leaves out what was
    flushed and has not changed since. A flush that is not done when the job ends is stopped, and stage-out does the
    rest, unless none copies PATH to DST.

    \b
    Example:
      beeond-ctl flush out/checkpoint-17
      beeond-ctl flush --wait
    """
    from beeond_ctl.cli import nodes, preview

    if (code := nodes.relayed(here=here)) is not None:
        return code
    mount = _mount()
    if as_list:
        _list(mount, as_json=as_json)
        return 0
    if path is None:
        if not wait:
            raise UsageError("flush needs a PATH below $BEEOND, or --wait, or --list")
        return _wait(mount, quiet=quiet, as_json=as_json)
    job = _job(mount, path, destination)
    if dry_run:
        return preview.show(job, as_json=as_json)
    place = flushes.place(mount, job.source, job.destination, job.only)
    words = _words(job, workers, here=here, given=destination is not None)
    if wait or run:
        return _flush(job, place, words, run, workers, here=here, quiet=quiet, as_json=as_json)
    _begin(job, place, words, quiet=quiet, as_json=as_json)
    if not quiet:
        text = f"flush of {_shown(job)} runs; `beeond-ctl flush --list` shows how far it is"
        _tell(text, {"event": "start", **(flushes.read(place) or {})}, as_json)
    return 0


def _mount() -> str:
    mount = os.environ.get("BEEOND", "")
    if not mount.startswith("/") or not os.path.isdir(mount):
        raise UserError("flush is for jobs with a file system, and $BEEOND names none that is there")
    info = os.stat(mount)
    if info.st_uid == 0 and stat.S_IMODE(info.st_mode) == 0:  # the bare mount point
        raise UserError(
            "$BEEOND is not mounted any more: a server has died; what is there is staged out at the job's end"
        )
    return mount


# --- which place ------------------------------------------------------------------------------------------


def _job(mount: str, path: str, destination: str | None) -> Job:
    """The transfer that is meant. Raises UsageError, UserError."""
    from beeond_ctl.staging.job import Job

    if not path or destination == "":
        raise UsageError("PATH or DST is empty; write '.' for all of $BEEOND")
    typed = os.path.normpath(stage.absolute(path, mount))
    top = os.path.normpath(mount)
    real, real_top = (
        os.path.realpath(typed),
        os.path.realpath(top),
    )  # of a link such as `latest`: what it leads to
    if not _is_in(real, real_top):
        raise UsageError(
            f"{show(path)} is not below $BEEOND, {show(top)}; flush copies from there to global storage"
        )
    source = os.path.normpath(os.path.join(top, os.path.relpath(real, real_top)))
    if not os.path.lexists(source):
        raise UserError(f"{show(source)} is not there; is it written already?")
    journals = os.fsencode(os.path.join(top, flushes.NAME))  # belong to nothing that is copied
    if destination is not None:
        place = stage.absolute(destination, "")
        check_deletions([*(Transfer(*each) for each in _transfers(top)), Transfer(source, place)])
        return Job(
            os.fsencode(source), os.fsencode(place), flushes=journals, live=True, outside=os.fsencode(top)
        )
    root, target, flags = _place_of(typed, top, _transfers(top))
    only = os.path.relpath(real, os.path.realpath(root))
    kept = tuple(flag for flag in flags if flag in _KEPT_FLAGS)
    return Job(
        os.fsencode(root), os.fsencode(target), kept, only=b"" if only == "." else os.fsencode(only),
        flushes=journals, live=True, outside=os.fsencode(top),
    )  # fmt: skip


def _is_in(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}/")


def _place_of(
    typed: str, top: str, transfers: list[tuple[str, str, tuple[str, ...]]]
) -> tuple[str, str, tuple[str, ...]]:
    """The stage-out that will copy `typed`, a path in $BEEOND at `top`: its source, destination and flags.

    Stage-out follows a link that is its source and none below, so that what counts is where paths really are. Of
    several the narrowest is taken; of several names for one directory that which was typed. Raises UsageError.
    """
    real = os.path.realpath(typed)
    fitting = []
    for source, destination, flags in transfers:
        root = os.path.normpath(os.path.join(top, source))
        if _is_in(real, os.path.realpath(root)):
            fitting.append((root, destination, flags))
    if not fitting:
        sources = ", ".join(printable(each[0]) for each in transfers) or "none"
        raise UsageError(
            f"no stage-out of this job has {show(typed)} in it; say where to copy it: "
            f"flush PATH DST (staged out: {sources})"
        )
    narrowest = max((os.path.realpath(each[0]) for each in fitting), key=len)
    best = [each for each in fitting if os.path.realpath(each[0]) == narrowest]
    best = [each for each in best if _is_in(typed, each[0])] or best
    if len(best) > 1:
        raise UsageError(
            f"{show(typed)} has {len(best)} places by the stage-outs of this job; say which: flush PATH DST"
        )
    return best[0]


def _is_staged_out(job: Job) -> bool:
    """Whether a stage-out of the job copies the same to the same place."""
    top = os.path.dirname(os.fsdecode(job.flushes))
    source, target = (os.path.realpath(os.fsdecode(path)) for path in job.ends())
    if os.path.isfile(source) and (os.path.isdir(target) or job.destination.endswith(b"/")):
        target = os.path.join(target, os.path.basename(source))
    for each, destination, _ in _transfers(top):
        root, place = os.path.realpath(os.path.join(top, each)), os.path.realpath(destination)
        if os.path.isfile(root) and (os.path.isdir(place) or destination.endswith("/")):
            place = os.path.join(place, os.path.basename(root))
        if _is_in(source, root) and os.path.normpath(f"{place}/{os.path.relpath(source, root)}") == target:
            return True
    return False


def _transfers(mount: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """The job's stage-outs, as this node was told for the job's user: source below $BEEOND, destination, flags."""
    found = []
    for source, destination, flags in stage.hint(mount).get("places", ()):
        found.append((os.path.normpath(source), destination, tuple(flags)))
    return found


def _shown(job: Job) -> str:
    from beeond_ctl.staging.transfer import show_path

    source, target = job.ends()
    return f"{show_path(source)} to {show_path(target)}"


# --- in the background ------------------------------------------------------------------------------------


def _words(job: Job, workers: int | None, *, here: bool, given: bool) -> list[str]:
    """The options and paths that mean the same flush from anywhere in the job."""
    options = [*(["--workers", str(workers)] if workers else []), *(["--here"] if here else [])]
    return [*options, "--", os.fsdecode(job.ends()[0]), *([os.fsdecode(job.destination)] if given else [])]


def _begin(job: Job, place: Path, words: list[str], *, quiet: bool, as_json: bool) -> None:
    """Start this command once more, away from the shell that it was typed in, and see that it has begun.

    In Slurm it is a step of the job: its processes are not the shell's, and at the end of the job get SIGTERM, and the
    site's KillWait to stop in order. It waits for another flush of the same, and so do we: whoever is told that it has
    begun may go by that it has what is there now. Raises UserError, NodeError.
    """
    import secrets
    import subprocess

    from beeond_ctl import step

    run = secrets.token_hex(8)
    command = [sys.executable, "-I", "-X", "utf8", sys.argv[0], "flush", "--run", run, *words]
    of = step.allocation(os.environ)
    environment = dict(os.environ)
    if of is not None and of.here in of.nodes:
        command = step.argv(of, (of.here,), command, os.environ)
        environment = step.environment(os.environ)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=_where_to_complain(), cwd="/",
            env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise NodeError(f"the flush cannot be started: {one_line(error)}") from error
    try:
        _see_begun(process, run, job, place, told=quiet, as_json=as_json)
    except BaseException:
        process.terminate()  # nobody would know of it
        raise


def _see_begun(
    process: subprocess.Popen[bytes], run: str, job: Job, place: Path, *, told: bool, as_json: bool
) -> None:
    deadline_s = time.monotonic() + _BEGIN_S
    while (status := flushes.read(place) or {}).get("run") != run:
        code = process.poll()
        if code == 0:  # all done, and the next one of the same runs
            return
        if code is not None and (flushes.read(place) or {}).get("run") != run:
            raise UserError("the flush has not begun, for the reason above; `flush --wait` shows more")
        if status.get("state") == "running":  # another one
            deadline_s = time.monotonic() + _BEGIN_S
            told = told or _tell_of_another(job, as_json=as_json)
        if time.monotonic() > deadline_s:
            raise NodeError(f"the flush has not begun within {_BEGIN_S:.0f} s; is Slurm busy? Use --wait")
        time.sleep(_LOOK_S)


def _tell_of_another(job: Job, *, as_json: bool) -> bool:
    """Say why nothing is copied yet; True."""
    from beeond_ctl.cli import progress

    progress.news(
        f"waits for the flush of {_shown(job)} that runs already, and copies what has changed since",
        as_json=as_json,
    )
    return True


def _where_to_complain() -> int:
    """Our stderr where the flush may keep it open: a file or terminal, not a pipe whose reader waits for its end."""
    import subprocess

    with suppress(OSError):
        mode = os.fstat(2).st_mode
        if stat.S_ISREG(mode) or stat.S_ISCHR(mode):
            return 2
    return subprocess.DEVNULL


def _flush(
    job: Job, place: Path, words: list[str], run: str | None, workers: int | None,
    *, here: bool, quiet: bool, as_json: bool,
) -> int:  # fmt: skip
    """Copy now. `run` names the process in the background that this is; None: this is the one that was typed."""
    import secrets

    from beeond_ctl.cli import late, nodes, progress
    from beeond_ctl.staging.local import copy_local

    behind = run is not None
    run = run or secrets.token_hex(8)
    followed = behind and _is_staged_out(job)
    told = behind or quiet
    how = "quiet" if behind else progress.way(as_json=as_json, quiet=quiet)
    command = " ".join(
        ["beeond-ctl flush --wait", *(stage.quoted(os.fsencode(word)) for word in words if word != "--")]
    )
    while (turn := _turn(place, run)) is None:  # the other one may have passed what has been written since
        told = told or _tell_of_another(job, as_json=as_json)
        time.sleep(_LOOK_S)
    note = _Note(job, turn, run)
    try:
        with stage.stoppable(), progress.shown(how) as tell:
            if behind:
                os.nice(_NICE)
            note.began()
            summary = copy_local(
                job, journal_dir=place, progress=note.also(tell), progress_every_s=progress.EVERY_S[how],
                workers=workers, others=nodes.others(workers, here=here, nice=_NICE if behind else 0),
                news=note.news if behind else partial(progress.news, as_json=as_json),
            )  # fmt: skip
        note.ended(summary)  # before the next one may begin
    except KeyboardInterrupt as stop:
        note.stopped()
        if behind:
            _complain(job, "was stopped before it was done", command, followed=followed)
        else:
            progress.interrupted(command, as_json=as_json)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except (BrokenPipeError, OutputError) as error:
        note.failed(one_line(error))
        raise
    except OSError as error:
        note.failed(one_line(error))
        raise NodeError(f"flush has stopped: {one_line(error)}; to go on: {command}") from error
    finally:
        turn.leave()
    if behind and not summary.proved:
        why = "; ".join(summary.problems()) or "it did not come to its end"
        _complain(job, why, command, followed=followed)
    elif not behind:
        progress.ended(summary, command, as_json=as_json, quiet=quiet)
    late.warn(os.environ)
    return 0 if summary.proved else 1


def _complain(job: Job, why: str, command: str, *, followed: bool) -> None:
    """Say in the job's output what is wrong with a flush in the background.

    `command` does it again; `followed`: it need not be typed, as a stage-out of the job copies the same.
    """
    from beeond_ctl.cli.progress import one_line as escaped

    rest = "stage-out does the rest" if followed else f"nothing else copies it there; to go on: {command}"
    sys.stderr.write(f"beeond-ctl: flush of {escaped(_shown(job))}: {escaped(why)}; {rest}\n")


class _Turn(NamedTuple):
    """The right to copy, until `leave`: among the flushes of the same on all nodes, and by the lock on this one."""

    place: Path
    number: int
    lock: int

    def is_ours(self) -> bool:
        return flushes.has_turn(self.place, self.number)

    def leave(self) -> None:
        flushes.leave_turn(self.place, self.number)
        stage.unlock(self.lock)


def _turn(place: Path, run: str) -> _Turn | None:
    """The turn of `run`; None while another flush of the same runs, on whichever node. Raises UserError."""
    try:
        os.umask(0o077)
        place.parent.mkdir(exist_ok=True)
        place.mkdir(exist_ok=True)
        status = flushes.read(place) or {}
        node = os.environ.get("SLURMD_NODENAME", "")
        if status.get("state") == "running" and status.get("node") != node:
            return None  # many may wait: spare them what more would tell the same
        lock = stage.locked(place)
        if lock is None:
            return None
        try:
            # A variable may be passed on to another node, and a lock there tells nothing of those here.
            number = flushes.take_turn(place, f"{node}@{os.uname().nodename}", run)
        except BaseException:
            stage.unlock(lock)
            raise
        if number is None:
            stage.unlock(lock)
            return None
        return _Turn(place, number, lock)
    except OSError as error:
        full = "; remove something there, or leave it to the stage-out" if error.errno == errno.ENOSPC else ""
        raise UserError(f"no journal can be kept in {show(str(place))}: {error.strerror}{full}") from error


_TAKEN_OVER = "it said nothing for so long that another flush of the same has taken over"


class _Note:
    """Writes down how far a flush is. A status that cannot be written costs the display and, if it lasts, the turn."""

    def __init__(self, job: Job, turn: _Turn, run: str) -> None:
        from beeond_ctl.staging.transfer import show_path

        self._turn = turn
        self._written_s = 0.0
        self._last: Progress | None = None
        source, target = job.ends()
        self._status: flushes.Status = {
            "id": turn.place.name, "run": run, "source": show_path(source), "destination": show_path(target),
            "node": os.environ.get("SLURMD_NODENAME", ""), "began": time.time(), "news": [],
        }  # fmt: skip

    def _write(self, state: str, **facts: Any) -> bool:  # noqa: ANN401 - whatever JSON can say
        """Write it down, unless another one has taken over, whose status it is now; whether it is ours."""
        self._status |= {"state": state, **self._counters(), **facts}
        self._written_s = time.monotonic()
        if not self._turn.is_ours():
            return False
        with suppress(OSError):
            flushes.write(self._turn.place, self._status)
        return True

    def began(self) -> None:
        """Say that it has begun. Raises OSError: without this nobody would see it."""
        if not self._turn.is_ours():
            raise OSError(_TAKEN_OVER)
        self._status["state"] = "running"
        flushes.write(self._turn.place, self._status)

    def also(self, tell: Callable[[Progress], None]) -> Callable[[Progress], None]:
        """`tell`, and the status every two seconds. Raises OSError if another has taken over."""

        def both(now: Progress) -> None:
            self._last = now
            tell(now)
            if time.monotonic() - self._written_s >= flushes.BEAT_S and not self._write("running"):
                raise OSError(_TAKEN_OVER)

        return both

    def _counters(self) -> dict[str, Any]:
        now = self._last
        if now is None:
            return {}
        return {
            "entries_done": now.entries_done, "entries_total": now.entries_total, "bytes_done": now.bytes_done,
            "bytes_total": now.bytes_total, "seconds": round(now.seconds, 3), "nodes": now.bytes_by_node,
        }  # fmt: skip

    def news(self, text: str) -> None:
        """Note what happened to a node."""
        self._status["news"].append(text)

    def stopped(self) -> None:
        self._write("stopped", ended=time.time())

    def failed(self, why: str) -> None:
        self._write("failed", ended=time.time(), problems=[why])

    def ended(self, summary: Summary) -> None:
        facts = {
            key: value for key, value in summary.as_dict().items() if key not in ("source", "destination")
        }
        self._write("proved" if summary.proved else "failed", ended=time.time(), **facts)


# --- waiting and showing ----------------------------------------------------------------------------------


def _wait(mount: str, *, quiet: bool, as_json: bool) -> int:
    """Wait until no flush runs any more; each says every two seconds that it does, or counts as lost."""
    code = 0
    for found in flushes.read_all(mount):
        place = Path(mount) / flushes.NAME / str(found["id"])
        while (status := flushes.read(place)) is not None and status["state"] == "running":
            time.sleep(_LOOK_S)
        if status is None:
            continue
        if status["state"] != "proved":
            code = 1
        if status["state"] != "proved" or not quiet:
            _tell(line(status), {"event": "end", **status}, as_json)
    _mount()  # or it has died meanwhile, and nothing could be read
    return code


def _list(mount: str, *, as_json: bool) -> None:
    found = flushes.read_all(mount)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    if not found:
        click.echo("no flush in this job")
    for status in found:
        click.echo(line(status))


def line(status: flushes.Status) -> str:
    """One flush on one line. What is in it is the user's own, and shown escaped."""
    from beeond_ctl.cli.progress import one_line as escaped

    counts = [
        f"{name} {status[name]}"
        for name in ("copied", "skipped", "failed")
        if isinstance(status.get(name), int)
    ]
    if status["state"] == "running" and isinstance(status.get("entries_done"), int):
        counts = [f"{status['entries_done']} of {status.get('entries_total')} entries"]
    size = status.get("bytes", status.get("bytes_done"))
    if isinstance(size, int):
        counts.append(format_size(size))
    problems = status.get("problems") or []
    text = f"{status['state']:<8} {status.get('source')} to {status.get('destination')}: {', '.join(counts) or 'begun'}"
    return escaped("; ".join([text, *(str(problem) for problem in problems[:3])]))


def _tell(text: str, facts: dict[str, Any], as_json: bool) -> None:  # noqa: FBT001
    click.echo(json.dumps(facts) if as_json else text)
