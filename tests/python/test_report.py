"""The report page: its numbers are those of the simulation, it needs nothing else, and a browser draws it without an error."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from simulation_support import STEP, captured, sharded

from interlace import _core
from interlace.cli import app
from interlace.report import TraceError, build_report, read_trace, render
from interlace.report.modules import merge_blame, merged
from interlace.report.timeline import columns, thin, union
from interlace.report.units import bytes_text, count_text, percent_text, time_text

CLUSTER = "a100-40gb-2"


@pytest.fixture
def cli(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = app.run([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


def report_of(text: str, cluster: str = CLUSTER, measured=None, **options):
    program = _core.Program.parse(text)

    def simulate(factors=None, slow=None):
        given = [(int(rank), float(factor)) for rank, factor in (each.split("=") for each in slow or [])]
        return _core.Simulation(program, cluster, what_if=list((factors or {}).items()), slow=given, **options)

    return build_report(program, simulate, {"program": "p.il"}, measured)


def visible(page: str) -> str:
    """The text of the page without scripts, styles and tags."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def data_of(page: str):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.S)[1])


# ---- the numbers ----


def test_page_has_the_numbers_of_the_simulation():
    report = report_of(STEP.read_text())
    facts = json.loads(_core.Simulation(_core.Program.parse(STEP.read_text()), CLUSTER).json())
    assert report.forecast == facts
    text = visible(render(report))
    last = facts["per_rank"][0]
    expected = [time_text(facts["step_us"]), time_text(facts["lower_bound_us"]), percent_text(facts["gap"]),
                bytes_text(facts["memory"]["taken_bytes"]), time_text(sum(lane["exposed_us"] for lane in last["lanes"]))]  # fmt: skip
    expected += [time_text(lane["busy_us"]) for lane in last["lanes"]]
    expected += [time_text(bound["us"]) for bound in facts["bounds"]]
    expected += [time_text(entry["us"]) for entry in facts["critical_path"]]
    expected += [entry["module"] for entry in facts["critical_path"]]
    expected += [time_text(row["step_us"]) for row in report.what_if]
    for each in expected:
        assert each in text, each


def test_what_if_rows_are_simulations_of_changed_machines():
    rows = {row["label"]: row for row in report_of(STEP.read_text()).what_if}
    program = _core.Program.parse(STEP.read_text())
    faster = _core.Simulation(program, CLUSTER, what_if=[("links", 0.5)])
    assert rows["link bandwidth x 2"]["step_us"] == faster.step_us < rows["as it is"]["step_us"]
    assert rows["infinitely fast network"]["exposed_us"] == 0
    slower = _core.Simulation(program, CLUSTER, slow=[(0, 1.1)])
    assert rows["one rank computes 10 % slower"]["step_us"] == slower.step_us
    assert rows["as it is"]["change"] == 0 and "no host copies" not in rows


def test_one_rank_has_no_network():
    report = report_of(captured(), "local-1")
    labels = [row["label"] for row in report.what_if]
    assert labels == ["as it is", "compute x 2", "compute / 2"]
    assert "nothing is transferred" in visible(render(report))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_memory_by_kind_adds_up(accumulation):
    text = STEP.read_text() if accumulation == 1 else sharded(2, accumulation)
    report = report_of(text)
    memory = report.details["memory"]
    peak = report.forecast["memory"]["peak_bytes"]
    assert max(sum(row) for row in memory["bytes"]) == peak
    assert (
        sum(holder["bytes"] for holder in memory["at_peak"])
        == peak
        == sum(holder["bytes"] for holder in report.holders)
    )
    at = memory["time_us"].index(memory["peak_us"]) if memory["peak_us"] in memory["time_us"] else None
    assert at is None or sum(memory["bytes"][at]) <= peak
    assert memory["time_us"] == sorted(memory["time_us"])
    kinds = {holder["kind"] for holder in report.holders}
    assert {"parameters", "gradients", "activations"} <= kinds
    first = dict(zip(memory["kinds"], memory["bytes"][0], strict=True))
    states = _core.Program.parse(text).states()
    shards = [state for state in states if state["role"] == "shard"]
    size = {"f32": 4, "bf16": 2}
    assert first["parameters"] == sum(state["shape"][0] * size[state["dtype"]] for state in shards)


