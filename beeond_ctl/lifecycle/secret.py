"""The site secret on one node: making it, and rotating it while jobs run.

Each command is a no-op where it has been carried out, so that all can be repeated on any node. The order in which they
are carried out over all nodes is what makes a rotation safe: docs/lifecycle.md, "The site secret".
"""

from __future__ import annotations

import os
import secrets as random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from beeond_ctl import state as states
from beeond_ctl.errors import ConfigError, UsageError
from beeond_ctl.keys import Secrets, format_secrets, name_of, parse_secrets, read_secrets

if TYPE_CHECKING:
    from beeond_ctl.config import SiteConfig


@dataclass(frozen=True, slots=True)
class Names:
    """What a node has, without showing it. `used` has the accepted secrets of instances that are still there."""

    current: str
    accepted: tuple[str, ...]
    used: tuple[str, ...]


def names(config: SiteConfig) -> Names | None:
    """The names of this node's secrets; None where it has none. Raises ConfigError."""
    path = Path(config.paths.secret)
    if not os.path.lexists(path):
        return None
    have = read_secrets(path)
    accepted = tuple(name_of(secret) for secret in have.accepted)
    return Names(name_of(have.current), accepted, tuple(sorted(_in_use(config) & set(accepted))))


def _in_use(config: SiteConfig) -> set[str]:
    # What is kept is started with the current secret when it is recovered.
    at_rest = {"retained", "failed"}
    return {state.secret for state in states.read_all(config.paths.run) if state.phase not in at_rest}


def add(config: SiteConfig) -> str:
    """Make a new secret, and return its name: the current one where there is none, an accepted one otherwise."""
    path, made = Path(config.paths.secret), random.token_bytes(64)
    if os.path.lexists(path):
        have = read_secrets(path)
        _write(path, replace(have, accepted=(*have.accepted, made)))
    else:
        _write(path, Secrets(made))
    return name_of(made)


def export(config: SiteConfig) -> bytes:
    """This node's secrets, for `learn` on others. Never to be shown. Raises ConfigError."""
    return format_secrets(read_secrets(Path(config.paths.secret)))


def learn(config: SiteConfig, data: bytes) -> bool:
    """Accept what another node exported; where there is no secret yet, have the same as it. Whether that was new.

    Raises ConfigError.
    """
    path = Path(config.paths.secret)
    try:
        told = parse_secrets(data, "standard input")
    except ConfigError:
        # What would mend a file, a new secret, is no advice here: the nodes would no longer know each other.
        raise ConfigError(
            "standard input is not what another node exported; pipe in what `beeond-ctl secret export` prints there"
        ) from None
    if not os.path.lexists(path):
        _write(path, told)
        return True
    have = read_secrets(path)
    new = [secret for secret in (told.current, *told.accepted) if have.find(name_of(secret)) is None]
    if new:
        _write(path, replace(have, accepted=(*have.accepted, *new)))
    return bool(new)


def use(config: SiteConfig, name: str) -> bool:
    """Make the secret called `name` the current one; the one before stays accepted. Whether that was new.

    Raises UsageError, ConfigError.
    """
    path = Path(config.paths.secret)
    have = read_secrets(path)
    chosen = have.find(name)
    if chosen is None:
        raise UsageError(f"there is no secret {name} in {path}; see `beeond-ctl secret show`")
    if chosen == have.current:
        return False
    others = tuple(secret for secret in (have.current, *have.accepted) if secret != chosen)
    _write(path, Secrets(chosen, others))
    return True


def forget(config: SiteConfig) -> bool:
    """Drop the secrets that are accepted besides the current one, but for those of instances. Whether any was dropped.

    Raises ConfigError.
    """
    path = Path(config.paths.secret)
    have, used = read_secrets(path), _in_use(config)
    kept = tuple(secret for secret in have.accepted if name_of(secret) in used)
    if kept == have.accepted:
        return False
    _write(path, Secrets(have.current, kept))
    return True


def _write(path: Path, what: Secrets) -> None:
    """Replace the file in one step, on the disk too: after a power cut it is the old or the new one."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    states.write_atomically(path, format_secrets(what).decode(), mode=0o600, durable=True)
