"""The SPANK plugin in a real Slurm: who is told what, what arrives where, and that nothing drains a node.

The product's Prolog and Epilog are set aside: in their place a Prolog that records its environment and leaves
the files that the plugin reads in a step, and an Epilog that removes them.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.request import Transfer, decode
from tests.testbed import Cluster, CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

TIB = 1 << 40
PLUGSTACK = "/etc/slurm/plugstack.conf.d/beeond.conf"
SEEN = "/run/spank-test/seen"
FAILURE = "/run/spank-test/failure"
NO_INSTANCE = "/run/spank-test/no-instance"

PROLOG = f"""#!/bin/sh
PATH=/usr/bin:/bin
mkdir -p {SEEN}
cat /proc/$$/environ >{SEEN}/$SLURM_JOB_ID
[ -n "${{SPANK_BEEOND_REQUEST-}}" ] || exit 0
[ ! -e {NO_INSTANCE} ] || exit 0
state=/run/beeond-ctl/jobs/$SLURM_JOB_ID
mkdir -p "$state"
chmod 700 "$state"
printf 'BEEOND=/mnt/beeond/%s\\nBEEOND_JOB_ID=%s\\nBEEOND_NODES=%s\\n' \\
    "$SLURM_JOB_ID" "$SLURM_JOB_ID" "$SLURM_NODELIST" >"$state/env"
[ ! -e {FAILURE} ] || cp {FAILURE} "$state/failure"
"""
EPILOG = """#!/bin/sh
/bin/rm -rf "/run/beeond-ctl/jobs/${SLURM_JOB_ID:-none}"
"""
SHOW = "/run/spank-test/show"  # prints BEEOND|BEEOND_JOB_ID|BEEOND_NODES|
SHOW_TEXT = """#!/bin/sh
printf '%s|%s|%s|\\n' "$BEEOND" "$BEEOND_JOB_ID" "$BEEOND_NODES"
"""


@pytest.fixture(scope="module", autouse=True)
def recorders(cluster: Cluster) -> Iterator[None]:
    """The recording Prolog and Epilog in place of the product's, on every node."""
    machines = ["login", *cluster.nodes()]
    for machine in machines:
        directory = cluster.path(machine, SHOW).parent
        directory.mkdir(exist_ok=True)
        (directory / "show").write_text(SHOW_TEXT)
        (directory / "show").chmod(0o755)
    ours = [node for node in cluster.nodes() if not cluster.path(node, "/run/beeond-ctl").exists()]
    hooks = {"prolog": PROLOG, "epilog": EPILOG}
    kept: dict[Path, bytes | None] = {}
    for node in cluster.nodes():
        for kind, text in hooks.items():
            path = cluster.path(node, f"/etc/slurm/{kind}.d/50-beeond")
            kept[path] = path.read_bytes() if path.exists() else None
            path.write_text(text)
            path.chmod(0o755)
    yield
    for path, data in kept.items():
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
    for machine in machines:
        cluster.run(machine, ["rm", "-rf", "/run/spank-test"])
    for node in ours:
        cluster.run(node, ["rm", "-rf", "/run/beeond-ctl"])


@pytest.fixture(autouse=True)
def nodes_stay_in_service(cluster: Cluster) -> Iterator[None]:
    """Whatever a user does with the plugin, no node is drained and no job is left."""
    yield
    cluster.run("ctl", ["scancel", "--user=alice"])
    cluster.wait_idle()
    for node in cluster.nodes():
        assert cluster.node_state(node).flags == {"IDLE"}


@contextmanager
def on_every_node(cluster: Cluster, path: str, text: str) -> Iterator[None]:
    for node in cluster.nodes():
        cluster.run(node, ["sh", "-c", 'mkdir -p "${1%/*}"; cat >"$1"', "sh", path], input=text)
    try:
        yield
    finally:
        for node in cluster.nodes():
            cluster.run(node, ["rm", "-f", path])


@contextmanager
def plugstack(cluster: Cluster, machine: str, line: str) -> Iterator[None]:
    path = cluster.path(machine, PLUGSTACK)
    before = path.read_text()
    path.write_text(line + "\n")
    try:
        yield
    finally:
        path.write_text(before)


def sbatch(cluster: Cluster, *arguments: str | bytes, script: str = "#!/bin/sh\n") -> int:
    """A job that is submitted and done; its id."""
    return done(cluster, cluster.submit("alice", script, *(os.fsdecode(word) for word in arguments)))


