"""The commands that people type. Each imports what it needs when it runs: `--help` and refusals must be quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from beeond_ctl import CONFIG_PATH, CONFIG_VARIABLE
from beeond_ctl import request as requests
from beeond_ctl.cli.flush import flush
from beeond_ctl.cli.stage import stage
from beeond_ctl.errors import RequestError, UsageError

if TYPE_CHECKING:
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.launch import Launcher

_BEEOND = click.option(
    "--beeond",
    "keys",
    is_flag=False,
    flag_value="",
    default="",
    metavar="[KEY=VALUE,...]",
    help="As for sbatch.",
)
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="beeond-ctl", prog_name="beeond-ctl")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), default=CONFIG_PATH, show_default=True,
    envvar=CONFIG_VARIABLE, help="The site's configuration.",
)  # fmt: skip
@click.pass_context
def cli(context: click.Context, config_path: Path) -> None:
    """An on-demand parallel file system for every Slurm job.

    Users ask for one with `#SBATCH --beeond`, `--beeond-stage-in=SRC:DST` and `--beeond-stage-out=SRC:DST`, and
    find it at $BEEOND. These commands show, check and repair what happens behind that.

    Exit codes: 0 done, 1 the work failed, 2 bad usage or configuration.
    """
    context.obj = config_path


def _load(path: Path) -> SiteConfig:
    """The site's configuration. What checks it takes longer to import than all else, and half of the commands do
    without."""
    from beeond_ctl import config

    return config.load(path)


# --- request ----------------------------------------------------------------------------------------------


@cli.group(hidden=True)
def request() -> None:
    """What the SPANK plugin asks of the controller at submission."""


@request.command()
@click.pass_obj
def encode(config_path: Path) -> None:
    """Check the options on stdin and print the request they make, on one line.

    stdin: name, NUL, value, NUL, and so on, as the plugin collected them.
    """
    data = sys.stdin.buffer.read(4 * requests.MAX_ENCODED + 1)
    if len(data) > 4 * requests.MAX_ENCODED:
        raise RequestError(
            "the options are longer than a request may be; name directories instead of single files"
        )
    words = [os.fsdecode(word) for word in data.split(b"\0")]
    if words.pop() or len(words) % 2:
        raise UsageError("want pairs of name and value on stdin, each ended by a NUL")
    asked = requests.parse_options(list(zip(words[::2], words[1::2], strict=True)))
    if config_path.exists():  # a login node without the configuration can still check the grammar
        from beeond_ctl.plan import check_request

        check_request(_load(config_path), asked)
    click.echo(requests.encode(asked))


# --- plan -------------------------------------------------------------------------------------------------


@cli.command()
@click.option("-w", "--nodes", "node_list", required=True, help="Nodes as Slurm writes them: n[1-16].")
@_BEEOND
@click.option(
    "--beeond-stage-in", "stage_in", multiple=True, metavar="SRC:DST", help="As for sbatch; repeatable."
)
@click.option(
    "--beeond-stage-out", "stage_out", multiple=True, metavar="SRC:DST", help="As for sbatch; repeatable."
)
@click.option(
    "--job", "job_id", type=click.IntRange(1), default=1, show_default=True, help="Job id to plan for."
)
@click.option("--node", help="Show the services and files of this node; default: the first.")
@_AS_JSON
@click.pass_obj
def plan(
    config_path: Path, node_list: str, keys: str, stage_in: tuple[str, ...], stage_out: tuple[str, ...],
    job_id: int, node: str | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Show what would run where for a request. Changes nothing, and needs no privileges.

    \b
    Example:
      beeond-ctl plan -w 'n[1-4]' --beeond capacity=2TiB
    """
    from beeond_ctl import slurm
    from beeond_ctl.cli import show
    from beeond_ctl.plan import Job, make_plan

    options = [("beeond", keys), *(("beeond-stage-in", text) for text in stage_in)]
    options += [("beeond-stage-out", text) for text in stage_out]
    job = Job(job_id, os.getuid(), os.getgid(), str(os.getuid()))
    made = make_plan(_load(config_path), requests.parse_options(options), job, slurm.expand_nodes(node_list))
    chosen = node or made.leader
    if chosen not in made.node_index:
        raise UsageError(f"--node: {chosen} is not in {node_list}")
    show.plan(made, chosen, as_json=as_json)


