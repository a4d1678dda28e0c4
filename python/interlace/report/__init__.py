"""The report page: a predicted step, and a measured one beside it, as one HTML file that works offline."""

from interlace.report.build import Report, build_report
from interlace.report.page import render
from interlace.report.plan_page import render_plan
from interlace.report.set_page import render_set
from interlace.report.timeline import Timeline, TraceError, read_trace

__all__ = ["Report", "Timeline", "TraceError", "build_report", "read_trace", "render", "render_plan", "render_set"]
