"""Starting, watching and stopping real processes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import supervisor
from beeond_ctl.backends import Answer, Command, File, Mounted, PortOpen, Service
from beeond_ctl.errors import NodeError
from beeond_ctl.supervisor import (
    TOKEN_VARIABLE,
    Process,
    alive,
    ask,
    find,
    marked,
    run,
    start,
    stop,
    wait_ready,
)
from tests.testbed.host import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATH = ["/usr/local/bin", "/usr/bin", "/bin"]


@pytest.fixture
def token() -> Iterator[str]:
    made = secrets.token_hex(8)
    yield made
    stop([], token=made, timeout_s=0)


def service(directory: Path, *argv: str, ready: PortOpen | Mounted | None = None, **more: str) -> Service:
    return Service("a service", argv, str(directory / "logs" / "log"), ready=ready, env=more)


def shell(directory: Path, script: str) -> Service:
    return service(directory, "sh", "-c", script)


def launch(what: Service, token: str) -> Process:
    return start(what, token=token, search_path=PATH, record=lambda _process: None)


def until(condition: Callable[[], object]) -> None:
    wait_until("what is waited for", lambda: (bool(condition()), ""), 10, 0.005)


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_service_is_recorded_and_runs_in_a_session_of_its_own(tmp_path: Path, token: str) -> None:
    recorded: list[Process] = []
    process = start(service(tmp_path, "sleep", "60"), token=token, search_path=PATH, record=recorded.append)
    assert recorded == [process]
    assert alive(process)
    assert os.getsid(process.pid) == process.pid
    assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
    assert os.readlink(f"/proc/{process.pid}/fd/0") == "/dev/null"


def test_a_service_gets_nothing_of_our_environment(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_USER", "x")
    launch(service(tmp_path, "env", OWN="yes"), token)
    until(lambda: "BEEOND_CTL_INSTANCE" in text(tmp_path / "logs/log"))
    lines = text(tmp_path / "logs/log").splitlines()
    assert "OWN=yes" in lines
    assert f"BEEOND_CTL_INSTANCE={token}" in lines
    assert {line.partition("=")[0] for line in lines} == {
        "PATH",
        "LANG",
        "HOME",
        "OWN",
        "BEEOND_CTL_INSTANCE",
    }


def test_files_are_written_before_the_start_and_are_roots_alone(tmp_path: Path, token: str) -> None:
    path = tmp_path / "conf" / "secret"
    launch(
        Service("s", ("cat", str(path)), str(tmp_path / "logs/log"), files=(File(str(path), "word\udcff"),)),
        token,
    )
    until(lambda: (tmp_path / "logs/log").read_bytes())
    assert (tmp_path / "logs/log").read_bytes() == b"word\xff"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "logs/log").stat().st_mode & 0o777 == 0o600


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "conf").mkdir(mode=0o700)
    (tmp_path / "conf/file").symlink_to(victim)
    supervisor.write_files([File(str(tmp_path / "conf/file"), "new")])
    assert victim.read_text() == "mine"
    assert not (tmp_path / "conf/file").is_symlink()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf").chmod(0o777)
    with pytest.raises(NodeError, match="only root may write"):
        supervisor.write_files([File(str(tmp_path / "conf/file"), "new")])


def test_a_missing_program_is_named_with_where_it_was_searched(tmp_path: Path, token: str) -> None:
    with pytest.raises(NodeError, match="no-such-daemon is not in /usr/local/bin:/usr/bin:/bin; install"):
        launch(service(tmp_path, "no-such-daemon"), token)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert isinstance(port, int)
        return port


def listener(directory: Path, port: int, after_s: float = 0) -> Service:
    script = (
        f"import socket, time as t; t.sleep({after_s}); s = socket.create_server(('', {port})); t.sleep(60)"
    )
    return Service(
        "listener",
        (Path(sys.executable).name, "-c", script),
        str(directory / "logs/log"),
        PortOpen("localhost", port),
    )


def test_a_service_is_ready_when_it_listens(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    what = listener(tmp_path, port, after_s=0.2)
    process = start(
        what, token=token, search_path=[str(Path(sys.executable).parent), *PATH], record=lambda _process: None
    )
    wait_ready([(what, process)], deadline_s=60)
    socket.create_connection(("127.0.0.1", port)).close()


def test_a_port_that_somebody_else_has_is_not_readiness(tmp_path: Path, token: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        what = service(tmp_path, "sleep", "60", ready=PortOpen("127.0.0.1", server.getsockname()[1]))
        process = launch(what, token)
        with pytest.raises(NodeError, match=r"a service: not ready after 0\.2 s"):
            wait_ready([(what, process)], deadline_s=0.2)


def test_a_service_that_dies_is_told_with_the_end_of_its_log(tmp_path: Path, token: str) -> None:
    script = "echo '[2020-01-01] E [x.c:1] 0-x: bad key'; echo 'giving up'; exit 3"
    what = service(tmp_path, "sh", "-c", script, ready=PortOpen("127.0.0.1", 1))
    with pytest.raises(NodeError, match=r"^a service ended while it started: 0-x: bad key \| giving up$"):
        wait_ready([(what, launch(what, token))], deadline_s=60)


def test_all_that_are_late_are_named(tmp_path: Path, token: str) -> None:
    late = [
        Service(name, ("sleep", "60"), str(tmp_path / "logs" / name), Mounted("/nowhere", "xfs"))
        for name in "ab"
    ]
    pairs = [(what, launch(what, token)) for what in late]
    with pytest.raises(NodeError, match="a, b: not ready"):
        wait_ready(pairs, deadline_s=0.1)


def test_stop_ends_all_and_names_nobody(tmp_path: Path, token: str) -> None:
    processes = [launch(service(tmp_path, "sleep", "60"), token) for _ in range(3)]
    assert stop(processes, token=token, timeout_s=10) == []
    assert not any(alive(process) for process in processes)


def test_all_end_at_the_same_time(tmp_path: Path, token: str) -> None:
    """Each ends when all have been told to."""
    all_told = '[ "$(cat told | wc -l)" = 6 ]'
    slow = f"cd {tmp_path}; trap 'echo >>told; until {all_told}; do sleep 0.05; done; exit' TERM"
    processes = [
        launch(shell(tmp_path, f"{slow}; echo up; while :; do sleep 0.05; done"), token) for _ in range(6)
    ]
    until(lambda: text(tmp_path / "logs/log").count("up") == len(processes))
    assert stop(processes, token=token, timeout_s=60) == []


def test_what_ignores_sigterm_is_killed_and_named(tmp_path: Path, token: str) -> None:
    process = launch(shell(tmp_path, "trap '' TERM; echo up; while :; do sleep 1; done"), token)
    until(lambda: text(tmp_path / "logs/log"))
    assert "a service" in stop([process], token=token, timeout_s=0.2)
    assert not alive(process)
    assert find(token) == []


def test_what_need_not_end_in_order_is_killed_at_once_and_not_named(tmp_path: Path, token: str) -> None:
    script = f"trap 'touch {tmp_path}/in-order' TERM; echo up; while :; do sleep 60; done"
    process = launch(shell(tmp_path, script), token)
    until(lambda: text(tmp_path / "logs/log"))
    assert stop([process], token=token, timeout_s=60, in_order=False) == []
    assert find(token) == []
    assert not (tmp_path / "in-order").exists()


def test_a_frozen_process_is_ended_without_being_killed(tmp_path: Path, token: str) -> None:
    process = launch(service(tmp_path, "sleep", "60"), token)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert stop([process], token=token, timeout_s=10) == []


def test_a_reused_pid_is_never_signalled(token: str) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        recorded = Process("ours", stranger.pid, start_time=1)
        assert not alive(recorded)
        assert stop([recorded], token=token, timeout_s=0) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_children_and_daemons_of_a_service_are_ended_with_it(tmp_path: Path, token: str) -> None:
    process = launch(shell(tmp_path, "sleep 61 & (setsid sleep 62 &) ; echo up"), token)
    until(lambda: text(tmp_path / "logs/log") and not alive(process))
    until(lambda: len(find(token)) == 2)  # exec(2) shows an environment late
    assert stop([process], token=token, timeout_s=10) == []
    assert find(token) == []


def test_a_process_is_found_whatever_it_calls_itself(tmp_path: Path, token: str) -> None:
    odd = os.fsencode(tmp_path) + b"/sl\xffeep"
    os.symlink("/usr/bin/sleep", odd)  # its name becomes the process's
    process = subprocess.Popen([odd, "60"], env={TOKEN_VARIABLE: token})
    until(lambda: [found.name for found in find(token)] == ["sl\ufffdeep"])
    assert [found.name for found in marked()[token]] == ["sl\ufffdeep"]
    stop([], token=token, timeout_s=10)
    process.wait(10)
    assert find(token) == []


def test_a_process_that_was_started_but_not_recorded_is_found(tmp_path: Path, token: str) -> None:
    def crash(_process: Process) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(service(tmp_path, "sleep", "60"), token=token, search_path=PATH, record=crash)
    until(lambda: [process.name for process in find(token)] == ["sleep"])  # exec(2) shows an environment late
    stop([], token=token, timeout_s=10)
    assert find(token) == []


def test_another_instances_processes_stay(tmp_path: Path, token: str) -> None:
    other = token + "x"  # of which ours is the beginning
    process = launch(service(tmp_path, "sleep", "60"), other)
    stop([], token=token, timeout_s=1)
    assert alive(process)
    stop([process], token=other, timeout_s=10)


def test_a_command_gives_its_output(tmp_path: Path) -> None:
    assert run(Command(("echo", "hello")), search_path=PATH, deadline_s=10) == b"hello\n"


def test_a_command_that_fails_is_told_with_what_it_said() -> None:
    bad = Command(("sh", "-c", "echo 'no such\nthing' >&2; exit 4"))
    with pytest.raises(NodeError, match="sh failed with exit code 4: no such thing"):
        run(bad, search_path=PATH, deadline_s=10)
    assert ask(bad, search_path=PATH, deadline_s=10) == Answer(4, b"", b"no such\nthing\n")


def test_a_command_that_is_too_early_is_run_again(tmp_path: Path) -> None:
    early = Command(("sh", "-c", f"test -e {tmp_path}/x || {{ touch {tmp_path}/x; exit 1; }}"), again_s=10)
    run(early, search_path=PATH, deadline_s=10)


def test_an_answer_that_is_wrong_is_a_failure_whatever_the_exit_code() -> None:
    wrong = Command(
        ("sh", "-c", "echo 5; exit 1"), codes=(0, 1), wrong=lambda said: f"said {said.decode().strip()}"
    )
    with pytest.raises(NodeError, match="sh: said 5"):
        run(wrong, search_path=PATH, deadline_s=10)


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    for deadline_s in (0.5, 5, 50):  # until it was given time enough to have a child
        began = time.monotonic()
        with pytest.raises(NodeError, match=rf"sh was not done after {deadline_s:g} s"):
            run(
                Command(("sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait")),
                search_path=PATH,
                deadline_s=deadline_s,
            )
        assert time.monotonic() - began < deadline_s + 60
        if text(tmp_path / "pid").endswith("\n"):
            break
    child = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{child}").exists())
