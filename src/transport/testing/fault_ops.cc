#include "transport/testing/fault_ops.h"

#include <cstring>
#include <numeric>

namespace interlace {

namespace {

using Op = FaultCase::Op;

// Ranks 0 and 1 share a row, 2 and 3 the other.
RankGrid GridOf(int rank) {
  const int row = rank / 2 * 2;
  return {{row, row + 1}, {rank % 2, rank % 2 + 2}};
}

template <typename T>
void AddTo(std::vector<char>& sum, const std::vector<char>& part, int64_t begin) {
  for (size_t at = 0; at + sizeof(T) <= sum.size(); at += sizeof(T)) {
    T a, b;
    std::memcpy(&a, sum.data() + at, sizeof a);
    std::memcpy(&b, part.data() + static_cast<size_t>(begin) * sizeof(T) + at, sizeof b);
    a = static_cast<T>(a + b);
    std::memcpy(sum.data() + at, &a, sizeof a);
  }
}

void Add(DType dtype, std::vector<char>& sum, const std::vector<char>& part, int64_t begin) {
  if (dtype == DType::kF32) return AddTo<float>(sum, part, begin);
  if (dtype == DType::kI32) return AddTo<uint32_t>(sum, part, begin);
  AddTo<uint8_t>(sum, part, begin);
}

}  // namespace

FaultOp::FaultOp(const FaultCase& one, size_t number, int rank)
    : case_(one), op_(one.ops[number]), number_(number), rank_(rank) {}

std::vector<char> FaultOp::Given(int rank, int64_t elements) const {
  Draw draw(case_.seed * 1000003 + number_ * 101 + static_cast<uint64_t>(rank));
  std::vector<char> out(static_cast<size_t>(bytes(elements)));
  for (size_t at = 0; at < out.size(); at += 4) {
    const auto word = static_cast<uint32_t>(draw.Bits());
    const auto real = static_cast<float>(static_cast<int32_t>(word)) / (1 << word % 20);
    std::memcpy(out.data() + at, op_.dtype == DType::kF32 ? static_cast<const void*>(&real) : &word,
                std::min<size_t>(4, out.size() - at));
  }
  return out;
}

// Of a part of what each of the ranks begins with, in their order.
std::vector<char> FaultOp::Sum(const std::vector<int>& ranks, int64_t all, int64_t begin, int64_t elements) const {
  const std::vector<char> first = Given(ranks[0], all);
  std::vector<char> sum(first.begin() + bytes(begin), first.begin() + bytes(begin + elements));
  for (size_t i = 1; i < ranks.size(); ++i) Add(op_.dtype, sum, Given(ranks[i], all), begin);
  return sum;
}

Result<Ticket> FaultOp::Start(Collectives& group) {
  const int64_t n = op_.elements, size = case_.size;
  const std::string label = "op " + std::to_string(number_);
  switch (op_.kind) {
    case Op::kGather:
      own_ = Given(rank_, n);
      out_.resize(static_cast<size_t>(bytes(size * n)));
      return group.StartGather({Span(own_, 0, n)}, {Span(out_, 0, size * n)}, label);
    case Op::kReduce:
    case Op::kGridReduce: {
      const bool grid = op_.kind == Op::kGridReduce;
      const RankGrid at = GridOf(rank_);
      const int64_t row = grid ? 2 : size;
      own_ = Given(rank_, row * n);
      out_.resize(static_cast<size_t>(bytes(n)));
      const TypedSpan shard = Span(out_, 0, n);
      receive_.resize(static_cast<size_t>(grid ? Collectives::GridReceiveBytes(at, {shard})
                                               : Collectives::ReceiveBytes(case_.size, {shard})));
      if (grid) return group.StartReduce({Span(own_, 0, row * n)}, {shard}, at, receive_.data(), label);
      return group.StartReduce({Span(own_, 0, row * n)}, {shard}, receive_.data(), label);
    }
    case Op::kAllReduce:
      out_ = Given(rank_, n);
      receive_.resize(static_cast<size_t>(Collectives::AllReduceReceiveBytes(case_.size, Span(out_, 0, n))));
      return group.StartAllReduce(Span(out_, 0, n), receive_.data(), label);
    case Op::kAllToAll: {
      own_ = Given(rank_, size * n);
      out_.resize(own_.size());
      std::vector<TypedSpan> to, from;
      for (int64_t i = 0; i < size; ++i) {
        to.push_back(Span(own_, i * n, n));
        from.push_back(Span(out_, i * n, n));
      }
      return group.StartAllToAll(to, from, label);
    }
    case Op::kBroadcast:
      out_ = Given(rank_, n);
      return group.StartBroadcast(Span(out_, 0, n), op_.root, label);
    default:
      out_ = Given(rank_, n);
      if (rank_ == op_.root) return group.StartSend(Span(out_, 0, n), op_.to, label, "message");
      if (rank_ == op_.to) return group.StartRecv(Span(out_, 0, n), op_.root, label, "message");
      return Ticket{0};
  }
}

std::string FaultOp::Check() const {
  const int64_t n = op_.elements, size = case_.size;
  std::vector<int> all(case_.size);
  std::iota(all.begin(), all.end(), 0);
  std::vector<char> right;
  const auto add = [&](const std::vector<char>& from, int64_t begin) {
    right.insert(right.end(), from.begin() + bytes(begin), from.begin() + bytes(begin + n));
  };
  switch (op_.kind) {
    case Op::kGather:
      for (const int rank : all) add(Given(rank, n), 0);
      break;
    case Op::kReduce:
      right = Sum(all, size * n, rank_ * n, n);
      break;
    case Op::kGridReduce: {  // the rows' sums first
      const int64_t begin = rank_ % 2 * n;
      right = Sum({0, 1}, 2 * n, begin, n);
      Add(op_.dtype, right, Sum({2, 3}, 2 * n, begin, n), 0);
      break;
    }
    case Op::kAllReduce:
      right = Sum(all, n, 0, n);
      break;
    case Op::kAllToAll:
      for (const int rank : all) add(Given(rank, size * n), rank_ * n);
      break;
    case Op::kBroadcast:
      right = Given(op_.root, n);
      break;
    default:
      right = Given(rank_ == op_.to ? op_.root : rank_, n);
  }
  if (right == out_) return "";
  return "op " + std::to_string(number_) + " (kind " + std::to_string(op_.kind) + ", " + std::to_string(n) +
         " elements) gave wrong numbers";
}

}  // namespace interlace
