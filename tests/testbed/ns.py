"""Start the first process of a machine room or of a node, in namespaces of its own.

Run by path, as `python3 -I -S ns.py FD` with a JSON specification on standard input; it knows nothing of
Slurm or of the cluster's layout. The new process says hello on the socket FD (whose credentials tell the
starter its pid as the starter sees it), and does nothing until the starter has answered "go": by then the
starter has written the pid down, so that a starter killed at any moment leaves nothing unrecorded. Then it
builds its mounts, answers "ok" or the error, and from there on only reaps. When it is killed, the kernel
ends every process of its PID namespace with it, and the last one takes mounts and network along.
"""

import ctypes
import json
import os
import signal
import socket
import stat
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE, MS_SLAVE = 1 << 18, 1 << 19
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError naming `what` when a C call returned -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    result = libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode(),
    )
    check(result, f"mount {source} on {target}")


def mount_all(mounts: list[dict[str, Any]], root: str) -> None:
    """Make each mount below `root`, with its mount point."""
    for entry in mounts:
        target = root + entry["target"]
        os.makedirs(target, exist_ok=True)
        kind = entry["type"]
        if kind == "bind":
            mount(entry["source"], target, None, MS_BIND | (MS_REC if entry.get("recursive") else 0))
            if entry.get("readonly"):
                mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
        else:
            mount(entry["source"], target, kind, entry.get("flags", 0), entry.get("data", ""))


def make_devices(root: str, devices: list[list[Any]], links: dict[str, str]) -> None:
    """Fill the node's own /dev: each device is [name, "c" or "b", major, minor, mode]."""
    for name, kind, major, minor, mode in devices:
        path = f"{root}/dev/{name}"
        os.mknod(path, (stat.S_IFCHR if kind == "c" else stat.S_IFBLK) | mode, os.makedev(major, minor))
        os.chmod(path, mode)
    for name, destination in links.items():
        os.symlink(destination, f"{root}/dev/{name}")


def let_users_through(root: str, paths: list[str]) -> None:
    """Every directory above `paths` may be entered by the node's users (only in the node's overlay)."""
    for path in paths:
        parent = os.path.dirname(path)
        while parent not in ("", "/"):
            mode = os.stat(root + parent).st_mode
            if not mode & stat.S_IXOTH:
                os.chmod(root + parent, stat.S_IMODE(mode) | stat.S_IXOTH | stat.S_IXGRP)
            parent = os.path.dirname(parent)


def become(spec: dict[str, Any]) -> None:
    """Build the mounts that `spec` lists and, where it has a root, make that the root."""
    mount("none", "/", None, MS_REC | (MS_PRIVATE if spec.get("root") else MS_SLAVE))
    host = spec["hostname"].encode()
    check(libc.sethostname(host, len(host)), "sethostname")
    root = spec.get("root", "")
    mount_all(spec["overlays"], "")
    mount_all(spec["mounts"], root)
    if not root:
        return
    make_devices(root, spec["devices"], spec["device_links"])
    let_users_through(root, spec["reachable"])
    os.chdir(root)
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def reap() -> None:
    """Be init: wait for whatever is re-parented here, for ever."""
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait([signal.SIGCHLD])


def first_process(spec: dict[str, Any], sock: socket.socket) -> None:
    """What pid 1 of the new namespaces does. Returns only if it is not wanted."""
    os.setsid()
    libc.prctl(15, spec["process_name"].encode()[:15], 0, 0, 0)  # PR_SET_NAME
    sock.send(b"hello")
    if sock.recv(2) != b"go":
        return
    try:
        become(spec)
        null = os.open("/dev/null", os.O_RDWR)
    except OSError as error:
        sock.send(f"error {error.strerror}: {error.filename or ''}".encode())
        return
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    sock.send(b"ok")
    sock.close()
    reap()


def main() -> int:
    """Enter the namespaces of spec["join"], if any, and fork pid 1 of new ones."""
    spec = json.loads(sys.stdin.buffer.readline())
    sock = socket.socket(fileno=int(sys.argv[1]))
    if spec.get("join"):
        pidfd = os.pidfd_open(spec["join"])
        check(libc.setns(pidfd, CLONE_NEWNS | CLONE_NEWPID), "setns")
        os.close(pidfd)
        if helper := os.fork():
            # Left to the machine's init, a slow one would keep the PID namespace it is in from ending.
            return os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    check(
        libc.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC),
        "unshare",
    )
    if os.fork() == 0:
        first_process(spec, sock)
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    finally:
        sys.stderr.flush()
        os._exit(code)
