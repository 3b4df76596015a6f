"""`status` shows each instance by its own state, whatever is wrong with today's configuration or with another job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from beeond_ctl import state as states
from beeond_ctl import status
from beeond_ctl.config import SiteConfig
from beeond_ctl.plan import Job
from beeond_ctl.request import Request, encode, parse_options

if TYPE_CHECKING:
    from pathlib import Path


def site(root: Path, **sections: Any) -> SiteConfig:
    own = {
        "paths": {"run": f"{root}/run", "log": f"{root}/log"},
        "storage": {"paths": [f"{root}/nvme"]},
    }
    return SiteConfig.model_validate(own | sections)


def job(
    config: SiteConfig, number: int, asked: str = encode(Request()), phase: str = "ready", **more: Any
) -> None:
    made_with = config.model_dump(mode="json")
    state = states.State(Job(number, 1000, 1000, "alice"), ("n1", "n2"), "n1", asked, made_with, phase)
    for name, value in more.items():
        setattr(state, name, value)
    states.create(config.paths.run, state)


def seen(config: SiteConfig, job_id: int | None = None) -> dict[int, dict[str, Any]]:
    return {found["job"]: found for found in status.instances(config, job_id)}


def test_an_instance_is_shown_by_the_configuration_that_it_was_made_with(tmp_path: Path) -> None:
    before = site(tmp_path, backend={"default": "glusterfs", "allowed": ["glusterfs", "local"]})
    asked = parse_options([("beeond", "backend=glusterfs"), ("beeond-stage-out", "out:/global/out")])
    job(before, 41, encode(asked), "retained")
    job(before, 42, mount="/proc")
    now = site(
        tmp_path, backend={"default": "beegfs", "allowed": ["beegfs"]}, mount={"root": f"{tmp_path}/else"}
    )
    found = seen(now)
    assert (found[41]["backend"], found[41]["health"], found[41]["stage_out"]) == (
        "glusterfs",
        "data kept",
        "owed",
    )
    assert (found[42]["backend"], found[42]["mount"]) == ("glusterfs", "/proc")


def test_a_job_that_was_refused_hides_no_other(tmp_path: Path) -> None:
    config = site(tmp_path)
    job(config, 41, "{}", "claimed")
    job(config, 42, encode(parse_options([("beeond", "backend=beegfs")])), "claimed")
    job(config, 43)
    found = seen(config)
    assert list(found) == [41, 42, 43]
    assert (found[42]["phase"], found[42]["backend"]) == ("claimed", None)
    assert "backend=beegfs is not offered here" in found[42]["reason"]
    assert found[41]["reason"]
    assert (found[43]["backend"], found[43]["reason"]) == ("glusterfs", None)


def test_a_state_that_cannot_be_read_is_shown_with_the_reason(tmp_path: Path) -> None:
    config = site(tmp_path)
    job(config, 41)
    job(config, 42)
    (states.run_dir(config.paths.run, 41) / "state.json").write_text('{"version": 99}')
    found = seen(config)
    assert (found[41]["phase"], found[41]["health"]) == ("unknown", "state cannot be read")
    assert "written by another version" in found[41]["reason"]
    assert found[42]["phase"] == "ready"
    assert list(seen(config, 41)) == [41]
    assert list(seen(config, 42)) == [42]
