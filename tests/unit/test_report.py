"""From events to what people read: the report and its page, metrics, and who may see what. No cluster."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from beeond_ctl import events, hints, metrics, published, report, userfiles
from beeond_ctl.errors import NodeError, UsageError
from beeond_ctl.lifecycle import gather, guard
from beeond_ctl.report_html import COLOURS, KINDS, page
from tests import eventlogs

ROOT = Path(__file__).resolve().parents[2]
NODES = ["n1", "n2", "n3"]


def made(logs: eventlogs.Logs, nodes: list[str] | None = None) -> report.Report:
    found = report.build(7, logs, nodes or list(logs))
    assert found is not None
    return found


# --- the report -------------------------------------------------------------------------------------------


def test_the_node_and_the_step_that_all_waited_for_are_named() -> None:
    act = made(eventlogs.clean(NODES, slow="n2", slow_s=2.0)).act("bring-up")
    assert act is not None
    (leg,) = [leg for leg in act.legs if leg.until == "mounted"]
    assert (leg.last, leg.step) == ("n2", "mounting")
    assert leg.step_s == pytest.approx(2.21)
    assert leg.late_s == pytest.approx(2.0, abs=0.02)
    assert sum(leg.seconds for leg in act.legs) == pytest.approx(act.end - act.begin)


def test_a_node_that_did_not_come_is_the_last_one() -> None:
    found = made(eventlogs.failed(NODES, "n3", "n3 did not come to 'prepared' within 10 s"), NODES)
    act = found.act("bring-up")
    assert act is not None
    assert (act.legs[0].last, act.legs[0].step, act.legs[0].seconds) == ("n3", "did not come", 10)
    assert (found.outcome, found.silent, act.failed) == ("failed", ("n3",), True)
    (fault,) = found.faults
    assert fault.nodes == ("n1", "n2")


def test_a_clock_that_is_off_changes_nothing_but_a_remark() -> None:
    right = made(eventlogs.clean(NODES, slow="n2"))
    wrong = made(eventlogs.clean(NODES, slow="n2", clocks={"n1": 40.0}))
    assert wrong.clocks == {"n1": 40.0}
    for name in ("bring-up", "tear-down"):
        before, after = right.act(name), wrong.act(name)
        assert before is not None
        assert after is not None
        assert [(leg.last, leg.step, round(leg.seconds, 3)) for leg in after.legs] == [
            (leg.last, leg.step, round(leg.seconds, 3)) for leg in before.legs
        ]


def test_only_the_last_run_of_a_requeued_job_is_told_of() -> None:
    first, second = (
        eventlogs.clean(["n1", "n2"], run="7.0"),
        eventlogs.clean(["n2", "n3"], run="7.1", at=9000),
    )
    found = made({"n1": first["n1"], "n2": first["n2"] + second["n2"], "n3": second["n3"]}, ["n2", "n3"])
    assert (found.run, found.nodes, len(found.acts), len(found.receipts)) == ("7.1", ("n2", "n3"), 2, 2)


def test_a_transfer_is_counted_once_with_its_rate_and_samples() -> None:
    (transfer,) = made(eventlogs.clean(NODES, staged_s=20)).transfers
    assert (transfer.bytes, transfer.rate, len(transfer.samples)) == (40 * 1024**3, 2 * 1024**3, 19)
    assert transfer.by_node == dict.fromkeys(NODES, 1024**3)


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        ("clean", "clean"),
        ("phase:retained", "kept"),
        ("phase:ready", "running"),
        ("phase:wiping", "unfinished"),
    ],
)
def test_the_outcome_is_that_of_the_worst_node(ending: str, outcome: str) -> None:
    logs = eventlogs.clean(["n1", "n2"])
    event, _, phase = ending.partition(":")
    logs["n2"].append({"t": eventlogs.START + 9999, "event": event, "phase": phase})
    assert made(logs).outcome == outcome


def test_a_job_of_which_a_node_says_nothing_is_not_said_to_be_clean() -> None:
    found = made(eventlogs.clean(["n1", "n2"]), ["n1", "n2", "n3"])
    assert (found.outcome, found.silent) == ("unfinished", ("n3",))


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
WORDS = (
    "prolog",
    "epilog",
    "recover",
    "step",
    "phase",
    "progress",
    "clean",
    "failed",
    "drained",
    "revived",
    "planned",
)
FIELDS = (
    "t", "event", "step", "seconds", "phase", "run", "user", "uid", "nodes", "message", "reason", "failed", "summary",
    "by_node", "receipts", "bytes", "source", "services", "ended", "backend",
)  # fmt: skip
HOSTILE = st.dictionaries(
    st.sampled_from(FIELDS),
    JSON | st.sampled_from([*WORDS, "stage-in", "meeting ready", "mounting", "<script>", "\u202e\x1b[2J\n"]),
    max_size=9,
).map(lambda event: {"event": "step", **event})


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=9), st.lists(HOSTILE, max_size=6), max_size=4))
def test_whatever_stands_in_the_events_ends_as_a_report_of_printable_lines(logs: dict[str, Any]) -> None:
    found = report.build(7, logs, ("n1",))
    if found is None:
        return
    json.dumps(found.as_dict(), allow_nan=False)
    assert all(line.isprintable() for line in report.lines(found))
    text = page(found)
    assert "<script" not in text.lower()
    assert all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400])
def test_a_number_too_large_in_a_published_event_counts_as_nothing(number: str) -> None:
    begin = b'{"t": 1700000000, "event": "prolog", "run": "7.0", "uid": 1}\n'
    line = f'{{"t": {number}, "event": "step", "step": "mounting", "seconds": {number}}}\n'
    timed = f'{{"t": 1700000001, "event": "step", "step": "mounting", "seconds": {number}}}\n'
    found = report.build(7, {"n1": events.parse(begin + line.encode() + timed.encode())})
    assert found is not None
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.acts[0].end <= 1700000001


def test_every_step_that_is_timed_has_its_place_in_metrics_and_report() -> None:
    code = "".join(path.read_text() for path in (ROOT / "beeond_ctl").rglob("*.py"))
    timed = set(re.findall(r"(?:events\.timed|here\.step)\(\"([a-z -]+)\"", code))
    assert {"bring-up", "mounting", "probe"} <= timed
    assert timed - {"bring-up", "tear-down", "recovery"} <= metrics.STEPS


def test_every_step_of_the_metrics_has_a_colour_and_every_colour_can_be_read() -> None:
    assert set(KINDS) >= metrics.STEPS
    for number in (0, 1):
        of = {name: pair[number] for name, pair in COLOURS.items()}
        for ink in ("ink", "soft", "good", "bad"):
            assert contrast(of[ink], of["page"]) >= 4.5
            assert contrast(of[ink], of["panel"]) >= 4.5
        assert contrast(of["ink"], of["wait"]) >= 4.5
        for kind in {*KINDS.values(), "other"} - {"wait"}:
            assert contrast(of[kind], of["page"]) >= 3  # WCAG 1.4.11: what is drawn
            assert contrast(of["on"], of[kind]) >= 4.5


def contrast(one: str, other: str) -> float:
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# --- the log ----------------------------------------------------------------------------------------------


def test_what_is_logged_goes_to_the_journal_in_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "JOURNAL", str(tmp_path / "journal"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(events.JOURNAL)
        journal.settimeout(5)
        log = events.EventLog(str(tmp_path), 42, "n1")
        log.log("progress", bytes=1)
        log.log("drained", reason="bad\nPRIORITY=0")
        fields = dict(line.split("=", 1) for line in journal.recv(9999).decode().splitlines())
    assert fields.pop("MESSAGE").startswith("job 42: {")
    assert fields == {
        "PRIORITY": "4", "SYSLOG_IDENTIFIER": "beeond-ctl", "BEEOND_JOB_ID": "42", "BEEOND_EVENT": "drained",
    }  # fmt: skip
    log.log("clean")  # and a journal that has gone stops nothing
    assert [event["event"] for event in events.read(str(tmp_path), 42)] == ["progress", "drained", "clean"]


def test_a_log_that_has_grown_too_long_takes_nothing_but_what_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "LIMIT", 200)
    events.EventLog(str(tmp_path), 42, "n1").log("step", text="x" * 300)
    log = events.EventLog(str(tmp_path), 42, "n1")
    log.log("step")
    log.log("proved", run="42.0")
    assert [event["event"] for event in events.read(str(tmp_path), 42)] == ["step", "proved"]


def test_what_comes_after_a_line_that_a_crash_cut_off_is_not_lost(tmp_path: Path) -> None:
    events.EventLog(str(tmp_path), 42, "n1").log("prolog")
    with events.log_path(str(tmp_path), 42).open("a") as file:
        file.write('{"t": 1, "event": "st')
    events.EventLog(str(tmp_path), 42, "n1").log("proved")
    assert [event["event"] for event in events.read(str(tmp_path), 42)] == ["prolog", "proved"]


def test_where_the_time_went_is_one_line_with_the_longest_first(tmp_path: Path) -> None:
    log = events.EventLog(str(tmp_path), 42, "n1")
    log.steps += [("mounting", 0.2), ("meeting a", 0.3), ("meeting b", 0.2), ("probe", 0.001)]
    assert log.took().endswith(" s: waiting for other nodes 0.50, mounting 0.20")


# --- who may see it ---------------------------------------------------------------------------------------


def test_of_a_log_with_runs_of_several_users_each_gets_their_own() -> None:
    log: list[dict[str, Any]] = [
        {"event": "step", "n": 0},
        {"uid": 1, "n": 1},
        {"n": 2},
        {"uid": 2, "n": 3},
        {"n": 4},
        {"uid": 1, "n": 5},
    ]
    assert [event["n"] for event in events.of_user(log, 1)] == [1, 2, 5]
    assert [event["n"] for event in events.of_user(log, 2)] == [3, 4]


def test_an_acl_lets_root_and_one_user_read() -> None:
    acl = userfiles.acl_for(2001)
    assert len(acl) == 4 + 5 * 8
    assert acl[12:20] == b"\x02\x00\x04\x00\xd1\x07\x00\x00"  # user 2001: r--


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that other users can reach."""
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o005 != 0o005 and directory.stat().st_uid == os.getuid():
            directory.chmod(directory.stat().st_mode | 0o055)
    return tmp_path


