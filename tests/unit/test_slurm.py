from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beeond_ctl import check, slurm
from beeond_ctl.errors import NodeError
from beeond_ctl.plan import Job

PROLOG = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_UID": "1000",
    "SLURM_JOB_GID": "100",
    "SLURM_JOB_USER": "alice",
    "SLURM_NODELIST": "n[1-3]",
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_RESTART_COUNT": "1",
}


def test_the_environment_of_a_prolog_is_read() -> None:
    made = slurm.prolog(PROLOG)
    assert made == slurm.Prolog(Job(42, 1000, 100, "alice", 1), ("n1", "n2", "n3"), "n2")


@pytest.mark.parametrize(
    ("said", "another"),
    [
        ({}, False),
        ({"SLURM_CLUSTER_NAME": "blue", "SLURM_JOB_UID": "1000", "SLURMD_NODENAME": "n2"}, False),
        ({"SLURM_CLUSTER_NAME": "green", "SLURM_JOB_UID": "1000", "SLURMD_NODENAME": "n2"}, True),
        ({"SLURM_JOB_UID": "1001"}, True),
        ({"SLURMD_NODENAME": "n3"}, True),
    ],
)
def test_an_epilog_of_another_cluster_is_told_from_ours(said: dict[str, str], another: bool) -> None:
    made = slurm.prolog({**PROLOG, "SLURM_CLUSTER_NAME": "blue"})
    assert slurm.is_of_another(said, made.job, made.node) is another
    unnamed = slurm.prolog(PROLOG)
    assert not slurm.is_of_another({"SLURM_CLUSTER_NAME": "blue"}, unnamed.job, unnamed.node)


def test_newer_releases_name_the_node_list_differently() -> None:
    environ = {**PROLOG, "SLURM_JOB_NODELIST": "n[1-2]"}
    assert slurm.prolog(environ).nodes == ("n1", "n2")


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_NODELIST"])
def test_what_is_missing_in_the_environment_is_named(name: str) -> None:
    environ = {key: value for key, value in PROLOG.items() if key != name}
    with pytest.raises(NodeError, match=name):
        slurm.prolog(environ)


@pytest.mark.parametrize("value", ["", "-1", "1; reboot", "0x10", "99999999999"])
def test_a_job_id_is_a_number_and_nothing_else(value: str) -> None:
    with pytest.raises(NodeError, match="SLURM_JOB_ID"):
        slurm.prolog({**PROLOG, "SLURM_JOB_ID": value})


def test_a_node_that_is_not_in_its_job_says_so() -> None:
    with pytest.raises(NodeError, match="SLURMD_NODENAME"):
        slurm.prolog({**PROLOG, "SLURMD_NODENAME": "n9"})


@given(st.sets(st.integers(1, 500), min_size=1, max_size=20))
def test_folding_and_expanding_are_inverse(numbers: set[int]) -> None:
    nodes = [f"n{number}" for number in sorted(numbers)]
    assert slurm.expand_nodes(slurm.fold_nodes(nodes)) == tuple(nodes)


@pytest.mark.parametrize("text", ["n[1-", "n[1-3", "@all", "n1 n2;x["])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(NodeError, match="node list"):
        slurm.expand_nodes(text)