# --- status -----------------------------------------------------------------------------------------------


@cli.command()
@click.argument("job_id", type=click.IntRange(1), required=False)
@click.option(
    "-a", "--all-nodes", is_flag=True, help="Ask all nodes of the job, and show what they say in short."
)
@_AS_JSON
@click.option("--here", is_flag=True, hidden=True, help="This node's part, on one line.")
@click.pass_obj
def status(config_path: Path, job_id: int | None, *, all_nodes: bool, as_json: bool, here: bool) -> None:
    """Show the instances on this node: phase, health, capacity, transfers, and what was kept of ended jobs.

    Without JOB_ID all of them; within a job, the job's own. Root sees everything, a user what is their own. With
    --all-nodes the exit code is 1 unless all is well on all nodes; root asks them over ssh, a user by a job step.
    The shell of salloc is on none of the job's nodes: there it takes --all-nodes.
    """
    from beeond_ctl.cli import show

    own, of_slurm = (_number(os.environ.get(name, "")) for name in ("BEEOND_JOB_ID", "SLURM_JOB_ID"))
    chosen = job_id or own
    config = _load(config_path)
    if here or not all_nodes:
        show.status(config, chosen, as_json=as_json, on_one_line=here, elsewhere=chosen or of_slurm)
        return
    chosen = chosen or of_slurm  # the shell of salloc has no other
    if chosen is None:
        raise UsageError("--all-nodes: of which job? Name it")
    from beeond_ctl.lifecycle import gather

    if not show.everywhere(*gather.status(config, chosen), as_json=as_json):
        raise click.exceptions.Exit(1)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


# --- report -----------------------------------------------------------------------------------------------


@cli.command()
@click.argument("job_id", type=click.IntRange(1))
@click.option(
    "-w",
    "--nodes",
    "node_list",
    help="The job's nodes: n[1-3]. For root, where this host does not know them.",
)
@_AS_JSON
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False), help="Write a page that needs nothing else."
)
@click.option("--here", is_flag=True, hidden=True, help="This node's events, for another node.")
@click.pass_obj
def report(
    config_path: Path, job_id: int, node_list: str | None, *, as_json: bool, html: str | None, here: bool
) -> None:
    """Show where a job's time and bytes went: steps and who was waited for, transfers, faults, wiped targets.

    Users see their own jobs, from when they have ended; root sees all, and asks the job's nodes over ssh for what they
    have not told yet.
    """
    from beeond_ctl.cli import show
    from beeond_ctl.lifecycle import gather

    config = _load(config_path)
    if here:
        _as_root("report --here")
        click.echo(gather.here(config, job_id))
        return
    show.report(job_id, *gather.gather(config, job_id, node_list), as_json=as_json, html=html)


# --- check ------------------------------------------------------------------------------------------------


@cli.command()
@click.option(
    "--only-configuration", is_flag=True, help="Look at the file alone: to check a new one, anywhere."
)
@_AS_JSON
@click.pass_obj
def check(config_path: Path, *, only_configuration: bool, as_json: bool) -> None:
    """Does this node fit: configuration, secret, devices, programs, and Slurm's own settings?

    Run it as root on a compute node. Prints a line for each thing looked at: ok, warn (works, but will bite) or fail.
    Exit code 1 if one of them would keep jobs from working.
    """
    from beeond_ctl import check as checks
    from beeond_ctl.cli import show

    look = checks.check_configuration if only_configuration else checks.check_node
    if not show.checks(look(config_path), as_json=as_json):
        raise click.exceptions.Exit(1)


# --- sweep ------------------------------------------------------------------------------------------------


