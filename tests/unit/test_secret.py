"""The site secret is rotated in steps, and nodes at different steps still understand each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import ConfigError, NodeError, UsageError
from beeond_ctl.keys import name_of, read_secrets
from beeond_ctl.lifecycle import secret
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.plan import Job
from beeond_ctl.request import Request, encode


@pytest.fixture
def nodes(tmp_path: Path) -> list[SiteConfig]:
    return [
        SiteConfig.model_validate(
            {
                "paths": {
                    "secret": f"{tmp_path}/{name}/secret",
                    "run": f"{tmp_path}/{name}/run",
                    "log": f"{tmp_path}/log",
                }
            }
        )
        for name in ("n1", "n2")
    ]


def here(config: SiteConfig, node: str, *, name: str = "", phase: str = "ready") -> Here:
    nodes = ("n1", "n2")
    state = states.State(Job(7, 0, 0, "root"), nodes, node, encode(Request()), config.model_dump(mode="json"))
    state.secret, state.phase = name, phase
    return Here(config, state)


def can_meet(leader: SiteConfig, member: SiteConfig) -> bool:
    """Whether a member finds a new instance's leader: it knocks with its own key and with the others."""
    knocks = here(member, "n2")
    return here(leader, "n1").key("x") in (knocks.key("x"), *knocks.other_keys("x"))


def test_a_secret_is_on_the_disk_before_it_takes_the_place_of_the_one_before(
    nodes: list[SiteConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, done = nodes[0], []
    path, fsync, replace = Path(config.paths.secret), os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        seen = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append("directory" if seen == path.parent else f"{seen.stat().st_size > 0} {seen != path}")

    def replaced(old: str, new: Path) -> None:
        replace(old, new)
        done.append("replaced")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    for _ in range(2):
        secret.add(config)
        assert done == ["True True", "replaced", "directory"]
        done.clear()
    assert [each.name for each in path.parent.iterdir()] == ["secret"]


def test_nodes_can_meet_at_every_step_of_a_rotation(nodes: list[SiteConfig]) -> None:
    first, second = nodes
    assert secret.names(first) is None
    old = secret.add(first)
    assert secret.learn(second, secret.export(first))
    assert not secret.learn(second, secret.export(first))
    assert Path(first.paths.secret).stat().st_mode & 0o777 == 0o600

    def all_meet() -> bool:
        return can_meet(first, second) and can_meet(second, first)

    new = secret.add(first)
    assert all_meet()
    assert secret.learn(second, secret.export(first))
    assert all_meet()
    assert secret.use(first, new)
    assert not secret.use(first, new)
    assert all_meet()
    assert secret.use(second, new)
    assert secret.forget(first)
    assert all_meet()
    assert secret.forget(second)
    assert not secret.forget(second)
    assert all_meet()
    for config in nodes:
        assert secret.names(config) == secret.Names(new, (), ())
    assert old != new


def test_a_running_instance_keeps_its_secret_until_it_is_gone(nodes: list[SiteConfig]) -> None:
    config = nodes[0]
    old = secret.add(config)
    made = here(config, "n1", name=old)
    key = made.key("x")
    states.create(config.paths.run, made.state)
    secret.use(config, secret.add(config))
    assert not secret.forget(config)
    again = here(config, "n1", name=old)
    assert again.key("x") == key != here(config, "n1").key("x")
    assert again.other_keys("x") == []
    assert secret.names(config) == secret.Names(
        name_of(read_secrets(Path(config.paths.secret)).current), (old,), (old,)
    )
    made.state.phase = "retained"  # is started with the current one when it is recovered
    states.write(config.paths.run, made.state)
    assert secret.forget(config)
    with pytest.raises(NodeError, match=f"site secret {old} of job 7 is no longer in"):
        here(config, "n1", name=old).key("x")


def test_what_is_not_known_or_not_whole_changes_nothing(nodes: list[SiteConfig]) -> None:
    config = nodes[0]
    secret.add(config)
    before = Path(config.paths.secret).read_bytes()
    with pytest.raises(UsageError, match="no secret 0000"):
        secret.use(config, "0000")
    with pytest.raises(ConfigError):
        secret.learn(config, b"")
    assert Path(config.paths.secret).read_bytes() == before


@pytest.mark.parametrize(
    "data", [b"", b"no\n\n", b"beeond-ctl secrets 1\ncurrent 00\n", b"beeond-ctl secrets 1\nno\n"]
)
def test_what_is_no_export_is_not_learned_and_no_other_secret_advised(
    nodes: list[SiteConfig], data: bytes
) -> None:
    with pytest.raises(ConfigError, match="pipe in what `beeond-ctl secret export` prints there") as caught:
        secret.learn(nodes[0], data)
    assert "urandom" not in str(caught.value)
    assert not os.path.lexists(nodes[0].paths.secret)
