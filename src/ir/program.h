// program.h — the one data structure: what a training step computes, communicates and moves, in issue order.
//
// A Program owns values and ops; ids are dense per kind of table, addresses are stable (deques), Clone() is explicit.
// docs/ir.md gives the text form and the meaning of every field and op; verifier.h checks the rules; a Program itself
// only holds data. Passes edit the op list of a phase and leave dead ops and values behind; Compact() drops them.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "ir/dim.h"
#include "ir/dtype.h"
#include "ir/op_kind.h"
#include "ir/rule.h"

namespace interlace {

using ValueId = int32_t;
using OpId = int32_t;
using UnitId = int32_t;
inline constexpr int32_t kNone = -1;

inline constexpr int64_t kUnitAlignment = 32;  // elements; parameters and shards start at multiples of it
inline constexpr int32_t kMaxValues = 1 << 28;
inline constexpr int64_t kNormLimbs = 68;  // int64 words of the exact norm accumulator

enum class Level : uint8_t { kCaptured, kSharded, kScheduled };
inline constexpr std::string_view kLevelNames[] = {"captured", "sharded", "scheduled"};
enum class Part : uint8_t { kNone, kForward, kBackward, kUpdate };
inline constexpr std::string_view kPartNames[] = {"", "fwd", "bwd", "upd"};  // the tags

struct Type {
  DType dtype = DType::kF32;
  std::vector<Dim> sizes;
  std::vector<Dim> strides;  // elements; always filled (contiguous unless said otherwise)
  friend bool operator==(const Type&, const Type&) = default;
};

enum class ValueKind : uint8_t { kResult, kParam, kBuffer, kInput, kConst, kState, kTake };

struct Value {
  ValueId id = kNone;
  ValueKind kind = ValueKind::kResult;
  Type type;
  ValueId root = kNone;  // owner of the storage; equals id when this value owns it
  Dim offset;            // elements from the root's start
  bool placed = false;   // `into`: computed fresh, written at the place; otherwise a place means a view
  OpId def = kNone;      // defining op for kResult
  int32_t result_index = 0;
};

// One argument of an op.
struct Arg {
  enum class Kind : uint8_t { kNone, kValue, kInt, kFloat, kBool, kString, kWord, kList };
  Kind kind = Kind::kNone;
  bool boolean = false;
  ValueId value = kNone;
  Dim integer;
  double real = 0;
  std::string text;  // kString: unescaped; kWord: dtypes, memory formats (preserve, contiguous, channels_last)
  std::vector<Arg> list;

  Arg();  // copied, moved and destroyed in so many places that the code is compiled once, in program.cc
  Arg(const Arg&);
  Arg(Arg&&) noexcept;
  Arg& operator=(const Arg&);
  Arg& operator=(Arg&&) noexcept;
  ~Arg();
  static Arg None();
  static Arg Of(ValueId v);
  static Arg Int(Dim d);
  static Arg Float(double d);
  static Arg Bool(bool b);
  static Arg String(std::string s);
  static Arg Word(std::string s);
  static Arg List(std::vector<Arg> l);
  friend bool operator==(const Arg&, const Arg&) = default;
};

struct NamedArg {
  std::string name;
  Arg arg;
  friend bool operator==(const NamedArg&, const NamedArg&) = default;
};

struct Op {
  OpId id = kNone;
  OpKind kind = OpKind::kUnknown;  // follows from the name
  std::string name;  // "aten.mm", "gather.start", ...: for printing, and of a library's operator the operator
  std::vector<ValueId> results;  // kNone for "_"
  std::vector<Arg> args;         // positional
  std::vector<NamedArg> named;   // keyword arguments of the operator
  // tail
  Part part = Part::kNone;
  int32_t module = kNone;
  int32_t source = kNone;
  std::optional<Lane> lane;  // explicit; LaneOf(op) in op_table.h gives the effective one
  std::vector<UnitId> units;
  std::optional<int64_t> rng;   // random stream key
  std::vector<ValueId> writes;  // operands an ATen op mutates
  std::vector<NamedArg> attrs;  // every other `name=literal` of the tail, in order

