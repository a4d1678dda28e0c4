"""Pages of runs, of plans and of two of them: what they say is in what was given, every word has its figure, and the keys reach all."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import run
from simulation_support import STEP, captured, sharded
from test_report import CHROMIUM, CLUSTER, browse, cli, data_of, report_of, visible  # noqa: F401

from interlace import _core
from interlace.report import LogError, read_log, render
from interlace.report.glossary import explained, words
from interlace.report.run_log import thinned
from interlace.report.set_page import presets, ranks_by_stage, ranks_of, runs
from interlace.report.timeline import Event, Timeline
from interlace.report.units import bytes_text, percent_text, time_text

LINES = [
    *({"step": n, "loss": 9.0 / n, "seconds": 0.1 + (n == 1), "lr": 1e-3, "memory_bytes": 2**20 * n} for n in range(1, 21)),
    {"step": 20, "eval_loss": 0.625}, {"step": 12, "plan": "planned again <b>: 12 % faster"}, {"step": 20, "loss": 0.5},
]  # fmt: skip


def log_text(lines=LINES) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


# ---- logs ----


def test_a_log_is_read():
    log = read_log(log_text(), "run.jsonl")
    assert log.steps == 20 and log.plans == [(12, "planned again <b>: 12 % faster")]
    assert log.last("loss") == 0.5, "a run that was resumed said step 20 again"
    assert log.settled("seconds") == 0.1 and log.last("norm") is None
    assert log.summary()["memory_bytes"] == 20 * 2**20


def test_what_is_not_finite_is_named(cli, tmp_path):  # noqa: F811
    (tmp_path / "run.jsonl").write_text(log_text() + '{"step": 21, "loss": NaN}\n')
    code, _, err = cli("report", "run.jsonl", "-o", "run.html")
    assert code == 0, err
    assert "Not a finite number: loss of step 21" in visible((tmp_path / "run.html").read_text())


def test_the_last_line_may_be_cut_off():
    assert read_log(log_text() + '{"step": 21, "lo', "run.jsonl").steps == 20
    with pytest.raises(LogError, match=r"run\.jsonl:24 "):
        read_log(log_text() + '{"step": 21, "lo\n', "run.jsonl")


@pytest.mark.parametrize("line", ["[1]", "3", "null", '{"loss": 2}', '{"step": -1, "loss": 2}', '{"step": true}', "[" * 100000])
def test_lines_that_cannot_be(line):
    with pytest.raises(LogError, match=r"run\.jsonl:1 is no line of a run's log"):
        read_log(line + "\n", "run.jsonl")


def test_a_log_without_figures():
    with pytest.raises(LogError, match="no figures of a step"):
        read_log('{"step": 1}\n', "run.jsonl")


def test_thin_curves_keep_spikes_and_ends():
    values = {step: 1.0 for step in range(10000)} | {5000: 99.0, 7001: -5.0}
    steps, found = thinned(values)
    assert len(steps) <= 1200 + 2 and steps == sorted(steps) and {0, 5000, 7001, 9999} <= set(steps) and {99.0, -5.0} <= set(found)


# ---- pages ----


def test_the_page_of_a_log(cli, tmp_path):  # noqa: F811
    (tmp_path / "run.jsonl").write_text(log_text())
    code, out, _ = cli("report", "run.jsonl", "-o", "run.html", "--json")
    page = (tmp_path / "run.html").read_text()
    assert code == 0 and json.loads(out)["eval_loss"] == 0.625
    assert "planned again &lt;b&gt;" in page and "best 0.625" in visible(page) and time_text(1e5) in visible(page)
    curves = {each["name"]: each["runs"][0] for each in data_of(page)["curves"]}
    assert curves["loss"]["values"][0] == 9.0 and curves["loss"]["steps"] == list(range(1, 21))
    assert page.count('class="curve"') == len(curves) == 5


def test_two_programs_side_by_side(cli, tmp_path):  # noqa: F811
    (tmp_path / "a.il").write_text(sharded(2))
    (tmp_path / "b.il").write_text(STEP.read_text())
    code, out, _ = cli("report", "a.il", "--against", "b.il", "--cluster", CLUSTER, "-o", "both.html", "--json")
    assert code == 0
    found, page = json.loads(out), (tmp_path / "both.html").read_text()
    a, b = (_core.Simulation(_core.Program.parse((tmp_path / name).read_text()), CLUSTER) for name in ("a.il", "b.il"))
    steps = [json.loads(each.json())["step_us"] for each in (a, b)]
    assert [found["figures"]["Step time"][side] for side in "ab"] == steps
    assert f"{time_text(steps[0])} → {time_text(steps[1])}" in visible(page)
    assert percent_text(steps[1] / steps[0] - 1, signed=True) in visible(page)
    assert found["differs"]["program"] == {"a": "a.il", "b": "b.il"}
    assert data_of(page)["titles"] == ["A  a.il", "B  b.il"] and data_of(page)["measured"]["lanes"]


def test_the_same_side_by_side_differs_in_nothing(cli, tmp_path):  # noqa: F811
    (tmp_path / "a.il").write_text(sharded(2))
    assert cli("report", "a.il", "--against", "a.il", "--cluster", CLUSTER, "-o", "both.html")[0] == 0
    text = visible((tmp_path / "both.html").read_text())
    assert "Nothing." in text and not re.search(r"[+\u2212]\d", text)


def test_a_run_beside_a_program(cli, tmp_path):  # noqa: F811
    (tmp_path / "run.jsonl").write_text(log_text())
    (tmp_path / "a.il").write_text(sharded(2))
    code, out, _ = cli("report", "run.jsonl", "--against", "a.il", "--cluster", CLUSTER, "-o", "both.html", "--json")
    assert code == 0 and json.loads(out)["figures"]["Step time"]["a"] == pytest.approx(1e5)


def test_stages_have_their_memory_and_ranks(cli, tmp_path):  # noqa: F811
    (tmp_path / "a.il").write_text(captured())
    words_ = ("report", "a.il", "--mesh", "pp=2,dp=2", "--accumulation", "4", "--cluster", "h100-80gb-4", "-o", "p.html", "--json")
    code, out, err = cli(*words_)
    assert code == 0, err
    page = (tmp_path / "p.html").read_text()
    assert "mesh pp=2,dp=2 · 4 micro-batches" in page
    rows = re.search(r'<table id="memory-by-stage">.*?<tbody>(.*?)</tbody>', page, flags=re.S)[1].split("</tr>")[:-1]
    assert len(rows) == 2 and "<td>0, 1</td>" in rows[0] and "<td>2, 3</td>" in rows[1]
    for stage, row in zip(json.loads(out)["stages"], rows, strict=True):
        assert bytes_text(stage["taken_bytes"]) in row
    assert next(iter(data_of(page)["presets"])) == "Start" and "--accumulation 4" in err, "the hint repeats all that was given"


def test_a_page_of_estimates_says_how_to_measure(cli, tmp_path):  # noqa: F811
    (tmp_path / "a.il").write_text(sharded(2))
    _, _, err = cli("report", "a.il", "--cluster", "local-2", "-o", "r.html")
    first = "interlace profile --program a.il --ranks 2 --export here.profile"
    assert first in err and first in visible((tmp_path / "r.html").read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no.il", "--cluster", CLUSTER], "no such file: no.il"),
        (["no.jsonl", "--against", "a.il"], "no such file: no.jsonl"),
        (["."], "a folder without a run"),
        (["a.il", "--against", "a.il", "--measured", "t.json", "--cluster", CLUSTER], "name the trace after --against"),
        (["a.il", "--against", "no.il", "--cluster", CLUSTER], "no such file: no.il"),
        (["--plan", "a.plan", "--against", "a.il"], "give one of them"),
        (["broken.jsonl"], "broken.jsonl:2 is no line"),
    ],
)
def test_messages(cli, tmp_path, arguments, said):  # noqa: F811
    (tmp_path / "a.il").write_text(sharded(2))
    (tmp_path / "broken.jsonl").write_text('{"step": 1, "loss": 2}\n{}\n')
    code, _, err = cli("report", *arguments)
    assert code == 1 and said in err and err.count("error") == 1


# ---- parts ----


def test_ranks_of_a_place():
    assert ranks_of({"pp": 2, "dp": 4}, "pp", 1) == [4, 5, 6, 7]
    assert ranks_of({"dp": 2, "pp": 2, "tp": 2}, "pp", 0) == [0, 1, 4, 5]


def test_ranks_of_unlike_stages_have_lanes_of_their_own():
    def of(rank: int, name: str) -> list[dict[str, Any]]:
        return [
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}},
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} compute"}},
            {"ph": "X", "name": "aten.mm", "pid": rank, "tid": 0, "ts": 10 * rank, "dur": 5,
             "args": {"part": "fwd", "detail": "micro-batch 3"}},
        ]  # fmt: skip

    each = of(0, "stage 0, rank 0") + of(1, "stage 0, rank 1") + of(2, "stage 1, rank 2")
    assert ranks_by_stage(each) == [[0, 1], [2]]
    assert {name: [e.op for e in events] for name, events in runs(each).lanes.items()} == {
        "stage 0 r0": ["forward 3"], "stage 0 r1": ["forward 3"], "stage 1 r2": ["forward 3"],
    }  # fmt: skip
    alike = of(0, "stage 0") + of(1, "stage 1")
    assert ranks_by_stage(alike) == [] and list(runs(alike).lanes) == ["stage 0", "stage 1"]
    assert ranks_of({"dp": 4}, "pp", 0) == []


def test_start_and_end_of_a_pipeline():
    def lane(start: int, last: int) -> list[Event]:
        return [Event(start_ns=at, duration_ns=10, op="x", part=part) for at, part in ((start, "fwd"), (50, "bwd"), (last, "bwd"))]

    found = presets(Timeline("", 0, 100, {"stage 0": lane(0, 90), "stage 1": lane(10, 70), "sends 0": []}))
    assert found == {"Start": [0, 30], "Between": [20, 70], "End": [55, 100]}
    assert presets(Timeline("", 0, 100, {"stage 0": lane(0, 90)})) == {}


def test_words_are_those_of_the_glossary():
    page, used = explained("<h2>Peak memory</h2><th>Stages</th><th>stage</th><p>micro-batch</p><h3>a &amp; b</h3><td>lane</td>")
    assert set(used) == {"peak", "stage"} and page.count("<dfn") == 2 and used["peak"] == words()["peak"]
    glossary = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    assert all(here.split(" ")[0] in glossary for _, here in words().values()) and len(words()) > 20


# ---- in a browser ----

KEYS = """<script>
const said = [];
window.addEventListener("error", (event) => said.push("error: " + event.message));
const frame = () => new Promise((done) => setTimeout(done, 50));
async function until(what) { for (let waits = 0; waits < 60 && !what(); waits++) await frame(); return what(); }
window.addEventListener("load", async () => {
  const tip = document.getElementById("tip");
  await until(() => document.documentElement.dataset.ready);
  const press = (element, key, shiftKey = false) =>
    element.dispatchEvent(new KeyboardEvent("keydown", {key, shiftKey, bubbles: true, cancelable: true}));
  const reached = [], mute = [];
  for (const each of document.querySelectorAll("canvas, dfn, circle")) {
    tip.hidden = true;
    tip.textContent = "";
    each.focus();
    await frame();  // the page scrolls to it
    const name = each.id || each.dataset.term || each.getAttribute("aria-label") || each.tagName;
    if (document.activeElement !== each) { mute.push("no focus: " + name); continue; }
    if (each.tagName === "CANVAS") {
      press(each, each.id === "timeline" ? "ArrowDown" : "ArrowRight", each.id !== "timeline" && !each.classList.contains("curve"));
      await until(() => !tip.hidden);
    }
    if (tip.hidden || !tip.textContent) mute.push("no words: " + name); else reached.push(name + "=" + tip.textContent);
    each.blur();
  }
  const first = document.getElementById("timeline");
  let moved = "none";
  const button = [...document.querySelectorAll("[data-zoom]")].find((b) => b.textContent === "End");
  if (button) {
    const before = first.toDataURL();
    button.click();
    moved = String(await until(() => first.toDataURL() !== before));
  }
  const wide = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth + 1)
    .map((box) => box.innerHTML.slice(0, 40));
  const page = document.documentElement.scrollWidth - innerWidth;
  document.body.innerHTML = "<pre id=said></pre>";
  document.getElementById("said").textContent = JSON.stringify({said, reached, mute, moved, wide, page, width: innerWidth});
});
</script>"""


def pages(folder: Path) -> dict[str, Path]:
    """Of each kind one, by the command."""
    (folder / "a.il").write_text(STEP.read_text())
    (folder / "b.il").write_text(sharded(2))
    (folder / "model.il").write_text(captured())
    (folder / "run.jsonl").write_text(log_text())
    commands = {
        "step": ["a.il", "--cluster", "local-2"], "both": ["a.il", "--against", "b.il", "--cluster", CLUSTER], "run": ["run.jsonl"],
        "pipeline": ["model.il", "--mesh", "pp=2,dp=2", "--accumulation", "4", "--cluster", "h100-80gb-4"],
    }  # fmt: skip
    for name, words_ in commands.items():
        done = run("report", *words_, "-o", f"{name}.html", cwd=folder)
        assert done.returncode == 0, done.stderr
    return {name: folder / f"{name}.html" for name in commands}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return pages(tmp_path_factory.mktemp("pages"))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("size", ["1400,1000", "500,900"])  # a window of the browser is 500 wide at least; below 640 the page is a phone's
@pytest.mark.parametrize("name", ["step", "both", "run", "pipeline"])
def test_the_keys_reach_every_figure(written, tmp_path, name, size):
    page = written[name].read_text()
    (tmp_path / "page.html").write_text(page.replace("<main>", KEYS + "<main>", 1))
    done = browse(tmp_path, tmp_path / "page.html", "", "--dump-dom", f"--window-size={size}")
    found = json.loads(html.unescape(re.search(r'<pre id="said">(.*?)</pre>', done.stdout, flags=re.S)[1]))
    assert found["said"] == [] and "CONSOLE" not in done.stderr
    assert not found["mute"], found["mute"]
    assert len(found["reached"]) == page.count("<canvas") + page.count("<dfn") + page.count("<circle") > 1
    assert found["page"] <= 0, "the page never scrolls sideways"
    assert found["width"] > 640 or found["wide"] == [], "on a phone no table is cut"
    assert found["moved"] == ("true" if name == "pipeline" else "none")


def test_a_page_that_is_given_twice_is_the_same():
    assert render(report_of(STEP.read_text())) == render(report_of(STEP.read_text()))
