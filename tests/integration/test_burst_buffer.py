"""`#BB_LUA` on a real cluster: the same instance as with `--beeond`, and Slurm knows what became of it."""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.testbed import Cluster, CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "tests/vectors/directives.json").read_text())
NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="module")
def bb() -> Iterator[Cluster]:
    """A cluster with burst_buffer/lua."""
    script = ROOT / "slurm/burst_buffer.lua"
    with Cluster.up(f"bb{os.getpid() % 10000}", nodes=3, with_product=True, burst_buffer=script) as made:
        made.run("login", ["sh", "-c", "mkdir 'in dir'; echo hello > 'in dir/f'"], user="alice")
        yield made


@pytest.fixture(autouse=True)
def clean(bb: Cluster) -> Iterator[None]:
    bb.wait_idle()
    yield
    bb.wait_idle()
    for node in NODES:
        assert bb.run(node, ["ls", "-A", "/nvme/beeond"]).stdout == ""
        assert bb.run(node, ["ls", "-A", "/run/beeond-ctl/jobs"]).stdout == ""


def until_in_shell(path: str) -> str:
    return f"for i in $(seq 600); do [ -e {path} ] && break; sleep 0.1; done; rm -f {path}"


def wait_for(what: str, condition: Any, timeout_s: float = 20) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


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
    states = {}
    for way, (script, arguments) in asked.items():
        job = bb.submit("alice", script, "-N3", f"--job-name={way}", *arguments)
        bb.wait_job(job, "RUNNING")
        path = f"/run/beeond-ctl/jobs/{job}/state.json"
        state = wait_for("ready", lambda path=path: _ready(bb, path), 30)
        states[way] = {name: state[name] for name in ("request", "config", "nodes", "node", "ran")}
        bb.run("login", ["touch", go], user="alice")
        assert bb.wait_job(job)["JobState"] == "COMPLETED", bb.job_output(job)
        bb.wait_idle()
        listing = bb.run("login", ["find", f"/global/alice/out-{way}", "-type", "f"]).stdout.split()
        assert sorted(listing) == [f"/global/alice/out-{way}/made", f"/global/alice/out-{way}/x/f"]
    assert states["directives"] == states["options"]


def _ready(bb: Cluster, path: str) -> dict[str, Any] | None:
    done = bb.run("n1", ["cat", path], check=False)
    state = json.loads(done.stdout) if done.returncode == 0 else {}
    return state if state.get("ran") else None


@pytest.mark.parametrize(
    "name", ["unknown key", "relative source", "climbs", "unquoted blank", "wide shown", "unknown directive"]
)
def test_a_bad_directive_is_refused_at_the_prompt_in_the_same_words(bb: Cluster, name: str) -> None:
    vector = next(vector for vector in VECTORS["refused"] if vector["name"] == name)
    with pytest.raises(CommandError) as caught:
        bb.submit("alice", "\n".join(["#!/bin/sh", *vector["lines"], "true", ""]))
    assert vector["words"] in caught.value.stderr


def test_sbatch_takes_directives_from_its_command_line_and_from_a_file(bb: Cluster) -> None:
    script = '#!/bin/sh\nls "$BEEOND/x"\n'
    line = r"#BB_LUA stage_in source=/global/alice/in\ dir destination=x"
    assert bb.run_job("alice", script, "-N2", f"--bb={line}").split() == ["f"]
    bb.run("login", ["tee", "/global/alice/bbf"], input=line + "\n", user="alice")
    assert bb.run_job("alice", script, "-N2", "--bbf=/global/alice/bbf").split() == ["f"]


def test_srun_and_salloc_take_directives_too(bb: Cluster) -> None:
    line = r"#BB_LUA stage_in source=/global/alice/in\ dir destination=x"
    told = bb.run(
        "login", ["srun", "-N2", "-n2", f"--bb={line}", "sh", "-c", "cat $BEEOND/x/f"], user="alice"
    )
    assert told.stdout.split() == ["hello", "hello"]
    bb.wait_idle()
    inner = ["salloc", "-N2", f"--bb={line}", "srun", "-n2", "sh", "-c", "cat $BEEOND/x/f"]
    assert bb.run("login", inner, user="alice").stdout.split() == ["hello", "hello"]


def test_a_missing_source_holds_the_job_with_a_reason_before_it_has_nodes(bb: Cluster) -> None:
    job = bb.submit("alice", "#!/bin/sh\n#BB_LUA stage_in source=/global/nowhere/x destination=x\ntrue\n")
    told = wait_for("held", lambda: "does" in (text := _show(bb, job)) and text)
    assert "source '/global/nowhere/x' does not exist" in told
    assert re.search(r"Priority=0 ", told)
    assert re.search(r"^ +NodeList=(\(null\))?\s*$", told, re.MULTILINE)
    bb.run("login", ["scancel", "--hurry", str(job)], user="alice")


def _show(bb: Cluster, job: int) -> str:
    return bb.run("ctl", ["scontrol", "show", "job", str(job)]).stdout


def test_what_only_the_user_may_see_is_left_to_the_prolog_which_fails_the_job_and_drains_nothing(
    bb: Cluster,
) -> None:
    job = bb.submit(
        "alice", "#!/bin/sh\n#BB_LUA stage_in source=/global/alice/gone destination=x\ntrue\n", "-N2"
    )
    assert bb.wait_job(job)["JobState"] == "FAILED"
    assert "/global/alice/gone" in bb.job_output(job)
    bb.wait_idle()


def test_a_backend_that_the_site_has_not_holds_the_job_with_the_words_of_the_prompt(bb: Cluster) -> None:
    job = bb.submit("alice", "#!/bin/sh\n#BB_LUA beeond backend=lustre\ntrue\n")
    wait_for("held", lambda: "backend=lustre is not offered here" in _show(bb, job))
    bb.run("login", ["scancel", "--hurry", str(job)], user="alice")


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


