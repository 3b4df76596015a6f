"""A user's transfer over several machines: the others copy for a coordinator that runs where the command was typed.

`Others` is the coordinator's side, the program in this file a worker's. Whoever uses `Others` says how a program is
started on the other machines; this module knows nothing of Slurm. What a worker needs to know, keys included, is one
line on its standard input (the ticket): in no argument and no environment. The keys are made for this one transfer,
both sides prove that they have them (CURVE), and nothing else is answered.

The coordinator waits for nobody: who comes gets work. A worker says every second that it is there. One that was silent
for `SILENCE_S` is lost, and its work goes to others; one that gets no answer for as long ends by itself.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl.errors import BeeondError, one_line
from beeond_ctl.staging import wire
from beeond_ctl.staging.spawn import start

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

    import zmq

    from beeond_ctl.staging.coordinator import Coordinator

VERSION: Final = 3
ALONE_S: Final = 0.3
"""What is copied faster than that is not worth starting programs elsewhere."""

SILENCE_S: Final = 10.0
COME_S: Final = 30.0
"""Seconds after which a node that has not come is named."""

_BEAT_S: Final = 1.0
_END_S: Final = 5.0
_POLL_MS: Final = 200
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_DONE: Final = {"done": {"proved": False}}


class Others:
    """The other machines of a transfer. All methods are for one thread."""

    def __init__(
        self,
        here: str,
        nodes: Sequence[str],
        launch: Callable[[bytes], subprocess.Popen[bytes]],
        *,
        processes: int | None = None,
        nice: int = 0,
    ) -> None:
        """`launch` starts this file's program on each of `nodes`, with its argument as standard input of each."""
        self.here, self.nodes = here, list(nodes)
        self._launch, self._processes, self._nice = launch, processes, nice
        self._server: _Server | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._began_s = time.monotonic()
        self._trouble = ""
        self._named: set[str] = set()

    def look(self, coordinator: Coordinator) -> list[str]:
        """To be called now and then while it runs: starts the others once it is worth it, and says who is missing."""
        age_s = time.monotonic() - self._began_s
        if self._server is None:
            if age_s >= ALONE_S and not self._trouble:
                self._start(coordinator)
            return self._once()
        gone = self._program is not None and self._program.poll() is not None
        lost, came = self._server.look(all_gone=gone)
        news = [f"{node} was lost; the others do its work" for node in sorted(lost - self._named)]
        self._named |= lost
        absent = set(self.nodes) - came - self._named
        if absent and (gone or age_s > COME_S):
            self._named |= absent
            why = f" ({self._words()})" if gone else ""
            news.append(f"{_listed(absent)} did not come{why}; the others do the work")
        return news

    def _start(self, coordinator: Coordinator) -> None:
        try:
            self._server = _Server(coordinator, self.nodes)
            self._program = self._launch(self._server.ticket(self._processes, self._nice))
        except (OSError, BeeondError) as error:
            self._trouble = f"the other nodes cannot help: {one_line(error)}"
            self.close()

    def _once(self) -> list[str]:
        if not self._trouble or self._trouble in self._named:
            return []
        self._named.add(self._trouble)
        return [self._trouble]

    def _words(self) -> str:
        if self._program is None or self._program.stderr is None:
            return ""
        with suppress(OSError):
            os.set_blocking(self._program.stderr.fileno(), False)
            text = (self._program.stderr.read() or b"").decode(errors="backslashreplace")
            lines = [line for line in text.splitlines() if line.strip()]
            return " ".join(lines[-1].split())[:200] if lines else "no reason given"
        return "no reason given"

    def close(self) -> None:
        """See that no program of ours is left on the others, within about ten seconds."""
        import subprocess

        if self._program is not None:
            if self._server is not None:
                self._server.dismiss()
            for end in (None, self._program.terminate, self._program.kill):
                if end is not None:
                    end()
                with suppress(subprocess.TimeoutExpired):
                    self._program.wait(_END_S)
                    break
            if self._program.stderr is not None:
                self._program.stderr.close()
            self._program = None
        if self._server is not None:
            self._server.close()
            self._server = None


