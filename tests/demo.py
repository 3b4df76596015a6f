"""The whole life of a job's file system, shown on a test cluster on this machine: `make demo`.

Submits what is in examples/ as an ordinary user, shows what happens on the nodes as it happens, and checks all that it
says: it ends with 0 only if every line with a check mark is true. The cluster is taken down however it ends.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from tests.testbed import Cluster, CommandError, TestbedError
from tests.testbed.host import wait_until
from tests.trees import compare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.testbed.snapshot import Snapshot

NAME = "demo"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NODES = ("n1", "n2", "n3")
TIMEOUT_S = 60.0

# An input as people have them, and a little worse: names of any bytes, links, holes, attributes, odd modes and times.
CASE = r"""
set -eu
umask 022
for i in 1 2 3; do mkdir -p sweep/$i; seq $((i * 100)) > sweep/$i/data; done
mkdir -p case7/mesh case7/many case7/empty case7/closed results
cd case7
head -c 24M /dev/urandom > mesh/geometry
truncate -s 256M mesh/sparse; printf end | dd of=mesh/sparse conv=notrunc status=none bs=1 seek=200000000
i=0; while [ $i -lt 300 ]; do echo "$i" > many/$i; i=$((i + 1)); done
printf 'x' > "$(printf 'a\nnew line, \351\377')"
ln mesh/geometry mesh/hard-link; ln -s ../mesh many/symlink; ln -s nowhere dangling
setfattr -n user.origin -v demo mesh/geometry
printf 'x' > closed/file; chmod 500 closed; chmod 640 many/7
touch -d '2001-02-03 04:05:06.123456789' many/7 mesh
"""


class NotTrueError(Exception):
    """Something the demo says is not so."""


class Screen:
    """Where it all is printed; plain text where that is no terminal."""

    def __init__(self) -> None:
        self._out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
        self._number = 0
        self.checked = 0

    def chapter(self, title: str) -> None:
        """Begin a part."""
        self._number += 1
        self._out.print()
        self._out.rule(f"[bold]{self._number}  {escape(title)}", align="left", style="blue")

    def say(self, text: str) -> None:
        """Tell the reader something."""
        self._out.print(f"[dim]# {escape(text)}[/]")

    def typed(self, who: str, argv: Sequence[str]) -> None:
        """A command that somebody types."""
        self.prompt(f"{who}{'#' if who.startswith('root') else '$'}", shlex.join(argv))

    def prompt(self, prompt: str, line: str) -> None:
        """A line that somebody types."""
        self._out.print(f"[bold green]{prompt}[/] [bold]{escape(line)}[/]", soft_wrap=True)

    def output(self, text: str) -> None:
        """What comes back."""
        for line in text.rstrip("\n").splitlines():
            self._out.print(f"    {escape(line)}", soft_wrap=True)

    def row(self, name: str, cells: Sequence[str], remark: str = "", *, style: str = "") -> None:
        """A line of a table that grows."""
        text = f"    {name:<20}" + "".join(f"{cell:>10}" for cell in cells)
        line = escape(f"{text}   {remark}".rstrip())
        self._out.print(f"[{style}]{line}[/]" if style else line, soft_wrap=True)

    def true(self, holds: object, text: str) -> None:
        """Tell a fact that was checked. Raises NotTrueError when it is none."""
        mark = "[bold green]✓[/]" if holds else "[bold red]✗[/]"
        self._out.print(f"  {mark} {escape(text)}", soft_wrap=True)
        if not holds:
            raise NotTrueError(text)
        self.checked += 1

    def bad(self, text: str) -> None:
        """Why it ended."""
        self._out.print(f"[bold red]{escape(text)}[/]", soft_wrap=True)


Step = tuple[str, dict[str, dict[str, Any]]]
"""A step's name, and the record of it from each node."""