def script(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def scontrol(directory: Path, reason: str = "", state: str = "") -> Path:
    """A stand-in for scontrol: shows a node with `reason`, and keeps the arguments of an update."""
    state = state or ("MIXED*+DRAIN" if reason else "IDLE")
    shown = f"   Reason={reason} [root@2026-01-02T03:04:05]" if reason else ""
    script(
        directory, "scontrol",
        f"if [ \"$1\" = show ]; then cat {directory}/node; else printf '%s\\n' \"$@\" > {directory}/arguments; fi",
    )  # fmt: skip
    (directory / "node").write_text(f"NodeName=n1 Arch=x86_64\n   State={state} Weight=1\n{shown}\n")
    return directory / "arguments"


def test_a_reason_reaches_scontrol_as_one_argument_of_plain_text(tmp_path: Path) -> None:
    arguments = scontrol(tmp_path)
    slurm.drain([str(tmp_path)], "n1", 'it\'s "dead"; $(reboot)\nline é')
    assert arguments.read_text().splitlines() == [
        "update", "NodeName=n1", "State=DRAIN", "Reason=it's \"dead\"; $(reboot)?line ?",
    ]  # fmt: skip


def test_a_node_may_be_out_of_service_for_several_reasons(tmp_path: Path) -> None:
    arguments = scontrol(tmp_path, "new memory on Monday")
    slurm.drain([str(tmp_path)], "n1", "beeond: job 7: kept")
    assert "Reason=new memory on Monday | beeond: job 7: kept" in arguments.read_text().splitlines()
    scontrol(tmp_path, "new memory on Monday | beeond: job 7: kept")
    slurm.undrain([str(tmp_path)], "n1", "beeond: job 7:")
    assert "Reason=new memory on Monday" in arguments.read_text().splitlines()
    scontrol(tmp_path, "beeond: job 7: kept")
    slurm.undrain([str(tmp_path)], "n1", "beeond: job 7:")
    assert "State=RESUME" in arguments.read_text().splitlines()


@pytest.mark.parametrize(
    ("state", "is_out"),
    [
        ("IDLE", False),
        ("IDLE+POWERED_DOWN", False),
        ("DOWN*", True),
        ("IDLE+FAIL", True),
        ("ALLOCATED+DRAIN", True),
    ],
)
def test_a_reason_that_slurm_shows_of_a_node_in_service_is_none(
    tmp_path: Path, state: str, is_out: bool
) -> None:
    arguments = scontrol(tmp_path, "beeond: job 6: kept", state)
    slurm.drain([str(tmp_path)], "n1", "beeond: job 7: kept")
    both = "Reason=beeond: job 6: kept | beeond: job 7: kept"
    assert (both in arguments.read_text().splitlines()) == is_out


def test_a_users_words_in_a_reason_make_no_reason_of_their_own_and_do_not_cut_off_what_to_do(
    tmp_path: Path,
) -> None:
    arguments = scontrol(tmp_path)
    slurm.drain(
        [str(tmp_path)], "n1", f"beeond: job 7: a | | beeond: job 8: b|c {'x' * 2000}; run: recover 7"
    )
    (told,) = (line for line in arguments.read_text().splitlines() if line.startswith("Reason="))
    assert "|" not in told
    assert told.startswith("Reason=beeond: job 7: a ")
    assert told.endswith("; run: recover 7")
    assert len(told) < 1100


def test_a_node_that_is_out_of_service_for_something_else_stays_so(tmp_path: Path) -> None:
    arguments = scontrol(tmp_path, "beeond: job 77: kept")
    slurm.undrain([str(tmp_path)], "n1", "beeond: job 7:")
    assert not arguments.exists()


def test_slurms_own_words_are_passed_on(tmp_path: Path) -> None:
    script(tmp_path, "scontrol", "echo slurm_update error: Access denied >&2; exit 1")
    with pytest.raises(NodeError, match="Access denied"):
        slurm.drain([str(tmp_path)], "n1", "x")
    with pytest.raises(NodeError, match=r"slurm\.path"):
        slurm.drain([str(tmp_path / "empty")], "n1", "x")


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("echo '41 CANCELLED'; echo '42 RUNNING n[1-3]'", True),
        ("echo '42 COMPLETING n[1-3]'", False),
        ("echo '42 CANCELLED'", False),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", False),
        ("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1", True),
    ],
)
def test_a_job_is_given_up_only_when_slurm_says_that_it_is_over(
    tmp_path: Path, answer: str, wanted: bool
) -> None:
    script(tmp_path, "squeue", answer)
    assert slurm.job_wants_us([str(tmp_path)], 42) is wanted


