"""What users and admins are told of a job, while it runs and afterwards: status, report, metrics, journal."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import metrics
from beeond_ctl.report import build
from beeond_ctl.report_html import COLOURS, page
from tests import eventlogs
from tests.integration.site_config import CONFIG
from tests.testbed.host import PATIENCE
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.testbed import Cluster

NODES = ("n1", "n2", "n3")
REPORTS = "/global/reports"
COLLECTOR = "/var/lib/node_exporter"
MORE = f"""
[mount]
choices = ["/fast"]
[report]
directory = "{REPORTS}"
[metrics]
directory = "{COLLECTOR}"
"""


@pytest.fixture
def site(idle_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster as a site has it that wants reports and metrics."""
    idle_cluster.write_config(CONFIG.format(kind="directory", more=MORE))
    idle_cluster.run("ctl", ["mkdir", "-p", "-m", "755", REPORTS])
    for node in NODES:
        idle_cluster.run(node, ["mkdir", "-p", COLLECTOR])
    yield idle_cluster
    idle_cluster.run("ctl", ["scancel", "--user=alice"])
    idle_cluster.wait_idle()
    idle_cluster.write_config(CONFIG.format(kind="directory", more=""))


def published(cluster: Cluster, job: int) -> list[str]:
    return cluster.run("ctl", ["sh", "-c", f"ls {REPORTS}/{job} 2>/dev/null || true"]).stdout.split()


def reported(cluster: Cluster, job: int, *words: str, where: str = "login", user: str | None = None) -> Any:
    return json.loads(
        cluster.run(where, ["beeond-ctl", "report", str(job), "--json", *words], user=user).stdout
    )


