"""The testbed's command line: reads arguments, calls Cluster, prints. Nothing else."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from pathlib import Path

from tests.testbed import product
from tests.testbed.cluster import DEFAULT_NAME, DEVICE_SIZE, Cluster
from tests.testbed.host import CommandError, TestbedError

DESCRIPTION = """\
A real Slurm cluster on this machine, in namespaces: a controller (ctl), a login node (login) and compute
nodes (n1, n2, …), with global storage on /global and an "NVMe" file system on /nvme of each compute node.
Needs root. Several clusters can be up side by side under different names.

  python3 -m tests.testbed up --nodes 3
  python3 -m tests.testbed submit --user alice job.sh -N2
  python3 -m tests.testbed exec ctl -- squeue
  python3 -m tests.testbed fault cut n2
  python3 -m tests.testbed down
"""


def parser() -> argparse.ArgumentParser:
    """All commands and their help."""
    top = argparse.ArgumentParser(
        "python3 -m tests.testbed",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default=DEFAULT_NAME, help="the cluster's name (default: %(default)s)")
    named_again = argparse.ArgumentParser(add_help=False)
    named_again.add_argument("--name", default=argparse.SUPPRESS, help="the cluster's name")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser(
        "up", parents=[named], help="bring a cluster up and wait until its nodes are idle"
    )
    up.add_argument("--nodes", type=int, default=3, help="compute nodes (default: %(default)s)")
    up.add_argument("--product", action=argparse.BooleanOptionalAction, default=False,
                    help="install the product on it (default: no)")  # fmt: skip
    _add_config(up)
    up.add_argument(
        "--burst-buffer", type=Path, metavar="LUA", help="switch burst_buffer/lua on with this script"
    )
    up.add_argument("--slurm-extra", default="", metavar="LINES", help="more lines for slurm.conf")
    up.add_argument(
        "--device-size", default=DEVICE_SIZE, help="of each node's device and of global storage, sparse"
    )

    run = commands.add_parser(
        "exec",
        parents=[named],
        help="run a command on a machine: exec NODE -- CMD …",
        epilog="Without a command: a shell.",
    )
    run.add_argument("--user", help="alice or bob (default: root)")
    run.add_argument("node", help="ctl, login, n1, …")
    run.add_argument("argv", nargs="*", metavar="-- CMD …")

    submit = commands.add_parser(
        "submit",
        parents=[named],
        help="sbatch on the login node as a user",
        epilog="Prints the job's id; with --wait also output and end state. Its options go before SCRIPT.",
    )
    submit.add_argument("--user", default="alice", help="alice or bob (default: %(default)s)")
    submit.add_argument("--wait", action="store_true", help="wait for the end; exit 0 only if COMPLETED")
    submit.add_argument("script", type=Path, help="the job script, a file of this machine")
    submit.add_argument("sbatch", nargs=argparse.REMAINDER, metavar="ARG …", help="options for sbatch")

    install = commands.add_parser(
        "install", parents=[named], help="install or renew the product, restart Slurm"
    )
    _add_config(install)
    install.add_argument("--packages", action="store_true",
                         help="from the Debian packages in dist/, on a cluster that has nothing of it")  # fmt: skip

    status = commands.add_parser(
        "status", parents=[named], help="machines, nodes and jobs; --logs for Slurm's logs"
    )
    status.add_argument(
        "--logs", type=int, nargs="?", const=15, metavar="LINES", help="the end of each Slurm log"
    )

    commands.add_parser("down", parents=[named], help="end everything of a cluster, also after a crash")
    commands.add_parser("list", help="the clusters that are up, or left by a crash")

    fault = commands.add_parser("fault", parents=[named], help="break something, or mend it: fault --help")
    kinds = fault.add_subparsers(dest="fault", required=True, metavar="FAULT")
    for kind, text in {
        "kill": "SIGKILL processes of a node",
        "freeze": "SIGSTOP processes of a node",
        "thaw": "SIGCONT processes of a node",
    }.items():
        one = kinds.add_parser(kind, parents=[named_again], help=text)
        one.add_argument("node")
        one.add_argument(
            "target", help="a pid as the node numbers it, or a regular expression on the command line"
        )
    for kind, text in {
        "cut": "take a node's network away",
        "restore": "give a node its network back",
        "reboot": "end every process, empty /run and /tmp, keep devices, /etc and /var, start again",
        "off": "the first half of reboot",
        "on": "the second half of reboot",
    }.items():
        kinds.add_parser(kind, parents=[named_again], help=text).add_argument("node")
    fill = kinds.add_parser("fill", parents=[named_again], help="fill a node's device, or global storage")
    fill.add_argument("where", help="n1, … or global")
    fill.add_argument("--leave", type=int, default=0, metavar="BYTES", help="leave that much free")
    kinds.add_parser("unfill", parents=[named_again], help="undo fill").add_argument("where")
    for kind, text in {
        "readonly": "make a directory of global storage read-only on every machine (EROFS, root too)",
        "writable": "undo readonly",
    }.items():
        kinds.add_parser(kind, parents=[named_again], help=text).add_argument("path", help="/global/…")
    return top


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config", type=Path, help="the product's config.toml, in place of the testbed's own"
    )
    command.add_argument(
        "--storage",
        choices=["directory", "image"],
        default="directory",
        help="what the testbed's own config.toml says that an instance's data lies in (default: %(default)s)",
    )


def _config(options: argparse.Namespace) -> str:
    return str(options.config.read_text()) if options.config else product.config(options.storage)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed."""
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:cut])
    options.rest = words[cut + 1 :]  # what follows "--" is never ours to interpret
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # jobs print any bytes
    try:
        return run(options)
    except CommandError as error:
        sys.stderr.write(f"testbed: {error}\n")
        return error.returncode if 0 < error.returncode < 128 else 1
    except TestbedError as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        sys.stderr.write(f"testbed: {error}{notes}\n")
        return 1


