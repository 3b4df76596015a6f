"""One command on many nodes at once, as root, over `pdsh`, or over ssh by paramiko where there is no pdsh.

Knows nothing of what the command does. Only words that no shell takes for more may be passed: they go through the
remote one. Host keys are checked, and nobody is asked for a password.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from beeond_ctl.errors import NodeError, UsageError, visible
from beeond_ctl.slurm import fold_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from threading import BoundedSemaphore

    import paramiko

_SAFE: Final = re.compile(r"[A-Za-z0-9_./=,\[\]-]+")
_CONNECT_S: Final = 10
_ALIVE_S: Final = 15
"""Seconds of silence after which a node that was reached is asked whether it is still there."""
_UNANSWERED: Final = 4
"""How often, before it is taken for lost: commands may take days, and a node without power closes no connection."""
_MARKER: Final = "beeond-ctl-exit="
_LOGINS: Final = 64
"""Logins that are under way at the same time."""

_NOT_KNOWN: Final = "host key is not known; add it to /etc/ssh/ssh_known_hosts"
_NOT_THE_KNOWN_ONE: Final = (
    "host key is not the known one; find out why before you change /etc/ssh/ssh_known_hosts"
)
_REFUSED: Final = "login of root by key was refused; see authorized_keys and sshd_config there"
_SILENT: Final = f"cannot be reached: no answer within {_CONNECT_S} s"
_LOST: Final = "lost while it worked: the connection broke, or went silent; is the node up?"
_CAUSES: Final = (
    (r"Timeout, server \S+ not responding|Read from remote host", _LOST),
    (r"Connection to \S+ closed by remote host|client_loop: send disconnect", _LOST),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", _NOT_THE_KNOWN_ONE),
    (r"Host key verification failed", _NOT_KNOWN),
    (r"Permission denied", _REFUSED),
    (r"timed out", _SILENT),
    (r"Could not resolve hostname \S+: ([^\n\r]*)", r"cannot be reached: \1"),
    (r"connect to host \S+ port \d+: ([^\n\r]*)", r"cannot be reached: \1"),
    (r"command timeout", "did not end in time"),
)
"""What ssh and pdsh say of a node that was not reached, or lost, and what we say: the same over both launchers."""

Launcher = Literal["pdsh", "ssh"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node said. `code` is None when the command was not run, or is not known to have ended."""

    node: str
    code: int | None
    output: str


def on_nodes(
    nodes: Sequence[str],
    words: Sequence[str],
    *,
    timeout_s: float,
    fanout: int = 64,
    launcher: Launcher | None = None,
) -> list[Answer]:
    """Run `words` on each of `nodes`, at most `fanout` at once; answers in the order of `nodes`.

    Nodes that meet each other have to run all at once. `launcher` is pdsh where it is installed, unless it is named.
    Raises UsageError for a word that a shell could take
    for more than a word, NodeError when pdsh was named and is not there, or does not end.
    """
    for word in (*words, *nodes):
        if not _SAFE.fullmatch(word):
            raise UsageError(f"{word!r} cannot be passed to other nodes")
    if launcher == "ssh" or (launcher is None and shutil.which("pdsh") is None):
        return _by_ssh(nodes, words, timeout_s, fanout)
    return _by_pdsh(nodes, words, timeout_s, fanout)


def fold(answers: Iterable[Answer]) -> list[tuple[list[str], str]]:
    """Who said what, on one line, those together that said the same."""
    by_text: dict[str, list[str]] = {}
    for answer in answers:
        told = visible(" ".join(answer.output.split())).removeprefix("beeond-ctl: ")
        text = told or ("done" if answer.code == 0 else "no answer; is the node up?")
        by_text.setdefault(text, []).append(answer.node)
    return [(nodes, text) for text, nodes in by_text.items()]


def all_done(answers: Sequence[Answer], unfinished: str) -> Iterator[str]:
    """What to tell of the answers, folded. Raises NodeError naming the nodes on which `unfinished` is true."""
    for told, text in fold(answers):
        yield f"{fold_nodes(told)}: {text}"
    bad = [answer.node for answer in answers if answer.code != 0]
    if bad:
        raise NodeError(f"{unfinished} on {fold_nodes(bad)}; mend the cause named above, and run it again")


def _by_pdsh(nodes: Sequence[str], words: Sequence[str], timeout_s: float, fanout: int) -> list[Answer]:
    pdsh = shutil.which("pdsh")
    if pdsh is None:
        raise NodeError("pdsh is not installed here; install it, or let ssh be used")
    remote = f"{' '.join(words)} 2>&1; echo {_MARKER}$?"
    argv = [pdsh, "-R", "ssh", "-f", str(fanout), "-u", str(max(1, int(timeout_s))), "-t", str(_CONNECT_S)]
    argv += ["-w", ",".join(nodes), remote]
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": os.environ.get("HOME", "/root"),
        "PDSH_SSH_ARGS_APPEND": f"-oBatchMode=yes -oConnectTimeout={_CONNECT_S} -oStrictHostKeyChecking=yes"
        f" -oServerAliveInterval={_ALIVE_S} -oServerAliveCountMax={_UNANSWERED}",
    }
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env=environment, timeout=timeout_s + 30, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NodeError(f"pdsh did not end within {timeout_s + 30:.0f} s on {','.join(nodes)}") from None
    return _read_pdsh(nodes, done.stdout, done.stderr)


