"""`beeond-ctl stage in|out`: one transfer by whoever types it, over all nodes of the job that it is typed in.

Knows paths, journals and signals. How it is copied is `staging`'s, how it looks is `cli.progress`'s.
"""

from __future__ import annotations

import os
import shlex
import signal
import stat
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from beeond_ctl import flushes
from beeond_ctl.errors import NodeError, UsageError, UserError, one_line
from beeond_ctl.request import FLAGS, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from beeond_ctl.staging.job import Job

_KEEP_S: Final = 30 * 86400
"""A journal that nobody has gone on with for so long is removed: it has about 32 bytes for each file."""

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what comes through srun of another one (see `nodes.relayed`)."""


@click.group()
def stage() -> None:
    """Copy into or out of $BEEOND now, as staging does it: verified, and resumable after whatever ends it.

    In a job all its nodes copy. Works outside of a job as well, between any two places, on one machine.
    """


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """The options that both directions have."""
    options = [
        *(click.option(f"--{name}", is_flag=True, help=_sentence(text)) for name, text in FLAGS.items()),
        click.option(
            "--workers", type=click.IntRange(1, 256), metavar="N",
            help="Processes that copy on each node. Default: one for each processor, 16 at most.",
        ),
        click.option("--here", is_flag=True, help="Copy on this machine alone, not on all nodes of the job."),
        click.option("--dry-run", is_flag=True, help="Say what would be copied or deleted; change nothing."),
        click.option("--yes", is_flag=True, help="With --delete: do not ask."),
        click.option("--quiet", is_flag=True, help="Show no progress, and nothing at all if all went well."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON event a line for scripts."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


@stage.command("in")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@with_options
def stage_in(source: str, destination: str, **options: Any) -> int:  # noqa: ANN401 - click gives them as they are
    """Copy SRC to DST, which in a job is below $BEEOND if it is relative.

    A directory's contents go into DST; a file becomes DST, or goes into it if DST is a directory or ends with '/'.
    In a job all its nodes copy. Ctrl-C stops it, and the same command resumes it.
    Exit code 0 only if everything is proved to be at DST.

    \b
    Example:
      beeond-ctl stage in /lustre/proj/case7 in
    """
    return _run("in", source, destination, **options)


@stage.command("out")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@with_options
def stage_out(source: str, destination: str, **options: Any) -> int:  # noqa: ANN401 - click gives them as they are
    """Copy SRC, which in a job is below $BEEOND if it is relative, to DST.

    A directory's contents go into DST; a file becomes DST, or goes into it if DST is a directory or ends with '/'.
    In a job all its nodes copy. Ctrl-C stops it, and the same command resumes it.
    Exit code 0 only if everything is proved to be at DST.

    \b
    Example:
      beeond-ctl stage out results /lustre/proj/results
    """
    return _run("out", source, destination, **options)


def _run(
    direction: str, source: str, destination: str,
    *, workers: int | None, here: bool, dry_run: bool, yes: bool, quiet: bool, as_json: bool, **chosen: bool,
) -> int:  # fmt: skip
    from beeond_ctl.cli import late, nodes, preview, progress

    if (code := nodes.relayed(here=here)) is not None:
        return code
    from beeond_ctl.staging.local import copy_local
    from beeond_ctl.staging.transfer import show_path

    flags = tuple(name for name in FLAGS if chosen[name.replace("-", "_")])
    job = _job(source, destination, flags, inward=direction == "in")
    dead = _earlier(job) if "delete" in flags else set()
    if dry_run:
        return preview.show(job, dead, as_json=as_json)
    agreed = preview.confirm_deletion(job, dead, yes=yes, as_json=as_json)
    command = _command(direction, job, workers, here=here, yes=agreed)
    how = progress.way(as_json=as_json, quiet=quiet)
    try:
        with stoppable(), _journal(job) as journal:
            resumed = any(path.lstat().st_size for path in journal.glob("*.journal"))
            facts = {"direction": direction, "flags": flags, "resumed": resumed}
            paths = {"source": show_path(job.source), "destination": show_path(job.destination)}
            progress.started(facts | paths, as_json=as_json)
            with progress.shown(how) as tell:
                summary = copy_local(
                    job, journal_dir=journal, progress=tell, progress_every_s=progress.EVERY_S[how], workers=workers,
                    others=nodes.others(workers, here=here), news=partial(progress.news, as_json=as_json),
                )  # fmt: skip
            if summary.proved or (not resumed and (summary.missing or summary.refused)):
                _remove(journal)
    except KeyboardInterrupt as stop:
        progress.interrupted(command, as_json=as_json)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NodeError(f"stage {direction} has stopped: {one_line(error)}; to go on: {command}") from error
    progress.ended(summary, command, as_json=as_json, quiet=quiet)
    late.warn(os.environ)
    return 0 if summary.proved else 1


# --- what was typed ---------------------------------------------------------------------------------------


def _job(source: str, destination: str, flags: tuple[str, ...], *, inward: bool) -> Job:
    """The transfer that is meant. Raises UsageError, UserError."""
    from beeond_ctl.staging.job import Job

    if not source or not destination:
        raise UsageError("SRC or DST is empty; write '.' for this directory")
    place, inside = os.environ.get("BEEOND", ""), destination if inward else source
    if not place and os.environ.get("SLURM_JOB_ID") and not inside.startswith("/"):
        raise UserError(
            f"{show(inside)} would be below $BEEOND, which is not set here; ask for it with --beeond, "
            "or write an absolute path"
        )
    if inward:
        source, destination = absolute(source, ""), absolute(destination, place)
    else:
        source, destination = absolute(source, place), absolute(destination, "")
    durable = not (place and lies_below(destination, place))
    flushed = os.path.join(place, flushes.NAME) if place and not inward else ""
    live = bool(flushed) and lies_below(source, place)  # the job goes on, and may write to it
    return Job(
        os.fsencode(source), os.fsencode(destination), flags, durable, flushes=os.fsencode(flushed), live=live
    )


def absolute(path: str, place: str) -> str:
    """`path` as it stands if absolute; below `place`, $BEEOND's value, if there is one; else below where we are."""
    if path.startswith("/"):
        return path
    if not place:
        return os.path.join(working_directory(), path)
    if ".." in path.split("/"):
        raise UsageError(
            f"{show(path)} climbs out of $BEEOND with '..'; name a path below it, or an absolute one"
        )
    if not (place.startswith("/") and os.path.isdir(place)):
        raise UserError(
            f"$BEEOND is {show(place)}, which is not there; has the job ended, or is this another node?"
        )
    return os.path.join(place, path)


