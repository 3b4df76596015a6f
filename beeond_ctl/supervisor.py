"""Runs what a backend describes: starts services, waits until they are ready, stops them.

Knows no file system and no state file. Processes are known by pid *and* start time, so that a reused pid is never
taken for ours, and belong to an instance if their environment carries its token, which only root can read. A service
runs in a session of its own: Slurm ends the process group of its Prolog.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from beeond_ctl import listeners, mounts
from beeond_ctl.backends import Advice, Answer, Command, File, Mounted, PortOpen, Service
from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

TOKEN_VARIABLE: Final = "BEEOND_CTL_INSTANCE"  # noqa: S105 - a variable's name
"""Marks the processes of an instance. Never give it to a process that runs as a user: that user can read it."""

_POLL_S: Final = (0.004, 0.05)
_AGAIN_S: Final = 0.2
"""Seconds between two tries of a command that may be too early."""
_ONCE_S: Final = 30.0
"""Seconds a service's preparation may take."""
_KILL_S: Final = 5.0
"""Seconds a killed process may take to be gone: the kernel has to give back its memory."""


@dataclass(frozen=True, slots=True)
class Process:
    """A service that was started. `start_time` is in clock ticks since boot (proc(5), stat, field 22)."""

    name: str
    pid: int
    start_time: int


# --- starting ---------------------------------------------------------------------------------------------