def done(cluster: Cluster, jobid: int) -> int:
    job = cluster.wait_job(jobid)
    assert job["JobState"] == "COMPLETED", cluster.job_output(jobid)
    return jobid


def refusal(cluster: Cluster, *argv: str, env: dict[str, str] | None = None) -> str:
    """The lines of the plugin in what a refused command prints; nothing was submitted."""
    before = next_jobid(cluster)
    with pytest.raises(CommandError) as refused:
        cluster.run("login", argv, user="alice", env=env)
    assert next_jobid(cluster) == before
    lines = [line for line in refused.value.stderr.splitlines() if "beeond: " in line]
    assert len(lines) == 1, refused.value.stderr
    return lines[0].split(f"{argv[0]}: error: beeond: ", 1)[1]


def next_jobid(cluster: Cluster) -> str:
    found = re.search(r"NEXT_JOB_ID\s*=\s*(\d+)", cluster.run("ctl", ["scontrol", "show", "config"]).stdout)
    assert found
    return found[1]


def seen(cluster: Cluster, jobid: int, *nodes: str) -> dict[bytes, bytes]:
    """The Prolog's environment on a node of a job, or on the first of `nodes` that ran one for it."""
    paths = [cluster.path(node, f"{SEEN}/{jobid}") for node in nodes or cluster.nodes()]
    data = next(path for path in paths if path.exists()).read_bytes()
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def request_text(cluster: Cluster, jobid: int) -> str:
    return seen(cluster, jobid)[b"SPANK_BEEOND_REQUEST"].decode("ascii")


# -- refused at submission ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["sbatch", "salloc", "srun"])
def test_an_unknown_key_is_refused_naming_it_and_the_known_ones(cluster: Cluster, command: str) -> None:
    tail = ["--wrap=true"] if command == "sbatch" else ["true"]
    assert refusal(cluster, command, "--beeond=speed=11", *tail).startswith(
        "--beeond: unknown key 'speed'; the keys are backend, meta,"
    )


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--beeond=meta=0", "meta='0'"),
        ("--beeond=meta", "meta has no value"),
        ("--beeond-stage-in=/a", "SRC:DST"),
        ("--beeond-stage-in=", "SRC:DST"),
        ("--beeond-stage-in=relative:in", "'relative' is not an absolute path"),
        ("--beeond-stage-in=/a:../b", "'../b' climbs out of $BEEOND"),
        ("--beeond-stage-out=a/../../b:/c", "climbs out of $BEEOND"),
        ("--beeond-stage-out=out:/c:fast", "unknown flag 'fast'"),
        ("--beeond-stage-in=/a:%s%n", "'%s' in '%s%n' means nothing"),
        ("--beeond-stage-in=/a\nb\033[2J", r"'/a\nb\x1b[2J'"),
    ],
)
def test_what_is_malformed_is_refused_naming_it(cluster: Cluster, option: str, named: str) -> None:
    message = refusal(cluster, "sbatch", option, "--wrap=true")
    assert message.startswith(option.partition("=")[0] + ": ")
    assert named in message


def test_a_request_that_is_too_long_is_refused(cluster: Cluster) -> None:
    assert "64KiB are possible" in refusal(cluster, "sbatch", *long_options(20), "--wrap=true")


def test_a_long_request_arrives(cluster: Cluster) -> None:
    jobid = sbatch(cluster, *long_options(14))
    assert len(decode(request_text(cluster, jobid)).stage_in) == 14


def long_options(count: int) -> list[str]:
    """Each with 4 KB."""
    return [f"--beeond-stage-in=/{'/'.join(['x' * 199] * 20)}:in{number}" for number in range(count)]


def test_a_mistake_in_the_script_is_refused_as_on_the_command_line(cluster: Cluster) -> None:
    with pytest.raises(CommandError, match="error: beeond: --beeond: unknown key 'speed'"):
        cluster.submit("alice", "#!/bin/sh\n#SBATCH --beeond=speed=11\n")


def test_without_a_controller_the_message_names_its_path_and_who_can_help(cluster: Cluster) -> None:
    with plugstack(cluster, "login", "required beeond.so controller=/opt/none/beeond-ctl"):
        message = refusal(cluster, "sbatch", "--beeond", "--wrap=true")
        assert "/opt/none/beeond-ctl cannot be run: No such file or directory" in message
        assert "administrator" in message
        sbatch(cluster)  # who does not ask does not need it