  Op();  // like Arg's
  Op(const Op&);
  Op(Op&&) noexcept;
  Op& operator=(const Op&);
  Op& operator=(Op&&) noexcept;
  ~Op();
  void SetName(std::string new_name);                 // and the kind with it
  const Arg* Attr(std::string_view attr_name) const;  // nullptr when absent
  void SetAttr(std::string_view attr_name, Arg arg);  // adds or replaces
};

// A parameter's placement along a mesh axis that cuts it into equal parts along a dimension, one a rank: the type that
// is declared is that of a part. Of fused weights each of `blocks` equal blocks of the dimension is cut, and a part
// holds its piece of every one. Along an axis that no cut and no unit names, ranks hold the same.
struct Cut {
  std::string axis;
  int64_t dim = 0;
  int64_t blocks = 1;
  friend bool operator==(const Cut&, const Cut&) = default;
};
struct Param {
  ValueId value = kNone;
  std::string name;
  bool trainable = true;
  int32_t group = kNone;  // optimizer parameter group
  UnitId unit = kNone;
  int64_t unit_offset = 0;           // elements
  std::vector<std::string> aliases;  // other names of a tied parameter
  std::vector<Cut> cuts;
  // Of a stage: the ranks along the axis of the stages that have the parameter, this one among them, ascending; empty:
  // no other has. They hold the same and add up their gradients; the first is the one that counts in a norm.
  std::vector<int64_t> shared;
};
struct Buffer {
  ValueId value = kNone;
  std::string name;
  bool persistent = true;
};
struct Input {
  ValueId value = kNone;
  std::string name;
};
struct Const {
  ValueId value = kNone;
  std::string name;
  Arg data;
};  // data: row-major list of numbers
struct State {
  ValueId value = kNone;
  std::string role;        // "shard", "full", "grad", "exp_avg", ...
  UnitId unit = kNone;     // printed as "u0.role" when set
  bool persistent = true;  // else it lives within one step
  bool out = false;        // between steps it lies in the tier, not in memory (residency.h)
};
// Axes of the mesh are written as one word, "dp" or "replica,dp": neighbours in the mesh, in its order.
struct Unit {
  UnitId id = kNone;
  std::string axis;  // over which it is sharded
  DType dtype = DType::kF32;
  int64_t numel = 0;     // padded, of the full buffer
  int64_t shard = 0;     // numel / ranks along `axis`
  std::string replicas;  // axes whose ranks have the same shard and add up their gradients; empty: none
  int64_t part = 0;      // of the shard, whose gradient and optimizer states are here, another on each replica; 0: all

  int64_t own() const { return part > 0 ? part : shard; }
  bool parted() const { return own() < shard; }
};
inline bool SameAxes(const Unit& a, const Unit& b) {
  return a.axis == b.axis && a.replicas == b.replicas && a.parted() == b.parted();
}
// What a phase runs for: each micro-batch, whose inputs it sees, or a step.
enum class PhaseKind : uint8_t { kMicroBatch, kStep };
// A storage that a run leaves, by name, for a later run for the same micro-batch.
struct Carried {
  std::string name;
  ValueId value = kNone;
};
struct Phase {
  std::string name;
  std::vector<ValueId> takes, gives;
  std::vector<OpId> ops;
  PhaseKind kind = PhaseKind::kMicroBatch;
  std::vector<Carried> saves = {}, loads = {};  // the values of loads are of kind kTake