def _read_pdsh(nodes: Sequence[str], stdout: str, stderr: str) -> list[Answer]:
    codes: dict[str, int] = {}
    lines: dict[str, list[str]] = {node: [] for node in nodes}
    for line in stdout.splitlines():
        node, _, text = line.partition(": ")
        if text.startswith(_MARKER) and text.removeprefix(_MARKER).isdigit():
            codes[node] = int(text.removeprefix(_MARKER))
        elif node in lines:
            lines[node].append(text)
    # pdsh's and ssh's own words: "pdsh@here: n1: ssh exited with exit code 255", "n1: Permission denied".
    for line in stderr.splitlines():
        node, _, text = line.removeprefix("pdsh@").partition(": ")
        if node not in lines:
            node, _, text = text.partition(": ")
        if node in lines:
            lines[node].append(text)
    return [_answer(node, codes.get(node), "\n".join(lines[node])) for node in nodes]


def _answer(node: str, code: int | None, output: str) -> Answer:
    if code is None:
        for pattern, told in _CAUSES:
            match = re.search(pattern, output)
            if match:
                return Answer(node, None, match.expand(told))
    return Answer(node, code, output)


def _by_ssh(nodes: Sequence[str], words: Sequence[str], timeout_s: float, fanout: int) -> list[Answer]:
    import logging
    from threading import BoundedSemaphore

    # What goes wrong is told by us, once for each node.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    logging.getLogger("paramiko").propagate = False
    logins = BoundedSemaphore(_LOGINS)
    pool = ThreadPoolExecutor(max_workers=max(1, min(fanout, len(nodes))))
    try:
        return list(pool.map(lambda node: _ssh(node, " ".join(words), timeout_s, logins), nodes))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # who interrupts does not wait for the nodes


def _ssh(node: str, command: str, timeout_s: float, logins: BoundedSemaphore) -> Answer:
    import paramiko

    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    try:
        client.load_system_host_keys()
        if os.path.exists("/etc/ssh/ssh_known_hosts"):
            client.load_system_host_keys("/etc/ssh/ssh_known_hosts")
        try:
            with logins:
                client.connect(
                    node,
                    username="root",
                    timeout=_CONNECT_S,
                    banner_timeout=_CONNECT_S,
                    auth_timeout=_CONNECT_S,
                )
        except TimeoutError:
            return Answer(node, None, _SILENT)
        _notice_loss(client)
        try:
            _, stdout, _ = client.exec_command(f"{command} 2>&1", timeout=timeout_s)
        except (EOFError, OSError):
            return Answer(node, None, _LOST)
        output = stdout.read().decode(errors="replace")
        channel = stdout.channel
        if not channel.eof_received:  # closed from this side, as the connection broke
            return Answer(node, None, _LOST)
        if not channel.status_event.wait(timeout_s):
            return Answer(node, None, "did not end in time")
        return Answer(node, channel.exit_status if channel.exit_status >= 0 else None, output)
    except paramiko.BadHostKeyException:
        return Answer(node, None, _NOT_THE_KNOWN_ONE)
    except paramiko.AuthenticationException as error:
        return Answer(node, None, _SILENT if "timeout" in str(error).lower() else _REFUSED)
    except paramiko.SSHException as error:
        if "not found in known_hosts" in str(error):
            return Answer(node, None, _NOT_KNOWN)
        if "No authentication methods available" in str(error):
            return Answer(node, None, _REFUSED)
        if "banner" in str(error) or "No existing session" in str(error):  # which of the two is a race
            return Answer(node, None, _SILENT)
        return Answer(node, None, f"ssh: {error}")
    except TimeoutError:
        return Answer(node, None, f"did not end within {timeout_s:.0f} s")
    except paramiko.ssh_exception.NoValidConnectionsError as error:
        return Answer(node, None, f"cannot be reached: {next(iter(error.errors.values())).strerror}")
    except OSError as error:
        return Answer(node, None, f"cannot be reached: {error.strerror or error}")
    finally:
        client.close()


def _notice_loss(client: paramiko.SSHClient) -> None:
    """Have the connection break when its node is silent for too long, which ends all waiting for the node.

    Paramiko sends what keeps a connection alive, but does not miss the answers: the kernel does.
    """
    transport = client.get_transport()
    if transport is not None:
        transport.set_keepalive(_ALIVE_S)
        silent_ms = _ALIVE_S * _UNANSWERED * 1000
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_ms)