def test_an_unknown_argument_in_plugstack_conf_is_told_to_those_who_ask(cluster: Cluster) -> None:
    for argument in ("controler=/usr/bin/beeond-ctl", "run_dir=run", "controller="):
        with plugstack(cluster, "login", f"required beeond.so {argument}"):
            message = refusal(cluster, "sbatch", "--beeond", "--wrap=true")
            assert f"'{argument}' is not understood" in message
            assert "administrator" in message
            sbatch(cluster)


def test_an_unknown_argument_in_plugstack_conf_of_a_node_hurts_nobody(cluster: Cluster) -> None:
    with plugstack(cluster, "n1", "required beeond.so nonsense"):
        jobid = cluster.submit("alice", f"#!/bin/sh\n{SHOW}\n", "--beeond", "-wn1")
        done(cluster, jobid)
        assert f"/mnt/beeond/{jobid}|" in cluster.job_output(jobid)


# -- what arrives in the Prolog ----------------------------------------------------------------------------


def test_a_job_that_does_not_ask_sees_nothing(cluster: Cluster) -> None:
    jobid = sbatch(cluster, script="#!/bin/sh\nenv\nsrun env\n")
    assert not [name for name in seen(cluster, jobid) if b"beeond" in name.lower()]
    assert "beeond" not in cluster.job_output(jobid).lower()


def test_a_bare_beeond_is_a_request(cluster: Cluster) -> None:
    for option in ("--beeond", "--beeond="):
        assert decode(request_text(cluster, sbatch(cluster, option))) == decode('{"v":1}')


def test_options_of_the_script_and_of_the_command_line_all_count(cluster: Cluster) -> None:
    script = """#!/bin/sh
#SBATCH --beeond=capacity=1TiB,backend=glusterfs
#SBATCH --beeond-stage-in=/global/a:a
#SBATCH --beeond-stage-out=out:/global/%j:delete+update
#SBATCH --beeond-stage-in=/global/b:b
"""
    twice = ["--beeond-stage-in=/global/c:c"] * 2
    jobid = sbatch(cluster, "--beeond=capacity=2TiB", *twice, script=script)
    request = decode(request_text(cluster, jobid))
    assert (request.capacity, request.backend) == (2 * TIB, "glusterfs")
    assert request.stage_in == tuple(Transfer(f"/global/{x}", x) for x in "abc")
    assert request.stage_out == (Transfer("out", "/global/%j", ("delete", "update")),)


def test_staging_alone_is_a_request(cluster: Cluster) -> None:
    jobid = sbatch(cluster, "--beeond-stage-out=.:/global/alice/out")
    assert decode(request_text(cluster, jobid)).stage_out == (Transfer(".", "/global/alice/out"),)


@pytest.mark.parametrize(
    "path",
    [
        b"/a\nb\nSPANK_X=1\n",
        b"/quote'\"`$(id)`;&|",
        b"/%%s%%n",
        b"/not utf-8 \xff\xfe\x80",
        b"/back\\slash tab\t",
        b"/" + b"/".join([b"x" * 255] * 15),
    ],
    ids=["newlines", "quotes", "percent", "bytes", "backslash", "long"],
)
def test_any_bytes_arrive_as_ascii_that_means_the_same(cluster: Cluster, path: bytes) -> None:
    jobid = sbatch(cluster, b"--beeond-stage-in=" + path + b":in")
    text = request_text(cluster, jobid)
    assert text.isprintable()
    assert os.fsencode(json.loads(text)["stage_in"][0][0]) == path
    assert decode(text).stage_in == (Transfer(os.fsdecode(path), "in"),)
    assert b"SPANK_X" not in seen(cluster, jobid)


def test_salloc_asks_as_sbatch_does_and_its_steps_have_the_instance(cluster: Cluster) -> None:
    options = ["-N2", "--beeond", "--beeond-stage-in=/a:b"]
    for command in ("salloc", "sbatch"):
        script = f"echo job=$SLURM_JOB_ID; srun -N2 {SHOW}; srun -N1 -n1 --beeond {SHOW}"
        if command == "salloc":
            output = cluster.run("login", ["salloc", *options, "sh", "-c", script], user="alice").stdout
        else:
            output = cluster.job_output(sbatch(cluster, *options, script=f"#!/bin/sh\n{script}\n"))
        found = re.search(r"job=(\d+)", output)
        assert found
        assert output.count(f"/mnt/beeond/{found[1]}|{found[1]}|n[1-2]|") == 3
        assert decode(request_text(cluster, int(found[1]))).stage_in == (Transfer("/a", "b"),)


