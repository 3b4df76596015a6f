"""A report as one page of HTML: it loads nothing, runs nothing, and looks right in light, in dark and on paper.

Pure. Whatever comes out of the report is escaped here, once, by `_e`; colours are named in `COLOURS` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from beeond_ctl.report import OUTCOMES, show_seconds, show_time, wiped
from beeond_ctl.units import format_entries, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from beeond_ctl.report import Act, Fault, Leg, Receipt, Report, Step, Transfer

COLOURS: Final = {
    # name: (in light, in dark)
    "page": ("#ffffff", "#15181c"),
    "panel": ("#f5f7f9", "#1d2127"),
    "ink": ("#1b1f24", "#e7eaee"),
    "soft": ("#55606b", "#a3adb8"),
    "line": ("#d3d9df", "#343b44"),
    "wait": ("#dde2e7", "#363e48"),
    "on": ("#ffffff", "#101215"),
    "bad": ("#b3261e", "#ff8a80"),
    "good": ("#1d6b34", "#7ed491"),
    "prepare": ("#2563c9", "#82b1ff"),
    "start": ("#0b7570", "#54c7bb"),
    "mount": ("#7446b8", "#c5a3ff"),
    "stage": ("#a84a08", "#f2a663"),
    "stop": ("#a82f68", "#f295bd"),
    "wipe": ("#43701b", "#a3d375"),
    "other": ("#5c6670", "#b0bac4"),
}
"""Text on `page` and `panel`, and `on` upon each colour of a step, can be read (WCAG AA); a test holds that."""

KINDS: Final = {
    "preparing": "prepare", "destinations": "prepare", "starting late": "wait", "did not come": "bad",
    "starting": "start", "starting the last": "start", "registering": "start", "arranging": "start",
    "becoming usable": "start", "becoming whole": "start",
    "mounting": "mount", "probe": "mount", "whole": "mount", "syncing": "stage",
    "stage-in": "stage", "stage-out": "stage",
    "unmounting": "stop", "stopping": "stop", "roll-back": "stop", "wiping": "wipe",
}  # fmt: skip
"""Colours of steps."""
_LEGEND: Final = (
    ("prepare", "prepare targets"), ("start", "start servers"), ("mount", "mount and probe"), ("stage", "copy"),
    ("stop", "unmount and stop"), ("wipe", "wipe"), ("other", "other"), ("bad", "did not come"),
    ("wait", "wait for others, or not started"),
)  # fmt: skip

LANES: Final = 64
"""More nodes are not drawn: those that were waited for come first, then those with faults."""
_LISTED: Final = 12
"""More wipe receipts are not listed one by one."""
_WIDTH: Final = 1000.0
_CHAR: Final = 7.3
"""Units that one character of a label takes, at the most."""
_LABEL: Final = 28
"""Characters of a node's name that are shown in a picture."""
_SHORTENED: Final = 0.3
"""Copying that takes more than half of the time is drawn as this much of the timeline."""

