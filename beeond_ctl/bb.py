"""Slurm's burst-buffer hooks: what `slurm/burst_buffer.lua` leaves to the controller, beside slurmctld.

Runs as SlurmUser, who is seldom root and cannot read what users can, or, to look at sources, as the job's user. Many
jobs may be at the same hook, and slurmctld is to answer others meanwhile: no configuration is read but the site's
limits, and nothing heavy is imported. Knows nothing of instances.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from beeond_ctl import slurm
from beeond_ctl.directives import parse_directives
from beeond_ctl.errors import JobGoneError, NodeError, RetainedError, UserError
from beeond_ctl.request import JobNames, encode, expand_all, show
from beeond_ctl.units import format_entries, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from beeond_ctl.request import Request

_T = TypeVar("_T")

LIMITS: Final = "/etc/beeond-ctl/limits"
"""What `beeond-ctl bb limits` printed."""

POOL: Final = "/etc/beeond-ctl/pool"
"""How much all nodes' devices hold together."""

MARK: Final = "beeond:directives"
"""What the comment of a job with directives ends in: the one thing that Slurm 22.05 lets its own user put into the
environment of a Prolog (as SLURM_JOB_COMMENT). It only says that asking Slurm for the directives is worth it."""

_POLL_S: Final = (0.5, 10.0)
"""Seconds between two looks at a job that is completing: the first pause, and the longest."""
_PATIENCE_S: Final = 600.0
"""How long Slurm may be without an answer while a job is staged out."""
_SPARE_S: Final = 5.0
"""How long a process that looks at sources may be late."""


def run(words: Sequence[str]) -> int:
    """`beeond-ctl bb HOOK JOBID`. Raises BeeondError, whose text becomes what Slurm shows of the job."""
    hook, job_id = words
    {"data_in": data_in, "data_out": data_out}[hook](_limits(), int(job_id))
    return 0


def is_hook(words: Sequence[str]) -> bool:
    """Whether `words` are what burst_buffer.lua calls."""
    return len(words) == 2 and words[0] in {"data_in", "data_out"} and words[1].isdigit()


