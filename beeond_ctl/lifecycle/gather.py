"""What all nodes of a job know of it: their events, wherever those are by now, and their status."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import textwrap
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from beeond_ctl import events, published, slurm, step, userfiles
from beeond_ctl import state as states
from beeond_ctl.errors import BeeondError, NodeError, UsageError, one_line
from beeond_ctl.launch import on_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from beeond_ctl.config import SiteConfig
    from beeond_ctl.launch import Answer

    Logs = dict[str, list[dict[str, Any]]]

_WIDTH: Final = 1000
"""Characters on a line that goes through pdsh, which cuts long ones."""


def gather(config: SiteConfig, job_id: int, node_list: str | None) -> tuple[Logs, tuple[str, ...], list[str]]:
    """Events by node, the job's nodes as far as they are known, and what could not be asked.

    Raises UsageError where this user may know nothing of the job, BeeondError where nobody here does.
    """
    logs: Logs = {}
    trouble: list[str] = []
    if config.report.directory is not None:
        try:
            logs = published.collect(config.report.directory, job_id)
        except FileNotFoundError:
            trouble.append(
                f"report.directory: {config.report.directory} is not there: not mounted on this host, or not made yet "
                "(`beeond-ctl check` as root says how); ask your admin"
            )
        except (OSError, NodeError) as error:
            trouble.append(f"report.directory: {one_line(error)}")
    elif os.geteuid() != 0:
        raise UsageError("reports are for root here, since report.directory is not set; ask your admin")
    nodes = slurm.expand_nodes(node_list) if node_list else ()
    if os.geteuid() == 0:
        own = events.read(config.paths.log, job_id)
        if own and isinstance(own[-1].get("node"), str):
            logs[own[-1]["node"]] = own
        nodes = nodes or _trusted_nodes(config, job_id, own)
        # A node that has published since is not asked: what it said is what it has.
        missing = [node for node in nodes if node not in logs or not _over(logs[node])]
        if missing:
            trouble += _ask(config, job_id, missing, logs)
    if not logs and not trouble:
        by_name = "; root can name them with --nodes" if os.geteuid() == 0 else ""
        raise BeeondError(
            f"nothing is known of job {job_id}: its nodes tell when it has ended (before, see `beeond-ctl status`), "
            f"and only of a job that had a file system{by_name}"
        )
    return logs, nodes or _named(logs), trouble


def status(config: SiteConfig, job_id: int) -> tuple[tuple[str, ...], list[dict[str, Any]], list[str]]:
    """The job's nodes, what they say of its instance, and who could not be asked, and why.

    Raises UsageError when the nodes are not known, NodeError when Slurm does not answer.
    """
    nodes = _trusted_nodes(config, job_id, events.read(config.paths.log, job_id))
    if not nodes:
        raise UsageError(
            f"the nodes of job {job_id} are not known here; ask on one of them, or while it runs"
        )
    words = ["beeond-ctl", "status", str(job_id), "--here"]
    ask = _by_root if os.geteuid() == 0 else _by_step
    answers, trouble = ask(config, job_id, nodes, words)
    found = []
    for line in answers:
        with suppress(ValueError):
            said = json.loads(line)
            found += [item for item in said if item.get("node") in nodes and "phase" in item]
    return nodes, sorted(found, key=lambda item: nodes.index(item["node"])), trouble


def _by_root(
    config: SiteConfig, _: int, nodes: Sequence[str], words: Sequence[str]
) -> tuple[list[str], list[str]]:
    answers = on_nodes(nodes, words, timeout_s=config.deadlines.meet)
    trouble = [f"{answer.node}: {_said(answer)}" for answer in answers if answer.code != 0]
    return [answer.output for answer in answers if answer.code == 0], trouble


def _by_step(
    config: SiteConfig, job_id: int, nodes: Sequence[str], words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """By a step of the user's own job, beside what runs in it."""
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    line = step.argv(step.Allocation(job_id, tuple(nodes), here), nodes, words, os.environ)
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            env=step.environment(os.environ), cwd="/", timeout=config.deadlines.meet,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [], [f"srun: no answer within {config.deadlines.meet:.0f} s"]
    return done.stdout.splitlines(), done.stderr.splitlines()[:20]


def _said(answer: Answer) -> str:
    return " ".join(answer.output.split())[:200] or "no answer; is the node up?"


def here(config: SiteConfig, job_id: int) -> str:
    """This node's events in the form in which `gather` wants them from other nodes."""
    try:
        data = events.log_path(config.paths.log, job_id).read_bytes()
    except FileNotFoundError:
        return ""
    return "\n".join(textwrap.wrap(base64.b64encode(zlib.compress(data)).decode(), _WIDTH))


def _ask(config: SiteConfig, job_id: int, nodes: Sequence[str], logs: Logs) -> list[str]:
    """Add what `nodes` know to `logs`; returns who could not be asked, and why."""
    words = ["beeond-ctl", "report", str(job_id), "--here"]
    trouble = []
    try:
        answers = on_nodes(nodes, words, timeout_s=config.deadlines.meet)
    except (NodeError, UsageError) as error:
        return [one_line(error)]
    for answer in answers:
        if answer.code != 0:
            trouble.append(f"{answer.node}: {_said(answer)}")
            continue
        with suppress(ValueError, zlib.error):
            packed = base64.b64decode("".join(answer.output.split()))
            found = events.parse(zlib.decompressobj().decompress(packed, userfiles.MAX_BYTES))
            if found:
                logs[answer.node] = found
    return trouble


def _over(log: Sequence[Mapping[str, Any]]) -> bool:
    return any(event.get("event") == "clean" for event in log[-3:])


def _trusted_nodes(config: SiteConfig, job_id: int, own: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The job's nodes, from sources that no user can write: they are logged in to."""
    with suppress(NodeError):
        state = states.read(config.paths.run, job_id) if os.geteuid() == 0 else None
        if state is not None:
            return state.nodes
        if own:
            return _named({"": own})
        _, text = slurm.state_and_nodes(config.slurm.path, job_id)
        if text:
            return slurm.expand_nodes(text)
    return ()


def _size(folded: str) -> int:
    """How many nodes `folded` stands for, without unfolding it: it may be forged to fill the memory."""
    total = 0
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", folded[:65536]):
        size = 1
        for inner in re.findall(r"\[([^\]]*)\]", part):
            ends = (piece.partition("-") for piece in inner.split(","))
            size *= sum(max(1, int(last[:9]) - int(first[:9]) + 1) if last.isdecimal() and first.isdecimal() else 1
                        for first, _, last in ends)  # fmt: skip
        total += size
    return total


def _named(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, ...]:
    """The nodes that the last run of the job began with."""
    begun = [
        (event.get("t"), event["nodes"])
        for log in logs.values()
        for event in log
        if event.get("event") in events.BEGINNINGS and isinstance(event.get("t"), (int, float))
        and isinstance(event.get("nodes"), str) and 0 < _size(event["nodes"]) < published.MAX_FILES
    ]  # fmt: skip
    if not begun:
        return ()
    with suppress(NodeError):
        return slurm.expand_nodes(max(begun, key=lambda item: float(item[0] or 0))[1])
    return ()
