"""What surrounds every piece of work on a node: its failure reaches Slurm, and a signal is a failure."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from beeond_ctl import config as configuration
from beeond_ctl import slurm
from beeond_ctl.errors import ConfigError, NodeError, one_line
from beeond_ctl.events import EventLog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from beeond_ctl.config import SiteConfig


LOCK_S: Final = 60.0
"""How long Prolog and Epilog wait for a sweep that looks at their job: longer than Slurm's commands may take."""


@contextmanager
def draining(config: SiteConfig, node: str, job_id: int) -> Iterator[None]:
    """Drain the node with the reason when the block fails: Slurm itself would only say "Prolog error"."""
    try:
        yield
    except BaseException as error:
        text = one_line(error)
        EventLog(config.paths.log, job_id, node).log("drained", reason=text)
        try:
            slurm.drain(config.slurm.path, node, drain_prefix(job_id) + text)
        except NodeError as second:
            raise NodeError(f"{text} (and the reason could not be told to Slurm: {second})") from error
        raise


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
        raise NodeError(f"ended by {signal.Signals(number).name}; was PrologEpilogTimeout reached?")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