@cli.command()
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option(
    "--deadline", "deadline_s", type=click.FloatRange(1), metavar="SECONDS",
    help="Begin nothing after that; what is left is for the next sweep.",
)  # fmt: skip
@_AS_JSON
@click.pass_obj
def sweep(config_path: Path, *, dry_run: bool, deadline_s: float | None, as_json: bool) -> None:
    """Find what dead jobs left on this node, and remove it. For root; at boot, from a timer, or by hand.

    Live instances are left alone. Data that is owed a stage-out is kept, the node drained, and the command named that
    finishes it. What is stuck drains the node too, until a sweep finds it gone. Exit code 1 if something needs a
    person: it is stuck, was kept for longer than sweep.kept_days, or Slurm does not say whether its job lives.
    """
    from beeond_ctl.cli import show
    from beeond_ctl.lifecycle.sweep import sweep as run

    _as_root("sweep")
    found = run(_load(config_path), dry_run=dry_run, deadline_s=deadline_s)
    if dry_run and not found and not as_json:
        click.echo("nothing is left on this node")
    if not show.leftovers(found, as_json=as_json):
        raise click.exceptions.Exit(1)


# --- secret -----------------------------------------------------------------------------------------------


@cli.group()
def secret() -> None:
    """Make the site secret on this node, or rotate it while jobs run. For root; see the admin guide.

    Secrets are shown by name only. A name is derived from the secret and does not lead back to it.
    """


def _load_as_root(path: Path) -> SiteConfig:
    """Not in the group, which would refuse `--help` of its commands."""
    _as_root("secret")
    return _load(path)


@secret.command("show")
@_AS_JSON
@click.pass_obj
def secret_show(config_path: Path, *, as_json: bool) -> None:
    """Name the current secret, those that are accepted besides, and which of these instances still use."""
    from beeond_ctl.cli import show
    from beeond_ctl.lifecycle import secret as secrets

    show.secrets(secrets.names(_load_as_root(config_path)), as_json=as_json)


@secret.command("add")
@click.pass_obj
def secret_add(config_path: Path) -> None:
    """Make a new secret and print its name: the current one where there is none, else an accepted one."""
    from beeond_ctl.lifecycle import secret as secrets

    click.echo(secrets.add(_load_as_root(config_path)))


@secret.command("export")
@click.pass_obj
def secret_export(config_path: Path) -> None:
    """Print this node's secrets, for `learn` on another node. Never store the output, or show it."""
    from beeond_ctl.lifecycle import secret as secrets

    click.echo(secrets.export(_load_as_root(config_path)), nl=False)


@secret.command("learn")
@click.pass_obj
def secret_learn(config_path: Path) -> None:
    """Accept what `export` of another node printed, from stdin; a node without a secret has the same then."""
    from beeond_ctl.lifecycle import secret as secrets

    _say_changed(changed=secrets.learn(_load_as_root(config_path), sys.stdin.buffer.read(1 << 20)))


@secret.command("use")
@click.argument("name")
@click.pass_obj
def secret_use(config_path: Path, name: str) -> None:
    """Give new instances the secret called NAME from now on; the one before stays accepted."""
    from beeond_ctl.lifecycle import secret as secrets

    _say_changed(changed=secrets.use(_load_as_root(config_path), name))


@secret.command("forget")
@click.pass_obj
def secret_forget(config_path: Path) -> None:
    """Drop what is accepted besides the current secret, but for what instances on this node still use."""
    from beeond_ctl.lifecycle import secret as secrets

    _say_changed(changed=secrets.forget(_load_as_root(config_path)))


def _say_changed(*, changed: bool) -> None:
    click.echo("changed" if changed else "unchanged")


# --- stage ------------------------------------------------------------------------------------------------


cli.add_command(stage)
cli.add_command(flush)


# --- recover ----------------------------------------------------------------------------------------------


