// Graphs of the device (graph.h), and torch's interface to them.
#include "graph.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#endif
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace soft {

int Engine::Captured(int stream) const {
  if (capture_ == nullptr) return -1;
  const auto it = std::find(capture_->streams.begin(), capture_->streams.end(), stream);
  return it == capture_->streams.end() ? -1 : static_cast<int>(it - capture_->streams.begin());
}

void Engine::Refuse(const std::string& what) {
  const std::string text = "soft device: " + what;
  if (capture_ != nullptr && capture_->failed.empty()) capture_->failed = text;
  TORCH_CHECK(false, text);
}

void Engine::RefuseInCapture(int stream, const std::string& what) {
  Lock lock(mutex_);
  if (Captured(stream) >= 0) Refuse(what + ", and the stream is captured");
}

uint64_t Engine::PoolOf(int stream) {
  Lock lock(mutex_);
  return Captured(stream) >= 0 ? capture_->pool : 0;
}

void Engine::Note(int index, const char* name, std::vector<Access> touched, Make make) {
  Capture& c = *capture_;
  Clock& clock = c.clocks[static_cast<size_t>(index)];
  clock.Set(index, c.nodes.size() + 1);
  c.nodes.push_back({index, name, std::move(touched), std::move(make), -1, clock});
}

void Engine::NoteRecord(const EventPtr& event, int index) {
  event->capture = capture_->id;
  event->node = capture_->nodes.size();
  Note(index, "record", {}, nullptr);
}

void Engine::NoteWait(const EventPtr& event, int stream, Lock& lock) {
  if (capture_ == nullptr || event->capture != capture_->id) Refuse("a stream waits for an event of a capture that is over");
  Capture& c = *capture_;
  int index = Captured(stream);
  if (index < 0) {
    IssueLater(stream, lock);
    index = static_cast<int>(c.streams.size());
    c.streams.push_back(stream);
    c.clocks.emplace_back();
  }
  c.clocks[static_cast<size_t>(index)].Join(c.nodes[event->node].clock);
  Note(index, "wait", {}, nullptr);
  c.nodes.back().waits = static_cast<int64_t>(event->node);
}

void Engine::BeginCapture(int stream, uint64_t pool, Capture& capture) {
  Lock lock(mutex_);
  TORCH_CHECK(pace_ == nullptr, "soft device: a paced device captures nothing");
  TORCH_CHECK(capture_ == nullptr, "soft device: a capture is on already");
  TORCH_CHECK(stream != 0, "soft device: the default stream cannot be captured; make another the current one");
  IssueLater(stream, lock);
  static uint64_t count = 0;
  capture.id = ++count;
  capture.pool = pool;
  capture.streams = {stream};
  capture.clocks.resize(1);
  capture_ = &capture;
}

void Engine::EndCapture() {
  Lock lock(mutex_);
  TORCH_CHECK(capture_ != nullptr, "soft device: no capture is on");
  Capture& c = *capture_;
  for (size_t i = 1; i < c.streams.size() && c.failed.empty(); ++i) {
    if (c.clocks[0][static_cast<int>(i)] < c.clocks[i][static_cast<int>(i)])
      c.failed = "soft device: stream " + std::to_string(c.streams[i]) + " was not waited for in the end";
  }
  // What was freed and not taken again is poisoned at the end of each replay, when all is over.
  for (int stream : c.streams) {
    for (Later& l : std::exchange(streams_.at(static_cast<size_t>(stream)).later, {}))
      Issue(c.streams[0], l.name, {l.touched}, std::move(l.run), lock);
  }
  capture_ = nullptr;
  TORCH_CHECK(c.failed.empty(), "the capture failed: ", c.failed);
  c.own.assign(c.streams.size(), -1);
  for (size_t i = 1; i < c.streams.size(); ++i) {
    if (idle_streams_.empty()) {
      idle_streams_.push_back(static_cast<int>(streams_.size()));
      streams_.emplace_back();
      priority_.clear();
    }
    c.own[i] = idle_streams_.back();
    idle_streams_.pop_back();
  }
}

void Engine::Replay(const Capture& c, int stream) {
  Lock lock(mutex_);
  if (Captured(stream) >= 0) Refuse("a graph is replayed on a stream that is captured");
  IssueLater(stream, lock);
  const int64_t issued = issued_;
  std::vector<EventPtr> events(c.nodes.size());
  for (size_t i = 0; i < c.nodes.size(); ++i) {
    const Capture::Node& node = c.nodes[i];
    const int on = node.index == 0 ? stream : c.own[static_cast<size_t>(node.index)];
    if (node.make) {
      Issue(on, node.name, node.touched, node.make(), lock);
    } else if (node.waits >= 0) {
      BlockOn(events[static_cast<size_t>(node.waits)], on, lock);
    } else {
      RecordOn(events[i] = std::make_shared<Event>(), on, lock);
    }
  }
  issued_ = issued + 1;
}

void Engine::Abandon(const Capture& capture) {
  Lock lock(mutex_);
  if (capture_ == &capture) capture_ = nullptr;
}

void Engine::Release(Capture& capture) {
  Lock lock(mutex_);
  for (int stream : capture.own) {
    if (stream >= 0) idle_streams_.push_back(stream);
  }
  capture = {};
}

#if __has_include(<ATen/core/GraphImplInterface.h>)
namespace {

// By pool: how many graphs have it.
std::mutex pools_mutex;
std::map<uint64_t, int> pools;
uint64_t last_pool = 0;

class SoftGraph final : public at::GraphImplInterface {
 public:
  explicit SoftGraph(const at::GraphImplArgs&) {}
  ~SoftGraph() override {
    try {
      reset();
    } catch (const std::exception&) {  // the device is lost: its memory stays where it is
    }
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(capture_.id == 0, "this graph has been captured; reset it first");
    std::lock_guard lock(pools_mutex);
    const uint64_t chosen = pool.first != 0 ? pool.first : ++last_pool;
    Engine::Get().BeginCapture(CurrentStream(), chosen, capture_);
    ++pools[chosen];
  }
  void capture_end() override {
    Engine::Get().EndCapture();
    ended_ = true;
  }
  void instantiate() override { TORCH_CHECK(ended_, "nothing has been captured"); }
  void replay() override {
    const OwnTime own;
    instantiate();
    Engine::Get().Replay(capture_, CurrentStream());
  }
  void reset() override {
    if (capture_.id == 0) return;
    Engine::Get().Abandon(capture_);
    Engine::Get().SynchronizeAll();
    const uint64_t pool = capture_.pool;
    Engine::Get().Release(capture_);
    ended_ = false;
    std::lock_guard lock(pools_mutex);
    if (--pools[pool] == 0) ReleasePool(pool);
  }
  c10::MempoolId_t pool() const override { return {capture_.pool, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override { TORCH_CHECK(false, "soft device: graphs are not dumped"); }

 private:
  Capture capture_;
  bool ended_ = false;
};

}  // namespace
#endif

}  // namespace soft

#if __has_include(<ATen/core/GraphImplInterface.h>)
namespace at {
REGISTER_GRAPH_IMPL(SOFT, soft::SoftGraph)
}
#endif
