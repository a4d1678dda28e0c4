// comm_link.h — what all Comms of one pair of gloo groups share: the groups, the message tags, and who failed.
//
// A rank that meets a lost or silent peer stops, and its own end closes its connections; to the ranks that wait for
// *it*, it would look like the culprit. So a rank that gives up sends a note to all others over connections that were
// made ready beforehand (a receive for a note is always pending from every peer). A note says that its sender is alive
// and for whom it waited; the culprits are the ranks that somebody waited for and that sent no note.
//
//   rank 2 is killed:   0 <- (closed) - 2      0: "rank 2 was lost", sends a note to 1
//                       1 waits for 0 ......   0 exits, 1 sees 0 closed, reads the note: "rank 2 was lost (rank 0
//                       says)"
//   rank 2 hangs:       0 waits for 1, which waits for 2: at the deadline both send notes; 0 reads 1's and names 2
//
// gloo closes a whole group when a wait in it times out. Notes of time-outs therefore go out at the deadline, and the
// waits themselves end kGraceMs later.
//
// A link outlives its Comms: a pending receive must not be dropped while its group lives, and a later Comm on the same
// groups continues the same sequence of tags.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "base/result.h"
#include "runtime/comm.h"

namespace interlace {

class GlooLink {
 public:
  // The link of the spec's two groups. Error: unknown group name, wrong rank or size, a group without a CPU backend.
  static Result<std::shared_ptr<GlooLink>> Open(const AxisSpec& spec);

  // Posts a transfer; throws what c10d throws. Data from rank a to rank b travels on `up` when a < b, else on `down`.
  c10::intrusive_ptr<c10d::Work> Send(const at::Tensor& tensor, int peer, int tag);
  c10::intrusive_ptr<c10d::Work> Receive(const at::Tensor& tensor, int peer, int tag);

  // The first of `count` consecutive tags, unused for the last 2^29 messages. The same on every rank, because every
  // rank issues the same operations in the same order.
  int NextTags(int count);

  // A transfer that failed or may not have ended.
  struct Suspect {
    int peer = 0;
    bool up = false;                      // the group it travels on
    c10::intrusive_ptr<c10d::Work> work;  // null: it could not be posted
  };

  // How long a wait goes on after its deadline, for notes to arrive.
  static constexpr int64_t kGraceMs = 500;
  // At the deadline: tells the other ranks that this one is alive and waited for `peer`. Fail must follow.
  void Warn(int peer, const std::string& label, double elapsed_s);

  // Makes the link unusable and says why. `first` failed with `what`, `elapsed_s` after the wait began; `others` are
  // the transfers of the same operation that nobody has waited for. Tells the other ranks. A second call gives the
  // first call's error.
  Error Fail(const Suspect& first, const std::vector<Suspect>& others, const std::string& what,
             const std::string& label, double elapsed_s);

  // This rank stops for a reason of its own: closes both groups, so that nobody waits for it. No note is sent, which
  // makes this rank the culprit that the others name.
  void Leave();

  // Set once Fail or Leave was called.
  std::optional<Error> failure() const;

  // Keeps transfers that a failure left open, with their tensors, as long as the group: it may still write into them.
  void Bury(std::shared_ptr<void> transfers);

 private:
  struct Note {  // what one rank tells the others, as bytes
    int32_t timed_out = 0;
    int32_t count = 0;
    int32_t ranks[13] = {};
    float seconds = 0;
    char label[64] = {};

    void Add(int rank);
    bool Has(int rank) const;
  };
  struct Direction {  // one process group
    std::string name;
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    c10::intrusive_ptr<c10d::Backend> backend;
    std::vector<at::Tensor> notes;                        // one buffer a peer
    std::vector<c10::intrusive_ptr<c10d::Work>> pending;  // their receives
  };
  struct Verdict {
    Note note;
    int reporter = -1;  // the rank whose note it is; -1: seen by this rank
  };

  GlooLink() = default;
  static Result<Direction> Resolve(const AxisSpec& spec, const std::string& name);
  static Note MakeNote(bool timed_out, int peer, const std::string& label, double seconds);
  void PostNotes(Direction& direction);
  // The note of a peer, if one came (or comes within `patience_ms`) on this group. Running out of patience closes the
  // group.
  std::optional<Verdict> ReadNote(Direction& direction, int peer, int64_t patience_ms);
  void TellOthers(const Note& note);
  // The verdict by all notes that have come on `direction`, which must be closed; `own` is what this rank saw.
  Verdict Judge(Direction& direction, const Note& own);
  std::string Explain(const Verdict& verdict, const std::string& label) const;
  std::string RankNames(const int32_t* ranks, int32_t count) const;

  std::string axis_;
  int rank_ = 0, size_ = 1;
  std::vector<uint64_t> global_ranks_;  // by rank of the group; empty where the group does not know
  Direction up_, down_;
  mutable std::mutex mutex_;
  int next_tag_ = 0;
  std::optional<Error> failure_;
  bool warned_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> told_;
  std::vector<std::shared_ptr<void>> buried_;
};

}  // namespace interlace
