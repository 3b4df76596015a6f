"""`#BB_LUA` on a real cluster: the same instance as with `--beeond`, and Slurm knows what became of it."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import config as configuration
from beeond_ctl.plan import Job, make_plan
from beeond_ctl.request import decode
from tests.integration.bb_cluster import (
    ROOT,
    STATE,
    buffers,
    let_go,
    listing,
    put,
    see_that_nothing_is_left,
    show,
    state,
    submit_held,
    to_be_marked,
    until_in_shell,
    up,
    wait_for,
)
from tests.integration.on_cluster import exists, verdicts
from tests.testbed import Cluster, CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

VECTORS = json.loads((ROOT / "tests/vectors/directives.json").read_text())
LIMITS = "/etc/beeond-ctl/limits"
POOL = "/etc/beeond-ctl/pool"
RULE = "/etc/sudoers.d/beeond-ctl"
LINE = r"#BB_LUA stage_in source=/global/alice/in\ dir destination=x"


@pytest.fixture(scope="module")
def bb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with up("bb", tmp_path_factory.mktemp("bb")) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(bb: Cluster) -> Iterator[None]:
    yield
    bb.run("ctl", ["scancel", "--hurry", "-u", "alice"])
    see_that_nothing_is_left(bb)


def is_held(bb: Cluster, job: int) -> str:
    """What Slurm says of a job that it holds; empty for as long as it does not."""
    told = show(bb, job)
    return told if "Priority=0 " in told else ""


def give_up(bb: Cluster, *jobs: int) -> None:
    bb.run("login", ["scancel", "--hurry", *map(str, jobs)], user="alice")


def test_both_ways_to_ask_leave_the_same_request_plan_and_result(bb: Cluster) -> None:
    go = "/global/alice/go"
    body = f'cp "$BEEOND/x/f" "$BEEOND/made"; srun -n3 hostname >/dev/null; {until_in_shell(go)}\n'
    asked = {
        "directives": (
            "#!/bin/sh\n#BB_LUA beeond capacity=1GiB pool=beeond\n"
            "#BB_LUA stage_in source=/global/alice/in\\ dir destination=x \\\n#BB_LUA flags=update\n"
            "#BB_LUA stage_out source=. destination=/global/alice/out-%x\n" + body,
            [],
        ),
        "options": (
            "#!/bin/sh\n" + body,
            ["--beeond=capacity=1GiB", "--beeond-stage-in=/global/alice/in dir:x:update",
             "--beeond-stage-out=.:/global/alice/out-%x"],
        ),
    }  # fmt: skip
    states, plans, results = {}, {}, {}
    for way, (script, arguments) in asked.items():
        job = bb.submit("alice", script, "-N3", f"--job-name={way}", *arguments)
        bb.wait_job(job, "RUNNING")
        path = f"/run/beeond-ctl/jobs/{job}/state.json"
        state = wait_for("ready", partial(_ready, bb, path), 30)
        states[way] = {name: state[name] for name in ("request", "config", "nodes", "node", "ran", "phase")}
        plans[way] = _plan(state)
        bb.run("login", ["touch", go], user="alice")
        assert bb.wait_job(job)["JobState"] == "COMPLETED", bb.job_output(job)
        bb.wait_idle()
        find = ["find", ".", "-printf", "%P %y %m %u %s %l\\n"]
        results[way] = sorted(bb.run("login", find, cwd=f"/global/alice/out-{way}").stdout.splitlines())
        assert {line.split()[0] for line in results[way] if " f " in line} == {"made", "x/f"}
    assert states["directives"] == states["options"]
    assert plans["directives"] == plans["options"]
    assert results["directives"] == results["options"]


def _plan(state: dict[str, Any]) -> dict[str, Any]:
    """What each node makes of its state, but for the job's own number."""
    job = Job(**{**state["job"], "job_id": 1})
    plan = make_plan(
        configuration.SiteConfig.model_validate(state["config"]),
        decode(state["request"]),
        job,
        tuple(state["nodes"]),
    )
    names = ("backend", "targets", "meta_nodes", "target_capacity", "mount_point", "leader")
    return {name: getattr(plan, name) for name in names}


def _ready(bb: Cluster, path: str) -> dict[str, Any] | None:
    done = bb.run("n1", ["cat", path], check=False)
    state = json.loads(done.stdout) if done.returncode == 0 else {}
    return state if state.get("ran") else None


