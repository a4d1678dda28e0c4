// engine.h — the software accelerator: an address space, streams, events, and the order in which ops are carried out.
//
// A device address is never mapped: a host access faults. The bytes lie a constant distance away. An op is a closure over
// raw addresses; it owns nothing, so lifetimes are as real as on hardware. The host issues; worker threads carry out:
//
//   free      a ready stream at random, several at once, as on hardware
//   lockstep  one op at a time, drawn from a seed, and only while the host waits or as often as a draw says: with run=1
//             at once (the reference), with run=0 not before the host waits
//   starve    lockstep, with streams by priorities that are drawn anew now and then: a stream may be left far behind
//   nothing   nothing is computed, and nothing looked at: what is issued is over (for the host's own time)
//   paced     nothing is computed: an op takes the time that a cost model gives it, on all ranks' devices together (pace.h)
//
// The order checker (order.h) looks at each op when it is issued, so that it needs no luck.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "order.h"
#include "pace.h"

namespace soft {

constexpr size_t kSpace = size_t{64} << 30;
struct Space {
  char* device = nullptr;  // PROT_NONE
  char* bytes = nullptr;
};
const Space& TheSpace();
inline bool OnDevice(const void* p) {
  const char* c = static_cast<const char*>(p);
  return c >= TheSpace().device && c < TheSpace().device + kSpace;
}
// Where the bytes of a device address lie, for workers.
inline char* Real(const void* p) {
  return TheSpace().bytes + (static_cast<const char*>(p) - TheSpace().device);
}

struct Event {
  uint64_t issued = 0, done = 0;  // how often it was recorded
  double ms = 0;                  // when the last record was carried out
  Clock clock;                    // of the last record that was issued
  uint64_t capture = 0;           // the last record was noted by this capture (graph.h), as its node `node`
  size_t node = 0;
  int stream = 0;                 // paced: where that is, and its number there
  uint64_t number = 0;
};
using EventPtr = std::shared_ptr<Event>;

// false: it cannot go on yet (a collective whose peer has not come).
using Run = std::function<bool()>;
// Makes the op anew, for ops that are not the same each time that they are issued.
using Make = std::function<Run()>;
struct Capture;

struct Mode {
  std::string name = "free";
  uint64_t seed = 0;
  double run = 0.3;  // lockstep, starve: the chance that one more op is carried out when one is issued
};

class Engine {
 public:
  static Engine& Get();
  int NewStream();  // from a pool of 32, round robin
  void Enqueue(int stream, const char* name, std::vector<Access> touched, Run run);
  void EnqueueEach(int stream, const char* name, std::vector<Access> touched, Make make);
  // With the stream's next op, after the waits that come till then: that op is the first that may reuse a freed block.
  void EnqueueBeforeNext(int stream, const char* name, Access touched, Run run);
  void FlushBeforeNext(int stream);
  void Record(const EventPtr& event, int stream);
  void Block(const EventPtr& event, int stream);
  // Of the allocators' own questions (`teach` false) the checker learns nothing.
  bool Query(const EventPtr& event, bool teach = true);
  bool QueryStream(int stream);
  void Synchronize(int stream);
  void Synchronize(const EventPtr& event);
  void SynchronizeAll();
  uint64_t Issued(int stream);
  bool Finished(int stream, uint64_t seq);
  // What the host has waited for: called whenever it has learned more, with its clock; the lock is held.
  void OnLearned(std::function<void(const Clock&)> call);
  void Forget(const char* begin, const char* end);  // whoever waits knows that nobody uses this memory any more
  void Report(const std::string& text);
  void Fail(const std::string& text);  // the device is lost: whoever waits is told
  // After so many more ops all calls fail; with an empty text they work again.
  void Lose(const std::string& text, int64_t after);
  void CheckHere();
  // Graphs (graph.h): from Begin on what this stream is given is noted, and what streams are given that wait for its
  // events. One capture at a time. End throws where the capture failed.
  void BeginCapture(int stream, uint64_t pool, Capture& capture);
  void EndCapture();
  void Abandon(const Capture& capture);  // ends it, if it is on
  void Replay(const Capture& capture, int stream);
  void Release(Capture& capture);  // nothing of it runs any more
  // What a captured stream is refused: throws, and the capture has failed. Nothing on other streams.
  void RefuseInCapture(int stream, const std::string& what);
  uint64_t PoolOf(int stream);  // of the capture that notes this stream; 0: none does
  void SetMode(const Mode& mode);
  // The mode "paced", until another one is set.
  void SetPace(std::unique_ptr<Pace> pace);
  Pace* pace() const { return pace_.get(); }
  void SetChecker(bool on) { order_.on = on; }
  std::vector<std::string> TakeReports();
  int64_t reports(), executed(), waits();
  int64_t issued();  // by the host; a replay is one
  void Stop();

