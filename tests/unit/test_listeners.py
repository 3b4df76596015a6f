"""Who listens on a port: as the kernel answers, and as its tables say where it does not."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing

import pytest

from beeond_ctl import listeners
from beeond_ctl.listeners import listens, strangers, users

INIT = 1


@pytest.fixture(params=["asked", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to know it."""

    def refuse(_port: int) -> set[int]:
        raise PermissionError

    if request.param == "read":
        monkeypatch.setattr(listeners, "_asked", refuse)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
)
def test_a_process_listens_on_its_own_port_alone(family: socket.AddressFamily, address: str) -> None:
    with closing(socket.create_server((address, 0), family=family)) as server:
        port = server.getsockname()[1]
        assert listens(os.getpid(), port)
        assert not listens(INIT, port)
    assert not listens(os.getpid(), port)


@pytest.mark.usefixtures("way")
def test_a_port_that_is_connected_or_only_bound_is_not_listened_on() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as client,
        closing(socket.socket()) as bound,
    ):
        bound.bind(("127.0.0.1", 0))
        assert not listens(os.getpid(), client.getsockname()[1])
        assert not listens(os.getpid(), bound.getsockname()[1])


@pytest.mark.usefixtures("way")
def test_many_that_listen_on_one_port_are_all_looked_at() -> None:
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        first.listen()
        second.listen()
        port = first.getsockname()[1]
        first.close()
        assert listens(os.getpid(), port)


@pytest.mark.root
def test_whoever_listens_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as own:
        os.seteuid(65534)
        try:
            other = socket.create_server(("127.0.0.1", 0))
        finally:
            os.seteuid(0)
        with closing(other):
            ports = [each.getsockname()[1] for each in (own, other)]
            assert users(ports) == ["nobody", "root"]
    assert users(ports) == []


def test_the_kernel_answers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_read", lambda _pid, _port: set())
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        assert listens(os.getpid(), server.getsockname()[1])


def test_what_the_kernel_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_SOCK_DIAG_BY_FAMILY", 9999)
    with pytest.raises(OSError, match="Invalid argument"):
        listeners._asked(1)


def test_a_kernel_without_the_part_that_answers_is_not_taken_for_one_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "IPPROTO_TCP", 255)  # a protocol that nobody answers for, as without tcp_diag
    with pytest.raises(FileNotFoundError):
        listeners._asked(1)
    monkeypatch.undo()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(socket, "IPPROTO_TCP", 255)
        assert listens(os.getpid(), port)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["listening", "connected", "datagrams"])
def test_whoever_has_a_port_is_named_whether_he_listens_or_not(kind: str) -> None:
    with ExitStack() as stack:
        away = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        os.seteuid(65534)
        try:
            sort = socket.SOCK_DGRAM if kind == "datagrams" else socket.SOCK_STREAM
            other = stack.enter_context(socket.socket(socket.AF_INET, sort))
        finally:
            os.seteuid(0)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if kind == "listening":
            other.listen()
        elif kind == "connected":
            other.connect(away.getsockname())
        assert users([port]) == ["nobody"]
        assert strangers([port, away.getsockname()[1]]) == f"nobody has port {port}"
    assert strangers([port]) == ""