def run(options: argparse.Namespace) -> int:
    """Do what the parsed command line says."""
    command = options.command
    if command == "list":
        sys.stdout.write("".join(f"{name}\n" for name in Cluster.names()))
    elif command == "up":
        bring_up(options)
    elif command == "down":
        Cluster(options.name).down()
    else:
        cluster = Cluster.attach(options.name)
        if command == "exec":
            words = options.argv + options.rest or ["/bin/bash", "-l"]
            full = cluster.exec_argv(options.node, words, options.user)
            sys.stdout.flush()
            os.execvp(full[0], full)
        elif command == "submit":
            return submit(cluster, options)
        elif command == "install":
            (cluster.install_packages if options.packages else cluster.install_product)(_config(options))
        elif command == "status":
            status(cluster, options.logs)
        else:
            fault(cluster, options)
    return 0


def bring_up(options: argparse.Namespace) -> None:
    """`up`."""
    begun = time.monotonic()
    cluster = Cluster.up(
        options.name,
        options.nodes,
        with_product=options.product,
        config=_config(options),
        slurm_extra=options.slurm_extra,
        burst_buffer=options.burst_buffer,
        device_size=options.device_size,
    )
    took = time.monotonic() - begun
    sys.stdout.write(f"cluster {cluster.name}: {len(cluster.nodes())} nodes idle after {took:.1f} s\n")


def submit(cluster: Cluster, options: argparse.Namespace) -> int:
    """`submit`."""
    jobid = cluster.submit(options.user, options.script.read_text(), *options.sbatch, *options.rest)
    sys.stdout.write(f"{jobid}\n")
    if not options.wait:
        return 0
    sys.stdout.flush()
    state = cluster.wait_job(jobid, timeout_s=3600)["JobState"]
    sys.stdout.write(cluster.job_output(jobid) + f"{state}\n")
    return 0 if state == "COMPLETED" else 1


def status(cluster: Cluster, log_lines: int | None) -> None:
    """`status`."""
    for machine in cluster.machines():
        try:
            pid = f"pid {cluster.init(machine.name).pid}"
        except TestbedError:
            pid = "off"
        state = str(cluster.node_state(machine.name)) if machine.role == "compute" else ""
        sys.stdout.write(f"{machine.name:8} {machine.role:11} {machine.address:14} {pid:12} {state}\n")
    sys.stdout.write(cluster.run("ctl", ["squeue"]).stdout)
    if log_lines:
        sys.stdout.write(cluster.log_tails(log_lines) + "\n")


def fault(cluster: Cluster, options: argparse.Namespace) -> None:
    """`fault`."""
    kind = options.fault
    if kind in ("kill", "freeze", "thaw"):
        target = int(options.target) if options.target.isdigit() else options.target
        hit = getattr(cluster, kind)(options.node, target)
        sys.stdout.write(f"{options.node}: {kind} {' '.join(map(str, hit))}\n")
    elif kind in ("cut", "restore", "reboot"):
        getattr(cluster, kind)(options.node)
    elif kind == "off":
        cluster.power_off(options.node)
    elif kind == "on":
        cluster.power_on(options.node)
    elif kind == "fill":
        cluster.fill(options.where, options.leave)
    elif kind == "unfill":
        cluster.unfill(options.where)
    elif kind == "readonly":
        cluster.readonly(options.path)
    else:
        cluster.writable(options.path)
