"""The report: one HTML file with inline plots, without scripts and without any request. Pure.

It is for screens of any width, light and dark, keyboards, screen readers and print: landmarks, headings in order,
captions and header cells, a text beside each plot, and no meaning in colour alone.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import compare, plots, reference, stats, workload
from .compare import Change
from .peer import Agreement
from .plots import Line, number
from .results import Result
from .stats import Run, Spread

# (background, text, quiet text, rules, panel, link, good, bad): each text at least 4.5:1 on background and panel.
LIGHT = ("#ffffff", "#1f2937", "#4b5563", "#d1d5db", "#f3f4f6", "#1d4ed8", "#166534", "#b91c1c")
DARK = ("#111827", "#e5e7eb", "#a3adba", "#374151", "#1f2937", "#93c5fd", "#86efac", "#fca5a5")
_NAMES = ("bg", "ink", "quiet", "rule", "panel", "link", "good", "bad")

_LAYOUT = """
*{box-sizing:border-box}
html{color-scheme:light dark}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,"DejaVu Sans",Verdana,Arial,sans-serif}
header,main,footer{max-width:1180px;margin:0 auto;padding:0 20px}
header{padding-top:24px}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 4px}
h2{font-size:1.25rem;margin:36px 0 8px;padding-top:8px;border-top:1px solid var(--rule)}
h3{font-size:1.05rem;margin:20px 0 6px}
p{margin:6px 0;max-width:75ch}
.quiet,caption,figcaption{color:var(--quiet)}
.tag{display:inline-block;border:1px solid currentColor;border-radius:12px;padding:0 10px;font-size:.85rem}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
a{color:var(--link)}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-999px}.skip:focus{left:20px;top:8px;background:var(--panel);padding:4px 12px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:20px}
figure{margin:0;background:var(--panel);border-radius:10px;padding:14px}
figure svg{display:block;width:100%;height:auto}
figcaption{font-size:.9rem}
figure h3{margin:0 0 4px}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:4px 22px;padding:0;margin:8px 0 14px}
.key li{display:flex;align-items:center;gap:8px}
.scroll{overflow-x:auto;border:1px solid var(--rule);border-radius:8px;margin:10px 0}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:8px 12px;font-size:.92rem}
caption span{display:inline-block;max-width:min(75ch,calc(100vw - 68px));position:sticky;left:12px}
th,td{padding:5px 12px;text-align:right;border-top:1px solid var(--rule);white-space:nowrap}
thead th{background:var(--panel);border-top:0;vertical-align:bottom}
th[scope=row],td.words,thead th.words{text-align:left}
td.wrap{white-space:normal;min-width:16rem;text-align:left;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:8px 0}
dt{color:var(--quiet)}dd{margin:0;overflow-wrap:anywhere}
summary{cursor:pointer;padding:6px 0}
pre{background:var(--panel);padding:12px;border-radius:8px;overflow:auto;max-height:28rem;font-size:.82rem}
footer{padding:28px 20px 40px;color:var(--quiet);font-size:.9rem}
@media(max-width:560px){dl{grid-template-columns:1fr}dt{margin-top:6px}h1{font-size:1.4rem}}
@media print{.scroll{overflow:visible}figure{break-inside:avoid}}
"""


def page(
    shown: Sequence[Result],
    changes: Sequence[Change] = (),
    baseline: str = "",
    incomparable: str = "",
    agreement: Sequence[Agreement] = (),
    verdict: str = "",
) -> str:
    """Return the report on the first result, the others beside it, or on all alike with a ``verdict`` of ab.py."""
    main = shown[0]
    title = "Topologies side by side" if verdict else f"Benchmark of {main.label}"
    names = _labels(shown)
    parts = [
        _head(title),
        f'<header><h1>{escape(title)}</h1><p>{_kind(main)} <span class="quiet">{escape(main.when)}, '
        f"{escape(workload.describe(main.workload, _rate(main)))}</span></p>{_verdicts(main, changes)}</header>",
        '<main id="main">',
        _verdict_section(verdict),
        _about(shown, names),
        _plots(shown, names),
        _table(shown, names),
        _comparison(changes, baseline, incomparable),
        _quality(main),
        _peer(agreement),
        _client(shown, names),
        _reference(main),
        _made_by(main),
        "</main>",
        "<footer><p>tok/s are output tokens over the whole time of a measurement; TTFT is until the first token; TPOT "
        "is (last - first token) / (tokens - 1) of a request; ITL is between token events. Tokens are counted by the "
        "server's usage. Medians are over repeats, bars behind marks their range.</p></footer>",
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _head(title: str) -> str:
    def theme(colours: Sequence[str]) -> str:
        return ":root{" + ";".join(f"--{name}:{colour}" for name, colour in zip(_NAMES, colours)) + "}"

    css = theme(LIGHT) + "@media(prefers-color-scheme:dark){" + theme(DARK) + "}" + _LAYOUT + plots.style()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head><body>"
        '<a class="skip" href="#main">Skip to the report</a>'
    )


def _labels(shown: Sequence[Result]) -> List[str]:
    """Return a name for each result: with its client where it is another, with its time where names are the same."""
    names = [item.label if item.client == shown[0].client else f"{item.label}, {item.client}" for item in shown]
    return [f"{name} ({item.when})" if names.count(name) > 1 else name for name, item in zip(names, shown)]


def _rate(result: Result) -> Optional[float]:
    return result.runs[0].rate if result.runs else None


def _kind(result: Result) -> str:
    return f'<span class="tag">{escape(result.kind)}</span>' if result.kind else ""


def _verdicts(result: Result, changes: Sequence[Change]) -> str:
    lines = []
    failed = sum(run.failed for run in result.runs)
    total = sum(run.requests for run in result.runs)
    lines.append(_verdict(not failed, f"{total - failed} of {total} requests answered"))
    checks = result.quality.get("after") or []
    if checks:
        good = sum(1 for check in checks if check["ok"])
        same = result.quality.get("same")
        words = f"{good} of {len(checks)} answers right after the load"
        words += "" if same is None else ", the same as before" if same else ", and not the same as before"
        lines.append(_verdict(good == len(checks) and same is not False, words))
    if changes:
        worse = compare.regressions(changes)
        lines.append(
            _verdict(
                not worse, f"{len(worse)} figures worse than before by more than noise" if worse else "no regression"
            )
        )
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def _verdict(good: bool, words: str) -> str:
    return f'<span class="{"good" if good else "bad"}">{"OK" if good else "FAILED"}</span> {escape(words)}'


def _verdict_section(verdict: str) -> str:
    if not verdict:
        return ""
    return "<h2>Which wins</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in verdict.splitlines()) + "</ul>"


def _about(shown: Sequence[Result], names: Sequence[str]) -> str:
    """What was measured, once for each different thing."""
    found: Dict[str, str] = {}
    for name, result in zip(names, shown):
        found.setdefault(_facts_of(result), name)
    parts = ["<h2>What was measured</h2>"]
    for text, name in found.items():
        parts.append(f"<h3>{escape(name)}</h3>{text}" if len(found) > 1 else text)
    return "".join(parts)


def _facts_of(result: Result) -> str:
    pairs = [
        ("Topology", result.topology),
        ("Machine", result.machine),
        ("Release", result.release),
        ("Model", result.model),
        ("Endpoint", "/v1/chat/completions" if result.chat else "/v1/completions"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))),
    ]
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs if text)
    return f"<dl>{rows}</dl>" + "".join(f"<p>Note: {escape(note)}</p>" for note in result.notes)


def _series(shown: Sequence[Result], names: Sequence[str], steps: Sequence[str], metric: str) -> List[Line]:
    of = stats.METRICS[metric]
    lines = []
    for name, result in zip(names, shown):
        values: List[List[float]] = []
        for step in steps:
            values.append([v for v in map(of, stats.of_step(result.runs, step)) if v is not None])
        lines.append(
            Line(
                name,
                [stats.median(found) if found else None for found in values],
                [min(found) if found else None for found in values],
                [max(found) if found else None for found in values],
            )
        )
    return lines


def _reference_series(steps: Sequence[str], metric: str) -> List[Line]:
    of = {"output_tok_s": "output_tok_s", "ttft_p50_ms": "ttft_ms", "tpot_p50_ms": "tpot_ms"}.get(metric)
    lines = []
    for topology in ("PD", "TP4"):
        rows = {
            f"C={row.concurrency}": row for row in reference.ROWS if (row.state, row.topology) == ("final", topology)
        }
        values = [getattr(rows[step], of) if of and step in rows else None for step in steps]
        lines.append(Line(f"reference {topology}", values))
    return lines


def _plots(shown: Sequence[Result], names: Sequence[str]) -> str:
    steps = _sorted_steps([step for result in shown for step in stats.steps(result.runs)])
    # Beside a simulated service, or another model, the reference's would only mislead; its table is below.
    beside = shown[0].kind == "GPU" and _of_reference(shown[0])
    drawn = []
    for metric, title, unit, words in (
        ("output_tok_s", "Output tokens a second", "tok/s", "More is better."),
        ("ttft_p50_ms", "Time to first token, median", "ms", "Less is better."),
        ("tpot_p50_ms", "Time per output token, median", "ms", "Less is better."),
        ("itl_p99_ms", "Time between tokens, p99", "ms", "Less is better: what a reader feels as a pause."),
    ):
        series = _series(shown, names, steps, metric) + (_reference_series(steps, metric) if beside else [])
        axis = "requests at once (C) or a second (/s)"
        drawing = plots.lines(title, steps, series, unit, axis, alone=False)
        drawn.append(
            f"<figure><h3>{escape(title)}, {unit}</h3>{drawing}<figcaption>{escape(words)}</figcaption></figure>"
        )
    legend = plots.legend(
        [Line(name, []) for name in names] + ([Line("reference PD", []), Line("reference TP4", [])] if beside else [])
    )
    return f'<h2>Plots</h2>{legend}<div class="plots">{"".join(drawn)}</div>'


def _sorted_steps(names: Sequence[str]) -> List[str]:
    def key(name: str) -> Tuple[bool, float]:
        return name.endswith("/s"), float(name[:-2] if name.endswith("/s") else name[2:])

    return sorted(set(names), key=key)


def _merged(runs: Sequence[Run]) -> Dict[str, float]:
    """Return the medians over the repeats of one step."""

    def middle(values: Sequence[float]) -> float:
        return stats.median(list(values))

    found = {
        "tok_s": middle([run.output_tok_s for run in runs]),
        "total": middle([run.total_tok_s for run in runs]),
        "requests_s": middle([run.requests_s for run in runs]),
    }
    for name in ("ttft", "tpot", "itl", "e2e"):
        spreads: List[Optional[Spread]] = [getattr(run, f"{name}_ms") for run in runs]
        for part in ("p50", "p95", "p99"):
            known = [getattr(spread, part) for spread in spreads if spread is not None]
            found[f"{name} {part}"] = middle(known) if known else float("nan")
    return found


def _table(shown: Sequence[Result], names: Sequence[str]) -> str:
    rows = []
    for step in _sorted_steps([step for result in shown for step in stats.steps(result.runs)]):
        for name, result in zip(names, shown):
            runs = stats.of_step(result.runs, step)
            if runs:
                rows.append(_row(step, name, runs))
    heads = "".join(
        f'<th scope="col">{escape(head)}</th>'
        for head in (
            *("tok/s", "in+out tok/s", "requests/s"),
            *(f"{name} {part}" for name in ("TTFT", "TPOT", "ITL") for part in ("p50", "p95", "p99")),
            *("answered", "repeats", "prompt", "answer", "cached"),
        )
    )
    return _region(
        "Figures",
        "Medians over repeats; times in ms; prompt and answer in tokens by usage, cached as a share of the prompts",
        '<thead><tr><th scope="col" class="words">step</th><th scope="col" class="words">result</th>'
        f"{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody>",
    )


def _row(step: str, name: str, runs: Sequence[Run]) -> str:
    merged = _merged(runs)
    columns = ["tok_s", "total", "requests_s"]
    columns += [f"{kind} {part}" for kind in ("ttft", "tpot", "itl") for part in ("p50", "p95", "p99")]
    cells = ["-" if merged[column] != merged[column] else number(merged[column]) for column in columns]
    done, asked = sum(run.completed for run in runs), sum(run.requests for run in runs)
    tokens = [sum(run.input_tokens for run in runs), sum(run.output_tokens for run in runs)]
    cached = [run.cached_tokens for run in runs if run.cached_tokens is not None]
    cells += [
        f"{done} of {asked}",
        str(len(runs)),
        *(number(count / done) if done else "-" for count in tokens),
        f"{sum(cached) / tokens[0]:.0%}" if cached and tokens[0] else "-",
    ]
    return (
        f'<tr><th scope="row">{escape(step)}</th><td class="words">{escape(name)}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
    )


def _region(title: str, caption: str, table: str) -> str:
    """A wide table scrolls in its own region, which the keyboard reaches."""
    return (
        f'<h2>{escape(title)}</h2><div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}, table">'
        f"<table><caption><span>{escape(caption)}</span></caption>{table}</table></div>"
    )


def _plain_table(title: str, caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table of texts; the first ``words`` columns are words, the first is the row's header."""
    head = "".join(
        f'<th scope="col"{" class=words" if index < words else ""}>{escape(text)}</th>'
        for index, text in enumerate(heads)
    )
    body = []
    for row in rows:
        cells = [f'<th scope="row">{escape(row[0])}</th>']
        cells += [
            f'<td class="{"wrap" if index < words else ""}">{escape(text)}</td>'
            if index < words
            else f"<td>{escape(text)}</td>"
            for index, text in enumerate(row)
            if index
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return _region(title, caption, f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>")


def _comparison(changes: Sequence[Change], baseline: str, incomparable: str) -> str:
    if incomparable:
        return f"<h2>Beside {escape(baseline)}</h2><p>Not compared: {escape(incomparable)}.</p>"
    if not changes:
        return ""
    rows = [
        (
            f"{item.step} {item.metric}",
            number(item.before),
            number(item.now),
            f"{item.change:+.1%}",
            f"+-{item.band:.1%}",
            str(item.repeats),
            item.verdict,
        )
        for item in changes
    ]
    return _plain_table(
        f"Beside {baseline}",
        "A change within its noise band says nothing. The band is three standard errors of the difference by the "
        "repeats of both sides, and never less than the stated floor. A regression is one of "
        + ", ".join(compare.JUDGED),
        ("figure", "before", "now", "change", "noise band", "repeats", "verdict"),
        rows,
    )


def _quality(result: Result) -> str:
    before = {check["subject"]: check for check in result.quality.get("before") or []}
    after = result.quality.get("after") or []
    if not after:
        return ""
    rows = []
    for check in after:
        old = before.get(check["subject"], {})
        rows.append(
            (
                check["subject"],
                check["wanted"],
                check["found"],
                "yes" if check["ok"] else "NO",
                "-" if not old else "yes" if old["found"] == check["found"] else "NO",
            )
        )
    return _plain_table(
        "Answers",
        "Greedy completions after the load, beside those before it: a faster wrong answer is no gain",
        ("completion", "wanted", "found", "right", "as before"),
        rows,
        words=3,
    )


def _peer(agreement: Sequence[Agreement]) -> str:
    if not agreement:
        return ""
    rows = [
        (f"{item.step} {item.metric}", number(item.ours), number(item.theirs), f"{item.difference:+.1%}")
        for item in agreement
    ]
    return _plain_table(
        "Two clients",
        "The same server and lengths by this client and by sglang.bench_serving. TTFT is left out: bench_serving waits "
        "for the first text, and writes 0.00 where a stream has none",
        ("figure", "pdstack", "bench_serving", "difference"),
        rows,
    )


def _client(shown: Sequence[Result], names: Sequence[str]) -> str:
    rows = []
    for name, result in zip(names, shown):
        for run in result.runs:
            if run.client.cpu_share:
                late = f"{run.client.late_ms:.1f}" if run.rate is not None else "-"
                rows.append(
                    (
                        f"{stats.step(run)}, repeat {run.repeat}, {name}",
                        f"{run.client.cpu_share:.0%}",
                        f"{run.client.lag_p99_ms:.1f}",
                        late,
                        f"{run.output_tok_s * 2e-5:.0%}",
                    )
                )
    if not rows:
        return ""
    return _plain_table(
        "The client itself",
        "CPU of one core that the client used, how late its event loop was (p99), how late the latest departure of an "
        "open loop was, and what the tokens should have cost at 20 us each; a client at 100% measures itself",
        ("measurement", "CPU", "lag p99, ms", "late, ms", "CPU expected"),
        rows,
    )


def _of_reference(result: Result) -> bool:
    """Return whether what was measured served the reference's model, by its name."""
    return reference.MODEL.lower() in result.model.lower()


def _reference(result: Result) -> str:
    def cell(value: Optional[float]) -> str:
        return "-" if value is None else number(value)

    rows = [
        (
            f"{row.topology}, {row.state} state",
            f"C={row.concurrency}",
            cell(row.output_tok_s),
            cell(row.tpot_ms),
            cell(row.ttft_ms),
        )
        for row in reference.ROWS
    ]
    return _plain_table(
        "The reference's table",
        reference.CAPTION
        + ("" if _of_reference(result) else f"; {result.model}, above, is another model: no comparison"),
        ("topology", "step", "tok/s", "TPOT ms", "TTFT ms"),
        rows,
    )


def _made_by(result: Result) -> str:
    parts = ["<h2>What made these figures</h2>"]
    documents: Sequence[Tuple[str, Mapping[str, Any]]] = (("Plan", result.plan), ("Facts", result.facts))
    for name, document in documents:
        if document:
            text = escape(json.dumps(document, indent=1, sort_keys=True))
            parts.append(f'<details><summary>{name}</summary><pre tabindex="0">{text}</pre></details>')
    settings = {"workload": vars(result.workload), "tokens_per_word": result.tokens_per_word, "url": result.url}
    text = escape(json.dumps(settings, indent=1))
    parts.append(f'<details><summary>Load</summary><pre tabindex="0">{text}</pre></details>')
    return "".join(parts)