def test_srun_outside_of_a_job_asks_for_a_job_with_an_instance(cluster: Cluster) -> None:
    options = ["-N2", "--beeond=capacity=2TiB", "--beeond-stage-in=/a:b"]
    script = f"echo job=$SLURM_JOB_ID; {SHOW}"
    output = cluster.run("login", ["srun", *options, "sh", "-c", script], user="alice").stdout
    found = re.search(r"job=(\d+)", output)
    assert found
    assert output.count(f"/mnt/beeond/{found[1]}|{found[1]}|n[1-2]|") == 2
    request = decode(request_text(cluster, int(found[1])))
    assert (request.capacity, request.stage_in) == (2 * TIB, (Transfer("/a", "b"),))


@pytest.mark.parametrize("command", ["salloc", "sbatch"])
def test_a_step_of_a_job_without_an_instance_cannot_ask_for_one(cluster: Cluster, command: str) -> None:
    script = "srun --beeond echo ran 2>&1; echo status=$?"
    if command == "salloc":
        output = cluster.run("login", ["salloc", "sh", "-c", script], user="alice").stdout
    else:
        output = cluster.job_output(sbatch(cluster, script=f"#!/bin/sh\n{script}\n"))
    assert "this job has no instance, and a step cannot get one" in output
    assert "ran" not in output.split()
    assert "status=0" not in output


@pytest.mark.parametrize("command", ["salloc", "sbatch"])
def test_a_step_cannot_change_the_instance_that_its_job_has(cluster: Cluster, command: str) -> None:
    options = ["--beeond=capacity=1TiB", "--beeond-stage-in=/a:b", "--beeond-stage-in=/c:d"]
    refused = ["--beeond=foo=1", "--beeond=capacity=2TiB", "--beeond-stage-out=a:/b"]
    script = "\n".join(f"srun --overlap {option} echo ran; echo status=$?" for option in refused)
    if command == "sbatch":
        output = cluster.job_output(sbatch(cluster, *options, script=f"#!/bin/sh\n{script}\n"))
    else:
        done = cluster.run("login", [command, *options, "sh", "-c", f"{{ {script}; }} 2>&1"], user="alice")
        output = done.stdout
    said = re.findall(r"beeond: (--[a-z-]+): this job has its instance already, and a step cannot", output)
    assert said == [option.partition("=")[0] for option in refused]
    assert "ran" not in output.split()
    assert "status=0" not in output


@pytest.mark.parametrize("command", ["salloc", "sbatch", "srun"])
def test_a_step_takes_what_its_job_was_given_for_granted(cluster: Cluster, command: str) -> None:
    options = ["--beeond=capacity=1TiB", "--beeond-stage-in=/a:b", "--beeond-stage-in=/c:d"]
    lines = [f"srun --overlap {SHOW}", f"srun --overlap --beeond {SHOW}"]
    lines += [f"srun --overlap srun --overlap {SHOW}", f"srun --overlap srun --overlap --beeond {SHOW}"]
    lines += [f"srun --overlap {' '.join(options)} {SHOW} 2>&1"]
    script = "set -e\n" + "\n".join(lines)
    if command == "sbatch":
        output = cluster.job_output(sbatch(cluster, *options, script=f"#!/bin/sh\n{script}\n"))
    else:
        output = cluster.run("login", [command, *options, "sh", "-c", script], user="alice").stdout
    assert len(re.findall(r"^/mnt/beeond/(\d+)\|\1\|", output, re.MULTILINE)) == len(lines)
    # Which Slurm does not tell there.
    said = re.findall(r"beeond: (--[a-z-]+): .*, and the options of a step change nothing in it", output)
    assert len(said) == 1


