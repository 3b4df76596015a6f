"""How plans, states and findings look on a terminal, or as JSON. Decides nothing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from beeond_ctl import backends, slurm
from beeond_ctl.errors import BeeondError, UsageError
from beeond_ctl.plan import FIRST_OWN_ID
from beeond_ctl.request import printable
from beeond_ctl.units import format_entries, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from beeond_ctl.check import Finding
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.lifecycle.secret import Names
    from beeond_ctl.lifecycle.sweep import Leftover
    from beeond_ctl.plan import Plan

    Logs = dict[str, list[dict[str, Any]]]


def _print_json(value: Any) -> None:  # noqa: ANN401 - whatever JSON can say
    click.echo(json.dumps(value, indent=2))


def plan(made: Plan, node: str, *, as_json: bool) -> None:
    """Print what would run on `node`, and what all nodes share."""
    backend = backends.get(made.backend)
    keys = backends.Keys(authentication="<derived from the site secret>")
    services = backend.services(made, node, keys)
    mount = backend.mount(made, node, keys)
    running = [*services, *mount.helpers, *([mount.service] if mount.service else [])]
    capacity = made.target_capacity
    facts: dict[str, Any] = {
        "backend": made.backend,
        "nodes": slurm.fold_nodes(made.nodes),
        "leader": made.leader,
        "mount": made.mount_point,
        "ports": {"first": made.block, "rendezvous": list(made.rendezvous_ports)},
        "targets": [target.home for target in made.targets],
        "capacity_per_target": capacity,
        "stage_in": [[t.source, t.destination, list(t.flags)] for t in made.request.stage_in],
        "stage_out": [[t.source, t.destination, list(t.flags)] for t in made.request.stage_out],
        "node": node,
        "services": [
            {"name": s.name, "argv": list(s.argv), "files": [f.path for f in s.files]} for s in running
        ],
    }
    if as_json:
        facts["files"] = {file.path: file.content for service in running for file in service.files}
        _print_json(facts)
        return
    click.echo(f"backend     {made.backend}")
    click.echo(f"nodes       {facts['nodes']} ({len(made.nodes)}), leader {made.leader}")
    click.echo(f"mount       {made.mount_point}")
    click.echo(f"targets     {len(made.targets)} per node: {', '.join(facts['targets'])}")
    click.echo(
        f"capacity    {format_size(capacity) + ' per target' if capacity else 'what the devices have'}"
    )
    click.echo(
        f"ports       {made.block}-{made.block + 14} if free, rendezvous on {made.rendezvous_ports[0]}"
    )
    for title, transfers in (("stage in", made.request.stage_in), ("stage out", made.request.stage_out)):
        for transfer in transfers:
            flags = f" ({', '.join(transfer.flags)})" if transfer.flags else ""
            click.echo(
                f"{title:<11} {printable(transfer.source)} -> {printable(transfer.destination)}{flags}"
            )
    click.echo(f"on {node}:")
    for service in running:
        click.echo(f"  {service.name:<9} {' '.join(service.argv)}")
    if mount.bind_source:
        click.echo(f"  bind      {mount.bind_source} -> {mount.point}")


def status(
    config: SiteConfig,
    job_id: int | None,
    *,
    as_json: bool,
    on_one_line: bool = False,
    elsewhere: int | None = None,
) -> None:
    """Print the instances on this node; where there is none, how to ask the nodes of the job `elsewhere`."""
    from beeond_ctl import status as looks

    found = looks.instances(config, job_id) if os.geteuid() == 0 else looks.of_user(config, job_id)
    if on_one_line:
        # No more than is needed: srun forwards a task's output in pieces of 1 KiB, between those of other tasks.
        short = [{key: str(each[key])[:150] for key in _SHORT if each.get(key)} for each in found]
        click.echo(json.dumps(short))
        return
    if as_json:
        _print_json(found)
        return
    if not found:
        which = "no instance on this node" if job_id is None else f"no instance of job {job_id} on this node"
        ask = (
            f"; to ask all nodes of job {elsewhere}: beeond-ctl status --all-nodes {elsewhere}"
            if elsewhere
            else ""
        )
        click.echo(which + ask)
    for instance in found:
        kind = "ID" if instance["job"] >= FIRST_OWN_ID else "job"  # as `up` and `down` have it
        click.echo(f"{kind} {instance['job']}  {instance['phase']}  {instance.get('mount') or 'not mounted'}")
        for name in _STATUS:
            value = instance.get(name)
            if isinstance(value, str | dict) and value:
                click.echo(f"  {name.replace('_', ' '):<10} {_plain(value)}")
        for transfer in instance.get("transfers", ()):
            click.echo(f"  {'stage-' + transfer['direction']:<10} {_transfer(transfer)}")
            for remark in transfer.get("remarks") or ():
                click.echo(f"  {'note':<10} {printable(remark)}")
        for line in _to_come(instance):
            click.echo(line)


_SHORT: Final = ("node", "job", "phase", "health", "mount")
"""What is told of an instance where all nodes are asked."""

_STATUS: Final = (
    "user",
    "nodes",
    "backend",
    "health",
    "capacity",
    "services",
    "stage_out",
    "reason",
    "recover",
    "took",
)


def _to_come(instance: Mapping[str, Any]) -> list[str]:
    """A user's flushes, and what stage-out has still to do."""
    from beeond_ctl import estimate
    from beeond_ctl.cli import flush

    lines = [f"  {'flush':<10} {flush.line(status)}" for status in instance.get("flushes") or ()]
    if expected := instance.get("expected"):
        found = estimate.Estimate.of(expected)
        lines.append(f"  {'stage-out':<10} {estimate.told(found)}")
        if text := estimate.warning(found, instance.get("time_left_s")):
            lines.append(f"  {'warning':<10} {text}")
    return lines


