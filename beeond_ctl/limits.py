"""The site's limits: what hosts of slurmctld have to know of its configuration, as text that Lua reads in no time.

Pure. `beeond-ctl bb limits` prints it, an admin keeps it in /etc/beeond-ctl/limits. By it `slurm/burst_buffer.lua`
refuses at the prompt, with the words of `plan.check_request`: the rules are found by trying that, and stand in no
other place.

Lines, each a word and what follows it:

    offer KEY VALUE ...        the values of KEY that users may choose; blanks in them are written `\\ `
    told TEXT                  what to say of others; {value} is what was asked for, {part} the part of it that is wrong
    refuse BACKEND KEYS TEXT   which KEYS, joined by `+`, cannot be had of BACKEND, which is `-` where none is named
    path DIRECTORIES           where Slurm's commands are, joined by `:`
    look SECONDS               how long sources of a pending job may be looked at
    as-user yes|no             whether they are looked at as the job's user, by sudo
    lists DIRECTORY            where what is seen of them is listed, if anywhere; %u stands for the user's name
    share TARGETS              only where capacity is a limit: targets of a node, which each get the same share of it
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from beeond_ctl.errors import RequestError
from beeond_ctl.plan import check_request
from beeond_ctl.request import KEYS, Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from beeond_ctl.config import SiteConfig

_HEAD: Final = "# Made by `beeond-ctl bb limits` from config.toml; make it again when that changes."
_SAMPLES: Final = {
    "meta": "1", "storage": "1", "stripe-count": "1", "stripe-dirs": "1", "chunk-size": "1MiB", "mirror": "yes",
    "prefer-local": "yes", "share": "1",
}  # fmt: skip
"""Of each key that a backend may not have, a value that is right wherever the key is."""


def make_limits(config: SiteConfig) -> str:
    """The limits of a site with `config`."""
    lines = [_HEAD, *_offer(config, "backend"), *_offer(config, "mount")]
    lines += [*_refusals(config), *_offer(config, "interfaces")]
    lines += [
        f"path {':'.join(config.slurm.path)}",
        f"look {config.deadlines.look:g}",
        f"as-user {'yes' if config.slurm.look_as_user else 'no'}",
    ]
    if config.slurm.look_as_user and config.slurm.lists:
        lines.append(f"lists {config.slurm.lists}")
    if config.storage.kind == "image":
        lines.append(f"share {len(config.bases)}")
    return "".join(f"{' '.join(line.splitlines())}\n" for line in lines)


def _offer(config: SiteConfig, key: str) -> list[str]:
    offered: dict[str, tuple[Sequence[str], str, str]] = {
        "backend": (config.backend.allowed, "none-such", "none-such"),
        "mount": (config.mount.choices, "/none/such", "/none/such"),
        "interfaces": (config.beegfs.interfaces, "none0+none1", "none0"),
    }
    values, whole, part = offered[key]
    for backend in (None, *config.backend.allowed):
        asked = replace(Request(backend=backend), **{KEYS[key].field: whole})  # type: ignore[arg-type]
        told = _told(config, asked)
        if told is not None and part in told:
            escaped = (value.replace("\\", "\\\\").replace(" ", "\\ ") for value in values)
            shown = told.replace(whole, "{value}").replace(part, "{part}")
            return [" ".join(["offer", key, *escaped]), f"told {shown}"]
    return []


def _refusals(config: SiteConfig) -> Iterator[str]:
    for backend in (None, *config.backend.allowed):
        base = Request(backend=backend)
        asked = {KEYS[name].field: KEYS[name].parse(text) for name, text in _SAMPLES.items()}
        asked["interfaces"] = "none0"
        named = {KEYS[name].field: name for name in KEYS}
        alone = {field: _told(config, replace(base, **{field: value})) for field, value in asked.items()}
        for field, told in alone.items():
            if told is not None and "none0" not in told:
                yield f"refuse {backend or '-'} {named[field]} {told}"
        if alone["mirror"] is alone["prefer_local"] is None:
            told = _told(config, replace(base, mirror=True, prefer_local=True))
            if told is not None:
                yield f"refuse {backend or '-'} mirror+prefer-local {told}"


def _told(config: SiteConfig, asked: Request) -> str | None:
    """Why the site refuses `asked`, without the name of the option; None where it does not."""
    try:
        check_request(config, asked)
    except RequestError as error:
        return str(error).removeprefix("--beeond: ")
    return None
