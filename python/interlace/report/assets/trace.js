// The page's timelines as a Chrome trace: to Perfetto in its own window, by the message that it waits for, or into a file.
(() => {
const {data} = Page;
const opens = document.getElementById("perfetto"), saves = document.getElementById("save-trace"), said = document.getElementById("said-trace");
const PERFETTO = "https://ui.perfetto.dev", LONGEST_WAIT_MS = 20000;
if (!opens) return;

function chromeTrace() {
  const events = [];
  [data.predicted, data.measured].forEach((source, pid) => {
    if (!source) return;
    events.push({ph: "M", name: "process_name", pid, args: {name: (data.titles || ["Predicted", "Measured"])[pid]}});
    source.lanes.forEach((lane, tid) => {
      events.push({ph: "M", name: "thread_name", pid, tid, args: {name: lane.name}});
      let ns = 0;
      for (let i = 0; i < lane.events.length; i += 5) {
        const [op, module, part, place, detail] = source.what[lane.events[i + 2]].map((n) => source.text[n]);
        ns += lane.events[i];
        const args = {op, module, part, source: place, detail, bytes: lane.events[i + 3]};
        const cat = lane.events[i + 4] ? "cuda_sync" : lane.name;
        events.push({ph: "X", name: detail ? `${op} ${detail}` : op, cat, pid, tid, ts: ns / 1e3, dur: lane.events[i + 1] / 1e3, args});
      }
    });
    for (const [at, bytes] of source.memory) events.push({ph: "C", name: "memory: live bytes", pid, ts: at / 1e3, args: {value: bytes}});
  });
  return JSON.stringify({traceEvents: events, displayTimeUnit: "ns"});
}

function say(text) { said.textContent = text; }
opens.addEventListener("click", () => {
  const other = window.open(PERFETTO);
  if (!other) return say("The browser did not open a window; save the trace and open it in Perfetto.");
  const begun = Date.now();
  const ping = setInterval(() => {
    if (Date.now() - begun > LONGEST_WAIT_MS) end("No answer from Perfetto (is this machine offline?). Save the trace and open it there, or in chrome://tracing.");
    else other.postMessage("PING", PERFETTO);
  }, 100);
  function end(text) {
    clearInterval(ping);
    window.removeEventListener("message", answered);
    say(text);
  }
  function answered(event) {
    if (event.source !== other || event.origin !== PERFETTO || event.data !== "PONG") return;
    other.postMessage({perfetto: {buffer: new TextEncoder().encode(chromeTrace()).buffer, title: document.title}}, PERFETTO);
    end("Sent to Perfetto; the trace stays in that window.");
  }
  window.addEventListener("message", answered);
  say("Waiting for Perfetto…");
});
saves.addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([chromeTrace()], {type: "application/json"}));
  link.download = "trace.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  say("Saved as trace.json.");
});
})();
