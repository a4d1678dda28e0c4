"""Writes docs/timeline.svg: a training step of Llama-3-8B on eight H100 in simulation, as ZeRO-3 runs it and as the search leaves it.

python tools/docs/picture.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from interlace import _core

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "timeline.svg"
CLUSTER = "h100-80gb-8"
STANDARD = "canonicalize,shard(axis=dp,ranks=8),update(clip=1.0)"
SHOWN = (("ZeRO-3 as written", STANDARD), ("after the search", f"{STANDARD},search(cluster={CLUSTER})"))
LANES = ("compute", "gather", "reduce")
LEFT, WIDTH, ROW, GAP = 130, 760, 18, 22  # pixels
JOIN = 0.4  # bars that are nearer than so many pixels are one
STYLE = """<style>
 text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px; fill: #57606a }
 .compute { fill: #2f81f7 } .gather { fill: #e09b13 } .reduce { fill: #2da44e } .rail { fill: #8b949e; opacity: .15 }
 @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9aa4ae } }
</style>"""


def captured(folder: Path) -> str:
    """The program of one micro-batch of 2048 tokens, from `interlace capture`."""
    file = folder / "llama.il"
    command = [sys.executable, "-m", "interlace.cli", "capture", "--model", "llama-3-8b", "--seq", "2048", "-o", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return file.read_text()


def step(text: str, passes: str) -> tuple[float, dict[str, list[tuple[float, float]]]]:
    """The time of a step in microseconds, and by lane when it is busy on rank 0."""
    program = _core.Program.parse(text, "llama.il")
    program.run_passes(passes)
    simulation = _core.Simulation(program, CLUSTER)
    names: dict[int, str] = {}
    bars: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(simulation.trace())["traceEvents"]:
        if event.get("pid") != 0:
            continue
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"].split()[-1]  # "stream 7 compute"
        elif event["ph"] == "X":
            bars.setdefault(names[event["tid"]], []).append((event["ts"], event["ts"] + event["dur"]))
    return json.loads(simulation.json())["step_us"], bars


def path(bars: list[tuple[float, float]], scale: float, y: int) -> str:
    """One SVG path for all bars of a lane, those that the eye cannot tell apart joined."""
    joined: list[list[float]] = []
    for begin, end in sorted(bars):
        a, b = LEFT + begin * scale, LEFT + end * scale
        if joined and a - joined[-1][1] < JOIN:
            joined[-1][1] = max(joined[-1][1], b)
        else:
            joined.append([a, b])
    return "".join(f"M{a:.1f} {y}h{max(b - a, 0.2):.1f}v{ROW - 4}h{-max(b - a, 0.2):.1f}z" for a, b in joined)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = captured(Path(folder))
    found = [(title, *step(text, passes)) for title, passes in SHOWN]
    scale = WIDTH / max(us for _, us, _ in found)
    parts, y = [], 8
    for title, us, bars in found:
        parts.append(f'<text x="{LEFT}" y="{y + 12}">{title}: {us / 1e3:.1f} ms a step</text>')
        y += GAP
        for lane in LANES:
            parts.append(f'<text class="small" x="{LEFT - 10}" y="{y + 11}" text-anchor="end">{lane}</text>')
            parts.append(f'<rect class="rail" x="{LEFT}" y="{y}" width="{us * scale:.1f}" height="{ROW - 4}"/>')
            parts.append(f'<path class="{lane}" d="{path(bars.get(lane, []), scale, y)}"/>')
            y += ROW
        y += 10
    size = f'width="{LEFT + WIDTH + 20}" height="{y}" viewBox="0 0 {LEFT + WIDTH + 20} {y}"'
    title = "<title>A step of Llama-3-8B on eight H100, simulated</title>"
    FILE.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{title}\n{STYLE}\n' + "\n".join(parts) + "\n</svg>\n")
    shown = ", ".join(f"{title} {us / 1e3:.1f} ms" for title, us, _ in found)
    print(f"wrote {FILE.relative_to(ROOT)}: {shown}; {found[1][1] / found[0][1]:.3f} x")


if __name__ == "__main__":
    main()
