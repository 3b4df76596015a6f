"""How plans, states and findings look on a terminal, or as JSON. Decides nothing."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from beeond_ctl import backends, slurm
from beeond_ctl.request import printable
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from beeond_ctl.check import Finding
    from beeond_ctl.config import SiteConfig
    from beeond_ctl.lifecycle.sweep import Leftover
    from beeond_ctl.plan import Plan


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


def status(config: SiteConfig, job_id: int | None, *, as_json: bool) -> None:
    """Print the instances on this node."""
    from beeond_ctl import status as looks

    found = looks.instances(config, job_id) if os.geteuid() == 0 else looks.mounted(config, job_id)
    if as_json:
        _print_json(found)
        return
    if not found:
        click.echo(
            "no instance on this node" if job_id is None else f"no instance of job {job_id} on this node"
        )
    for instance in found:
        click.echo(f"job {instance['job']}  {instance['phase']}  {instance.get('mount') or 'not mounted'}")
        for name in (
            "user",
            "nodes",
            "backend",
            "capacity",
            "services",
            "stage_out",
            "reason",
            "started",
            "timings",
        ):
            if instance.get(name):
                click.echo(f"  {name.replace('_', ' '):<10} {_plain(instance[name])}")


def _plain(value: object) -> str:
    return (
        ", ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else str(value)
    )


def leftovers(found: Sequence[Leftover], *, as_json: bool) -> bool:
    """Print what a sweep found; whether nothing is stuck."""
    if as_json:
        _print_json([{"what": item.what, "verdict": item.verdict, "text": item.text} for item in found])
    else:
        for item in found:
            click.echo(f"{item.verdict:<8}  {item.what}  {item.text}")
    return all(item.verdict != "stuck" for item in found)


def checks(findings: Sequence[Finding], *, as_json: bool) -> bool:
    """Print the findings; whether none of them is a failure."""
    if as_json:
        _print_json([{"subject": f.subject, "verdict": f.verdict, "text": f.text} for f in findings])
    else:
        for finding in findings:
            click.echo(f"{finding.verdict:<4}  {finding.subject:<20}  {finding.text}")
    return all(finding.verdict != "fail" for finding in findings)