_STYLE: Final = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 .25rem }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; overflow-wrap: anywhere }
p { margin: .35rem 0; overflow-wrap: anywhere }
.soft { color: var(--soft) }
.good { color: var(--good); font-weight: 600 }
.bad { color: var(--bad); font-weight: 600 }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .6rem; margin: 1.25rem 0 0 }
dl div { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .55rem .75rem }
dt { color: var(--soft); font-size: .85rem }
dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums }
dd small { display: block; font-size: .8rem; font-weight: 400; color: var(--soft) }
.wide { overflow-x: auto }
.wide > svg { display: block; width: 100%; min-width: 44rem; height: auto }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums }
th { text-align: left; color: var(--soft); font-weight: 600; white-space: nowrap }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td { overflow-wrap: anywhere }
td.k { white-space: nowrap }
th.n, td.n { text-align: right; white-space: nowrap; padding-right: 1.75rem }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .75rem 0 .25rem; font-size: .85rem; padding: 0 }
.legend li { list-style: none; display: flex; align-items: center; gap: .4rem }
.legend i { width: .85rem; height: .85rem; border-radius: 2px }
svg text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: var(--ink) }
svg .small { font-size: 11px; fill: var(--soft) }
svg .on { fill: var(--on); font-size: 11px }
svg .onwait { fill: var(--ink); font-size: 11px }
svg .grid { stroke: var(--line); stroke-width: 1 }
svg .meet { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; opacity: .7 }
svg .area { fill: var(--stage); opacity: .3 }
svg .curve { fill: none; stroke: var(--stage); stroke-width: 1.75; stroke-linejoin: round }
svg .mean { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 5 4 }
svg .crossed { fill: none; stroke: var(--bad); stroke-width: 2 }
footer { margin-top: 2.5rem; font-size: .85rem; color: var(--soft) }
@media print {
  :root { color-scheme: light; LIGHT }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
  body { font-size: 10pt }
  main { max-width: none; padding: 0 }
  h2, h2 + p, h3, h3 + p, .legend { break-after: avoid }
  table { font-size: 8.5pt }
  svg, tr, dl div, .legend { break-inside: avoid }
  .wide { overflow: visible }
  .wide > svg { min-width: 0 }
  @page { margin: 14mm }
}
"""


def page(report: Report) -> str:
    """The whole page."""
    title = f"Job {report.job}"
    parts = [
        _head(report, title),
        _tiles(report),
        *(_act(act, report) for act in report.acts),
        _transfers(report.transfers),
        _faults(report.faults),
        _receipts(report.receipts),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{_e(title)}</title>\n<style>{style()}</style>\n</head>\n'
        f"<body><main>\n{''.join(parts)}"
        "<footer>Made by beeond-ctl report. Hover over a bar for what it is.</footer>\n</main></body>\n</html>\n"
    )


def style() -> str:
    """The style sheet, with its colours."""
    light, dark = (
        "; ".join(f"--{name}: {pair[number]}" for name, pair in COLOURS.items()) for number in (0, 1)
    )
    fills = "".join(
        f".f-{name} {{ fill: var(--{name}); background: var(--{name}) }}\n" for name, _ in _LEGEND
    )
    return _STYLE.replace("LIGHT", light).replace("DARK", dark) + fills


def _e(text: object) -> str:
    return escape(str(text), quote=True)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _head(report: Report, title: str) -> str:
    good = report.outcome in ("clean", "running")
    facts = [report.user, _number(len(report.nodes), "node"), report.backend or "no backend"]
    if report.acts:
        facts.append(show_time(report.acts[0].begin))
    lines = [f'<h1>{_e(title)}</h1>\n<p class="soft">{_e(" · ".join(facts))}</p>\n']
    lines.append(f'<p class="{"good" if good else "bad"}">{_e(_upper(OUTCOMES[report.outcome]))}</p>\n')
    why = next((fault for fault in report.faults if fault.what in ("failed", "gave up")), None)
    if why:
        lines.append(
            f'<p><span class="bad">No file system</span>: {_e(_names(why.nodes))}: {_e(why.text)}</p>\n'
        )
    if report.silent:
        lines.append(f'<p class="bad">Nothing is known of {_e(_names(report.silent))}</p>\n')
    for node, off in report.clocks.items():
        way = "ahead of" if off > 0 else "behind"
        lines.append(
            f"<p>The clock of {_e(node)} is {abs(off):.1f} s {way} the others; its times are put right.</p>\n"
        )
    return "".join(lines)


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


def _tiles(report: Report) -> str:
    tiles = []
    for act in report.acts:
        copied = sum(leg.step_s for leg in act.legs if leg.step in ("stage-in", "stage-out"))
        took = show_seconds(max(0.0, act.end - act.begin - copied))
        tiles.append((act.name, took, "without copying" if copied else "failed" if act.failed else ""))
    for direction, name in (("in", "stage-in"), ("out", "stage-out")):
        found = [item for item in report.transfers if item.direction == direction]
        if found:
            size, seconds = sum(item.bytes for item in found), sum(item.seconds for item in found)
            rate = f"{format_size(int(size / seconds))}/s" if seconds else ""
            entries = sum(item.copied for item in found)
            tiles.append(
                (name, format_size(size), f"{format_entries(entries)}, {show_seconds(seconds)}, {rate}")
            )
    if report.receipts:
        size = sum(item.bytes for item in report.receipts)
        tiles.append(
            ("wiped", format_size(size), f"{_number(len(report.receipts), 'target')}, seen to be gone")
        )
    inner = "".join(
        f"<div><dt>{_e(_upper(name))}</dt><dd>{_e(value)}<small>{_e(more)}</small></dd></div>\n"
        for name, value, more in tiles
    )
    return f"<dl>\n{inner}</dl>\n"


# --- where the time went ----------------------------------------------------------------------------------


def _act(act: Act, report: Report) -> str:
    failed = ' <span class="bad">failed</span>' if act.failed else ""
    rows = "".join(_leg_row(leg, many=len(act.lanes) > 1) for leg in act.legs)
    drawn = _drawn(act, report)
    note = ""
    if len(drawn) < len(act.lanes):
        rest = len(act.lanes) - len(drawn)
        note = f'<p class="soft">{rest} other nodes are not drawn; none of them was waited for.</p>\n'
    return (
        f"<h2>{_e(_upper(act.name))}: {_e(show_seconds(act.end - act.begin))}{failed}</h2>\n"
        f'<p class="soft">From {_e(show_time(act.begin))}. Dotted lines: where the nodes met.</p>\n'
        f"{_legend(act)}"
        f'<div class="wide">{_timeline(act, drawn)}</div>\n{note}'
        '<div class="wide"><table>\n<thead><tr><th>Until</th><th class="n">Took</th><th>Who came last</th>'
        '<th class="n">After most</th><th>What it did</th><th class="n">For</th></tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )


def _leg_row(leg: Leg, *, many: bool) -> str:
    late = show_seconds(leg.late_s) if many and leg.late_s else ""
    return (
        f'<tr><td class="k">{_e(leg.until)}</td><td class="n">{_e(show_seconds(leg.seconds))}</td>'
        f'<td>{_e(leg.last)}</td><td class="n">{_e(late)}</td><td class="k">{_e(leg.step)}</td>'
        f'<td class="n">{_e(show_seconds(leg.step_s)) if leg.step_s else ""}</td></tr>\n'
    )


def _drawn(act: Act, report: Report) -> list[str]:
    """The nodes that are drawn, in the order of the job."""
    if len(act.lanes) <= LANES:
        return list(act.lanes)
    slow = {leg.last: leg.late_s for leg in sorted(act.legs, key=lambda leg: leg.late_s)}
    faulty = {node for fault in report.faults for node in fault.nodes[:LANES]}
    order = sorted(act.lanes, key=lambda node: (node not in slow, -slow.get(node, 0.0), node not in faulty))
    chosen = set(order[:LANES])
    return [node for node in act.lanes if node in chosen]


def _legend(act: Act) -> str:
    used = {_kind(step) for steps in act.lanes.values() for step in steps} | {
        _of(leg.step) for leg in act.legs
    }
    items = "".join(f'<li><i class="f-{kind}"></i>{_e(text)}</li>' for kind, text in _LEGEND if kind in used)
    return f'<ul class="legend">{items}</ul>\n'


def _kind(step: Step) -> str:
    return "wait" if step.waits else _of(step.name)


def _of(name: str) -> str:
    return KINDS.get(name, "other") if name else "wait"


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where times are drawn. Copying that would fill the picture is drawn shorter: `pieces` are begin, end (seconds
    from the start), left, right, and whether the piece is a shortened one.
    """

    pieces: tuple[tuple[float, float, float, float, bool], ...]

    def at(self, t: float) -> float:
        for begin, end, left, right, _ in self.pieces:
            if t <= end:
                return left + (max(t, begin) - begin) / max(end - begin, 1e-9) * (right - left)
        return self.pieces[-1][3]