def working_directory() -> str:
    """Where we are. Raises UserError where that was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the working directory is not there any more; change to another one (cd), and type it again"
        ) from None


def lies_below(path: str, place: str) -> bool:
    """Whether `path` is, or leads to, `place` or something below it."""
    real = os.path.realpath(place)
    return os.path.commonpath([os.path.realpath(path), real]) == real


def _command(direction: str, job: Job, workers: int | None, *, here: bool, yes: bool) -> str:
    """What does the same from anywhere, ready to be pasted into a shell; `yes`: it was agreed to what is deleted."""
    words = ["beeond-ctl", "stage", direction, *(f"--{flag}" for flag in job.flags)]
    words += ["--workers", str(workers)] if workers else []
    words += ["--here"] if here else []
    words += ["--yes"] if yes else []
    return " ".join([*words, quoted(job.source), quoted(job.destination)])


def quoted(path: bytes) -> str:
    """`path` for a shell, on one line, with no blanks that a message might fold."""
    try:
        text = path.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text.isprintable() and "  " not in text:
        return shlex.quote(text)
    plain = range(0x21, 0x7F)
    return "$'" + "".join(
        chr(byte) if byte in plain and chr(byte) not in "\\'" else f"\\x{byte:02x}" for byte in path
    ) + "'"  # fmt: skip


@contextmanager
def stoppable() -> Iterator[None]:
    """A signal of `_STOPPING` stops the block once, as KeyboardInterrupt.

    From then on they are ignored, so that an impatient second Ctrl-C cuts nothing off; stopping takes some seconds at
    most. One that was ignored before (nohup) stays so.
    """

    def stop(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    before = {each: signal.getsignal(each) for each in _STOPPING if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, stop)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


# --- the job's instance -----------------------------------------------------------------------------------


def hint(mount: str) -> dict[str, Any]:
    """What this node was told of the instance at `mount` for us; empty if nothing."""
    from beeond_ctl import config as configuration
    from beeond_ctl import hints
    from beeond_ctl.errors import ConfigError

    context = click.get_current_context(silent=True)
    path = context.find_root().obj if context else None
    try:
        paths = configuration.load(path or configuration.DEFAULT_PATH).paths
    except ConfigError:
        paths = configuration.Paths()
    return next((found for found in hints.read_all(paths.run) if found.get("mount") == mount), {})


# --- journals ---------------------------------------------------------------------------------------------


@contextmanager
def _journal(job: Job) -> Iterator[Path]:
    """The directory for the journal of `job`, locked for us. Raises UserError.

    Two jobs may name the same paths and mean different file systems, so that each job has its own journals.
    """
    place = _place(job)
    base = place.parent
    try:
        os.umask(0o077)
        if not _is_reached_safely(base):
            raise UserError(
                f"{show(str(base))} is below a directory of another user; set XDG_STATE_HOME to one of root's"
            )
        base.mkdir(parents=True, exist_ok=True)
        info = base.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise UserError(
                f"{show(str(base))} is not a directory of yours; set XDG_STATE_HOME to one that is"
            )
        base.chmod(0o700)
        _remove_old(base)
        lock = locked(place)
    except OSError as error:
        raise UserError(
            f"no journal can be kept in {show(str(base))}: {error.strerror}; set XDG_STATE_HOME to a directory of yours"
        ) from error
    if lock is None:
        raise UserError(
            "this transfer is already running, here or where your home directory is shared; wait for it"
        )
    try:
        yield place
    finally:
        unlock(lock)


def _place(job: Job) -> Path:
    """Where the journal of `job` is. Raises UserError."""
    import hashlib

    key = b"\0".join([os.fsencode(os.environ.get("BEEOND_JOB_ID", "")), job.source, job.destination])
    return _state_home() / "beeond-ctl" / "journals" / hashlib.blake2b(key, digest_size=8).hexdigest()


def _earlier(job: Job) -> set[str]:
    """The tokens of earlier runs of `job` that did not come to their end."""
    from beeond_ctl.staging.preview import tokens_of

    with suppress(UserError, OSError):  # will be said when it is copied
        place = _place(job)
        if _is_reached_safely(place.parent):
            return tokens_of(place)
    return set()


def _state_home() -> Path:
    """`$XDG_STATE_HOME`, or its default in the home directory on record: `$HOME` may be another's under sudo."""
    chosen = os.environ.get("XDG_STATE_HOME", "")
    if chosen.startswith("/"):
        return Path(chosen)
    import pwd

    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".local/state"
    except KeyError:
        raise UserError(
            "you have no home directory for the journal; set XDG_STATE_HOME to a directory of yours"
        ) from None