  std::vector<ValueId> Incoming() const;  // takes and loads
  std::vector<ValueId> Outgoing() const;  // gives and what is saved
};
// Part of the run order: `count` runs of a phase, one after the other. Of a micro-batch phase the first run is of
// micro-batch `first`, and each following one of the next (with `width` side by side: of the next `width`).
struct OrderEntry {
  std::string phase;
  int64_t first = kNone;  // kNone: of a phase that runs once a step
  int64_t count = 1;
  friend bool operator==(const OrderEntry&, const OrderEntry&) = default;
};
struct Axis {
  std::string name;
  int64_t size = 1;
};
// The ranks along some axes: those at `base + i * stride`, i < size, of a mesh whose last axis varies fastest.
struct AxisGroup {
  int64_t size = 1, stride = 1;
  int64_t first = 0;  // the rank that the mesh begins with: of stages that are unlike, the stage's first
  int64_t IndexOf(int64_t rank) const { return (rank - first) / stride % size; }
  int64_t BaseOf(int64_t rank) const { return rank - IndexOf(rank) * stride; }
};
// Of "dp" or "replica,dp"; an axis that the mesh lacks counts as one rank.
AxisGroup GroupOf(const std::vector<Axis>& mesh, std::string_view axes);
std::vector<std::string_view> AxesOf(std::string_view axes);  // "replica,dp" → "replica", "dp"
bool NamesAxis(std::string_view axes, std::string_view axis);
// The rank symbols of the mesh's first rank, for what is the same on all.
Binding FirstRank(const std::vector<Axis>& mesh);
// Where ranks along several axes exchange in rows and columns: how many a row has, those along the last axis of more
// than one rank. 0: there is no other such axis.
int64_t RowOf(const std::vector<Axis>& mesh, std::string_view axes);
// Which stage of a program set a program is: that of the ranks with this index along the axis of the stages. Where
// stages have different numbers of ranks, `ranks` says how many: the axis then has an index for every rank of the set,
// stage after stage, and the other axes are those of this stage alone.
struct StageOf {
  std::string axis;
  int64_t index = 0;
  std::vector<int64_t> ranks = {};
  bool unlike() const { return !ranks.empty(); }
  // The set's rank that a stage begins with.
  int64_t First(int64_t stage) const {
    int64_t sum = 0;
    for (int64_t s = 0; s < stage; ++s) sum += ranks[static_cast<size_t>(s)];
    return sum;
  }
  friend bool operator==(const StageOf&, const StageOf&) = default;
};
struct Symbol {
  std::string name;
  int64_t min = 0, max = 0;
};
// What becomes of a group's matrices between two elementwise steps (Muon): each is made orthogonal by Newton-Schulz
// iterations, in bfloat16.
struct Orthogonal {
  int32_t apply = kNone;          // the group whose rule takes the result as its gradient
  int64_t steps = 0;              // iterations
  std::array<double, 3> by = {};  // coefficients of the quintic
  double eps = 0;                 // least norm
  std::string ratio;              // of the result, by the matrix' shape: original, match_rms_adamw, none
};
// What a group's step takes of whole parameters (Adafactor): averages of squares over rows and columns, and sizes of
// weights and update.
struct Factored {
  int32_t average = kNone;  // the group whose rule takes a mean of squares into its average
  int32_t apply = kNone;    // the group whose rule takes the update as its gradient
  // The least mean of squares, whose square is the least one that the gradient is divided by; the least root mean
  // square of the weights that the size of the update follows.
  std::array<double, 2> eps = {};
  double clip = 0;  // the root mean square of the update, at most
};
struct Group {
  int32_t id = 0;
  std::string optimizer;
  int32_t rule = kNone;  // of the optimizer "rule"
  std::optional<Orthogonal> orthogonal = std::nullopt;
  std::optional<Factored> factored = std::nullopt;
};
// A region: a body that `call f0` runs as one op (func.h). Never changed, so clones share it.
class Program;
struct Func {
  std::shared_ptr<const Program> body;
  std::string key;  // SHA-256 of the body's text: 64 hexadecimal digits
};
struct Module {
  int32_t id = 0;
  std::string path, class_name;
};
struct Source {
  int32_t id = 0;
  std::string place;
};

class Program {
 public:
  Level level = Level::kCaptured;
  std::vector<std::pair<std::string, std::string>> meta;
  std::vector<Axis> mesh;
  std::optional<StageOf> stage;  // none: all ranks run the program
  std::vector<Symbol> symbols;
  int64_t accumulation = 1;  // micro-batches a step
  int64_t width = 1;         // of them in one run of a micro-batch phase, side by side (pass breadth_first)
  std::string accumulate_mode = "reduce_each";
  std::vector<UpdateRule> rules;  // index = id
  std::vector<Func> funcs;        // called "f" and the index
  std::vector<Group> groups;
  std::vector<Module> modules;  // index = id
  std::vector<Source> sources;  // index = id
  std::vector<Unit> units;      // index = id
  std::vector<Param> params;
  std::vector<Buffer> buffers;
  std::vector<Input> inputs;
  std::vector<Const> consts;
  std::vector<State> states;
  std::vector<Phase> phases;      // in text order
  std::vector<OrderEntry> order;  // empty: DefaultOrder()
  DimTable dims;