def _axis(act: Act, left: float, right: float) -> _Axis:
    span = max(act.end - act.begin, 1e-3)
    long = [
        (leg.begin - act.begin, leg.begin - act.begin + leg.seconds)
        for leg in act.legs
        if leg.step in ("stage-in", "stage-out") and leg.seconds > span / 2
    ]
    rest = span - sum(end - begin for begin, end in long)
    if not long or rest <= 0:
        return _Axis(((0.0, span, left, right, False),))
    scale = (right - left) * (1 - _SHORTENED) / rest
    narrow = (right - left) * _SHORTENED / sum(end - begin for begin, end in long)
    pieces = []
    since, x = 0.0, left
    for begin, end in [*long, (span, span)]:
        for until, factor, short in ((begin, scale, False), (end, narrow, True)):
            if until > since:
                pieces.append((since, until, x, x + (until - since) * factor, short))
                x += (until - since) * factor
                since = until
    return _Axis(tuple(pieces))


def _timeline(act: Act, nodes: Sequence[str]) -> str:
    """One lane for each node, and above them who was waited for."""
    labels = _labels(act.lanes)
    gutter = 14 + _CHAR * max([len("waited for"), *(len(labels[node]) for node in nodes)])
    axis = _axis(act, gutter, _WIDTH - 12)

    def at(t: float) -> float:
        return axis.at(t - act.begin)

    high = 20 if len(nodes) <= 16 else 15
    bar = high - 5
    top = 34.0
    bottom = top + 8 + high * len(nodes)
    out = [f'<text x="{gutter - 8:.1f}" y="{top - 14:.1f}" text-anchor="end" class="small">waited for</text>']
    for leg in act.legs:
        out.append(
            _leg_bar(
                leg, labels.get(leg.last, leg.last), at(leg.begin), at(leg.begin + leg.seconds), top - 28
            )
        )
    out += _axis_marks(axis, top, bottom)
    for row, node in enumerate(nodes):
        y = top + 8 + row * high
        out.append(_label(node, labels[node], gutter - 8, y + bar - 3))
        for step in sorted(act.lanes[node], key=lambda step: (step.begin, -step.seconds)):
            out.append(_bar(step, at(step.begin), at(step.begin + step.seconds), y, bar))
    for leg in act.legs[:-1]:
        x = at(leg.begin + leg.seconds)
        out.append(f'<line class="meet" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6:.1f}" y2="{bottom:.1f}"/>')
    return _svg(bottom + 26, f"Timeline of {act.name}: a lane for each of {len(nodes)} nodes", out)


