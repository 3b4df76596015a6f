"""`--dry-run`, and what `--delete` has to show before it deletes. Changes nothing."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Final

import click

from beeond_ctl.cli.progress import one_line
from beeond_ctl.errors import UsageError
from beeond_ctl.units import format_entries, format_size

if TYPE_CHECKING:
    from collections.abc import Collection

    from beeond_ctl.staging.job import Job
    from beeond_ctl.staging.preview import Preview

_SHOWN: Final = 20


def show(job: Job, dead: Collection[str] = (), *, as_json: bool) -> int:
    """Say what `job` would do; the exit code. `dead` are tokens of its earlier runs."""
    from beeond_ctl.staging.preview import look, proofs_of
    from beeond_ctl.staging.transfer import show_path

    found = look(job, proofs_of(job), dead=dead)
    problems = _problems(found, job)
    if as_json:
        source, destination = job.ends()
        facts = {
            "event": "dry-run", "source": show_path(source), "destination": show_path(destination),
            "copy": found.copy, "bytes": found.copy_bytes, "skip": found.skip, "special": found.special,
            "delete": found.delete, "delete_names": [one_line(name) for name in found.delete_names],
            "unread": found.unread.count,
            "problems": problems,
        }  # fmt: skip
        click.echo(json.dumps(facts))
    else:
        for text in problems:
            click.echo(f"beeond-ctl: {text}", err=True)
        click.echo(
            f"would copy {found.copy} ({format_size(found.copy_bytes)}), skip {found.skip}, delete {found.delete}"
        )
        for line in _doomed(found):
            click.echo(line)
    return 1 if problems else 0


def _problems(found: Preview, job: Job) -> list[str]:
    from beeond_ctl.staging.transfer import show_path

    texts = [f"{show_path(job.source)}: no such file or directory"] if found.missing else []
    texts += [found.refused] if found.refused else []
    texts += [f"nothing can be copied there: {found.unwritable}"] if found.unwritable else []
    texts += [f"{fold} cannot be read: {text}" for text, fold in sorted(found.problems.items())]
    return [one_line(text) for text in texts]


def _doomed(found: Preview) -> list[str]:
    lines = [f"  delete {one_line(name)}" for name in found.delete_names[:_SHOWN]]
    more = found.delete - len(lines)
    if more > 0:
        lines.append(f"  and {more} more (--dry-run --json names {len(found.delete_names)})")
    if found.unread.count:
        lines.append(f"  and what is in {one_line(str(found.unread))} that cannot be looked into")
    return lines


def confirm_deletion(job: Job, dead: Collection[str] = (), *, yes: bool, as_json: bool) -> bool:
    """Show what `--delete` will delete, and ask, unless nothing is or `yes` was said; whether it was agreed to.

    `dead` are tokens of the transfer's earlier runs. Raises UsageError where nobody can be asked, click.Abort at a no.
    """
    if "delete" not in job.flags:
        return False
    from beeond_ctl.staging.preview import look
    from beeond_ctl.staging.transfer import show_path

    found = look(job, dead=dead)
    if not (found.delete or found.unread.count):
        return yes
    place = one_line(show_path(job.destination))
    if as_json:
        names = [one_line(name) for name in found.delete_names]
        facts = {"event": "delete", "count": found.delete, "names": names, "unread": found.unread.count}
        click.echo(json.dumps(facts))
    else:
        click.echo(f"at {place}, after everything is copied:", err=True)
        for line in _doomed(found):
            click.echo(line, err=True)
    if yes:
        return True
    what = format_entries(found.delete_top)  # as the summary counts them
    what += f", {found.delete} with what is in them" if found.delete > found.delete_top else ""
    what += " and what cannot be looked into" if found.unread.count else ""
    if as_json or not (os.isatty(0) and sys.stderr.isatty()):
        raise UsageError(f"--delete would remove {what} at {place}; say --yes, or see --dry-run")
    click.confirm(f"Delete {what}?", abort=True, err=True)
    return True