def status(cluster: Cluster, *words: str, where: str, user: str | None = None) -> Any:
    done = cluster.run(where, ["beeond-ctl", "status", "--json", *words], user=user, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def numbers(cluster: Cluster, node: str) -> dict[str, float]:
    """The samples on a node; none before its first job."""
    text = cluster.run(node, ["sh", "-c", f"cat {COLLECTOR}/{metrics.FILE} || true"]).stdout
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.mark.cluster
def test_a_job_is_shown_to_its_user_and_to_root_and_to_nobody_else(site: Cluster, tmp_path: Path) -> None:
    make = "rm -rf in back go; mkdir in; for i in 1 2 3; do echo $i > in/$i; done"
    site.run("login", ["sh", "-c", make], user="alice")
    before = {node: numbers(site, node) for node in NODES}
    job = site.submit(
        "alice",
        "#!/bin/sh\nuntil [ -e /global/alice/go ]; do sleep 0.1; done\n",
        "-N3", "--beeond=mount=/fast", "--beeond-stage-in=/global/alice/in:in",
        "--beeond-stage-out=in:/global/alice/back",
    )  # fmt: skip
    site.wait_job(job, "RUNNING")
    wait_for(lambda: [item["phase"] for item in status(site, where="n2")] == ["ready"], 30)

    # While it runs: at a mount point of the user's choice, on one node and on all of them.
    (own,) = status(site, where="n2", user="alice")
    assert (own["job"], own["phase"], own["mount"], own["health"]) == (job, "ready", "/fast", "ok")
    assert "free of" in own["capacity"]
    (transfer,) = own["transfers"]
    assert (transfer["direction"], transfer["entries"], transfer["proved"]) == ("in", 3, True)
    assert "stage-in" in own["took"]
    assert status(site, where="n2", user="bob") == []
    assert site.run("n2", ["cat", f"/run/beeond-ctl/users/{job}"], user="bob", check=False).returncode != 0
    for where, user in (("n1", None), ("n2", "alice"), ("ctl", None)):
        asked = status(site, str(job), "--all-nodes", where=where, user=user)
        assert [(item["node"], item["phase"], item["health"]) for item in asked["nodes"]] == [
            (node, "ready", "ok") for node in NODES
        ]
        assert asked["silent"] == asked["trouble"] == []
    site.kill("n3", "glusterfsd")
    asked = status(site, str(job), "--all-nodes", where="n1")
    health = {item["node"]: item["health"] for item in asked["nodes"]}
    assert [node for node in NODES if "brick-0 is dead" in health[node]] == ["n3"], health
    early = site.run("login", ["beeond-ctl", "report", str(job)], user="alice", check=False)
    assert (early.returncode, "when it has ended" in early.stderr) == (1, True)
    running = reported(site, job, where="n1")  # root asks the nodes themselves
    assert (running["outcome"], sorted(running["states"])) == ("running", list(NODES))

    site.run("login", ["touch", "/global/alice/go"])
    assert site.wait_job(job)["JobState"] == "COMPLETED"
    site.wait_idle()
    wait_for(lambda: len(published(site, job)) == 3, 10)

    # When it is over: to its user where no log is and nothing runs, from what the nodes have left there.
    told = reported(site, job, user="alice")
    assert (told["outcome"], told["user"], told["nodes"], told["silent"]) == (
        "clean",
        "alice",
        list(NODES),
        [],
    )
    assert [act["name"] for act in told["acts"]] == ["bring-up", "tear-down"]
    for act in told["acts"]:
        # The way through the act has no gap, and each piece of it names a node.
        assert sum(leg["seconds"] for leg in act["legs"]) == pytest.approx(
            act["end"] - act["begin"], abs=1e-3
        )
        assert {leg["last"] for leg in act["legs"]} <= set(NODES)
    assert [(item["direction"], item["copied"], item["result"]) for item in told["transfers"]] == [
        ("in", 3, "proved"), ("out", 3, "proved"),
    ]  # fmt: skip
    assert [item["node"] for item in told["receipts"]] == list(NODES)
    assert any(fault["nodes"] == ["n3"] and fault["what"] == "services had died" for fault in told["faults"])
    text = site.run("login", ["beeond-ctl", "report", str(job)], user="alice").stdout
    assert "all nodes are clean" in text
    site.run("login", ["beeond-ctl", "report", str(job), "--html", "/global/alice/page.html"], user="alice")
    assert f"Job {job}" in site.read("login", "/global/alice/page.html")
    refused = site.run("login", ["beeond-ctl", "report", str(job)], user="bob", check=False)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "not yours" in refused.stderr
    # The user may read the files, not change them.
    file = f"{REPORTS}/{job}/n1.jsonl"
    for change in (
        f"echo >> {file}",
        f"chmod u+w {file}",
        f"rm -f {file}",
        f"touch {REPORTS}/{job}/n9.jsonl",
    ):
        assert site.run("login", ["sh", "-c", change], user="alice", check=False).returncode != 0
    assert status(site, where="n2", user="alice") == []
    assert site.run("n2", ["ls", "/run/beeond-ctl/users"]).stdout == ""

    # And in numbers, on each node, once.
    after = {node: numbers(site, node) for node in NODES}
    for node in NODES:
        grown = {name: value - before[node].get(name, 0) for name, value in after[node].items()}
        assert grown['beeond_ctl_bring_ups_total{result="ready"}'] == 1
        assert grown["beeond_ctl_tear_down_seconds_count"] == 1
        assert grown["beeond_ctl_wiped_targets_total"] == 1
        led = 'beeond_ctl_transfers_total{direction="out",result="proved"}'
        assert grown.get(led, 0) == (1 if node == "n1" else 0)
        assert after[node]['beeond_ctl_instances{phase="ready"}'] == 0


@pytest.mark.cluster
def test_a_job_that_failed_says_so_and_root_gets_it_from_the_nodes(site: Cluster) -> None:
    site.run("ctl", ["chmod", "777", REPORTS])  # where anybody may write, nothing is put
    try:
        job = site.submit(
            "alice", "#!/bin/sh\ntrue\n", "-N2", "-w", "n[1-2]", "--beeond-stage-in=/global/alice/none:x"
        )
        site.wait_job(job, "FAILED")
        site.wait_idle()
        told = reported(site, job, where="n2")
        assert (told["nodes"], told["outcome"], told["acts"][0]["failed"]) == (["n1", "n2"], "clean", True)
        assert any("/global/alice/none" in fault["text"] for fault in told["faults"])
        # The controller has no log, and Slurm still knows the nodes.
        assert reported(site, job, where="ctl")["nodes"] == ["n1", "n2"]
        assert published(site, job) == []
        log = site.read("n1", f"/var/log/beeond-ctl/jobs/{job}.jsonl")
        assert "others than root may write it" in log
    finally:
        site.run("ctl", ["chmod", "755", REPORTS])
    user = numbers(site, "n1").get('beeond_ctl_bring_ups_total{result="user"}', 0)
    assert user >= 1


# --- the page, in a browser -------------------------------------------------------------------------------

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def browser() -> str:
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    pytest.skip(f"needs one of {', '.join(BROWSERS)}; run `make deps`")


def browse(tmp_path: Path, file: Path, *switches: str) -> subprocess.CompletedProcess[str]:
    """Load `file` with a profile and a network log of its own."""
    argv = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        "--v=0", "--no-first-run", "--disable-background-networking", f"--user-data-dir={tmp_path}/profile",
        f"--log-net-log={tmp_path}/net.json", "--window-size=1000,1400", *switches, f"file://{file}",
    ]  # fmt: skip
    return subprocess.run(argv, capture_output=True, text=True, timeout=60 * PATIENCE, check=True)