def _limits() -> dict[str, str]:
    """The site's limits but for the rules; the defaults where the file is missing."""
    lines: list[str] = []
    try:
        with open(LIMITS, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        pass
    return {"path": "/usr/bin:/opt/slurm/bin:/usr/local/bin", "look": "20"} | {
        name: rest for name, _, rest in (line.partition(" ") for line in lines)
    }


def data_in(limits: Mapping[str, str], job_id: int) -> None:
    """The job is pending: see that its sources can be staged in, as far as that can be told without a node.

    Raises RequestError or UserError, whose text becomes the reason why Slurm holds the job. Whatever else goes wrong is
    no reason to hold it: it is noted, and the Prolog finds what there is to find.
    """
    try:
        fields, lines = slurm.job_facts(limits["path"].split(":"), job_id)
    except NodeError as error:
        return _note(str(error))
    if not fields:
        return _note(f"Slurm no longer knows job {job_id}")
    asked = parse_directives(lines)
    encode(asked)
    names = _names(job_id, fields)
    expand_all(asked, names, inward=False)  # told now, if it cannot be
    sources = [transfer.source for transfer in expand_all(asked, names, inward=True)]
    look_s = float(limits["look"])
    missing = _missing(sources, look_s) if sources else []
    if missing is None:
        return None
    for source in missing:
        raise _wrong(source, "does not exist")
    if sources and _is_ours(limits, job_id):
        lists = _lists(limits, names, len(sources))
        found = _look(sources, look_s, lists)
        if found:
            try:
                _judge(asked, sources, found, _shares(limits, fields))
            except UserError:
                _forget(lists, look_s)
                raise
    return None


def _is_ours(limits: Mapping[str, str], job_id: int) -> bool:
    """Whether this runs as the job's user, and not as SlurmUser, who may see what the user may not."""
    try:
        return slurm.owner(limits["path"].split(":"), job_id) == os.geteuid()
    except NodeError as error:
        _note(str(error))
        return False


def _lists(limits: Mapping[str, str], names: JobNames, count: int) -> list[str]:
    """Where the job's sources are to be listed; nothing where the site has no place for that."""
    if "lists" not in limits:
        return []
    from beeond_ctl.staging.listing import path_of

    return [path_of(limits["lists"], names.user, names.job_id, index) for index in range(count)]


def _forget(lists: Sequence[str], within_s: float) -> None:
    """Remove the lists of a job that will not be staged in."""
    if lists:
        from beeond_ctl.staging.look import forget

        _asked_aside(lambda: forget(lists), within_s)


def _wrong(source: str, trouble: str) -> UserError:
    return UserError(
        f"#BB_LUA stage_in: source {show(source)} {trouble}; "
        "mend that, remove this job (scancel --hurry), and submit it again"
    )


def _shares(limits: Mapping[str, str], fields: Mapping[str, str]) -> int:
    """Targets that share a job's capacity, where each holds no more than its share; else 1."""
    nodes = re.match(r"[0-9]+", fields.get("NumNodes", ""))
    targets = limits.get("share", "")
    return int(nodes[0]) * int(targets) if nodes and targets.isdigit() else 1


def _judge(asked: Request, sources: Sequence[str], found: Sequence[Mapping[str, Any]], shares: int) -> None:
    """Compare what was found with what was asked for. Raises UserError."""
    for source, seen in zip(sources, found, strict=True):
        if seen["trouble"]:
            raise _wrong(source, seen["trouble"])
        if seen["unreadable"]:
            told = ", ".join(show(example) for example in seen["examples"])
            raise _wrong(source, f"has {format_entries(seen['unreadable'])} that cannot be read ({told})")
    if asked.capacity is None:
        return
    size, files = sum(seen["size"] for seen in found), sum(seen["files"] for seen in found)
    if size > asked.capacity:
        raise UserError(
            f"#BB_LUA stage_in: the sources hold {format_size(size)} in {files} files, and capacity="
            f"{format_size(asked.capacity)} was asked for; ask for more, "
            "remove this job (scancel --hurry), and submit it again"
        )
    largest, share = max(seen["largest"] for seen in found), asked.capacity // shares
    if largest > share and asked.backend != "beegfs":
        raise UserError(
            f"#BB_LUA stage_in: a file of {format_size(largest)} does not fit on one of {shares} targets with "
            f"{format_size(share)} each; ask for more capacity, "
            "remove this job (scancel --hurry), and submit it again"
        )


def _missing(sources: Sequence[str], within_s: float) -> list[str] | None:
    """Which of `sources` surely do not exist; None where storage does not answer in time."""
    found = _asked_aside(
        lambda: json.dumps([source for source in sources if _is_surely_missing(source)]).encode(), within_s
    )
    return found if isinstance(found, list) else None


def _asked_aside(question: Callable[[], bytes], within_s: float) -> Any:  # noqa: ANN401 - what its JSON says
    """The answer to a question to global storage, which may hang in a call that nothing ends; None where it does."""
    from beeond_ctl.aside import aside

    try:
        return json.loads(aside(question, within_s=within_s + _SPARE_S))
    except (ValueError, OSError):
        _note(f"global storage did not answer within {within_s:.0f} s (deadlines.look)")
        return None


def _look(sources: Sequence[str], within_s: float, lists: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What this user sees of `sources`, and lists in `lists`; nothing where storage does not answer in time."""
    from beeond_ctl.staging.look import look_at

    found: list[dict[str, Any]] = _asked_aside(lambda: look_at(sources, within_s, lists), within_s) or []
    for source, seen in zip(sources, found, strict=False):
        if seen["unlisted"]:
            _note(f"no list of {show(source)}: {seen['unlisted']}")
    if not all(seen["whole"] or seen["trouble"] for seen in found):
        _note(f"not all was seen within {within_s:.0f} s (deadlines.look); stage-in sees the rest")
    return found


def _note(text: str) -> None:
    """Into slurmctld's log."""
    sys.stderr.write(f"{text}\n")


def data_out(limits: Mapping[str, str], job_id: int) -> None:
    """The job's program has ended, and its Epilogs stage out: wait for them, and see what became of it.

    Slurm ends this after StageOutTimeout. Raises RetainedError when a node may have kept data, NodeError when Slurm has
    not answered for `_PATIENCE_S`.
    """
    path = limits["path"].split(":")
    pause_s, longest_s = _POLL_S
    while (job := _persistently(lambda: slurm.state_and_nodes(path, job_id)))[0] == "COMPLETING":
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, longest_s)
    _, nodes = job
    if not nodes:  # cancelled before it had any, or requeued
        return
    found = _persistently(lambda: slurm.unproved(path, nodes, job_id))
    if found:
        raise RetainedError(
            f"stage-out is not proved on {slurm.fold_nodes(found)}; see the reason of {found[0]}, "
            f"and when the cause is gone: beeond-ctl recover {job_id}, then scancel --hurry {job_id}"
        )


def _persistently(question: Callable[[], _T]) -> _T:
    """The answer to `question`: a job's stage-out takes hours, in which Slurm may be silent. Raises NodeError."""
    return slurm.patiently(question, within_s=_PATIENCE_S, pause_s=_POLL_S[1])


def asked(path: Sequence[str], job_id: int) -> str:
    """The request of the job's directives, encoded; empty where there are none.

    Raises JobGoneError when Slurm no longer knows the job, RequestError, or NodeError when Slurm does not answer.
    """
    lines = slurm.job_directives(path, job_id)
    if lines is None:
        raise JobGoneError(f"Slurm no longer knows job {job_id}")
    return encode(parse_directives(lines)) if lines else ""


def _names(job_id: int, fields: dict[str, str]) -> JobNames:
    def number(name: str) -> int | None:
        return int(fields[name]) if fields.get(name, "").isdigit() else None

    user = fields.get("UserId", "").partition("(")[0]
    return JobNames(job_id, user, fields.get("JobName", ""), number("ArrayJobId"), number("ArrayTaskId"))


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