def start(
    service: Service, *, token: str, search_path: Sequence[str], record: Callable[[Process], None]
) -> Process:
    """Start `service` and hand it to `record` at once. Does not wait until it is ready.

    A crash before `record` leaves a process that `find(token)` knows. Raises NodeError when its files cannot be
    written or its program is not there.
    """
    program = _program(service.argv[0], search_path)
    write_files(service.files)
    if service.once is not None and not os.path.lexists(service.once.creates):
        run(service.once.command, search_path=search_path, deadline_s=_ONCE_S)
    _own_directory(Path(service.log).parent)
    try:
        log = os.open(
            service.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            child = subprocess.Popen(
                [program, *service.argv[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", umask=0o022,
                env=_environment(search_path, service.env) | {TOKEN_VARIABLE: token}, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(log)
    except OSError as error:
        raise NodeError(f"{service.name} cannot be started: {error}") from None
    child.returncode = 0  # it outlives us, so nobody waits for it by this object
    process = Process(service.name, child.pid, _stat(child.pid)[1])
    record(process)
    return process


def run(command: Command, *, search_path: Sequence[str], deadline_s: float) -> bytes:
    """Run `command` to its end and return its standard output.

    Raises NodeError when it is not there, takes longer than `deadline_s` seconds, fails, or answers what is wrong.
    """
    name, again_at = command.argv[0], time.monotonic() + min(command.again_s, deadline_s)
    deadline = time.monotonic() + deadline_s
    while True:
        answer = ask(command, search_path=search_path, deadline_s=max(1.0, deadline - time.monotonic()))
        if answer is None:
            raise NodeError(
                f"{name} was not done after {deadline_s:g} s and was ended; see whether what it talks to answers"
            )
        if answer.code in command.codes:
            wrong = command.wrong(answer.output) if command.wrong else ""
            if not wrong:
                return answer.output
            text = f"{name}: {wrong}: {_fold(answer.errors)}"
        else:
            said = _fold(answer.errors) or _fold(answer.output)
            text = f"{name} failed with exit code {answer.code}: {said}"
        if time.monotonic() >= again_at:
            raise NodeError(advised(text, command.advice))
        time.sleep(_AGAIN_S)


def ask(command: Command, *, search_path: Sequence[str], deadline_s: float) -> Answer | None:
    """What `command` said, whatever its exit code; None when it was ended after `deadline_s` seconds.

    Raises NodeError when it is not there.
    """
    name = command.argv[0]
    program = _program(name, search_path)
    write_files(command.files)
    try:
        child = subprocess.Popen(
            [program, *command.argv[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd="/", umask=0o022, env=_environment(search_path, {}), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise NodeError(f"{name} cannot be run: {error}") from None
    try:
        output, errors = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1)
        return None
    return Answer(child.returncode, output, errors)


def write_files(files: Iterable[File]) -> None:
    """Write each of `files` atomically, in directories that are root's alone. Raises NodeError."""
    for file in files:
        path = Path(file.path)
        _own_directory(path.parent)
        temporary = path.with_name(f".{path.name}.new")
        try:
            with suppress(FileNotFoundError):
                temporary.unlink()
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as out:
                os.fchmod(descriptor, file.mode)
                out.write(file.content)
            temporary.rename(path)
        except OSError as error:
            raise NodeError(f"{path} cannot be written: {error}") from None


def _own_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise NodeError(f"{path} cannot be made: {error}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or path.is_symlink():
        raise NodeError(
            f"{path} must be a directory that only root may write; remove it, it will be made again"
        )


def _program(name: str, search_path: Sequence[str]) -> str:
    if path := find_program(name, search_path):
        return path
    raise NodeError(
        f"{name} is not in {':'.join(search_path)}; install the file system's packages, or name their directory in "
        "backend.path"
    )


def find_program(name: str, search_path: Sequence[str]) -> str | None:
    """Where in `search_path` the program `name` is; None where it is not."""
    for directory in search_path:
        path = f"{directory}/{name}"
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def advised(text: str, advice: Advice) -> str:
    """`text` with what to do about it, where `advice` knows."""
    return next((f"{text}; {what}" for sign, what in advice if sign in text.lower()), text)


def _environment(search_path: Sequence[str], more: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": ":".join(search_path), "LANG": "C.UTF-8", "HOME": "/"} | dict(more)


# --- waiting ----------------------------------------------------------------------------------------------


def wait_ready(
    started: Iterable[tuple[Service, Process]], *, deadline_s: float, check: Callable[[], object] = bool
) -> None:
    """Wait until all of `started` are ready, at most `deadline_s` seconds. `check` may end it by raising something.

    Raises NodeError naming a service that ended, with the end of its log, or those that are not ready in time.
    """
    waiting = list(started)
    deadline, pause = time.monotonic() + deadline_s, _POLL_S[0]
    while True:
        for service, process in waiting:
            if not alive(process):
                text = f"{service.name} ended while it started: {log_end(service.log)}"
                raise NodeError(advised(text, service.advice))
        waiting = [(service, process) for service, process in waiting if not _ready(service, process)]
        if not waiting:
            return
        check()
        if time.monotonic() > deadline:
            service = waiting[0][0]
            names = ", ".join(service.name for service, _ in waiting)
            text = f"{names}: not ready after {deadline_s:g} s: {log_end(service.log)}; see {service.log}"
            raise NodeError(advised(text, service.advice))
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL_S[1])


def _ready(service: Service, process: Process) -> bool:
    match service.ready:
        case PortOpen(port=port):
            return listeners.listens(process.pid, port)
        case Mounted(path=path, fstype=fstype):
            mounted = mounts.mount_at(path)
            return mounted is not None and mounted.fstype == fstype
    return True


def log_end(path: str) -> str:
    """The last lines of a log folded to one of bounded length, without the time stamps and the like before each."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().splitlines()
    except OSError as error:
        return f"its log cannot be read: {error}"
    texts = [_STAMP.sub(b"", line.strip()) for line in lines]
    return _fold(b" | ".join([text for text in texts if re.search(rb"\w", text)][-8:])) or "it said nothing"


_STAMP: Final = re.compile(
    rb"^(\[[^\]]*\]\s*|[A-Z]\s+)+"
    # BeeGFS: (1) 12:00:00 Main [App] >> text
    rb"|^\(\d\) [\d: A-Za-z]* \S+ \[[^\]]*\] >> "
)


def _fold(text: bytes, limit: int = 600) -> str:
    line = " ".join(text.decode(errors="replace").split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= limit else line[:limit] + "…"


# --- watching and stopping --------------------------------------------------------------------------------


def alive(process: Process) -> bool:
    """Whether `process` runs; a zombie does not, and neither does another process with the same pid."""
    try:
        state, start_time = _stat(process.pid)
    except OSError:
        return False
    return start_time == process.start_time and state not in "ZX"


def uses(process: Process, directory: Path) -> bool:
    """Whether `process` has something below `directory` open."""
    place = f"/proc/{process.pid}/fd"
    with suppress(OSError):
        for name in os.listdir(place):
            with suppress(OSError):
                if os.readlink(f"{place}/{name}").startswith(f"{directory}/"):
                    return alive(process)
    return False


def stopped(process: Process) -> bool:
    """Whether `process` is there and cannot run: by SIGSTOP, or a debugger."""
    try:
        state, start_time = _stat(process.pid)
    except OSError:
        return False
    return start_time == process.start_time and state in {"T", "t"}


def find(token: str) -> list[Process]:
    """All processes that carry `token`: those started for the instance and whatever they started."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):
            # Only root's own: reading the memory of a user's process that hangs in a file system may hang, too.
            if os.stat(f"/proc/{entry}").st_uid != os.geteuid():
                continue
            state, start_time = _stat(int(entry))
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") and state not in "ZX":
                found.append(Process(_name(int(entry)), int(entry), start_time))
    return found


def marked() -> dict[str, list[Process]]:
    """All processes of instances on this node, by token; those in containers of other programs are not ours."""
    mark, own = f"{TOKEN_VARIABLE}=".encode(), os.readlink("/proc/self/ns/pid")
    found: dict[str, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):
            foreign = os.readlink(f"/proc/{entry}/ns/pid") != own
            if foreign or os.stat(f"/proc/{entry}").st_uid != os.geteuid():
                continue
            state, start_time = _stat(int(entry))
            for word in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                if word.startswith(mark) and state not in "ZX":
                    name = _name(int(entry))
                    token = word.removeprefix(mark).decode(errors="replace")
                    found.setdefault(token, []).append(Process(name, int(entry), start_time))
    return found


def stop(processes: Iterable[Process], *, token: str, timeout_s: float, in_order: bool = True) -> list[str]:
    """End `processes` and everything else that carries `token`, all at once.

    If `in_order`, they have `timeout_s` seconds to end by themselves; then, or else at once, they are killed. Returns
    the names of those that did not end in order. Raises NodeError naming what cannot be ended even so.
    """
    known = list(processes)
    killed: list[str] = []
    began = time.monotonic()
    deadline = began + timeout_s if in_order else began
    while True:
        names = {(process.pid, process.start_time): process.name for process in known}
        found = {
            (process.pid, process.start_time): process for process in (*find(token), *known) if alive(process)
        }
        left = [Process(names.get(key, process.name), *key) for key, process in found.items()]
        if not left:
            return killed
        now = time.monotonic()
        if now > began + timeout_s + _KILL_S:
            stuck = ", ".join(f"{process.name} (pid {process.pid})" for process in left)
            raise NodeError(
                f"cannot be ended, not even by SIGKILL: {stuck}; the device or network it waits for is at fault"
            )
        if now >= deadline:
            killed += [process.name for process in left if in_order and process.name not in killed]
            _signal_and_wait(left, (signal.SIGKILL,), _KILL_S)
        else:
            # SIGCONT, since a frozen process would keep SIGTERM for later.
            _signal_and_wait(left, (signal.SIGTERM, signal.SIGCONT), deadline - now)


def kill(process: Process) -> None:
    """End `process` at once, and wait until it is gone. Raises NodeError."""
    _signal_and_wait([process], (signal.SIGKILL,), _KILL_S)
    if alive(process):
        raise NodeError(f"cannot be ended, not even by SIGKILL: {process.name} (pid {process.pid})")


def ask_to_end(process: Process) -> None:
    """Send `process` SIGTERM, if it is there, and wait for nothing."""
    with suppress(OSError):
        _signal_and_wait([process], (signal.SIGTERM, signal.SIGCONT), 0)


def _signal_and_wait(
    processes: Iterable[Process], signals: Iterable[signal.Signals], timeout_s: float
) -> None:
    """Signal `processes`, and wait until all have ended or `timeout_s` has passed."""
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        descriptors = set()
        poll = select.poll()
        for process in processes:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                if not alive(
                    process
                ):  # asked after opening: from here on the descriptor is that very process
                    continue
                for number in signals:
                    signal.pidfd_send_signal(descriptor, number)
                descriptors.add(descriptor)
                poll.register(descriptor, select.POLLIN)
        while descriptors and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                descriptors.discard(descriptor)
                with suppress(ChildProcessError):  # ours only if this very process started it
                    os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)


def _name(pid: int) -> str:
    """The name of process `pid` (proc(5), comm); a process may give itself any."""
    return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()


def _stat(pid: int) -> tuple[str, int]:
    """State and start time of process `pid` (proc(5)); the command in the second field may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])