def _axis_marks(axis: _Axis, top: float, bottom: float) -> Iterable[str]:
    """Lines at round times, with labels where there is room; in shortened pieces only how long they are."""
    shown = sum(end - begin for begin, end, *_, short in axis.pieces if not short)
    free = 0.0
    for begin, end, left, right, short in axis.pieces:
        if short:
            label = f"{show_seconds(end - begin)}, drawn shorter"
            x = (left + right) / 2
            yield f'<text class="small" x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{label}</text>'
            free = x + _CHAR * len(label) / 2
            continue
        for tick, label in _ticks(begin, end, shown):
            x = axis.at(tick)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom + 4:.1f}"/>'
            if x - _CHAR * len(label) / 2 > free and x + _CHAR * len(label) / 2 < _WIDTH:
                yield f'<text class="small" x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{label}</text>'
                free = x + _CHAR * len(label) / 2 + 6


def _leg_bar(leg: Leg, last: str, left: float, right: float, y: float) -> str:
    kind = _of(leg.step)
    late = f", {show_seconds(leg.late_s)} after most" if leg.late_s else ""
    told = f"{show_seconds(leg.seconds)} until {leg.until}; last {leg.last}{late}"
    told += f": {leg.step} {show_seconds(leg.step_s) if leg.step_s else ''}" if leg.step else ""
    width = max(right - left - 0.75, 0.75)
    label = ""
    if width > _CHAR * len(last) + 6:
        colour = "onwait" if kind == "wait" else "on"
        label = (
            f'<text class="{colour}" x="{left + width / 2:.1f}" y="{y + 14:.1f}" text-anchor="middle">'
            f"{_e(last)}</text>"
        )
    return (
        f'<g><title>{_e(told)}</title><rect class="f-{kind}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="20" rx="2"/>{label}</g>'
    )


