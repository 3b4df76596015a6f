"""A node's state of one instance: a file, replaced atomically before each step that it announces.

Knows nothing of what the steps do. The run directory also holds what the SPANK plugin reads: `env` and `failure`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.errors import NodeError
from beeond_ctl.plan import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PHASES: Final = (
    "claimed", "preparing", "starting", "mounting", "staging-in", "ready",
    "staging-out", "unmounting", "stopping", "wiping", "retained", "failed",
)  # fmt: skip

_VERSION: Final = 1
_RESERVE: Final = 128 * 1024
"""Bytes in the run directory that are given up when the state must change and there is no room left."""
_MOMENT_S: Final = 1.0
"""Seconds after which waiting for another process is worth a word."""


@dataclass(frozen=True, slots=True)
class Kin:
    """Who has part in an instance that components of a heterogeneous job share. The same on all their nodes."""

    job: Job
    """The component whose instance it is."""
    nodes: tuple[str, ...]
    guests: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
    """The others: number of the component, job id, nodes."""


@dataclass(slots=True)
class State:
    """What has been, or may have been, done on this node."""

    job: Job
    nodes: tuple[str, ...]
    node: str
    request: str
    """As `request.encode` made it."""
    config: dict[str, Any]
    """The site's configuration when the instance was made: tear-down must not depend on a later edit of it."""
    phase: str = "claimed"
    block: int | None = None
    edition: str = ""
    ran: bool = False
    proved: bool = False
    given_up: bool = False
    """Its owner said that the data need not be staged out. Not a proof: other nodes learn nothing from it."""
    attempt: str = ""
    """Random name of the last stage-out that this node took part in, the same on all nodes that did. What a proof
    names: job ids come again, and another node's log may be that of an earlier job."""
    absent: list[int] = field(default_factory=list)
    """Stage-outs, by their place in the request, whose source was not there after the job while all servers ran."""
    rebooted: bool = False
    """The node was rebooted while the data was in use: what had not reached its devices by then is lost."""
    mount: str | None = None
    """Where the instance is, or is about to be, mounted. What is mounted elsewhere is not ours."""
    reason: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    secret: str = ""
    """Name of the site secret that the instance's keys come from (`keys.name_of`); empty until the leader told it."""
    names: dict[str, Any] = field(default_factory=dict)
    kin: Kin | None = None
    processes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Service name to pid and start time (clock ticks since boot, proc(5))."""
    watch: tuple[int, int] | None = None
    """Pid and start time of the process that warns the job (`beeond_ctl.watch`); it may have ended by itself."""

    @property
    def instance(self) -> Job:
        """The job whose instance it is: this one, or another component of a heterogeneous job."""
        return self.kin.job if self.kin else self.job


def run_dir(root: str, job_id: int) -> Path:
    """The run directory of a job."""
    return Path(root) / "jobs" / str(job_id)


def create(root: str, state: State) -> None:
    """Make the run directory and write the first state.

    Raises NodeError when the directory is there already (another run of the same job was never torn down), or when
    there is no room.
    """
    directory = run_dir(root, state.job.job_id)
    try:
        directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    except FileExistsError:
        left = f"{state.node}: {directory} is left from an earlier run of job {state.job.job_id}"
        if not (directory / "state.json").exists():
            raise NodeError(f"{left} and has no state; run `beeond-ctl sweep` there") from None
        raise NodeError(f"{left}; run `beeond-ctl recover {state.job.job_id}` there") from None
    except OSError as error:
        raise NodeError(f"{directory} cannot be made: {error.strerror}") from None
    try:
        _keep_room(directory)
        write(root, state)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _keep_room(directory: Path) -> None:
    """Keep `_RESERVE` bytes; there may be no room for that. Somebody else may fill /run while the job runs."""
    with suppress(OSError), open(directory / "reserve", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _RESERVE)


def write(root: str, state: State) -> None:
    """Replace the state file. A reader, or a crash, sees the old or the new one, never a part. Raises NodeError."""
    job_id = state.job.job_id
    path = run_dir(root, job_id) / "state.json"
    text = json.dumps({"version": _VERSION, **asdict(state)})
    try:
        try:
            write_atomically(path, text)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            (path.parent / "reserve").unlink(missing_ok=True)
            write_atomically(path, text)
    except OSError as error:
        raise NodeError(
            f"{path}: cannot be written ({error.strerror}); make room in {root}, then run: beeond-ctl recover {job_id}"
        ) from None


def read(root: str, job_id: int) -> State | None:
    """The state of a job on this node; None where there is none. Raises NodeError when it cannot be read."""
    path = run_dir(root, job_id) / "state.json"
    try:
        data = json.loads(path.read_text())
        if data.pop("version") != _VERSION:
            raise NodeError(
                f"{path}: written by another version of beeond-ctl; finish job {job_id} with that version"
            )
        data["job"] = Job(**data["job"])
        data["nodes"] = tuple(data["nodes"])
        data["kin"] = read_kin(data.get("kin"))
        data["processes"] = {name: (pid, start) for name, (pid, start) in data["processes"].items()}
        data["watch"] = tuple(data["watch"]) if data.get("watch") else None
        return State(**data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NodeError(
            f"{path}: cannot be read ({error}); look at the job's targets before anything is wiped"
        ) from None


def read_kin(data: Any) -> Kin | None:  # noqa: ANN401 - of JSON
    """What `dataclasses.asdict` and JSON have made of a Kin."""
    if data is None:
        return None
    guests = tuple((number, job_id, tuple(nodes)) for number, job_id, nodes in data["guests"])
    return Kin(Job(**data["job"]), tuple(data["nodes"]), guests)


def read_all(root: str) -> list[State]:
    """All states on this node, by job id. Unreadable ones are left out."""
    states = []
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(Path(root) / "jobs")):
            if name.isdigit():
                with suppress(NodeError):
                    state = read(root, int(name))
                    if state is not None:
                        states.append(state)
    return sorted(states, key=lambda state: state.job.job_id)


def write_atomically(path: Path, text: str, mode: int = 0o600, *, durable: bool = False) -> None:
    """Replace the file at `path` with `text` in one step; if `durable`, on the disk too, so that after a power cut it
    is the old or the new one."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def locked(
    root: str,
    job_id: int,
    what: str,
    *,
    wait_s: float = 0,
    hung_s: float = math.inf,
    tell: Callable[[str], object] = bool,
) -> Iterator[None]:
    """Hold the job's lock on this node; wait for it for at most `wait_s` seconds.

    `tell` is called once with who has it, if that takes longer than a moment. Raises NodeError naming who has it when
    another process of ours works on the same job all that time, or stands still for `hung_s` seconds of it.
    """
    path = Path(root) / "locks" / str(job_id)
    began = time.monotonic()
    seen, since, told = "", began, False
    while (descriptor := _try_lock(path)) is None:
        now = time.monotonic()
        if now > began + _MOMENT_S and not told:
            told = True
            tell(f"another beeond-ctl works on it{_named(_holder(path))}")
        if now >= began + wait_s:
            raise NodeError(
                f"job {job_id}: another beeond-ctl works on it on this node{_named(_holder(path))}; "
                f"{what} when it has ended"
            )
        if hung_s < math.inf:
            still, seen = seen, _standstill(_holder(path))
            if not seen or seen != still:
                since = now
            elif now >= since + hung_s:
                raise NodeError(
                    f"job {job_id}: another beeond-ctl{_named(_holder(path))} has stood still on this node for "
                    f"{hung_s:.0f} s; see what it waits for, and when it has ended run: beeond-ctl recover {job_id}"
                )
        time.sleep(min(0.05 + (now - began) / 100, 1.0))
    try:
        yield
    finally:
        if not run_dir(root, job_id).exists():
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _holder(path: Path) -> int:
    """The process that has the lock on `path`; 0 where the kernel does not say (proc(5), locks)."""
    with suppress(OSError):
        status = path.stat()
        file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5:6] == [file]:
                return int(words[4])
    return 0


def _named(pid: int) -> str:
    """What process `pid` is, for a message; empty where that is not known."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return ""
    names = [os.path.basename(word) for word in words]
    which = names[names.index("beeond-ctl") :][:2] if "beeond-ctl" in names else names[:1]
    return f" ({' '.join(which)}, pid {pid})"


def _standstill(pid: int) -> str:
    """What stays the same as long as a thread of process `pid` cannot do anything, and the others wait; empty where one
    runs. Devices are wiped by threads, for which the first one waits."""
    stuck = []
    try:
        for thread in sorted(os.listdir(f"/proc/{pid}/task")):
            text = Path(f"/proc/{pid}/task/{thread}/status").read_text(errors="replace")
            state = re.search(r"^State:\s+(\S)", text, re.MULTILINE)
            if state is None or state[1] == "R":
                return ""
            if state[1] in "DTt":
                stuck.append(f"{thread} {re.findall(r'ctxt_switches:.*', text)}")
    except OSError:
        return ""
    return " ".join(stuck)


def _try_lock(path: Path) -> int | None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NodeError(f"{path}: cannot be locked ({error.strerror}); see what is wrong with /run") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed the file between our opening and locking it.
        if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
