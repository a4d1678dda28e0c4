#include "passes/stages/stage_times.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

#include "base/scan.h"
#include "cost/kernel_model.h"
#include "ir/op_table.h"
#include "passes/stages/played.h"

namespace interlace::stages {
namespace {

size_t TurnIndex(Turn turn) {
  return turn == Turn::kForward ? 0 : turn == Turn::kBackward ? 1 : 2;
}

// What the ops of one stage make and need of a micro-batch.
class StageBytes {
 public:
  StageBytes(const Program& program, const Flow& flow, const Layout& layout, int32_t stage) : flow_(flow) {
    for (int32_t i = 0; i < flow.size(); ++i) {
      if (layout.stage[i] != stage) continue;
      const size_t turn = TurnIndex(layout.turn[i]);
      ops_.emplace_back(i, turn);
      const auto touch = [&](ValueId root) {
        if (flow.DefOf(root) < 0 || IsAddedUp(root)) return;  // declared
        const auto [life, fresh] = lives_.try_emplace(root, Life{turn, turn, i, flow.Bytes(root)});
        life->second.until = std::max(life->second.until, turn);
        life->second.last = i;
        // What another stage of this rank waits for (parts of a tied weight's gradient) is there until then.
        for (const int32_t reader : turn == 0 ? std::vector<int32_t>() : flow.Readers(root)) {
          const int32_t of = layout.stage[reader];
          if (of >= 0 && of != stage && layout.RankOf(of) == layout.RankOf(stage)) life->second.until = 2;
        }
      };
      for (ValueId id : flow.op(i).results) {
        if (id != kNone && program.RootOf(id) == id) touch(id);
      }
      for (ValueId root : flow.Needs(i)) touch(root);
    }
    for (const Message& message : layout.messages) {  // what is sent is there until its wait
      const auto life = lives_.find(message.root);
      if (message.from.stage != stage || life == lives_.end()) continue;
      const size_t waits = message.from.turn == Turn::kForward ? 1 : 2;
      life->second.until = std::max(life->second.until, waits);
    }
  }

  // Of what is there behind a turn for a later one.
  int64_t Behind(size_t turn) const {
    double bytes = 0;
    for (const auto& [root, life] : lives_) bytes += life.from <= turn && life.until > turn ? life.bytes : 0;
    return static_cast<int64_t>(bytes);
  }
  // The most while the ops of these turns run as one part.
  int64_t Peak(size_t first, size_t last) const {
    double live = 0;
    for (const auto& [root, life] : lives_) live += life.from < first && life.until >= first ? life.bytes : 0;
    double most = live;
    std::map<ValueId, bool> here;
    for (const auto& [i, turn] : ops_) {
      if (turn < first || turn > last) continue;
      const auto begin = [&](ValueId root) {
        const auto life = lives_.find(root);
        if (life != lives_.end() && life->second.from >= first && here.try_emplace(root, true).second)
          live += life->second.bytes;
      };
      for (ValueId id : flow_.op(i).results) {
        if (id != kNone) begin(id);
      }
      for (ValueId root : flow_.Needs(i)) begin(root);
      most = std::max(most, live);
      for (ValueId root : flow_.Needs(i)) {
        const auto life = lives_.find(root);
        if (life != lives_.end() && life->second.last == i && life->second.until <= last) live -= life->second.bytes;
      }
    }
    return static_cast<int64_t>(most);
  }

 private:
  // A gradient of a parameter: it is made in the place where those of all micro-batches are added up.
  bool IsAddedUp(ValueId root) const {
    const auto& readers = flow_.Readers(root);
    return !readers.empty() &&
           std::all_of(readers.begin(), readers.end(), [&](int32_t i) { return flow_.op(i).kind == OpKind::kGrad; });
  }