def _is_reached_safely(base: Path) -> bool:
    """Whether root may make `base`: what is there of the way to it is not another's, who could lead it elsewhere."""
    if os.geteuid() != 0:
        return True
    there = [path for path in base.parents if os.path.lexists(path)]
    return all(path.lstat().st_uid == 0 for path in there)


def locked(place: Path) -> int | None:
    """A descriptor that holds the lock of `place`, which is made if need be; None if another has it. Raises OSError."""
    import fcntl

    while True:
        place.mkdir(exist_ok=True)
        try:
            fd = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the one before us has just removed the directory
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(place / "lock")):
                return fd
        except BlockingIOError:
            unlock(fd)
            return None
        except FileNotFoundError:
            pass  # it was removed between our two calls
        except OSError:
            unlock(fd)
            raise
        unlock(fd)


def unlock(fd: int) -> None:
    """Give up what `locked` gave. A file system that dies may say so here, which tells nothing of what was copied."""
    with suppress(OSError):
        os.close(fd)


def _remove(place: Path) -> None:
    """Remove a journal whose lock we hold, the lock last."""
    with suppress(OSError):
        for path in sorted(place.iterdir(), key=lambda path: path.name == "lock"):
            path.unlink()
        place.rmdir()


def _remove_old(base: Path) -> None:
    for place in base.iterdir():
        with suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (place, *place.iterdir())) > _KEEP_S:
                lock = locked(place)
                if lock is not None:
                    _remove(place)
                    unlock(lock)
