"""`#BB_LUA` jobs that are cancelled, hurried, requeued, and whose slurmctld restarts, in each state of their buffer."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.integration.bb_cluster import (
    let_go,
    listing,
    restart,
    see_that_nothing_is_left,
    show,
    state,
    submit_held,
    to_be_marked,
    until_in_shell,
    up,
    wait_for,
)
from tests.integration.on_cluster import exists
from tests.testbed.host import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

# State of the buffer: the hook to hold it in, and what shows that it is there.
STATES = {
    "setup": "staging-in",
    "data_in": "staging-in",
    "pre_run": "pre-run",
    "running": "running",
    "data_out": "staging-out",
    "job_teardown": "teardown",
}


@pytest.fixture(scope="module")
def bb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with up("bs", tmp_path_factory.mktemp("bb")) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(bb: Cluster) -> Iterator[None]:
    bb.run("login", ["sh", "-c", "rm -rf go begun out; mkdir begun"], user="alice")
    yield
    let_go(bb)
    bb.run("ctl", ["scancel", "--hurry", "-u", "alice"])
    see_that_nothing_is_left(bb)


def script(*, waits: bool = False, first: str = "true") -> str:
    """A job named NAME that does `first`, touches begun/NAME, and whose file `f` is then owed to out/NAME."""
    return (
        "#!/bin/sh\n#BB_LUA beeond capacity=100MiB pool=beeond\n"
        "#BB_LUA stage_in source=/global/alice/in\\ dir destination=x\n"
        "#BB_LUA stage_out source=made destination=/global/alice/out/%x\n"
        f"{first}\n"
        'mkdir "$BEEOND/made"; cp "$BEEOND/x/f" "$BEEOND/made/f"; touch "begun/$SLURM_JOB_NAME"\n'
    ) + (until_in_shell("go") + "\n" if waits else "")


def wait_until_in(bb: Cluster, job: int, *states: str) -> None:
    def probe() -> tuple[bool, str]:
        return state(bb, job) in states, show(bb, job)

    wait_until(f"{job} to be {' or '.join(states)}", probe, 60)


def setup_is_over(bb: Cluster, job: int) -> bool:
    """The hook that follows marks all jobs that wait for it: maybe another job's."""
    return job in to_be_marked(bb) or "beeond:directives" in show(bb, job)


def one_in_each_state(bb: Cluster) -> dict[str, int]:
    """A job for each state of a buffer, which stays there until it is let go.

    One after the other: of hooks that begin in the same moment, slurmctld 22.05 may see the end of one only when the
    other has ended (docs/burst-buffer.md), and here they wait.
    """
    jobs = {}
    for hook in STATES:
        nodes = "-N2" if hook in {"running", "data_out"} else "-N1"
        jobs[hook] = job = submit_held(bb, hook, script(waits=hook == "running"), nodes, f"--job-name={hook}")
        if hook == "running":
            wait_for("begun", lambda: exists(bb, "/global/alice/begun/running"))
        wait_until_in(bb, job, STATES[hook])
        if hook == "data_in":  # setup is over
            wait_for("setup", partial(setup_is_over, bb, job))
    assert bb.job(jobs["pre_run"])["JobState"] == "CONFIGURING"
    assert bb.job(jobs["running"])["JobState"] == "RUNNING"
    return jobs


def test_a_job_may_be_cancelled_in_each_state_of_its_buffer(bb: Cluster) -> None:
    jobs = one_in_each_state(bb)
    for job in jobs.values():
        bb.run("login", ["scancel", str(job)], user="alice", check=False)
    let_go(bb)
    ended = {hook: bb.wait_job(job)["JobState"] for hook, job in jobs.items()}
    see_that_nothing_is_left(bb)
    done = {"data_out", "job_teardown"}
    assert ended == {hook: "COMPLETED" if hook in done else "CANCELLED" for hook in STATES}
    assert listing(bb, "/global/alice/begun") == sorted({"running", *done})
    for hook in STATES:
        out = listing(bb, f"/global/alice/out/{hook}")
        assert (hook, out) == (hook, ["f"] if hook in {"running", *done} else [])


def test_a_restart_of_slurmctld_loses_no_job_in_whatever_state_its_buffer_is(bb: Cluster) -> None:
    jobs = one_in_each_state(bb)
    restart(bb)
    let_go(bb)
    for hook in ("setup", "data_in"):
        # Slurm begins again with such a job, and leaves it alone for a minute: not for the test. It may be over, too.
        wait_until_in(bb, jobs[hook], "complete", "pending")
        bb.run("ctl", ["scontrol", "update", f"JobId={jobs[hook]}", "StartTime=now"], check=False)
    bb.run("login", ["touch", "go"], user="alice")
    for job in jobs.values():
        assert bb.wait_job(job)["JobState"] == "COMPLETED"
    see_that_nothing_is_left(bb)
    for hook in STATES:
        assert (hook, listing(bb, f"/global/alice/out/{hook}")) == (hook, ["f"])


