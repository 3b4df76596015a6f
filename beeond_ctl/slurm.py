"""What we ask of and tell Slurm: its environment of Prolog and Epilog, and `scontrol`.

Knows nothing of instances.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from beeond_ctl.errors import EndedError, NodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from beeond_ctl.plan import Job

_T = TypeVar("_T")

TIMEOUT_S: Final = 20.0
"""For one call of a Slurm command; slurmctld may be busy."""

REQUEST_VARIABLE: Final = "SPANK_BEEOND_REQUEST"
"""`spank_job_control_setenv("BEEOND_REQUEST")` arrives in Prolog and Epilog under this name."""


@dataclass(frozen=True, slots=True)
class Prolog:
    """What the environment of Prolog and Epilog says."""

    job: Job
    nodes: tuple[str, ...]
    node: str


def prolog(environ: Mapping[str, str]) -> Prolog:
    """Read Slurm's part of a Prolog's or Epilog's environment. Raises NodeError when something is missing."""
    uid, gid = _number(environ, "SLURM_JOB_UID"), _number(environ, "SLURM_JOB_GID")
    user = environ.get("SLURM_JOB_USER") or _user_name(uid)
    # SLURM_JOB_NODELIST is only there from some release after 22.05 on; SLURM_NODELIST in all.
    folded = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not folded:
        raise NodeError(
            "SLURM_NODELIST is not in the environment; this command is for Slurm's Prolog and Epilog"
        )
    nodes = expand_nodes(folded)
    node = node_name(environ)
    if node not in nodes:
        raise NodeError(
            f"{node}: is not in the job's node list {folded}; does SLURMD_NODENAME fit slurm.conf?"
        )
    from beeond_ctl.plan import Job

    restart = _number(environ, "SLURM_JOB_RESTART_COUNT", "0")
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    return Prolog(Job(_number(environ, "SLURM_JOB_ID"), uid, gid, user, restart, cluster), nodes, node)


def epilog_job(environ: Mapping[str, str]) -> int:
    """The job whose Epilog this is. Raises NodeError.

    Nothing else may be asked of an Epilog's environment: when slurmctld has to send the end of a job again, to a node
    that was cut off, slurmd 22.05 runs the Epilog without SLURM_NODELIST (measured).
    """
    return _number(environ, "SLURM_JOB_ID")


def is_of_another(environ: Mapping[str, str], job: Job, node: str) -> bool:
    """Whether an Epilog's environment is that of another job than `job` on `node`: another cluster's, of that id.

    What is not there says nothing: see `epilog_job`.
    """
    known = {"SLURM_CLUSTER_NAME": job.cluster, "SLURM_JOB_UID": str(job.uid), "SLURMD_NODENAME": node}
    return any(own and environ.get(name, own) != own for name, own in known.items())


def node_name(environ: Mapping[str, str]) -> str:
    """This node's name as Slurm knows it."""
    import socket

    return environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise NodeError(
            f"{name} is {text!r} in the environment; this command is for Slurm's Prolog and Epilog"
        )
    return int(text)


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise NodeError(
            f"user {uid} is not known on this node; look at its user database (getent passwd {uid})"
        ) from None