def made_page(tmp_path: Path, logs: eventlogs.Logs, name: str = "page") -> Path:
    report = build(7, logs, list(logs))
    assert report is not None
    path = tmp_path / f"{name}.html"
    path.write_text(page(report))
    return path


MEASURE = """<script>
const boxes = s => [...s.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
const seen = {dark: matchMedia("(prefers-color-scheme: dark)").matches, over: [], out: [], colours: [],
  width: innerWidth, wide: document.documentElement.scrollWidth - innerWidth,
  svgs: document.querySelectorAll("svg").length};
for (const svg of document.querySelectorAll("svg")) {
  const all = boxes(svg), frame = svg.getBoundingClientRect();
  all.forEach(([a, p], i) => {
    if (p.left < frame.left - 1 || p.right > frame.right + 1 || p.top < frame.top - 1 || p.bottom > frame.bottom + 1)
      seen.out.push(a);
    for (const [b, q] of all.slice(i + 1))
      if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
        seen.over.push([a, b]);
  });
}
for (const e of document.querySelectorAll("h1, p, td, dd, dt, .good, .bad, svg text")) {
  const style = getComputedStyle(e);
  seen.colours.push(e.namespaceURI.endsWith("svg") ? style.fill : style.color);
}
seen.colours = [...new Set(seen.colours)];
seen.page = getComputedStyle(document.body).backgroundColor;
document.title = JSON.stringify(seen);
</script>"""


def pages(tmp_path: Path) -> dict[str, Path]:
    many = [f"gpu-rack{number // 16:02}-chassis{number % 16:02}.cluster.example.org" for number in range(64)]
    absent = "n3 did not come to 'prepared' within 10 s; see its slurmd log"
    evil = "<script>document.title='owned'</script>\u202e\x1b[31m\"'&amp;</title>\n"
    logs = {
        "one": eventlogs.clean(["n1"]),
        "many": eventlogs.clean(many, slow=many[37], staged_s=40),
        "failed": eventlogs.failed(["n1", "n2", "n3"], "n3", absent),
        "evil": eventlogs.clean(
            ["n1", "n2"], staged_s=5, said={"proved": False, "problems": [evil, "x" * 5000]}
        ),
    }
    for event in logs["evil"]["n1"]:
        event |= {key: evil for key in ("source", "user", "backend", "reason") if key in event}
    logs["evil"]["n1"].append({"t": eventlogs.START + 1, "node": evil, "event": "drained", "reason": evil})
    return {name: made_page(tmp_path, log, name) for name, log in logs.items()}


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("dark", "width"), [(False, 1000), (True, 500)], ids=["light and wide", "dark and narrow"]
)
def test_the_page_is_laid_out_without_overlaps_and_can_be_read(
    tmp_path: Path, dark: bool, width: int
) -> None:
    for name, path in pages(tmp_path).items():
        text = re.sub(r"<meta http-equiv[^>]*>", "", path.read_text()).replace("</body>", MEASURE + "</body>")
        measured = tmp_path / f"measured-{name}.html"
        measured.write_text(text)
        scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
        dom = browse(tmp_path, measured, scheme, f"--window-size={width},900", "--dump-dom").stdout
        found = re.search(r"<title>(.*?)</title>", dom)
        assert found is not None
        seen = json.loads(html.unescape(found[1]))
        assert (seen["dark"], seen["width"], seen["over"], seen["out"]) == (dark, width, [], []), name
        assert seen["wide"] <= 0  # what is too wide scrolls by itself
        assert seen["svgs"] >= 1
        page_is = seen["page"]
        assert luminance(page_is) < 0.1 if dark else luminance(page_is) > 0.9
        for colour in seen["colours"]:
            if colour != rgb(COLOURS["on"][dark]):  # stands upon bars, not upon the page
                assert contrast(colour, page_is) >= 4.5, (name, colour)


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