@cli.command()
@click.argument("job_id", type=click.IntRange(1))
@click.option(
    "-w", "--nodes", "node_list", help="The job's nodes: n[1-3]. Default: as recorded on this node."
)
@click.option("--discard", is_flag=True, help="Give the data up: wipe it without staging it out.")
@click.option("--yes", is_flag=True, help="With --discard: do not ask.")
@click.option("--mine", is_flag=True, help="Under sudo: only if the job was of the user who called sudo.")
@click.option(
    "--owner", type=click.IntRange(0), hidden=True, help="Only if the job was of the user with this uid."
)
@click.option("--here", is_flag=True, hidden=True, help="This node's part.")
@click.option("--ask", is_flag=True, hidden=True, help="Does this node have the proof of the stage-out?")
@click.option("--proved", multiple=True, hidden=True, help="A stage-out of which a node has the proof.")
@click.pass_obj
def recover(
    config_path: Path,
    job_id: int,
    node_list: str | None,
    *,
    discard: bool,
    yes: bool,
    mine: bool,
    owner: int | None,
    here: bool,
    ask: bool,
    proved: tuple[str, ...],
) -> None:
    """Finish what was left of an ended job: stage the kept data out, wipe it, and return the nodes to service.

    Run it as root where `pdsh` over ssh reaches the job's nodes, or as the job's owner, where the site allows it, by
    `sudo beeond-ctl recover --mine JOB_ID`. Nothing is copied twice: what is proved to be on
    global storage is skipped. If the cause is still there, the data stays, and the reason is shown again.
    """
    from beeond_ctl.lifecycle import recover as recovery

    config = _load(config_path)
    if os.geteuid() != 0:
        raise UsageError(
            "recover has to be run as root, for it starts services on the job's nodes: "
            "`sudo beeond-ctl recover --mine JOB_ID` where the site allows it; else ask your admin"
        )
    if mine:
        # All that a rule in sudoers lets through: its patterns also match spaces, so nothing else may come with it.
        if node_list or owner is not None or here or ask or proved:
            raise UsageError("--mine goes with JOB_ID, --discard and --yes alone")
        owner = _caller_of_sudo()
    if ask:
        click.echo(" ".join(recovery.proofs(config, job_id)) or "no")
        return
    if here:
        recovery.on_this_node(config, job_id, discard=discard, proved=proved, owner=owner)
        return
    if discard and not yes:
        click.confirm(f"Wipe what is left of job {job_id} without staging it out?", abort=True)
    for line in recovery.everywhere(config, job_id, node_list, discard=discard, owner=owner):
        click.echo(line)


def _caller_of_sudo() -> int:
    """The uid of who called sudo, as sudo(8) tells it. Raises UsageError when this was not started by sudo."""
    uid = os.environ.get("SUDO_UID", "")
    if not uid.isascii() or not uid.isdigit():
        raise UsageError("--mine is for users, under sudo; as root leave it out")
    return int(uid)


# --- without Slurm ----------------------------------------------------------------------------------------

_NODES = click.option("-w", "--nodes", "node_list", help="Nodes as Slurm writes them: n[1-16].")
_NODEFILE = click.option(
    "-n", "--nodefile", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that names a node on each line.",
)  # fmt: skip
_LAUNCHER = click.option(
    "--launcher", type=click.Choice(["pdsh", "ssh"]), help="Default: pdsh where it is installed, else ssh."
)
_HERE = click.option("--here", is_flag=True, hidden=True, help="This node's part.")


