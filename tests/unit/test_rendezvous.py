"""The nodes of a job meet, over real sockets, and whoever is at fault is named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from beeond_ctl import rendezvous
from beeond_ctl.errors import NodeError, OutsideError, PeerError, UserError
from beeond_ctl.keys import derive
from beeond_ctl.rendezvous import MAX_BYTES, Member, wire
from beeond_ctl.rendezvous import member as members
from beeond_ctl.rendezvous.leader import BROKEN_S
from tests.testbed.host import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Result = TypeVar("Result")

HOST = "127.0.0.1"
KEY = derive(b"s" * 32, "rendezvous 7 0 prolog")
OTHER_JOB = derive(b"s" * 32, "rendezvous 8 0 prolog")
LONG_S = 80.0  # a deadline that no test reaches: what shall happen at once happens long before
AT_ONCE_S = 20.0
AT_ONCE_MS = 20_000
SILENCE_S = 5.0  # more than a busy machine keeps a process waiting
N3 = ["n1", "n2", "n3"]

Leader = partial(rendezvous.Leader, silence_s=LONG_S, farewell_s=LONG_S, late_s=LONG_S)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture(autouse=True)
def leaders_see_deadlines_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(members, "_GRACE_S", LONG_S)


def start(function: Callable[..., Result], *arguments: Any, **options: Any) -> Future[Result]:
    """Call `function` in a thread of its own; its result or exception is the future's."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **options))
        except BaseException as error:  # noqa: BLE001  it belongs to who waits for the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(condition: Callable[[], bool], what: str) -> None:
    wait_until(what, lambda: (condition(), ""), 20, 0.005)


@contextmanager
def at_once() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < AT_ONCE_S


def member(node: str, ports: Sequence[int], **options: Any) -> Member:
    return Member(KEY, node, HOST, ports, leader="n1", **{"silence_s": LONG_S, **options})


def come(node: str, ports: Sequence[int], *points: str, timeout_s: float = LONG_S) -> list[dict[str, Any]]:
    with member(node, ports) as me:
        if timeout_s < LONG_S:  # which is not for finding the leader
            until(lambda: me._contact, f"{node} finds the leader")
        return [me.meet(point, {"from": node}, timeout_s) for point in points]


def tried(me: Member, state: str) -> bool:
    """Whether that has come of each way to the leader."""
    return bool(me._candidates) and all(state in port.state for port in me._candidates)


def failure(future: Future[Any]) -> PeerError:
    error = future.exception(LONG_S)
    assert isinstance(error, PeerError), error
    return error


NODE = """
import sys, time
from beeond_ctl.errors import PeerError
from beeond_ctl.rendezvous import Leader, Member
role, node, silence_s, points, *ports = sys.argv[1:]
ports = [int(port) for port in ports]
key = bytes.fromhex(sys.stdin.readline())
nodes = ["n1", "n2", "n3"]
if "leader" in role:
    leader = Leader(key, nodes, ports, silence_s=float(silence_s))
    print("serves", flush=True)
with Member(key, node, "127.0.0.1", ports, leader="n1", silence_s=float(silence_s)) as me:
    for point in points.split(","):
        try:
            me.meet(point, {}, 60)
        except PeerError as error:
            print("error", error, flush=True)
            break
        print("met", point, flush=True)
    if "stay" in role:
        sys.stdin.readline()
if "leader" in role:
    leader.close()
"""


