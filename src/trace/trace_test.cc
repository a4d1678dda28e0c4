#include <gtest/gtest.h>

#include <random>

#include "trace/chrome_trace.h"
#include "trace/json.h"
#include "trace/memory_snapshot.h"
#include "trace/testing/check_trace.h"
#include "trace/testing/read_json.h"

namespace interlace {
namespace {

std::string Quoted(std::string_view text) {
  std::string out;
  AppendJsonString(out, text);
  return out;
}

TEST(Json, StringsAreEscapedAndReadBack) {
  EXPECT_EQ(Quoted("a\"b\\c\n\t\x01"), "\"a\\\"b\\\\c\\n\\t\\u0001\"");
  EXPECT_EQ(Quoted("h\xc3\xa9"), "\"h\xc3\xa9\"");
  EXPECT_EQ(Quoted("\xff\xc3"), "\"\\ufffd\\ufffd\"") << "not UTF-8";
  EXPECT_EQ(Quoted("\xed\xa0\x80"), "\"\\ufffd\\ufffd\\ufffd\"") << "a surrogate";
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (int n = random() % 12; n > 0; --n) text.push_back(static_cast<char>(random() % (i % 2 == 0 ? 128 : 256)));
    Result<Json> back = ParseJson(Quoted(text));
    ASSERT_TRUE(back.ok()) << back.error().ToString();
    if (i % 2 == 0) {
      EXPECT_EQ(back->text, text);
    }
  }
}

TEST(Json, WriterNestsAndReaderReads) {
  JsonWriter w;
  w.BeginObject()
      .Field("a", 1)
      .Key("b")
      .BeginArray()
      .Number(0.1)
      .Bool(true)
      .String("x")
      .BeginObject()
      .EndObject()
      .EndArray();
  w.Key("t").Micros(1234567).Key("n").Micros(-5).EndObject();
  std::string text = w.Take();
  EXPECT_EQ(text, R"({"a":1,"b":[0.1,true,"x",{}],"t":1234.567,"n":-0.005})");
  Result<Json> json = ParseJson(text);
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(json->Find("b")->items[0].number, 0.1);
  EXPECT_EQ(json->Find("missing"), nullptr);
  EXPECT_EQ(ParseJson(R"("\ud83d\ude00é")")->text, "\xf0\x9f\x98\x80\xc3\xa9");
}

TEST(Json, ReaderRefusesWhatIsNotJson) {
  auto error = [](std::string_view text) { return ParseJson(text).ok() ? "read" : ParseJson(text).error().ToString(); };
  EXPECT_EQ(error("{\"a\":1,\n \"a\":2}"), "json:2:5: the key 'a' is given twice");
  EXPECT_EQ(error("[1,]"), "json:1:4: expected a value");
  EXPECT_EQ(error("[1] 2"), "json:1:5: text after the end of the value");
  EXPECT_EQ(error("nan"), "json:1:1: expected a value");
  EXPECT_EQ(error("\"\\ud800\""), "json:1:8: half of a surrogate pair");
  EXPECT_EQ(error(std::string(200, '[')), "json:1:102: nested too deeply");
  for (std::string_view text : {"", "{", "[", "\"", "{\"a\"", "{\"a\":", "\"\\u12", "1e999", "-", "tru"}) {
    EXPECT_FALSE(ParseJson(text).ok()) << text;
  }
}

// A step of one layer: gather, wait, product, reduce.
Timeline Example() {
  Timeline t;
  t.producer = "test";
  t.backend = "nccl";
  t.world_size = 2;
  t.device_name = "H100 \"80GB\"";
  auto add = [&](TraceLane lane, std::string op, int64_t start, int64_t duration) -> TraceEvent& {
    TraceEvent& e = t.events.emplace_back();
    e.lane = lane, e.op = std::move(op), e.start_ns = start, e.duration_ns = duration;
    return e;
  };
  add(TraceLane::kHost, "aten.mm", 0, 500);
  TraceEvent& gather = add(TraceLane::kGather, "gather.start", 100, 5000);
  gather.in_elements = 512, gather.out_elements = 1024, gather.dtype = "bf16", gather.group_size = 2,
  gather.bytes = 1024;
  TraceEvent& wait = add(TraceLane::kCompute, "gather.wait", 600, 4500);
  wait.wait = true;
  TraceEvent& mm = add(TraceLane::kCompute, "aten.mm.out", 5100, 2000);
  mm.module = "fc1", mm.part = "fwd";
  TraceEvent& copy = add(TraceLane::kH2D, "reload.start", 0, 4000);
  copy.bytes = 8000;
  t.flows = {{1, 2}, {0, 3}};
  t.counters.push_back({"memory: live bytes", {{0, 0, 100}, {0, 5100, 300}}});
  return t;
}

TEST(ChromeTrace, HasKinetosNames) {
  Timeline timeline = Example();
  std::string text = WriteChromeTrace(timeline);
  Status check = CheckChromeTrace(text);
  ASSERT_TRUE(check.ok()) << check.error().ToString();
  Result<Json> json = ParseJson(text);
  ASSERT_TRUE(json.ok());
  std::map<std::string, const Json*> slices;
  for (const Json& e : json->Find("traceEvents")->items) {
    if (e.Find("ph")->text == "X") slices[e.Find("name")->text] = &e;
  }
  const Json* gather = slices.at("ncclDevKernel_AllGather_RING");
  EXPECT_EQ(gather->Find("cat")->text, "kernel");
  EXPECT_EQ(gather->Find("ts")->number, 0.1);
  EXPECT_EQ(gather->Find("dur")->number, 5.0);
  EXPECT_EQ(gather->Find("args")->Find("Collective name")->text, "_allgather_base");
  EXPECT_EQ(gather->Find("args")->Find("dtype")->text, "BFloat16");
  EXPECT_EQ(gather->Find("args")->Find("In msg nelems")->number, 512);
  EXPECT_EQ(slices.at("Stream Wait Event")->Find("cat")->text, "cuda_sync");
  EXPECT_EQ(slices.at("aten::mm")->Find("cat")->text, "kernel");
  EXPECT_EQ(slices.at("aten::mm")->Find("tid")->number, 7);
  EXPECT_EQ(slices.at("aten::mm")->Find("args")->Find("correlation")->number,
            slices.at("cudaLaunchKernel")->Find("args")->Find("correlation")->number);
  const Json* copy = slices.at("Memcpy HtoD (Pinned -> Device)");
  EXPECT_EQ(copy->Find("cat")->text, "gpu_memcpy");
  EXPECT_EQ(copy->Find("args")->Find("memory bandwidth (GB/s)")->number, 2.0);
  EXPECT_EQ(json->Find("distributedInfo")->Find("world_size")->number, 2);
}

TEST(ChromeTrace, OneRankAlone) {
  Timeline timeline = Example();
  timeline.events.push_back(timeline.events[3]);
  timeline.events.back().rank = 1;
  std::string text = WriteChromeTrace(timeline, 1);
  ASSERT_TRUE(CheckChromeTrace(text).ok());
  EXPECT_EQ(text.find("\"pid\":0"), std::string::npos);
  EXPECT_NE(text.find("\"pid\":1"), std::string::npos);
}

TEST(ChromeTrace, CheckerSeesViolations) {
  auto error = [](const Timeline& t) {
    Status status = CheckChromeTrace(WriteChromeTrace(t));
    return status.ok() ? "fine" : status.error().ToString();
  };
  Timeline overlap = Example();
  overlap.events[3].start_ns = 5000;  // begins before the wait has ended and ends after it
  EXPECT_EQ(error(overlap), "slices overlap on thread 7 of process 0 at 5000 ns");
  Timeline back = Example();
  back.flows.push_back({3, 4});
  EXPECT_EQ(error(back), "flow 3 goes back in time");
  Timeline counter = Example();
  counter.counters[0].samples[1].value = -1;
  EXPECT_NE(error(counter).find("has a bad 'value'"), std::string::npos);
  counter = Example();
  counter.counters[0].samples[0].time_ns = 6000;
  EXPECT_NE(error(counter).find("goes back in time"), std::string::npos);
  EXPECT_EQ(CheckChromeTrace("{}").error().ToString(), "no array 'traceEvents'");
  std::string half = R"({"traceEvents":[{"ph":"s","id":1,"name":"x","pid":0,"tid":0,"ts":0}]})";
  EXPECT_EQ(CheckChromeTrace(half).error().ToString(), "flow 1 never ends");
}

MemoryEvent Allocate(int64_t time, int64_t storage, int64_t bytes) {
  MemoryEvent e;
  e.time_ns = time, e.storage = storage, e.bytes = bytes, e.name = "aten.mm", e.module = "fc1";
  return e;
}
MemoryEvent Free(int64_t time, int64_t storage) {
  MemoryEvent e = Allocate(time, storage, 0);
  e.allocate = false;
  return e;
}

TEST(MemorySnapshot, FreedMemoryIsUsedAgain) {
  Result<std::string> text =
      WriteMemorySnapshot({Allocate(0, 1, 512), Allocate(1000, 2, 1024), Free(2000, 1), Allocate(3000, 3, 100)});
  ASSERT_TRUE(text.ok());
  ASSERT_TRUE(CheckMemorySnapshot(*text).ok());
  Json json = *ParseJson(*text);
  const Json& segment = json.Find("segments")->items.at(0);
  EXPECT_EQ(segment.Find("total_size")->number, 1536);
  const Json& trace = json.Find("device_traces")->items.at(0);
  ASSERT_EQ(trace.items.size(), 5u) << "alloc, alloc, free requested and completed, alloc";
  EXPECT_EQ(trace.items[4].Find("addr")->number, trace.items[0].Find("addr")->number);
  EXPECT_EQ(trace.items[4].Find("time_us")->number, 3);
  EXPECT_EQ(trace.items[0].Find("frames")->items.at(0).Find("name")->text, "aten.mm");
}

TEST(MemorySnapshot, PlannedAddressesAreKept) {
  const auto at = [](MemoryEvent e, int64_t address) {
    e.address = address;
    return e;
  };
  const std::vector<MemoryEvent> events = {
      Allocate(0, 1, 700), at(Allocate(0, 2, 100), 0),    at(Allocate(1000, 3, 64), 192),
      Free(2000, 2),       at(Allocate(3000, 4, 130), 0), Free(4000, 3)};
  Result<std::string> text = WriteMemorySnapshot(events);
  ASSERT_TRUE(text.ok()) << text.error().ToString();
  ASSERT_TRUE(CheckMemorySnapshot(*text).ok()) << CheckMemorySnapshot(*text).error().ToString();
  const Json json = *ParseJson(*text);
  const std::vector<Json>& segments = json.Find("segments")->items;
  ASSERT_EQ(segments.size(), 2u) << "the arena, and the rest";
  const double arena = segments[0].Find("address")->number;
  EXPECT_EQ(segments[0].Find("total_size")->number, 256);
  EXPECT_EQ(segments[0].Find("blocks")->items[0].Find("size")->number, 192) << "130 bytes, rounded up to 64";
  EXPECT_EQ(segments[1].Find("address")->number, arena + (2 << 20));
  EXPECT_EQ(segments[1].Find("total_size")->number, 1024) << "700 bytes, rounded up to 512";
  std::vector<double> addresses;
  for (const Json& entry : json.Find("device_traces")->items[0].items) {
    if (entry.Find("action")->text == "alloc") addresses.push_back(entry.Find("addr")->number - arena);
  }
  EXPECT_EQ(addresses, (std::vector<double>{2 << 20, 0, 192, 0}));
  EXPECT_EQ(WriteMemorySnapshot({events[1], at(Allocate(0, 5, 1), 64)}).error().ToString(),
            "'aten.mm' is at 64 in the arena, where another storage lives");
  EXPECT_EQ(WriteMemorySnapshot({at(Allocate(0, 5, 2), INT64_MAX / 2)}).error().ToString(),
            "'aten.mm' is at 4611686018427387903, beyond 64 bits of address");
}

TEST(MemorySnapshot, RandomHistoriesHold) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<MemoryEvent> events;
    std::vector<int64_t> live;
    for (int i = 0; i < 60; ++i) {
      if (live.empty() || random() % 5 < 3) {
        live.push_back(i);
        events.push_back(Allocate(i * 1000, i, random() % 5000));
      } else {
        size_t at = random() % live.size();
        events.push_back(Free(i * 1000, live[at]));
        live.erase(live.begin() + static_cast<int64_t>(at));
      }
    }
    Result<std::string> text = WriteMemorySnapshot(events);
    ASSERT_TRUE(text.ok());
    Status check = CheckMemorySnapshot(*text);
    ASSERT_TRUE(check.ok()) << check.error().ToString();
  }
}

TEST(MemorySnapshot, Errors) {
  auto error = [](std::vector<MemoryEvent> events) { return WriteMemorySnapshot(events).error().ToString(); };
  EXPECT_EQ(error({Free(0, 4)}), "storage 4 ('aten.mm') ends before it begins on rank 0");
  EXPECT_EQ(error({Allocate(0, 4, 1), Allocate(0, 4, 1)}), "storage 4 ('aten.mm') begins twice on rank 0");
  EXPECT_EQ(error({Allocate(0, 1, INT64_MAX / 2), Allocate(0, 2, INT64_MAX / 2)}),
            "the storages of one rank do not fit in 64 bits of address");
  std::string text = *WriteMemorySnapshot({Allocate(0, 1, 512), Allocate(1, 2, 512)});
  size_t second = text.find("4294967808", text.find("device_traces"));
  ASSERT_NE(second, std::string::npos);
  text.replace(second, 10, "4294967400");
  EXPECT_EQ(CheckMemorySnapshot(text).error().ToString(), "device 0: entry 1 allocates memory that is in use");
}

}  // namespace
}  // namespace interlace
