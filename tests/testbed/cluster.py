"""A real Slurm cluster on this machine: bring it up, use it, hurt it, take it down without a trace.

One process, the hub, is the first of an outer PID, mount and network namespace: the machine room. It holds
the bridge, global storage and every node's device. Each machine's first process is a child namespace of it.
Ending the hub ends everything; the loop devices let go by themselves, and the work directory is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testbed import host, node, product, slurm, snapshot
from tests.testbed.host import Process, Record, TestbedError, WaitError, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Collection, Iterable, Sequence

    from tests.testbed.node import Machine
    from tests.testbed.slurm import NodeState
    from tests.testbed.snapshot import Snapshot

WORK = Path("/var/tmp/beeond-testbed")
DEFAULT_NAME = "bctl"
DEVICE_SIZE = "4G"
FILLER = ".testbed-filler"
LOG_FILES = {"slurmctld": "/var/log/slurm/slurmctld.log", "slurmd": "/var/log/slurm/slurmd.log"}


class Cluster:
    """A cluster that is up: from `Cluster.up`, or `Cluster.attach` when another process brought it up."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
            raise TestbedError(
                f"{name!r} is no name for a cluster: letters, digits and '-', starting with a letter"
            )
        self.name = name
        self.work = WORK / name
        self.record = Record(self.work / "record.jsonl")

    # -- up and down ---------------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        name: str = DEFAULT_NAME,
        nodes: int = 3,
        *,
        with_product: bool = False,
        config: str | None = None,
        slurm_extra: str = "",
        burst_buffer: Path | None = None,
        device_size: str = DEVICE_SIZE,
        timeout_s: float = 60,
    ) -> Cluster:
        """Bring a cluster up and wait until every node is idle.

        `with_product` installs the product before Slurm starts, with `config` as its configuration.
        `slurm_extra` are more lines for slurm.conf; `burst_buffer` is the burst_buffer.lua to switch
        burst_buffer/lua on with. `device_size` is that of each node's device and of global storage.
        Raises TestbedError; what had been started is then gone again.
        """
        if os.geteuid() != 0:
            raise TestbedError("namespaces, mounts and loop devices need root")
        cluster = cls(name)
        try:
            cluster.work.mkdir(parents=True)
        except FileExistsError:
            raise TestbedError(
                f"{cluster.work} exists: cluster {name} is up or was left by a crash;"
                f" `python3 -m tests.testbed down --name {name}` removes it"
            ) from None
        try:
            if burst_buffer:
                slurm_extra += "\nBurstBufferType=burst_buffer/lua\n"
            cluster._up(nodes, slurm_extra, device_size, burst_buffer, config if with_product else None,
                        with_product, timeout_s)  # fmt: skip
        except BaseException as error:
            if isinstance(error, TestbedError):
                with contextlib.suppress(TestbedError, OSError):
                    error.add_note(cluster.log_tails())
            cluster.down()
            raise
        return cluster

    @classmethod
    def attach(cls, name: str = DEFAULT_NAME) -> Cluster:
        """The cluster of that name that is up. Raises TestbedError when it is not."""
        cluster = cls(name)
        if not (cluster.is_up() and cluster.record.entries("up")):
            raise TestbedError(
                f"cluster {name} is not up; bring it up with: python3 -m tests.testbed up --name {name}"
            )
        return cluster

    @classmethod
    def names(cls) -> list[str]:
        """All clusters that are up or have left something on this machine."""
        return sorted(path.name for path in WORK.iterdir()) if WORK.exists() else []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def is_up(self) -> bool:
        """Whether the machine room stands."""
        hub = self.record.process("hub")
        return hub is not None and hub.alive()

    def down(self) -> None:
        """End everything of this cluster and remove every trace; works after a crash, and twice.

        Raises WaitError naming what did not go.
        """
        if not self.work.exists():
            return
        devices = {loop.number for loop in self._image_loops()}
        for machine in self._recorded_machines():
            init = self.record.process(machine)
            if init and init.alive():
                with contextlib.suppress(OSError):
                    devices |= snapshot.devices(init)
        hub = self.record.process("hub")
        if hub:
            hub.kill(f"cluster {self.name}")
        for loop in host.loops_on(devices):
            host.detach(loop)
        self._await_images_released()
        shutil.rmtree(self.work)
        with contextlib.suppress(OSError):
            WORK.rmdir()

    def _recorded_machines(self) -> set[str]:
        return {str(entry["role"]) for entry in self.record.entries("process")} - {"hub"}

    def _image_loops(self) -> list[host.Loop]:
        prefix = f"{self.work}/images/"
        return [loop for loop in host.loops() if loop.backing_file.startswith(prefix)]

    def _await_images_released(self) -> None:
        """They go with the last mount; what a crash of mount(8) left behind is detached."""
        with contextlib.suppress(WaitError):
            wait_until("the loop devices", lambda: (not self._image_loops(), ""), 5)
        for loop in self._image_loops():
            host.detach(loop)

    def _up(
        self,
        nodes: int,
        slurm_extra: str,
        device_size: str,
        burst_buffer: Path | None,
        config: str | None,
        with_product: bool,
        timeout_s: float,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        if with_product and (lost := product.missing()):
            raise TestbedError(f"the product cannot be installed, {product.PROJECT} lacks: {', '.join(lost)}")
        self.record.write("cluster", nodes=nodes, overlays=node.software_file_systems())
        self._start_hub()
        self._make_storage(device_size)
        conf = slurm.slurm_conf(self.name, [m.name for m in self._compute()], slurm_extra)
        for machine in self.machines():
            node.prepare_overlays(self._room() / machine.name, self._overlays())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._start_machine, self.machines()))
            for machine in self.machines():
                root = self.path(machine.name, "/")
                node.furnish(root, machine, self.machines(), self._room() / "keys", conf)
                if burst_buffer:
                    node.put(root, "etc/slurm/burst_buffer.lua", burst_buffer.read_text())
                    beside = product.PROJECT / "slurm/beeond_directives.lua"
                    node.put(root, "etc/slurm/beeond_directives.lua", beside.read_text())
                    node.put(
                        root, "etc/beeond-ctl/pool", f"{nodes * int(device_size[:-1])}{device_size[-1]}\n"
                    )
            if with_product:
                self._put_product(product.config() if config is None else config)
                if burst_buffer:
                    self.run("ctl", ["sh", "-c", "beeond-ctl bb limits >/etc/beeond-ctl/limits"])
            # A slurmd that finds no slurmctld tries again only a second later.
            self._boot(self._machine("ctl"))
            self._wait_controller()
            list(pool.map(self._boot, [m for m in self.machines() if m.role != "controller"]))
        self.wait_idle(deadline - time.monotonic())
        self.record.write("up")

    def _start_hub(self) -> None:
        (self.work / "room").mkdir()
        (self.work / "images").mkdir()
        spec = {
            "hostname": f"testbed-{self.name}",
            "process_name": "testbed-hub",
            "overlays": [],
            "mounts": [
                {"source": "tmpfs", "target": f"{self.work}/room", "type": "tmpfs", "data": "mode=755"}
            ],
        }
        host.start_first_process(spec, lambda process: self._remember("hub", process))

    def _remember(self, role: str, process: Process) -> None:
        self.record.write("process", role=role, pid=process.pid, start=process.start)

    def _make_storage(self, size: str) -> None:
        """Global storage, every node's device, the bridge and the keys; all inside the machine room."""
        work, images = self.work, f"{self.work}/images"
        lines = [
            "set -eu",
            f"cd {work}/room",
            "mkdir keys global nvme",
            "ssh-keygen -q -t ed25519 -N '' -C testbed -f keys/root & keygen=$!",
            "ssh-keygen -q -t ed25519 -N '' -C testbed -f keys/host & jobs=$!",
            "ip link set lo up",
            "ip link add br0 type bridge forward_delay 0",
            "ip link set br0 up",
            f"( truncate -s {size} {images}/global.img",
            f"  mkfs.ext4 -q -F -m 0 {images}/global.img",
            f'  mount -o loop {images}/global.img global ) & jobs="$jobs $!"',
        ]
        for machine in self._compute():
            image = f"{images}/{machine.name}.img"
            lines += [
                f"( mkdir nvme/{machine.name}; truncate -s {size} {image}; mkfs.xfs -q {image}",
                f'  mount -o loop {image} nvme/{machine.name} ) & jobs="$jobs $!"',
            ]
        lines.append("for job in $keygen $jobs; do wait $job; done")
        self._in_hub(["sh", "-c", "\n".join(lines)])
        node.put(self._room(), "keys/munge.key", secrets.token_hex(64), 0o400)
        storage = self._room() / "global"
        (storage / "lost+found").rmdir()
        for user in node.USERS:
            path = storage / user.name
            path.mkdir(mode=0o700)
            os.chown(path, user.uid, user.uid)
        project = storage / node.PROJECT[0]
        project.mkdir()
        os.chown(project, 0, node.PROJECT[1])
        project.chmod(0o2770)

    def _start_machine(self, machine: Machine) -> None:
        """Namespaces, mounts and network of one machine; also after it was powered off."""
        readonly = sorted(self._readonly())
        spec = node.namespace_spec(
            machine,
            f"{self.work}/room",
            self._hub().pid,
            self._overlays(),
            product.shown_directories(),
            readonly,
        )

        def remember(process: Process) -> None:
            self._remember(machine.name, process)
            peer = f"peer name eth0 address {machine.mac} netns {process.pid}"
            link = [f"link add p-{machine.name} type veth {peer}", f"link set p-{machine.name} master br0 up"]
            host.run_inside(self._hub(), "n", ["ip", "-batch", "-"], "the bridge", stdin="\n".join(link))
            inside = [f"addr add {machine.address}/16 dev eth0", "link set lo up", "link set eth0 up"]
            host.run_inside(process, "n", ["ip", "-batch", "-"], machine.name, stdin="\n".join(inside))

        host.start_first_process(spec, remember)

    def _boot(self, machine: Machine, *slurmd_arguments: str) -> None:
        """Start the services of a machine."""
        self._services(machine, "boot", *slurmd_arguments)

    def _services(self, machine: Machine, verb: str, *arguments: str) -> None:
        command = shlex.join([f"/{node.SERVICES_PATH}", verb, machine.role, *arguments])
        # Daemons keep what they were started with open: into a file, or reading the pipe would never end.
        log = "/var/log/testbed-services.log"
        done = self.run(
            machine.name, ["sh", "-c", f"{command} >>{log} 2>&1 </dev/null"], timeout_s=30, check=False
        )
        if done.returncode:
            raise TestbedError(f"{machine.name}: {command} failed: {self.read(machine.name, log)[-1500:]}")

    # -- the machines --------------------------------------------------------------------------------

    def machines(self) -> list[Machine]:
        """Controller, login node and compute nodes."""
        return node.machines(int(self.record.entries("cluster")[-1]["nodes"]))

    def nodes(self) -> list[str]:
        """Names of the compute nodes."""
        return [machine.name for machine in self._compute()]

    def _compute(self) -> list[Machine]:
        return [machine for machine in self.machines() if machine.role == "compute"]

    def _machine(self, name: str) -> Machine:
        for machine in self.machines():
            if machine.name == name:
                return machine
        known = ", ".join(machine.name for machine in self.machines())
        raise TestbedError(f"cluster {self.name} has no machine {name!r}; it has {known}")

    def _hub(self) -> Process:
        hub = self.record.process("hub")
        if not hub or not hub.alive():
            raise TestbedError(f"cluster {self.name} is not up")
        return hub

    def init(self, name: str) -> Process:
        """The first process of a machine, as the host numbers it. Raises TestbedError when it is off."""
        process = self.record.process(self._machine(name).name)
        if not process or not process.alive():
            raise TestbedError(f"{name} of cluster {self.name} is not running")
        return process

    def _room(self) -> Path:
        """The machine room's own directory, as this process can reach it."""
        return Path(f"/proc/{self._hub().pid}/root{self.work}/room")

    def _overlays(self) -> dict[str, str]:
        """File systems of this machine that nodes overlay, each with the suffix of its upper directory."""
        return dict(self.record.entries("cluster")[-1]["overlays"])

    def _uppers(self, name: str) -> dict[str, Path]:
        """For each overlay of a machine, the directory that holds what the machine changed in it."""
        return {top: self._room() / name / f"upper{suffix}" for top, suffix in self._overlays().items()}

    def path(self, name: str, path: str) -> Path:
        """A file of a machine as this process can reach it (absolute symbolic links in it lead astray)."""
        return Path(f"/proc/{self.init(name).pid}/root{path}")

    def read(self, name: str, path: str) -> str:
        """The text of a file of a machine, "" when it is not there."""
        try:
            return self.path(name, path).read_text(errors="surrogateescape")
        except FileNotFoundError:
            return ""

    def _in_hub(self, argv: Sequence[str], stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return host.run_inside(self._hub(), "mnp", argv, "the machine room", stdin=stdin)

    # -- running things ------------------------------------------------------------------------------

    def run(
        self,
        name: str,
        argv: Sequence[str],
        *,
        user: str | None = None,
        input: str | bytes | None = None,  # noqa: A002 - as subprocess.run has it
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine, as root or as `user` (then in that user's home on global storage).

        Output is text; bytes that are not UTF-8 survive as surrogates (`os.fsencode` gives them back).
        Raises CommandError when it fails and `check` is set, WaitError when it takes too long.
        """
        return host.run_inside(
            self.init(name), "muinp", self.argv(argv, user, cwd, env), name,
            shown=argv, stdin=input, timeout_s=timeout_s, check=check,
        )  # fmt: skip

    def argv(
        self,
        argv: Sequence[str],
        user: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
    ) -> list[str]:
        """`argv` such that, inside a machine, it runs as that user, there, with that added environment."""
        home = (
            "/root" if user in (None, "root") else next((u.home for u in node.USERS if u.name == user), None)
        )
        if home is None:
            raise TestbedError(f"no user {user!r} on the cluster; there are {[u.name for u in node.USERS]}")
        name = user or "root"
        settings = {"HOME": home, "USER": name, "LOGNAME": name, "SHELL": "/bin/bash", **(env or {})}
        become = (
            [] if name == "root" else ["setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups", "--"]
        )
        return [
            "env", "-C", cwd or home, *(f"{key}={value}" for key, value in settings.items()), *become, *argv,
        ]  # fmt: skip

    def exec_argv(self, name: str, argv: Sequence[str], user: str | None = None) -> list[str]:
        """The command line to replace oneself with, for an interactive command on a machine."""
        env = {"TERM": os.environ.get("TERM", "dumb")}
        return host.nsenter(self.init(name), "muinp", self.argv(argv, user, env=env))

    # -- Slurm ---------------------------------------------------------------------------------------

    def submit(
        self,
        user: str,
        script: str,
        *sbatch_arguments: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
    ) -> int:
        """`sbatch` on the login node as `user`, in the user's home; returns the job's id.

        `script` may be indented as a whole: it is dedented, since `#SBATCH` counts at the start of a line only.
        Raises CommandError, with what sbatch printed, when the submission is refused.
        """
        argv = ["sbatch", "--parsable", *sbatch_arguments]
        done = self.run("login", argv, user=user, input=textwrap.dedent(script), cwd=cwd, env=env)
        return int(done.stdout.strip().split(";")[0])

    def job(self, jobid: int) -> dict[str, str]:
        """`scontrol show job` as a dictionary. Raises CommandError when Slurm does not know the job."""
        return slurm.parse_show(self.run("ctl", ["scontrol", "-o", "show", "job", str(jobid)]).stdout.strip())

    def wait_job(
        self, jobid: int, states: str | Collection[str] = slurm.JOB_ENDED, timeout_s: float = 60
    ) -> dict[str, str]:
        """Wait until the job is in one of `states` (default: it has ended); returns what `job` does.

        COMPLETED, FAILED, … are only shown once the Epilog is done on every node. Raises TestbedError at once
        when the job has ended otherwise or is held, WaitError naming the state it is in.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        seen: dict[str, str] = {}

        def probe() -> tuple[bool, str]:
            seen.update(self.job(jobid))
            state = seen["JobState"]
            stuck = state in slurm.JOB_ENDED or "held" in seen.get("Reason", "").lower()
            if stuck and state not in wanted:
                raise TestbedError(
                    f"job {jobid} is {state} ({seen.get('Reason')}), not {'/'.join(sorted(wanted))}"
                )
            return state in wanted, f"{state} ({seen.get('Reason')})"

        wait_until(f"job {jobid} to be {'/'.join(sorted(wanted))}", probe, timeout_s, 0.05)
        return seen

    def job_output(self, jobid: int) -> str:
        """What the job's script printed so far; see `output`."""
        return self.output(self.job(jobid)["StdOut"])

    def output(self, path: str) -> str:
        """What is in an output file on global storage, without what srun says while it has to wait for a step."""
        waits = r"^srun: (Job \d+ step creation|Step created for) .*\n"
        return re.sub(waits, "", self.read("login", path), flags=re.MULTILINE)

    def run_job(self, user: str, script: str, *sbatch_arguments: str, timeout_s: float = 60) -> str:
        """Submit, wait until COMPLETED, return the output; else raise TestbedError with the output."""
        jobid = self.submit(user, script, *sbatch_arguments)
        done = self.wait_job(jobid, timeout_s=timeout_s)
        if done["JobState"] != "COMPLETED":
            raise TestbedError(f"job {jobid} is {done['JobState']}: {self.job_output(jobid)[-1500:]}")
        return self.job_output(jobid)

    def expire(self, jobid: int) -> None:
        """Let a running job reach its time limit now: Slurm counts in minutes and looks every 30 s.

        The job is TIMEOUT within 30 s plus KillWait.
        """
        self.run("ctl", ["scontrol", "update", f"JobId={jobid}", "EndTime=now+1"])

    def node_state(self, name: str) -> NodeState:
        """What Slurm says of a node: flags (IDLE, DRAIN, …) and the reason."""
        line = self.run("ctl", ["scontrol", "-o", "show", "node", name]).stdout.strip()
        return slurm.parse_node_state(line)

    def wait_node(self, name: str, flags: str | Collection[str], timeout_s: float = 30) -> NodeState:
        """Wait until Slurm shows the node with exactly these flags, e.g. "IDLE" or {"IDLE", "DRAIN"}."""
        wanted = {flags} if isinstance(flags, str) else set(flags)

        def probe() -> tuple[bool, NodeState]:
            state = self.node_state(name)
            return state.flags == wanted, state

        return wait_until(f"node {name} to be {'+'.join(sorted(wanted))}", probe, timeout_s, 0.05)

    def wait_idle(self, timeout_s: float = 30) -> None:
        """Wait until every compute node is idle."""
        wanted = "\n".join(["idle"] * len(self.nodes()))

        def probe() -> tuple[bool, str]:
            done = self.run("ctl", ["sinfo", "-h", "-N", "-o", "%T"], check=False)
            return done.stdout.strip() == wanted, " ".join((done.stdout + done.stderr).split())

        wait_until(f"all {len(self.nodes())} nodes to be idle", probe, timeout_s, 0.05)

    def _wait_controller(self, timeout_s: float = 20) -> None:
        def probe() -> tuple[bool, str]:
            done = self.run("ctl", ["scontrol", "ping"], check=False)
            return done.returncode == 0, done.stdout.strip()

        wait_until("slurmctld to answer", probe, timeout_s)

    def resume(self, name: str, timeout_s: float = 30) -> None:
        """Give a drained node back, and wait until Slurm shows it idle."""
        self.run("ctl", ["scontrol", "update", f"NodeName={name}", "State=RESUME"])
        self.wait_node(name, "IDLE", timeout_s)

    def restart_slurm(self) -> None:
        """Restart slurmctld and every slurmd, e.g. because a SPANK plugin or slurm.conf changed."""
        with ThreadPoolExecutor(8) as pool:
            self._services(self._machine("ctl"), "restart-slurm")
            self._wait_controller()
            list(pool.map(lambda machine: self._services(machine, "restart-slurm"), self._compute()))
        self.wait_idle()

    def log(self, name: str) -> str:
        """The log of slurmctld or slurmd on a machine."""
        return self.read(name, LOG_FILES["slurmctld" if name == "ctl" else "slurmd"])

    def log_tails(self, lines: int = 15) -> str:
        """The end of every Slurm log, for a person to read."""
        found = []
        for machine in self.machines():
            if machine.role != "login":
                with contextlib.suppress(TestbedError):
                    tail = self.log(machine.name).splitlines()[-lines:]
                    found.append("\n".join([f"--- {machine.name}", *tail]))
        return "\n".join(found)

    # -- the product ---------------------------------------------------------------------------------

    def install_product(self, config: str | None = None) -> None:
        """Install (or renew) the product on every machine and restart Slurm's daemons.

        Raises TestbedError naming what of the product does not exist.
        """
        self._put_product(product.config() if config is None else config)
        self.restart_slurm()

    def install_packages(self, config: str | None = None) -> None:
        """Install the product from the Debian packages in dist/, and restart Slurm's daemons.

        For a cluster that has nothing of the product. Raises TestbedError where packages are missing, CommandError
        where dpkg fails.
        """

        def install(machine: Machine) -> None:
            product.install_site_files(self.path(machine.name, "/"), machine, text, secret)
            if packages := product.packages(machine):
                self.run(machine.name, ["dpkg", "--no-triggers", "--install", *packages])

        text, secret = product.config() if config is None else config, product.new_secret()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(install, self.machines()))
        self.restart_slurm()

    def write_config(self, config: str) -> None:
        """Replace only the product's configuration, on every machine."""
        for machine in self.machines():
            node.put(self.path(machine.name, "/"), product.CONFIG_PATH, config)

    def _put_product(self, config: str) -> None:
        secret = self.read("ctl", product.SECRET_PATH).strip() or product.new_secret()
        product.compile_python()
        for machine in self.machines():
            product.install(self.path(machine.name, "/"), machine, config, secret)

    # -- faults --------------------------------------------------------------------------------------

    def processes(self, name: str, pattern: str = "") -> list[Process]:
        """Processes of a machine whose command line matches the pattern, as the host numbers them."""
        found = host.processes_of(self.init(name))
        return [process for process in found if re.search(pattern, " ".join(process.cmdline()))]

    def kill(self, name: str, target: str | int, number: signal.Signals = signal.SIGKILL) -> list[int]:
        """Signal processes of a machine: a pid as that machine numbers it, or a pattern on the command line.

        Returns the pids (the machine's own numbers), with SIGKILL only once they have ended: a busy machine takes its
        time. Raises TestbedError when there is none.
        """
        if isinstance(target, int):
            chosen = [process for process in self.processes(name) if process.inner_pid() == target]
        else:
            chosen = self.processes(name, target)
        hit = []
        for process in chosen:
            with contextlib.suppress(ProcessLookupError):
                pid = process.inner_pid()
                process.send(number)
                hit.append(pid)
        if not hit:
            raise TestbedError(f"{name}: no process {target!r}")
        if number == signal.SIGKILL:
            for process in chosen:
                process.kill(f"{target!r} of {name}")
        return hit

    def freeze(self, name: str, target: str | int) -> list[int]:
        """SIGSTOP, as `kill` has it."""
        return self.kill(name, target, signal.SIGSTOP)

    def thaw(self, name: str, target: str | int) -> list[int]:
        """SIGCONT, as `kill` has it."""
        return self.kill(name, target, signal.SIGCONT)

    def cut(self, name: str) -> None:
        """Take a machine's network away, at the bridge: as if the cable were pulled."""
        self._bridge_port(name, "down")

    def restore(self, name: str) -> None:
        """Give a machine its network back."""
        self._bridge_port(name, "up")

    def _bridge_port(self, name: str, state: str) -> None:
        argv = ["ip", "link", "set", f"p-{self._machine(name).name}", state]
        host.run_inside(self._hub(), "n", argv, "the bridge")

    def power_off(self, name: str) -> None:
        """End every process of a machine at once; its devices, /etc and /var stay, /run and /tmp are gone."""
        init = self.init(name)
        keep = {loop.device for loop in self._image_loops()}
        own = snapshot.devices(init)
        init.kill(f"{name} of cluster {self.name}")
        # A loop device that was set up on the machine would not outlive it either.
        for loop in host.loops_on(own):
            if loop.device not in keep:
                host.detach(loop)
        port = ["ip", "link", "show", f"p-{name}"]
        wait_until(
            f"the network of {name} to go",
            lambda: (host.run_inside(self._hub(), "n", port, "the bridge", check=False).returncode != 0, ""),
            10,
        )

    def power_on(self, name: str) -> None:
        """Start a machine again and its services; Slurm is told that the node was rebooted."""
        machine = self._machine(name)
        self._start_machine(machine)
        if self.path(name, product.CONFIG_PATH).exists():
            product.make_directories(self.path(name, "/"), machine)
        self._boot(machine, *(["-b"] if machine.role == "compute" else []))

    def reboot(self, name: str) -> None:
        """Power off, power on; returns when the services run, before Slurm has taken the node back."""
        self.power_off(name)
        self.power_on(name)

    def fill(self, where: str, leave: int = 0) -> None:
        """Fill a node's device ("n1") or global storage ("global") but for `leave` bytes."""
        directory = self._storage(where)
        with open(directory / FILLER, "ab") as filler:
            status = os.statvfs(directory)
            step = 1 << 30
            while step >= 4096:
                status = os.statvfs(directory)
                room = status.f_bavail * status.f_frsize - leave
                size = min(step, room)
                try:
                    if size < 4096:
                        break
                    os.posix_fallocate(filler.fileno(), filler.tell(), size)
                    filler.seek(0, os.SEEK_END)
                except OSError:
                    step //= 2
        if leave == 0:
            self._fill_the_rest(directory)

    @staticmethod
    def _fill_the_rest(directory: Path) -> None:
        """Space a file system keeps for its own trees: written until it says no."""
        with open(directory / FILLER, "ab") as filler, contextlib.suppress(OSError):
            while True:
                os.write(filler.fileno(), bytes(4096))

    def unfill(self, where: str) -> None:
        """Undo `fill`."""
        (self._storage(where) / FILLER).unlink(missing_ok=True)

    def _storage(self, where: str) -> Path:
        return (
            self._room() / "global"
            if where == "global"
            else self._room() / "nvme" / self._machine(where).name
        )

    def readonly(self, path: str) -> None:
        """Make a directory of global storage read-only on every machine, for root too (EROFS).

        What has a file open for writing, or works in the directory already, keeps its way in.
        """
        if not (path == "/global" or path.startswith("/global/")) or ".." in path.split("/"):
            raise TestbedError(f"{path} is not a directory of global storage (/global/…)")
        if path in self._readonly():
            return
        script = 'set -e; mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"'
        self.record.write("readonly", path=path, on=True)
        self._on_every_machine(["sh", "-c", script, "sh", path])

    def writable(self, path: str) -> None:
        """Undo `readonly`."""
        if path in self._readonly():
            self.record.write("readonly", path=path, on=False)
            self._on_every_machine(["umount", "-l", path])

    def _readonly(self) -> set[str]:
        state = {str(entry["path"]): bool(entry["on"]) for entry in self.record.entries("readonly")}
        return {path for path, on in state.items() if on}

    def _on_every_machine(self, argv: Sequence[str]) -> None:
        for machine in self.machines():
            process = self.record.process(machine.name)
            if process and process.alive():
                self.run(machine.name, argv, cwd="/")

    # -- is it clean? --------------------------------------------------------------------------------

    def snapshot(self, name: str) -> Snapshot:
        """Processes, mounts, listening ports, loop devices and files of a machine, to be compared later."""
        return snapshot.take(name, self.init(name), self._uppers(name))

    def snapshots(self, names: Iterable[str] | None = None) -> list[Snapshot]:
        """Snapshots of several machines, by default of all compute nodes."""
        return [self.snapshot(name) for name in (names or self.nodes())]

    def wait_clean(self, before: Iterable[Snapshot], timeout_s: float = 5) -> None:
        """Wait until every machine is again as it was. Raises WaitError listing what differs."""

        def probe() -> tuple[bool, str]:
            changes = [line for then in before for line in self.snapshot(then.node).diff(then)]
            return not changes, "\n  ".join(["", *changes[:40]])

        before = list(before)
        wait_until("the nodes to be as they were", probe, timeout_s, 0.1)