def test_an_empty_list_is_not_taken_for_a_job_that_is_gone(tmp_path: Path) -> None:
    script(tmp_path, "squeue", "")
    script(tmp_path, "scontrol", "printf 'JobId=42 JobName=run\\n   JobState=RUNNING\\n'")
    with pytest.raises(NodeError, match="squeue shows nothing of job 42"):
        slurm.state_and_nodes([str(tmp_path)], 42)
    script(tmp_path, "scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert slurm.state_and_nodes([str(tmp_path)], 42) == ("", "")


@pytest.mark.parametrize(
    ("state", "reason", "speaks"),
    [
        ("IDLE", "", False),
        ("IDLE+DRAIN", "beeond: job 7: data kept, stage-out is not proved (x); run: y", True),
        ("IDLE+DRAIN", f"mine | beeond: job 7: {slurm.UNPROVED}/dev/loop3 is still used", True),
        ("IDLE+DRAIN", "beeond: job 7: /dev/loop3 is still used by bash (12)", False),
        ("IDLE+DRAIN", "beeond: job 8: cannot open /x/beeond: job 7: data kept", False),
        ("IDLE+DRAIN", "beeond: job 77: data kept", False),
        ("IDLE+DRAIN", "Epilog error", True),
        ("IDLE+DRAIN", "Prolog error", False),
        ("DOWN+NOT_RESPONDING", "Not responding", True),
        ("IDLE+NOT_RESPONDING", "", False),
    ],
)
def test_what_speaks_against_a_job_having_been_staged_out(
    tmp_path: Path, state: str, reason: str, speaks: bool
) -> None:
    shown = f" Reason={reason} [root@2026-01-01T00:00:00]" if reason else ""
    (tmp_path / "said").write_text(f"NodeName=n1 Arch=x86_64 State={state} ThreadsPerCore=1{shown}\n")
    script(tmp_path, "scontrol", f"cat {tmp_path}/said")
    assert slurm.unproved([str(tmp_path)], "n1", 7) == (["n1"] if speaks else [])


def test_a_job_name_with_spaces_is_read_whole(tmp_path: Path) -> None:
    script(tmp_path, "scontrol", "printf 'JobId=42 JobName=my run = 3\\n   ArrayJobId=40 ArrayTaskId=2\\n'")
    fields = slurm.job_fields([str(tmp_path)], 42)
    assert (fields["JobName"], fields["ArrayJobId"], fields["ArrayTaskId"]) == ("my run = 3", "40", "2")


def test_the_plugin_is_found_through_includes(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "plugstack.conf").write_text("# nothing\nrequired other.so\ninclude conf.d/*.conf\n")
    (tmp_path / "conf.d/beeond.conf").write_text("required beeond.so controller=/usr/bin/beeond-ctl\n")
    (tmp_path / "conf.d/loop.conf").write_text(f"include {tmp_path}/plugstack.conf\n")
    found = list(check.plugins(tmp_path / "plugstack.conf", "/usr/lib/slurm"))
    assert found[0] == Path("/usr/lib/slurm/beeond.so")
    assert set(found) == {Path("/usr/lib/slurm/beeond.so")}
    assert os.path.basename(found[0]) == check.PLUGIN


def test_the_plugin_is_looked_for_in_each_directory_of_plugins(tmp_path: Path) -> None:
    (tmp_path / "plugstack.conf").write_text("required beeond.so\n")
    (tmp_path / "beeond.so").touch()
    found = list(check.plugins(tmp_path / "plugstack.conf", f"/usr/lib/slurm:{tmp_path}"))
    assert found == [tmp_path / "beeond.so"]


def test_prologs_and_their_timeouts_are_read_as_later_releases_show_them(tmp_path: Path) -> None:
    shown = "Prolog[0] = /etc/slurm/prolog.d/*\\nPrologTimeout = 65534\\nEpilogTimeout = 20\\n"
    script(tmp_path, "scontrol", f"printf '{shown}'")
    (tmp_path / "config.toml").write_text(
        f'[storage]\nkind = "directory"\npaths = ["/nvme"]\n[slurm]\npath = ["{tmp_path}"]\n'
    )
    found = {finding.subject: finding.verdict for finding in check.check_node(tmp_path / "config.toml")}
    assert "Prolog" not in found
    assert found["Epilog"] == "fail"
    assert found["PrologTimeout"] == "ok"
    assert found["EpilogTimeout"] == "warn"
    assert "PrologEpilogTimeout" not in found


def test_an_epilog_needs_no_more_than_the_job_id() -> None:
    assert slurm.epilog_job({"SLURM_JOB_ID": "42"}) == 42
    with pytest.raises(NodeError, match="SLURM_JOB_ID"):
        slurm.epilog_job({})


def test_prologs_that_slurm_would_run_one_by_one_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdicts(flags: str) -> list[tuple[str, str]]:
        text = f"PrologFlags             = {flags}\nSLURM_CONF = {tmp_path}/slurm.conf\n"
        monkeypatch.setattr(slurm, "run", lambda *_: text)
        (tmp_path / "config.toml").touch()
        found = [each for each in check.check_node(tmp_path / "config.toml") if each.subject == "PrologFlags"]
        return [(each.verdict, each.text.partition(" ")[0]) for each in found]

    assert verdicts("Alloc") == [("ok", "Alloc")]
    assert verdicts("Alloc,Serial") == [("ok", "Alloc,Serial"), ("fail", "Serial")]


def test_a_users_comment_does_not_speak_for_slurm(tmp_path: Path) -> None:
    script(
        tmp_path, "scontrol", "printf 'JobId=42 JobName=x\\n JobState=RUNNING\\n Comment=JobState=FAILED\\n'"
    )
    assert slurm.job_fields([str(tmp_path)], 42)["JobState"] == "RUNNING"


CANCELLED = "Reason=None Restarts=1 ExitCode=0:15"
NUMBER = ': {"number": 1}'
HURRIED = '{"job_id": 42, "flags": ["X", "JOB_KILL_HURRY"], "restart_cnt": 1, "job_state": "COMPLETING"}'


def answers(directory: Path, record: str, old: str = "", new: str = "") -> list[str]:
    """A Slurm that shows job 42 so; with JSON of squeue alone, which dumps all jobs, or of scontrol, too."""
    (directory / "record").write_text(f"JobId=42 JobName=x\n   {record.replace(' ', chr(10) + '   ')}\n")
    (directory / "old").write_text(old)
    (directory / "new").write_text(new)
    unknown = "echo \"scontrol: unrecognized option '--json'\" >&2; exit 1"
    json = f"cat {directory}/new" if new else unknown
    lines = f'echo scontrol "$@" >>{directory}/asked; case "$*" in *--json*) {json};; *) cat {directory}/record;; esac'
    script(directory, "scontrol", lines)
    script(directory, "squeue", f'echo squeue "$@" >>{directory}/asked; cat {directory}/old')
    return [str(directory)]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (f'{{"jobs": [{HURRIED}]}}', True),
        (f'{{"jobs": [{HURRIED.replace(": 1", NUMBER)}]}}', True),
        (f'{{"jobs": [{HURRIED.replace(": 1", ": 0")}]}}', False),
        (f'{{"jobs": [{HURRIED.replace("42", "43")}]}}', False),
        (f'{{"jobs": [{HURRIED.replace("JOB_KILL_HURRY", "Y")}]}}', False),
        ('{"jobs": [{"job_id": 42, "flags": null, "restart_cnt": 1, "job_state": "COMPLETING"}]}', False),
        ('{"jobs": []}', False),
        ("", False),
        ("[]", False),
    ],
)
def test_data_counts_as_given_up_only_when_slurm_says_so_of_this_run_of_the_job(
    tmp_path: Path, answer: str, wanted: bool
) -> None:
    assert slurm.gave_up(answers(tmp_path, CANCELLED, old=answer), 42, 1) is wanted


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (CANCELLED, True),
        ("Reason=None Restarts=1 ExitCode=0:9", True),
        ("Reason=None Restarts=1 ExitCode=3:0", True),  # its script ended itself so when it was cancelled
        (
            "Reason=None Restarts=1 ExitCode=0:0",
            False,
        ),  # it went on, or ended itself well when it was cancelled
        ("Reason=JobLaunchFailure Restarts=1 ExitCode=0:10", False),  # of the signal, or another
        ("Reason=NonZeroExitCode Restarts=1 ExitCode=138:0", False),
        ("Reason=TimeLimit Restarts=1 ExitCode=0:15", False),
        ("Reason=NodeDown Restarts=1 ExitCode=0:15", False),
        ("Reason=None Restarts=1 PreemptTime=2026-05-09T10:00:00 ExitCode=0:15", False),
        ("Reason=JobLaunchFailure Restarts=2 ExitCode=0:10", False),  # requeued
    ],
)
def test_hurry_with_a_signal_that_did_not_end_the_job_gives_nothing_up_and_asks_little(
    tmp_path: Path, record: str, wanted: bool
) -> None:
    path = answers(tmp_path, record, old=f'{{"jobs": [{HURRIED}]}}')
    assert slurm.gave_up(path, 42, 1) is wanted
    assert ("squeue" in (tmp_path / "asked").read_text()) is wanted  # which prints the whole queue


