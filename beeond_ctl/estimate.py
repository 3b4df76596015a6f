"""How long a stage-out will take: what is still to be copied, and the rate at which this job's data was copied before.

An estimate, and honest about it: it says whether it saw all that is to be copied, and which transfer the rate is of.
Looks at files as the user who asks; for root, who does not, it is a program that runs as the user (see `watch`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import flushes
from beeond_ctl.units import duration, format_entries, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ENTRY_COST: Final = 64 << 10
"""Bytes that can be copied in the time that an entry takes beside its data, roughly."""

_ENOUGH: Final = 16 << 20
"""Work of a transfer from which on it tells a rate."""

_FAST: Final = 1 << 30
"""Work in a second that nobody is taken to exceed who has copied nothing yet."""

RATES: Final = ("the flushes", "the stage-in")
"""What a rate may be of; the first that tells one counts."""

_PATH: Final = "/usr/bin:/opt/slurm/bin:/usr/local/bin"
_SQUEUE_S: Final = 5.0
_UNITS: Final = (86400, 3600, 60, 1)


@dataclass(frozen=True, slots=True)
class Estimate:
    """`entries` and `size` (bytes) are to be copied, or more if not `complete`. `seconds` is None without a rate."""

    entries: int
    size: int
    complete: bool
    seconds: float | None
    rate_of: str

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Estimate:
        """The estimate that `as_dict` made `facts` of."""
        return cls(
            facts["entries"], facts["bytes"], facts["complete"], facts["seconds"], facts["rate_of"] or ""
        )

    @property
    def least_s(self) -> float:
        """Seconds that it will take; at least, where no rate is known."""
        return (self.size + self.entries * ENTRY_COST) / _FAST if self.seconds is None else self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "entries": self.entries, "bytes": self.size, "complete": self.complete,
            "seconds": None if self.seconds is None else round(self.seconds, 1), "rate_of": self.rate_of or None,
        }  # fmt: skip


def stage_out(hint: Mapping[str, Any], mount: str, *, within_s: float = 2.0) -> Estimate | None:
    """The estimate for the job that `hint` is of; None where nothing is to be staged out. Looks for `within_s`."""
    from beeond_ctl.staging.job import Job
    from beeond_ctl.staging.preview import look, proofs_of

    entries = size = 0
    complete = True
    wanted = hint.get("places") or []
    if not wanted:
        return None
    journals = os.fsencode(os.path.join(mount, flushes.NAME))
    for source, destination, flags in wanted:
        kept = tuple(flag for flag in flags if flag != "delete")
        job = Job(os.fsencode(os.path.join(mount, source)), os.fsencode(destination), kept, flushes=journals)
        found = look(job, proofs_of(job), within_s=within_s / len(wanted))
        entries, size, complete = entries + found.copy, size + found.copy_bytes, complete and found.complete
    work_in_a_second, rate_of = _rate(hint.get("transfers") or (), flushes.read_all(mount))
    work = size + entries * ENTRY_COST
    return Estimate(entries, size, complete, work / work_in_a_second if work_in_a_second else None, rate_of)


def told(estimate: Estimate) -> str:
    """The estimate as a person says it."""
    size, more = _size(estimate), "" if estimate.complete else " or more"
    if estimate.seconds is None:
        return f"{size}{more}; too little was copied yet to tell a rate (16 MiB)"
    return f"about {duration(estimate.seconds)}{more} for {size}, at the rate of {estimate.rate_of}"


def _size(estimate: Estimate) -> str:
    return f"{format_entries(estimate.entries)}, {format_size(estimate.size)}"


def warning(estimate: Estimate | None, left_s: float | None) -> str:
    """What to say if the time limit is nearer than the end of a stage-out that began now; else nothing."""
    if estimate is None or left_s is None or estimate.least_s <= max(left_s, 1.0):
        return ""
    takes = told(estimate)
    if estimate.seconds is None:
        takes = f"{duration(estimate.least_s)} or more for {_size(estimate)}, even at {format_size(_FAST)} a second"
    return (
        f"the stage-out of this job will take {takes}, and its time limit is {duration(left_s)} away; "
        "stage-out goes on after the limit, but holds the nodes: flush now what is finished"
    )


def _rate(transfers: Iterable[Mapping[str, Any]], flushed: Iterable[flushes.Status]) -> tuple[float, str]:
    """Work in a second (see `ENTRY_COST`) of the flushes, else of the stage-in; and which of them it is.

    What was over too soon tells how long it takes to begin, not how fast it goes on.
    """
    ways: dict[str, list[tuple[Mapping[str, Any], str]]] = {
        RATES[0]: [(each, "copied") for each in flushed if each.get("state") == "proved"],
        RATES[1]: [(each, "entries") for each in transfers if each.get("direction") == "in"],
    }
    for name, found in ways.items():
        parts = [_part(each.get("bytes"), each.get(count), each.get("seconds")) for each, count in found]
        work, seconds = (sum(part[index] for part in parts) for index in (0, 1))
        if work >= _ENOUGH and seconds > 0:
            return work / seconds, name
    return 0.0, ""


def _part(size: object, entries: object, seconds: object) -> tuple[float, float]:
    if not (isinstance(size, int) and isinstance(entries, int) and isinstance(seconds, int | float)):
        return 0.0, 0.0
    work = size + entries * ENTRY_COST
    return (work, seconds) if work >= _ENOUGH else (0.0, 0.0)


def time_left_s(job_id: int, environ: Mapping[str, str]) -> float | None:
    """Seconds until the job's time limit, as Slurm says; None if there is none, or Slurm does not say."""
    squeue = shutil.which("squeue", path=f"{environ.get('PATH', '')}:{_PATH}")
    if squeue is None:
        return None
    try:
        done = subprocess.run(
            [squeue, "--noheader", f"--jobs={job_id}", "--format=%A %L"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SQUEUE_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    # The id of an array is also that of one of its jobs, and gets the lines of all.
    lines = (line.split() for line in done.stdout.splitlines())
    return next((parse_left(line[1]) for line in lines if line[:1] == [str(job_id)] and line[1:]), None)


def parse_left(text: str) -> float | None:
    """Seconds in what squeue(1) prints as `%L`: days-hours:minutes:seconds; None for UNLIMITED and the like.

    >>> parse_left("1-02:03:04"), parse_left("2:05"), parse_left("UNLIMITED"), parse_left("-0:10")
    (93784.0, 125.0, None, 0.0)
    """
    if text.startswith("-"):
        return 0.0
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    return float(sum(int(part or 0) * unit for part, unit in zip(match.groups(), _UNITS, strict=True)))


# --- as a program -----------------------------------------------------------------------------------------


def _most_s(hint: Mapping[str, Any], mount: str) -> float:
    """Seconds that it would take to copy all that is on the file system at `mount`, found out by one system call."""
    room = os.statvfs(mount)
    size = (room.f_blocks - room.f_bfree) * room.f_frsize
    entries = room.f_files - room.f_ffree if room.f_files else size >> 12  # BeeGFS does not say how many
    work_in_a_second, _ = _rate(hint.get("transfers") or (), flushes.read_all(mount))
    return (size + entries * ENTRY_COST) / (work_in_a_second or _FAST)


def _main() -> None:
    """Answer the order on standard input; `found` only if what is there may take longer than `left_s`."""
    order = json.loads(sys.stdin.buffer.readline())
    most_s, found = _most_s(order, order["mount"]), None
    if most_s > order["left_s"]:
        found = stage_out(order, order["mount"], within_s=order["within_s"])
    sys.stdout.write(json.dumps({"most_s": most_s, "found": found and found.as_dict()}))


def main() -> None:
    """The program (see `staging.spawn`)."""
    from beeond_ctl.staging import child

    child.run(_main)
