"""A node's state of one instance: a file, replaced atomically before each step that it announces.

Knows nothing of what the steps do. The run directory also holds what the SPANK plugin reads: `env` and `failure`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.errors import NodeError
from beeond_ctl.plan import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

PHASES: Final = (
    "claimed", "preparing", "starting", "mounting", "staging-in", "ready",
    "staging-out", "unmounting", "stopping", "wiping", "retained", "failed",
)  # fmt: skip

_VERSION: Final = 1


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

    Raises NodeError when the directory is there already: another run of the same job was never torn down.
    """
    directory = run_dir(root, state.job.job_id)
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        raise NodeError(
            f"{state.node}: {directory} is left from an earlier run of job {state.job.job_id}; "
            f"run `beeond-ctl recover {state.job.job_id}` there"
        ) from None
    write(root, state)


def write(root: str, state: State) -> None:
    """Replace the state file. A reader, or a crash, sees the old or the new one, never a part."""
    write_atomically(
        run_dir(root, state.job.job_id) / "state.json", json.dumps({"version": _VERSION, **asdict(state)})
    )


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


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace the file at `path` with `text` in one step."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextmanager
def locked(root: str, job_id: int, what: str, *, wait_s: float = 0) -> Iterator[None]:
    """Hold the job's lock on this node; wait for it for at most `wait_s` seconds.

    Raises NodeError when another process of ours works on the same job all that time.
    """
    locks = Path(root) / "locks"
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = locks / str(job_id)
    deadline = time.monotonic() + wait_s
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise NodeError(
                f"job {job_id}: another beeond-ctl works on it on this node; {what} when it has ended"
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        if not run_dir(root, job_id).exists():
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed the file between our opening and locking it.
        if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
