"""Starting a child that touches files as the user, a fresh process with nothing of ours but its pipes; and threads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from typing import Any

    from beeond_ctl.staging.job import Identity

REAP_S = 5.0
"""How long a child may take to be gone, once it is killed."""

_CODE = "import sys; sys.path += sys.argv[2:]; __import__(sys.argv[1]); sys.modules[sys.argv[1]].main()"
"""In place of `-m`, and of what `site` does, as a child is ready in two thirds of the time without."""

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def spawn(
    program: str, user: Identity | None, keep: tuple[int, ...] = (), *, package: str = "beeond_ctl.staging"
) -> subprocess.Popen[bytes]:
    """Start `PACKAGE.PROGRAM`, its function `main`, as `user` (None: as we are) with the descriptors `keep`.

    Raises OSError.
    """
    identity: dict[str, Any] = {}
    if user is not None and os.geteuid() == 0:
        identity = {"user": user.uid, "group": user.gid, "extra_groups": list(user.groups)}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", "-c", _CODE, f"{package}.{program}", *_places()],
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


def _places() -> list[str]:
    """Where this package is, and what staging needs beside the standard library."""
    import xxhash

    import beeond_ctl

    return sorted({str(Path(str(each.__file__)).parent.parent) for each in (beeond_ctl, xxhash)})


def start(thread: threading.Thread) -> None:
    """Start `thread`. Raises OSError where the system allows no more, as it does for a process."""
    try:
        thread.start()
    except RuntimeError:
        raise OSError(errno.EAGAIN, "no more threads are allowed (ulimit -u)") from None


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
    import re

    # Of an exception what the system says of it is enough for whoever copies.
    return re.sub(r"^\w*Error: \[Errno \d+\] ", "", lines[-1])[:200] if lines else ""


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill `child` if need be, reap it and close its pipes; at most 5 s, whatever it hangs in."""
    if child.poll() is None:
        child.kill()
    try:
        child.wait(REAP_S)
    except subprocess.TimeoutExpired:
        return  # it hangs in a system call of a file system that does not answer, and holds its pipes
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            try:
                stream.close()
            except OSError:  # what was still to be written has no reader any more
                continue