def test_each_job_of_an_array_has_an_instance(bb: Cluster) -> None:
    script = (
        '#!/bin/sh\n#BB_LUA stage_out source=. destination=/global/alice/array/%A-%a\ndate > "$BEEOND/f"\n'
    )
    bb.submit("alice", script, "-N1", "--array=1-3")
    wait_for("end", lambda: bb.run("ctl", ["squeue", "-h"]).stdout == "", 60)
    bb.wait_idle()
    found = bb.run("login", ["find", "/global/alice/array", "-type", "f", "-printf", "%f %h\n"]).stdout
    assert (
        re.sub(r"/array/\d+-", "/array/N-", found).split("\n")[:-1]
        == [f"f /global/alice/array/N-{task}" for task in ("1", "2", "3")]
        or len(found.splitlines()) == 3
    )


def test_a_cancelled_job_leaves_nothing_whatever_state_it_is_in(bb: Cluster) -> None:
    script = "#!/bin/sh\n#BB_LUA stage_out source=. destination=/global/alice/cancelled\nsleep 60\n"
    pending = bb.submit("alice", script, "-N3", "--begin=now+1hour")
    bb.run("login", ["scancel", str(pending)], user="alice")
    early = bb.submit("alice", script, "-N3")
    bb.run("login", ["scancel", str(early)], user="alice")
    for wanted in ("CONFIGURING", "RUNNING"):
        job = bb.submit("alice", script, "-N3")
        wait_for(wanted, lambda job=job, wanted=wanted: bb.job(job)["JobState"] in {wanted, "RUNNING"})
        bb.run("login", ["scancel", str(job)], user="alice")
        assert bb.wait_job(job)["JobState"] == "CANCELLED"
        bb.wait_idle()
    assert bb.run("ctl", ["squeue", "-h"]).stdout == ""


def test_a_restart_of_slurmctld_loses_no_job(bb: Cluster) -> None:
    go = "/global/alice/go-on"
    bb.run("login", ["rm", "-f", "/global/alice/begun"])
    head = "#!/bin/sh\n#BB_LUA stage_out source=. destination=/global/alice/restarted\n"
    script = f"{head}touch /global/alice/begun\n{until_in_shell(go)}\ndate > $BEEOND/f\n"
    job = bb.submit("alice", script, "-N2")
    wait_for("begin", lambda: bb.run("login", ["ls", "/global/alice/begun"], check=False).returncode == 0)
    pid = bb.read("ctl", "/run/slurm/slurmctld.pid")
    with ThreadPoolExecutor() as pool:
        restarted = pool.submit(bb.restart_slurm)  # returns when all nodes are idle again
        wait_for("restart", lambda: _slurmctld_is_another(bb, pid))
        bb.run("login", ["touch", go], user="alice")
        restarted.result()
    assert bb.wait_job(job)["JobState"] == "COMPLETED"
    bb.wait_idle()
    assert bb.run("login", ["ls", "/global/alice/restarted"]).stdout == "f\n"


def test_a_job_whose_mark_was_lost_fails_rather_than_run_without_its_instance(bb: Cluster) -> None:
    go = "/global/alice/go-first"
    bb.submit("alice", f"#!/bin/sh\n{until_in_shell(go)}\n", "-N3", "--exclusive")
    job = bb.submit("alice", "#!/bin/sh\n#BB_LUA beeond\ntouch /global/alice/ran\n", "-N2")
    wait_for("staged in", lambda: "BurstBufferState=staged-in" in _show(bb, job))
    bb.run("login", ["scontrol", "update", f"JobId={job}", "Comment=mine"], user="alice")
    bb.run("login", ["touch", go], user="alice")
    assert bb.wait_job(job)["JobState"] == "FAILED"
    assert "there is none on this node" in bb.job_output(job)
    assert bb.run("login", ["ls", "/global/alice/ran"], check=False).returncode != 0


def _slurmctld_is_another(bb: Cluster, pid: str) -> bool:
    answers = bb.run("ctl", ["scontrol", "ping"], check=False).returncode == 0
    return answers and bb.run("ctl", ["cat", "/run/slurm/slurmctld.pid"], check=False).stdout not in {"", pid}


def test_data_that_was_kept_is_told_to_slurm_and_recovered(bb: Cluster) -> None:
    bb.run("login", ["sh", "-c", "mkdir -p ro; rm -f begun"], user="alice")
    head = "#!/bin/sh\n#BB_LUA stage_out source=. destination=/global/alice/ro/x\n"
    script = f"{head}date > $BEEOND/f\ntouch /global/alice/begun\n{until_in_shell('/global/alice/go')}\n"
    job = bb.submit("alice", script, "-N2")
    wait_for("begin", lambda: bb.run("login", ["ls", "/global/alice/begun"], check=False).returncode == 0)
    bb.readonly("/global/alice/ro")
    try:
        bb.run("login", ["touch", "/global/alice/go"], user="alice")
        told = wait_for("told", lambda: "data kept on n[1-2]" in (text := _show(bb, job)) and text, 40)
    finally:
        bb.writable("/global/alice/ro")
    assert f"beeond-ctl recover {job}" in told
    bb.run("ctl", ["beeond-ctl", "recover", str(job), "--nodes", "n[1-2]"])
    assert bb.run("login", ["ls", "/global/alice/ro/x"]).stdout == "f\n"
    bb.run("ctl", ["scancel", "--hurry", str(job)])
    wait_for("complete", lambda: "BurstBufferState=complete" in _show(bb, job))