@pytest.mark.parametrize(
    "name",
    [
        "unknown key",
        "relative source",
        "climbs",
        "unquoted blank",
        "wide shown",
        "unknown directive",
        "long name",
    ],
)
def test_a_bad_directive_is_refused_at_the_prompt_in_the_same_words(bb: Cluster, name: str) -> None:
    vector = next(vector for vector in VECTORS["refused"] if vector["name"] == name)
    with pytest.raises(CommandError) as caught:
        bb.submit("alice", "\n".join(["#!/bin/sh", *vector["lines"], "true", ""]))
    assert vector["words"] in caught.value.stderr


def test_sbatch_takes_directives_from_its_command_line_and_from_a_file(bb: Cluster) -> None:
    script = '#!/bin/sh\nls "$BEEOND/x"\n'
    bb.run("login", ["tee", "/global/alice/bbf"], input=LINE + "\n", user="alice")
    jobs = [
        bb.submit("alice", script, "-N1", option) for option in (f"--bb={LINE}", "--bbf=/global/alice/bbf")
    ]
    for job in jobs:
        assert bb.wait_job(job)["JobState"] == "COMPLETED"
        assert bb.job_output(job).split() == ["f"]


def test_srun_and_salloc_take_directives_too(bb: Cluster) -> None:
    step = ["-n2", "sh", "-c", "cat $BEEOND/x/f"]
    told = bb.run("login", ["srun", "-N2", f"--bb={LINE}", *step], user="alice")
    assert told.stdout.split() == ["hello", "hello"]
    bb.run("login", ["tee", "/global/alice/bbf"], input=LINE + "\n", user="alice")
    told = bb.run("login", ["salloc", "-N2", "--bbf=/global/alice/bbf", "srun", *step], user="alice")
    assert told.stdout.split() == ["hello", "hello"]
    with pytest.raises(CommandError, match=r"unknown directive 'no'"):
        bb.run("login", ["srun", "-N2", "--bb=#BB_LUA no", *step], user="alice")


def test_a_wrong_source_holds_the_job_with_a_reason_before_it_has_nodes(bb: Cluster) -> None:
    private = "mkdir -p bad/d; echo x >bad/d/f; echo y >bad/no; head -c 3000000 /dev/zero | tr '\\0' x >big"
    bb.run("login", ["sh", "-c", private], user="alice")
    bb.run("login", ["sh", "-c", "cd /global/alice/bad; chown root d no; chmod go= d no"])
    words = {
        "source=/global/nowhere/x": "source '/global/nowhere/x' does not exist",
        "source=/global/alice/gone": "source '/global/alice/gone' does not exist",
        "source=/global/%u/bad": "source '/global/alice/bad' has 2 entries that cannot be read (",
        "source=/global/bob/x": "source '/global/bob/x' cannot be read: Permission denied",
        "source=/global/alice/big": "the sources hold 2.9MiB in 1 files, and capacity=1MiB was asked for",
    }
    head = "#!/bin/sh\n#BB_LUA beeond capacity=1MiB pool=beeond\n"
    jobs = {
        bb.submit("alice", f"{head}#BB_LUA stage_in {source} destination=x\ntrue\n"): told
        for source, told in words.items()
    }
    for job, told in jobs.items():
        text = wait_for(told, partial(is_held, bb, job))
        assert f"data_in: #BB_LUA stage_in: {told}" in text
        assert re.search(r"^ +NodeList=(\(null\))?( |$)", text, re.MULTILINE)
        assert "slurm_bb_setup" not in text
    give_up(bb, *jobs)


