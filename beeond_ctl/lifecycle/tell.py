"""What became of the job's data, told to the user where they look: one line at the end of the job's output, and before
it one for each remark of its transfers.

The job has ended when its stage-out runs, so that nothing else reaches them. The leader says it, in a process of
the user's; and, where the site wants it, in the job's accounting. That it could not be said changes nothing.
"""

from __future__ import annotations

import re
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import events, slurm
from beeond_ctl.errors import BeeondError, one_line
from beeond_ctl.lifecycle import stage
from beeond_ctl.plan import FIRST_OWN_ID
from beeond_ctl.staging.spawn import end, spawn
from beeond_ctl.units import format_entries, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from beeond_ctl.lifecycle.here import Here

_WRITE_S: Final = 10.0
"""For the file system that the output is on."""

_MAX: Final = 2000
_MAX_NOTE: Final = 500
_MAX_NOTES: Final = 20

GIVEN_UP: Final = "the data was GIVEN UP by scancel --hurry, nothing was staged out after the job"


@contextmanager
def telling(here: Here, text: str) -> Iterator[None]:
    """Tell the user `text` while the block does something else. Does nothing if it is empty, or another node leads."""
    if not text or not here.leads or here.state.job.job_id >= FIRST_OWN_ID:
        yield
        return
    thread = threading.Thread(target=_tell, args=(here, text), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_WRITE_S + 2 * slurm.TIMEOUT_S)


def staged_out(here: Here) -> str:
    """What came of a stage-out that is proved."""
    found = events.last_run(events.read(here.config.paths.log, here.state.job.job_id))
    done = [each for each in found if each.get("event") == "step" and not each.get("failed")]
    before = _sum([each for each in done if each["step"] == "stage-in"])
    out = [each for each in done if each["step"] == "stage-out"][-len(here.request.stage_out) :]
    parts = [*([f"stage-in {before}"] if before else []), f"stage-out {_sum(out) or 'of nothing'}, proved"]
    gone = [str(each.get("source")) for each in out if (each.get("summary") or {}).get("missing")]
    if gone:
        parts.append(f"{', '.join(gone)} was NOT THERE, nothing was copied for it")
    # One that is started again to unmount comes after.
    earlier = found[: found.index(out[0])] if out else found
    if any(each.get("event") in {"revived", "remounted"} for each in earlier):
        parts.append(
            "a server of the file system HAD DIED during the job, and what was written after that failed"
        )
    rebooted = sorted(
        {node for each in earlier if each.get("event") == "rebooted" for node in each.get("nodes", ())}
    )
    if rebooted:
        parts.append(
            f"{slurm.fold_nodes(rebooted)} WAS REBOOTED before, and what had not reached its devices by then IS LOST: "
            "files may be shorter than they were, or older"
        )
    return "; ".join(parts)


def kept(here: Here, why: str, recovery: str) -> str:
    """That the data was not staged out, but kept."""
    nodes = slurm.fold_nodes(here.first_plan.servers)
    return f"stage-out is NOT complete ({why}); your data is kept on {nodes}. For your admin: {recovery}"


def _notes(here: Here) -> list[str]:
    """What the user should know of the transfers although they went well: what was kept, deleted, or not copied."""
    found = events.last_run(events.read(here.config.paths.log, here.state.job.job_id))
    ends = [at for at, each in enumerate(found) if each.get("event") in {"epilog", "recover", "down"}]
    last = found[ends[-1] if ends else 0 :]  # earlier ones were told of theirs
    told = [("stage-out", f"stage-out to {each.get('destination')}", each) for each in last]
    if not any(each.get("event") == "told" for each in found):
        told += [("stage-in", f"stage-in of {each.get('source')}", each) for each in found]
    notes = []
    for step, name, each in told:
        if each.get("event") == "step" and each.get("step") == step:
            notes += [f"{name}: {remark}" for remark in (each.get("summary") or {}).get("remarks") or ()]
    more = len(notes) - _MAX_NOTES
    return [*notes[:_MAX_NOTES], *([f"and {more} more of this kind"] if more > 0 else [])]


def discarded(here: Here, by: str) -> str:
    """That data which was kept was given up by `by`, after all that was said of it."""
    nodes = slurm.fold_nodes(here.first_plan.servers)
    return f"the data that was kept on {nodes} was GIVEN UP by {by} (recover --discard); nothing is kept any more"


def _sum(steps: Sequence[Mapping[str, Any]]) -> str:
    summaries = [step["summary"] for step in steps if isinstance(step.get("summary"), dict)]
    if not summaries:
        return ""
    copied, skipped, size = (sum(each[key] for each in summaries) for key in ("copied", "skipped", "bytes"))
    seconds = sum(each["seconds"] for each in summaries)
    had = f" and {skipped} that were there before" if skipped else ""
    return f"of {format_entries(copied)} ({format_size(size)} in {seconds:.1f} s){had}"


def _tell(here: Here, text: str) -> None:
    line = re.sub(r"[^ -~]", "?", " ".join(text.split()))[:_MAX]
    notes = [
        re.sub(r"[^ -~]", lambda found: ascii(found[0])[1:-1], f"note: {note}")[:_MAX_NOTE]
        for note in _notes(here)
    ]
    config, job_id = here.config.slurm, here.state.job.job_id
    results = {}
    if config.tell_in_output:
        results["output"] = _in_output(here, [*notes, line])
    if config.tell_in_accounting:
        results["accounting"] = _in_accounting(config.path, job_id, line)
    here.events.log("told", text=line, notes=notes, **results)


def _in_output(here: Here, lines: Sequence[str]) -> str:
    """Append to the job's output as its user; "ok", or why not."""
    try:
        path = slurm.job_output(here.config.slurm.path, here.state.job.job_id)
        if path is None:
            return "the job has no output file"
        child = spawn("tell", stage.identity(here))
    except (BeeondError, OSError) as error:
        return one_line(error)
    words = "".join(f"beeond: {line}\n" for line in lines).encode("ascii")
    try:
        said, _ = child.communicate(path + b"\0" + words, timeout=_WRITE_S)
        return said.decode(errors="replace")[:200] or "ok"
    except subprocess.TimeoutExpired:
        return f"no answer within {_WRITE_S:.0f} s"
    finally:
        end(child)


def _in_accounting(path: Sequence[str], job_id: int, line: str) -> str:
    """Into the job's record in Slurm's database: slurmctld refuses to change that of a job that has ended (22.05)."""
    words = ("--immediate", "modify", "job", "where", f"JobId={job_id}", "set", f"AdminComment={line[:500]}")
    try:
        slurm.run(path, "sacctmgr", *words)
    except BeeondError as error:
        return one_line(error)[:300]
    return "ok"