def _bar(step: Step, left: float, right: float, y: float, high: float) -> str:
    name = step.name.replace("meeting ", "waiting until ", 1) if step.waits else step.name
    told = f"{name}: {show_seconds(step.seconds)}" + (f"; failed: {step.failed}" if step.failed else "")
    width = max(right - left, 0.75)
    box = f'x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{high:.1f}"'
    crossed = ""
    if step.failed:
        x = left + width
        crossed = (
            f'<path class="crossed" d="M{x - 5:.1f} {y + 2:.1f}l{high - 5:.1f} {high - 4:.1f}m0 {4 - high:.1f}'
            f'l{5 - high:.1f} {high - 4:.1f}"/>'
        )
    return f'<g><title>{_e(told)}</title><rect class="f-{_kind(step)}" {box}/>{crossed}</g>'


def _labels(nodes: Iterable[str]) -> dict[str, str]:
    """What nodes are called in a picture: without a domain that all have, and not too long."""
    found = list(nodes)
    domains = {node.partition(".")[2] for node in found}
    short = {node: node.partition(".")[0] if len(domains) == 1 else node for node in found}
    return {
        node: name if len(name) <= _LABEL else f"{name[: _LABEL // 2 - 1]}…{name[-_LABEL // 2 :]}"
        for node, name in short.items()
    }


def _label(node: str, shown: str, x: float, y: float) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="end"><title>{_e(node)}</title>{_e(shown)}</text>'


def _svg(height: float, what: str, parts: Iterable[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-label="{_e(what)}">\n{inner}\n</svg>'
    )


def _ticks(begin: float, end: float, span: float) -> list[tuple[float, str]]:
    """Round numbers from `begin` to `end` seconds, with how they are written; about eight of them in `span`."""
    step = _round_step(span, 8, time=True)
    unit, size = "s", 1.0
    if end < 1:
        unit, size = "ms", 1e-3
    elif step >= 60:
        unit, size = ("min", 60.0) if end < 36000 else ("h", 3600.0)
    numbers = range(math.ceil(begin / step - 1e-9), math.floor(end / step + 1e-9) + 1)
    return [(number * step, f"{number * step / size:.7g} {unit}") for number in numbers]


def _round_step(span: float, most: int, *, time: bool = False) -> float:
    if time:
        for step in (60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400):
            if span >= 600 and span / step <= most:
                return float(step)
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))


# --- transfers --------------------------------------------------------------------------------------------


def _transfers(transfers: Sequence[Transfer]) -> str:
    if not transfers:
        return ""
    return "<h2>Transfers</h2>\n" + "".join(_transfer(item) for item in transfers)


def _transfer(item: Transfer) -> str:
    name = "Stage-in" if item.direction == "in" else "Stage-out"
    mark = "good" if item.result in ("proved", "nothing there") else "bad"
    facts = [
        format_entries(item.copied), format_size(item.bytes), show_seconds(item.seconds),
        f"{format_size(int(item.rate))}/s",
    ]  # fmt: skip
    if item.skipped:
        facts.append(f"{item.skipped} were there already")
    if item.failed:
        facts.append(f"{item.failed} failed")
    notes = "".join(f"<p>{_e(note)}</p>\n" for note in item.notes)
    shares = ""
    if len(item.by_node) > 1:
        most, least = max(item.by_node.values()), min(item.by_node.values())
        shares = (
            f'<p class="soft">Copied by {len(item.by_node)} nodes: {_e(format_size(least))} to '
            f"{_e(format_size(most))} each</p>\n"
        )
    plot = f'<div class="wide">{_throughput(item)}</div>\n' if item.samples else ""
    return (
        f"<h3>{name}: {_e(item.source)} → {_e(item.destination)}</h3>\n"
        f'<p>{_e(", ".join(facts))}. <span class="{mark}">{_e(_upper(item.result))}</span></p>\n'
        f"{shares}{notes}{plot}"
    )