def test_the_arena_is_shown_where_there_is_one():
    text = sharded(2, 3)
    assert report_of(text).details["arena"] is None and 'id="arena"' not in render(report_of(text))
    report = report_of(text, "local-2")
    arena, plan = report.details["arena"], _core.Program.parse(text).memory_plan()
    assert (arena["top_bytes"], arena["live_bytes"]) == (plan["top_bytes"], plan["live_bytes"])
    assert arena["left_out"] == 0 and arena["fragmentation"] == plan["fragmentation"]
    kinds = report.details["memory"]["kinds"]
    span = report.forecast["step_us"]
    seen = set()
    for offset, size, start, end, kind, name, module in arena["pieces"]:
        assert 0 <= offset < offset + size <= arena["reserved_bytes"] and 0 <= start <= end <= span * 1.000001
        seen.add((kinds[kind], arena["names"][name].split()[-1], arena["names"][module]))
    assert {"gathered", "activations", "gradients", "temporaries"} <= {kind for kind, _, _ in seen}
    assert ("activations", "aten.mm", "layers.0") in seen and ("gathered", "u1", "layers.1") in seen
    text = visible(render(report))
    assert bytes_text(plan["top_bytes"]) in text and "planned place in one arena" in text


def test_adam_states_are_the_optimizers():
    report = report_of(sharded(2))
    first = dict(zip(report.details["memory"]["kinds"], report.details["memory"]["bytes"][0], strict=True))
    assert first["optimizer"] == 2 * first["parameters"]


def test_modules_add_up():
    report = report_of(sharded(2))
    whole = report.modules[0]
    compute = report.forecast["per_rank"][0]["compute_us"]
    assert whole.path == "" and whole.compute == pytest.approx(compute, rel=1e-4)
    assert whole.wait == pytest.approx(report.forecast["per_rank"][0]["blocked_us"], rel=1e-3)
    layers = next(row for row in report.modules if row.path == "layers.*")
    assert len(layers.paths) == 2 and layers.name == "layers.*" and layers.level == 1
    assert not any(row.path == "layers" for row in report.modules), "one row for layers and its only child"
    assert sum(row["us"] for row in report.blame) == pytest.approx(report.forecast["step_us"], rel=1e-6)


def test_tokens_per_second_where_known():
    text = sharded(2, 3).replace('"x"', '"input_ids"')
    report = report_of(text)
    assert report.tokens_per_step == 32 * 64 * 3 * 2
    rate = report.tokens_per_step / (report.forecast["step_us"] / 1e6)
    assert report.summary()["tokens_per_s"] == rate and count_text(rate) in visible(render(report))
    assert report_of(sharded(2)).tokens_per_step is None
    assert "Tokens per second" not in render(report_of(sharded(2)))


def test_measured_step_beside_the_forecast():
    program = _core.Program.parse(STEP.read_text())
    slow = _core.Simulation(program, CLUSTER, what_if=[("compute", 2.0), ("links", 3.0)])
    measured = read_trace(slow.trace(), "measured.json")
    report = report_of(STEP.read_text(), measured=measured)
    summary = report.summary()["measured"]
    assert summary["step_us"] == pytest.approx(slow.step_us, abs=0.002)
    assert summary["error"] == pytest.approx(report.forecast["step_us"] / slow.step_us - 1, rel=1e-4)
    expected = {lane["lane"]: lane for lane in json.loads(slow.json())["per_rank"][0]["lanes"]}
    for lane in summary["lanes"]:
        assert lane["busy_us"] == pytest.approx(expected[lane["lane"]]["busy_us"], abs=0.01)
        assert lane["exposed_us"] == pytest.approx(expected[lane["lane"]]["exposed_us"], abs=0.05)
        assert lane["bytes"] == expected[lane["lane"]]["bytes"]
    page = render(report)
    assert f"the forecast is {percent_text(-summary['error'])} below it" in visible(page)
    assert data_of(page)["measured"]["span_ns"] == measured.span_ns
    assert report.modules[0].measured == pytest.approx(json.loads(slow.json())["per_rank"][0]["compute_us"], rel=1e-4)


def test_rank_that_ends_last_is_shown():
    program = _core.Program.parse(STEP.read_text())
    report = build_report(program, lambda *_: _core.Simulation(program, CLUSTER, slow=[(1, 1.5)]), {"program": "p"})
    assert report.predicted.rank == 1 == report.details["rank"]


