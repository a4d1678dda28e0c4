// Transfers on all ranks in lockstep: sources are read at the start, what arrives waits in a Flight, and until then the
// result's memory is poison.
#include <algorithm>
#include <cstring>

#include "ir/op_table.h"
#include "ir/testing/machine.h"

namespace interlace::testing {
namespace {

int64_t IntAttr(const Op& op, std::string_view name) {
  const Arg* arg = op.Attr(name);
  return arg != nullptr && arg->kind == Arg::Kind::kInt ? arg->integer.value : 0;
}

// A contiguous tensor seen along one dimension: `outer` blocks of `count` rows of `row` bytes.
struct Along {
  size_t outer = 1, count = 1, row = 1;
};
Along AlongDim(const std::vector<int64_t>& sizes, int64_t dim, int64_t element) {
  Along out;
  out.row = static_cast<size_t>(element);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto size = static_cast<size_t>(sizes[i]);
    (static_cast<int64_t>(i) < dim ? out.outer : static_cast<int64_t>(i) > dim ? out.row : out.count) *= size;
  }
  return out;
}

using Bytes = std::vector<std::byte>;

// Part `index` of `parts` equal ones.
Bytes Cut(const Bytes& whole, const Along& along, size_t index, size_t parts) {
  Bytes out;
  const size_t length = along.count / parts * along.row;
  for (size_t block = 0; block < along.outer; ++block) {
    const auto at = whole.begin() + static_cast<ptrdiff_t>(block * along.count * along.row + index * length);
    out.insert(out.end(), at, at + static_cast<ptrdiff_t>(length));
  }
  return out;
}

// The inverse; `along` is that of one part.
Bytes Join(const std::vector<Bytes>& parts, const Along& along) {
  Bytes out;
  const size_t length = along.count * along.row;
  for (size_t block = 0; block < along.outer; ++block) {
    for (const Bytes& part : parts) {
      const auto at = part.begin() + static_cast<ptrdiff_t>(block * length);
      out.insert(out.end(), at, at + static_cast<ptrdiff_t>(length));
    }
  }
  return out;
}

}  // namespace

Result<Machine::Bytes> Machine::AddInRankOrder(const std::vector<Bytes>& parts, DType dtype) const {
  Bytes sum = parts[0];
  int64_t element = DTypeBytes(dtype);
  DType wide = SumDType(dtype);
  for (size_t at = 0; at < sum.size(); at += element) {
    if (dtype == DType::kI64) {  // limbs need all their bits
      for (size_t part = 1; part < parts.size(); ++part) {
        int64_t a, b;
        std::memcpy(&a, &sum[at], 8);
        std::memcpy(&b, &parts[part][at], 8);
        if (__builtin_add_overflow(a, b, &a)) return MakeError("an integer sum over ranks overflows");
        std::memcpy(&sum[at], &a, 8);
      }
      continue;
    }
    double total = Load(dtype, &sum[at]);
    for (size_t part = 1; part < parts.size(); ++part) total = RoundTo(wide, total + Load(dtype, &parts[part][at]));
    Store(dtype, &sum[at], total);
  }
  return sum;
}