def test_steps_over_components_of_a_heterogeneous_job_are_ordinary(cluster: Cluster) -> None:
    steps = ["srun --beeond true", "srun --quiet --beeond=share=1 true && echo ran on the first"]
    script = "\n".join(["#!/bin/sh", "srun --het-group=0,1 sh -c 'echo ran on $SLURMD_NODENAME'", *steps, ""])
    options = ["-N1", "-ohet.out", "--beeond=share=1", ":", "-N1", "--beeond=join=0"]
    submit_and_wait(cluster, script, *options)
    output = cluster.run("login", ["cat", "het.out"], user="alice").stdout
    assert output.count("ran on") == 3
    assert "beeond: " not in output


# -- jobs submitted from within jobs -----------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["sbatch", "salloc", "srun"])
def test_a_job_submitted_from_within_a_job_inherits_nothing(cluster: Cluster, outer: str) -> None:
    inner = ["#!/bin/sh", SHOW, "env | grep -i beeond", f"srun {SHOW}", "srun env | grep -i beeond", "true"]
    script = "\n".join(["cat >inner.sh <<'END'", *inner, "END", "echo inner=$(sbatch --parsable inner.sh)"])
    options = ["--beeond=capacity=1TiB", "--beeond-stage-in=/a:b", "--beeond-stage-out=c:/d"]
    if outer == "sbatch":
        output = cluster.job_output(sbatch(cluster, *options, script=f"#!/bin/sh\n{script}\n"))
    else:
        output = cluster.run("login", [outer, *options, "sh", "-c", script], user="alice").stdout
    found = re.search(r"inner=(\d+)", output)
    assert found
    jobid = done(cluster, int(found[1]))
    assert not [name for name in seen(cluster, jobid) if b"beeond" in name.lower()]
    assert set(cluster.job_output(jobid).split()) == {"|||"}


def test_a_job_submitted_from_within_a_job_gets_what_it_asks_for_itself(cluster: Cluster) -> None:
    script = "#!/bin/sh\necho inner=$(sbatch --parsable --beeond-stage-in=/inner:b --wrap 'echo $BEEOND')\n"
    options = ["--beeond=capacity=1TiB", "--beeond-stage-in=/outer:b"]
    output = cluster.job_output(sbatch(cluster, *options, script=script))
    found = re.search(r"inner=(\d+)", output)
    assert found
    jobid = done(cluster, int(found[1]))
    request = decode(request_text(cluster, jobid))
    assert (request.capacity, request.stage_in) == (None, (Transfer("/inner", "b"),))
    assert cluster.job_output(jobid).strip() == f"/mnt/beeond/{jobid}"


def test_an_allocation_within_an_allocation_inherits_nothing(cluster: Cluster) -> None:
    script = f"salloc sh -c 'echo inner=$SLURM_JOB_ID; {SHOW}; srun env | grep -i beeond; true'"
    output = cluster.run("login", ["salloc", "--beeond", "sh", "-c", script], user="alice").stdout
    found = re.search(r"inner=(\d+)", output)
    assert found
    assert not [name for name in seen(cluster, int(found[1])) if b"beeond" in name.lower()]
    assert set(output.split()) == {f"inner={found[1]}", "|||"}


# -- in the job --------------------------------------------------------------------------------------------


def test_batch_script_and_steps_have_the_instance_whatever_is_exported(cluster: Cluster) -> None:
    script = f"#!/bin/bash\n{SHOW}\nsrun -N2 {SHOW}\nsrun -N1 -n1 --export=NONE {SHOW}\n"
    for export in ("ALL", "NONE", "X=1"):
        jobid = sbatch(cluster, "--beeond", "-N2", f"--export={export}", script=script)
        assert cluster.job_output(jobid).split() == [f"/mnt/beeond/{jobid}|{jobid}|n[1-2]|"] * 4


def test_a_failure_written_in_the_prolog_fails_the_job_with_that_message(cluster: Cluster) -> None:
    text = "n1: stage-in: /global/alice/%s%n: No such file or directory\nsecond line\n"
    with on_every_node(cluster, FAILURE, text):
        jobid = cluster.submit("alice", "#!/bin/sh\necho ran\n", "--beeond")
        job = cluster.wait_job(jobid)
        output = cluster.job_output(jobid)
        assert job["JobState"] == "FAILED"
        assert job["ExitCode"] == "1:0"
        assert "error: beeond: n1: stage-in: /global/alice/%s%n: No such file or directory\n" in output
        assert "error: beeond: second line\n" in output
        assert "ran" not in output.split()