@pytest.mark.parametrize("forged", ["Reason=None", "ExitCode=0:15", "Restarts=1", "PreemptTime=None"])
@pytest.mark.parametrize("before", [True, False], ids=["name", "comment"])
def test_what_a_jobs_name_says_of_its_end_gives_nothing_up(tmp_path: Path, forged: str, before: bool) -> None:
    field = forged.partition("=")[0]
    true = {"Reason": "None", "Restarts": "1", "ExitCode": "0:15", "PreemptTime": "None"}
    true[field] = "2026-05-09T10:00:00" if field == "PreemptTime" else "2"
    words = [f"{key}={value}" for key, value in true.items()]
    words.insert(0 if before else len(words), forged)
    path = answers(tmp_path, " ".join(words), old=f'{{"jobs": [{HURRIED}]}}')
    assert not slurm.gave_up(path, 42, 1)
    path = answers(tmp_path, f"{CANCELLED} Reason=None", old=f'{{"jobs": [{HURRIED}]}}')
    assert slurm.gave_up(path, 42, 1)  # which says nothing else


@pytest.mark.parametrize(
    ("state", "code", "wanted"),
    [
        ('["CANCELLED", "COMPLETING"]', "0:15", True),
        (
            '["CANCELLED", "COMPLETING"]',
            "0:0",
            True,
        ),  # salloc; a script that ends itself well when it is cancelled
        ('["COMPLETED", "COMPLETING"]', "0:0", False),
        ('["PREEMPTED", "COMPLETING"]', "0:15", False),
    ],
)
def test_a_slurm_that_shows_the_states_of_a_job_is_believed_and_asked_about_one_job(
    tmp_path: Path, state: str, code: str, wanted: bool
) -> None:
    job = HURRIED.replace('"COMPLETING"', state)
    path = answers(tmp_path, f"Reason=None Restarts=1 ExitCode={code}", new=f'{{"jobs": [{job}]}}')
    assert slurm.gave_up(path, 42, 1) is wanted
    assert "squeue" not in (tmp_path / "asked").read_text()


def test_a_slurm_without_json_does_not_say_that_data_is_given_up(tmp_path: Path) -> None:
    path = answers(tmp_path, CANCELLED)
    script(tmp_path, "squeue", "echo squeue: unrecognized option >&2; exit 1")
    with pytest.raises(NodeError, match="unrecognized"):
        slurm.gave_up(path, 42, 1)


def test_directives_and_fields_come_with_one_question(tmp_path: Path) -> None:
    lines = "#BB_LUA beeond\\n#BB_LUA stage_in source=/a destination=b"
    text = (
        f"JobId=42 JobName=x\\n   UserId=a(2001)\\n   BurstBuffer={lines}\\n   BurstBufferState=staged-in\\n"
    )
    script(tmp_path, "scontrol", f"echo once >>{tmp_path}/asked; printf '{text}'")
    fields, found = slurm.job_facts([str(tmp_path)], 42)
    assert fields["UserId"] == "a(2001)"
    assert found == ["#BB_LUA beeond", "#BB_LUA stage_in source=/a destination=b"]
    assert (tmp_path / "asked").read_text() == "once\n"
