"""Starting a child that touches files as the user: a fresh process with nothing of ours but its pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beeond_ctl.staging.transfer import Identity

_REAP_S = 5.0
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def spawn(program: str, user: Identity | None, keep: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start `beeond_ctl.staging.PROGRAM` as `user` (None: as we are) with the descriptors `keep`. Raises
    OSError."""
    identity: dict[str, Any] = {}
    if user is not None and os.geteuid() == 0:
        identity = {"user": user.uid, "group": user.gid, "extra_groups": list(user.groups)}
    return subprocess.Popen(
        [sys.executable, "-I", "-X", "utf8", "-m", f"beeond_ctl.staging.{program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=_ENVIRONMENT,
        umask=0o077,
        start_new_session=True,  # Ctrl-C is for us, who then stop it in order
        pass_fds=keep,
        **identity,
    )


def last_words(child: subprocess.Popen[bytes]) -> str:
    """The last line of what a dead child wrote on standard error."""
    if child.stderr is None:
        return ""
    os.set_blocking(child.stderr.fileno(), False)
    try:
        text = os.read(child.stderr.fileno(), 1 << 16)
    except BlockingIOError:
        return ""
    lines = text.decode(errors="backslashreplace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill `child` if need be, reap it and close its pipes; at most 5 s, whatever it hangs in."""
    if child.poll() is None:
        child.kill()
    try:
        child.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        return  # it hangs in a system call of a file system that does not answer, and holds its pipes
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            try:
                stream.close()
            except OSError:  # what was still to be written has no reader any more
                continue
