"""The watch: tells a job's output that its stage-out will take longer than the time limit leaves. A program of its own.

Runs as root on the leader while the job runs, and sleeps. `docs/lifecycle.md` has its life. It touches nothing of the
instance, which may hang: a process of the user's looks. What that says may be anything.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import estimate, slurm
from beeond_ctl.errors import NodeError, one_line
from beeond_ctl.estimate import Estimate
from beeond_ctl.events import EventLog
from beeond_ctl.staging.job import Identity
from beeond_ctl.staging.spawn import end, spawn

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence

_FIRST_S: Final = 10.0
"""The job begins in peace, and the shortest need no watch."""
_LAST_S: Final = 15.0
"""When so little is left, a warning comes too late."""
_LEAST_S: Final = 5.0
_SHARE: Final = 0.25
"""Of the time left, what passes between two looks."""
_AGAIN: Final = 2.0
"""How many times as long the stage-out has to take before the job is told again."""
_SILENT_S: Final = (300.0, 3600.0)
"""Pauses while slurmctld does not answer: the first, which doubles, and the longest."""

_LOOK_S: Final = 2.0
_GRACE_S: Final = 5.0
_MAX: Final = 4096
_LARGEST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look found: seconds that the stage-out takes at most, and where that is too long the estimate."""

    most_s: float
    found: Estimate | None


def watch(
    left: Callable[[], float],
    look: Callable[[float], Seen | None],
    tell: Callable[[str], bool],
    *,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Watch until the time limit is near or gone, or `look` sees nothing.

    `left` says how many seconds are left (inf: there is no limit), or raises NodeError. `look` gets them. `tell` says
    whether the job was told.
    """
    sleep(_FIRST_S)
    limit_s = _first(left, sleep, now)
    told_s = 0.0
    while limit_s < math.inf:
        if limit_s - now() < _LAST_S:
            limit_s = _again(left, now, limit_s)
            if limit_s - now() < _LAST_S:
                return
        seen = look(limit_s - now())
        if seen is None:
            return
        takes_s = seen.found.least_s if seen.found else seen.most_s
        if estimate.warning(seen.found, limit_s - now()) and takes_s >= _AGAIN * told_s:
            limit_s = _again(left, now, limit_s)
            text = estimate.warning(seen.found, limit_s - now())
            if text and tell(text):
                told_s = takes_s
        if limit_s < math.inf:
            sleep(_pause_s(limit_s - now(), takes_s))


def _pause_s(left_s: float, takes_s: float) -> float:
    """Until a quarter of the time left has passed, or the stage-out takes all that is left, if that is earlier."""
    pause_s, spare_s = left_s * _SHARE, left_s - takes_s + 1.0
    return max(_LEAST_S, spare_s if 0 < spare_s < pause_s else pause_s)


def _first(left: Callable[[], float], sleep: Callable[[float], None], now: Callable[[], float]) -> float:
    """When the time limit is; asks until there is an answer."""
    pause_s, longest_s = _SILENT_S
    while True:
        try:
            return now() + left()
        except NodeError:
            sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def _again(left: Callable[[], float], now: Callable[[], float], known_s: float) -> float:
    """When the time limit is, which may have been changed; `known_s` where there is no answer."""
    try:
        return now() + left()
    except NodeError:
        return known_s


# --- what it sees and does ----------------------------------------------------------------------------------


def _left(path: Sequence[str], job_id: int) -> float:
    """Seconds until the time limit: inf without one, 0 if the job does not run. Raises NodeError."""
    fields = slurm.job_fields(path, job_id)
    if fields.get("JobState") not in {"RUNNING", "SUSPENDED"}:
        return 0.0
    limit_s, ran_s = (estimate.parse_left(fields.get(name, "")) for name in ("TimeLimit", "RunTime"))
    return math.inf if limit_s is None else limit_s - (ran_s or 0.0)


def _look(order: Mapping[str, Any], user: Identity, left_s: float) -> Seen | None:
    """Have the user look; None if the job is over, or there was no answer that makes sense."""
    if not _is_ours(Path(order["state"]), order["token"]):
        return None
    asked = {key: order[key] for key in ("mount", "places", "transfers")}
    words = json.dumps({**asked, "left_s": left_s, "within_s": _LOOK_S}).encode() + b"\n"
    try:
        child = spawn("estimate", user, package="beeond_ctl")
    except OSError:
        return None
    try:
        return parse(_ask(child, words, time.monotonic() + _LOOK_S + _GRACE_S))
    except OSError:
        return None
    finally:
        end(child)


def _is_ours(path: Path, token: str) -> bool:
    """Whether the state says that the job still runs, and is the one that this watch is of."""
    try:
        state = json.loads(path.read_text())
        return bool(state["phase"] == "ready" and state["token"] == token)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _ask(child: subprocess.Popen[bytes], words: bytes, deadline_s: float) -> bytes:
    """What `child` answers to `words` until `deadline_s`, and not more than is of use. Raises OSError."""
    assert child.stdin is not None  # noqa: S101
    assert child.stdout is not None  # noqa: S101
    fcntl.fcntl(child.stdin, fcntl.F_SETPIPE_SZ, max(1 << 16, len(words)))  # nobody has to read it meanwhile
    child.stdin.write(words)
    child.stdin.flush()
    answer, reading = b"", child.stdout.fileno()
    while len(answer) < _MAX and select.select([reading], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        part = os.read(reading, _MAX)
        if not part:
            return answer
        answer += part
    return b""


def parse(answer: bytes) -> Seen | None:
    """What a look says; None if that makes no sense."""
    try:
        facts = json.loads(answer)
        found = facts["found"] and Estimate.of(facts["found"])
        numbers = [facts["most_s"], *([found.entries, found.size, found.seconds or 0.0] if found else ())]
        if not all(isinstance(each, int | float) and 0 <= each < _LARGEST for each in numbers):
            return None
        if found and (found.rate_of not in ("", *estimate.RATES) or not isinstance(found.complete, bool)):
            return None
        return Seen(float(facts["most_s"]), found or None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _tell(order: Mapping[str, Any], text: str) -> bool:
    """Tell the job, through slurmctld; whether that worked. In a heterogeneous job only the first component hears."""
    path, job_id = order["slurm"], order["job"]
    said = ""
    try:
        first = next((each.job_id for each in slurm.components(path, job_id)), job_id)
        which = f"job {job_id}: " if first != job_id else ""
        slurm.run(path, "scontrol", "notify", str(first), f"beeond: warning: {which}{text}")
    except NodeError as error:
        said = one_line(error)
    EventLog(order["log"], job_id, order["node"]).log("warned", text=text, output=said or "ok")
    return not said


def _stop(*_: object) -> None:
    sys.exit(0)


def _main() -> None:
    signal.signal(signal.SIGTERM, _stop)  # so that nobody is left looking
    order = json.loads(Path(sys.argv[1]).read_text())
    with suppress(KeyError, OSError):
        user = Identity(order["uid"], order["gid"], tuple(os.getgrouplist(order["user"], order["gid"])))
        watch(
            lambda: _left(order["slurm"], order["job"]),
            lambda left_s: _look(order, user, left_s),
            lambda text: _tell(order, text),
        )


if __name__ == "__main__":
    _main()
