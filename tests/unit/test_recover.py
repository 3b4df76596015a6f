from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import launch, mounts, storage
from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import BeeondError, NodeError, RetainedError
from beeond_ctl.events import EventLog
from beeond_ctl.launch import Answer
from beeond_ctl.lifecycle import recover, secret, steps, tell
from beeond_ctl.lifecycle.here import Here
from beeond_ctl.lifecycle.stage import Stage
from beeond_ctl.plan import Job, make_plan
from beeond_ctl.request import Request, Transfer, encode
from beeond_ctl.state import State
from tests.unit.root_directory import root_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from beeond_ctl.plan import Plan

JOB = Job(42, 1000, 1000, "alice", 1)


def site(tmp_path: Path) -> SiteConfig:
    return SiteConfig.model_validate({"paths": {"run": f"{tmp_path}/run", "log": f"{tmp_path}/log"}})


def record(index: int, **more: object) -> storage.Record:
    config = SiteConfig.model_validate({"storage": {"paths": ["/nvme0/x", "/nvme1/x"]}}).model_dump(
        mode="json"
    )
    values: dict[str, object] = {
        "instance": "a", "job": JOB, "nodes": ("n1",), "node": "n1", "backend": "local", "request": '{"v":1}',
        "block": 21008, "phase": "live", "created": 0.0, "config": config, "home": f"/nvme{index}/x/job-42",
    }  # fmt: skip
    return storage.Record(**(values | more))  # type: ignore[arg-type]