def test_what_was_seen_while_the_job_was_pending_is_not_walked_again(bb: Cluster) -> None:
    make = 'for d in 1 2 3; do mkdir -p listed/$d; for f in 1 2 3; do echo "$d $f" >listed/$d/$f; done; done'
    bb.run("login", ["sh", "-c", make], user="alice")
    age = "touch listed.now; echo $(($(stat -c %Z listed.now) - $(stat -c %Z listed)))"
    wait_for("a tree left alone", lambda: int(bb.run("login", ["sh", "-c", age], user="alice").stdout) > 3)
    go = "/global/alice/go-listed"
    bb.submit("alice", f"#!/bin/sh\n{until_in_shell(go)}\n", "-N3", "--exclusive", "-t10")
    head = "#!/bin/sh\n#BB_LUA stage_in source=/global/%u/listed destination=x\n"
    job = bb.submit(
        "alice",
        head + 'cd "$BEEOND/x"; for f in $(find . -type f | sort); do echo "$f" $(cat $f); done\n',
        "-N2",
    )
    wait_for("staged in", lambda: state(bb, job) == "staged-in")
    kept = bb.run("login", ["find", "/global/alice/.beeond", "-type", "f", "-printf", "%f %u %m\n"]).stdout
    assert kept == f"{job}.0.list alice 600\n"
    change = "echo changed >listed/1/1; echo new >listed/2/4; rm listed/2/1; touch go-listed"
    bb.run("login", ["sh", "-c", change], user="alice")
    assert bb.wait_job(job)["JobState"] == "COMPLETED"
    there = {f"./{d}/{f}": f"{d} {f}" for d in (1, 2, 3) for f in (1, 2, 3)}
    del there["./2/1"]
    there |= {"./1/1": "changed", "./2/4": "new"}
    assert dict(line.split(" ", 1) for line in bb.job_output(job).splitlines()) == there
    log = bb.run("n1", ["cat", f"/var/log/beeond-ctl/jobs/{job}.jsonl"]).stdout
    (step,) = (each for each in map(json.loads, log.splitlines()) if each.get("step") == "stage-in")
    assert step["listed"] == {"directories": 3, "files": 6}
    assert step["summary"]["copied"] == 9
    assert listing(bb, "/global/alice/.beeond") == []


@pytest.mark.parametrize("lacking", ["look_as_user", "rule for sudo"])
def test_where_nobody_may_look_as_the_user_the_prolog_fails_the_job_and_drains_nothing(
    bb: Cluster, lacking: str
) -> None:
    kept, rule = bb.read("ctl", LIMITS), bb.read("ctl", RULE)
    if lacking == "look_as_user":
        put(bb, LIMITS, kept.replace("as-user yes", "as-user no"), "0644")
    else:
        bb.run("ctl", ["rm", RULE])
    try:
        script = "#!/bin/sh\n#BB_LUA stage_in source=/global/alice/gone destination=x\ntrue\n"
        job = bb.submit("alice", script, "-N2")
        assert bb.wait_job(job)["JobState"] == "FAILED"
    finally:
        put(bb, LIMITS, kept, "0644")
        put(bb, RULE, rule, "0440")
    assert "/global/alice/gone" in bb.job_output(job)
    bb.wait_idle()


def test_what_the_site_does_not_offer_is_refused_at_the_prompt_as_with_the_option(bb: Cluster) -> None:
    for key in ("backend=lustre", "mount=/elsewhere", "stripe-count=3"):
        told = []
        for arguments in ([f"--bb=#BB_LUA beeond {key}"], [f"--beeond={key}"]):
            with pytest.raises(CommandError) as caught:
                bb.submit("alice", "#!/bin/sh\ntrue\n", *arguments)
            found = re.search(rf"(?:#BB_LUA |--)beeond: ({key.split('=')[0]}.*)", caught.value.stderr)
            assert found, caught.value.stderr
            told.append(found[1])
        assert told[0] == told[1]
    with pytest.raises(
        CommandError, match="capacity=13GiB is more than all nodes have together, which is 12G"
    ):
        bb.submit("alice", "#!/bin/sh\n#BB_LUA beeond capacity=13GiB pool=beeond\ntrue\n")


def test_check_sees_that_what_the_hooks_go_by_is_there_and_new(bb: Cluster) -> None:
    found = verdicts(bb, "ctl")
    assert found["limits"] == ("ok", LIMITS)
    assert found["pool"][0] == found["sudo"][0] == "ok"
    assert {subject for subject, (verdict, _) in found.items() if verdict == "fail"} == set()
    files = [LIMITS, POOL, "/etc/slurm/beeond_directives.lua", RULE]
    bb.run("ctl", ["cp", "-a", *files, "/run/slurm"])
    try:
        bb.run("ctl", ["sed", "-i", "s/^look .*/look 3/", LIMITS])
        put(bb, POOL, "much\n", "0644")
        bb.run("ctl", ["rm", *files[2:]])
        found = verdicts(bb, "ctl")
        bb.run("ctl", ["chmod", "600", *files[:2]])
        unreadable = verdicts(bb, "ctl")
        with pytest.raises(CommandError, match=r"cannot open /etc/slurm/beeond_directives\.lua"):
            bb.run("login", ["srun", "--bb=#BB_LUA beeond", "true"], user="alice")
    finally:
        for path in files:
            bb.run("ctl", ["cp", "-a", f"/run/slurm/{path.rpartition('/')[2]}", path])
    assert found["limits"] == (
        "warn",
        f"{LIMITS} is not what the configuration says now; run `beeond-ctl bb limits >{LIMITS}`",
    )
    assert found["pool"][0] == "warn"
    assert "'much' is not a size" in found["pool"][1]
    assert found["burst buffer"][0] == "fail"
    assert found["sudo"][0] == "warn"
    for subject in ("limits", "pool"):
        assert unreadable[subject][0] == "warn"
        assert "slurmctld cannot read" in unreadable[subject][1]