def test_a_failure_is_told_once_for_each_node_to_srun_and_salloc_too(cluster: Cluster) -> None:
    with on_every_node(cluster, FAILURE, "no quota\n"):
        for argv in (["srun", "-N2", "--beeond", "-n8", "echo", "ran"],
                     ["salloc", "-N2", "-n8", "--beeond", "srun", "echo", "ran"]):  # fmt: skip
            failed = cluster.run("login", argv, user="alice", check=False)
            assert failed.returncode != 0
            assert "ran" not in failed.stdout
            assert failed.stderr.count("error: beeond: no quota") == 2


def test_a_job_that_asked_does_not_run_without_an_instance(cluster: Cluster) -> None:
    with on_every_node(cluster, NO_INSTANCE, ""):
        jobid = cluster.submit("alice", "#!/bin/sh\necho ran\n", "--beeond")
        assert cluster.wait_job(jobid)["JobState"] == "FAILED"
        assert "this job asked for an instance, and there is none on this node" in cluster.job_output(jobid)
        argv = ["srun", "--beeond-stage-in=/a:b", "echo", "ran"]
        failed = cluster.run("login", argv, user="alice", check=False)
        assert failed.returncode != 0
        assert "there is none on this node" in failed.stderr


def test_a_requeued_job_still_asks(cluster: Cluster) -> None:
    script = f'#!/bin/sh\n[ -n "$SLURM_RESTART_COUNT" ] || exec sleep 60\n{SHOW}\n'
    jobid = cluster.submit("alice", script, "--beeond=capacity=2TiB", "--requeue", "-wn1")
    cluster.wait_job(jobid, "RUNNING")
    cluster.run("ctl", ["scontrol", "requeue", str(jobid)])
    cluster.wait_job(jobid, "PENDING")
    # Slurm would wait for two minutes, because until then slurmd runs no second Prolog for a job it knows.
    cluster.run("ctl", ["scontrol", "update", f"JobId={jobid}", "StartTime=now", "ReqNodeList=n2"])
    cluster.wait_job(jobid, "COMPLETED")
    assert cluster.job(jobid)["BatchHost"] == "n2"
    environment = seen(cluster, jobid, "n2")
    assert environment[b"SLURM_JOB_RESTART_COUNT"] == b"1"
    assert decode(environment[b"SPANK_BEEOND_REQUEST"].decode()).capacity == 2 * TIB
    assert f"/mnt/beeond/{jobid}|" in cluster.job_output(jobid)


def submit_and_wait(cluster: Cluster, script: str, *arguments: str) -> int:
    """As `sbatch`, for jobs that Slurm counts as several."""
    argv = ["sbatch", "--wait", "--parsable", *arguments]
    return int(cluster.run("login", argv, user="alice", input=script).stdout)


def test_every_task_of_an_array_asks(cluster: Cluster) -> None:
    jobid = submit_and_wait(cluster, "#!/bin/sh\n", "--beeond=capacity=2TiB", "--array=0-1")
    ids = cluster.run("ctl", ["squeue", "-h", "-r", "-t", "all", "-o", "%A", "-j", str(jobid)]).stdout.split()
    assert len(ids) == 2
    assert [decode(request_text(cluster, int(task))).capacity for task in ids] == [2 * TIB] * 2


def test_each_component_of_a_heterogeneous_job_asks_for_itself(cluster: Cluster) -> None:
    script = f"#!/bin/sh\nsrun --het-group=0 {SHOW}\nsrun --het-group=1 {SHOW}\n"
    jobid = submit_and_wait(cluster, script, "-n1", "-ohet.out", "--beeond=capacity=2TiB", ":", "-n1")
    output = cluster.output("/global/alice/het.out")
    shown = [line.split("|")[:2] for line in output.splitlines()]
    assert shown == [[f"/mnt/beeond/{jobid}", str(jobid)], ["", ""]]
    assert decode(request_text(cluster, jobid)).capacity == 2 * TIB
    assert b"SPANK_BEEOND_REQUEST" not in seen(cluster, jobid + 1)


def test_the_help_of_every_command_names_the_options(cluster: Cluster) -> None:
    for command in ("sbatch", "salloc", "srun"):
        text = cluster.run("login", [command, "--help"], user="alice").stdout
        assert all(f"--{name}=" in text for name in ("beeond", "beeond-stage-in", "beeond-stage-out"))
        assert text.count("[beeond]") == 3