// What result `index` of a transfer is on a rank; `all`: the operand of every rank.
Result<Machine::Bytes> Machine::Exchanged(const Op& op, size_t index, int64_t rank,
                                          const std::vector<Bytes>& all) const {
  const ValueId source = op.args[index].value;
  const DType dtype = program_.value(source).type.dtype;
  const bool of_units = TraitsOf(op).family == OpFamily::kUnit;
  const Unit* unit = of_units ? &program_.units[op.units[index]] : nullptr;
  const std::string_view axis = AxisOf(program_, op);
  const auto mine = static_cast<size_t>(Coordinate(rank, axis));
  const auto along = [&](ValueId id, std::string_view dim) {
    return AlongDim(Sizes(id), IntAttr(op, dim), DTypeBytes(dtype));
  };
  // Sum over an axis in rank order, of parts given by rank.
  const auto sum_over = [&](std::string_view over, auto part_of) -> Result<Bytes> {
    std::vector<Bytes> parts;
    for (int64_t peer : Peers(rank, over)) {
      INTERLACE_ASSIGN(Bytes part, part_of(peer));
      parts.push_back(std::move(part));
    }
    return AddInRankOrder(parts, dtype);
  };
  const auto whole = [&](int64_t peer) -> Result<Bytes> { return all[peer]; };
  std::vector<Bytes> parts;
  switch (TraitsOf(op).exchange) {
    case Exchange::kGather:
      for (int64_t peer : Peers(rank, axis)) parts.push_back(all[peer]);
      return Join(parts, along(source, "dim"));
    case Exchange::kReduce: {
      // Of a unit: within its shard axes first, then over those it is replicated on. Of several axes: each row, then
      // the sums of the rows.
      const bool replicated = of_units && !unit->replicas.empty();
      const auto row = static_cast<size_t>(replicated ? 0 : RowOf(program_.mesh, axis));
      const auto within = [&](int64_t member) -> Result<Bytes> {
        std::vector<Bytes> sources, rows;
        const std::vector<int64_t> peers = Peers(member, axis);
        for (int64_t peer : peers) {
          sources.push_back(all[peer]);
          if (sources.size() < (row == 0 ? peers.size() : row)) continue;
          INTERLACE_ASSIGN(Bytes sum, AddInRankOrder(sources, dtype));
          rows.push_back(std::move(sum));
          sources.clear();
        }
        INTERLACE_ASSIGN(Bytes sum, AddInRankOrder(rows, dtype));
        return Cut(sum, along(source, "dim"), mine, peers.size());
      };
      if (!replicated) return within(rank);
      INTERLACE_ASSIGN(const Bytes sum, sum_over(unit->replicas, within));
      if (!unit->parted()) return sum;
      return Cut(sum, AlongDim({unit->shard}, 0, DTypeBytes(dtype)),
                 static_cast<size_t>(Coordinate(rank, unit->replicas)), static_cast<size_t>(unit->shard / unit->part));
    }
    case Exchange::kAllReduce:
      return sum_over(axis, whole);
    case Exchange::kBroadcast:
      return all[Peers(rank, axis)[static_cast<size_t>(IntAttr(op, "root"))]];
    case Exchange::kAllToAll: {
      const Along cut = along(source, "dim");
      const std::vector<int64_t> peers = Peers(rank, axis);
      for (int64_t peer : peers) parts.push_back(Cut(all[peer], cut, mine, peers.size()));
      std::vector<int64_t> sizes = Sizes(source);  // of a part
      if (!sizes.empty()) sizes[static_cast<size_t>(IntAttr(op, "dim"))] /= static_cast<int64_t>(peers.size());
      return Join(parts, AlongDim(sizes, IntAttr(op, "to"), DTypeBytes(dtype)));
    }
    default:
      return MakeError("the interpreter lacks ", op.name);
  }
}

Status Machine::Start(const Op& op) {
  for (size_t i = 0; i < op.results.size(); ++i) {
    const ValueId result = op.results[i];
    Flight flight;
    flight.start = op.kind;
    if (TraitsOf(op).family == OpFamily::kPeer) {
      INTERLACE_TRY(StartMessage(op, flight));
    } else if (!stage_axis_.empty() && AxisOf(program_, op) == stage_axis_) {
      INTERLACE_TRY(StartWithStages(op, op.args[i].value, flight));
    } else {
      std::vector<Bytes> all;
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        INTERLACE_ASSIGN(Bytes bytes, ReadBytes(rank, op.args[i].value));
        all.push_back(std::move(bytes));
      }
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        INTERLACE_ASSIGN(Bytes out, Exchanged(op, i, rank, all));
        flight.data.push_back(std::move(out));
      }
    }
    const DType dtype = program_.value(result).type.dtype;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      if (program_.RootOf(result) == result) {
        INTERLACE_TRY(Allocate(rank, result));
      } else {
        Dense poison{{}, std::vector<double>(Count(Sizes(result)), Poison(dtype))};
        INTERLACE_TRY(Write(rank, result, poison));
      }
    }
    flights_[result] = std::move(flight);
  }
  return Ok{};
}