def test_a_proof_names_the_stage_out_that_it_is_of(tmp_path: Path) -> None:
    config = site(tmp_path)
    assert recover.proofs(config, 42) == []
    log = EventLog(config.paths.log, 42, "n1")
    log.log("prolog")
    log.log("proved", run="42.0", attempt="a1")
    log.log("prolog")
    log.log("proved", run="42.0")  # nothing tells of which
    assert recover.proofs(config, 42) == ["42.0.a1"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_proof_of_an_earlier_job_with_the_same_id_wipes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, but for the way to the node: kept data of a user, and the log of another one's job."""
    node = os.uname().nodename.partition(".")[0]
    with root_directory() as root:
        for name in ("nvme0", "bin"):
            (root / name).mkdir(mode=0o755)
        for name in ("scontrol", "squeue"):
            (root / "bin" / name).write_text("#!/bin/sh\necho Invalid job id specified >&2; exit 1\n")
            (root / "bin" / name).chmod(0o755)
        said: list[str] = []
        config = SiteConfig.model_validate({
            "storage": {"kind": "directory", "paths": [f"{root}/nvme0"]}, "mount": {"root": f"{root}/mnt"},
            "paths": {"run": f"{root}/run", "log": f"{root}/log", "secret": f"{root}/secret"},
            "slurm": {"path": [f"{root}/bin"]},
        })  # fmt: skip
        secret.add(config)
        job = Job(42, 1000, 1000, "nobody-here")
        asked = Request(stage_out=(Transfer("out", f"{root}/nowhere"),))
        state = State(
            job, (node,), node, encode(asked), config.model_dump(mode="json"), phase="retained", ran=True,
            attempt="b2",
        )  # fmt: skip
        states.create(config.paths.run, state)
        plan = make_plan(config, asked, job, (node,))
        storage.prepare(plan, node)
        (root / "nvme0/job-42/data/result").write_text("owed")
        storage.set_attempt(plan, "b2")
        storage.set_phase(plan, "retained")
        log = EventLog(config.paths.log, 42, node)
        log.log("prolog", run="42.0", uid=1001)
        log.log("proved", run="42.0", attempt="a1")
        log.log("clean")
        log.log("prolog", run="42.0", uid=1000)

        def on_nodes(nodes: Sequence[str], words: Sequence[str], **_: object) -> list[Answer]:
            if "--ask" in words:
                return [Answer(node, 0, " ".join(recover.proofs(config, 42)) or "no")]
            given = [words[index + 1] for index, word in enumerate(words) if word == "--proved"]
            try:
                recover.on_this_node(config, 42, discard=False, proved=given)
            except BeeondError as error:
                said.append(str(error))
                return [Answer(node, 1, str(error))]
            return [Answer(node, 0, "")]

        monkeypatch.setattr(recover, "on_nodes", on_nodes)
        shutil.rmtree(root / "run/jobs/42")  # a reboot: what the records say is all there is
        with pytest.raises(NodeError, match="not finished"):
            list(recover.everywhere(config, 42, node, discard=False))
        assert (root / "nvme0/job-42/data/result").read_text() == "owed"
        assert said[0].startswith("data kept, stage-out is not proved")
        (attempt,) = {record.attempt for record in recover.recorded(config, 42)}
        assert attempt not in {"", "b2"}  # was written down before the copying, that failed, began
        # What the leader says of the very stage-out that this node was part of.
        log.log("proved", run="42.0", attempt=attempt)
        list(recover.everywhere(config, 42, node, discard=False))
        assert not (root / "nvme0/job-42").exists()


def test_all_nodes_of_a_recovery_work_at_once_over_ssh_since_they_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    met = threading.Barrier(65)

    def ssh(node: str, command: str, *_: object) -> Answer:
        if "--here" in command:
            met.wait(60)
        return Answer(node, 0, "no")

    monkeypatch.setattr(launch, "_ssh", ssh)
    monkeypatch.setattr(shutil, "which", {}.get)
    list(recover.everywhere(site(tmp_path), 42, "n[1-65]", discard=False))


def test_all_nodes_of_a_recovery_work_at_once_over_pdsh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pdsh = tmp_path / "pdsh"
    pdsh.write_text(f"""#!/bin/sh
echo "$*" >> {tmp_path}/called
i=0; while [ $((i += 1)) -le 65 ]; do echo "n$i: beeond-ctl-exit=0"; done
""")
    pdsh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    list(recover.everywhere(site(tmp_path), 42, "n[1-65]", discard=False))
    (line,) = [line for line in (tmp_path / "called").read_text().splitlines() if "--here" in line]
    assert " -f 65 " in line


def test_each_stage_out_has_a_name_of_its_own() -> None:
    from beeond_ctl.lifecycle.teardown import _ending

    told = [_ending({"n1": {"ran": True, "hurry": False}}) for _ in range(2)]
    assert told[0]["attempt"] != told[1]["attempt"]
    assert told[0]["ran"] == ["n1"]


def test_what_the_leader_writes_down_is_the_proof_of_the_stage_out_that_just_ended(tmp_path: Path) -> None:
    config = site(tmp_path)
    state = State(JOB, ("n1",), "n1", '{"v":1}', config.model_dump(mode="json"), attempt="a1")
    states.create(config.paths.run, state)
    staging = Stage(Here(config, state), inward=False)
    staging.combine["proved"]({"n1": {"damage": "meta died"}})
    assert recover.proofs(config, 42) == []
    staging.combine["proved"]({"n1": {"damage": ""}})
    assert recover.proofs(config, 42) == ["42.1.a1"]
    shutil.rmtree(tmp_path / "run")  # the log alone
    assert recover.proofs(config, 42) == ["42.1.a1"]


class Told:
    """A team whose leader says that all is well."""

    def meet(self, point: str, report: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        del point, report, timeout_s
        return {"damage": ""}

    def check(self) -> None:
        pass

    def ask(self, kind: str, payload: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        raise AssertionError(kind, payload, timeout_s)

    def fail(self, message: str, *, user_fault: bool, nobody: bool = False) -> None:
        raise AssertionError(message, user_fault)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Here:
    """The second node of a job, which is not the leader, after the copying."""
    monkeypatch.setattr(steps, "damage", lambda _: "")
    config = site(tmp_path)
    state = State(JOB, ("n1", "n2"), "n2", '{"v":1}', config.model_dump(mode="json"), attempt="a1")
    states.create(config.paths.run, state)
    return Here(config, state)


def test_each_node_writes_the_proof_down_and_can_tell_it_when_it_has_forgotten_the_job(second: Here) -> None:
    Stage(second, inward=False)._prove_together(Told())
    assert second.state.proved
    shutil.rmtree(second.config.paths.run)  # `forget`, and a power cut
    assert recover.proofs(second.config, 42) == ["42.1.a1"]


def test_a_full_log_keeps_nobody_from_wiping_what_is_proved_and_the_proof_is_not_lost(
    tmp_path: Path, second: Here
) -> None:
    (tmp_path / "log").write_text("in the way")
    Stage(second, inward=False)._prove_together(Told())
    assert second.state.proved
    steps.forget(second)
    assert recover.proofs(second.config, 42) == ["42.1.a1"]


def test_a_leader_that_cannot_write_the_proof_down_tells_it_to_nobody(tmp_path: Path) -> None:
    config = site(tmp_path)
    state = State(JOB, ("n1", "n2"), "n1", '{"v":1}', config.model_dump(mode="json"), attempt="a1")
    states.create(config.paths.run, state)
    for path in ("log", "run/proved"):
        (tmp_path / path).write_text("in the way")
    with pytest.raises(NodeError, match="n1: the proof of job 42 cannot be written to its event log"):
        Stage(Here(config, state), inward=False).combine["proved"]({"n1": {"damage": ""}})
    assert not state.proved


def test_a_discard_that_was_cut_off_is_neither_owed_nor_a_proof_for_others(tmp_path: Path) -> None:
    config = site(tmp_path)
    asked = '{"v":1,"stage_out":[["out","/g",[]]]}'
    state = State(JOB, ("n1",), "n1", asked, config.model_dump(mode="json"), phase="wiping", ran=True)
    assert Here(config, state).owed
    state.given_up = True
    states.create(config.paths.run, state)
    assert not Here(config, state).owed
    assert recover.proofs(config, 42) == []
    state.proved, state.attempt = True, "a1"
    states.write(config.paths.run, state)
    assert recover.proofs(config, 42) == ["42.1.a1"]


def test_a_state_is_rebuilt_with_the_configuration_of_its_time() -> None:
    state = recover.state_of([record(0, attempt="a1"), record(1, attempt="a1")])
    assert state.config["storage"]["paths"] == ["/nvme0/x", "/nvme1/x"]
    assert (state.job, state.ran, state.phase, state.attempt) == (JOB, True, "retained", "a1")


def test_a_record_in_another_place_than_it_was_made_in_is_told_and_nothing_is_wiped() -> None:
    with pytest.raises(
        NodeError, match="/nvme2/x/job-42 was made at another place, one of /nvme0/x/job-42, /nvme1"
    ):
        recover.state_of([record(0, phase="wiping"), record(2, phase="wiping")])


@contextmanager
def kept_on_two_devices(kind: str) -> Iterator[tuple[Path, SiteConfig, Plan]]:
    """Kept data of a job of this node alone, after a reboot; the second device is gone."""
    node = os.uname().nodename.partition(".")[0]
    with root_directory() as root, ExitStack() as stack:
        (root / "bin").mkdir()
        for name, text in (("scontrol", "exit 0"), ("squeue", "echo Invalid job id specified >&2; exit 1")):
            (root / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (root / "bin" / name).chmod(0o755)
        where: dict[str, object] = {"paths": [f"{root}/nvme0", f"{root}/nvme1"]}
        for name in ("nvme0", "nvme1") if kind == "directory" else ():
            (root / name).mkdir()
        for name in ("nvme0", "nvme1") if kind == "device" else ():
            with (root / f"{name}.img").open("wb") as file:
                file.truncate(400 << 20)
            words = ["losetup", "--find", "--show", f"{root}/{name}.img"]
            loop = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
            stack.callback(subprocess.run, ["losetup", "--detach", loop], check=True)
            device = Path(f"/dev/{root.name}-{name}")
            device.symlink_to(loop)
            stack.callback(device.unlink, missing_ok=True)
            where = {"devices": [f"/dev/{root.name}-nvme0", f"/dev/{root.name}-nvme1"]}
        config = SiteConfig.model_validate({
            "storage": {"kind": kind, **where}, "mount": {"root": f"{root}/mnt"}, "slurm": {"path": [f"{root}/bin"]},
            "paths": {"run": f"{root}/run", "log": f"{root}/log", "secret": f"{root}/secret"},
        })  # fmt: skip
        stack.callback(mounts.unmount, config.paths.run, deadline_s=20)
        secret.add(config)
        asked = Request(stage_out=(Transfer("out", f"{root}/nowhere"),))
        plan = make_plan(config, asked, Job(42, 1000, 1000, "nobody-here"), (node,))
        storage.prepare(plan, node)
        storage.set_attempt(plan, "a1")
        Path(plan.targets[0].data, "result").write_text("owed")
        mounts.unmount(config.paths.run, deadline_s=20)
        shutil.rmtree(root / "run")
        if kind == "directory":
            (root / "nvme1").rename(root / "away")
        else:
            Path(f"/dev/{root.name}-nvme1").unlink()
        yield root, config, plan


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("kind", ["directory", "device"])
@pytest.mark.parametrize("how", [{"discard": True, "proved": []}, {"discard": False, "proved": ["42.0.a1"]}])
def test_what_lies_on_the_other_devices_can_be_wiped_when_one_is_gone_for_good(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str, how: dict[str, Any]
) -> None:
    told: list[str] = []
    monkeypatch.setattr(tell, "_tell", lambda _, text: told.append(text))
    with kept_on_two_devices(kind) as (root, config, plan):
        first, second = (target.home for target in plan.targets)
        for _ in range(2):
            with pytest.raises(
                RetainedError,
                match=f"{second} is not there; mount its device, or give the data up with recover --discard.; when",
            ):
                recover.on_this_node(config, 42, discard=False, proved=[])
        assert Path(plan.targets[0].data, "result").read_text() == "owed"
        told.clear()
        recover.on_this_node(config, 42, **how)
        by_whom = f"the data that was kept on {plan.nodes[0]} was GIVEN UP by an admin (recover --discard)"
        assert told == ([f"{by_whom}; nothing is kept any more"] if how["discard"] else [])
        assert f"; not there, so not wiped: {second}" in capsys.readouterr().out
        assert not os.path.lexists(first)
        assert not (root / "run/jobs/42").exists()
        assert recover.recorded(config, 42) == []


def test_devices_that_hold_different_runs_are_not_mixed() -> None:
    with pytest.raises(NodeError, match="different runs"):
        recover.state_of([record(0), record(1, instance="b")])


@pytest.mark.parametrize(
    ("first", "second", "rebooted"),
    [
        ({"phase": "live"}, {"phase": "retained"}, True),
        ({"phase": "retained"}, {"phase": "retained"}, False),
        ({"phase": "retained", "rebooted": True}, {"phase": "retained"}, True),
    ],
)
def test_a_node_that_was_rebooted_while_its_data_was_in_use_remembers_it(
    first: dict[str, Any], second: dict[str, Any], *, rebooted: bool
) -> None:
    assert recover.state_of([record(0, **first), record(1, **second)]).rebooted == rebooted


def test_what_was_being_wiped_on_any_device_is_not_taken_for_kept_data() -> None:
    assert not recover.state_of([record(0), record(1, phase="wiping")]).ran


def test_the_job_ran_unless_every_node_says_that_it_did_not() -> None:
    from beeond_ctl.lifecycle.teardown import _all_ran

    told = _all_ran({"n1": {"ran": True, "hurry": False}, "n2": {"ran": False, "hurry": True}})
    assert told == {"ran": ["n1"], "failed": ["n2"], "hurry": True}
