"""What goes over the wire: messages, their limits, and sockets that only holders of the key can use.

A message is one frame of JSON. Everything is checked when it is read, although only authenticated peers get
this far: another release of this program on one node must end in a clear message, not in a hang. Knows
nothing of what the messages mean.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import zmq
from zmq.utils import z85

from beeond_ctl.keys import derive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

VERSION = 1
MAX_BYTES = 16 * 1024 * 1024
"""The largest message. libzmq cuts off at twice that: the sender of one in between can still be named."""

Message = dict[str, Any]

_HANDSHAKE_MS = 10_000
_CONNECT_MS = 3_000
_BACKLOG = 4096


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind  # not isinstance: True is not a number here


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(type(item) is kind for item in value)


def _positive(value: object) -> bool:
    return type(value) is float and 0 < value < 1e9


_SENDER = {"node": _is(str), "run": _is(str)}
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    # from a member; `run` tells one process of a node from another, `id` numbers its requests from 1
    "meet": _SENDER | {"id": _is(int), "point": _is(str), "timeout_s": _positive, "report": _is(dict)},
    "ask": _SENDER | {"id": _is(int), "kind": _is(str), "payload": _is(dict)},
    "fail": _SENDER | {"id": _is(int), "message": _is(str), "user_fault": _is(bool), "nobody": _is(bool)},
    "beat": _SENDER | {"last": _is(int), "open": _list_of(int)},
    "bye": _SENDER,
    # from the leader; `alive` answers `beat` and lists the requests that never arrived
    "answer": {"id": _is(int), "body": _is(dict)},
    "refusal": {"id": _is(int), "message": _is(str), "nodes": _list_of(str), "user_fault": _is(bool)},
    "abort": {"message": _is(str), "nodes": _list_of(str), "user_fault": _is(bool)},
    "alive": {"missing": _list_of(int)},
    "closing": {},
}
FROM_MEMBER = frozenset({"meet", "ask", "fail", "beat", "bye"})
FROM_LEADER = frozenset(_FIELDS) - FROM_MEMBER


def encode(kind: str, /, **fields: object) -> bytes:
    """A message of `kind`. Raises ValueError when it is larger than `MAX_BYTES` or not JSON."""
    return _limited({"v": VERSION, "type": kind, **fields})


def encode_body(body: dict[str, Any]) -> bytes:
    """The body of an answer that goes to many, encoded once. Raises as `encode`."""
    return _limited(body)


def answer(request: int, body: bytes) -> bytes:
    """The answer to one request, with a body from `encode_body`."""
    return b'{"v":%d,"type":"answer","id":%d,"body":%b}' % (VERSION, request, body)


def _limited(value: Message) -> bytes:
    try:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, RecursionError) as error:
        raise ValueError(f"cannot be sent as JSON: {error}") from error
    if len(data) > MAX_BYTES - 256:  # room for what `answer` puts around a body
        raise ValueError(f"{len(data)} bytes are more than a message may have ({MAX_BYTES})")
    return data


def decode(data: bytes, allowed: Iterable[str]) -> Message:
    """The message in `data`. Raises ValueError, saying what is wrong, unless it is one of `allowed`."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, more than {MAX_BYTES}")
    try:
        message = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if type(message) is not dict:
        raise ValueError("not an object")
    if message.pop("v", None) != VERSION:
        raise ValueError(f"not protocol version {VERSION}")
    kind = message.get("type")
    if type(kind) is not str or kind not in allowed:
        raise ValueError(f"unexpected type {str(kind)[:40]!r}")
    fields = _FIELDS[kind]
    if kind == "fail":
        message.setdefault("nobody", False)
    if len(message) != len(fields) + 1:
        raise ValueError(f"wrong fields in {kind!r}")
    for name, fits in fields.items():
        if name not in message or not fits(message[name]):
            raise ValueError(f"{name!r} of {kind!r} is missing or malformed")
    return message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def curve_pair(key: bytes, side: str) -> tuple[bytes, bytes]:
    """Public and secret CURVE key (Z85) of `side`, "leader" or "member": who has `key` can make both."""
    secret = z85.encode(derive(key, f"curve {side}"))
    return zmq.curve_public(secret), secret


def leader_socket(context: zmq.Context[zmq.Socket[bytes]], key: bytes, domain: bytes) -> zmq.Socket[bytes]:
    """An unbound ROUTER that talks CURVE, and only to clients that the ZAP handler of `domain` lets in."""
    socket = context.socket(zmq.ROUTER)
    socket.curve_secretkey = curve_pair(key, "leader")[1]
    socket.curve_server = True
    socket.zap_domain = domain
    socket.zap_enforce_domain = True
    socket.ipv6 = True  # "*" then means both; libzmq falls back where the kernel has no IPv6
    socket.backlog = _BACKLOG
    _limit(socket)
    return socket


def member_socket(context: zmq.Context[zmq.Socket[bytes]], key: bytes) -> zmq.Socket[bytes]:
    """An unconnected DEALER that sends to nobody but a leader with the same key.

    IMMEDIATE: a message is queued only on a connection whose handshake has succeeded (libzmq >= 4.3.3,
    measured), so it may be connected to a port that belongs to somebody else. It never reconnects by itself:
    libzmq would try again 1000/RECONNECT_IVL times a second where a connection is accepted and then refused,
    and never where the other side is not ZeroMQ (both measured with 4.3.5).
    """
    socket = context.socket(zmq.DEALER)
    socket.curve_publickey, socket.curve_secretkey = curve_pair(key, "member")
    socket.curve_serverkey = curve_pair(key, "leader")[0]
    socket.immediate = True
    socket.reconnect_ivl = -1
    socket.connect_timeout = _CONNECT_MS
    _limit(socket)
    return socket


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.maxmsgsize = 2 * MAX_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.sndhwm = socket.rcvhwm = 0  # nothing is dropped silently; silence ends a meeting before it grows


def host_port(host: str, port: int) -> str:
    """The endpoint of `port` on `host`, an address or "*"."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def fold(nodes: Iterable[str]) -> str:
    """Node names as Slurm writes them: `n[1-3]`."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet  # 15 ms, needed for messages only

    return str(NodeSet.fromlist(list(nodes), resolver=RESOLVER_NOGROUP))
