"""The leader's side of a meeting: one thread in the leader's process, which owns the port and all state.

Members ask, the leader answers. A request has a number and is kept until its sender no longer lists it as
open, so that a connection that breaks and comes back loses nothing and repeats nothing. Whatever goes wrong
first ends the meeting for everybody, with a message that names the nodes at fault.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import zmq
from zmq.utils import z85

from beeond_ctl import listeners
from beeond_ctl.errors import NodeError, OutsideError, PeerError, UserError, one_line
from beeond_ctl.rendezvous import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Body = dict[str, Any]
    Combine = Callable[[dict[str, Body]], Body]
    Handler = Callable[[str, Body], Body]

TICK_S = 0.25
BEAT_S = 1.0
"""Between two signs of life of a member."""
BROKEN_S = 2.0
"""How long a closed connection may take to come back before its node counts as lost."""
_PAUSE_S = 1.0
_BATCH = 256
_LINGER_MS = 500
_MANY_NODES = 256
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"beeond-ctl"
_MAX_TEXT = 65536


@dataclass(slots=True)
class _Node:
    name: str
    run: str = ""
    route: bytes | None = None  # its newest connection; None: never heard of
    socket_fd: int = -1
    seen: float = 0.0
    broken_since: float | None = None
    lost: bool = False
    left: bool = False
    point: str = ""  # the last one it came to
    last: int = 0  # newest request known from a beat
    open: frozenset[int] = frozenset()
    answers: dict[int, bytes | None] = field(default_factory=dict)  # None: not answered yet
    resend: bool = False


@dataclass(slots=True)
class _Point:
    deadline: float
    timeout_s: float
    reports: dict[str, Body] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)


class Leader:
    """Serves the meeting of `nodes` on the first free one of `ports` until it is closed.

    `combine` makes the answer of a point from the reports of all nodes that came (default: an empty one), in
    the leader's thread; keep it quick and the answer small, it goes to every node. `handlers` answer a
    member's questions in threads of their own. An exception in `combine` ends the meeting, one in a handler
    goes to who asked. A PeerError raised by either names the nodes at fault.

    Raises NodeError when no port is free, OutsideError where users have them. A fork without exec must not touch it.
    """

    def __init__(
        self,
        key: bytes,
        nodes: Sequence[str],
        ports: Sequence[int],
        *,
        name: str | None = None,
        bind_address: str = "*",
        combine: Mapping[str, Combine] | None = None,
        handlers: Mapping[str, Handler] | None = None,
        handler_threads: int = 4,
        silence_s: float = 10.0,
        farewell_s: float = 2.0,
        late_s: float = 5.0,
        uncertain: Sequence[str] = (),
    ) -> None:
        """`name` is the leader's own node, the first of `nodes` unless given. Of `uncertain` ones nobody knows whether
        they try to come: that they do not tells nothing of the leader.

        A node that was in contact and is not heard from for `silence_s` is lost. `close` waits at most
        `farewell_s` for members to take their last message and, if the meeting failed, `late_s` for nodes
        that have not come yet.
        """
        self.name = name or nodes[0]
        self._nodes = {node: _Node(node) for node in nodes}
        self._uncertain = frozenset(uncertain)
        self._combine = dict(combine or {})
        self._handlers = dict(handlers or {})
        self._silence_s, self._farewell_s, self._late_s = silence_s, farewell_s, late_s
        self._lost_callbacks: list[Callable[[str], bool]] = []
        self._member_key = z85.decode(wire.curve_pair(key, "member")[0])

        self._routes: dict[bytes, _Node] = {}
        self._descriptors: dict[int, _Node] = {}
        self._points: dict[str, _Point] = {}
        self._met: set[str] = set()
        self._lost = self._left = 0
        self._abort: bytes | None = None
        self._abort_nodes: tuple[str, ...] = ()
        self._closing_since: float | None = None
        self._close_asked = False
        self._ticked = time.monotonic()

        _allow_open_files(len(nodes) + 256)
        self._context = zmq.Context[zmq.Socket[bytes]](io_threads=1 if len(nodes) <= _MANY_NODES else 2)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handled: deque[tuple[_Node, int, bytes]] = deque()
        self._questions: queue.SimpleQueue[tuple[_Node, int, str, Body] | None] = queue.SimpleQueue()
        try:
            # First of all: as long as nobody answers for ZAP, libzmq lets everyone in
            self._zap = self._context.socket(zmq.REP)
            self._zap.linger = 0
            self._zap.bind(_ZAP_ENDPOINT)
            self._router = wire.leader_socket(self._context, key, _ZAP_DOMAIN)
            self._router.router_mandatory = False
            self._router.monitor("inproc://monitor", zmq.EVENT_DISCONNECTED)
            self._monitor = self._context.socket(zmq.PAIR)
            self._monitor.linger = 0
            self._monitor.connect("inproc://monitor")
            self.port = _bind_first_free(self._router, bind_address, ports, self.name)
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._run, name="rendezvous-leader", daemon=True)
        self._workers = [
            threading.Thread(target=self._work, name=f"rendezvous-handler-{number}", daemon=True)
            for number in range(handler_threads if self._handlers else 0)
        ]
        for thread in (self._thread, *self._workers):
            thread.start()

    def __enter__(self) -> Self:
        """The leader itself: it already serves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def on_lost(self, callback: Callable[[str], bool]) -> None:
        """Have `callback(node)` called, in the leader's thread, when a node is lost; it must be quick.

        If any callback returns True the loss is tolerated: the meeting goes on without the node, which learns
        that it was given up should it ever come back. Otherwise the meeting ends and names it.
        """
        self._lost_callbacks.append(callback)

    def close(self) -> None:
        """End the meeting. Waits, within the limits given, until members have what is meant for them."""
        if self._close_asked:
            return
        self._close_asked = True
        self._poke()
        for _ in self._workers:
            self._questions.put(None)
        self._thread.join(self._farewell_s + self._late_s + 2.0)
        if not self._thread.is_alive():  # else a callback hangs: leave it to the end of the process
            self._context.term()
            for worker in self._workers:
                worker.join(0.2)
            if not any(worker.is_alive() for worker in self._workers):
                os.close(self._wake)

    # The rest runs in the leader's thread, but for _work and _poke.

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._wake, self._monitor, self._zap, self._router):
                poller.register(source, zmq.POLLIN)
            while not self._finished():
                poller.poll(self._poll_ms())
                self._step()
        except Exception as error:  # noqa: BLE001  a fault here must reach everybody as a message, not as silence
            self._end(f"{self.name}: fault in the rendezvous: {one_line(error)}", (self.name,))
        finally:
            self._router.disable_monitor()
            self._monitor.close(0)
            self._zap.close(0)
            self._router.close(_LINGER_MS)

    def _step(self) -> None:
        """Take what has come. The monitor first: a descriptor that it calls closed may be in use again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._monitor.poll(0):
            (event, *_) = self._monitor.recv_multipart()
            node = self._descriptors.pop(struct.unpack("=hi", event)[1], None)
            if node is not None:
                node.socket_fd, node.broken_since = -1, time.monotonic()
        for _ in range(_BATCH):
            if not self._zap.poll(0):
                break
            self._authenticate()
        for _ in range(_BATCH):
            if not self._receive():
                break
        while self._handled:
            node, request, data = self._handled.popleft()
            self._answer(node, request, data)
        self._tick(time.monotonic())

    def _authenticate(self) -> None:
        """Answer one request of libzmq's (ZAP, https://rfc.zeromq.org/spec/27/): is this client key ours?"""
        version, request, domain, _address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        welcome = domain == _ZAP_DOMAIN and mechanism == b"CURVE" and credentials == [self._member_key]
        status = [b"200", b"OK"] if welcome else [b"400", b"not a member"]
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _receive(self) -> bool:
        try:
            route = self._router.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        frame = self._router.recv(copy=False)
        frames = 1
        while self._router.rcvmore:
            self._router.recv(copy=False)
            frames += 1
        data = frame.bytes if frames == 1 else b""
        try:
            node, message = self._identify(route, data, str(frame.get("Peer-Address")))
        except PeerError as error:
            self._end(one_line(error), error.nodes)
            if self._abort is not None:
                self._router.send_multipart([route, self._abort], zmq.NOBLOCK)
            return True
        if route not in self._routes:
            self._connected(node, route, message["run"], int(frame.get(zmq.SRCFD)))
        self._take(node, message)
        return True

    def _identify(self, route: bytes, data: bytes, address: str) -> tuple[_Node, wire.Message]:
        """Whose message this is, and what it says. Raises PeerError for one that must not be."""
        known = self._routes.get(route)
        try:
            message = wire.decode(data, wire.FROM_MEMBER)
        except ValueError as error:
            sender = known.name if known else f"a peer at {address}"
            raise PeerError(
                f"{sender} sent a malformed message ({error}): is beeond-ctl the same on all nodes?",
                (known.name,) if known else (),
            ) from error
        node = self._nodes.get(message["node"])
        if node is None:
            raise PeerError(f"{message['node'][:64]!r} at {address} came, but is not a node of this job")
        if node.run and node.run != message["run"]:
            raise PeerError(
                f"{node.name} came twice: two processes there think they are this job's", (node.name,)
            )
        return node, message

    def _connected(self, node: _Node, route: bytes, run: str, socket_fd: int) -> None:
        node.resend = node.route is not None
        node.run, node.route, node.broken_since = run, route, None
        self._descriptors.pop(node.socket_fd, None)
        node.socket_fd = socket_fd
        self._routes[route] = self._descriptors[socket_fd] = node

    def _take(self, node: _Node, message: wire.Message) -> None:
        node.seen = time.monotonic()
        kind = message["type"]
        if node.lost:
            text = f"{node.name} was given up after it had not been heard from for {self._silence_s:g} s"
            self._send(node, wire.encode("abort", message=text, nodes=[node.name], user_fault=False))
        elif kind == "bye":
            self._leave(node)
        elif kind == "beat":
            self._beat(node, message)
        elif self._is_new(node, message["id"]):
            if kind == "fail":
                text = f"{node.name}: {message['message']}"
                blamed = () if message["nobody"] else (node.name,)
                self._end(text, blamed, user_fault=message["user_fault"])
            if self._abort is not None:
                self._send(node, self._abort)
            elif kind == "meet":
                self._come(node, message)
            else:
                self._questions_put(node, message)
        if self._closing_since is not None and not node.left:
            self._send(node, wire.encode("closing"))

    def _is_new(self, node: _Node, request: int) -> bool:
        """Whether to act on `request`: not if it is a copy of one that was, or is no longer wanted."""
        if request in node.answers or (request <= node.last and request not in node.open):
            return False
        node.answers[request] = None
        return True

    def _beat(self, node: _Node, message: wire.Message) -> None:
        if self._abort is not None:
            self._send(node, self._abort)
        if message["last"] >= node.last:  # else it was overtaken on a newer connection
            node.last, node.open = message["last"], frozenset(message["open"])
            done = [request for request in node.answers if request <= node.last and request not in node.open]
            for request in done:
                del node.answers[request]
            if node.resend:
                node.resend = False
                for data in node.answers.values():
                    if data is not None:
                        self._send(node, data)
        missing = [request for request in message["open"] if request not in node.answers]
        self._send(node, wire.encode("alive", missing=missing))

    def _come(self, node: _Node, message: wire.Message) -> None:
        name = message["point"]
        point = self._points.get(name)
        if name in self._met or (point and node.name in point.reports):
            self._end(f"{node.name} came to {name!r} twice", (node.name,))
            return
        now = time.monotonic()
        if point is None:
            point = self._points[name] = _Point(now + message["timeout_s"], message["timeout_s"])
        elif now + message["timeout_s"] < point.deadline:
            point.deadline, point.timeout_s = now + message["timeout_s"], message["timeout_s"]
        point.reports[node.name], point.requests[node.name] = message["report"], message["id"]
        node.point = name
        self._complete(name, point)

    def _complete(self, name: str, point: _Point) -> None:
        """Release `name` if everybody has come to it; end the meeting if somebody who left never will."""
        if self._abort is not None:
            return
        if len(point.reports) + self._lost < len(self._nodes) and not self._left:
            return
        away = [node for node in self._nodes.values() if not node.lost and node.name not in point.reports]
        gone = tuple(node.name for node in away if node.left)
        if gone:
            self._end(f"{wire.fold(gone)} left before {name!r}", gone)
        if away:
            return
        try:
            reports = {node: point.reports[node] for node in self._nodes if node in point.reports}
            combine = self._combine.get(name)
            body = wire.encode_body(combine(reports) if combine else {})
        except Exception as error:  # noqa: BLE001  whatever it is, everybody has to learn of it
            message, nodes = _blame(error, self.name, f"{self.name}: at {name!r}")
            self._end(message, nodes, user_fault=_is_user_fault(error))
            return
        del self._points[name]
        self._met.add(name)
        for member, request in point.requests.items():
            self._answer(self._nodes[member], request, wire.answer(request, body))

    def _answer(self, node: _Node, request: int, data: bytes) -> None:
        if request in node.answers:
            node.answers[request] = data
            self._send(node, data)

    def _questions_put(self, node: _Node, message: wire.Message) -> None:
        if message["kind"] in self._handlers and not self._close_asked:
            self._questions.put((node, message["id"], message["kind"], message["payload"]))
            return
        text = "has ended the meeting" if self._close_asked else f"cannot answer {message['kind'][:40]!r}"
        refusal = _refusal(message["id"], f"{self.name} {text}", (self.name,))
        self._answer(node, message["id"], refusal)

    def _leave(self, node: _Node) -> None:
        if node.left:
            return
        node.left = True
        self._left += 1
        node.answers.clear()
        for name, point in list(self._points.items()):
            if node.name not in point.reports:
                self._end(f"{node.name} left before {name!r}", (node.name,))

    def _end(self, message: str, nodes: tuple[str, ...], *, user_fault: bool = False) -> None:
        """End the meeting for everybody, unless it has ended: the first cause is the one that is told."""
        if self._abort is not None:
            return
        text = message[:_MAX_TEXT]
        self._abort = wire.encode("abort", message=text, nodes=list(nodes), user_fault=user_fault)
        self._abort_nodes = nodes
        self._points.clear()
        for node in self._nodes.values():
            if not node.left:
                self._send(node, self._abort)

    def _send(self, node: _Node, data: bytes) -> None:
        if node.route is not None:
            self._router.send_multipart([node.route, data], zmq.NOBLOCK)  # to a closed connection: dropped

    def _tick(self, now: float) -> None:
        if self._close_asked and self._closing_since is None:
            self._begin_to_close(now)
        if now - self._ticked < TICK_S:
            if any(point.deadline <= now for point in self._points.values()):
                self._check_deadlines(now)
            return
        pause = now - self._ticked - TICK_S
        self._ticked = now
        if pause > _PAUSE_S:  # we were stopped or busy ourselves: what came meanwhile is still to be read
            for node in self._nodes.values():
                node.seen += pause
                if node.broken_since is not None:
                    node.broken_since += pause
            return
        self._check_deadlines(now)
        if self._abort is None and self._closing_since is None:
            self._check_liveness(now)

    def _check_liveness(self, now: float) -> None:
        for node in self._nodes.values():
            if node.route is None or node.left or node.lost:
                continue
            if now - node.seen > self._silence_s:
                why = f"has not been heard from for {self._silence_s:g} s: stopped, overloaded, or down"
            elif node.broken_since is not None and now - node.broken_since > min(BROKEN_S, self._silence_s):
                why = "closed its connection: its process was killed, or the node is down"
            else:
                continue
            verdicts = [callback(node.name) for callback in self._lost_callbacks]  # all of them are told
            if any(verdicts):
                self._give_up(node)
            elif self._hears_nobody(now):
                text = f"{self.name} hears none of the other nodes, for {self._silence_s:g} s: is its network down?"
                self._end(text, (self.name,))
                return
            else:
                self._end(f"{node.name} {why}", (node.name,))
                return

    def _hears_nobody(self, now: float) -> bool:
        """Whether several other nodes fell silent at once: then it is this one that is cut off."""
        since_s = self._silence_s - 2 * BEAT_S
        others = [
            each for each in self._nodes.values() if each.route and not each.left and each.name != self.name
        ]
        return len(others) > 1 and since_s > 0 and all(now - each.seen > since_s for each in others)

    def _was_never_reached(self) -> bool:
        """Whether none of several other nodes ever came: then it is this one that is most likely at fault."""
        others = [each for each in self._nodes.values() if each.name not in {self.name, *self._uncertain}]
        return len(others) > 1 and all(each.route is None for each in others)

    def _give_up(self, node: _Node) -> None:
        node.lost = True
        self._lost += 1
        for name, point in list(self._points.items()):
            point.reports.pop(node.name, None)  # the rest shall not wait, or fail, where only it has come
            point.requests.pop(node.name, None)
            if point.reports:
                self._complete(name, point)
            else:
                self._points.pop(name, None)

    def _check_deadlines(self, now: float) -> None:
        for name, point in list(self._points.items()):
            if point.deadline > now:
                continue
            if self._was_never_reached():
                text = f"none of the other nodes has ever reached {self.name} port {self.port}, within"
                text += f" {point.timeout_s:.3g} s to {name!r}: is its network up, a firewall in between, its"
                text += " address right, are its site secret and network.ports those of the others?"
                text += " Or are they all down?"
                self._end(text, (self.name,))
                return
            away = [node for node in self._nodes.values() if node.name not in point.reports and not node.lost]
            names = tuple(node.name for node in away)
            text = f"{wire.fold(names)} did not come to {name!r} within {point.timeout_s:.3g} s"
            if never := [node.name for node in away if node.route is None]:
                text += f"; {wire.fold(never)} never reached {self.name} port {self.port}: is the Prolog or"
                text += " Epilog running there, is a firewall in between, is the site secret the same?"
                if len(self._nodes) == 2:  # of two it cannot be told
                    text += f" Or is it {self.name} that cannot be reached?"
            for last in sorted({node.point for node in away if node.route is not None}):
                there = wire.fold(node.name for node in away if node.route is not None and node.point == last)
                text += f"; {there} got no further than {last or 'the start'!r}"
            self._end(text, names)
            return

    def _begin_to_close(self, now: float) -> None:
        self._closing_since = now
        for name in self._points:
            self._end(f"{self.name} left before {name!r}", (self.name,))
            break
        closing = wire.encode("closing")
        for node in self._nodes.values():
            if node.left or node.lost:
                continue
            for request, data in node.answers.items():
                if data is None and self._abort is None:  # else they were told why: this would hide it
                    self._send(node, _refusal(request, f"{self.name} has ended the meeting", (self.name,)))
            self._send(node, closing)

    def _finished(self) -> bool:
        since = self._closing_since
        if since is None:
            return False
        waited = time.monotonic() - since
        for node in self._nodes.values():
            if node.left or node.lost or node.broken_since is not None:
                continue
            if node.route is not None:
                patience = self._farewell_s
            else:  # it is worth waiting only for somebody who would wait for us, and can still come
                patience = self._late_s if self._abort and node.name not in self._abort_nodes else 0.0
            if waited < patience:
                return False
        return True

    def _poll_ms(self) -> int:
        now = time.monotonic()
        due = min((point.deadline for point in self._points.values()), default=now + TICK_S)
        return int(max(0.0, min(due - now, TICK_S)) * 1000) + 1

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            node, request, kind, payload = question
            try:
                data = wire.answer(request, wire.encode_body(self._handlers[kind](node.name, payload)))
            except Exception as error:  # noqa: BLE001  it belongs to who asked
                message, nodes = _blame(error, self.name, f"{self.name}: {kind!r}")
                data = _refusal(request, message, nodes, user_fault=_is_user_fault(error))
            self._handled.append((node, request, data))
            self._poke()

    def _poke(self) -> None:
        os.eventfd_write(self._wake, 1)


