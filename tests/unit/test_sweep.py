"""What sweep makes of one node: real directories, mounts, loop devices and processes, and a stand-in for scontrol."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import events, mounts, storage, supervisor
from beeond_ctl import state as states
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError, RetainedError
from beeond_ctl.lifecycle import claims, manual, recover, secret, sweep, teardown
from beeond_ctl.plan import FIRST_OWN_ID, Job, Plan, make_plan
from beeond_ctl.request import Request, Transfer, encode
from tests.unit.root_directory import needs_root, root_directory
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = needs_root

DAY_S = 86400
SCONTROL = """#!/bin/sh
[ -e {root}/silent ] && {{ echo "slurm_load_jobs error" >&2; exit 1; }}
case "$1 $2" in
"show node")
    echo "NodeName=x"
    [ -e {root}/reason ] && printf '   State=IDLE+DRAIN\\n   Reason=%s\\n' "$(cat {root}/reason)" ;;
update*) case "$*" in *RESUME*) rm -f {root}/reason ;; *) echo "$*" | sed 's/.*Reason=//' > {root}/reason ;; esac ;;
esac
exit 0
"""
SQUEUE = """#!/bin/sh
[ -e {root}/silent ] && {{ echo "slurm_load_jobs error" >&2; exit 1; }}
[ -e {root}/alive ] || {{ echo "Invalid job id specified" >&2; exit 1; }}
echo "$5 RUNNING n1"
"""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(supervisor, "marked", dict)  # this machine may have instances of other tests
    with root_directory() as path:
        for name in ("nvme0", "bin"):
            (path / name).mkdir(mode=0o755)
        for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE)):
            (path / "bin" / name).write_text(text.format(root=path))
            (path / "bin" / name).chmod(0o755)
        yield path


def site(root: Path, kind: str = "directory", **more: Any) -> SiteConfig:
    return SiteConfig.model_validate({
        "storage": {"kind": kind, "paths": [f"{root}/nvme0"], "capacity": "600MiB"},
        "paths": {"run": f"{root}/run", "log": f"{root}/log"}, "mount": {"root": f"{root}/mnt"},
        "slurm": {"path": [f"{root}/bin"]}, "deadlines": {"stop": 5}, **more,
    })  # fmt: skip


def instance(
    config: SiteConfig, job_id: int, *, owed: bool = False, asked: Request | None = None, **more: Any
) -> Plan:
    """An instance of a job of this node alone, as the Prolog leaves it but for its services."""
    job = more.pop("job", Job(job_id, 1000, 1000, "alice"))
    request = asked or (Request(stage_out=(Transfer("out", "/global/out"),)) if owed else Request())
    node = os.uname().nodename.split(".")[0]
    plan = make_plan(config, request, job, (node,))
    state = states.State(
        job, (node,), node, encode(request), config.model_dump(mode="json"), phase="ready", ran=True
    )
    for name, value in more.items():
        setattr(state, name, value)
    states.create(config.paths.run, state)
    storage.prepare(plan, node)
    if state.phase == "retained":
        storage.detach(plan, deadline_s=60)
        storage.set_phase(plan, "retained")
    return plan


def verdicts(config: SiteConfig, **options: Any) -> dict[str, str]:
    return {item.what: item.verdict for item in sweep.sweep(config, **options)}


def loop_devices(root: Path) -> str:
    done = subprocess.run(
        ["losetup", "-nO", "NAME,BACK-FILE"], check=True, capture_output=True, text=True, errors="replace"
    )
    return "\n".join(line for line in done.stdout.splitlines() if str(root) in line)


def test_what_lost_its_state_is_known_by_its_place_and_removed(root: Path) -> None:
    config = site(root, "image")
    instance(config, 41)
    for name in ("39", "40", "41", "foreign"):
        (root / "mnt" / name).mkdir(parents=True)
    for name in ("40", "41", "foreign"):
        subprocess.run(["mount", "--bind", root / "nvme0", root / "mnt" / name], check=True)
    for job_id, block in ((41, 21000), (38, 22000)):
        assert claims.claim_ports(config.paths.run, job_id, [block]) == [block]
    (root / "run/jobs/41/state.json").unlink()
    assert loop_devices(root)

    (root / "run/locks").mkdir()
    (root / "run/locks/41").touch()
    before = sorted(root.rglob("*"))
    expected = dict.fromkeys(["job 41", f"{root}/mnt/39", f"{root}/mnt/40", "claim of port-22000"], "removed")
    assert verdicts(config, dry_run=True) == expected
    assert sorted(root.rglob("*")) == before
    assert verdicts(config) == expected
    assert not (root / "run/jobs/41").exists()
    assert not list((root / "nvme0").iterdir())
    assert not list((root / "run/claims").iterdir())
    assert not list((root / "run/locks").iterdir())
    assert [path.name for path in (root / "mnt").iterdir()] == ["foreign"]
    assert mounts.mount_at(f"{root}/mnt/foreign") is not None
    assert loop_devices(root) == ""
    assert verdicts(config) == {}


def test_a_guests_mount_is_left_while_it_has_a_state(root: Path) -> None:
    config = site(root)
    node = os.uname().nodename.split(".")[0]
    job, host = Job(42, 1000, 1000, "alice"), Job(40, 1000, 1000, "alice")
    state = states.State(
        job, (node,), node, encode(Request(share="1")), config.model_dump(mode="json"), phase="retained",
        mount=f"{root}/mnt/40", kin=states.Kin(host, ("n1",), ((1, 42, (node,)),)),
    )  # fmt: skip
    states.create(config.paths.run, state)
    (root / "mnt/40").mkdir(parents=True)
    subprocess.run(["mount", "--bind", root / "nvme0", root / "mnt/40"], check=True)
    assert verdicts(config) == {"job 42": "kept"}
    state.phase = "ready"
    states.write(config.paths.run, state)
    assert verdicts(config) == {"job 42": "removed"}
    assert not (root / "mnt/40").exists()


def test_what_is_kept_after_a_power_cut_says_so_for_ever(root: Path) -> None:
    config, plan = two_devices(root)
    storage.prepare(plan, plan.nodes[0])
    for _ in range(2):
        shutil.rmtree(root / "run")
        assert verdicts(config) == {"job 42": "kept"}
        assert [record.phase for record in recover.recorded(config, 42)] == ["retained", "retained"]
        state = recover.rebuilt(config, 42)
        assert state is not None
        assert state.rebooted
    logged = [event for event in events.read(config.paths.log, 42) if event["event"] == "rebooted"]
    assert [event["nodes"] for event in logged] == [[plan.nodes[0]]]


def test_a_node_that_only_mounted_has_nothing_to_keep(root: Path) -> None:
    node = os.uname().nodename.split(".")[0]
    config = site(root, storage={"kind": "directory", "paths": [f"{root}/nvme0"], "without": [node]})
    asked = Request(stage_out=(Transfer("out", "/global/out"),))
    job = Job(42, 1000, 1000, "alice")
    state = states.State(
        job, ("a1", node), node, encode(asked), config.model_dump(mode="json"), phase="staging-out", ran=True
    )
    states.create(config.paths.run, state)
    assert verdicts(config, dry_run=True) == {"job 42": "removed"}
    assert verdicts(config) == {"job 42": "removed"}
    assert not (root / "run/jobs/42").exists()
    assert not (root / "reason").exists()


def test_a_loop_device_without_an_instance_is_let_go_and_one_of_others_is_not(root: Path) -> None:
    config = site(root)
    (root / "nvme0/job-7").mkdir()
    for image in (root / "nvme0/job-7/image", root / "nvme0/other"):
        with image.open("wb") as file:
            file.truncate(1 << 20)
        subprocess.run(["losetup", "--find", image], check=True)
    try:
        found = verdicts(config)
        assert [verdict for what, verdict in found.items() if what.endswith("job-7/image")] == ["removed"]
        assert found[f"{root}/nvme0/job-7"] == "stuck"
        wait_for(lambda: "job-7" not in loop_devices(root), 20)
        assert "nvme0/other" in loop_devices(root)
    finally:
        for line in loop_devices(root).splitlines():
            subprocess.run(["losetup", "--detach", line.split()[0]], check=True)


def test_processes_that_outlived_their_state_are_ended_by_token_and_no_others(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.undo()
    config = site(root)
    token = f"lost-{os.getpid()}"
    environment = {"PATH": os.environ["PATH"]}
    ours = subprocess.Popen(["sleep", "60"], env={**environment, supervisor.TOKEN_VARIABLE: token})
    foreign = subprocess.Popen(["sleep", "60"], env=environment)
    try:
        wait_for(lambda: token in supervisor.marked(), 5)
        # Only those of the token are looked at.
        marked = {token: supervisor.marked()[token]}
        run = sweep._Sweep(config, dry_run=False, deadline=time.monotonic() + 60)
        state = states.State(Job(9, 0, 0, "root"), ("n",), "n", encode(Request()), {}, token=token)
        states.create(config.paths.run, state)
        assert list(sweep._processes(run, marked)) == []
        (root / "run/jobs/9/state.json").write_text("{")
        assert [item.verdict for item in sweep._processes(run, marked)] == ["unknown"]
        assert ours.poll() is None
        (root / "run/jobs/9/state.json").unlink()
        shutil.rmtree(root / "run/jobs/9")
        assert [item.verdict for item in sweep._processes(run, marked)] == ["removed"]
        assert ours.poll() is not None
        assert foreign.poll() is None
    finally:
        for process in (ours, foreign):
            process.kill()
            process.wait()


def test_kept_data_past_its_age_is_told_and_removed_only_if_the_site_says_so(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    instance(site(root), 42, owed=True, phase="retained", reason="quota")
    home = root / "nvme0/job-42"
    written = home / "instance.json"
    os.utime(written, (1, 1))  # the clock was not set yet when the record was written
    assert verdicts(site(root, sweep={"kept_days": 9})) == {"job 42": "kept"}
    record = json.loads(written.read_text())
    written.write_text(json.dumps(record | {"created": time.time() - 12 * DAY_S}))
    os.utime(written, (time.time() - 10 * DAY_S,) * 2)
    assert verdicts(site(root)) == {"job 42": "kept"}
    assert verdicts(site(root, sweep={"kept_days": 11})) == {"job 42": "kept"}
    assert verdicts(site(root, sweep={"kept_days": 9})) == {"job 42": "expired"}
    giving_up = site(root, sweep={"kept_days": 9, "remove_expired": True})
    for _ in range(2):
        assert verdicts(giving_up, dry_run=True) == {"job 42": "expired"}
    assert verdicts(giving_up) == {"job 42": "expired"}
    monkeypatch.setattr(sweep, "_SURE_S", 0.0)
    assert verdicts(giving_up, dry_run=True) == {"job 42": "removed"}
    assert (home / "data").exists()
    (root / "reason").write_text("beeond: job 42: data kept")
    (root / "run/jobs/42/state.json").unlink()  # the record alone, as after a reboot
    (root / "run/jobs/42/instance").unlink()
    shutil.rmtree(root / "run/jobs/42")
    assert verdicts(giving_up) == {"job 42": "removed"}
    assert not home.exists()
    assert not (root / "reason").exists()
    assert verdicts(giving_up) == {}
    assert not list((root / "run/expired").iterdir())


def test_kept_data_is_not_given_up_by_a_time_of_day_that_is_wrong_for_a_while(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    instance(site(root), 42, owed=True, phase="retained", reason="quota")
    config = site(root, sweep={"kept_days": 9, "remove_expired": True})
    real_time, real_clock = time.time, time.clock_gettime

    def clocks(*, off_days: float, since_boot_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real_time() + off_days * DAY_S)
        monkeypatch.setattr(time, "clock_gettime", lambda which: real_clock(which) + since_boot_s)

    told: list[str] = []
    for off_days, since_boot_s in (
        (3000, 0),
        (3000, 3500),
        (0, 3700),
        (3000, 3800),
        (3000, 7300),
        (3000, 7500),
    ):
        clocks(off_days=off_days, since_boot_s=since_boot_s)
        told += verdicts(config).values()
    assert told == ["expired", "expired", "kept", "expired", "expired", "removed"]


def test_a_stuck_node_is_drained_with_the_reason_until_a_sweep_finds_it_clean(root: Path) -> None:
    config = site(root)
    (root / "nvme0/job-8/data").mkdir(parents=True)
    (root / "reason").write_text("broken fan")
    for _ in range(2):
        assert verdicts(config) == {f"{root}/nvme0/job-8": "stuck"}
        reason = (root / "reason").read_text().strip()
        assert reason.startswith(f"broken fan | beeond: sweep: {root}/nvme0/job-8: has no readable record")
        assert reason.count("sweep") == 1
    (root / "nvme0/job-8/data").rmdir()
    assert verdicts(config) == {f"{root}/nvme0/job-8": "removed"}
    assert (root / "reason").read_text().strip() == "broken fan"


class CutError(BaseException):
    """The power fails here."""


def cut_at(device: str, number: int) -> Callable[[str], None]:
    """The power fails at a step on one device, when work on the others is as far as it can be."""
    seen: list[str] = []

    def step(text: str) -> None:
        if f"/{device}/" in text:
            seen.append(text)
            if len(seen) > number:
                raise CutError

    return step


def two_devices(root: Path) -> tuple[SiteConfig, Plan]:
    (root / "nvme1").mkdir(mode=0o755)
    config = site(root, storage={"kind": "directory", "paths": [f"{root}/nvme0", f"{root}/nvme1"]})
    node = os.uname().nodename.split(".")[0]
    asked = Request(stage_out=(Transfer("out", "/global/out"),))
    return config, make_plan(config, asked, Job(42, 1000, 1000, "alice"), (node,))


def homes(root: Path) -> list[str]:
    return [str(path) for device in ("nvme0", "nvme1") for path in (root / device).iterdir()]


@pytest.mark.parametrize("device", ["nvme0", "nvme1"])
def test_a_power_cut_while_targets_are_made_leaves_nothing_that_is_owed(root: Path, device: str) -> None:
    config, plan = two_devices(root)
    number, done = 0, False
    while not done:
        with suppress(CutError):
            storage.prepare(plan, plan.nodes[0], step=cut_at(device, number))
            done = True
        shutil.rmtree(root / "run")
        if not done:
            assert set(verdicts(config).values()) <= {"removed"}
            assert homes(root) == []
        number += 1
    assert number > 3
    assert verdicts(config) == {"job 42": "kept"}  # the job may have run


@pytest.mark.parametrize("device", ["nvme0", "nvme1"])
def test_a_power_cut_in_a_wipe_leaves_a_wipe_that_goes_on(root: Path, device: str) -> None:
    config, plan = two_devices(root)
    number, done, found = 0, False, []
    while not done:
        storage.prepare(plan, plan.nodes[0])
        for target in plan.targets:
            Path(target.data, "result").write_text("owed")
        with suppress(CutError):
            storage.wipe(plan, "delete", deadline_s=60, step=cut_at(device, number))
            done = True
        shutil.rmtree(root / "run")
        found += list(verdicts(config).values())
        assert homes(root) == []
        number += 1
    assert set(found) == {"removed"}
    assert len(found) > 3


def test_a_wipe_that_one_device_refuses_to_write_down_goes_on_after_a_power_cut(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    config, plan = two_devices(root)
    storage.prepare(plan, plan.nodes[0])
    real = storage._replace_record

    def failing(record: storage.Record) -> None:
        if "nvme1" in record.home:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(record)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "_replace_record", failing)
        with pytest.raises(NodeError, match="nvme1/job-42: the record cannot be written"):
            storage.wipe(plan, "delete", deadline_s=60)
    shutil.rmtree(root / "run")
    assert verdicts(config) == {"job 42": "removed"}
    assert homes(root) == []


def write_config(path: Path, **changed: Any) -> None:
    """As another version had it."""
    data = json.loads(path.read_text())
    for section, keys in changed.items():
        data["config"][section] |= keys
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("rebooted", [False, True])
def test_what_another_version_made_is_swept_and_what_cannot_be_understood_is_named(
    root: Path, *, rebooted: bool
) -> None:
    config = site(root)
    for job_id, changed in (
        (50, {"storage": {"kind": "tape"}}),
        (51, {"storage": {"spin": 7200}}),
        (52, {}),
    ):
        instance(config, job_id)
        write_config(root / f"run/jobs/{job_id}/state.json", **changed)
        write_config(root / f"nvme0/job-{job_id}/instance.json", **changed)
    if rebooted:
        shutil.rmtree(root / "run")
    found = {item.what: item for item in sweep.sweep(config)}
    assert {what: item.verdict for what, item in found.items()} == {
        "job 50": "stuck", "job 51": "removed", "job 52": "removed",
    }  # fmt: skip
    assert "job 50 was written by another version of beeond-ctl, which had another storage.kind" in (
        found["job 50"].text
    )
    assert [path.name for path in (root / "nvme0").iterdir()] == ["job-50"]


def test_the_epilog_of_an_instance_that_another_version_made(root: Path) -> None:
    config = site(root)
    (root / "config.toml").write_text(
        f"[paths]\nrun = '{root}/run'\nlog = '{root}/log'\n[slurm]\npath = ['{root}/bin']\n"
    )
    node = os.uname().nodename.split(".")[0]
    for job_id, changed in ((50, {"kind": "tape"}), (51, {"spin": 7200})):
        instance(config, job_id)
        write_config(root / f"run/jobs/{job_id}/state.json", storage=changed)
    with pytest.raises(NodeError, match="job 50 was written by another version"):
        teardown.epilog({"SLURM_JOB_ID": "50", "SLURMD_NODENAME": node}, root / "config.toml")
    assert "beeond: job 50: stage-out is not proved: the record of job 50" in (root / "reason").read_text()
    assert teardown.epilog({"SLURM_JOB_ID": "51", "SLURMD_NODENAME": node}, root / "config.toml") == 0
    assert [path.name for path in (root / "nvme0").iterdir()] == ["job-50"]


def test_a_job_is_left_alone_where_slurm_says_that_it_lives_or_says_nothing(root: Path) -> None:
    config = site(root)
    instance(config, 43)
    instance(config, 44)
    (root / "silent").touch()
    assert verdicts(config) == {"job 43": "unknown", "job 44": "unknown"}
    assert not (root / "reason").exists()
    (root / "silent").unlink()
    (root / "alive").touch()
    assert verdicts(config) == {"job 43": "live", "job 44": "live"}
    (root / "alive").unlink()
    with states.locked(config.paths.run, 43, "later"):
        assert verdicts(config) == {"job 43": "live", "job 44": "removed"}
    assert verdicts(config, deadline_s=1e-9) == {"job 43": "later"}
    assert verdicts(config) == {"job 43": "removed"}


@pytest.mark.parametrize("phase", ["claimed", "preparing", "starting", "mounting", "staging-in", "wiping"])
def test_what_up_left_before_it_was_ready_is_dead_once_nobody_brings_it_up(root: Path, phase: str) -> None:
    config = site(root)
    (root / "silent").touch()  # Slurm knows nothing of it, and is not asked
    left, used = f"job {FIRST_OWN_ID}", f"job {FIRST_OWN_ID + 1}"
    instance(config, FIRST_OWN_ID, owed=True, phase=phase, ran=False)
    instance(config, FIRST_OWN_ID + 1, owed=True)
    with states.locked(config.paths.run, FIRST_OWN_ID, "later"):
        assert verdicts(config) == {left: "live", used: "live"}
    assert verdicts(config) == {left: "removed", used: "live"}
    assert verdicts(config) == {used: "live"}
    assert [path.name for path in (root / "nvme0").iterdir()] == [f"job-{FIRST_OWN_ID + 1}"]
    assert [path.name for path in (root / "run/jobs").iterdir()] == [str(FIRST_OWN_ID + 1)]


def test_a_crash_in_the_first_moment_of_up_leaves_what_sweep_removes(root: Path) -> None:
    config = site(root)
    (root / "silent").touch()
    directory = states.run_dir(config.paths.run, FIRST_OWN_ID)
    directory.mkdir(parents=True)
    states._keep_room(directory)
    assert verdicts(config) == {f"job {FIRST_OWN_ID}": "removed"}
    assert not directory.exists()


@pytest.mark.parametrize("swept", [False, True])
def test_what_up_left_kept_on_a_node_that_was_rebooted_can_be_given_up(root: Path, swept: bool) -> None:
    config = site(root)
    instance(config, FIRST_OWN_ID, owed=True, phase="retained")
    shutil.rmtree(root / "run")
    if swept:
        assert verdicts(config) == {f"job {FIRST_OWN_ID}": "kept"}
    recover.on_this_node(config, FIRST_OWN_ID, discard=True, proved=[])
    assert not list((root / "nvme0").iterdir())
    assert verdicts(config) == {}


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("kind", ["directory", "image"])
def test_down_believes_no_missing_source_after_a_reboot(root: Path, kind: str, swept: bool) -> None:
    (root / "global").mkdir()
    (root / "global").chmod(0o777)
    paths = {"run": f"{root}/run", "log": f"{root}/log", "secret": f"{root}/secret"}
    config = site(root, kind, paths=paths, backend={"default": "local", "allowed": ["local"]})
    secret.add(config)
    asked = Request(backend="local", stage_out=(Transfer("out", f"{root}/global/out"),))
    user = pwd.getpwnam("nobody")
    plan = instance(
        config, FIRST_OWN_ID, asked=asked, job=Job(FIRST_OWN_ID, user.pw_uid, user.pw_gid, "nobody")
    )
    left = Path(plan.targets[0].data, "result")
    left.write_text("weeks")  # what was in `out` had not reached the device
    storage.detach(plan, deadline_s=60)
    shutil.rmtree(root / "run")
    if swept:
        assert verdicts(config) == {f"job {FIRST_OWN_ID}": "kept"}
    with pytest.raises(RetainedError, match="out is not there now"):
        manual.down_here(config, FIRST_OWN_ID)
    assert verdicts(config) == {f"job {FIRST_OWN_ID}": "kept"}
    storage.attach(plan, deadline_s=60)
    assert left.read_text() == "weeks"
    storage.detach(plan, deadline_s=60)


def test_event_logs_past_their_age_are_removed_but_for_those_of_jobs_that_are_here(root: Path) -> None:
    config = site(root, sweep={"log_days": 30})
    instance(config, 45, owed=True, phase="retained")
    logs = root / "log/jobs"
    logs.mkdir(parents=True, exist_ok=True)
    for name in ("44.jsonl", "45.jsonl", "46.jsonl", "notes.txt"):
        (logs / name).touch()
        age_s = 10 * DAY_S if name == "46.jsonl" else 40 * DAY_S
        os.utime(logs / name, (time.time() - age_s,) * 2)
    proofs = root / "run/proved"  # of jobs whose log was full
    proofs.mkdir()
    for name, age_days in (("44", 40), ("45", 40), ("46", 10)):
        (proofs / name).touch()
        os.utime(proofs / name, (time.time() - age_days * DAY_S,) * 2)
    found = {"job 45": "kept", f"event logs in {logs}": "removed", f"proofs in {proofs}": "removed"}
    assert verdicts(config) == found
    assert sorted(path.name for path in proofs.iterdir()) == ["45", "46"]
    assert sorted(path.name for path in logs.iterdir()) == ["45.jsonl", "46.jsonl", "notes.txt"]
