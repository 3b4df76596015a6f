"""What surrounds every piece of work on a node: its failure reaches Slurm, and a signal is a failure."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from beeond_ctl import config as configuration
from beeond_ctl import events, slurm
from beeond_ctl import state as states
from beeond_ctl.aside import tried
from beeond_ctl.errors import ConfigError, EndedError, NodeError, one_line
from beeond_ctl.events import EventLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from beeond_ctl.config import SiteConfig


LOCK_S: Final = 60.0
"""How long a Prolog waits for a sweep that looks at its job: longer than Slurm's commands may take."""
REASONS_S: Final = 30.0
"""How long to wait for another process that changes the node's reason: longer than slurmctld mostly takes."""
ACCOUNTS_S: Final = 5.0
"""How long the metrics' and the reports' file systems may take."""


@contextmanager
def draining(config: SiteConfig, node: str, job_id: int) -> Iterator[None]:
    """Drain the node with the reason when the block fails: Slurm itself would only say "Prolog error"."""
    try:
        yield
    except BaseException as error:
        text = one_line(error)
        EventLog(config.paths.log, job_id, node).log("drained", reason=text)
        try:
            with changing_reasons(config):
                slurm.drain(config.slurm.path, node, drain_prefix(job_id) + text)
        except NodeError as second:
            raise NodeError(f"{text} (and the reason could not be told to Slurm: {second})") from error
        raise


@contextmanager
def changing_reasons(config: SiteConfig) -> Iterator[None]:
    """Keep other processes on this node from changing the node's reason between our reading and writing it.

    Slurm has no way to add to a reason, and two jobs' Epilogs may both keep data at the same moment. After `REASONS_S`
    it goes on without: a reason that may get lost is better than none.
    """
    descriptor = -1
    with suppress(OSError):  # where there is no such directory there is no other process of ours
        descriptor = os.open(config.paths.run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + REASONS_S
        while descriptor >= 0 and time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def accounted(config: SiteConfig, node: str, job_id: int, *, ends: bool) -> Iterator[None]:
    """When the block has ended, put what it logged into the node's metrics, where the site wants them.

    With `ends` the job's events are also put where `report` finds them. Never fails, and takes at most `ACCOUNTS_S`
    where a file system hangs.
    """
    if config.metrics.directory is None and config.report.directory is None:
        yield
        return
    before = events.length(config.paths.log, job_id)
    try:
        yield
    finally:
        trouble = tried(lambda: _account(config, node, job_id, before, ends=ends), within_s=ACCOUNTS_S)
        if trouble:
            EventLog(config.paths.log, job_id, node).log("not-accounted", message=trouble)


def _account(config: SiteConfig, node: str, job_id: int, before: int, *, ends: bool) -> None:
    """See `accounted`. Raises OSError, NodeError."""
    if config.metrics.directory is not None:
        from beeond_ctl import metrics

        phases = [state.phase for state in states.read_all(config.paths.run)]
        logged = events.read(config.paths.log, job_id, since=before)
        metrics.update(config.metrics.directory, config.paths.run, phases, logged=logged)
    if ends and config.report.directory is not None:
        from beeond_ctl import published

        logged = events.read(config.paths.log, job_id)
        uid = next((event["uid"] for event in reversed(logged) if "uid" in event), None)
        if uid is not None:
            published.publish(config.report.directory, job_id, uid, node, events.of_user(logged, uid))


def count_sweep(config: SiteConfig, verdicts: Sequence[str]) -> None:
    """Put what a sweep found into the node's metrics, where the site wants them. Never fails; see `accounted`."""
    if config.metrics.directory is not None:
        directory = config.metrics.directory

        def count() -> None:
            from beeond_ctl import metrics

            phases = [state.phase for state in states.read_all(config.paths.run)]
            metrics.update(directory, config.paths.run, phases, swept=verdicts)

        tried(count, within_s=ACCOUNTS_S)


def configured(path: Path, node: str, job_id: int) -> SiteConfig:
    """The configuration; where it cannot be used, the node is drained and ConfigError raised."""
    try:
        return configuration.load(path)
    except ConfigError:
        with draining(configuration.SiteConfig(), node, job_id):
            raise


def drain_prefix(job_id: int) -> str:
    """How our drain reasons begin."""
    return f"beeond: job {job_id}: "


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGINT an error like any other, so that the node is rolled back and the others are told."""

    def stop(number: int, _: object) -> None:
        raise EndedError(f"ended by {signal.Signals(number).name}; was PrologEpilogTimeout reached?")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