def _refusal(request: int, message: str, nodes: tuple[str, ...], *, user_fault: bool = False) -> bytes:
    text = message[:_MAX_TEXT]
    return wire.encode("refusal", id=request, message=text, nodes=list(nodes), user_fault=user_fault)


def _blame(error: Exception, leader: str, prefix: str) -> tuple[str, tuple[str, ...]]:
    if isinstance(error, PeerError):
        return one_line(error), error.nodes
    return f"{prefix}: {one_line(error)}", (leader,)


def _is_user_fault(error: Exception) -> bool:
    return isinstance(error, UserError) or (isinstance(error, PeerError) and error.user_fault)


def _bind_first_free(socket: zmq.Socket[bytes], address: str, ports: Sequence[int], name: str) -> int:
    for port in ports:
        try:
            socket.bind(wire.host_port(address, port))
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise NodeError(
                    f"{name}: cannot listen on {address} port {port} for the rendezvous: {error.strerror}"
                ) from error
        else:
            return port
    if users := listeners.strangers(ports):  # anybody can reckon which they are
        raise OutsideError(f"{name}: no port is left for the rendezvous ({users}); see why (ss -ltnp)")
    listed = ", ".join(str(port) for port in ports)
    whose = f" by processes of {', '.join(owners)}" if (owners := listeners.users(ports)) else ""
    raise NodeError(
        f"{name}: all ports of the rendezvous are taken{whose} ({listed}): give it more, or others"
    )


def _allow_open_files(needed: int) -> None:
    """Raise the soft limit if one connection for each node would not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