// Where messages to and from the peer go.
Result<int64_t> Machine::PeerOf(const Op& op, int64_t rank) const {
  const Arg* peer = op.Attr("peer");
  if (peer == nullptr || peer->kind != Arg::Kind::kInt) return MakeError(op.name, " names no peer");
  INTERLACE_ASSIGN(const int64_t index, program_.dims.Evaluate(peer->integer, rank_symbols_[rank]));
  const std::string_view axis = AxisOf(program_, op);
  if (axis == stage_axis_) return index * ranks_ + rank;  // in another stage
  const std::vector<int64_t> ranks = Peers(rank, axis);
  if (index < 0 || index >= static_cast<int64_t>(ranks.size())) {
    return MakeError("rank ", rank, " names the peer ", index, " of ", ranks.size());
  }
  return first_address_ + ranks[static_cast<size_t>(index)];
}

// The k-th receive that begins takes the k-th message that was sent.
Status Machine::StartMessage(const Op& op, Flight& flight) {
  flight.data.resize(static_cast<size_t>(ranks_));
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    INTERLACE_ASSIGN(const int64_t peer, PeerOf(op, rank));
    const int64_t channel = ChannelOf(op) * kOfChannel;  // of the sender's address
    flight.peers.push_back(peer + channel);
    if (op.kind == OpKind::kRecvStart) {
      flight.numbers.push_back(receives_[{peer + channel, first_address_ + rank}]++);
      continue;
    }
    INTERLACE_ASSIGN(Bytes bytes, ReadBytes(rank, op.args[0].value));
    mail_->Send(first_address_ + rank + channel, peer, std::move(bytes));
  }
  return Ok{};
}

// A sum over the stages: each sends its part to all others, and adds up what came when it waits.
Status Machine::StartWithStages(const Op& op, ValueId source, Flight& flight) {
  if (op.kind != OpKind::kAllReduceStart)
    return MakeError("the interpreter lacks ", op.name, " along the axis of the stages");
  flight.with_stages = true;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    INTERLACE_ASSIGN(Bytes bytes, ReadBytes(rank, source));
    for (int64_t stage = 0; stage < stages_; ++stage) {
      const int64_t peer = stage * ranks_ + rank, own = first_address_ + rank;
      if (peer == own) continue;
      mail_->Send(kOfCollectives + own, kOfCollectives + peer, bytes);
      flight.numbers.push_back(receives_[{kOfCollectives + peer, kOfCollectives + own}]++);
    }
    flight.data.push_back(std::move(bytes));
  }
  return Ok{};
}

Status Machine::AddStages(Flight& flight, DType dtype) {
  size_t next = 0;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    std::vector<Bytes> parts;
    for (int64_t stage = 0; stage < stages_; ++stage) {
      const int64_t peer = stage * ranks_ + rank, own = first_address_ + rank;
      if (peer == own) {
        parts.push_back(flight.data[static_cast<size_t>(rank)]);
        continue;
      }
      std::optional<Bytes> part = mail_->Receive(kOfCollectives + peer, kOfCollectives + own, flight.numbers[next++]);
      if (!part) return MakeError("stage ", stage, " never joined a sum over the stages");
      parts.push_back(std::move(*part));
    }
    INTERLACE_ASSIGN(flight.data[static_cast<size_t>(rank)], AddInRankOrder(parts, dtype));
  }
  return Ok{};
}

Status Machine::Wait(const Op& op) {
  for (const Arg& arg : op.args) {
    auto found = flights_.find(arg.value);
    if (found == flights_.end()) return MakeError("%", arg.value, " is not in flight");
    Flight& flight = found->second;
    if (TraitsOf(op).partner != flight.start) {
      return MakeError("%", arg.value, " comes from ", TraitsOf(flight.start).name);
    }
    if (flight.with_stages) INTERLACE_TRY(AddStages(flight, program_.value(arg.value).type.dtype));
    for (int64_t rank = 0; rank < ranks_ && op.kind == OpKind::kRecvWait; ++rank) {
      const auto r = static_cast<size_t>(rank);
      std::optional<Bytes> message = mail_->Receive(flight.peers[r], first_address_ + rank, flight.numbers[r]);
      if (!message) return MakeError("rank ", rank, " waits for a message that rank ", flight.peers[r], " never sent");
      flight.data[r] = std::move(*message);
    }
    for (int64_t rank = 0; rank < ranks_ && op.kind != OpKind::kSendWait; ++rank) {
      INTERLACE_TRY(WriteBytes(rank, arg.value, flight.data[static_cast<size_t>(rank)]));
    }
    flights_.erase(found);
  }
  return Ok{};
}

}  // namespace interlace::testing
