"""What the testbed asks of the machine it runs on: processes, namespaces, loop devices, and its own record.

Knows nothing of Slurm or of nodes. Everything that is ever ended or detached here is named by pid and
start time, or by the file behind it; nothing is found by a process name.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NS_PY = Path(__file__).with_name("ns.py")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
POLL_S = 0.02
PATIENCE = 4
"""How much longer than said everything is waited for: a busy or shared machine may be that much slower, and only what
fails takes as long."""
LOOP_CLR_FD, LOOP_GET_STATUS64 = 0x4C01, 0x4C05

T = TypeVar("T")


class TestbedError(Exception):
    """The cluster could not do what was asked; the message says what and where."""

    __test__ = False


class WaitError(TestbedError):
    """Something did not come in time; the message names it and what was seen last."""


class CommandError(TestbedError):
    """A command ended with a non-zero status."""

    def __init__(self, where: str, argv: Sequence[str], returncode: int, stdout: str, stderr: str) -> None:
        self.argv, self.returncode, self.stdout, self.stderr = list(argv), returncode, stdout, stderr
        said = (stderr.strip() or stdout.strip() or "it said nothing")[-2000:]
        super().__init__(f"{where}: {' '.join(argv)[:300]}: exit {returncode}: {said}")


def wait_until(what: str, probe: Callable[[], tuple[bool, T]], timeout_s: float, poll_s: float = POLL_S) -> T:
    """Call `probe` until it returns (True, value), and return value; raise WaitError naming `what`.

    `timeout_s` is what is long on a quiet machine; see PATIENCE.
    """
    timeout_s *= PATIENCE
    deadline = time.monotonic() + timeout_s
    while True:
        done, value = probe()
        if done:
            return value
        if time.monotonic() >= deadline:
            raise WaitError(f"waited {timeout_s:g} s for {what}; last seen: {value}")
        time.sleep(poll_s)


# -- processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """A process as this machine numbers it; `start` (clock ticks since boot) tells a reused pid apart."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this pid now; raises ProcessLookupError."""
        try:
            return cls(pid, int(_stat_fields(pid)[19]))
        except FileNotFoundError:
            raise ProcessLookupError(pid) from None

    def alive(self) -> bool:
        """Whether this very process still exists and is not a zombie."""
        try:
            fields = _stat_fields(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(fields[19]) == self.start and fields[0] not in ("Z", "X")

    def send(self, number: signal.Signals) -> None:
        """Signal this very process; raises ProcessLookupError when it is gone."""
        pidfd = os.pidfd_open(self.pid)
        try:
            if not self.alive():
                raise ProcessLookupError(self.pid)
            signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)

    def kill(self, what: str, timeout_s: float = 20) -> None:
        """SIGKILL and wait until it has ended; nothing to do when it is gone. Raises WaitError."""
        timeout_s *= PATIENCE
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.alive():
                return
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not select.select([pidfd], [], [], timeout_s)[0]:
                raise WaitError(f"{what} (pid {self.pid}) did not end within {timeout_s:g} s of SIGKILL")
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)

    def cmdline(self) -> tuple[str, ...]:
        """Its arguments, () when it is gone."""
        try:
            raw = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return ()
        return tuple(os.fsdecode(part) for part in raw.rstrip(b"\0").split(b"\0"))

    def inner_pid(self) -> int:
        """Its pid inside the innermost PID namespace; raises ProcessLookupError."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except FileNotFoundError:
            raise ProcessLookupError(self.pid) from None
        return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from `state` on (a command name may hold spaces and parentheses)."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def processes_of(init: Process) -> list[Process]:
    """Every process in the PID namespace whose init this is, without the init itself."""
    wanted = os.readlink(f"/proc/{init.pid}/ns/pid")
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == init.pid:
            continue
        try:
            if os.readlink(f"/proc/{entry}/ns/pid") == wanted:
                found.append(Process.of(int(entry)))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or a kernel thread
    return sorted(found, key=lambda process: process.pid)


def start_first_process(spec: dict[str, Any], remember: Callable[[Process], None]) -> Process:
    """Start pid 1 of new namespaces as `spec` says (see ns.py); `remember` is called before it does anything.

    Raises TestbedError with the step that failed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ours.settimeout(20 * PATIENCE)
        with theirs:
            launcher = subprocess.run(
                [sys.executable, "-I", "-S", str(NS_PY), str(theirs.fileno())],
                input=json.dumps(spec).encode() + b"\n",
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=None,
                env={"PATH": PATH},
                check=False,
            )
        if launcher.returncode:
            raise TestbedError(f"{spec['hostname']}: the namespaces could not be made (see the lines above)")
        _, ancillary, _, _ = ours.recvmsg(64, socket.CMSG_SPACE(struct.calcsize("3i")))
        if not ancillary:
            raise TestbedError(f"{spec['hostname']}: the first process ended before it said hello")
        process = Process.of(struct.unpack("3i", ancillary[0][2])[0])
        remember(process)
        ours.send(b"go")
        answer = ours.recv(4096)
        if answer != b"ok":
            raise TestbedError(f"{spec['hostname']}: {answer.decode(errors='replace') or 'ended too early'}")
        return process