def expand_nodes(folded: str) -> tuple[str, ...]:
    """Node names in Slurm's order of `n[1-3,7]`. Raises NodeError when `folded` is no node list.

    ClusterShell sorts as Slurm does: within one job's list the first node is the same everywhere, which is all we need.
    """
    if re.fullmatch(r"[A-Za-z0-9_.-]+", folded):
        return (folded,)
    if not re.fullmatch(r"[A-Za-z0-9_.,\[\]-]+", folded):
        raise NodeError(f"{folded!r} is not a node list; write it as Slurm does: n[1-3,7]")
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    try:
        return tuple(NodeSet(folded, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise NodeError(f"{folded!r} is not a node list: {error}") from None


def fold_nodes(nodes: Sequence[str]) -> str:
    """`nodes` in short: `n[1-3,7]`."""
    if len(nodes) == 1:
        return nodes[0]
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

    return str(NodeSet.fromlist(list(nodes), resolver=RESOLVER_NOGROUP))


def command(path: Sequence[str], name: str) -> str:
    """Where Slurm's command `name` is. Raises NodeError."""
    import shutil

    found = shutil.which(name, path=os.pathsep.join(path))
    if found is None:
        raise NodeError(f"{name} is not in {':'.join(path)}; set slurm.path in the configuration")
    return found


_FILTERS: Final = re.compile(r"SQUEUE_|SCONTROL_|SINFO_|SLURM_(CLUSTERS|JSON|YAML|BITSTR_LEN|TIME_FORMAT)$")
"""What somebody who types a command of ours may have set to see less, other, or of another cluster (squeue(1))."""


def run(path: Sequence[str], name: str, *arguments: str, errors: str = "replace") -> str:
    """What Slurm's command prints. Raises NodeError with its own words when it fails or does not answer.

    `errors` says what becomes of bytes that are no UTF-8.
    """
    environment = {key: value for key, value in os.environ.items() if not _FILTERS.match(key)}
    try:
        done = subprocess.run(
            [command(path, name), *arguments], env=environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors=errors, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NodeError(f"{name} {arguments[0]}: no answer from slurmctld within {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise NodeError(f"{name} {' '.join(arguments[:3])}: {' '.join(done.stderr.split()) or 'failed'}")
    return done.stdout


def patiently(
    question: Callable[[], _T], *, within_s: float, pause_s: float, check: Callable[[], object] = bool
) -> _T:
    """The answer to `question`, asked again every `pause_s` seconds for `within_s`: slurmctld may restart, or be busy.

    `check` may end that by raising something. Raises the NodeError that `question` raised last, and EndedError at once.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            return question()
        except EndedError:
            raise
        except NodeError:
            if time.monotonic() > deadline:
                raise
        check()
        time.sleep(pause_s)


_BETWEEN: Final = " | "
"""Stands between the reasons of a node that is out of service for several."""
KEPT: Final = "data kept"
UNPROVED: Final = "stage-out is not proved: "
"""What comes first in the reason of a node that may have what a job is owed: as it was kept, or something failed."""
_LONGEST: Final = 1000
"""Characters of one reason."""


def drain(path: Sequence[str], node: str, text: str) -> None:
    """Take `node` out of service for a reason that a person can act on, beside those it has. Raises NodeError.

    Slurm keeps the reason of a node that is drained already when its Prolog or Epilog fails afterwards.
    """
    others = reasons(path, node)
    _drain(path, node, [*others, _shortened(re.sub(r"[^ -~]", "?", text).replace("|", "/"))])


def _shortened(text: str) -> str:
    """`text` without its middle, if it is long: the beginning says whose it is, the end what to do."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def _drain(path: Sequence[str], node: str, parts: list[str]) -> None:
    unique = list(dict.fromkeys(parts))
    run(path, "scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={_BETWEEN.join(unique)}")


def undrain(path: Sequence[str], node: str, prefix: str, asks: str = "") -> None:
    """Take back the reasons that begin with `prefix` and in which the pattern `asks` is found.

    `node` returns to service if they were all. Raises NodeError.
    """
    found = reasons(path, node)
    others = [part for part in found if not (part.startswith(prefix) and re.search(asks, part))]
    if len(others) == len(found):
        return
    if others:
        _drain(path, node, others)
    else:
        run(path, "scontrol", "update", f"NodeName={node}", "State=RESUME")


def reason(path: Sequence[str], node: str) -> str:
    """Why `node` is out of service; empty where it is not. Raises NodeError.

    Slurm up to 25.11 without accounting goes on showing the reason of a node that was resumed.
    """
    shown = run(path, "scontrol", "show", "node", node)
    state = re.search(r"^\s*State=(\S+)", shown, re.MULTILINE)
    match = re.search(r"^\s*Reason=(.*?)(?: \[\S+@\S+\])?$", shown, re.MULTILINE)
    return match[1] if match and state and _is_out(state[1]) else ""


def _is_out(state: str) -> bool:
    """Whether a state as `scontrol show node` has it (`DOWN*+DRAIN`, `IDLE`) is one that has a reason."""
    return not {"DOWN", "DRAIN", "FAIL"}.isdisjoint(re.findall(r"[A-Z_]+", state))


def reasons(path: Sequence[str], node: str) -> list[str]:
    """The same, each for itself. Raises NodeError."""
    return [part for part in reason(path, node).split(_BETWEEN) if part]


def _of_job(path: Sequence[str], name: str, *arguments: str, errors: str = "replace") -> str | None:
    """What Slurm's command prints of a job; None when Slurm no longer knows it. Raises NodeError."""
    try:
        return run(path, name, *arguments, errors=errors)
    except NodeError as error:
        if "Invalid job id" in str(error):
            return None
        raise


def _job_record(path: Sequence[str], job_id: int, errors: str) -> str | None:
    """What `scontrol show job` says of this one job; None when Slurm no longer knows it. Raises NodeError."""
    text = _of_job(path, "scontrol", "show", "job", str(job_id), errors=errors) or ""
    # The id of an array is also that of one of its jobs, and gets the records of all.
    for record in re.split(r"^(?=JobId=)", text, flags=re.MULTILINE):
        if record.startswith(f"JobId={job_id} "):
            return record
    return None


def job_fields(path: Sequence[str], job_id: int) -> dict[str, str]:
    """The fields of `scontrol show job`; empty when Slurm no longer knows it. Raises NodeError when it does not answer.

    Values with spaces are cut at the first one, except the job name, which comes last on the first line.
    """
    record = _job_record(path, job_id, "replace")
    return {} if record is None else _fields(record)


def _fields(record: str) -> dict[str, str]:
    first, _, rest = record.partition("\n")
    ids, _, name = first.partition(" JobName=")
    # The first of a name counts: comment, directories and files, which are the user's text, come after the rest.
    return dict(reversed(re.findall(r"(\w+)=(\S*)", f"{ids} {rest}"))) | {"JobName": name}


def job_output(path: Sequence[str], job_id: int) -> bytes | None:
    """The file that the job's output goes to, the user's word; None where it has none, or Slurm no longer knows it.

    Raises NodeError when Slurm does not answer.
    """
    record = _job_record(path, job_id, "surrogateescape") or ""
    found = re.findall(r"^ +StdOut=(/.*)$", record, re.MULTILINE)
    return os.fsencode(found[-1]) if found else None


def job_directives(path: Sequence[str], job_id: int) -> list[str] | None:
    """The job's burst-buffer directives, with their bytes as they were; None when Slurm no longer knows the job.

    Raises NodeError when Slurm does not answer.
    """
    facts, lines = job_facts(path, job_id)
    return lines if facts else None


def job_facts(path: Sequence[str], job_id: int) -> tuple[dict[str, str], list[str]]:
    """`job_fields` and the job's burst-buffer directives, with one question. Raises NodeError."""
    record = _job_record(path, job_id, "surrogateescape")
    if record is None:
        return {}, []
    match = re.search(r"^ +BurstBuffer=(#BB_LUA.*(?:\n#BB_LUA.*)*)", record, re.MULTILINE)
    return _fields(record), match[1].split("\n") if match else []


def state_and_nodes(path: Sequence[str], job_id: int) -> tuple[str, str]:
    """The job's state, and its nodes, folded; empty when Slurm no longer knows it, or it has none.

    Of fields alone that no user can write: job names may hold lines. Raises NodeError when Slurm does not answer.
    """
    text = _of_job(path, "squeue", "-h", "-t", "all", "-j", str(job_id), "-o", "%A %T %N")
    if text is None:
        return "", ""
    for line in text.splitlines():  # the id of an array is also that of one of its jobs
        own, state, *nodes = line.split()
        if own == str(job_id):
            return state, nodes[0] if nodes else ""
    # Nothing at all is no answer: a filter of squeue's may be in the way, and who is believed to have ended is wiped.
    if _job_record(path, job_id, "replace") is not None:
        raise NodeError(f"squeue shows nothing of job {job_id}, which scontrol shows; try it by hand")
    return "", ""


def owner(path: Sequence[str], job_id: int) -> int | None:
    """The uid of the job's user; None when Slurm no longer knows it. Raises NodeError.

    Not of `job_fields`: what looks like `UserId=` there may be a line of the job's name.
    """
    text = _of_job(path, "squeue", "-h", "-t", "all", "-j", str(job_id), "-o", "%A %U") or ""
    for own, uid in (line.split() for line in text.splitlines()):
        if own == str(job_id):
            return int(uid)
    return None


ALIVE: Final = frozenset(
    ["RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"]
)
"""States (squeue(1)) of a job that still has its nodes, or whose Epilog may still run.

Not STAGE_OUT, which comes after COMPLETING: slurm_bb_data_out has not ended, and maybe waits for who asks here.
"""


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a heterogeneous job, which is a job of its own. `nodes` are folded; `number` counts from 0."""

    number: int
    job_id: int
    restart: int
    state: str
    nodes: str


def components(path: Sequence[str], job_id: int) -> list[Component]:
    """All components of the heterogeneous job that `job_id` is one of; none if it is not, or Slurm has forgotten it.

    Of fields alone that no user can write: job names may hold lines. Raises NodeError.
    """
    found = _components(path, job_id)
    first = next((leader for leader, each in found if each.job_id == job_id), job_id)
    if first != job_id:  # only the first one's id stands for all of them
        found = _components(path, first)
        if not found:
            raise NodeError(f"Slurm no longer knows job {first}, the first component of job {job_id}")
    return sorted((each for leader, each in found if leader == first), key=lambda each: each.number)


_FIELDS: Final = "HetJobID:24,JobID:24,HetJobOffset:24,RestartCnt:24,State:24,NodeList:200000"


def _components(path: Sequence[str], job_id: int) -> list[tuple[int, Component]]:
    """Components by the id of their first one."""
    text = _of_job(path, "squeue", "-h", "-t", "all", "-j", str(job_id), "-O", _FIELDS) or ""
    words = [line.split() for line in text.splitlines()]
    return [
        (int(leader), Component(int(number), int(own), int(restart), state, nodes[0] if nodes else ""))
        for leader, own, number, restart, state, *nodes in words
        if leader.isdigit()
    ]


def gave_up(path: Sequence[str], job_id: int, restart: int) -> bool:
    """Whether this run of the job was ended by `scancel --hurry`, which asks not to stage out. Raises NodeError.

    Slurm keeps that as a flag of the job until the job starts again, whatever the signal was; only JSON shows it. So it
    counts only where the job was cancelled. A Slurm that does not say so, or no longer knows the job, says no. To be
    asked where the batch script ran, when it has ended: until then 22.05 does not tell.
    """
    import json

    record = _job_record(path, job_id, "replace") or ""
    told = re.findall(r"\b(Reason|ExitCode|Restarts|PreemptTime)=(\S*)", record)
    fields = dict(told)
    if len(set(told)) > len(fields):  # lines of the job's name may look like fields
        return False
    # While the job completes, 22.05 shows no state but that. Who was cancelled has no reason; who failed, or was ended
    # by the time limit or a lost node, has one; who ended well, or went on after a signal, has exit code 0.
    shown = fields.get("ExitCode", "0:0") != "0:0" and fields.get("PreemptTime", "None") == "None"
    if fields.get("Reason") != "None" or fields.get("Restarts") != str(restart):
        return False
    try:
        return any(
            job["job_id"] == job_id
            and "JOB_KILL_HURRY" in job["flags"]
            and _plain(job["restart_cnt"]) == restart
            # Releases after 22.05 list the states.
            and ("CANCELLED" in job["job_state"] if isinstance(job["job_state"], list) else shown)
            for job in json.loads(_as_json(path, job_id, at_any_cost=shown))["jobs"]
        )
    except (ValueError, KeyError, TypeError):
        return False


def _as_json(path: Sequence[str], job_id: int, *, at_any_cost: bool) -> str:
    """What Slurm says of the job as JSON; empty if that costs much, and is not wanted at any cost. Raises NodeError."""
    try:
        return run(path, "scontrol", "show", "job", str(job_id), "--json")
    except NodeError as error:
        if "unrecognized option" not in str(error):
            raise
    # squeue 22.05 prints all jobs, 4 KB each and more, whatever it is asked for.
    return run(path, "squeue", "--json", "-j", str(job_id)) if at_any_cost else ""


def _plain(number: Any) -> Any:  # noqa: ANN401 - of JSON
    """Later releases write {"set": true, "number": 3} for some numbers."""
    return number.get("number") if isinstance(number, dict) else number


def node_states(path: Sequence[str], folded: str) -> dict[str, tuple[str, str]]:
    """State (`DOWN+DRAIN`; with `*`, or NOT_RESPONDING, if it is silent) and `reason` of each. Raises NodeError."""
    text = run(path, "scontrol", "show", "node", "--oneliner", folded)
    found = {}
    for line in text.splitlines():
        state = re.search(r"^NodeName=(\S+) .*? State=(\S+)", line)
        reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?\s*$", line)
        if state:
            found[state[1]] = (state[2], reason[1] if reason and _is_out(state[2]) else "")
    return found


def unproved(path: Sequence[str], folded: str, job_id: int) -> list[str]:
    """Which of `folded` speak against the job having been staged out, when its Epilogs are over.

    One that is down does so, too. Raises NodeError.
    """
    ours = tuple(f"beeond: job {job_id}: {word}" for word in (KEPT, UNPROVED))
    return [
        node
        for node, (state, reason) in node_states(path, folded).items()
        if any(part.startswith(ours) or part == "Epilog error" for part in reason.split(_BETWEEN))
        or "DOWN" in state.split("+")
    ]


def job_wants_us(path: Sequence[str], job_id: int) -> bool:
    """Whether the job is still to run: false once it was cancelled, requeued or has ended.

    A slurmctld that does not answer says nothing: the job counts as alive.
    """
    from beeond_ctl.plan import FIRST_OWN_ID

    if job_id >= FIRST_OWN_ID:
        return True
    try:
        state, _ = state_and_nodes(path, job_id)
    except NodeError:
        return True
    return state in {"RUNNING", "CONFIGURING", "SUSPENDED"}