# ---- the file ----


def test_page_needs_nothing_else(cli, tmp_path):
    (tmp_path / "p.il").write_text(sharded(2))
    assert cli("report", "p.il", "--cluster", CLUSTER, "-o", "r.html")[0] == 0
    page = (tmp_path / "r.html").read_text()
    addresses = set(re.findall(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}""", page, flags=re.I))
    assert addresses == {"https://ui.perfetto.dev"}, "opened when the button is pressed, and never before"
    assert not re.search(
        r"<(?:link|img|iframe|script[^>]*\bsrc)|@import|\burl\(|fetch\(|XMLHttpRequest|WebSocket", page, flags=re.I
    )
    assert page.startswith("<!doctype html>") and page.count("<main>") == 1


def test_hostile_names_stay_text():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"
    text = STEP.read_text().replace('"fc1"', json.dumps(evil)).replace('"two products and an update"', json.dumps(evil))
    page = render(report_of(text))
    assert "<img" not in page and "<script>alert" not in page
    assert page.count("</script>") == 2
    assert any(evil in word for word in data_of(page)["predicted"]["text"])


def test_what_a_search_decided_and_rejected():
    assert build_report_has_no_decisions(STEP.read_text())
    program = _core.Program.parse(captured())
    limit = 3 << 20
    program.run_passes(f"canonicalize,shard(ranks=2),update,search(cluster={CLUSTER},limit={limit},recompute=none)")
    report = report_of(program.print())
    found = report.decisions
    assert found is not None and found.limit == limit
    assert found.chosen[2] <= limit and found.chosen in found.front and len(found.heuristics) >= 5
    page = render(report)
    text = visible(page)
    for name, us, size in [found.chosen, *found.heuristics, *found.without]:
        assert name in text and time_text(us) in text and bytes_text(size) in text
    assert page.count("<circle") == len(found.front) + len(found.heuristics) + 1
    assert report.summary()["decisions"]["chosen"]["bytes"] == found.chosen[2]
    evil = program.print().replace('search.heuristics "plain', 'search.heuristics "<img src=x>', 1)
    assert "<img" not in render(report_of(evil))
    assert build_report_has_no_decisions(program.print().replace('search.chosen "', 'search.chosen "no numbers\\n', 1))


def build_report_has_no_decisions(text: str) -> bool:
    report = report_of(text)
    return report.decisions is None and "What was decided" not in render(report)


def test_same_page_each_time():
    assert render(report_of(sharded(2))) == render(report_of(sharded(2)))


def test_json_is_the_summary(cli, tmp_path):
    (tmp_path / "p.il").write_text(sharded(2))
    code, out, err = cli("report", "p.il", "--cluster", CLUSTER, "-o", "r.html", "--json")
    facts = json.loads(out)
    assert code == 0 and re.match(r"wrote r\.html \([\d.]+ KiB\)\ntimes are estimates", err)
    assert facts["forecast"]["step_us"] > 0 and facts["what_if"][0]["label"] == "as it is"
    assert time_text(facts["forecast"]["step_us"]) in visible((tmp_path / "r.html").read_text())


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "no program file: name one, or - for stdin (examples: interlace report --help)"),
        (["p.il"], "no cluster: give --cluster, a file or a preset such as h100-80gb-8"),
        (
            ["wrong.il"],
            "wrong.il:1:1: this is no interlace program; the first line must be 'interlace 1 captured|sharded|scheduled'\n  notes\n  ^",
        ),
        (["none.il"], "no such file: none.il"),
        (["p.il", "--cluster", CLUSTER, "--measured", "none.json"], "no such file: none.json"),
        (["p.il", "--cluster", CLUSTER, "--measured", "."], ". is a folder: name a trace file"),
        (
            ["p.il", "--cluster", CLUSTER, "--measured", "p.il"],
            "p.il is not a trace: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            ["p.il", "--cluster", CLUSTER, "-o", "nowhere/r.html"],
            "cannot write nowhere/r.html: there is no folder nowhere",
        ),
    ],
)
def test_messages(cli, tmp_path, arguments, said):
    (tmp_path / "p.il").write_text(sharded(2))
    (tmp_path / "wrong.il").write_text("notes\n")
    code, _, err = cli("report", *arguments)
    assert code == 1 and err == f"error: {said}\n"


@pytest.mark.parametrize(
    "text, said",
    [
        ("{}", "t.json is not a trace: no list 'traceEvents'"),
        ("3", "t.json is not a trace: no list 'traceEvents'"),
        ('{"traceEvents": []}', "t.json holds no events of a rank"),
        (
            '{"traceEvents": [{"ph": "X", "pid": 0, "tid": 7}]}',
            "t.json: an event is not as in Chrome's format (KeyError: 'ts')",
        ),
        (
            '{"traceEvents": [3]}',
            "t.json: an event is not as in Chrome's format (AttributeError: 'int' object has no attribute 'get')",
        ),
        (
            '{"traceEvents": [{"ph": "X", "pid": 0, "tid": 7, "name": "a", "ts": "x"}]}',
            "could not convert string to float",
        ),
        ('{"traceEvents": [{"ph": "X", "pid": 0, "tid": 7, "name": "a", "ts": 1e999}]}', "OverflowError"),
        ("[" * 100000, "t.json is not a trace: "),
    ],
)
def test_traces_that_cannot_be(text, said):
    with pytest.raises(TraceError) as error:
        read_trace(text, "t.json")
    assert said in str(error.value)


def test_a_rank_that_the_trace_lacks():
    trace = _core.Simulation(_core.Program.parse(STEP.read_text()), CLUSTER).trace()
    with pytest.raises(TraceError, match=r"^t holds no events of rank 5; it has rank 0$"):
        read_trace(trace, "t", 5)


# ---- pieces ----


@pytest.mark.parametrize(
    "us, text",
    [
        (0, "0"),
        (0.05, "0.05 µs"),
        (9.994, "9.99 µs"),
        (12.34, "12.3 µs"),
        (999.4, "999 µs"),
        (1234, "1.23 ms"),
        (2.5e6, "2.50 s"),
    ],
)
def test_times(us, text):
    assert time_text(us).replace("\N{NO-BREAK SPACE}", " ") == text


def test_merged_paths():
    assert merged("model.layers.12.mlp.experts.3.w1") == "model.layers.*.mlp.experts.*.w1"
    assert merged("0.weight") == "*.weight" and merged("conv2d.bn1") == "conv2d.bn1"
    rows = merge_blame([{"module": f"l.{i}", "lane": "gather", "us": 1.0, "slowed_us": 0.5} for i in range(4)])
    assert rows == [{"module": "l.*", "lane": "gather", "us": 4.0, "slowed_us": 2.0, "merges": 4}]


def test_intervals_and_thinning():
    assert union([(5, 9), (0, 3), (3, 4), (8, 12), (20, 20)]) == [(0, 4), (5, 12)]
    samples = [(i, float(i % 97)) for i in range(10000)]
    thinned = thin(samples, 100)
    assert len(thinned) == 100 and max(thinned, key=lambda s: s[1])[1] == 96.0


def test_columns_hold_every_event():
    timeline = read_trace(_core.Simulation(_core.Program.parse(STEP.read_text()), CLUSTER).trace(), "t")
    data = columns(timeline)
    assert [lane["name"] for lane in data["lanes"]] == ["compute", "gather", "reduce"]
    for lane in data["lanes"]:
        at = 0
        for event, row in zip(timeline.lanes[lane["name"]], zip(*[iter(lane["events"])] * 5, strict=True), strict=True):
            at += row[0]
            op, module, part, source, _ = (data["text"][word] for word in data["what"][row[2]])
            assert (at, row[1], row[3], bool(row[4])) == (event.start_ns, event.duration_ns, event.bytes, event.wait)
            assert (op, module, part, source) == (event.op, event.module, event.part, event.source)


# ---- in a browser ----

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PROBE = """<script>
const said = [];
window.addEventListener("error", (event) => said.push("error: " + event.message));
window.addEventListener("load", () => setTimeout(function start(waits = 0) {
  const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
  const colors = (c) => { const copy = document.createElement("canvas"), seen = new Set();
    copy.width = c.width; copy.height = c.height;
    const g = copy.getContext("2d", {willReadFrequently: true});
    g.drawImage(c, 0, 0);
    const d = g.getImageData(0, 0, c.width, c.height).data;
    for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200) seen.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]); return seen.size; };
  if (colors(canvas) === 0 && waits < 100) return setTimeout(start, 50, waits + 1);  // the first frame is yet to come
  said.push("timeline colors " + colors(canvas), "memory colors " + colors(document.getElementById("memory")));
  let tip = "";
  for (let x = 90; x < box.width && !tip.includes("aten.mm"); x += 7)
    for (let y = 40; y < box.height; y += 6) {
      canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x, clientY: box.top + y, bubbles: true}));
      const node = document.getElementById("tip");
      if (!node.hidden && node.textContent.includes("aten.mm")) { tip = node.textContent; break; }
    }
  said.push("tip " + tip);
  const arena = document.getElementById("arena");
  if (arena) {
    const place = arena.getBoundingClientRect(), found = new Set();
    for (let x = 90; x < place.width; x += 7)
      for (let y = 30; y < place.height; y += 9) {
        arena.dispatchEvent(new PointerEvent("pointermove", {clientX: place.left + x, clientY: place.top + y, bubbles: true}));
        const node = document.getElementById("tip");
        if (!node.hidden) found.add(node.textContent);
      }
    said.push("boxes " + found.size, "arena colors " + colors(arena));
    said.push("arena tip " + [...found].find((text) => text.includes("gather.start")));
  }
  const before = canvas.toDataURL();
  document.querySelector('[data-zoom="in"]').click();
  const button = document.querySelector("#modules button.twist"), rows = () => document.querySelectorAll("#modules tr:not([hidden])").length;
  const open = rows();
  if (button) button.click();
  said.push("rows " + open + " " + rows());
  let tries = 0;  // the canvas is drawn with the next frame, whenever that is
  const finish = () => {
    const zoomed = canvas.toDataURL() !== before;
    if (!zoomed && ++tries < 100) return setTimeout(finish, 50);
    said.push("zoomed " + zoomed, "wide " + (document.documentElement.scrollWidth - innerWidth));
    document.body.innerHTML = "<pre id=said></pre>";
    document.getElementById("said").textContent = said.join("\\n");
  };
  finish();
}, 100));
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("size", ["1440,900", "420,900"])
@pytest.mark.parametrize(("theme", "cluster"), [("light", CLUSTER), ("dark", CLUSTER), ("light", "local-2")])
def test_a_browser_draws_it(tmp_path, size, theme, cluster):
    program = _core.Program.parse(STEP.read_text())
    measured = read_trace(_core.Simulation(program, cluster, what_if=[("compute", 1.2)]).trace(), "m")
    page = render(report_of(STEP.read_text(), cluster, measured=measured))
    (tmp_path / "page.html").write_text(page.replace("<main>", PROBE + "<main>", 1))
    done = browse(tmp_path, tmp_path / "page.html", f"#{theme}", "--dump-dom", f"--window-size={size}")
    said = html.unescape(re.search(r'<pre id="said">(.*?)</pre>', done.stdout, flags=re.S)[1]).split("\n")
    facts = dict(line.split(" ", 1) for line in said if " " in line)
    assert not [line for line in said if line.startswith("error")] and "CONSOLE" not in done.stderr
    assert int(said[0].rsplit(" ", 1)[1]) >= 6 and int(said[1].rsplit(" ", 1)[1]) >= 5, said
    assert "aten.mm" in facts["tip"] and "fc" in facts["tip"] and "net.py:12" in facts["tip"]
    if cluster != CLUSTER:
        facts |= {
            line.rsplit(" ", 1)[0]: line.rsplit(" ", 1)[1]
            for line in said
            if line.startswith(("boxes", "arena colors"))
        }
        assert int(facts["boxes"]) >= 4 and int(facts["arena colors"]) >= 4, said
        tip = next(line for line in said if line.startswith("arena tip"))
        assert "gathered" in tip and "at address " in tip
    opened, shut = map(int, facts["rows"].split())
    assert shut < opened, "the first row shuts all below it"
    assert facts["zoomed"] == "true"
    assert int(facts["wide"]) <= 0, "the page never scrolls sideways"


def browse(folder: Path, page: Path, suffix: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
               f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=20000", *options, page.as_uri() + suffix]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