  Program();
  Program(Program&&);
  Program& operator=(Program&&);
  ~Program();
  Program& operator=(const Program&) = delete;
  Program Clone() const;

  // Values and ops by id. Ids may have gaps after parsing: HasValue tells.
  int32_t num_values() const { return static_cast<int32_t>(values_.size()); }
  int32_t num_ops() const { return static_cast<int32_t>(ops_.size()); }
  bool HasValue(ValueId id) const { return id >= 0 && id < num_values() && values_[id].id == id; }
  Value& value(ValueId id) {
    if (tracks_) Note(changed_values_, value_noted_, id);
    return values_[id];
  }
  const Value& value(ValueId id) const { return values_[id]; }
  Op& op(OpId id) {
    if (tracks_) Note(changed_ops_, op_noted_, id);
    return ops_[id];
  }
  const Op& op(OpId id) const { return ops_[id]; }

  // A new value that owns contiguous or strided storage (empty strides: contiguous).
  Value& AddValue(ValueKind kind, Type type);
  // The same with a chosen id (parser). Error: taken, negative, or beyond kMaxValues.
  Result<ValueId> AddValueWithId(ValueId id, ValueKind kind, Type type);
  // A new op that belongs to no phase yet; the caller puts its id into a phase's list.
  Op& AddOp(std::string name);
  Op& AddOp(OpKind kind);  // of our own
  // Adds a result to an op: a fresh value, a view of `root`, or a placed value in `root`.
  ValueId AddResult(Op& op, Type type);
  ValueId AddView(Op& op, Type type, ValueId root, Dim offset);
  ValueId AddPlaced(Op& op, Type type, ValueId root, Dim offset);

  ValueId RootOf(ValueId id) const { return values_[id].root; }
  int64_t AxisSize(std::string_view axes) const { return GroupOf(mesh, axes).size; }
  // The ranks along some axes, numbered as the set numbers them.
  AxisGroup GroupAlong(std::string_view axes) const;
  // Ranks that the mesh has or, of stages that are unlike, all of them.
  int64_t Ranks() const;
  // Stages of the set that the program is one of.
  int64_t Stages() const;
  Dim AxisRank(std::string_view axes);  // this rank's index along them: rank_dp, or rank_replica*2+rank_dp
  // The axes of a unit's shards and replicas, in the mesh's order: "replica,dp".
  std::string DataAxes(const Unit& unit) const;
  // Axes along which ranks of the program transfer something, each entry a group that needs connections: of gathers and
  // collectives their axes; of reductions with replicas the data axes where a transport reduces on a grid of ranks,
  // else the shard axes and the replicas'. More than one rank each; sorted.
  std::vector<std::string> TransferAxes(bool grids) const;
  // Axes along which ranks send to single others (send, recv), and how many channels each has. More than one rank each;
  // sorted.
  std::map<std::string, int64_t> MessageAxes() const;
  // Ranks that add up their gradients of a unit, and so what a sum is divided by for the mean.
  int64_t DataRanks(const Unit& unit) const { return AxisSize(unit.axis) * AxisSize(unit.replicas); }
  // The axes, in the mesh's order, along which ranks that run this program hold different elements of a unit's
  // parameters, of which each has so many: those that cut them, those that the unit is sharded over where that is not
  // all, and its replicas where it is a part of the shard. Axes of one rank are left out.
  std::vector<std::string_view> AxesOfElements(const Unit& unit, std::optional<int64_t> elements) const;
  const std::string* Meta(std::string_view key) const;
  void SetMeta(std::string_view key, std::string text);
  Phase* FindPhase(std::string_view name);
  const Phase* FindPhase(std::string_view name) const;
  const Param* ParamOf(ValueId id) const;                       // nullptr when the value is no parameter
  ValueId FindState(UnitId unit, std::string_view role) const;  // kNone when absent
  ValueId AddState(UnitId unit, std::string role, Type type, bool persistent);
  // Contiguous row-major strides of sizes.
  std::vector<Dim> ContiguousStrides(const std::vector<Dim>& sizes);
  bool IsContiguous(const Type& type);
  Dim NumElements(const Type& type);
  // Bytes a storage of this type spans (from element 0 to the last reachable one). Error: symbolic or overflow.
  Result<int64_t> StorageBytes(const Type& type) const;

