"""A node's side of a meeting: it comes to points, asks the leader, and tells when it fails.

One thread owns the connection and says every second that this node is alive, whatever the others do; any
thread may call the public functions. A process that cannot reach the leader, or loses it, learns so by name.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import zmq

from beeond_ctl.errors import NodeError, OutsideError, PeerError, UserError, one_line
from beeond_ctl.rendezvous import wire
from beeond_ctl.rendezvous.leader import BEAT_S, BROKEN_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    Body = dict[str, Any]

_GRACE_S = 1.0  # the leader, which knows who is missing, shall be the first to see a deadline pass
_PAUSE_S = 1.0
_LINGER_MS = 1000
_MIN_RETRY_S, _MAX_RETRY_S = 0.02, 0.5
_RETRY_SHARE = 0.25  # of the time waited so far: a late leader is found with little further delay
_STRANGER_RETRY_S = 1.0  # they shall not be bothered
_EVENTS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_BEAT, _BYE = 0, -1  # in the outbox, besides the numbers of requests


@dataclass(slots=True)
class _Request:
    kind: str
    fields: dict[str, Any]
    deadline: float
    body: Body | None = None
    error: PeerError | None = None


@dataclass(slots=True)
class _Port:
    """One place where the leader may be.

    Each attempt has a socket of its own: disconnect() on a shared one may cut another, good connection, for libzmq
    (4.3.5) keeps a pointer to each session that ended by itself, and its memory is used again.
    """

    number: int
    endpoint: str
    key: bytes
    retry_at: float = 0.0  # matters while there is no socket
    state: str = "no answer"
    socket: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = wire.member_socket(context, self.key)
        self.socket.ipv6 = "[" in self.endpoint
        self.monitor = self.socket.get_monitor_socket(int(_EVENTS))
        self.monitor.linger = 0
        self.socket.connect(self.endpoint)

    def close(self, linger_ms: int = 0) -> None:
        if self.socket is not None:
            self.socket.disable_monitor()
            self.socket.close(linger_ms)
        if self.monitor is not None:
            self.monitor.close(0)
        self.socket = self.monitor = None


class Member:
    """Takes part in a meeting as `node`; connects by itself, as soon as the leader is there.

    Leaving the context by an exception tells the others, as `fail` does. A fork without exec must not touch it.
    """

    def __init__(
        self,
        key: bytes,
        node: str,
        leader_host: str,
        ports: Sequence[int],
        *,
        leader: str | None = None,
        silence_s: float = 10.0,
        other_keys: Sequence[bytes] = (),
    ) -> None:
        """`leader_host` is a name or address; `leader`, its node name, is for messages (default: the host).

        The leader has `key` or one of `other_keys`, while the site's secret is being rotated.
        A leader that was in contact and is not heard from for `silence_s` is lost.
        """
        self.node = node
        self._host, self._ports = leader_host, list(ports)
        self._leader = leader or leader_host
        self._silence_s = silence_s
        self._sender = {"node": node, "run": secrets.token_hex(8)}

        self._changed = threading.Condition()  # guards what follows
        self._over: PeerError | None = None
        self._open: dict[int, _Request] = {}
        self._last = 0
        self._contact = False
        self._closed = False
        self._outbox: deque[int] = deque()
        self._trouble = ""  # why the host's name is of no use

        # of the thread
        self._candidates: list[_Port] = []
        self._up: zmq.Socket[bytes] | None = None  # what the leader answered on
        self._began = self._heard = self._ticked = time.monotonic()
        self._beat_at = 0.0
        self._broken_since: float | None = None

        self._keys = (key, *other_keys)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="rendezvous-member", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """The member itself: it is already trying to reach the leader."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        """Tell the others of `error`, if that is not what they already know, and leave."""
        if error is not None and not isinstance(error, PeerError):
            nobody = isinstance(error, OutsideError)
            self.fail(one_line(error), user_fault=isinstance(error, UserError), nobody=nobody)
        self.close()

    def meet(self, point: str, report: Body, timeout_s: float) -> Body:
        """Wait until every node has come to `point`; returns what the leader made of all reports.

        A point is met at once in a meeting. The earliest deadline of the nodes that have come counts. Raises
        PeerError naming the nodes that failed, did not come or were lost (at once if that is already known),
        or the leader if it cannot be reached; NodeError if the report is too large.
        """
        return self._call("meet", {"point": point, "report": report}, timeout_s)

    def ask(self, kind: str, payload: Body, timeout_s: float) -> Body:
        """The answer of the leader's handler for `kind`. Any number of threads may ask at the same time.

        The handler runs at most once, exactly once if there is an answer. Raises PeerError when it failed,
        did not answer in time, or the meeting ended; NodeError if the payload is too large.
        """
        return self._call("ask", {"kind": kind, "payload": payload}, timeout_s)

    def fail(self, message: str, *, user_fault: bool, nobody: bool = False, timeout_s: float = 5.0) -> None:
        """Tell everybody that this node failed and why; returns when they are told, or after `timeout_s`.

        `nobody`: neither this node nor the user is at fault.
        """
        # PeerError: our own failure, come back as everybody's, or there is nobody to tell
        with contextlib.suppress(PeerError):
            fields = {"message": message[:65536], "user_fault": user_fault}
            fields |= {"nobody": True} if nobody else {}  # releases before this field refuse it
            self._call("fail", fields, timeout_s)

    def check(self) -> None:
        """Raise PeerError if the meeting has failed; cheap, for loops that wait for something else."""
        with self._changed:
            self._raise_if_over()

    def close(self) -> None:
        """Leave. Bounded by about two seconds, whatever the network does."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._outbox.append(_BYE)
        self._poke()
        self._thread.join(_LINGER_MS / 1000 + 1.0)
        if not self._thread.is_alive():  # else the resolver hangs: leave it to the end of the process
            os.close(self._wake)

    def _call(self, kind: str, fields: Body, timeout_s: float) -> Body:
        request = _Request(kind, fields, time.monotonic() + timeout_s)
        try:
            self._encode(1, request)
        except ValueError as error:
            raise NodeError(f"{self.node}: what it wants to tell {self._leader} {error}") from error
        with self._changed:
            self._raise_if_over()
            self._last += 1
            number = self._last
            self._open[number] = request
            self._outbox.append(number)
            self._poke()
            try:
                return self._await(request)
            finally:
                del self._open[number]

    def _await(self, request: _Request) -> Body:
        while True:
            if request.body is not None:
                return request.body
            if request.error is not None:
                raise request.error
            self._raise_if_over()
            patience = _GRACE_S if self._contact and request.kind == "meet" else 0.0
            remaining = request.deadline + patience - time.monotonic()
            if remaining <= 0:
                if not self._contact:
                    raise PeerError(self._unreached(), (self._leader,))
                what = {"meet": "point", "ask": "kind", "fail": "message"}[request.kind]
                raise PeerError(
                    f"{self._leader} did not answer {request.fields[what]!r} in time", (self._leader,)
                )
            self._changed.wait(remaining)

    def _raise_if_over(self) -> None:
        if self._over is not None:
            raise PeerError(str(self._over), self._over.nodes, user_fault=self._over.user_fault)
        if self._closed:
            raise PeerError(f"{self.node} has left the meeting", (self.node,))

    def _unreached(self) -> str:
        where = f"{self._host}:{','.join(str(port) for port in self._ports)}"
        states: dict[str, dict[str, None]] = {}
        for port in self._candidates:
            states.setdefault(port.state, {})[str(port.number)] = None
        why = self._trouble or "; ".join(f"{state} ({', '.join(ports)})" for state, ports in states.items())
        return f"leader {self._leader} was not reached at {where}: {why}; is its Prolog or Epilog running?"

    # The rest runs in the member's thread.

    def _run(self) -> None:
        try:
            while not self._closed and not self._candidates:
                self._resolve()
            while not (self._closed and (self._up is None or _BYE not in self._outbox)):
                self._connect_due()
                self._poll()
                self._step()
        except Exception as error:  # noqa: BLE001  whoever waits must learn of it
            self._finish(PeerError(f"{self.node}: fault in the rendezvous: {one_line(error)}", (self.node,)))
        finally:
            for port in self._candidates:
                port.close(_LINGER_MS)
            self._context.term()

    def _resolve(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self._trouble = f"its name cannot be resolved ({getattr(error, 'strerror', None) or error})"
            with self._changed:
                self._changed.wait_for(lambda: self._closed, 1.0)
            return
        # IPv4 first: a leader that listens on "*" has both where there are both
        addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
        address = str(addresses[0][4][0])
        self._trouble = ""
        self._candidates = [
            _Port(port, wire.host_port(address, port), key) for port in self._ports for key in self._keys
        ]

    def _connect_due(self) -> None:
        now = time.monotonic()
        for port in self._candidates:
            if port.socket is None and port.retry_at <= now:
                port.open(self._context)

    def _poll(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        due = [self._ticked + BEAT_S / 4]
        for port in self._candidates:
            if port.monitor is not None:
                poller.register(port.monitor, zmq.POLLIN)
            else:
                due.append(port.retry_at)
        if self._up is not None:
            poller.register(self._up, zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0))
            due.append(self._beat_at)
        poller.poll(max(0, int((min(due) - time.monotonic()) * 1000) + 1))

    def _step(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._up is not None and self._up.poll(0, zmq.POLLIN):
            self._take(self._up.recv_multipart())
        for port in list(self._candidates):
            while port.monitor is not None and port.monitor.poll(0):
                self._event(port, struct.unpack("=hi", port.monitor.recv_multipart()[0])[0])
        now = time.monotonic()
        self._tick(now)
        if self._up is not None and now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self._outbox.append(_BEAT)
        while self._outbox and self._up is not None and self._up.poll(0, zmq.POLLOUT):
            self._send_next(self._up)

    def _event(self, port: _Port, event: int) -> None:
        now = time.monotonic()
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected(port)
            return
        was_up = self._up is not None and self._up is port.socket
        if was_up:
            self._up, self._broken_since = None, now
        since = self._broken_since or self._began
        wait_s = min(max(_RETRY_SHARE * (now - since), _MIN_RETRY_S), _MAX_RETRY_S)
        if event == zmq.EVENT_CLOSED:
            port.state = "connection refused or no route"
        elif not was_up:
            port.state = "somebody else answers: another job's rendezvous, or the site secrets differ"
            wait_s = _STRANGER_RETRY_S
        port.retry_at = now + wait_s * random.uniform(0.75, 1.25)  # noqa: S311  spreads load
        port.close()

    def _connected(self, port: _Port) -> None:
        for other in self._candidates:
            if other is not port:
                other.close()
        self._candidates = [port]  # the leader stays where it is
        self._up, self._broken_since = port.socket, None
        self._beat_at = 0.0
        self._heard = time.monotonic()
        with self._changed:
            self._contact = True

    def _take(self, frames: list[bytes]) -> None:
        try:
            (data,) = frames
            message = wire.decode(data, wire.FROM_LEADER)
        except ValueError as error:
            self._finish(
                PeerError(
                    f"{self._leader} sent a malformed message ({error}):"
                    " is beeond-ctl the same on all nodes?",
                    (self._leader,),
                )
            )
            return
        self._heard = time.monotonic()
        kind = message["type"]
        if kind == "alive":
            with self._changed:
                self._outbox.extend(number for number in message["missing"] if number in self._open)
        elif kind == "abort":
            self._finish(_error(message))
        elif kind == "closing":
            with self._changed:
                self._outbox.append(_BYE)
            self._finish(PeerError(f"{self._leader} has ended the meeting", (self._leader,)))
        else:
            with self._changed:
                request = self._open.get(message["id"])
                if request is not None:
                    if kind == "answer":
                        request.body = message["body"]
                    else:
                        request.error = _error(message)
                    self._changed.notify_all()

    def _finish(self, error: PeerError) -> None:
        with self._changed:
            if self._over is None:
                self._over = error
                self._changed.notify_all()

    def _tick(self, now: float) -> None:
        pause = now - self._ticked - BEAT_S / 4
        self._ticked = now
        if pause > _PAUSE_S:  # we were stopped ourselves: the leader is not to blame
            self._heard += pause
            if self._broken_since is not None:
                self._broken_since += pause
        if not self._contact:
            return
        if now - self._heard > self._silence_s:
            why = f"has not been heard from for {self._silence_s:g} s: stopped, overloaded, or down"
        elif self._broken_since is not None and now - self._broken_since > min(BROKEN_S, self._silence_s):
            why = "closed its connection and does not come back: its process was killed, or the node is down"
        else:
            return
        self._finish(PeerError(f"leader {self._leader} {why}", (self._leader,)))

    def _send_next(self, to: zmq.Socket[bytes]) -> None:
        with self._changed:
            number = self._outbox.popleft()
            if number == _BEAT:
                data = wire.encode("beat", **self._sender, last=self._last, open=list(self._open))
            elif number == _BYE:
                data = wire.encode("bye", **self._sender)
            elif number in self._open:
                data = self._encode(number, self._open[number])
            else:
                return
        try:
            to.send(data, zmq.NOBLOCK)
        except zmq.Again:  # the connection broke since it was asked whether it takes more
            with self._changed:
                self._outbox.appendleft(number)

    def _encode(self, number: int, request: _Request) -> bytes:
        fields = dict(request.fields)
        if request.kind == "meet":  # what is left of it: the leader may have come late
            fields["timeout_s"] = max(0.001, request.deadline - time.monotonic())
        return wire.encode(request.kind, **self._sender, id=number, **fields)

    def _poke(self) -> None:
        os.eventfd_write(self._wake, 1)


def _error(message: wire.Message) -> PeerError:
    return PeerError(message["message"], tuple(message["nodes"]), user_fault=message["user_fault"])