class Process:
    """A node in a process of its own, which can be stopped and killed."""

    def __init__(self, role: str, node: str, points: str, ports: Sequence[int], silence_s: float) -> None:
        argv = [sys.executable, "-c", NODE, role, node, str(silence_s), points, *map(str, ports)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        self.process.stdin.write(KEY.hex() + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:
            pass


# All come


def test_all_nodes_meet_and_each_gets_what_the_leader_made_of_all_reports(ports: list[int]) -> None:
    def combine(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {"order": list(reports), "from": [report["from"] for report in reports.values()]}

    with Leader(KEY, N3, ports, combine={"hello": combine}), at_once():
        futures = [start(come, node, ports, "hello", "bye") for node in reversed(N3)]
        for future in futures:
            assert future.result(LONG_S) == [{"order": N3, "from": N3}, {}]


def test_a_meeting_of_one_node_is_over_at_once(ports: list[int]) -> None:
    with at_once(), Leader(KEY, ["n1"], ports):
        assert come("n1", ports, "a", "b") == [{}, {}]


def test_nobody_passes_a_point_before_the_last_has_come(ports: list[int]) -> None:
    events: list[tuple[str, str]] = []

    def run(node: str) -> None:
        with member(node, ports) as me:
            for point in map(str, range(30)):
                events.append((point, "comes"))
                me.meet(point, {}, LONG_S)
                events.append((point, "passes"))

    with Leader(KEY, N3, ports):
        for future in [start(run, node) for node in N3]:
            future.result(LONG_S)
    for point in map(str, range(30)):
        assert [what for where, what in events if where == point] == ["comes"] * 3 + ["passes"] * 3


def test_a_leader_that_comes_late_is_found(ports: list[int]) -> None:
    futures = [start(come, node, ports, "hello") for node in N3]
    with pytest.raises(TimeoutError):
        futures[0].result(0.3)
    with at_once(), Leader(KEY, N3, ports):
        for future in futures:
            future.result(LONG_S)


def test_members_get_the_last_answer_although_the_leader_leaves_at_once() -> None:
    for _ in range(10):
        ports = free_ports(1)
        others = [start(come, node, ports, "end") for node in N3[1:]]
        with Leader(KEY, N3, ports):
            come("n1", ports, "end")
        for other in others:
            assert other.result(LONG_S) == [{}]


def test_two_hundred_nodes_meet() -> None:
    nodes, ports = [f"n{number}" for number in range(1, 201)], free_ports(1)
    with Leader(KEY, nodes, ports, combine={"hello": lambda reports: {"nodes": len(reports)}}):
        futures = [start(come, node, ports, "hello", "again") for node in nodes]
        for future in futures:
            assert future.result(LONG_S) == [{"nodes": 200}, {}]


def test_any_text_survives_the_way(ports: list[int]) -> None:
    report = {
        "name": os.fsdecode(b"a\xff\n\x00"),
        "text": "ü\u2028\U0001f600",
        "n": -(2**60),
        "x": [None, True],
    }
    seen: list[dict[str, Any]] = []

    def combine(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
        seen.extend(reports.values())
        return reports["n1"]

    with Leader(KEY, ["n1"], ports, combine={"p": combine}), member("n1", ports) as me:
        assert me.meet("p", report, LONG_S) == report
    assert seen == [report]


# Somebody does not


def test_nodes_that_do_not_come_are_named_at_the_deadline(ports: list[int]) -> None:
    nodes = [*N3, "n4"]
    handlers: dict[str, Any] = {"q": lambda *_: {}}
    with Leader(KEY, nodes, ports, handlers=handlers), member("n4", ports) as n4:
        n4.ask("q", {}, LONG_S)
        error = failure(start(come, "n1", ports, "services", timeout_s=0.5))
        assert sorted(error.nodes) == ["n2", "n3", "n4"]
        assert "n[2-4] did not come to 'services'" in str(error)
        assert "n[2-3] never reached n1" in str(error)
        assert not error.user_fault


def test_a_leader_that_none_of_several_others_ever_reached_names_itself_alone(ports: list[int]) -> None:
    with Leader(KEY, N3, ports, late_s=0.0):
        error = failure(start(come, "n1", ports, "hello", timeout_s=0.3))
    assert error.nodes == ("n1",)
    assert f"none of the other nodes has ever reached n1 port {ports[0]}" in str(error)


def test_of_two_nodes_that_do_not_meet_the_other_is_named_and_the_leader_is_not_ruled_out(
    ports: list[int],
) -> None:
    with Leader(KEY, N3[:2], ports, late_s=0.0):
        error = failure(start(come, "n1", ports, "hello", timeout_s=0.3))
    assert error.nodes == ("n2",)
    assert "is it n1 that cannot be reached?" in str(error)


def test_that_nobody_came_who_may_not_try_tells_nothing_of_the_leader(ports: list[int]) -> None:
    with Leader(KEY, N3, ports, late_s=0.0, uncertain=["n3"]):
        error = failure(start(come, "n1", ports, "hello", timeout_s=0.3))
    assert sorted(error.nodes) == ["n2", "n3"]


def test_the_earliest_deadline_counts_and_ends_it_for_all(ports: list[int]) -> None:
    with Leader(KEY, N3, ports) as leader, at_once():
        patient = start(come, "n1", ports, "p", timeout_s=LONG_S)
        until(lambda: bool(leader._points), "n1 has come")
        hasty = start(come, "n2", ports, "p", timeout_s=0.3)
        assert failure(patient).nodes == failure(hasty).nodes == ("n3",)


@pytest.mark.parametrize("user_fault", [True, False])
def test_a_failure_is_told_to_all_at_once_and_to_those_who_come_later(
    ports: list[int], *, user_fault: bool
) -> None:
    with at_once(), Leader(KEY, N3, ports, late_s=0.0):
        waiting = start(come, "n1", ports, "mount")
        with member("n2", ports) as n2:
            n2.fail("/dev/nvme0n1 is dead", user_fault=user_fault)
            with pytest.raises(PeerError):
                n2.check()
        late = start(come, "n3", ports, "hello")
        for future in (waiting, late):
            error = failure(future)
            assert (str(error), error.nodes) == ("n2: /dev/nvme0n1 is dead", ("n2",))
            assert error.user_fault is user_fault


@pytest.mark.parametrize("failing", ["n1", "n2"])
def test_a_failure_that_is_nobodys_fault_is_told_to_all_and_names_no_node(
    ports: list[int], failing: str
) -> None:
    def fail() -> None:
        with member(failing, ports):
            raise OutsideError("Slurm is silent")

    with at_once(), Leader(KEY, N3, ports, late_s=0.0):
        others = [start(come, node, ports, "hello") for node in N3 if node != failing]
        with pytest.raises(OutsideError):
            fail()
        for other in others:
            error = failure(other)
            assert (str(error), error.nodes, error.user_fault) == (f"{failing}: Slurm is silent", (), False)


def test_a_failing_leader_waits_for_those_who_have_not_come_yet_to_tell_them(ports: list[int]) -> None:
    def lead() -> None:
        with Leader(KEY, N3, ports, late_s=LONG_S), member("n1", ports) as me:
            me.fail("no space", user_fault=False)

    with at_once():
        leader = start(lead)
        for node in ("n2", "n3"):
            assert failure(start(come, node, ports, "hello")).nodes == ("n1",)
        leader.result(LONG_S)


def test_work_between_points_learns_of_a_failure_elsewhere(ports: list[int]) -> None:
    def aborted(me: Member) -> bool:
        try:
            me.check()
        except PeerError as error:
            return error.nodes == ("n2",)
        return False

    with Leader(KEY, N3, ports, late_s=0.0), member("n1", ports) as n1, member("n2", ports) as n2:
        n1.check()
        n2.fail("dead", user_fault=False)
        until(lambda: aborted(n1), "n1 is told")


@pytest.mark.parametrize(
    ("fault", "user_fault"), [(UserError("no source"), True), (OSError(5, "I/O"), False)]
)
def test_leaving_by_an_exception_tells_the_others(
    ports: list[int], fault: Exception, *, user_fault: bool
) -> None:
    with Leader(KEY, N3, ports, late_s=0.0):
        waiting = start(come, "n1", ports, "mount")
        with pytest.raises(type(fault)), member("n2", ports):
            raise fault
        error = failure(waiting)
        assert str(error) == f"n2: {fault}"
        assert (error.nodes, error.user_fault) == (("n2",), user_fault)


def test_a_node_that_leaves_before_a_point_is_named(ports: list[int]) -> None:
    with Leader(KEY, N3, ports), at_once():
        before, after = (start(come, node, ports, "a", "b") for node in ("n1", "n3"))
        come("n2", ports, "a")
        for future in (before, after):
            assert failure(future).nodes == ("n2",)


def test_a_leader_that_leaves_too_early_is_named(ports: list[int]) -> None:
    with Leader(KEY, N3, ports):
        waiting = start(come, "n2", ports, "hello", "later")
        third = start(come, "n3", ports, "hello", "later")
        come("n1", ports, "hello")
    for future in (waiting, third):
        assert failure(future).nodes == ("n1",)


def test_a_fault_in_the_leaders_own_step_is_told_with_its_name(ports: list[int]) -> None:
    def combine(_: dict[str, dict[str, Any]]) -> dict[str, Any]:
        raise RuntimeError("no port\nis free")

    with Leader(KEY, N3, ports, combine={"hello": combine}):
        futures = [start(come, node, ports, "hello") for node in N3]
        for future in futures:
            error = failure(future)
            assert str(error) == "n1: at 'hello': RuntimeError: no port is free"
            assert error.nodes == ("n1",)


def test_the_leaders_step_can_name_the_culprit(ports: list[int]) -> None:
    def combine(_: dict[str, dict[str, Any]]) -> dict[str, Any]:
        raise PeerError("n3 has another plan", ("n3",), user_fault=True)

    with Leader(KEY, N3, ports, combine={"hello": combine}):
        futures = [start(come, node, ports, "hello") for node in N3]
        for future in futures:
            error = failure(future)
            assert (str(error), error.nodes, error.user_fault) == ("n3 has another plan", ("n3",), True)


def test_a_point_is_met_only_once(ports: list[int]) -> None:
    with Leader(KEY, ["n1"], ports), member("n1", ports) as me:
        me.meet("a", {}, LONG_S)
        with pytest.raises(PeerError, match="n1 came to 'a' twice"):
            me.meet("a", {}, LONG_S)


def test_a_leader_that_is_not_there_is_named_with_where_and_why(ports: list[int]) -> None:
    with at_once(), member("n2", ports) as me:
        until(lambda: tried(me, "refused"), "no port answers")
        with pytest.raises(PeerError) as caught:
            me.meet("hello", {}, 0.3)
    assert caught.value.nodes == ("n1",)
    assert f"{HOST}:{ports[0]},{ports[1]}" in str(caught.value)
    assert "refused" in str(caught.value)


def test_a_leader_whose_name_has_no_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    unresolved = pytest.raises(PeerError, match="cannot be resolved")
    with at_once(), Member(KEY, "n2", "n1.invalid", [1]) as me, unresolved:
        until(lambda: bool(me._trouble), "the name is looked up")
        me.meet("hello", {}, 0.2)


# Processes that die or freeze


def test_a_killed_leader_is_named_by_its_members(ports: list[int]) -> None:
    with Process("leader stay", "n1", "hello", ports, 10) as leader:
        others = [start(come, node, ports, "hello", "later") for node in N3[1:]]
        assert [leader.line(), leader.line()] == ["serves", "met hello"]
        leader.signal(signal.SIGKILL)
        began = time.monotonic()
        for other in others:
            error = failure(other)
            assert error.nodes == ("n1",)
            assert "killed" in str(error)
        assert time.monotonic() - began < BROKEN_S + AT_ONCE_S


def test_a_frozen_leader_is_named_by_its_members(ports: list[int]) -> None:
    def others_come(node: str) -> None:
        with member(node, ports, silence_s=SILENCE_S) as me:
            me.meet("hello", {}, LONG_S)
            me.meet("later", {}, LONG_S)

    with Process("leader stay", "n1", "hello", ports, 10) as leader:
        others = [start(others_come, node) for node in N3[1:]]
        assert [leader.line(), leader.line()] == ["serves", "met hello"]
        leader.signal(signal.SIGSTOP)
        began = time.monotonic()
        for other in others:
            assert failure(other).nodes == ("n1",)
        assert time.monotonic() - began < SILENCE_S + AT_ONCE_S


@pytest.mark.parametrize(
    ("how", "why", "noticed_s"),
    [(signal.SIGSTOP, "not been heard from", SILENCE_S), (signal.SIGKILL, "closed", BROKEN_S)],
)
def test_a_frozen_or_killed_node_is_named_although_nobody_waits_for_it_yet(
    ports: list[int], how: signal.Signals, why: str, noticed_s: float
) -> None:
    silence_s = SILENCE_S if how is signal.SIGSTOP else LONG_S
    with (
        Leader(KEY, N3, ports, silence_s=silence_s, farewell_s=0.2),
        Process("stay", "n2", "hello", ports, 10) as n2,
    ):
        others = [start(come, node, ports, "hello", "later") for node in ("n1", "n3")]
        assert n2.line() == "met hello"
        n2.signal(how)
        began = time.monotonic()
        for other in others:
            error = failure(other)
            assert error.nodes == ("n2",)
            assert f"n2 {why}" in str(error) or f"n2 has {why}" in str(error)
        assert time.monotonic() - began < noticed_s + AT_ONCE_S


def test_a_leader_that_hears_none_of_several_others_names_itself(ports: list[int]) -> None:
    with ExitStack() as stack:
        stack.enter_context(Leader(KEY, N3, ports, silence_s=SILENCE_S, farewell_s=0.2))
        others = [stack.enter_context(Process("stay", node, "hello", ports, 10)) for node in N3[1:]]
        own = start(come, "n1", ports, "hello", "later")
        for other in others:
            assert other.line() == "met hello"
        for other in others:  # as good as a cable that is pulled out of the leader's node
            other.signal(signal.SIGSTOP)
        error = failure(own)
        assert error.nodes == ("n1",)
        assert "n1 hears none of the other nodes" in str(error)


def test_a_leader_that_was_frozen_itself_blames_nobody(ports: list[int]) -> None:
    with Process("leader", "n1", "hello,later", ports, SILENCE_S) as leader, ExitStack() as stack:
        others = [stack.enter_context(member(node, ports, silence_s=LONG_S)) for node in N3[1:]]
        hellos = [start(me.meet, "hello", {}, LONG_S) for me in others]
        assert [leader.line(), leader.line()] == ["serves", "met hello"]
        for hello in hellos:
            hello.result(LONG_S)
        leader.signal(signal.SIGSTOP)
        time.sleep(SILENCE_S + 1.5)  # longer than anybody may be silent
        leader.signal(signal.SIGCONT)
        laters = [start(me.meet, "later", {}, LONG_S) for me in others]
        for later in laters:
            later.result(LONG_S)
        assert leader.line() == "met later"


def test_a_tolerated_loss_lets_the_others_go_on_without_the_node(ports: list[int]) -> None:
    lost: list[str] = []

    def tolerate(node: str) -> bool:
        lost.append(node)
        return True

    nodes = {"later": lambda reports: {"nodes": list(reports)}}
    with (
        Leader(KEY, N3, ports, silence_s=SILENCE_S, combine=nodes, farewell_s=0.2) as leader,
        Process("stay", "n2", "hello,alone", ports, 30) as n2,
    ):
        leader.on_lost(tolerate)
        others = [start(come, node, ports, "hello", "later") for node in ("n1", "n3")]
        assert n2.line() == "met hello"
        n2.signal(signal.SIGSTOP)
        for other in others:
            assert other.result(LONG_S) == [{}, {"nodes": ["n1", "n3"]}]
        assert lost == ["n2"]
        n2.signal(signal.SIGCONT)
        assert n2.line().startswith("error n2 was given up")


# Ports, keys, strangers


def test_a_meeting_works_beside_another_jobs_on_the_same_candidate_ports() -> None:
    ports = free_ports(3)
    one = ["n1"]
    with Leader(OTHER_JOB, one, ports) as first, Leader(KEY, N3, ports) as second, at_once():
        assert [first.port, second.port] == ports[:2]
        futures = [start(come, node, ports, "hello") for node in N3]
        with Member(OTHER_JOB, "n1", HOST, ports) as other:
            other.meet("hello", {}, LONG_S)
            for future in futures:
                future.result(LONG_S)
            other.meet("again", {}, LONG_S)


def test_a_port_that_was_another_jobs_when_a_member_tried_it_is_tried_again(ports: list[int]) -> None:
    with Leader(OTHER_JOB, ["n1"], ports[:1]), member("n1", ports[:1]) as me:
        until(lambda: tried(me, "somebody else"), "somebody else answers")
        with pytest.raises(PeerError, match="somebody else answers"):
            me.meet("early", {}, 0.5)
        waiting = start(come, "n1", ports[:1], "hello")
    with Leader(KEY, ["n1"], ports[:1]), at_once():
        waiting.result(LONG_S)


def test_a_port_where_no_rendezvous_answered_is_tried_again(ports: list[int]) -> None:
    with socket.create_server((HOST, ports[0])) as server:
        waiting = start(come, "n1", ports, "hello")
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 20)
    with Leader(KEY, ["n1"], ports[:1]), at_once():
        waiting.result(LONG_S)


def test_no_free_port_is_a_fault_of_the_node(ports: list[int]) -> None:
    taken = pytest.raises(NodeError, match=str(ports[1]))
    with Leader(OTHER_JOB, ["n1"], ports), Leader(OTHER_JOB, ["n1"], ports), taken as caught:
        Leader(KEY, N3, ports)
    assert not isinstance(caught.value, OutsideError)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_ports_that_a_user_has_taken_are_no_fault_of_the_node(ports: list[int]) -> None:
    os.seteuid(65534)
    try:
        taken = [socket.create_server((HOST, port)) for port in ports]
    finally:
        os.seteuid(0)
    with taken[0], taken[1], pytest.raises(OutsideError, match=rf"nobody has port .*{ports[0]}"):
        Leader(KEY, N3, ports, bind_address=HOST)


@pytest.mark.parametrize(
    "key",
    [
        derive(b"s" * 32, "rendezvous 7 1 prolog"),
        derive(b"s" * 32, "rendezvous 7 0 epilog"),
        derive(b"S" * 32, "rendezvous 7 0 prolog"),
    ],
    ids=["another restart", "another phase", "another secret"],
)
def test_who_has_another_key_never_gets_in_and_disturbs_nobody(ports: list[int], key: bytes) -> None:
    with Leader(KEY, N3, ports), Member(key, "n2", HOST, ports, leader="n1") as stranger:
        refused = start(stranger.meet, "hello", {"from": "stranger"}, 0.8)
        futures = [start(come, node, ports, "hello") for node in N3[:2]]
        assert failure(refused).nodes == ("n1",)
        assert not any(future.done() for future in futures)
        come("n3", ports, "hello")
        for future in futures:
            future.result(LONG_S)


def test_knowing_the_leaders_public_key_is_not_enough(ports: list[int]) -> None:
    with Leader(KEY, ["n1"], ports) as leader, zmq.Context[zmq.Socket[bytes]]() as context:
        with wire.member_socket(context, KEY) as stranger:
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            with stranger.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)) as monitor:
                stranger.connect(wire.host_port(HOST, leader.port))
                assert monitor.poll(AT_ONCE_MS)
            with pytest.raises(zmq.Again):
                stranger.send(b"{}", zmq.NOBLOCK)
            stranger.disable_monitor()
        come("n1", ports, "hello")


@pytest.mark.parametrize("mechanism", ["none", "plain"])
def test_zeromq_without_our_encryption_never_gets_in(ports: list[int], mechanism: str) -> None:
    with Leader(KEY, ["n1"], ports) as leader, zmq.Context[zmq.Socket[bytes]]() as context:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger, stranger.immediate = 0, True
            if mechanism == "plain":
                stranger.plain_username, stranger.plain_password = b"root", b"root"
            with stranger.get_monitor_socket(int(zmq.EVENT_DISCONNECTED)) as monitor:
                stranger.connect(wire.host_port(HOST, leader.port))
                assert monitor.poll(AT_ONCE_MS)
            with pytest.raises(zmq.Again):
                stranger.send(b"{}", zmq.NOBLOCK)
            stranger.disable_monitor()
        come("n1", ports, "hello")


SIGNATURE = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"  # how ZMTP (https://rfc.zeromq.org/spec/23/) begins
HOSTILE = [
    b"GET / HTTP/1.0\r\n\r\n",
    bytes(4096),
    b"\xff" * 100_000,
    SIGNATURE,
    SIGNATURE + b"\x03\x00CURVE" + bytes(15 + 32) + b"\x04\xc8" + bytes(200),
    SIGNATURE + b"\x03\x00NULL" + bytes(16 + 32) + b"\x06" + b"\xff" * 8,
]


def test_hostile_bytes_at_the_port_do_no_harm(ports: list[int]) -> None:
    with Leader(KEY, N3, ports) as leader, at_once(), ExitStack() as stack:
        for data in HOSTILE * 3:
            connection = stack.enter_context(socket.create_connection((HOST, leader.port)))
            with contextlib.suppress(OSError):  # it may be cut off in the middle
                connection.sendall(data)
        futures = [start(come, node, ports, "hello", "bye") for node in N3]
        for future in futures:
            assert future.result(LONG_S) == [{}, {}]


@pytest.mark.parametrize(
    "greeting",
    [
        b"\x01\x00",
        SIGNATURE + b"\x00\x06\x00\x00",
        SIGNATURE + b"\x01\x06\x00\x00",
        SIGNATURE
        + b"\x03\x00NULL"
        + bytes(16 + 32)
        + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER",
    ],
    ids=["ZMTP 1 unversioned", "ZMTP 1", "ZMTP 2", "ZMTP 3 unencrypted"],
)
def test_a_false_leader_learns_nothing_and_is_not_believed(ports: list[int], greeting: bytes) -> None:
    heard, came = bytearray(), threading.Event()

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        came.set()
        with connection, contextlib.suppress(OSError):
            connection.sendall(greeting)
            while data := connection.recv(65536):
                heard.extend(data)

    with socket.create_server((HOST, ports[0])) as server, member("n2", ports) as me:
        pretending = start(pretend, server)
        assert came.wait(LONG_S)
        with pytest.raises(PeerError, match="was not reached"):
            me.meet("hello", {"report": "confidential"}, 0.5)
        me.close()
        pretending.result(LONG_S)
    assert b"confidential" not in heard
    assert b"hello" not in heard


def hello(**changes: Any) -> bytes:
    fields = {
        "v": 1,
        "type": "meet",
        "node": "n2",
        "run": "0",
        "id": 1,
        "point": "a",
        "timeout_s": 9.0,
        "report": {},
    }
    return json.dumps(fields | changes).encode()


MALFORMED = {
    "not JSON": (b"\xff\xfe", "malformed"),
    "no object": (b"[]", "malformed"),
    "another version": (hello(v=2), "version 1"),
    "a leader's message": (b'{"v":1,"type":"closing"}', "malformed"),
    "a field too many": (hello(extra=1), "malformed"),
    "a wrong type": (hello(id=True), "'id'"),
    "a deadline that is none": (hello().replace(b"9.0", b"NaN"), "NaN"),
    "nested too deeply": (b"[" * 100_000, "malformed"),
    "too large": (hello(report={"x": "x" * MAX_BYTES}), str(MAX_BYTES)),
    "not of this job": (hello(node="n9"), "n9"),
}


@pytest.mark.parametrize(("data", "why"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_of_a_peer_ends_the_meeting_and_says_whose(
    ports: list[int], data: bytes, why: str
) -> None:
    with Leader(KEY, N3, ports, late_s=0.0, farewell_s=0.1) as leader, at_once():
        waiting = start(come, "n1", ports, "a")
        with zmq.Context[zmq.Socket[bytes]]() as context, wire.member_socket(context, KEY) as peer:
            peer.connect(wire.host_port(HOST, leader.port))
            assert peer.poll(AT_ONCE_MS, zmq.POLLOUT)
            peer.send(wire.encode("beat", node="n2", run="0", last=0, open=[]))
            peer.send(data)
            error = failure(waiting)
        assert why in str(error)
        if "n9" not in str(error):
            assert error.nodes == ("n2",)
            assert str(error).startswith("n2 ")


def test_a_leader_that_leaves_tells_those_who_wait_nothing_that_hides_the_cause(ports: list[int]) -> None:
    with (
        zmq.Context[zmq.Socket[bytes]]() as context,
        wire.member_socket(context, KEY) as peer,
        Leader(KEY, ["n1", "n2"], ports, farewell_s=LONG_S) as leader,
        member("n1", ports) as me,
    ):
        peer.connect(wire.host_port(HOST, leader.port))
        peer.send(hello())
        until(lambda: bool(leader._points), "n2 has come")
        me.fail("no space", user_fault=False)
        closing = start(leader.close)
        told: list[wire.Message] = []
        while not told or told[-1]["type"] != "closing":
            assert peer.poll(AT_ONCE_MS), told
            told.append(wire.decode(peer.recv(), wire.FROM_LEADER))
        peer.send(wire.encode("bye", node="n2", run="0"))
        me.close()
        closing.result(LONG_S)
    assert [message["type"] for message in told] == ["abort", "closing"]
    assert told[0]["message"] == "n1: no space"


def test_a_malformed_message_of_the_leader_is_the_leaders_fault(ports: list[int]) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, wire.leader_socket(context, KEY, b"x") as leader:
        leader.zap_enforce_domain = False
        leader.bind(wire.host_port(HOST, ports[0]))
        waiting = start(come, "n2", ports, "a")
        assert leader.poll(AT_ONCE_MS)
        leader.send_multipart([leader.recv_multipart()[0], b'{"v":2}'])
        error = failure(waiting)
        assert error.nodes == ("n1",)
        assert "version 1" in str(error)


def test_two_processes_of_one_node_are_noticed(ports: list[int]) -> None:
    with Leader(KEY, N3, ports, late_s=0.0), member("n2", ports) as first, member("n2", ports) as second:
        futures = [start(me.meet, "hello", {}, LONG_S) for me in (first, second)]
        for future in futures:
            assert "n2 came twice" in str(failure(future))


def test_a_report_that_is_too_large_is_refused_where_it_is_made(ports: list[int]) -> None:
    with Leader(KEY, ["n1"], ports), member("n1", ports) as me:
        with pytest.raises(NodeError, match=str(MAX_BYTES)):
            me.meet("a", {"x": "x" * MAX_BYTES}, LONG_S)
        assert me.meet("b", {"x": "x" * (MAX_BYTES - 4096)}, LONG_S) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = ["v", "type", "node", "run", "id", "point", "timeout_s", "report", "last", "open", "x"]
FIELD_VALUES = st.sampled_from([1, 2, "meet", "beat", "bye", "n1", 1.5, [1], {}]) | JSON


@given(
    st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(FIELD_NAMES), FIELD_VALUES).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_whatever_comes_is_a_message_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        message = wire.decode(data, wire.FROM_MEMBER)
        assert message["type"] in wire.FROM_MEMBER
        assert type(message["node"]) is str


# Questions


def test_many_threads_of_many_nodes_ask_at_the_same_time(ports: list[int]) -> None:
    lock = threading.Lock()
    queued = list(range(600))

    def take(node: str, payload: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return {"work": queued.pop() if queued else None, "node": node, "thread": payload["thread"]}

    def work(me: Member, thread: int) -> list[int]:
        done: list[int] = []
        while True:
            answer = me.ask("take", {"thread": thread}, LONG_S)
            assert (answer["node"], answer["thread"]) == (me.node, thread)
            if answer["work"] is None:
                return done
            done.append(answer["work"])

    with Leader(KEY, N3, ports, handlers={"take": take}), ExitStack() as stack:
        members = [stack.enter_context(member(node, ports)) for node in N3]
        futures = [start(work, me, thread) for me in members for thread in range(4)]
        done = [item for future in futures for item in future.result(LONG_S)]
    assert sorted(done) == list(range(600))


@pytest.mark.parametrize(
    ("fault", "message", "nodes", "user_fault"),
    [
        (KeyError("k"), "n1: 'q': KeyError: 'k'", ("n1",), False),
        (UserError("quota exceeded"), "n1: 'q': quota exceeded", ("n1",), True),
        (PeerError("n3 is broken", ("n3",)), "n3 is broken", ("n3",), False),
    ],
)
def test_a_handlers_exception_goes_to_who_asked_and_to_nobody_else(
    ports: list[int], fault: Exception, message: str, nodes: tuple[str, ...], *, user_fault: bool
) -> None:
    def handler(*_: object) -> dict[str, Any]:
        raise fault

    with Leader(KEY, ["n1"], ports, handlers={"q": handler}), member("n1", ports) as me:
        with pytest.raises(PeerError) as caught:
            me.ask("q", {}, LONG_S)
        assert (str(caught.value), caught.value.nodes) == (message, nodes)
        assert caught.value.user_fault is user_fault
        assert me.meet("still here", {}, LONG_S) == {}


def test_a_question_nobody_can_answer_is_refused(ports: list[int]) -> None:
    with (
        Leader(KEY, ["n1"], ports),
        member("n1", ports) as me,
        pytest.raises(PeerError, match="cannot answer 'q'"),
    ):
        me.ask("q", {}, LONG_S)


def test_slow_handlers_hold_up_no_barrier(ports: list[int]) -> None:
    release = threading.Event()

    def slow(*_: object) -> dict[str, Any]:
        release.wait(LONG_S)
        return {"slow": True}

    handlers: dict[str, Any] = {"slow": slow}
    with Leader(KEY, ["n1"], ports, handlers=handlers), member("n1", ports) as me:
        slow_ones = [start(me.ask, "slow", {}, LONG_S) for _ in range(6)]
        with at_once():
            me.meet("hello", {}, LONG_S)
        release.set()
        assert [each.result(LONG_S) for each in slow_ones] == [{"slow": True}] * 6


def test_a_handler_that_takes_too_long_is_named(ports: list[int]) -> None:
    release = threading.Event()

    def slow(*_: object) -> dict[str, Any]:
        release.wait(LONG_S)
        return {}

    with Leader(KEY, ["n1"], ports, handlers={"slow": slow}), member("n1", ports) as me:
        until(lambda: me._contact, "the leader is found")
        with pytest.raises(PeerError, match="n1 did not answer 'slow'"):
            me.ask("slow", {}, 0.2)
        release.set()


class Proxy:
    """A way to the leader that can be cut: every connection through it is reset."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._sockets: list[socket.socket] = []
        start(self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection((HOST, self._target))
                self._sockets += [near, far]
                start(self._copy, near, far)
                start(self._copy, far, near)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def cut(self) -> None:
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()


def test_a_connection_that_breaks_again_and_again_loses_and_repeats_nothing(ports: list[int]) -> None:
    asked: list[int] = []

    def take(_: str, payload: dict[str, Any]) -> dict[str, Any]:
        asked.append(payload["n"])
        return {"n": payload["n"], "fill": "x" * 200_000}

    def ask_all(me: Member) -> None:
        for number in range(60):
            assert me.ask("take", {"n": number, "fill": "y" * 200_000}, LONG_S)["n"] == number

    with (
        Leader(KEY, ["n1"], ports, handlers={"take": take}) as leader,
        contextlib.closing(Proxy(leader.port)) as proxy,
        member("n1", [proxy.port]) as me,
    ):
        asking = start(ask_all, me)
        cuts = 0
        while not asking.done():
            enough = len(asked) + 7
            while len(asked) < enough and not asking.done():
                time.sleep(0.001)
            proxy.cut()
            cuts += 1
        asking.result(LONG_S)
        me.meet("end", {}, LONG_S)
    assert asked == list(range(60))
    assert cuts > 3


# The end


def test_closing_never_hangs_without_the_other_side(ports: list[int]) -> None:
    with at_once():
        with member("n2", ports):
            pass
        with Leader(KEY, N3, ports):
            pass
    with Process("leader", "n1", "hello", ports, 60) as leader, member("n2", ports) as me:
        assert leader.line() == "serves"
        with pytest.raises(PeerError, match="cannot answer"):
            me.ask("nothing", {}, LONG_S)
        leader.signal(signal.SIGSTOP)
        with at_once():
            me.close()
            me.close()


def test_a_frozen_member_delays_the_leaders_end_by_no_more_than_agreed(ports: list[int]) -> None:
    with Process("stay", "n2", "hello", ports, 60) as n2:
        with Leader(KEY, N3, ports, farewell_s=0.5):
            others = [start(come, node, ports, "hello") for node in ("n1", "n3")]
            assert n2.line() == "met hello"
            for other in others:
                other.result(LONG_S)
            n2.signal(signal.SIGSTOP)
            began = time.monotonic()
        assert 0.4 < time.monotonic() - began < 0.5 + AT_ONCE_S


def test_who_asks_after_the_end_is_told_so(ports: list[int]) -> None:
    with member("n1", ports) as me:
        with Leader(KEY, ["n1"], ports):
            me.meet("hello", {}, LONG_S)
        with at_once(), pytest.raises(PeerError, match="has ended the meeting"):
            me.meet("later", {}, LONG_S)
    with pytest.raises(PeerError):
        me.meet("later still", {}, LONG_S)


def test_a_meeting_leaves_no_thread_and_no_descriptor(ports: list[int]) -> None:
    def in_use() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def meeting() -> None:
        with Leader(KEY, ["n1"], ports, handlers={"q": lambda *_: {}}), member("n1", ports) as me:
            me.ask("q", {}, LONG_S)

    meeting()
    before = in_use()  # of which something may be that of tests before
    for _ in range(5):
        meeting()
    until(
        lambda: all(now < then + 5 for now, then in zip(in_use(), before, strict=True)), "all is given back"
    )


def test_neither_key_nor_secret_shows_in_a_processs_arguments_or_environment(ports: list[int]) -> None:
    with Process("leader", "n1", "hello", ports, 10) as leader:
        assert leader.line() == "serves"
        public, secret = wire.curve_pair(KEY, "leader")
        for name in ("cmdline", "environ"):
            with open(f"/proc/{leader.process.pid}/{name}", "rb") as file:
                shown = file.read()
            assert not any(key in shown for key in (KEY, KEY.hex().encode(), public, secret))


def test_a_member_with_several_keys_finds_the_leader_by_the_one_that_it_has(ports: list[int]) -> None:
    new = derive(b"n" * 32, "rendezvous 7 0 prolog")
    with (
        Leader(new, ["n1", "n2"], ports, bind_address=HOST),
        Member(KEY, "n1", HOST, ports, other_keys=[new]) as first,
        Member(new, "n2", HOST, ports, other_keys=[KEY]) as second,
    ):
        meeting = start(first.meet, "here", {}, LONG_S)
        assert second.meet("here", {}, LONG_S) == meeting.result(LONG_S) == {}
    with Member(KEY, "n1", HOST, ports, other_keys=[new]) as alone:
        until(lambda: tried(alone, "refused"), "no port answers")
        with pytest.raises(PeerError) as caught:
            alone.meet("here", {}, 0.5)
        assert str(caught.value).count(str(ports[0])) == 2  # where it was looked for, and what was there