def _transfer(transfer: Mapping[str, Any]) -> str:
    entries = transfer.get("entries", transfer.get("copied", 0))
    result = "proved" if transfer["proved"] else "not proved"
    return (
        f"{printable(transfer['source'])} -> {printable(transfer['destination'])}: {format_entries(entries)}, "
        f"{format_size(transfer['bytes'])} in {transfer['seconds']:.1f} s, {result}"
    )


def everywhere(
    nodes: Sequence[str], found: Sequence[Mapping[str, Any]], trouble: Sequence[str], *, as_json: bool
) -> bool:
    """Print what the nodes of a job say of it, those together that say the same; whether all is well."""
    silent = [node for node in nodes if node not in {instance.get("node") for instance in found}]
    if as_json:
        _print_json({"nodes": found, "silent": silent, "trouble": list(trouble)})
    else:
        same: dict[tuple[str, str], list[str]] = {}
        for instance in found:
            same.setdefault((instance["phase"], instance.get("health") or "ok"), []).append(instance["node"])
        for (phase, health), names in same.items():
            click.echo(f"{phase:<12} {health:<12} {slurm.fold_nodes(names)}")
        if silent:
            click.echo(f"{'no answer':<12} {'':<12} {slurm.fold_nodes(silent)}")
        for line in trouble:
            click.echo(f"beeond-ctl: {printable(line)}", err=True)
    return not silent and not trouble and all(instance.get("health") in (None, "ok") for instance in found)


def report(
    job_id: int, logs: Logs, nodes: Sequence[str], trouble: Sequence[str], *, as_json: bool, html: str | None
) -> None:
    """Print what happened to a job, or write it to the page `html`. Raises BeeondError where nothing is known."""
    from beeond_ctl import report as reports

    for line in trouble:
        click.echo(f"beeond-ctl: {printable(line)}", err=True)
    made = reports.build(job_id, logs, nodes)
    if made is None:
        raise BeeondError(f"nothing is known of job {job_id}; see what is said above")
    if html:
        from beeond_ctl.report_html import page

        try:
            Path(html).write_text(page(made), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html: {html}: {error.strerror or error}") from None
    if as_json:
        _print_json(made.as_dict())
    elif not html:
        for line in reports.lines(made):
            click.echo(line)


def _plain(value: object) -> str:
    return (
        ", ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else str(value)
    )


def secrets(names: Names | None, *, as_json: bool) -> None:
    """Print the names of this node's secrets."""
    if as_json:
        _print_json(asdict(names) if names else {})
        return
    if names is None:
        click.echo("no secret on this node")
        return
    click.echo(f"current   {names.current}")
    for name in names.accepted:
        click.echo(f"accepted  {name}{'  used by an instance' if name in names.used else ''}")


def leftovers(found: Sequence[Leftover], *, as_json: bool) -> bool:
    """Print what a sweep found; whether nothing of it needs a person."""
    from beeond_ctl.lifecycle.sweep import BAD

    if as_json:
        _print_json([{"what": item.what, "verdict": item.verdict, "text": item.text} for item in found])
    else:
        for item in found:
            click.echo(f"{item.verdict:<8}  {item.what}  {item.text}")
    return all(item.verdict not in BAD for item in found)


def checks(findings: Sequence[Finding], *, as_json: bool) -> bool:
    """Print the findings; whether none of them is a failure."""
    if as_json:
        _print_json([{"subject": f.subject, "verdict": f.verdict, "text": f.text} for f in findings])
    else:
        for finding in findings:
            click.echo(f"{finding.verdict:<4}  {finding.subject:<20}  {finding.text}")
    return all(finding.verdict != "fail" for finding in findings)