def test_asking_in_both_ways_at_once_fails_the_job_and_drains_nothing(bb: Cluster) -> None:
    job = bb.submit("alice", "#!/bin/sh\n#BB_LUA beeond\ntrue\n", "-N2", "--beeond")
    assert bb.wait_job(job)["JobState"] == "FAILED"
    assert "both --beeond and #BB_LUA" in bb.job_output(job)


def test_a_comment_that_looks_like_ours_gets_nothing_and_harms_nothing(bb: Cluster) -> None:
    output = bb.run_job("alice", '#!/bin/sh\necho "$BEEOND."\n', "-N2", "--comment=my beeond:directives")
    assert output == ".\n"


def test_the_comment_of_the_user_is_kept(bb: Cluster) -> None:
    job = bb.submit("alice", "#!/bin/sh\n#BB_LUA beeond\ntrue\n", "--comment=for the paper")
    assert bb.wait_job(job)["JobState"] == "COMPLETED"
    assert bb.job(job)["Comment"] == "for the paper beeond:directives"


def comments(bb: Cluster) -> dict[str, str]:
    """Comments of alice's jobs by their ids; what is no line of a job belongs to the one before."""
    text = bb.run("ctl", ["squeue", "-h", "-u", "alice", "-o", "%A|%k"]).stdout
    return dict(re.findall(r"^(\d+)\|((?:.*\n)(?:(?!\d+\|).*\n)*)", text, re.MULTILINE))


def test_jobs_that_wait_together_are_marked_together_each_in_its_own_comment(bb: Cluster) -> None:
    blocking = bb.submit(
        "alice", f"#!/bin/sh\n{until_in_shell('/global/alice/go')}\n", "-N3", "--exclusive", "-t10"
    )
    script = "#!/bin/sh\n#BB_LUA beeond\ntrue\n"
    plain = submit_held(bb, "data_in", script, "-t1")
    faking = f"x\nJobId={plain} JobName=x JobState=PENDING Comment=mine"
    others = {
        submit_held(bb, "data_in", script, "-t1", f"--comment={comment}"): comment
        for comment in ("", "mine; of beeond's", faking)
    }
    jobs = [plain, *others]
    wait_for("setup", lambda: to_be_marked(bb) == jobs)
    ended = bb.submit("alice", script, "--hold")
    give_up(bb, ended)
    for job in (ended, 99998):
        bb.run("ctl", ["touch", "-d", "2 days ago", f"{STATE}/beeond-mark.{job}"])
    let_go(bb)
    for job in jobs:
        wait_for("staged in", partial(_is_staged_in, bb, job))
    assert to_be_marked(bb) == []
    found = comments(bb)
    assert found.pop(str(blocking)) == "(null)\n"
    assert found == {
        str(job): f"{comment} beeond:directives\n".lstrip(" ")
        for job, comment in {plain: "", **others}.items()
    }


def _is_staged_in(bb: Cluster, job: int) -> bool:
    return state(bb, job) == "staged-in"


def test_hooks_take_turns(bb: Cluster) -> None:
    bb.submit("alice", f"#!/bin/sh\n{until_in_shell('/global/alice/go')}\n", "-N3", "--exclusive", "-t10")
    bb.run("ctl", ["touch", "/run/turn"])
    holding = (
        f"exec setsid flock {STATE} sh -c 'while [ -e /run/turn ]; do sleep 0.05; done' >/dev/null 2>&1 &"
    )
    bb.run("ctl", ["sh", "-c", holding])
    wait_for("a turn", lambda: bb.processes("ctl", "^sh -c while"))
    # %j: Slurm shows hooks a copy of such a script, which is not part of its state.
    script = "#!/bin/sh\n#BB_LUA stage_out source=. destination=/global/alice/%j\ntrue\n"
    job = bb.submit("alice", script, "-t1")
    wait_for("data_in", lambda: bb.processes("ctl", "^flock -w 60 9"))
    assert to_be_marked(bb) == [job]
    bb.run("ctl", ["rm", "/run/turn"])
    wait_for("staged in", lambda: _is_staged_in(bb, job))