  struct Life {
    size_t from, until;  // turns
    int32_t last;        // op
    double bytes;
  };
  const Flow& flow_;
  std::vector<std::pair<int32_t, size_t>> ops_;  // and their turns
  std::map<ValueId, Life> lives_;                // by root
};

Status AddTimes(Measured& out, const Program& program, const Flow& flow, const Layout& layout, CostModel& model,
                const PassCosts& costs) {
  // By stage: what is gathered for gradients of weights, which is there from their begin and travels beside them.
  std::vector<int64_t> beside(out.pipe.times.size(), 0);
  for (int32_t i = 0; i < flow.size(); ++i) {
    if (layout.stage[i] < 0) continue;
    StageTime& of = out.pipe.times[static_cast<size_t>(layout.stage[i])];
    const size_t turn = TurnIndex(layout.turn[i]);
    int64_t& time = turn == 0 ? of.forward : turn == 1 ? of.backward : of.weights;
    if (flow.op(i).kind == OpKind::kGrad) {  // added to those of other micro-batches, a product's by the product
      const ValueId root = program.RootOf(flow.op(i).args[1].value);
      const int32_t def = flow.DefOf(root);
      if (def < 0 || flow.op(def).name == "aten.mm") continue;
      INTERLACE_ASSIGN(const int64_t bytes, program.StorageBytes(program.value(root).type));
      time += static_cast<int64_t>(1e6 * KernelUs(costs.cluster, {.bytes = 3.0 * static_cast<double>(bytes)}));
    }
    if (TakesNoTime(flow.op(i))) continue;
    INTERLACE_ASSIGN(const OpCost cost, model.Cost(flow.op(i)));
    const bool gathers = turn == 2 && flow.op(i).kind == OpKind::kAllGatherStart;
    (gathers ? beside[static_cast<size_t>(layout.stage[i])] : time) += stages::TimeOf(cost);
  }
  for (size_t s = 0; s < beside.size(); ++s) {
    int64_t& weights = out.pipe.times[s].weights;
    weights = std::max(weights, beside[s]);
  }
  return Ok{};
}

Result<std::vector<int64_t>> Numbers(std::string_view text, std::string_view name) {
  std::vector<int64_t> numbers;
  for (std::string_view word : Split(text, ',')) {
    int64_t number = -1;
    const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (problem != std::errc() || end != word.data() + word.size() || number < 0 || number > (int64_t{1} << 50))
      return MakeError("meta \"", name, "\" has '", word, "' where a number is expected");
    numbers.push_back(number);
  }
  return numbers;
}

}  // namespace

Result<Measured> Measure(const Program& program, const Flow& flow, const Layout& layout,
                         const std::vector<Border>& borders, CostModel& model, const PassCosts& costs,
                         const std::string& axis) {
  Measured out;
  out.pipe.deal = layout.deal;
  out.pipe.times.assign(borders.size() + 1, {0, 0, 0, 0, 0, 0, {0, 0, 0}});
  INTERLACE_TRY(AddTimes(out, program, flow, layout, model, costs));
  for (size_t s = 0; s < out.pipe.times.size(); ++s) {
    StageTime& time = out.pipe.times[s];
    if (s < borders.size()) {
      INTERLACE_ASSIGN(const OpCost cost,
                       model.CollectiveCost(interlace::Exchange::kPointToPoint, axis,
                                            std::max(borders[s].bytes, borders[s].back), /*units=*/1));
      const double beside = model.interference().factor[0b0011][1];  // something else is computed meanwhile
      time.message = static_cast<int64_t>(static_cast<double>(stages::TimeOf(cost)) * beside);
    }
    const StageBytes bytes(program, flow, layout, static_cast<int32_t>(s));
    time.held = bytes.Behind(0), time.kept = bytes.Behind(1);
    for (size_t turn = 0; turn < 3; ++turn) time.peak[turn] = bytes.Peak(turn, turn);
    out.whole.push_back(bytes.Peak(1, 2));
  }
  out.of_params.assign(static_cast<size_t>(layout.deal.ranks), 0);
  for (const Param& param : program.params) {
    INTERLACE_ASSIGN(const int64_t bytes, program.StorageBytes(program.value(param.value).type));
    const auto shared = layout.shared.find(param.value);
    if (shared == layout.shared.end()) {
      out.of_params[static_cast<size_t>(layout.RankOf(layout.home[param.value]))] += bytes;
    } else {
      for (int64_t rank : shared->second) out.of_params[static_cast<size_t>(rank)] += bytes;
    }
  }
  return out;
}

std::vector<int64_t> RoomOf1F1B(const Measured& plain, const Measured& of, int64_t micro_batches, int64_t data) {
  std::vector<int64_t> fullest;  // by rank: of 1F1B, with gradients of weights in backward parts
  Pipe pipe = plain.pipe;
  pipe.room.assign(static_cast<size_t>(pipe.deal.ranks), 0);  // with any, bytes count
  for (size_t s = 0; s < pipe.times.size(); ++s) pipe.times[s].peak[1] = plain.whole[s], pipe.times[s].kept = 0;
  for (int64_t rank = 0; rank < pipe.deal.ranks; ++rank) {
    const Shape shape{.rank = rank, .deal = pipe.deal, .micro_batches = micro_batches};
    fullest.push_back(MostBytes(OneForwardOneBackward(shape), pipe, static_cast<size_t>(rank)));
  }
  std::vector<int64_t> room(of.of_params.size(), std::numeric_limits<int64_t>::max());
  for (int64_t eighths = 32 / data; eighths <= 32; ++eighths) {
    int64_t most = 0;
    for (size_t r = 0; r < fullest.size(); ++r) most = std::max(most, plain.of_params[r] / 8 * eighths + fullest[r]);
    for (size_t r = 0; r < room.size(); ++r) room[r] = std::min(room[r], most - of.of_params[r] / 8 * eighths);
  }
  for (int64_t& bytes : room) bytes = std::max<int64_t>(bytes, 0);
  return room;
}

void WritePipe(Program& program, const Pipe& pipe) {
  std::string text, room;
  for (const StageTime& time : pipe.times) {
    text += text.empty() ? "" : ";";
    for (const int64_t number : {time.forward, time.backward, time.weights, time.message, time.held, time.kept,
                                 time.peak[0], time.peak[1], time.peak[2]}) {
      text += (text.empty() || text.back() == ';' ? "" : ",") + std::to_string(number);
    }
  }
  for (const int64_t bytes : pipe.room) room += (room.empty() ? "" : ",") + std::to_string(bytes);
  program.SetMeta("stages.times", text);
  if (!room.empty()) program.SetMeta("stages.room", room);
}

void WriteDeal(Program& program, const Layout& layout) {
  if (!layout.deal.v) return;
  program.SetMeta("stages.deal", "v");
  std::vector<int64_t> takers;
  for (int64_t stage = 0; stage < layout.deal.Stages(); ++stage) takers.push_back(std::max<int64_t>(stage - 1, 0));
  bool further = false;
  for (const Message& message : layout.messages) {
    if (message.from.turn != Turn::kBackward) continue;
    // A storage that the rank's other stage has, too, may be waited for behind that one.
    for (int64_t stage = message.to.stage + 1; stage <= message.from.stage; ++stage) {
      if (layout.deal.RankOf(stage) != layout.deal.RankOf(message.from.stage) || takers[stage] <= message.to.stage)
        continue;
      takers[stage] = message.to.stage, further = true;
    }
  }
  std::string text;
  for (const int64_t taker : takers) text += (text.empty() ? "" : ",") + std::to_string(taker);
  if (further) program.SetMeta("stages.takers", text);
}

Result<Pipe> ReadPipe(const Program& program, int64_t ranks, int64_t chunks) {
  Pipe out;
  out.deal = {ranks, chunks, program.Meta("stages.deal") != nullptr && *program.Meta("stages.deal") == "v"};
  if (const std::string* text = program.Meta("stages.times"); text != nullptr) {
    for (std::string_view stage : Split(*text, ';')) {
      INTERLACE_ASSIGN(const std::vector<int64_t> n, Numbers(stage, "stages.times"));
      if (n.size() != 9) return MakeError("meta \"stages.times\" has ", n.size(), " numbers for a stage, not 9");
      out.times.push_back({n[0], n[1], n[2], n[3], n[4], n[5], {n[6], n[7], n[8]}});
    }
  }
  if (const std::string* text = program.Meta("stages.room"); text != nullptr) {
    INTERLACE_ASSIGN(out.room, Numbers(*text, "stages.room"));
    if (static_cast<int64_t>(out.room.size()) != ranks)
      return MakeError("meta \"stages.room\" has ", out.room.size(), " numbers for ", ranks, " ranks");
  }
  if (const std::string* text = program.Meta("stages.takers"); text != nullptr) {
    INTERLACE_ASSIGN(out.takers, Numbers(*text, "stages.takers"));
    for (size_t stage = 0; stage < out.takers.size(); ++stage) {
      const bool before = out.takers[stage] < static_cast<int64_t>(std::max<size_t>(stage, 1));
      if (static_cast<int64_t>(out.takers.size()) != out.deal.Stages() || !before)
        return MakeError("meta \"stages.takers\" names no stage before each of ", out.deal.Stages());
    }
  }
  return out;
}

}  // namespace interlace::stages
