"""The report page's structure, and what is kept, compared and called a failure."""

import html.parser
import importlib.util
import itertools
import json
import pathlib
import re

import pytest
from pdstack import codec, facts
from pdstack.bench import archive, compare, page, peer, plots
from pdstack.bench.stats import step
from unit.bench.made import result, run

VOID = {"meta", "br", "img", "input", "hr", "link"}


class Tree(html.parser.HTMLParser):
    """Elements with their attributes, the text of each, and whether they nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.problems = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attrs": dict(attrs), "text": "", "inside": [item["tag"] for item in self.open]}
        self.elements.append(element)
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        if not self.open or self.open[-1]["tag"] != tag:
            self.problems.append(f"</{tag}> closes {self.open[-1]['tag'] if self.open else 'nothing'}")
        else:
            self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]


QUALITY = {
    "before": [{"subject": "17 x 23", "ok": True, "found": "391", "wanted": "391"}],
    "after": [{"subject": "17 x 23", "ok": True, "found": "391", "wanted": "391"}],
    "same": True,
}
OTHERS = [
    result([run(1, 60), run(16, 250)], label="replicas <2>"),
    result([run(1, 55)], client="bench_serving"),
]


@pytest.fixture(scope="module")
def text():
    main = result(
        [run(1, 50, repeat=1), run(1, 52, repeat=2), run(16, 300), run(64, 400)],
        quality=QUALITY,
        plan={"release": "x", "notes": ["<script>alert(1)</script>"]},
        topology="pd: 1 x prefill",
    )
    changes = compare.changes(OTHERS[0].runs, main.runs, 0.05)
    return page.page([main, *OTHERS], changes, "before.json", "", [peer.Agreement("C=1", "output_tok_s", 51.0, 50.0)])


def test_the_page_asks_nothing_of_anybody(text):
    tree = Tree(text)
    assert not tree.all("script")
    assert not tree.all("link")
    assert not tree.all("img")
    assert not tree.all("iframe")
    for element in tree.elements:
        for name, value in element["attrs"].items():
            assert name not in ("src", "srcset", "action", "poster", "data")
            assert not name.startswith("on")
            if name in ("href", "xlink:href"):
                assert value.startswith("#")
    assert not re.search(r"url\(|@import|@font-face", text)


def test_the_page_is_well_formed_and_escapes_what_it_shows(text):
    tree = Tree(text)
    assert tree.problems == []
    assert tree.open == []
    assert "<script>" not in text
    assert "replicas &lt;2&gt;" in text


def test_landmarks_headings_and_language(text):
    tree = Tree(text)
    assert tree.all("html")[0]["attrs"]["lang"] == "en"
    assert [len(tree.all(name)) for name in ("header", "main", "footer", "h1", "title")][:4] == [1, 1, 1, 1]
    levels = [int(element["tag"][1]) for element in tree.elements if re.fullmatch(r"h[1-6]", element["tag"])]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    skip = tree.all("a")[0]
    assert skip["attrs"]["href"] == "#main"
    assert tree.all("main")[0]["attrs"]["id"] == "main"


def test_tables_have_captions_and_header_cells_and_can_be_reached_by_keyboard(text):
    tree = Tree(text)
    tables = tree.all("table")
    assert len(tables) >= 5
    assert len(tree.all("caption")) == len(tables)
    assert all(cell["attrs"].get("scope") in ("col", "row") for cell in tree.all("th"))
    regions = [item for item in tree.all("div") if item["attrs"].get("role") == "region"]
    assert len(regions) == len(tables)
    assert all(item["attrs"]["tabindex"] == "0" and item["attrs"]["aria-label"] for item in regions)


def test_plots_say_their_values_in_words(text):
    tree = Tree(text)
    drawings = [item for item in tree.all("svg") if item["attrs"].get("role") == "img"]
    assert len(drawings) == 4
    assert "C=16 300 tok/s" in drawings[0]["attrs"]["aria-label"]
    assert all(item["attrs"].get("role") == "img" or item["attrs"].get("aria-hidden") for item in tree.all("svg"))
    assert len(tree.all("figcaption")) == 4


def test_the_figures_are_in_a_table_too(text):
    rows = [re.sub(r"\s+", " ", item["text"]) for item in Tree(text).all("tr")]
    assert any(row.startswith("C=1gpu1 pd") and "51" in row and "192 of 192" in row for row in rows)
    assert any("output_tok_s" in row and "better" in row for row in rows)
    assert any("17 x 23" in row and "391" in row for row in rows)
    assert any("PD, final state" in row and "385" in row for row in rows)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_have_contrast_in_light_and_dark(theme):
    background, ink, quiet, _, panel, link, good, bad = (page.LIGHT, page.DARK)[theme]
    for colour in (ink, quiet, link, good, bad):
        assert contrast(colour, background) >= 4.5, colour
        assert contrast(colour, panel) >= 4.5, colour
    for colours in plots.SERIES:
        assert contrast(colours[theme], panel) >= 4.5, colours
        assert contrast(plots.PAPER[theme], colours[theme]) >= 4.5, colours
    assert contrast(plots.MUTED[theme], panel) >= 4.5


def test_contrast_is_computed_as_wcag_does():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize(
    ("top", "end", "ticks"), [(0.97, 1.0, 5), (100, 100, 5), (531.7, 600, 3), (8.1, 10, 5), (0, 1, 4)]
)
def test_axes_end_at_round_numbers(top, end, ticks):
    found, interval = plots.nice(top)
    assert found == pytest.approx(end)
    assert found / interval == pytest.approx(ticks)


@pytest.fixture
def report(tmp_path, project_root):
    spec = importlib.util.spec_from_file_location("report", project_root / "action_plugins/pd_benchmark_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def call(runs, **more):
        defaults = {
            "host": "gpu1",
            "folder": str(tmp_path / "kept"),
            "label": "",
            "plan": {"profile": "gpu", "release": "r", "topology": {"mode": "pd"}, "instances": []},
            "facts": {
                "gpu1": {
                    "gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}],
                    "driver": codec.dump(facts.Driver("ok", "580.159.04")),
                }
            },
            "manifest": {"id": "r-1", "python": "3.12", "environments": {"engine": {"packages": {"torch": "2.11.0"}}}},
            "quality": QUALITY,
            "baseline": "",
            "beside": [],
            "noise_floor": 0.05,
            "png": False,
        }
        when = more.pop("when", "2026-11-30T10:00:00Z")
        client = more.pop("client", "pdstack")
        parts = [codec.dump(result([item], when=when, client=client)) for item in runs]
        return module.report({**defaults, "parts": parts + more.pop("parts", []), **more})

    return call


def test_a_result_is_kept_by_host_and_release_with_what_made_it(report, tmp_path):
    found = report([run(1, 50), run(16, 300)])
    assert found["failed"] is False
    assert found["result"] == str(tmp_path / "kept/gpu1/r-1/20261130T100000Z.json")
    kept = archive.read(found["result"])
    assert [step(item) for item in kept.runs] == ["C=1", "C=16"]
    assert (kept.kind, kept.machine, kept.release) == ("GPU", "gpu1: 2 x NVIDIA H200", "r-1")
    assert kept.versions == {"torch": "2.11.0", "python": "3.12", "driver": "580.159.04"}
    assert kept.quality["same"] is True
    assert (tmp_path / "kept/gpu1/r-1/20261130T100000Z.html").read_text().startswith("<!doctype html>")


def test_a_slower_run_fails_and_is_kept_all_the_same(report):
    report([run(1, 50)], when="2026-11-30T09:00:00Z")
    report([run(1, 60)], when="2026-11-30T10:00:00Z")
    found = report([run(1, 50)], when="2026-11-30T11:00:00Z", baseline="previous")
    assert found["failed"] is True
    assert "regression: C=1 output_tok_s: 60 -> 50 (-16.7%" in found["msg"]
    assert archive.read(found["result"]).when == "2026-11-30T11:00:00Z"
    assert report([run(1, 52)], when="2026-11-30T12:00:00Z", baseline="previous")["failed"] is False


def test_the_first_run_has_nothing_to_compare_with(report):
    found = report([run(1, 50)], baseline="previous")
    assert found["failed"] is False
    assert "there is none of this host" in found["msg"]


def test_wrong_or_changed_answers_fail_a_run_however_fast(report):
    wrong = [{**QUALITY["after"][0], "ok": False, "found": "390"}]
    found = report([run(1, 5000)], quality={**QUALITY, "after": wrong})
    assert found["failed"] is True
    assert "after the load, 17 x 23: found 390, wanted 391" in found["msg"]
    drifted = [{**QUALITY["after"][0], "found": "391 "}]
    assert "not those before it" in report([run(1, 50)], quality={**QUALITY, "after": drifted})["msg"]


def test_failed_requests_fail_a_run(report):
    found = report([run(1, 50, failed=3)])
    assert found["failed"] is True
    assert "3 of 96 requests failed: the stream was cut" in found["msg"]


def test_both_clients_are_set_side_by_side(report):
    theirs = codec.dump(result([run(1, 49, ttft=None)], client="bench_serving"))
    found = report([run(1, 50)], parts=[theirs])
    assert [(item["metric"], round(item["difference"], 3)) for item in found["peer"]] == [("output_tok_s", -0.02)]
    assert "bench_serving" in pathlib.Path(found["page"]).read_text()


def test_what_is_no_result_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(codec.CodecError, match="not JSON"):
        archive.read(str(path))
    path.write_text(json.dumps({**codec.dump(result()), "schema": 99}))
    with pytest.raises(codec.CodecError, match="schema 99"):
        archive.read(str(path))


def test_names_of_hosts_and_releases_cannot_leave_the_folder():
    assert archive.path_of("r", "../x", result(release="a/b")) == "r/.._x/a_b/20261130T100000Z.json"


def test_steps_of_the_variable(project_root):
    spec = importlib.util.spec_from_file_location("steps", project_root / "filter_plugins/pd_benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = {"rates": [], "concurrency": [1, 8], "repeats": 2, "client": "both"}
    assert [(item["concurrency"], item["repeat"], item["client"]) for item in module.steps(settings)][:4] == [
        (1, 1, "pdstack"),
        (1, 1, "bench_serving"),
        (8, 1, "pdstack"),
        (8, 1, "bench_serving"),
    ]
    assert module.steps({**settings, "rates": [0.5]})[0]["label"] == "0.5/s, repeat 1 of 2, pdstack"


@pytest.mark.parametrize(
    ("model", "kind", "drawn"),
    [("deepseek-ai/DeepSeek-V4-Flash", "GPU", True), ("tiny", "GPU", False), ("DeepSeek-V4-Flash", "simulated", False)],
)
def test_the_reference_is_drawn_beside_its_own_model_on_gpus_only(model, kind, drawn):
    text = page.page([result(model=model, kind=kind)])
    assert ("reference PD" in text) is drawn
    assert ("is another model: no comparison" in text) is (model == "tiny")
    assert "The reference&#x27;s table" in text or "The reference's table" in text