def test_each_task_of_an_array_has_an_instance_of_its_own(bb: Cluster) -> None:
    script = (
        "#!/bin/sh\n#BB_LUA stage_in source=/global/alice/in\\ dir destination=x\n"
        "#BB_LUA stage_out source=. destination=/global/alice/array/%A-%a\n"
        'ls "$BEEOND" >"$BEEOND/had"; echo $SLURM_ARRAY_TASK_ID >"$BEEOND/task"\n'
    )
    array = bb.submit("alice", script, "-N1", "--array=1,2,5%2")
    wait_for("end", lambda: bb.run("ctl", ["squeue", "-h"]).stdout == "", 60)
    assert listing(bb, "/global/alice/array") == [f"{array}-{task}" for task in (1, 2, 5)]
    for task in (1, 2, 5):
        told = bb.run(
            "login", ["cat", "had", "task", "x/f"], cwd=f"/global/alice/array/{array}-{task}"
        ).stdout
        assert told.split() == ["had", "x", str(task), "hello"]


def run_parts(bb: Cluster, one: str, two: str) -> None:
    """A heterogeneous job of 1 + 2 nodes with these directives, each of whose tasks leaves a file in its $BEEOND."""
    script = (
        f"#!/bin/sh\n#SBATCH -N1\n{one}#SBATCH hetjob\n#SBATCH -N2\n{two}"
        "srun --het-group=0,1 sh -c 'date >$BEEOND/$SLURM_PROCID'\n"
    )
    job = bb.submit("alice", script)
    wait_for("end", lambda: bb.run("ctl", ["squeue", "-h"]).stdout == "", 60)
    assert "JobState=COMPLETED" in show(bb, job), show(bb, job)


def test_each_part_of_a_heterogeneous_job_has_an_instance_of_its_own(bb: Cluster) -> None:
    run_parts(
        bb,
        "#BB_LUA stage_out source=. destination=/global/alice/het/one\n",
        "#BB_LUA stage_out source=. destination=/global/alice/het/two\n",
    )
    assert [listing(bb, f"/global/alice/het/{part}") for part in ("one", "two")] == [["0"], ["1", "2"]]


def test_a_part_of_a_heterogeneous_job_joins_the_instance_of_another(bb: Cluster) -> None:
    run_parts(
        bb,
        "#BB_LUA beeond share=1\n#BB_LUA stage_out source=. destination=/global/alice/joined\n",
        "#BB_LUA beeond join=0\n",
    )
    assert listing(bb, "/global/alice/joined") == ["0", "1", "2"]


def test_jobs_that_begin_later_or_after_others_get_theirs_then(bb: Cluster) -> None:
    script = "#!/bin/sh\n#BB_LUA stage_in source=/global/alice/made destination=x\ncat $BEEOND/x/f\n"
    makes = "#!/bin/sh\n#BB_LUA stage_out source=. destination=/global/alice/made\necho made >$BEEOND/f\n"
    first = bb.submit("alice", makes, "-N1", "--begin=now+2")
    after = bb.submit("alice", script, "-N1", f"--dependency=afterok:{first}")
    never = bb.submit("alice", script, "-N1", f"--dependency=afternotok:{first}", "--kill-on-invalid-dep=yes")
    later = bb.submit("alice", script, "-N1", "--begin=now+1hour")
    assert bb.wait_job(after)["JobState"] == "COMPLETED", show(bb, after)
    assert bb.job_output(after) == "made\n"
    assert bb.wait_job(never)["JobState"] == "CANCELLED"
    assert state(bb, later) == "pending"
    bb.run("login", ["scancel", str(later)], user="alice")