def test_the_page_loads_nothing_runs_nothing_and_says_nothing_to_the_console(tmp_path: Path) -> None:
    for name, path in pages(tmp_path).items():
        done = browse(tmp_path, path, "--dump-dom")
        assert "CONSOLE" not in done.stderr, done.stderr
        assert requested(tmp_path) == set()
        # What hostile names hold is text: no element, no title, no character that turns the line around.
        assert "<script" not in done.stdout.lower()
        assert "<title>Job 7</title>" in done.stdout
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x1b]", done.stdout), name
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;\\u202e" in done.stdout
    # A page that does load and say something is seen to.
    there = "http://127.0.0.1:9/x"
    broken = tmp_path / "broken.html"
    broken.write_text(
        path.read_text().replace("</body>", f"<script>alert(1)</script><img src='{there}'></body>")
    )
    assert "CONSOLE" in browse(tmp_path, broken, "--dump-dom").stderr
    assert requested(tmp_path) == set()  # the page's own rule forbids it
    broken.write_text(re.sub("<meta http-equiv[^>]*>", "", broken.read_text()).replace("alert", "String"))
    browse(tmp_path, broken, "--dump-dom")
    assert requested(tmp_path) == {there}


def requested(tmp_path: Path) -> set[str]:
    """What the browser asked the network for while it had the page, by its own log."""
    log = json.loads((tmp_path / "net.json").read_text())
    urls = {event.get("params", {}).get("url", "") for event in log["events"]}
    return {url for url in urls if url and not url.startswith(("data:", "chrome"))}


def test_the_page_is_dark_on_a_dark_screen_and_light_on_paper(tmp_path: Path) -> None:
    path = pages(tmp_path)["many"]
    for dark in (False, True):
        shot = tmp_path / "shot.png"
        browse(
            tmp_path, path, f"--blink-settings=preferredColorScheme={int(not dark)}", f"--screenshot={shot}"
        )
        assert first_pixel(shot.read_bytes()) == rgb(COLOURS["page"][dark])
    paper = tmp_path / "paper.pdf"
    browse(
        tmp_path,
        path,
        "--blink-settings=preferredColorScheme=0",
        "--no-pdf-header-footer",
        f"--print-to-pdf={paper}",
    )
    content = paper.read_bytes()
    assert content.startswith(b"%PDF-")
    assert 2 <= len(re.findall(rb"/Type /Page\b", content)) <= 8
    drawn = b"".join(unpacked(content))
    fills = {tuple(round(float(part) * 255) for part in found) for found in FILL.findall(drawn)}
    wanted = {
        name: tuple(int(COLOURS[name][0][at : at + 2], 16) for at in (1, 3, 5))
        for name in ("ink", "mount", "stage")
    }
    assert set(wanted.values()) <= fills
    assert not {tuple(int(pair[1][at : at + 2], 16) for at in (1, 3, 5)) for pair in COLOURS.values()} & fills


FILL = re.compile(rb"([\d.]+) ([\d.]+) ([\d.]+) rg\b")


def unpacked(content: bytes) -> Iterator[bytes]:
    """The streams of a PDF that can be inflated."""
    for found in re.finditer(rb"stream\r?\n(.*?)endstream", content, re.DOTALL):
        with suppress(zlib.error):
            yield zlib.decompress(found[1])


def first_pixel(png: bytes) -> str:
    """The colour at the top left: in a PNG's first line, whatever its filter, the first pixel stands as it is."""
    data, at = b"", 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += 12 + size
    return f"rgb({', '.join(str(value) for value in zlib.decompress(data)[1:4])})"