def test_scancel_hurry_skips_the_stage_out_of_whatever_asked_for_it(bb: Cluster) -> None:
    bare = script(waits=True).replace("#BB_LUA", "#")
    options = ["--beeond-stage-in=/global/alice/in dir:x", "--beeond-stage-out=made:/global/alice/out/%x"]
    trap = script(waits=True, first="trap 'exit 3' TERM")
    nodes = ("-N2", "-w", "n[1-2]")  # also while the Epilog of one of them is at work on n1
    jobs = {
        "directives": bb.submit("alice", script(waits=True), *nodes, "--job-name=directives"),
        "options": bb.submit("alice", bare, *nodes, "--job-name=options", *options),
        "trap": bb.submit("alice", trap, *nodes, "--job-name=trap"),
    }
    for way, job in jobs.items():
        wait_for("begun", partial(exists, bb, f"/global/alice/begun/{way}"))
        bb.run("login", ["scancel", "--hurry", str(job)], user="alice")
    for way, job in jobs.items():
        assert bb.wait_job(job)["JobState"] == "CANCELLED"
        assert '"given-up"' in bb.read("n1", f"/var/log/beeond-ctl/jobs/{job}.jsonl")
        assert bb.job_output(job).count("beeond: the data was GIVEN UP by scancel --hurry") == 1
        assert not exists(bb, f"/global/alice/out/{way}")


def test_scancel_hurry_with_a_signal_that_does_not_end_the_job_gives_nothing_up(bb: Cluster) -> None:
    trap = "trap 'touch begun/$SLURM_JOB_NAME.told' USR1"
    ends = {"well": ("true", "COMPLETED"), "killed": ("kill -9 $$", "FAILED")}
    jobs = {}
    for way, (last, _) in ends.items():
        text = f"{script(waits=True, first=trap)}{last}\n"
        jobs[way] = bb.submit("alice", text, "-N2", f"--job-name={way}")
        wait_for("begun", partial(exists, bb, f"/global/alice/begun/{way}"))
        bb.run("login", ["scancel", "--hurry", "--signal=USR1", "--batch", str(jobs[way])], user="alice")
        wait_for("told", partial(exists, bb, f"/global/alice/begun/{way}.told"))
        bb.run("login", ["touch", "go"], user="alice")
        assert bb.wait_job(jobs[way])["JobState"] == ends[way][1]
        assert listing(bb, f"/global/alice/out/{way}") == ["f"]
        assert "GIVEN UP" not in bb.job_output(jobs[way])


def test_a_job_that_is_requeued_stages_out_and_begins_again(bb: Cluster) -> None:
    job = bb.submit("alice", script(waits=True), "-N1", "--requeue", "--job-name=again")
    wait_for("begun", lambda: exists(bb, "/global/alice/begun/again"))
    bb.run("login", ["rm", "begun/again"], user="alice")
    node = bb.job(job)["NodeList"]
    bb.run("ctl", ["scontrol", "requeue", str(job)])
    wait_for("staged out", lambda: listing(bb, "/global/alice/out/again") == ["f"])
    wait_for("put back", lambda: bb.job(job)["JobState"] == "PENDING")
    bb.run("login", ["rm", "-r", "out/again"], user="alice")
    # slurmd 22.05 may run no Prolog for a job that comes back to its node within seconds (docs/troubleshooting.md)
    bb.run("ctl", ["scontrol", "update", f"JobId={job}", f"ExcNodeList={node}"])

    def begun() -> tuple[bool, str]:
        # Slurm puts the start off by two minutes, and maybe once more when its hook has ended
        if bb.job(job).get("EligibleTime", "") > time.strftime("%Y-%m-%dT%H:%M:%S"):
            bb.run("ctl", ["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
        nodes = bb.run("ctl", ["sinfo", "-N", "-h", "-o", "%N %T %E"]).stdout
        return exists(bb, "/global/alice/begun/again"), f"{bb.job(job)}; {show(bb, job)}; {nodes}"

    wait_until("begun again", begun, 60)
    bb.run("login", ["touch", "go"], user="alice")
    assert bb.wait_job(job)["JobState"] == "COMPLETED"
    assert listing(bb, "/global/alice/out/again") == ["f"]


def test_the_mail_about_the_stage_out_comes_when_it_is_done(bb: Cluster) -> None:
    bb.run("ctl", ["rm", "-f", "/run/slurm/mails"])
    job = submit_held(bb, "data_out", script(), "-N1", "--job-name=mail", "--mail-type=STAGE_OUT")
    wait_for("staging out", lambda: state(bb, job) == "staging-out")
    wait_for("Epilog", lambda: listing(bb, "/global/alice/out/mail") == ["f"])
    assert "STAGE_OUT" in show(bb, job)
    assert not bb.read("ctl", "/run/slurm/mails")
    let_go(bb)
    wait_for("mail", lambda: f"Job_id={job}" in bb.read("ctl", "/run/slurm/mails"))
    wait_for("complete", lambda: state(bb, job) == "complete")  # the teardown comes after the mail