def test_capacity_is_scheduled_and_given_back(bb: Cluster) -> None:
    wants = "#!/bin/sh\n#BB_LUA beeond capacity={} pool=beeond\n"
    go = wants + until_in_shell("/global/alice/go-pool") + "\n"
    large = bb.submit("alice", go.format("6GiB"), "-N3")
    bb.wait_job(large, "RUNNING")
    waits = bb.submit("alice", wants.format("7GiB") + "true\n", "-N3", "-t1")
    fits = bb.submit("alice", wants.format("3GiB") + "true\n", "-N1", "-t1")
    assert bb.wait_job(fits)["JobState"] == "COMPLETED"
    wait_for("the reason", lambda: "BurstBuffer" in bb.job(waits)["Reason"])
    assert bb.job(waits)["JobState"] == "PENDING"
    bb.run("login", ["scancel", str(large)], user="alice")
    assert bb.wait_job(waits)["JobState"] == "COMPLETED"
    see_that_nothing_is_left(bb)
    assert re.search(r"PoolName.*TotalSpace=12GiB FreeSpace=12GiB UsedSpace=0", _burst(bb))


def _burst(bb: Cluster) -> str:
    return bb.run("ctl", ["scontrol", "show", "burst"]).stdout


def test_two_hundred_jobs_at_once_pass_the_hooks(bb: Cluster) -> None:
    script = (
        "#!/bin/sh\n#BB_LUA beeond capacity=1MiB pool=beeond\n"
        '#BB_LUA stage_out source=. destination=/global/alice/many/%x\necho $SLURM_JOB_NAME >"$BEEOND/f"\n'
    )
    blocking = bb.submit(
        "alice", f"#!/bin/sh\n{until_in_shell('/global/alice/go')}\n", "-N3", "--exclusive", "-t10"
    )
    bb.run("login", ["tee", "many.sh"], input=script, user="alice")
    loop = "for i in $(seq 200); do sbatch --parsable -N1 -t1 --job-name=$i many.sh; done"
    jobs = [int(job) for job in bb.run("login", ["sh", "-c", loop], user="alice").stdout.split()]
    states = ["squeue", "-h", "-u", "alice", "-O", "BurstBufferState:.20"]
    wait_for("staged in", lambda: bb.run("ctl", states).stdout.split().count("staged-in") == 200, 60)
    assert len(buffers(bb)) == 200
    bb.run("login", ["sh", "-c", "xargs scancel; touch go"], input=" ".join(map(str, jobs[6:])), user="alice")
    for job in (blocking, *jobs[:6]):
        assert bb.wait_job(job)["JobState"] == "COMPLETED"
    see_that_nothing_is_left(bb)
    assert listing(bb, "/global/alice/many") == [str(number) for number in range(1, 7)]


def test_a_job_whose_mark_was_lost_fails_rather_than_run_without_its_instance(bb: Cluster) -> None:
    go = "/global/alice/go-first"
    bb.submit("alice", f"#!/bin/sh\n{until_in_shell(go)}\n", "-N3", "--exclusive", "-t10")
    job = bb.submit("alice", "#!/bin/sh\n#BB_LUA beeond\ntouch /global/alice/ran\n", "-N2", "-t1")
    wait_for("staged in", lambda: "BurstBufferState=staged-in" in show(bb, job))
    bb.run("login", ["scontrol", "update", f"JobId={job}", "Comment=mine"], user="alice")
    bb.run("login", ["touch", go], user="alice")
    assert bb.wait_job(job)["JobState"] == "FAILED"
    assert "there is none on this node" in bb.job_output(job)
    assert not exists(bb, "/global/alice/ran")


def test_data_that_was_kept_is_told_to_slurm_and_recovered(bb: Cluster) -> None:
    bb.run("login", ["sh", "-c", "mkdir -p ro; rm -f begun"], user="alice")
    head = "#!/bin/sh\n#BB_LUA stage_out source=. destination=/global/alice/ro/x\n"
    script = f"{head}date > $BEEOND/f\ntouch /global/alice/begun\n{until_in_shell('/global/alice/go')}\n"
    job = bb.submit("alice", script, "-N2")
    wait_for("begin", lambda: exists(bb, "/global/alice/begun"))
    bb.readonly("/global/alice/ro")
    try:
        bb.run("login", ["touch", "/global/alice/go"], user="alice")
        told = wait_for("told", lambda: "not proved on n[1-2];" in (text := show(bb, job)) and text, 40)
    finally:
        bb.writable("/global/alice/ro")
    assert f"beeond-ctl recover {job}" in told
    bb.run("ctl", ["beeond-ctl", "recover", str(job), "--nodes", "n[1-2]"])
    assert bb.run("login", ["ls", "/global/alice/ro/x"]).stdout == "f\n"
    bb.run("ctl", ["scancel", "--hurry", str(job)])
    wait_for("complete", lambda: "BurstBufferState=complete" in show(bb, job))
