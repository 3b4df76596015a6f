"""How long the nodes of a large job take to meet: members simulated over loopback, the leader is the real one.

    python bench/rendezvous_sim.py [--nodes 16 --nodes 4096] [--processes 16]

Each simulated member is a socket of its own with its own CURVE handshake, sending what `Member` sends; a few
processes hold them all. Leader and members share this machine's cores here, so a real leader is faster than this.
Times count from the moment all processes are told to start to the moment the last member has its answer.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from typing import Any

import click
import zmq

from beeond_ctl.keys import derive
from beeond_ctl.rendezvous import Leader, wire

POINTS = ["hello", "services", "mount", "probe", "ready"]
HOST = "127.0.0.1"
KEY = derive(b"simulation" * 4, "rendezvous simulation")
TIMEOUT_S = 300.0
BEAT_S = 1.0


def simulate(names: list[str], port: int) -> None:
    """Run members `names` in this process: connect, meet at each point, beat every second; told by lines on stdin."""
    context = zmq.Context[zmq.Socket[bytes]]()
    context.set(zmq.MAX_SOCKETS, len(names) + 64)
    sockets = {name: wire.member_socket(context, KEY) for name in names}
    poller = zmq.Poller()
    _say("made")
    for number, point in enumerate(POINTS, 1):
        sys.stdin.readline()
        if number == 1:
            for socket in sockets.values():
                socket.connect(wire.host_port(HOST, port))
                poller.register(socket, zmq.POLLOUT)  # writable as soon as its handshake has succeeded
        unsent = {socket: name for name, socket in sockets.items()}
        waiting = set(sockets.values())
        beat_at = time.monotonic() + BEAT_S
        while waiting:
            for socket, _ in poller.poll(50):
                if socket in unsent:
                    report = {"node": unsent[socket], "plan": "0" * 64, "port": 8003}
                    message = {"node": unsent.pop(socket), "run": "0", "id": number, "point": point}
                    socket.send(wire.encode("meet", **message, timeout_s=TIMEOUT_S, report=report))
                    poller.modify(socket, zmq.POLLIN)
                elif wire.decode(socket.recv(), wire.FROM_LEADER)["type"] == "answer":
                    waiting.discard(socket)
                    poller.modify(socket, zmq.POLLOUT)
                    poller.unregister(socket)
            if time.monotonic() >= beat_at:
                beat_at += BEAT_S
                for name, socket in sockets.items():
                    if socket not in unsent:
                        pending = [number] if socket in waiting else []
                        socket.send(wire.encode("beat", node=name, run="0", last=number, open=pending))
        for socket in sockets.values():
            poller.register(socket, zmq.POLLOUT)
        _say("met")
    for name, socket in sockets.items():
        socket.send(wire.encode("bye", node=name, run="0"))
        socket.close(linger=1000)
    context.term()


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def measure(nodes: int, processes: int) -> dict[str, float]:
    """Seconds for each point with `nodes` members, and for closing."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    combine: dict[str, Any] = {point: lambda reports: {"nodes": len(reports)} for point in POINTS}
    with Leader(KEY, names, range(47000, 47100), bind_address=HOST, combine=combine, silence_s=60) as leader:
        shares = [names[index::processes] for index in range(min(processes, nodes))]
        argv = [sys.executable, __file__, "--member-of", str(leader.port)]
        workers = [
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in shares
        ]
        for worker, share in zip(workers, shares, strict=True):
            _tell(worker, json.dumps(share))
        for worker in workers:
            _expect(worker, "made")
        times: dict[str, float] = {}
        for point in POINTS:
            began = time.perf_counter()
            for worker in workers:
                _tell(worker, point)
            waiters = [threading.Thread(target=_expect, args=(worker, "met")) for worker in workers]
            for waiter in waiters:
                waiter.start()
            for waiter in waiters:
                waiter.join()
            times[point] = time.perf_counter() - began
        for worker in workers:
            with worker:
                pass
        began = time.perf_counter()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        times["leader CPU"] = usage.ru_utime + usage.ru_stime
        times["leader MiB"] = usage.ru_maxrss / 1024
    times["close"] = time.perf_counter() - began
    return times


def _tell(worker: subprocess.Popen[str], line: str) -> None:
    if worker.stdin is not None:
        worker.stdin.write(line + "\n")
        worker.stdin.flush()


def _expect(worker: subprocess.Popen[str], word: str) -> None:
    line = worker.stdout.readline().strip() if worker.stdout is not None else ""
    if line != word:
        raise SystemExit(f"a simulated member said {line!r} instead of {word!r}")


@click.command()
@click.option("--nodes", multiple=True, type=int, default=(16, 256, 1024, 4096), show_default=True)
@click.option("--processes", default=16, show_default=True, help="Processes that hold the members.")
@click.option("--member-of", type=int, hidden=True)
@click.option("--run", type=int, hidden=True)
def main(nodes: tuple[int, ...], processes: int, member_of: int | None, run: int | None) -> None:
    """Print a table of how long nodes take to meet."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if member_of is not None:
        simulate(json.loads(sys.stdin.readline()), member_of)
        return
    if run is not None:
        _say(json.dumps(measure(run, processes)))
        return
    columns = [*POINTS, "close", "leader CPU", "leader MiB"]
    _say("  nodes" + "".join(f"{column:>12}" for column in columns))
    for count in nodes:  # each in a process of its own: the leader's time and memory are its process's
        argv = [sys.executable, __file__, "--run", str(count), "--processes", str(processes)]
        times = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
        cells = [
            f"{times[column]:.0f}" if "MiB" in column else f"{times[column]:.3f} s" for column in columns
        ]
        _say(f"{count:7}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