def _listed(nodes: set[str]) -> str:
    names = sorted(nodes)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class _Server:
    """Answers workers, in a thread of its own."""

    def __init__(self, coordinator: Coordinator, nodes: Sequence[str]) -> None:
        """Listen on all interfaces: who cannot show the key of this transfer is not answered. Raises OSError."""
        import zmq

        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._heard_s: dict[str, float] = {}
        self._nodes, self._came, self._left, self._lost = set(nodes), set[str](), set[str](), set[str]()
        self._dismissed = self._over = False
        self._public, self._secret = zmq.curve_keypair()
        self._worker_public, self._worker_secret = zmq.curve_keypair()
        self._context = zmq.Context[zmq.Socket[bytes]]()
        # First of all: as long as nobody answers for ZAP, libzmq lets everyone in
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        _limit(self._router)
        self._router.curve_secretkey = self._secret
        self._router.curve_server = True
        self._router.zap_domain = b"staging"
        self._router.zap_enforce_domain = True
        self._router.ipv6 = True
        try:
            self._router.bind("tcp://*:0")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"no port to listen on: {error}") from error
        self._port = int(bytes(self._router.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])
        self._thread = threading.Thread(target=self._run, name="spread", daemon=True)
        start(self._thread)

    def ticket(self, processes: int | None, nice: int) -> bytes:
        """The line that lets a worker in."""
        import socket

        facts = {
            "version": VERSION,
            "hosts": [socket.gethostname()],
            "port": self._port,
            "server": self._public.decode(),
            "public": self._worker_public.decode(),
            "secret": self._worker_secret.decode(),
            "processes": processes,
            "nice": nice,
            "silence_s": SILENCE_S,
        }
        return json.dumps(facts).encode() + b"\n"

    def look(self, *, all_gone: bool) -> tuple[set[str], set[str]]:
        """The nodes that are lost, and those that came. `all_gone`: whatever ran on them has ended."""
        now_s = time.monotonic()
        with self._lock:
            silent = {
                node
                for node, heard_s in self._heard_s.items()
                if node not in self._left | self._lost and (all_gone or now_s - heard_s > SILENCE_S)
            }
            self._lost |= silent
            answer = set(self._lost), set(self._came)
        for node in silent:
            self._coordinator.node_lost(node)
        return answer

    def dismiss(self) -> None:
        """From now on there is no more work."""
        self._dismissed = True

    def close(self) -> None:
        """Answer no more."""
        self._over = True
        self._thread.join(2)
        if not self._thread.is_alive():
            self._zap.close(0)
            self._router.close(0)
            self._context.term()

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._over:
            ready = dict(poller.poll(_POLL_MS))
            if self._zap in ready:
                self._authenticate()
            if self._router in ready:
                route, *frames = self._router.recv_multipart()
                answer = self._answer(frames[0]) if len(frames) == 1 else None
                if answer is not None:
                    self._router.send_multipart([route, answer])

    def _authenticate(self) -> None:
        """Answer one request of libzmq's (ZAP, https://rfc.zeromq.org/spec/27/): is this client key ours?"""
        from zmq.utils import z85

        version, request, domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        ours = [z85.decode(self._worker_public)]
        welcome = domain == b"staging" and mechanism == b"CURVE" and credentials == ours
        status = [b"200", b"OK"] if welcome else [b"400", b"not of this transfer"]
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _answer(self, frame: bytes) -> bytes | None:
        try:
            message = wire.loads(frame)
            number, node, kind = message["id"], message["node"], message["kind"]
        except (wire.ProtocolError, KeyError, TypeError):
            return None
        if node not in self._nodes:
            return None
        with self._lock:
            self._heard_s[node] = time.monotonic()
            self._came.add(node)
            lost = node in self._lost
            if kind == "bye":
                self._left.add(node)
        if kind == "bye":  # before the end it has given up something that hangs, and does not report it
            self._coordinator.node_lost(node)
        body: dict[str, Any] = {}
        if kind == "take":
            body = _DONE if self._dismissed or lost else self._coordinator.take(node)
        elif kind == "beat":
            body = {"over": self._dismissed or lost}
        elif kind == "report" and isinstance(message.get("result"), dict):
            self._coordinator.report(node, message["result"])
        return wire.dumps({"id": number, "body": body}).encode("ascii")


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.maxmsgsize = 2 * wire.MAX_LINE
    socket.handshake_ivl = 10_000
    socket.sndhwm = socket.rcvhwm = 0


# --- the worker's side ------------------------------------------------------------------------------------


