"""Who has a port, asked of the kernel so that it costs next to nothing: servers are looked at as they start.

/proc/net/tcp lists connections, too: for each read the kernel walks its whole table of these, which has half a million
rows on a machine of 48 GiB. That takes 6 ms, however few are in use; the question that ss(8) asks takes 0.1 ms. With
many nodes on one machine the difference was most of what their servers' start cost.
"""

from __future__ import annotations

import os
import pwd
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST_DUMP: Final = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_LISTENING: Final = 10
"""TCP_LISTEN of the kernel's states."""
_ANY_STATE: Final = 0xFFFFFFFF

_HEADER: Final = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence, port."""
_REQUEST: Final = struct.Struct("=BBBxI2s46s")
"""struct inet_diag_req_v2: family, protocol, extensions, states, source port in network order, rest of the id."""
_PORT: Final = struct.Struct("!H")
_OWNER: Final = struct.Struct("=II")
_PORT_OFFSET: Final = 4
_OWNER_OFFSET: Final = 64
"""Of idiag_sport, and of idiag_uid and idiag_inode, in struct inet_diag_msg."""


def listens(pid: int, port: int) -> bool:
    """Whether process `pid` itself listens on TCP `port`: a connection would also succeed to whoever took the port.

    The process has to be in this network namespace.
    """
    try:
        inodes = _asked(port)
    except OSError:  # a kernel without the module tcp_diag, or a policy against asking
        inodes = _read(pid, port)
    if not inodes:
        return False
    wanted = {f"socket:[{inode}]" for inode in inodes}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}") in wanted:
                    return True
    return False


def users(ports: Iterable[int]) -> list[str]:
    """Whose processes have one of `ports`, by name; nobody's where the kernel does not say."""
    return sorted({_name(uid) for uids in _holders(ports).values() for uid in uids})


def strangers(ports: Iterable[int]) -> str:
    """Which users, that is not root, have which of `ports`, to be told; empty if none is seen to."""
    found: dict[str, list[str]] = {}
    for port, uids in sorted(_holders(ports).items()):
        for uid in uids - {0}:
            found.setdefault(_name(uid), []).append(str(port))
    return ", ".join(f"{user} has port {'+'.join(taken)}" for user, taken in found.items())


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _holders(ports: Iterable[int]) -> dict[int, set[int]]:
    """The users whose sockets are bound to `ports`, TCP or UDP, whether they listen or not.

    Linux before 6.8 does not show TCP sockets that are bound, and neither listen nor are connected.
    """
    wanted, found = set(ports), dict[int, set[int]]()
    with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
            for family in (socket.AF_INET, socket.AF_INET6):
                _ask(kernel, family, protocol, _ANY_STATE)
                for port, uid, _ in _sockets(kernel):
                    if port in wanted:
                        found.setdefault(port, set()).add(uid)
    return found


def _asked(port: int) -> set[int]:
    """Inodes of the sockets that listen on `port`, by sock_diag(7). Raises OSError."""
    found: set[int] = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            _ask(kernel, family, socket.IPPROTO_TCP, 1 << _LISTENING, port)
            found.update(inode for _, _, inode in _sockets(kernel))
    return found


def _ask(kernel: socket.socket, family: int, protocol: int, states: int, port: int = 0) -> None:
    """Ask for sockets in `states`, a set of bits; of any port, if none is given. Raises OSError."""
    request = _REQUEST.pack(family, protocol, 0, states, struct.pack("!H", port), b"")
    length = _HEADER.size + len(request)
    kernel.send(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 0, 0) + request)


def _sockets(kernel: socket.socket) -> Iterator[tuple[int, int, int]]:
    """Local port, user and inode of each socket in the answer to one request. Raises OSError."""
    while True:
        answer = kernel.recv(1 << 16)
        start = 0
        while start < len(answer):
            length, kind = _HEADER.unpack_from(answer, start)[:2]
            if kind in {
                _NLMSG_DONE,
                _NLMSG_ERROR,
            }:  # who has no part of the kernel for this may end it in good order
                code = struct.unpack_from("=i", answer, start + _HEADER.size)[0]
                if code:
                    raise OSError(-code, os.strerror(-code))
                return
            (port,) = _PORT.unpack_from(answer, start + _HEADER.size + _PORT_OFFSET)
            uid, inode = _OWNER.unpack_from(answer, start + _HEADER.size + _OWNER_OFFSET)
            yield port, uid, inode
            start += (length + 3) & ~3


def _read(pid: int, port: int) -> set[int]:
    """The same, read from the tables of the network that process `pid` is in."""
    found: set[int] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as lines:
            for line in lines:  # proc_net_tcp.rst in Linux's documentation; listening sockets come first
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(int(fields[9]))
    return found