@cli.command()
@_NODES
@_NODEFILE
@click.option("--user", help="Whom the file system is for; everything is copied as this user.")
@_BEEOND
@click.option(
    "--beeond-stage-in", "stage_in", multiple=True, metavar="SRC:DST", help="As for sbatch; repeatable."
)
@click.option(
    "--beeond-stage-out", "stage_out", multiple=True, metavar="SRC:DST", help="As for sbatch; repeatable."
)
@_LAUNCHER
@click.option("--here", "order", hidden=True, help="This node's part.")
@click.pass_obj
def up(
    config_path: Path, node_list: str | None, nodefile: Path | None, user: str | None, keys: str,
    stage_in: tuple[str, ...], stage_out: tuple[str, ...], launcher: Launcher | None, order: str | None,
) -> None:  # fmt: skip
    """Bring an instance up on nodes without Slurm, and print its id and where it is mounted.

    Run it as root where ssh to the nodes works. `beeond-ctl down ID` stages out, and takes it down. The id is on stderr
    before anything is done, so what was interrupted can be taken down, too.

    \b
    Example:
      beeond-ctl up --nodefile hosts --user alice --beeond-stage-out out:/lustre/alice/out
    """
    from beeond_ctl.lifecycle import manual

    _as_root("up")
    if order is not None:
        manual.up_here(config_path, order)
        return
    nodes = _chosen_nodes(node_list, nodefile)
    if nodes is None or user is None:
        raise UsageError("up needs --nodes or --nodefile, and --user")
    options = [("beeond", keys), *(("beeond-stage-in", text) for text in stage_in)]
    options += [("beeond-stage-out", text) for text in stage_out]
    asked = requests.parse_options(options)
    for line in manual.up(_load(config_path), nodes, user, asked, launcher=launcher):
        click.echo(line)


@cli.command()
@click.argument("run_id", type=click.IntRange(1), metavar="ID")
@_NODES
@_NODEFILE
@_LAUNCHER
@_HERE
@click.pass_obj
def down(
    config_path: Path, run_id: int, node_list: str | None, nodefile: Path | None, launcher: Launcher | None,
    *, here: bool,
) -> None:  # fmt: skip
    """Take down what `up` made: stage out, verify, wipe. Data that is not proved to be out is kept.

    The nodes need to be named only where this host is none of them.
    """
    from beeond_ctl.lifecycle import manual

    _as_root("down")
    config = _load(config_path)
    if here:
        manual.down_here(config, run_id)
        return
    for line in manual.down(config, run_id, _chosen_nodes(node_list, nodefile), launcher=launcher):
        click.echo(line)


def _as_root(name: str) -> None:
    if os.geteuid() != 0:
        raise UsageError(f"{name} has to be run as root; ask your admin")


def _chosen_nodes(node_list: str | None, nodefile: Path | None) -> tuple[str, ...] | None:
    from beeond_ctl import slurm
    from beeond_ctl.lifecycle import manual

    if node_list and nodefile:
        raise UsageError("--nodes and --nodefile: give one of the two")
    if nodefile:
        return manual.read_nodefile(nodefile.read_text(errors="replace"), str(nodefile))
    return slurm.expand_nodes(node_list) if node_list else None


# --- Slurm ------------------------------------------------------------------------------------------------


@cli.command()
@click.pass_obj
def prepare(config_path: Path) -> None:
    """Make ready on this node, while it is idle, what its first job would wait for. Best run at boot.

    For BeeGFS: the directories of an empty metadata server, which every instance gets a copy of.
    """
    from beeond_ctl import storage

    if os.geteuid() != 0:
        raise UsageError("prepare has to be run as root: it writes to the devices of the node")
    config = _load(config_path)
    if "beegfs" in config.backend.allowed:
        storage.make_template(config)


@cli.command()
def prolog() -> int:
    """Slurm's Prolog: bring this node's part of the job's instance up. Reads Slurm's environment."""
    from beeond_ctl.lifecycle.bringup import prolog as run

    return run(os.environ)


@cli.command()
def epilog() -> int:
    """Slurm's Epilog: stage out, tear down, wipe, or keep what is not proved. Reads Slurm's environment."""
    from beeond_ctl.lifecycle.teardown import epilog as run

    return run(os.environ)


@cli.group()
def bb() -> None:
    """For the hosts of slurmctld: what burst_buffer.lua needs and calls."""


@bb.command()
@click.pass_obj
def limits(config_path: Path) -> None:
    """Print what has to be known beside slurmctld of the site's configuration, for /etc/beeond-ctl/limits.

    burst_buffer.lua reads that file to refuse at the prompt what the site does not offer. Make it again when the
    configuration changes.
    """
    from beeond_ctl.limits import make_limits

    click.echo(make_limits(_load(config_path)), nl=False)
