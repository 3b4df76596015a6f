"""Hosts on a private network, each a process in namespaces of its own (network, mounts, pids), to call functions on.

    with Lan(tmp_path, 3) as lan:
        lan.hosts[0].call(os.listdir, "/")

When a host's first process ends, the kernel ends all others of the host and takes its mounts and network along: a
test that fails leaves nothing. Run as a module, this file is that first process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

PROJECT = Path(__file__).resolve().parents[2]
NEEDS = ("unshare", "ip")


class Host:
    """One host. Its name is its address, since there is no DNS. `disk` is mounted at /mnt, /run is empty."""

    def __init__(self, name: str, disk: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
             sys.executable, "-m", "tests.integration.lan"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT,
        )  # fmt: skip
        self.call(_furnish, str(disk))
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(children[0])

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function`, which has to be one of a module, returns or raises on this host."""
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump((function, arguments), self._process.stdin)
        self._process.stdin.flush()
        good, result = pickle.load(self._process.stdout)
        if not good:
            raise result
        return result

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command on this host and return its output."""
        done: tuple[int, str] = self.call(_command, words)
        assert done[0] == 0 or not check, f"{words}: exit code {done[0]}: {done[1]}"
        return done[1]

    def close(self) -> None:
        """End every process of this host."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Lan:
    """`count` hosts joined by a bridge, which is in a host of its own."""

    def __init__(self, directory: Path, count: int) -> None:
        self._switch = Host("switch", directory)
        self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self._switch.run("ip", "link", "set", "bridge", "up")
        self.hosts = []
        for number in range(1, count + 1):
            disk = directory / f"disk{number}"
            disk.mkdir()
            host = Host(f"10.99.0.{number}", disk)
            # From outside of the hosts' pid namespaces: the kernel is told the host by its pid.
            wire = f"ip link add port{number} type veth peer name eth0 netns {host.pid}"
            subprocess.run(["nsenter", f"--net=/proc/{self._switch.pid}/ns/net", *wire.split()], check=True)
            self._switch.run("ip", "link", "set", f"port{number}", "master", "bridge", "up")
            host.run("ip", "addr", "add", f"{host.name}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            host.run("ip", "link", "set", "lo", "up")
            self.hosts.append(host)

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names."""
        return tuple(host.name for host in self.hosts)

    def cut(self, host: Host) -> None:
        """Take a host off the network, silently."""
        self._switch.run("ip", "link", "set", f"port{self.hosts.index(host) + 1}", "down")

    def all(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function` on all hosts at once, with the host's name before `arguments`."""
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            return list(pool.map(lambda host: host.call(function, host.name, *arguments), self.hosts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in (*self.hosts, self._switch):
            host.close()


def _furnish(disk: str) -> None:
    subprocess.run(["mount", "--bind", disk, "/mnt"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/run"], check=True)


def _command(words: tuple[str, ...]) -> tuple[int, str]:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout.decode(errors="surrogateescape")


def _serve() -> None:
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, arguments = pickle.load(orders)
        except EOFError:
            return
        try:
            answer = True, function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised where the call was made
            answer = False, error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
