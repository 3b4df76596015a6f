"""One command on many nodes at once, as root, over `pdsh`, or over ssh by paramiko where there is no pdsh.

Knows nothing of what the command does. Only words that no shell takes for more may be passed: they go through the
remote one. Host keys are checked, and nobody is asked for a password.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from beeond_ctl.errors import NodeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SAFE: Final = re.compile(r"[A-Za-z0-9_./=,\[\]-]+")
_CONNECT_S: Final = 10
_MARKER: Final = "beeond-ctl-exit="

Launcher = Literal["pdsh", "ssh"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node said. `code` is None when the command was not run or did not end."""

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

    `launcher` is pdsh where it is installed, unless it is named. Raises UsageError for a word that a shell could take
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
        told = " ".join(answer.output.split()).removeprefix("beeond-ctl: ")
        text = told or ("done" if answer.code == 0 else "no answer; is the node up?")
        by_text.setdefault(text, []).append(answer.node)
    return [(nodes, text) for text, nodes in by_text.items()]


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
        "PDSH_SSH_ARGS_APPEND": f"-oBatchMode=yes -oConnectTimeout={_CONNECT_S} -oStrictHostKeyChecking=yes",
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
    return [Answer(node, codes.get(node), "\n".join(lines[node])) for node in nodes]


def _by_ssh(nodes: Sequence[str], words: Sequence[str], timeout_s: float, fanout: int) -> list[Answer]:
    with ThreadPoolExecutor(max_workers=max(1, min(fanout, len(nodes)))) as pool:
        return list(pool.map(lambda node: _ssh(node, " ".join(words), timeout_s), nodes))


def _ssh(node: str, command: str, timeout_s: float) -> Answer:
    import paramiko

    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    try:
        client.load_system_host_keys()
        if os.path.exists("/etc/ssh/ssh_known_hosts"):
            client.load_system_host_keys("/etc/ssh/ssh_known_hosts")
        try:
            client.connect(
                node, username="root", timeout=_CONNECT_S, banner_timeout=_CONNECT_S, auth_timeout=_CONNECT_S
            )
        except TimeoutError:
            return Answer(node, None, f"cannot be reached: no answer within {_CONNECT_S} s")
        _, stdout, _ = client.exec_command(f"{command} 2>&1", timeout=timeout_s)
        output = stdout.read().decode(errors="replace")
        code = stdout.channel.recv_exit_status()
        return Answer(node, code if code >= 0 else None, output)
    except paramiko.BadHostKeyException:
        return Answer(
            node, None, "host key is not the known one; find out why before you change ssh_known_hosts"
        )
    except paramiko.AuthenticationException:
        return Answer(
            node, None, "login of root by key was refused; see authorized_keys and sshd_config there"
        )
    except paramiko.SSHException as error:
        if "not found in known_hosts" in str(error):
            return Answer(node, None, "host key is not known; add it to /etc/ssh/ssh_known_hosts")
        return Answer(node, None, f"ssh: {error}")
    except TimeoutError:
        return Answer(node, None, f"did not end within {timeout_s:.0f} s")
    except OSError as error:  # includes paramiko's NoValidConnectionsError
        return Answer(node, None, f"cannot be reached: {error.strerror or error}".replace(f" {node}", ""))
    finally:
        client.close()
