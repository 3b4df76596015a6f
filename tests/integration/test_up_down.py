"""`beeond-ctl up` and `down`: an instance without Slurm, over each launcher."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import PAUSED
from tests.integration.on_cluster import exists
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2", "n3")
LAUNCHERS = ("pdsh", "ssh")
HURRIED = '[storage]\nkind = "directory"\npaths = ["/nvme/beeond"]\n[deadlines]\nmeet = 5\nsilence = 3\n'
PART = r"python\S* \S*beeond-ctl up --here"
"""A node's part of `up`."""


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    cluster.wait_idle()
    before = cluster.snapshots()
    yield
    cluster.wait_clean(before, timeout_s=10)


def ran(cluster: Cluster, *words: str, code: int = 0) -> CompletedProcess[str]:
    done = cluster.run("ctl", ["beeond-ctl", *words], check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def beeond(cluster: Cluster, *words: str, code: int = 0) -> str:
    done = ran(cluster, *words, code=code)
    return done.stdout + done.stderr


def brought_up(cluster: Cluster, *words: str) -> tuple[str, str]:
    """Id and mount point, which alone are on stdout."""
    run_id, point = ran(cluster, "up", "--user", "alice", *words).stdout.split()
    return run_id, point


def undo(told: str) -> tuple[str, list[str]]:
    """The id, and the last command in `told`, which takes down what `up` left."""
    *_, line = re.findall(r"beeond-ctl (down \d+ -w \S+)", told)
    words = shlex.split(line)
    return words[1], words


def at_work(cluster: Cluster, node: str) -> bool:
    return bool(cluster.processes(node, PART))


HELD = f"""#!{sys.executable}
import os, time
from beeond_ctl import cli
from beeond_ctl.lifecycle.here import Here

def enter(self, phase, announce=Here.enter):
    announce(self, phase)
    if phase == "starting":
        open("{PAUSED}", "w").close()
        while os.path.exists("{PAUSED}"):
            time.sleep(0.02)

Here.enter = enter
cli.main()
"""
"""A part that makes PAUSED when all parts have met, and goes on when that is gone: the others wait for it."""


@contextmanager
def held(cluster: Cluster, node: str) -> Iterator[None]:
    command = cluster.path(node, "/usr/bin/beeond-ctl")
    program = command.readlink()
    command.unlink()
    command.write_text(HELD)
    command.chmod(0o755)
    try:
        yield
    finally:
        cluster.run(node, ["rm", "-f", PAUSED])
        command.unlink()
        command.symlink_to(program)


def swept(cluster: Cluster, node: str) -> list[tuple[str, str]]:
    done = cluster.run(node, ["beeond-ctl", "sweep", "--json"], check=False)
    return [(item["what"], item["verdict"]) for item in json.loads(done.stdout)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_is_asked_for_goes_in_is_seen_everywhere_and_comes_out(cluster: Cluster, launcher: str) -> None:
    cluster.run("login", ["rm", "-rf", "/global/alice/up", "/global/alice/up-back"])
    cluster.run("login", ["sh", "-c", "mkdir /global/alice/up; echo data > /global/alice/up/f"], user="alice")
    cluster.run("ctl", ["tee", "/root/nodes"], input="n1\nn2 slots=2\nn3:2\n")
    run_id, point = brought_up(
        cluster, "--nodefile", "/root/nodes", "--launcher", launcher,
        "--beeond-stage-in", "/global/alice/up:in", "--beeond-stage-out", ".:/global/alice/up-back",
    )  # fmt: skip
    for node in NODES:
        assert cluster.run(node, ["cat", f"{point}/in/f"], user="alice").stdout == "data\n"
        cluster.run(node, ["touch", f"{point}/{node}"], user="alice")
    assert cluster.run("n1", ["ls", point], user="bob", check=False).returncode != 0
    beeond(cluster, "down", run_id, "--nodes", "n[1-3]", "--launcher", launcher)
    assert cluster.run("login", ["ls", "/global/alice/up-back"]).stdout.split() == ["in", *NODES]
    assert beeond(cluster, "down", run_id, "--nodes", "n[1-3]", "--launcher", launcher) == "n[1-3]: done\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_node_that_cannot_be_reached_is_named_and_nothing_is_left(cluster: Cluster, launcher: str) -> None:
    cluster.write_config(HURRIED)
    cluster.cut("n3")
    try:
        told = beeond(cluster, "up", "-w", "n[1-3]", "--user", "alice", "--launcher", launcher, code=1)
    finally:
        cluster.restore("n3")
        cluster.wait_idle()
    assert re.search(r"^n3: ", told, re.MULTILINE)
    assert "n3 did not come" in told
    assert undo(told)[1][2:] == ["-w", "n3"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_who_interrupts_up_is_told_what_takes_it_down(cluster: Cluster, launcher: str) -> None:
    words = ("up", "-w", "n[1-3]", "--user", "alice", "--launcher", launcher)
    with ThreadPoolExecutor() as pool, held(cluster, "n2"):
        interrupted = pool.submit(beeond, cluster, *words, code=130)
        wait_for(partial(exists, cluster, PAUSED, "n2"), 20)
        assert all(at_work(cluster, node) for node in NODES)
        cluster.kill("ctl", "beeond-ctl up -w", signal.SIGINT)
        told = interrupted.result()
    assert told.endswith("beeond-ctl: interrupted\n")
    wait_for(lambda: not any(at_work(cluster, node) for node in NODES), 30)
    _, down = undo(told)
    assert beeond(cluster, *down) == "n[1-3]: done\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_killed_part_of_up_left_is_named_and_swept(cluster: Cluster, launcher: str) -> None:
    cluster.write_config(
        HURRIED.replace("meet = 5", "meet = 12")
    )  # so long, there is something to kill on n2
    cluster.freeze("n3", "sshd.*listener")  # for which the others wait
    try:
        with ThreadPoolExecutor() as pool:
            words = ("up", "-w", "n[1-3]", "--user", "alice", "--launcher", launcher)
            failed = pool.submit(beeond, cluster, *words, code=1)
            wait_for(lambda: cluster.run("n2", ["ls", "/nvme/beeond"]).stdout, 20)
            assert [verdict for _, verdict in swept(cluster, "n2")] == ["live"]
            cluster.kill("n2", PART)
            told = failed.result()
    finally:
        cluster.thaw("n3", "sshd.*listener")
    run_id, down = undo(told)
    assert down[2:] == ["-w", "n[2-3]"]  # n1 has rolled back, and says so
    assert swept(cluster, "n1") == []
    assert swept(cluster, "n2") == [(f"job {run_id}", "removed")]
    assert beeond(cluster, *down) == "n[2-3]: done\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_node_that_is_lost_meanwhile_is_named_and_not_waited_for(cluster: Cluster, launcher: str) -> None:
    cluster.write_config(HURRIED)
    hurried = "from beeond_ctl import cli, launch; launch._ALIVE_S = 1; cli.main()"
    words = ["-c", hurried, "up", "-w", "n[1-3]", "--user", "alice", "--launcher", launcher]
    with ThreadPoolExecutor() as pool, held(cluster, "n3"):
        failed = pool.submit(cluster.run, "ctl", [sys.executable, *words], check=False)
        wait_for(partial(exists, cluster, PAUSED, "n3"), 20)
        cluster.freeze("n3", PART)
        cluster.cut("n3")
        try:
            done = failed.result()
        finally:
            cluster.restore("n3")
            cluster.thaw("n3", PART)
    assert done.returncode == 1
    assert "n3: lost while it worked: " in done.stdout
    wait_for(lambda: not at_work(cluster, "n3"), 30)
    _, down = undo(done.stderr)
    assert down[2:] == ["-w", "n3"]
    assert beeond(cluster, *down) == "n3: done\n"
    cluster.wait_idle()


def test_each_cause_why_nodes_are_not_reached_is_told_once_and_alike_over_both_launchers(
    cluster: Cluster,
) -> None:
    files = {"/etc/hosts": "ctl", "/etc/ssh/ssh_known_hosts": "ctl", "/root/.ssh/authorized_keys": "n3"}
    kept = {path: cluster.read(node, path) for path, node in files.items()}
    address = {line.split()[1]: line.split()[0] for line in kept["/etc/hosts"].splitlines()}
    key = kept["/etc/ssh/ssh_known_hosts"].split()[2]
    wrong = cluster.run("n1", ["ssh-keygen", "-y", "-f", "/root/.ssh/id_ed25519"]).stdout.split()[1]
    # Names, where they lead, and the key that is known of them.
    ranges = {
        "host key is not known": (range(1, 21), address["n1"], None),
        "host key is not the known one": (range(21, 41), address["n1"], wrong),
        "cannot be reached: No route to host": (range(41, 51), "10.77.9.9", key),
        "login of root by key was refused": (range(51, 56), address["n3"], key),
        "cannot be reached: no answer within 10 s": (range(56, 61), address["n2"], key),
    }
    hosts, keys = kept["/etc/hosts"], kept["/etc/ssh/ssh_known_hosts"]
    for numbers, where, known in ranges.values():
        hosts += "".join(f"{where} f{number}\n" for number in numbers)
        keys += "".join(f"f{number} ssh-ed25519 {known}\n" for number in numbers if known)
    cluster.run("ctl", ["tee", "/etc/hosts"], input=hosts)
    cluster.run("ctl", ["tee", "/etc/ssh/ssh_known_hosts"], input=keys)
    cluster.run("n3", ["tee", "/root/.ssh/authorized_keys"], input="")
    cluster.freeze("n2", "sshd.*listener")
    words = ("down", "5000000001", "--nodes", "f[1-60],n1", "--launcher")
    try:
        with ThreadPoolExecutor() as pool:
            told = list(pool.map(lambda launcher: beeond(cluster, *words, launcher, code=1), LAUNCHERS))
    finally:
        cluster.thaw("n2", "sshd.*listener")
        for path, node in files.items():
            cluster.run(node, ["tee", path], input=kept[path])
    assert sorted(told[0].splitlines()) == sorted(told[1].splitlines())
    lines = dict(line.split(": ", 1) for line in told[0].splitlines())
    assert len(lines) == 7
    assert lines["n1"] == "done"
    for cause, (numbers, _, _) in ranges.items():
        assert lines[f"f[{numbers[0]}-{numbers[-1]}]"].startswith(cause)
    assert "is not down on f[1-60]" in lines["beeond-ctl"]


def test_a_missing_source_is_told_once_and_nothing_is_left(cluster: Cluster) -> None:
    told = beeond(
        cluster,
        "up",
        "-w",
        "n[1-2]",
        "--user",
        "alice",
        "--beeond-stage-in",
        "/global/alice/nowhere:in",
        code=1,
    )
    assert "/global/alice/nowhere" in told


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_data_that_down_could_not_prove_is_kept_and_staged_out_by_the_next_one_or_by_recover(
    cluster: Cluster, launcher: str
) -> None:
    out = f"/global/alice/kept-{launcher}"
    cluster.run("login", ["sh", "-c", f"rm -rf {out}; mkdir {out}"], user="alice")
    options = ["--beeond-stage-out", f".:{out}/x", "--launcher", launcher]
    run_id, point = brought_up(cluster, "-w", "n[1-2]", *options)
    cluster.run("n2", ["tee", f"{point}/f"], input="mine\n", user="alice")
    cluster.readonly(out)
    try:
        told = beeond(cluster, "down", run_id, "-w", "n[1-2]", "--launcher", launcher, code=1)
    finally:
        cluster.writable(out)
    assert "n[1-2]: data kept, stage-out is not proved" in told
    again = ["down", run_id, "--launcher", launcher] if launcher == "pdsh" else ["recover", run_id]
    beeond(cluster, *again, "-w", "n[1-2]")
    assert cluster.run("login", ["cat", f"{out}/x/f"]).stdout == "mine\n"


def test_down_leaves_jobs_of_slurm_alone(cluster: Cluster) -> None:
    assert "Epilog" in beeond(cluster, "down", "17", "-w", "n[1-2]", code=1)
