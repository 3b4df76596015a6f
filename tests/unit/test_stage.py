"""The transfers of a job on a node, as they are with the names that Slurm knows."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import RequestError, RetainedError, UserError
from beeond_ctl.lifecycle import manual, team
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.lifecycle.stage import Stage, check_destinations
from beeond_ctl.plan import Job
from beeond_ctl.request import Request, Transfer, encode

if TYPE_CHECKING:
    from pathlib import Path


def here_with(tmp_path: Path, asked: Request, job_name: str = "it") -> Here:
    """The only node of a job that asked so."""
    config = SiteConfig.model_validate({
        "paths": {"run": f"{tmp_path}/run", "log": f"{tmp_path}/log"}, "mount": {"root": f"{tmp_path}/mnt"},
    })  # fmt: skip
    job = Job(7, os.getuid(), os.getgid(), "alice")
    state = states.State(job, ("n1",), "n1", encode(asked), config.model_dump(mode="json"))
    return Here(config, replace(state, names={"job_name": job_name}))


def test_where_transfers_lead_is_reckoned_once_for_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tuple(Transfer(f"/g/{number}", f"in/{number}", ("delete",)) for number in range(256))
    here = here_with(tmp_path, Request(stage_in=asked))
    reckoned, others = [], []
    whole = Here.transfers

    def reckon(self: Here, *, inward: bool, lengths: bool = False) -> list[Transfer]:
        reckoned.append(inward)
        return whole(self, inward=inward, lengths=lengths)

    def transfer(self: Stage, _: object, index: int, each: Transfer) -> dict[str, Any]:
        others.append(len(self._job(each).others))
        numbers = dict.fromkeys(("copied", "skipped", "bytes", "seconds"), index)
        return {"proved": True, "missing": False, "cancelled": "", "remarks": [], **numbers}

    monkeypatch.setattr(Here, "transfers", reckon)
    monkeypatch.setattr(Stage, "_transfer", transfer)
    stage = Stage(here, inward=True)
    with team.open_team(here, "prolog", combine={}, handlers={}) as alone:
        stage.run(alone)
    assert reckoned == [True]
    assert others == [255] * 256


@pytest.mark.parametrize("inward", [False, True])
def test_what_is_told_of_many_transfers_that_failed_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inward: bool
) -> None:
    ways = tuple((f"/g/{number}", f"in/{number}") for number in range(256))
    stage_in = tuple(Transfer(*way) for way in ways if inward)
    stage_out = tuple(Transfer(*way[::-1]) for way in ways if not inward)
    here = here_with(tmp_path, Request(stage_in=stage_in, stage_out=stage_out))
    numbers = dict.fromkeys(("copied", "skipped", "bytes", "seconds"), 0)
    summary = {
        "proved": False,
        "missing": False,
        "cancelled": "",
        "problems": ["p" * 5000] * 20,
        "full": False,
        "remarks": [],
        **numbers,
    }
    monkeypatch.setattr(Stage, "_transfer", lambda *_: summary)
    with (
        team.open_team(here, "prolog", combine={}, handlers={}) as alone,
        pytest.raises(
            (UserError, RetainedError), match=rf"^stage-{'in of' if inward else 'out to'} /g/0: pp"
        ) as caught,
    ):
        Stage(here, inward=inward).run(alone)
    assert len(str(caught.value)) < 11_000


@pytest.mark.parametrize("longer", [0, 1])
def test_a_path_is_as_long_as_it_is_below_the_mount_point(tmp_path: Path, longer: int) -> None:
    short = here_with(tmp_path, Request())
    room = 4095 - len(f"{short.first_plan.mount_point}/")
    inside = "/".join(["d" * 200] * 15) + "/" + "e" * 200
    inside += "/" + "/".join(["f" * 9] * 200)
    here = here_with(tmp_path, Request(stage_out=(Transfer(inside[: room + longer], "/g"),)))
    if longer:
        with pytest.raises(RequestError, match="more than 4095 bytes"):
            here.transfers(inward=False, lengths=True)
    else:
        assert len(here.transfers(inward=False, lengths=True)) == 1


def test_a_name_that_becomes_too_long_is_the_users_mistake_and_in_nobodys_way(tmp_path: Path) -> None:
    here = here_with(tmp_path, Request(stage_out=(Transfer("out", "/g/%x-%x"),)), "n" * 200)
    told: list[tuple[str, bool]] = []

    class Others:
        def fail(self, message: str, *, user_fault: bool, nobody: bool = False) -> None:
            told.append((message, user_fault))

    with pytest.raises(RequestError), team.telling(Others(), here):  # type: ignore[arg-type]
        check_destinations(here)
    ((message, user_fault),) = told
    assert user_fault
    assert "more than 255 bytes" in message


@pytest.mark.parametrize("pattern", ["%x-%x", "%x"])
@pytest.mark.parametrize("purpose", ["epilog", "recover"])
def test_when_the_job_has_run_a_name_that_is_too_long_is_in_no_other_transfers_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, purpose: str
) -> None:
    asked = Request(stage_out=(Transfer("a", f"/g/{pattern}"), Transfer("b", "/g/b")))
    here = here_with(tmp_path, asked, "n" * 256)
    copied: list[str] = []

    def transfer(self: Stage, _: object, index: int, each: Transfer) -> dict[str, Any]:
        self._job(each)
        copied.append(each.source)
        numbers = dict.fromkeys(("copied", "skipped", "bytes", "seconds"), 0)
        told = {"problems": ["name too long"] if index == 0 else []}
        summary = {"missing": False, "cancelled": "", "full": False, "remarks": [], **told, **numbers}
        return {"proved": index == 1, **summary}

    monkeypatch.setattr(Stage, "_transfer", transfer)
    with (
        team.open_team(here, purpose, combine={}, handlers={}) as alone,
        pytest.raises(RetainedError, match="name too long"),
    ):
        Stage(here, inward=False).run(alone)
    assert copied == ["a", "b"]
    assert here._hint()["places"]  # of `flush`


def test_up_tells_it_before_any_node_is_asked(tmp_path: Path) -> None:
    asked = Request(stage_out=(Transfer("out", "/g/" + "%j" * 100),))
    config, user = here_with(tmp_path, Request()).config, pwd.getpwuid(os.getuid()).pw_name
    with pytest.raises(RequestError, match="more than 255 bytes"):
        list(manual.up(config, ("n1",), user, asked, launcher=None))
