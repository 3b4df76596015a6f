"""One command on many nodes at once, as root, over `pdsh`.

Knows nothing of what the command does. Only fixed words and numbers may be passed: they go through the remote shell.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final, TYPE_CHECKING

from beeond_ctl.errors import NodeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SAFE: Final = re.compile(r"[A-Za-z0-9_./=,\[\]-]+")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node said. `code` is None when the command was not run or did not end."""

    node: str
    code: int | None
    output: str


def on_nodes(
    nodes: Sequence[str], words: Sequence[str], *, timeout_s: float, fanout: int = 64
) -> list[Answer]:
    """Run `words` on each of `nodes`, at most `fanout` at once; answers in the order of `nodes`.

    Raises UsageError for a word that a shell could take for more than a word, NodeError when pdsh is not there.
    """
    for word in words:
        if not _SAFE.fullmatch(word):
            raise UsageError(f"{word!r} cannot be passed to other nodes")
    pdsh = shutil.which("pdsh")
    if pdsh is None:
        raise NodeError("pdsh is not installed here; install it, or run the command on each node yourself")
    marker = "beeond-ctl-exit="
    remote = f"{' '.join(words)} 2>&1; echo {marker}$?"
    argv = [
        pdsh,
        "-R",
        "ssh",
        "-f",
        str(fanout),
        "-u",
        str(max(1, int(timeout_s))),
        "-t",
        "10",
        "-w",
        ",".join(nodes),
        remote,
    ]
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": os.environ.get("HOME", "/root"),
        "PDSH_SSH_ARGS_APPEND": "-oBatchMode=yes -oConnectTimeout=10 -oStrictHostKeyChecking=yes",
    }
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env=environment, timeout=timeout_s + 30, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NodeError(f"pdsh did not end within {timeout_s + 30:.0f} s on {','.join(nodes)}") from None
    codes: dict[str, int] = {}
    lines: dict[str, list[str]] = {node: [] for node in nodes}
    for line in done.stdout.splitlines():
        node, _, text = line.partition(": ")
        if text.startswith(marker) and text.removeprefix(marker).isdigit():
            codes[node] = int(text.removeprefix(marker))
        elif node in lines:
            lines[node].append(text)
    for line in (
        done.stderr.splitlines()
    ):  # pdsh's and ssh's own words: "pdsh@here: n1: ssh exited with exit code 255"
        node, _, text = line.removeprefix("pdsh@").partition(": ")
        if node in lines:
            lines[node].append(text)
        else:
            at, _, rest = text.partition(": ")
            if at in lines:
                lines[at].append(rest)
    return [Answer(node, codes.get(node), "\n".join(lines[node])) for node in nodes]