 private:
  struct Op {
    const char* name;
    Run run;
    uint64_t seq;
    EventPtr wait, record;
    uint64_t version = 0;
  };
  struct Later {
    const char* name;
    Access touched;
    Run run;
  };
  struct Stream {
    std::deque<Op> queue;
    std::vector<Later> later;
    uint64_t issued = 0, finished = 0;
    uint64_t void_until = 0;  // ops up to this one are over without being carried out, after an error
    bool busy = false;
    double not_before = 0;  // of a collective that waits for its peers
    Clock clock;
  };
  using Lock = std::unique_lock<std::mutex>;
  Engine();
  void Start();  // in the first process that gives it something to do: a parent may only have loaded it
  void Work();
  bool RunOne(Lock& lock);
  int Choose(const std::vector<int>& ready);
  bool Ready(const Stream& s) const;
  void Push(int stream, Op op, Lock& lock);
  void Issue(int stream, const char* name, const std::vector<Access>& touched, Run run, Lock& lock);
  void IssueLater(int stream, Lock& lock);
  void RecordOn(const EventPtr& event, int stream, Lock& lock);
  void BlockOn(const EventPtr& event, int stream, Lock& lock);
  int Captured(int stream) const;  // its index in the capture, or -1
  void Note(int index, const char* name, std::vector<Access> touched, Make make);
  void NoteRecord(const EventPtr& event, int index);
  void NoteWait(const EventPtr& event, int stream, Lock& lock);
  [[noreturn]] void Refuse(const std::string& what);
  void Pump(Lock& lock, int64_t ops);
  template <typename Until>
  void Wait(Lock& lock, Until until);
  void Learn(const Clock& clock);
  bool one_at_a_time() const { return mode_.name != "free" && !nothing_; }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Stream> streams_;
  int next_pool_ = 0;
  Mode mode_;
  std::mt19937_64 random_{0};
  std::vector<uint64_t> priority_;
  int64_t budget_ = 0;  // lockstep: ops that may be carried out now
  bool idle_ = false;   // lockstep: nothing could
  bool turn_ = false;   // lockstep: somebody is at it
  bool nothing_ = false;  // the mode
  bool working_ = false, stopped_ = false;
  std::string error_, lost_;
  int64_t left_ = 0;  // ops until it is lost
  int64_t executed_ = 0, waits_ = 0, count_ = 0, issued_ = 0;
  Capture* capture_ = nullptr;  // the one that is on
  std::vector<int> idle_streams_;  // of graphs that are gone
  Clock host_;
  std::function<void(const Clock&)> learned_;
  Order order_;
  std::vector<std::string> reports_;
  std::unique_ptr<Pace> pace_;
};

double NowMs();
// While one lives, this thread's time is the device's own, and not that of whoever calls it.
class OwnTime {
 public:
  OwnTime();
  ~OwnTime();
  static double seconds();  // so far, of this thread
};
// Of this thread.
int CurrentStream();
int ExchangeStream(int stream);

}  // namespace soft
