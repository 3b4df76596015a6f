"""Slurm's burst-buffer hooks: what `slurm/burst_buffer.lua` leaves to the controller, beside slurmctld.

Runs as SlurmUser, which is seldom root and cannot read what the job's user can: whatever needs the user's eyes or a
node is left to the Prolog. Knows nothing of instances.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Final

from beeond_ctl import config as configuration
from beeond_ctl import slurm
from beeond_ctl.directives import parse_directives
from beeond_ctl.errors import JobGoneError, RetainedError, UserError
from beeond_ctl.plan import check_request
from beeond_ctl.request import JobNames, encode, expand

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from beeond_ctl.config import SiteConfig
    from beeond_ctl.request import Request

MARK: Final = "beeond:directives"
"""What the comment of a job with directives ends in: the one thing that Slurm 22.05 lets its own user put into the
environment of a Prolog (as SLURM_JOB_COMMENT). It only says that asking Slurm for the directives is worth it."""

_POLL_S: Final = (0.5, 10.0)
"""Seconds between two looks at a job that is completing: the first pause, and the longest."""


def setup(config_path: Path, job_id: int) -> None:
    """The job is pending: see that it can be served, and mark it for its Prologs.

    Raises RequestError or UserError, whose text becomes the reason why Slurm holds the job, or NodeError.
    """
    config = _config(config_path)
    fields, asked = _job(config, job_id)
    encode(asked)
    if config_path.exists():
        check_request(config, asked)
    _check_sources(asked, _names(job_id, fields))
    slurm.mark(config.slurm.path, job_id, MARK)


def data_out(config_path: Path, job_id: int) -> None:
    """The job's program has ended, and its Epilogs stage out: wait for them, and see what became of it.

    Slurm ends this after StageOutTimeout. Raises RetainedError when a node kept data.
    """
    path = _config(config_path).slurm.path
    pause_s, longest_s = _POLL_S
    while (fields := slurm.job_fields(path, job_id)).get("JobState") == "COMPLETING":
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, longest_s)
    nodes = fields.get("NodeList", "")
    if nodes in {"", "(null)"}:  # cancelled before it had any
        return
    kept = [
        node
        for node, reason in slurm.reasons(path, nodes).items()
        if f"beeond: job {job_id}: data kept" in reason
    ]
    if kept:
        folded = slurm.fold_nodes(kept)
        raise RetainedError(
            f"data kept on {folded}, its stage-out is not proved; see the reason of {kept[0]}, "
            f"and when the cause is gone: beeond-ctl recover {job_id}, then scancel --hurry {job_id}"
        )


def asked(path: Sequence[str], job_id: int) -> str:
    """The request of the job's directives, encoded; empty where there are none.

    Raises JobGoneError when Slurm no longer knows the job, RequestError, or NodeError when Slurm does not answer.
    """
    lines = slurm.job_directives(path, job_id)
    if lines is None:
        raise JobGoneError(f"Slurm no longer knows job {job_id}")
    return encode(parse_directives(lines)) if lines else ""


def _job(config: SiteConfig, job_id: int) -> tuple[dict[str, str], Request]:
    fields = slurm.job_fields(config.slurm.path, job_id)
    lines = slurm.job_directives(config.slurm.path, job_id)
    if lines is None:
        raise JobGoneError(f"Slurm no longer knows job {job_id}")
    return fields, parse_directives(lines)


def _config(path: Path) -> SiteConfig:
    """The host of slurmctld needs no configuration of ours where it is a node of no instance."""
    return configuration.load(path) if path.exists() else configuration.SiteConfig()


def _names(job_id: int, fields: dict[str, str]) -> JobNames:
    def number(name: str) -> int | None:
        return int(fields[name]) if fields.get(name, "").isdigit() else None

    user = fields.get("UserId", "").partition("(")[0]
    return JobNames(job_id, user, fields.get("JobName", ""), number("ArrayJobId"), number("ArrayTaskId"))


def _check_sources(asked: Request, names: JobNames) -> None:
    """Find sources that nobody can find, before nodes are given to the job. Raises UserError or RequestError."""
    for transfer in asked.stage_in:
        source = expand(transfer, names, inward=True).source
        if _is_surely_missing(source):
            raise UserError(
                f"#BB_LUA stage_in: source {source!r} does not exist; mend the path, and submit the job again"
            )


def _is_surely_missing(path: str) -> bool:
    """Whether `path` does not exist, for anybody, on a file system that is mounted here.

    False wherever that cannot be told: this user may not look, or the path would be on a file system of the nodes.
    """
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
            return False
    else:
        return False
    above = path
    while not os.path.exists(above):
        above = os.path.dirname(above)
    return os.stat(above).st_dev != os.stat("/").st_dev