def run_inside(
    process: Process,
    namespaces: str,
    argv: Sequence[str],
    where: str,
    *,
    shown: Sequence[str] | None = None,
    stdin: str | bytes | None = None,
    timeout_s: float = 60,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run argv in the namespaces (nsenter's letters, e.g. "mp") of `process`, in an empty environment.

    Output is text; bytes that are not UTF-8 come through as surrogates (os.fsencode gives them back).
    `shown` is what errors and the result call the command. Raises CommandError, or WaitError after having
    ended what was started.
    """
    if not process.alive():
        raise TestbedError(f"{where} is not running")
    full = nsenter(process, namespaces, argv)
    argv = list(argv if shown is None else shown)
    timeout_s *= PATIENCE
    # Files, not pipes: what the command leaves in the background may keep them open.
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(os.fsencode(stdin or b""))
        given.seek(0)
        running = subprocess.Popen(full, stdin=given, stdout=out, stderr=err, start_new_session=True)
        try:
            running.wait(timeout_s)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # nsenter and what it forked
            running.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                seen = (_text(out) + _text(err))[-500:]
                raise WaitError(
                    f"{where}: {' '.join(argv)[:300]}: not done in {timeout_s:g} s: {seen}"
                ) from None
            raise
        result = subprocess.CompletedProcess(argv, running.returncode, _text(out), _text(err))
    if check and result.returncode:
        raise CommandError(where, argv, result.returncode, result.stdout, result.stderr)
    return result


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return os.fsdecode(file.read())


def nsenter(process: Process, namespaces: str, argv: Sequence[str]) -> list[str]:
    """The command line that runs argv in those namespaces with nothing of our environment."""
    letters = [f"-{letter}" for letter in namespaces]
    return [
        "nsenter",
        "-t",
        str(process.pid),
        *letters,
        "--",
        "env",
        "-i",
        f"PATH={PATH}",
        "LANG=C.UTF-8",
        *argv,
    ]


# -- loop devices ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop device in use."""

    device: str
    number: int  # its own st_rdev
    backing_device: int  # st_dev of the backing file
    backing_file: str


def mount_table(pid: int | str = "self") -> list[str]:
    """The lines of a process's mount table (proc(5), mountinfo). Names may be any bytes: other tests mount, too."""
    return Path(f"/proc/{pid}/mountinfo").read_bytes().decode(errors="surrogateescape").split("\n")[:-1]


def loops() -> list[Loop]:
    """All loop devices of this machine that have a file behind them."""
    found = []
    for entry in Path("/sys/block").glob("loop*"):
        try:
            backing = (entry / "loop/backing_file").read_text(errors="surrogateescape").rstrip("\n")
            major, minor = (entry / "dev").read_text().strip().split(":")
            descriptor = os.open(f"/dev/{entry.name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # not in use, or no longer
        try:
            status = fcntl.ioctl(descriptor, LOOP_GET_STATUS64, bytes(232))
        except OSError:
            continue
        finally:
            os.close(descriptor)
        lies_on = struct.unpack_from("Q", status)[0]
        number = os.makedev(int(major), int(minor))
        found.append(Loop(entry.name, number, os.makedev(os.major(lies_on), os.minor(lies_on)), backing))
    return sorted(found, key=lambda loop: int(loop.device.removeprefix("loop")))


def loops_on(devices: Iterable[int]) -> list[Loop]:
    """Loop devices whose file lies on one of `devices`, and those on these in turn; the deepest first."""
    here, found, every = set(devices), list[Loop](), loops()
    while True:
        more = [loop for loop in every if loop.backing_device in here and loop not in found]
        if not more:
            return found[::-1]
        found += more
        here |= {loop.number for loop in more}


def detach(loop: Loop, timeout_s: float = 10) -> None:
    """Detach a loop device if it still has the same file behind it. Raises WaitError while it is in use."""
    descriptor = os.open(f"/dev/{loop.device}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if loop in loops():
            fcntl.ioctl(descriptor, LOOP_CLR_FD)
    except OSError:
        pass  # released meanwhile
    finally:
        os.close(descriptor)
    wait_until(
        f"{loop.device} ({loop.backing_file}) to be released", lambda: (loop not in loops(), ""), timeout_s
    )


# -- the record --------------------------------------------------------------------------------------


class Record:
    """What has been started, one JSON object a line, written before it does anything: `down` needs it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, what: str, **facts: Any) -> None:
        """Append one entry, in a single write: threads do not mix, and a crash cuts only the last."""
        line = json.dumps({"what": what, "boot": _boot_id(), **facts}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def entries(self, what: str) -> list[dict[str, Any]]:
        """All entries of one kind that were made since this machine booted, oldest first."""
        found = []
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return []
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut off by a crash
            if entry["what"] == what and entry["boot"] == _boot_id():
                found.append(entry)
        return found

    def process(self, role: str) -> Process | None:
        """The last process that was recorded for `role`."""
        mine = [entry for entry in self.entries("process") if entry["role"] == role]
        return Process(mine[-1]["pid"], mine[-1]["start"]) if mine else None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