def _throughput(item: Transfer) -> str:
    """Bytes per second between two samples, over the time of the transfer."""
    span = max(item.seconds, 1e-3)
    points = [
        (0.0, 0),
        *((sample.t - item.begin, sample.bytes) for sample in item.samples),
        (span, item.bytes),
    ]
    rates: list[tuple[float, float, float]] = []
    for (since, before), (until, after) in pairwise(points):
        if until > since:
            rates.append((max(since, 0.0), min(until, span), max(0, after - before) / (until - since)))
    peak = max([rate for *_, rate in rates] or [1.0]) or 1.0
    step = _byte_step(peak)
    full = math.ceil(peak / step) * step
    left, right, top, bottom = 92.0, _WIDTH - 24, 12.0, 152.0

    def x(t: float) -> float:
        return left + min(t, span) / span * (right - left)

    def y(rate: float) -> float:
        return bottom - rate / full * (bottom - top)

    out = []
    for number in range(round(full / step) + 1):
        rate = number * step
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(rate):.1f}" y2="{y(rate):.1f}"/>')
        label = f"{format_size(int(rate))}/s" if rate else "0"
        out.append(
            f'<text class="small" x="{left - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for tick, label in _ticks(0.0, span, span):
        out.append(
            f'<text class="small" x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
        )
    line = " ".join(f"{x(a):.1f},{y(rate):.1f} {x(b):.1f},{y(rate):.1f}" for a, b, rate in rates)
    out.append(f'<polygon class="area" points="{left},{bottom} {line} {right},{bottom}"/>')
    out.append(f'<polyline class="curve" points="{line}"/>')
    mean = y(min(item.rate, full))
    out.append(
        f'<line class="mean" x1="{left}" x2="{right}" y1="{mean:.1f}" y2="{mean:.1f}"><title>mean</title></line>'
    )
    out.append(
        f'<text x="{right - 4}" y="{mean - 5 if mean > top + 14 else mean + 15:.1f}" text-anchor="end">mean</text>'
    )
    return _svg(bottom + 26, "Throughput over time", out)


def _byte_step(peak: float) -> float:
    """A round number of bytes, so that at most five of it reach `peak`."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(peak, 1), 1024)))
    for factor in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1024):
        if peak / (unit * factor) <= 5:
            return unit * factor
    return unit * 1024


# --- faults and receipts ----------------------------------------------------------------------------------


def _faults(faults: Sequence[Fault]) -> str:
    if not faults:
        return ""
    rows = "".join(
        f"<tr><td>{_e(show_time(item.t))}</td><td>{_e(_names(item.nodes))}</td><td>{_e(item.what)}</td>"
        f"<td>{_e(item.text)}</td></tr>\n"
        for item in faults
    )
    return (
        '<h2>Faults</h2>\n<div class="wide"><table>\n<thead><tr><th>When</th><th>Nodes</th><th>What</th>'
        f"<th>Said</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )


def _receipts(receipts: Sequence[Receipt]) -> str:
    if not receipts:
        return ""
    alike: dict[tuple[str, ...], list[Receipt]] = {}
    for item in receipts:
        own = (item.node,) if len(receipts) <= _LISTED else ()
        alike.setdefault((item.home, item.method, item.verified, *own), []).append(item)
    return (
        f"<h2>Wipe receipts</h2>\n<p>{_e(_upper(wiped(receipts)))}</p>\n"
        '<div class="wide"><table>\n<thead><tr><th>Node</th><th>Target</th><th>Method</th><th class="n">Entries</th>'
        '<th class="n">Freed</th><th class="n">Took</th><th>Seen</th></tr></thead>\n'
        f"<tbody>\n{''.join(_receipt_row(same) for same in alike.values())}</tbody></table></div>\n"
    )


def _receipt_row(same: Sequence[Receipt]) -> str:
    """Targets alike, of many nodes."""
    first, seconds = same[0], max(item.seconds for item in same)
    nodes = _names([item.node for item in same]) if len(same) <= 4 else f"{len(same)} targets"
    return (
        f"<tr><td>{_e(nodes)}</td><td>{_e(first.home)}</td>"
        f'<td class="k">{_e(first.method)}</td><td class="n">{sum(item.files for item in same)}</td>'
        f'<td class="n">{_e(format_size(sum(item.bytes for item in same)))}</td>'
        f'<td class="n">{_e(show_seconds(seconds))}</td><td>{_e(first.verified)}</td></tr>\n'
    )
