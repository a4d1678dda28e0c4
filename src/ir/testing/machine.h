// machine.h — the memory of all ranks and the execution of single ops; the interpreter drives it phase by phase.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "ir/liveness.h"
#include "ir/program.h"
#include "ir/residency.h"
#include "ir/testing/dense.h"
#include "ir/testing/interpreter.h"
#include "ir/testing/mailbox.h"

namespace interlace::testing {

// A machine that is one stage of a program set: the ranks with this index along the axis.
struct StageOfSet {
  std::string axis;
  int64_t index = 0;
  Mailbox* mail = nullptr;
};

class Machine {
 public:
  // `ranks` is 0 for the ranks of the mesh. The program and the options must outlive the machine.
  Machine(const Program& program, const InterpretOptions& options, int64_t ranks, const StageOfSet* stage = nullptr);

  int64_t ranks() const { return ranks_; }
  Status Init();                 // storage of parameters, buffers, constants and states, with their first values
  void BeginStep(int64_t step);  // states of one step are forgotten, but for what pending ops (ir/pending.h) use
  void SetInputs(int64_t micro_batch);
  Status RunPhase(const Phase& phase);
  Status Flush();  // runs what the last step left pending

  Result<Dense> Read(int64_t rank, ValueId id) const;
  Status Write(int64_t rank, ValueId id, const Dense& x);
  // States that are out come back for whoever reads them after the last step.
  Status BringBack();
  // First value of a rank's part of a parameter.
  Dense InitialParam(const Param& param, int64_t rank) const;
  std::vector<double> Hyper(int32_t group, bool pending = false) const;  // with t of this step, or of the one before
  // Whole parameters after the last step. Error: ranks disagree.
  Result<std::map<std::string, std::vector<double>>> FinalParams() const;

  // What the phases of the step left: outputs by name and rank, gradients of `grad` ops by parameter value and rank.
  std::map<std::string, std::vector<Dense>> outputs;
  std::map<ValueId, std::vector<Dense>> grads;
  double norm = -1;  // of the last norm.coef

 private:
  using Bytes = std::vector<std::byte>;
  struct Binding {  // of a root's storage
    std::shared_ptr<Bytes> bytes;
    int64_t base = 0;
  };
  static constexpr int64_t kOfCollectives = int64_t{1} << 40;  // added to addresses: their own messages
  static constexpr int64_t kOfChannel = int64_t{1} << 41;      // the same, times the channel
  struct Flight {  // what a start computed and its wait delivers: contiguous, by rank
    std::vector<Bytes> data;
    OpKind start = OpKind::kUnknown;
    std::vector<int64_t> peers;   // of a message: the other rank, by rank
    std::vector<size_t> numbers;  // of a receive, by rank: which message from there; with all stages: by rank and stage
    bool with_stages = false;     // a sum over the stages
  };

  // memory
  Result<int64_t> ByteOffset(int64_t rank, ValueId id) const;
  Result<std::byte*> Address(int64_t rank, ValueId id) const;
  Status Allocate(int64_t rank, ValueId root);
  Result<Bytes> ReadBytes(int64_t rank, ValueId id) const;  // contiguous, row-major
  Status WriteBytes(int64_t rank, ValueId id, const Bytes& bytes);
  std::vector<int64_t> Sizes(ValueId id) const;
  std::vector<size_t> ElementsOf(const Param& param, int64_t rank, size_t& count) const;  // machine_params.cc
  Dense Flat(const Unit& unit, int64_t rank) const;  // initial weights in the unit's layout
  Status InitStates();

  // ops
  Status RunOp(const Op& op);
  Status RunLibraryOp(const Op& op);
  Status RunCall(const Op& op, int64_t rank);
  Status RunOwnOp(const Op& op);
  Status DefineResults(const Op& op);  // storage of results that own it
  Status Mark(const Op& op);           // grad, output
  Status Copy(const Op& op, ValueId from, ValueId to);
  Status Start(const Op& op);  // machine_transfers.cc
  Status StartMessage(const Op& op, Flight& flight);
  Status StartWithStages(const Op& op, ValueId source, Flight& flight);
  Status AddStages(Flight& flight, DType dtype);
  Result<int64_t> PeerOf(const Op& op, int64_t rank) const;
  Status Wait(const Op& op);
  Result<Bytes> Exchanged(const Op& op, size_t index, int64_t rank, const std::vector<Bytes>& all) const;
  Status Relocate(const Op& op, const Move& move);  // offload.*, reload.*
  Status GradBegin(const Op& op);
  Status NormPartial(const Op& op);
  Status NormCoef(const Op& op);
  Status Update(const Op& op);
  Status UpdateOnHost(const Op& op);  // of storages that are out
  Result<Bytes> AddInRankOrder(const std::vector<Bytes>& parts, DType dtype) const;
  std::vector<int64_t> Peers(int64_t rank, std::string_view axis) const;  // ranks along an axis, this one among them
  int64_t Coordinate(int64_t rank, std::string_view axis) const;
  int64_t DataRank(int64_t rank) const;  // ranks along axes that cut parameters see the same inputs and draw the same

  const Program& program_;
  const InterpretOptions& options_;
  std::vector<Axis> mesh_;  // the program's; of a stage without the axis of the stages
  int64_t ranks_ = 1;
  std::string stage_axis_;  // empty: the program is no stage
  int64_t stages_ = 1;
  int64_t first_address_ = 0;  // for messages: rank r of this machine is at first_address_ + r
  Mailbox own_mail_;
  Mailbox* mail_ = &own_mail_;
  int64_t step_ = 0, micro_batch_ = 0;
  std::vector<interlace::Binding> rank_symbols_;          // by rank: rank_AXIS
  std::vector<std::vector<Binding>> storage_;             // by rank and root
  std::unordered_map<ValueId, Flight> flights_;           // by the result's name in the phase at hand
  std::unordered_map<ValueId, std::vector<Bytes>> away_;  // by root: what the tier has, by rank
  struct Given {
    std::vector<Binding> storage;  // by rank
    bool in_flight = false;
    Flight flight;
  };
  std::vector<Given> given_;                                  // by the last phase
  std::map<std::pair<std::string, int64_t>, Given> carried_;  // by name and micro-batch
  std::unordered_map<const Phase*, PhaseLiveness> liveness_;
  std::map<std::pair<int64_t, int64_t>, size_t> receives_;  // by sender and receiver: receives begun
  std::unordered_map<ValueId, OpId> pending_;               // by root of a step state: the last pending op that uses it
};

}  // namespace interlace::testing