def as_user(uid: int, path: Path) -> bool:
    """Whether user `uid` can read what is at `path`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.close(os.open(path, os.O_RDONLY))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.root
def test_what_is_published_is_read_by_its_user_and_stays_roots(shared: Path) -> None:
    log = eventlogs.clean(["n1"])["n1"]
    published.publish(str(shared), 7, 2001, "n1", log)
    path = shared / "7" / "n1.jsonl"
    assert (path.stat().st_uid, path.stat().st_mode & 0o007) == (0, 0)
    assert (as_user(2001, path), as_user(2002, path)) == (True, False)
    assert published.collect(str(shared), 7) == {"n1": log}
    assert published.collect(str(shared), 8) == {}


@pytest.mark.root
def test_where_there_are_no_acls_the_file_is_given_to_its_user(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", none)
    published.publish(str(shared), 7, 2001, "n1", [])
    path = shared / "7" / "n1.jsonl"
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (2001, 0o400)
    hints.write(str(shared), 7, 2001, {"job": 7})  # never on /run, which a user could fill then
    assert (shared / "users" / "7").stat().st_uid == 0


@pytest.mark.root
def test_nothing_is_published_where_others_may_write_or_through_a_link(shared: Path) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(0o777)
    with pytest.raises(NodeError, match="others than root may write it"):
        published.publish(str(shared / "open"), 7, 2001, "n1", [])
    (shared / "good").mkdir(mode=0o755)
    (shared / "good" / "7").symlink_to(shared / "open")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        published.publish(str(shared / "good"), 7, 2001, "n1", [])
    assert list((shared / "open").iterdir()) == []


def test_a_file_that_its_user_made_a_pipe_of_does_not_hang_the_reader(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    os.mkfifo(tmp_path / "7" / "n1.jsonl")
    with pytest.raises(OSError, match="not a file"):
        published.collect(str(tmp_path), 7)


def test_hints_of_jobs_that_are_gone_are_removed(tmp_path: Path) -> None:
    for job in (7, 8):
        hints.write(str(tmp_path), job, os.getuid(), {"job": job})
    (tmp_path / "users" / ".7.0a1b2c3d").touch()  # what a crash left of a hint
    (tmp_path / "jobs" / "8").mkdir(parents=True)
    hints.forget_stale(str(tmp_path))
    assert [path.name for path in (tmp_path / "users").iterdir()] == ["8"]
    hints.remove(str(tmp_path), 8)
    hints.remove(str(tmp_path), 8)
    assert hints.read_all(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("folded", "size"),
    [("n1", 1), ("n[1-3,7],m[01-10]", 14), ("r[1-2]n[1-8]", 16), ("n[1-999999999]", 999_999_999)],
)
def test_the_size_of_a_node_list_is_known_without_unfolding_it(folded: str, size: int) -> None:
    assert gather._size(folded) == size


# --- metrics ----------------------------------------------------------------------------------------------


def counted(logged: list[dict[str, Any]]) -> metrics.Counts:
    counts = metrics.zeros()
    metrics.count(counts, logged)
    return counts


def test_what_a_node_logged_is_what_is_counted() -> None:
    found = counted(eventlogs.clean(["n1", "n2"], staged_s=20)["n1"])
    assert found['beeond_ctl_bring_ups_total{result="ready"}'] == 1
    assert found['beeond_ctl_steps_total{step="mounting",result="ok"}'] == 1
    assert found["beeond_ctl_bring_up_seconds_sum"] == pytest.approx(0.78)  # without the stage-in
    assert found['beeond_ctl_bring_up_seconds_bucket{le="0.5"}'] == 0
    assert found['beeond_ctl_bring_up_seconds_bucket{le="1"}'] == 1
    assert found['beeond_ctl_transfer_bytes_total{direction="in"}'] == 40 * 1024**3
    assert found["beeond_ctl_wiped_bytes_total"] == 5 * 1024**3
    other = counted(eventlogs.clean(["n1", "n2"], staged_s=20)["n2"])
    assert (
        other['beeond_ctl_transfers_total{direction="in",result="proved"}'] == 0
    )  # its leader has counted it


def test_a_failed_bring_up_is_counted_by_whose_fault_it_was() -> None:
    found = counted(eventlogs.failed(NODES, "n3", "late")["n1"])
    assert found['beeond_ctl_bring_ups_total{result="peer"}'] == 1
    assert found['beeond_ctl_bring_ups_total{result="ready"}'] == 0
    assert found['beeond_ctl_steps_total{step="waiting",result="failed"}'] == 1
    assert found["beeond_ctl_bring_up_seconds_count"] == 0


def test_every_sample_that_is_counted_was_there_at_zero_before() -> None:
    found = counted([
        *eventlogs.clean(["n1"], staged_s=3)["n1"],
        {"event": "drained"}, {"event": "phase", "phase": "retained"}, {"event": "revived", "services": ["a"]},
        {"event": "step", "step": "something new", "seconds": 1.0, "failed": "why"},
    ])  # fmt: skip
    assert set(found) == set(metrics.zeros())
    assert found['beeond_ctl_steps_total{step="other",result="failed"}'] == 1


def test_the_file_is_what_prometheus_reads_and_counts_go_on_in_the_next_process(tmp_path: Path) -> None:
    for _ in range(3):
        metrics.update(
            str(tmp_path), str(tmp_path / "run"), ["ready", "ready"], logged=eventlogs.clean(["n1"])["n1"]
        )
    metrics.update(str(tmp_path), str(tmp_path / "run"), [], swept=["removed", "stuck"])
    text = (tmp_path / metrics.FILE).read_text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    known = {metric.name.removesuffix("_total"): metric for metric in metrics.METRICS}
    assert set(families) == set(known)
    for name, family in families.items():
        assert (family.type, family.documentation) == (known[name].kind, known[name].help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(known[name].labels)
    values = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if not sample.labels
    }
    assert values["beeond_ctl_tear_down_seconds_count"] == 3
    assert values["beeond_ctl_sweep_stuck"] == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [metrics.FILE]
    assert (tmp_path / metrics.FILE).stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "run" / metrics.STATE).stat().st_mode & 0o777 == 0o600


def test_counts_are_neither_lost_nor_doubled_by_jobs_that_end_at_once(tmp_path: Path) -> None:
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _ in range(5):
                    metrics.update(str(tmp_path), str(tmp_path), [], logged=[{"event": "drained"}])
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
    assert json.loads((tmp_path / metrics.STATE).read_text())["beeond_ctl_drains_total"] == 40


def test_a_process_that_keeps_the_counts_holds_up_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LOCK_S", 0.05)
    with metrics._counts(str(tmp_path)), pytest.raises(NodeError, match="another beeond-ctl keeps it"):
        metrics.update(str(tmp_path), str(tmp_path), [])


def test_names_in_the_dashboard_and_in_the_documentation_are_those_of_the_code() -> None:
    names = {metric.name for metric in metrics.METRICS}
    samples = names | {
        f"{metric.name}_{part}"
        for metric in metrics.METRICS
        if metric.kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    board = json.loads((ROOT / "deploy/grafana/beeond-ctl.json").read_text())
    used: set[str] = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            found = re.findall(r"beeond_ctl_\w+", target["expr"])
            assert found, panel["title"]
            used |= set(found)
            for name in found:
                (metric,) = [
                    each
                    for each in metrics.METRICS
                    if re.fullmatch(f"{each.name}(_bucket|_sum|_count)?", name)
                ]
                selector = re.search(rf"{name}\{{(.*?)\}}", target["expr"])
                assert selector
                labels = set(re.findall(r"(\w+)=", selector[1])) - {"instance"}
                assert labels <= set(metric.labels)
    assert used <= samples
    shown = {name for name in names if any(word.startswith(name) for word in used)}
    assert names - shown == set(), "not on the dashboard"
    text = (ROOT / "docs/report.md").read_text()
    for metric in metrics.METRICS:
        assert f"`{metric.name}`" in text
        assert metric.help in text


# --- putting it together ----------------------------------------------------------------------------------


def test_a_job_does_not_wait_for_a_file_system_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from beeond_ctl.config import parse

    over = threading.Event()
    monkeypatch.setattr(guard, "ACCOUNTS_S", 0.05)
    monkeypatch.setattr(guard, "_account", lambda *_, **__: over.wait(30))
    config = parse(f'[paths]\nlog = "{tmp_path}/log"\n[report]\ndirectory = "{tmp_path}"\n')
    with guard.accounted(config, "n1", 7, ends=True):
        pass
    over.set()
    (event,) = events.read(config.paths.log, 7)
    assert (event["event"], "no answer within" in event["message"]) == ("not-accounted", True)


def test_a_job_does_not_fail_by_metrics_or_reports_that_cannot_be_written(tmp_path: Path) -> None:
    from beeond_ctl.config import parse

    config = parse(
        f'[paths]\nlog = "{tmp_path}/log"\nrun = "{tmp_path}/run"\n[metrics]\ndirectory = "{tmp_path}/nowhere"\n'
    )
    with guard.accounted(config, "n1", 7, ends=False):
        events.EventLog(config.paths.log, 7, "n1").log("prolog", uid=1)
    with pytest.raises(UsageError), guard.accounted(config, "n1", 7, ends=True):
        raise UsageError("what went wrong is what is told")
    found = [event["event"] for event in events.read(config.paths.log, 7)]
    assert found == ["prolog", "not-accounted", "not-accounted"]