class _Link:
    """The way to the coordinator; any thread may ask."""

    def __init__(self, ticket: dict[str, Any], node: str, hosts: list[str]) -> None:
        """Find the coordinator at one of `hosts`. Raises TimeoutError."""
        import zmq

        self._lock = threading.Lock()
        self._number, self._node, self._silent = 0, node, False
        self._silence_s = float(ticket["silence_s"])
        self._context = zmq.Context[zmq.Socket[bytes]]()
        sockets = []
        for host in dict.fromkeys(hosts):
            socket = self._context.socket(zmq.DEALER)
            _limit(socket)
            socket.ipv6 = True
            socket.immediate = True
            socket.curve_serverkey = ticket["server"].encode()
            socket.curve_publickey = ticket["public"].encode()
            socket.curve_secretkey = ticket["secret"].encode()
            with suppress(zmq.ZMQError):  # a name that nobody knows here
                socket.connect(
                    f"tcp://[{host}]:{ticket['port']}" if ":" in host else f"tcp://{host}:{ticket['port']}"
                )
                sockets.append(socket)
        poller = zmq.Poller()
        hello = wire.dumps({"id": 0, "node": node, "kind": "hello"}).encode("ascii")
        for socket in sockets:
            poller.register(socket, zmq.POLLOUT)  # once the handshake has succeeded
        deadline_s = time.monotonic() + self._silence_s
        found: zmq.Socket[bytes] | None = None
        while found is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{node}: no answer from {', '.join(hosts)}, port {ticket['port']}")
            for socket, what in poller.poll(int(left_s * 1000)):
                if what & zmq.POLLOUT:
                    socket.send(hello)
                    poller.modify(socket, zmq.POLLIN)
                else:
                    found = socket
        found.recv()
        for socket in sockets:
            if socket is not found:
                socket.close(0)
        found.sndtimeo = int(self._silence_s * 1000)
        self._socket = found

    def ask(self, kind: str, **fields: object) -> dict[str, Any]:
        """What the coordinator answers. Raises TimeoutError."""
        with self._lock:
            if not self._silent:  # nobody has to find that out once more
                self._number += 1
                message = {"id": self._number, "node": self._node, "kind": kind, **fields}
                body = self._answer(wire.dumps(message).encode("ascii"))
                if body is not None:
                    return body
                self._silent = True
        raise TimeoutError(f"{self._node}: the coordinator does not answer any more")

    def _answer(self, message: bytes) -> dict[str, Any] | None:
        import zmq

        deadline_s = time.monotonic() + self._silence_s
        try:
            self._socket.send(message)  # as long as there is no connection it waits, up to SNDTIMEO
        except zmq.Again:
            return None
        while (left_s := deadline_s - time.monotonic()) > 0 and self._socket.poll(int(left_s * 1000)):
            answer = wire.loads(self._socket.recv())
            if answer["id"] == self._number:
                body: dict[str, Any] = answer["body"]
                return body
        return None

    def close(self) -> None:
        """Leave."""
        self._socket.close(1000)
        self._context.term()


def _work(line: bytes) -> None:
    """Copy for whoever made this ticket. Raises OSError, TimeoutError, what `serve` raises."""
    import signal
    import socket

    from beeond_ctl.staging.worker import serve

    ticket = wire.loads(line)
    if ticket.get("version") != VERSION:
        raise wire.ProtocolError("another version of beeond-ctl runs where this was asked for")
    os.nice(int(ticket["nice"]))
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    origin = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")  # where srun runs, as this node reaches it
    link = _Link(ticket, node, [*([origin] if origin else []), *ticket["hosts"]])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())

    def beat() -> None:
        try:
            while not stop.wait(_BEAT_S) and not link.ask("beat")["over"]:
                pass
            stop.set()
        except Exception:  # noqa: BLE001 - whatever it is: there is no way to the coordinator
            stop.set()

    start(threading.Thread(target=beat, daemon=True))
    try:
        serve(
            lambda: link.ask("take"),
            lambda result: _tell(link, result),
            None,
            stop,
            processes=ticket["processes"],
        )
    finally:
        with suppress(TimeoutError):
            link.ask("bye")
        stop.set()


def _tell(link: _Link, result: dict[str, Any]) -> None:
    link.ask("report", result=result)


if __name__ == "__main__":
    try:
        _work(sys.stdin.buffer.readline(1 << 16))
    except Exception as error:  # noqa: BLE001 - shown by whoever started this
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