  // How often a step runs a micro-batch phase.
  int64_t Runs() const { return accumulation / width; }
  // Phases in the order a step runs them, with counts; what `order` names and no phase is left out.
  std::vector<std::pair<const Phase*, int64_t>> RunOrder() const;
  // The same with micro-batches.
  struct StepRun {
    const Phase* phase = nullptr;
    int64_t first = kNone, count = 1;
  };
  std::vector<StepRun> RunsOfStep() const;
  // Whether a phase saves or loads.
  bool Carries() const;
  // What is run when `order` is empty: a single micro-batch phase for every micro-batch, then the others, as they
  // stand.
  std::vector<OrderEntry> DefaultOrder() const;
  // The micro-batch phase of a program that has one (captured, or without accumulation); nullptr: none, or several.
  Phase* MicroBatchPhase();
  const Phase* MicroBatchPhase() const;
  // The phase that ends a step; nullptr before pass `update`.
  Phase* UpdatePhase();
  const Phase* UpdatePhase() const;
  // Many variants of one program, one after the other, without a copy for each: `variant` is a clone of `base` that
  // from its Track() on notes every op and value that is handed out for writing; TakeBack(base) makes it like `base`
  // again. What may differ meanwhile: ops, values and phases (no Compact, no tables).
  void Track();
  void TakeBack(const Program& base);
  // Drops ops in no phase and values nobody defines or uses, and renumbers ids densely in text order.
  void Compact();

 private:
  Program(const Program&);
  static void Note(std::vector<int32_t>& changed, std::vector<bool>& noted, int32_t id) {
    if (static_cast<size_t>(id) >= noted.size() || noted[id]) return;  // what came since goes as a whole
    noted[id] = true;
    changed.push_back(id);
  }

  std::deque<Value> values_;
  std::deque<Op> ops_;
  bool tracks_ = false;
  std::vector<int32_t> changed_values_, changed_ops_;  // since Track or TakeBack
  std::vector<bool> value_noted_, op_noted_;
};

// Calls f(ValueId&) for every value operand of an op, in args, lists and keyword arguments (not `writes`).
template <typename F>
void ForEachOperand(Op& op, F&& f);
template <typename F>
void ForEachOperand(const Op& op, F&& f);
// Whether f(ValueId) holds for one of them.
template <typename F>
bool AnyOperand(const Op& op, F&& f);
std::vector<ValueId> OperandValues(const Op& op);
// Calls f(const Op&) for every op of every phase, in text order.
template <typename F>
void ForEachOp(const Program& program, F&& f) {
  for (const Phase& phase : program.phases) {
    for (OpId id : phase.ops) f(program.op(id));
  }
}
// Replaces uses of `from` by `to` in the ops of a phase, its gives and `writes`.
void ReplaceUses(Program& program, Phase& phase, ValueId from, ValueId to);

// Symbols and dims bound to numbers. Error: out of a symbol's range, unknown symbol, two bindings that break a view.
Result<Program> Bind(const Program& program, const Binding& binding);

// ---- template bodies ----
namespace internal {
template <typename A, typename F>
void WalkArg(A& arg, F& f) {
  if (arg.kind == Arg::Kind::kValue) f(arg.value);
  for (auto& item : arg.list) WalkArg(item, f);
}
}  // namespace internal
template <typename F>
void ForEachOperand(Op& op, F&& f) {
  for (Arg& a : op.args) internal::WalkArg(a, f);
  for (NamedArg& n : op.named) internal::WalkArg(n.arg, f);
}
template <typename F>
void ForEachOperand(const Op& op, F&& f) {
  for (const Arg& a : op.args) internal::WalkArg(a, f);
  for (const NamedArg& n : op.named) internal::WalkArg(n.arg, f);
}
template <typename F>
bool AnyOperand(const Op& op, F&& f) {
  bool any = false;
  ForEachOperand(op, [&](ValueId id) { any = any || f(id); });
  return any;
}

}  // namespace interlace

// Compiled once, in program.cc.
extern template class std::vector<interlace::Arg>;
extern template class std::vector<interlace::NamedArg>;
