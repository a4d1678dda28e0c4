"""The report page: a predicted step, and a measured one beside it, as one HTML file that works offline."""

from interlace.report.build import Report, build_report
from interlace.report.compare import compared, render_compared, side_of_report, side_of_run, side_of_set
from interlace.report.html import hint_to_measure
from interlace.report.page import render
from interlace.report.plan_page import render_plan
from interlace.report.run_log import LogError, RunLog, read_log
from interlace.report.run_page import Run, render_run
from interlace.report.set_page import render_set
from interlace.report.timeline import Timeline, TraceError, read_trace

__all__ = [
    "LogError", "Report", "Run", "RunLog", "Timeline", "TraceError", "build_report", "compared", "hint_to_measure", "read_log",
    "read_trace", "render", "render_compared", "render_plan", "render_run", "render_set", "side_of_report", "side_of_run", "side_of_set",
]  # fmt: skip