class Events:
    """The event logs of one job on its nodes, read as they grow."""

    def __init__(self, cluster: Cluster, job: int) -> None:
        self._cluster = cluster
        self._path = f"/var/log/beeond-ctl/jobs/{job}.jsonl"
        self._seen = dict.fromkeys(NODES, 0)
        self._steps: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._ready: deque[Step] = deque()

    def next_step(self, deadline: float) -> Step:
        """The next step that all nodes have finished. Raises NotTrueError when there is none until `deadline`."""
        while not self._ready:
            for node in NODES:
                self._read(node)
            if time.monotonic() > deadline:
                raise NotTrueError(f"{self._path}: nothing more happened on all nodes for {TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        return self._ready.popleft()

    def _read(self, node: str) -> None:
        lines = self._cluster.read(node, self._path).split("\n")[
            :-1
        ]  # what comes after the last one is unfinished
        for line in lines[self._seen[node] :]:
            event = json.loads(line)
            if event["event"] == "step":
                step = event["step"]
                number = self._counts[node, step] = self._counts.get((node, step), 0) + 1
                records = self._steps.setdefault((step, number), {})
                records[node] = event
                if len(records) == len(NODES):
                    self._ready.append((step, records))
        self._seen[node] = len(lines)


def follow(screen: Screen, events: Events, last: str) -> None:
    """Show the steps of a job's nodes as they end, up to `last`. Raises NotTrueError if that never comes."""
    screen.row("step (seconds)", NODES, style="bold")
    step = ""
    while step != last:
        step, records = events.next_step(time.monotonic() + TIMEOUT_S)
        cells = [f"{records[node]['seconds']:.3f}" for node in NODES]
        screen.row(step, cells, _remark(records["n1"]), style="bold cyan" if step == last else "")


def _remark(record: dict[str, Any]) -> str:
    if summary := record.get("summary"):
        return f"{summary['copied']} copied, {summary['verified']} verified, {summary['bytes'] / 1e6:.1f} MB"
    if receipts := record.get("receipts"):
        return f"{record['node']}: {receipts[0]['files']} files gone, by {receipts[0]['method']}"
    return f"failed: {record['failed'][:100]}" if "failed" in record else ""


# --- what people do -------------------------------------------------------------------------------------------


def sbatch(screen: Screen, cluster: Cluster, name: str, *options: str) -> int:
    """alice submits an example."""
    screen.typed("alice@login", ["sbatch", *options, name])
    job = cluster.submit("alice", (EXAMPLES / name).read_text(), *options)
    screen.output(f"Submitted batch job {job}")
    return job


def directives(screen: Screen, name: str) -> None:
    """The lines of an example that matter."""
    screen.typed("alice@login", ["grep", "^#SBATCH", name])
    lines = (EXAMPLES / name).read_text().splitlines()
    screen.output("\n".join(line for line in lines if line.startswith("#SBATCH")))


def ended(screen: Screen, cluster: Cluster, job: int, state: str) -> str:
    """The output of a job that ended in `state`."""
    found = cluster.wait_job(job)["JobState"]
    path = cluster.job(job)["StdOut"]
    screen.typed("alice@login", ["cat", path.removeprefix("/global/alice/")])
    output = cluster.job_output(job)
    screen.output(output)
    screen.true(found == state, f"job {job} is {found}")
    return output


def clean(screen: Screen, cluster: Cluster, before: list[Snapshot]) -> None:
    """The nodes are as they were."""
    cluster.wait_idle()
    try:
        cluster.wait_clean(before, timeout_s=5)
        left = ""
    except TestbedError as error:
        left = str(error)
    screen.output(left)
    screen.true(
        not left,
        "processes, mounts, listening ports, loop devices and files of all nodes are as before the job",
    )
    held = [cluster.run(node, ["ls", "-A", "/nvme/beeond"]).stdout for node in NODES]
    screen.true(not any(held), "/nvme/beeond is empty on all nodes")


def same(screen: Screen, cluster: Cluster, source: str, destination: str) -> None:
    """rsync finds no difference between two trees on global storage."""
    command = compare(source, destination)
    screen.typed("alice@login", command)
    done = cluster.run("login", command, user="alice", check=False)
    screen.output(done.stdout + done.stderr)
    screen.true(
        done.returncode == 0 and not done.stdout,
        "no difference: content, modes, times, owners, xattrs, ACLs, hard links",
    )


# --- the chapters ---------------------------------------------------------------------------------------------


def hello(screen: Screen, cluster: Cluster, before: list[Snapshot]) -> None:
    """Three nodes share a file system."""
    screen.chapter("A file system for one job")
    directives(screen, "hello.sh")
    job = sbatch(screen, cluster, "hello.sh")
    screen.say("Slurm's Prolog runs on all three nodes at once; they meet at the first one:")
    events = Events(cluster, job)
    follow(screen, events, "bring-up")
    screen.say(
        "the job runs, beside the file system's own processes and nothing else of ours; then the Epilog:"
    )
    follow(screen, events, "tear-down")
    output = ended(screen, cluster, job, "COMPLETED").splitlines()
    mounts = [line.split()[1:] for line in output if "fuse.glusterfs" in line]
    screen.true(len(mounts) == 3 and mounts.count(mounts[0]) == 3, "three nodes have the same mount")
    screen.true(
        sum("hello from" in line for line in output) == 9, "each of three nodes read what three nodes wrote"
    )
    clean(screen, cluster, before)


def stage(screen: Screen, cluster: Cluster, before: list[Snapshot]) -> None:
    """A tree goes in and comes out."""
    screen.chapter("Input in, results back")
    directives(screen, "stage.sh")
    shell(screen, cluster, "du -sh --apparent-size case7; find case7 -printf x | wc -c; ls -bl case7")
    screen.say(
        "one more stage-out on the command line, to see the input itself again after its way there and back"
    )
    job = sbatch(screen, cluster, "stage.sh", "--beeond-stage-out=in:/global/alice/back/%j")
    events = Events(cluster, job)
    follow(screen, events, "bring-up")
    follow(screen, events, "tear-down")
    ended(screen, cluster, job, "COMPLETED")
    same(screen, cluster, "/global/alice/case7", f"/global/alice/back/{job}")
    right = shell(
        screen, cluster, f"cd case7 && sha256sum --quiet -c ../results/{job}/checksums && echo all right"
    )
    screen.true(right == "all right\n", "what the job computed from its copy fits the original")
    clean(screen, cluster, before)


def many(screen: Screen, cluster: Cluster, before: list[Snapshot]) -> None:
    """Several jobs on the same nodes."""
    screen.chapter("Four jobs at once on the same nodes")
    array = sbatch(screen, cluster, "array.sh")
    one = sbatch(screen, cluster, "one-node.sh")
    wait_until("the jobs to end", lambda: (not cluster.run("ctl", ["squeue", "-h"]).stdout, ""), TIMEOUT_S)
    shell(screen, cluster, f"cat array-{array}_*.out one-node-{one}.out")
    totals = shell(screen, cluster, f"head sweep-results/{array}_*/total")
    screen.true(
        [line for line in totals.splitlines() if line.isdigit()] == ["200", "400", "600"],
        "each job had its own input",
    )
    listed = shell(screen, cluster, f"tar -tf notes-{one}.tar | wc -l")
    screen.true(listed == "1001\n", "the one-node job's archive is complete")
    clean(screen, cluster, before)


def mistakes(screen: Screen, cluster: Cluster, before: list[Snapshot]) -> None:
    """What a user's mistakes lead to."""
    screen.chapter("A mistake")
    options = ["--nodes=3", "--beeond=capacty=1TiB", "hello.sh"]
    screen.typed("alice@login", ["sbatch", *options])
    try:
        cluster.submit("alice", (EXAMPLES / "hello.sh").read_text(), *options[:-1])
        refusal = ""
    except CommandError as error:
        refusal = error.stderr
    screen.output(refusal)
    screen.true(
        "capacty" in refusal and "capacity" in refusal, "refused at the prompt, with what would be right"
    )

    job = sbatch(screen, cluster, "hello.sh", "--beeond-stage-in=/global/alice/csae7:in")
    events = Events(cluster, job)
    follow(screen, events, "roll-back")
    output = ended(screen, cluster, job, "FAILED")
    screen.true("/global/alice/csae7" in output, "the job's output says why")
    drained = [node for node in NODES if "DRAIN" in cluster.node_state(node).flags]
    screen.true(not drained, "no node is drained for a user's mistake")
    clean(screen, cluster, before)


def trouble(screen: Screen, cluster: Cluster, before: list[Snapshot]) -> None:
    """Results that cannot be brought back are kept."""
    screen.chapter("Global storage fails at the worst moment")
    job = sbatch(screen, cluster, "stage.sh", "--beeond-stage-out=in:/global/alice/results/%j-in")
    events = Events(cluster, job)
    follow(screen, events, "bring-up")
    cluster.readonly("/global/alice/results")
    try:
        screen.say("while the job runs /global/alice/results goes read-only")
        follow(screen, events, "tear-down")
        for node in NODES:
            cluster.wait_node(node, {"IDLE", "DRAIN"}, timeout_s=TIMEOUT_S)
        reasons = root(screen, cluster, "sinfo -R -o '%N  %E'")
        screen.true(
            f"beeond-ctl recover {job} --nodes" in reasons,
            "the nodes are drained, and the reason says what to type",
        )
        status = root(screen, cluster, f"ssh n1 beeond-ctl status {job}")
        screen.true("retained" in status, "the data is kept on the nodes' devices; nothing runs")
    finally:
        cluster.writable("/global/alice/results")
    screen.say("global storage is writable again")
    with ThreadPoolExecutor(1) as pool:
        command = f"beeond-ctl recover {job}"
        screen.typed("root@ctl", shlex.split(command))
        running = pool.submit(cluster.run, "ctl", shlex.split(command), check=False)
        follow(screen, events, "recovery")
        done = running.result(TIMEOUT_S)
    screen.output(done.stdout + done.stderr)
    screen.true(done.returncode == 0, "recovered")
    same(screen, cluster, "/global/alice/case7", f"/global/alice/results/{job}-in")
    right = shell(
        screen, cluster, f"cd case7 && sha256sum --quiet -c ../results/{job}/checksums && echo all right"
    )
    screen.true(right == "all right\n", "the results are there, too")
    cluster.wait_idle()
    root(screen, cluster, "sinfo -N -h -o '%N %T'")
    screen.true(
        all(cluster.node_state(node).flags == {"IDLE"} for node in NODES), "the nodes are back in service"
    )
    clean(screen, cluster, before)


def shell(screen: Screen, cluster: Cluster, line: str) -> str:
    """alice types a line; its output."""
    screen.prompt("alice@login$", line)
    done = cluster.run("login", ["sh", "-c", line], user="alice", check=False)
    screen.output(done.stdout + done.stderr)
    return done.stdout


def root(screen: Screen, cluster: Cluster, line: str) -> str:
    """root types a line on the controller; its output."""
    screen.prompt("root@ctl#", line)
    done = cluster.run("ctl", ["sh", "-c", line], check=False)
    screen.output(done.stdout + done.stderr)
    return done.stdout


def main() -> int:
    """Show it all. 0 when all of it is true."""
    screen = Screen()
    start = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the cluster is taken down
    try:
        screen.chapter("A Slurm cluster on this machine")
        with Cluster.up(NAME, nodes=len(NODES), with_product=True) as cluster:
            root(screen, cluster, "sinfo -N -o '%N %T %c'; df -h --output=source,fstype,size,target /global")
            cluster.run("login", ["sh", "-c", CASE], user="alice")
            before = cluster.snapshots()
            for chapter in (hello, stage, many, mistakes, trouble):
                chapter(screen, cluster, before)
            screen.chapter("Down again")
        screen.true(NAME not in Cluster.names(), "the cluster is gone")
    except KeyboardInterrupt:
        screen.bad("interrupted; the cluster is gone")
        return 130
    except (NotTrueError, TestbedError) as error:
        screen.bad(f"the demo ends here: {error}")
        return 1
    screen.say(f"{screen.checked} facts shown and checked in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
