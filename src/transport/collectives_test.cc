#include "transport/collectives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <semaphore>

#include "base/clones.h"
#include "transport/mesh_test_support.h"

namespace interlace {
namespace {

using Bytes = std::vector<char>;

constexpr DType kTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI64,
                            DType::kI32, DType::kI16, DType::kI8,  DType::kU8};

template <typename T>
T FromReal(double real) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<int64_t>(real * 1e6));
  } else {
    return T(static_cast<float>(real));
  }
}

// Calls f with a number of the type that `dtype` is stored in.
template <typename F>
void WithType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF64:
      return f(double{});
    case DType::kF32:
      return f(float{});
    case DType::kF16:
      return f(Float16{});
    case DType::kBF16:
      return f(BFloat16{});
    case DType::kI64:
      return f(uint64_t{});
    case DType::kI32:
      return f(uint32_t{});
    case DType::kI16:
      return f(uint16_t{});
    default:
      return f(uint8_t{});
  }
}

// The data of a rank, from a seed: every rank knows what the others send.
Bytes RandomNumbers(DType dtype, int64_t elements, uint64_t seed) {
  Bytes out(elements * DTypeBytes(dtype));
  std::mt19937_64 random(seed);
  WithType(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < elements; ++i) {
      // Of many sizes, so that the order of a sum shows in its bits.
      const int exponent = static_cast<int>(random() % 24) - 30;
      const T number = FromReal<T>(std::ldexp(static_cast<double>(random() >> 40) - (1 << 23), exponent));
      std::memcpy(out.data() + i * sizeof(T), &number, sizeof(T));
    }
  });
  return out;
}

// ((a + b) + c) + ..., element by element.
Bytes PlainSum(DType dtype, const std::vector<Bytes>& parts) {
  Bytes out = parts[0];
  WithType(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Wide = std::conditional_t<std::is_integral_v<T>, T, MathOf<T>>;
    for (size_t at = 0; at < out.size(); at += sizeof(T)) {
      T one;
      std::memcpy(&one, parts[0].data() + at, sizeof(T));
      Wide sum = static_cast<Wide>(one);
      for (size_t p = 1; p < parts.size(); ++p) {
        std::memcpy(&one, parts[p].data() + at, sizeof(T));
        sum = static_cast<Wide>(sum + static_cast<Wide>(one));
      }
      const T rounded = static_cast<T>(sum);
      std::memcpy(out.data() + at, &rounded, sizeof(T));
    }
  });
  return out;
}

Bytes Slice(const Bytes& all, size_t i, size_t parts) {
  const size_t each = all.size() / parts;
  return {all.begin() + static_cast<std::ptrdiff_t>(i * each),
          all.begin() + static_cast<std::ptrdiff_t>((i + 1) * each)};
}

TypedSpan SpanOf(Bytes& bytes, DType dtype) {
  return {bytes.data(), static_cast<int64_t>(bytes.size()) / DTypeBytes(dtype), dtype};
}

// One operation of a random program, the same on all ranks, and what a rank has of it.
struct Step {
  int kind = 0;  // gather, reduce, all-reduce, all-to-all, broadcast, send
  DType dtype = DType::kF32;
  int64_t elements = 0;
  int from = 0, to = 0;  // of a broadcast and a send
  uint64_t seed = 0;
  bool in_place = false;
};

std::vector<Step> RandomProgram(uint64_t seed, int size, int count) {
  std::mt19937_64 random(seed);
  std::vector<Step> steps(count);
  for (Step& step : steps) {
    step.kind = static_cast<int>(random() % 6);
    step.dtype = kTypes[random() % std::size(kTypes)];
    constexpr int64_t kSizes[] = {0, 1, 31, 64, 1000, 4097, 20'000};
    step.elements = kSizes[random() % std::size(kSizes)];
    step.from = static_cast<int>(random() % size);
    step.to = (step.from + 1 + static_cast<int>(random() % (size - 1))) % size;
    step.seed = random();
    step.in_place = random() % 2 == 0;
  }
  return steps;
}

// What a rank has started of a program and not waited for.
struct Started {
  Ticket ticket = 0;
  Bytes source, target, receive, expected;
  std::vector<Bytes> parts;
  const Bytes* result = nullptr;
};

// nullptr: the rank has no part in it.
std::unique_ptr<Started> StartStep(Collectives& group, const Step& step) {
  const int size = group.group().size(), rank = group.group().index;
  auto out = std::make_unique<Started>();
  const auto data = [&](int of, int64_t elements) { return RandomNumbers(step.dtype, elements, step.seed + of); };
  Result<Ticket> ticket = Ticket{0};
  out->result = &out->target;
  switch (step.kind) {
    case 0:
      for (int r = 0; r < size; ++r) {
        const Bytes part = data(r, step.elements);
        out->expected.insert(out->expected.end(), part.begin(), part.end());
      }
      out->source = data(rank, step.elements);
      out->target.resize(out->expected.size());
      if (step.in_place) {
        std::copy(out->source.begin(), out->source.end(),
                  out->target.begin() + static_cast<std::ptrdiff_t>(rank * out->source.size()));
      }
      ticket = group.StartGather(
          {step.in_place ? TypedSpan{out->target.data() + rank * out->source.size(), step.elements, step.dtype}
                         : SpanOf(out->source, step.dtype)},
          {SpanOf(out->target, step.dtype)}, "gather");
      break;
    case 1: {
      std::vector<Bytes> parts;
      for (int r = 0; r < size; ++r) parts.push_back(Slice(data(r, step.elements * size), rank, size));
      out->expected = PlainSum(step.dtype, parts);
      out->source = data(rank, step.elements * size);
      out->target.resize(out->expected.size());
      const std::vector<TypedSpan> shard{SpanOf(out->target, step.dtype)};
      out->receive.resize(Collectives::ReceiveBytes(size, shard));
      ticket = group.StartReduce({SpanOf(out->source, step.dtype)}, shard, out->receive.data(), "reduce");
      break;
    }
    case 2: {
      std::vector<Bytes> parts;
      for (int r = 0; r < size; ++r) parts.push_back(data(r, step.elements));
      out->expected = PlainSum(step.dtype, parts);
      out->target = parts[rank];
      const TypedSpan value = SpanOf(out->target, step.dtype);
      out->receive.resize(Collectives::AllReduceReceiveBytes(size, value));
      ticket = group.StartAllReduce(value, out->receive.data(), "all-reduce");
      break;
    }
    case 3: {  // rank r sends elements + (r + p) % 3 to p
      const auto elements = [&](int r, int p) { return step.elements + (r + p) % 3; };
      std::vector<TypedSpan> to, from;
      out->parts.resize(size);
      for (int p = 0; p < size; ++p) {
        out->parts[p] = RandomNumbers(step.dtype, elements(rank, p), step.seed + size * rank + p);
        const Bytes comes = RandomNumbers(step.dtype, elements(p, rank), step.seed + size * p + rank);
        out->expected.insert(out->expected.end(), comes.begin(), comes.end());
      }
      out->target.resize(out->expected.size());
      char* at = out->target.data();
      for (int p = 0; p < size; ++p) {
        to.push_back(SpanOf(out->parts[p], step.dtype));
        from.push_back({at, elements(p, rank), step.dtype});
        at += from.back().bytes();
      }
      ticket = group.StartAllToAll(to, from, "all-to-all");
      break;
    }
    case 4:
      out->expected = data(step.from, step.elements);
      out->target = rank == step.from ? out->expected : Bytes(out->expected.size());
      ticket = group.StartBroadcast(SpanOf(out->target, step.dtype), step.from, "broadcast");
      break;
    default:
      if (rank != step.from && rank != step.to) return nullptr;
      out->expected = data(step.from, step.elements);
      out->target = rank == step.from ? out->expected : Bytes(out->expected.size());
      ticket = rank == step.from ? group.StartSend(SpanOf(out->target, step.dtype), step.to, "send")
                                 : group.StartRecv(SpanOf(out->target, step.dtype), step.from, "receive");
  }
  EXPECT_EQ(ErrorOf(ticket), "no error");
  out->ticket = ticket.ok() ? *ticket : 0;
  return out;
}

// Runs the program on one rank: up to `window` operations under way, waited for in an order of the rank's own.
void RunProgram(Collectives& group, const std::vector<Step>& steps, uint64_t order, size_t window) {
  std::mt19937_64 random(order);
  std::vector<std::unique_ptr<Started>> open;
  const auto wait_for_one = [&] {
    const size_t which = random() % open.size();
    const Started& started = *open[which];
    ASSERT_EQ(ErrorOf(group.Wait(started.ticket)), "no error");
    ASSERT_TRUE(*started.result == started.expected) << "other bytes than a plain loop gives";
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
  };
  for (const Step& step : steps) {
    if (auto started = StartStep(group, step)) open.push_back(std::move(started));
    if (random() % 4 == 0) group.Progress();
    while (open.size() > random() % window) wait_for_one();
  }
  while (!open.empty()) wait_for_one();
}

TEST(Collectives, RandomTransfersGiveTheBitsOfAPlainLoop) {
  for (int i = 0; i < 8; ++i) {
    const int size = 1 + i % 4;
    const auto meshes = MeshesOf("dp", RanksTo(size), {}, /*shares_memory=*/i >= 4);
    for (uint64_t seed = 0; seed < 3; ++seed) {
      std::vector<Step> steps = RandomProgram(10 * seed + size, std::max(size, 2), 30);
      if (size == 1) std::erase_if(steps, [](const Step& step) { return step.kind > 3; });
      OnEachRank(size, [&](int rank) {
        Collectives group(meshes[rank], 60);
        RunProgram(group, steps, 100 * seed + rank, 1 + 8 * seed);
        if (testing::Test::HasFatalFailure()) meshes[rank]->Leave();  // the others need not wait
      });
    }
  }
}

TEST(Collectives, SeveralGroupsInOneProcess) {
  // A mesh of 2 x 2: rank = 2 * replica + dp. Their operations overlap, in orders of their own.
  std::vector<std::vector<std::shared_ptr<Mesh>>> of_rank(4);
  for (const auto& [axis, ranks] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
           {"dp", {0, 1}}, {"dp", {2, 3}}, {"replica", {0, 2}}, {"replica", {1, 3}}}) {
    const auto meshes = MeshesOf(axis, ranks);
    for (size_t i = 0; i < ranks.size(); ++i) of_rank[ranks[i]].push_back(meshes[i]);
  }
  OnEachRank(4, [&](int rank) {
    Collectives dp(of_rank[rank][0], 60), replica(of_rank[rank][1], 60);
    EXPECT_EQ(dp.group().index, rank % 2);
    EXPECT_EQ(replica.group().index, rank / 2);
    std::mt19937_64 random(rank);
    const std::vector<Step> inside = RandomProgram(rank / 2, 2, 40), outside = RandomProgram(7 + rank % 2, 2, 40);
    for (size_t i = 0; i < inside.size(); ++i) {
      const auto a = StartStep(dp, inside[i]), b = StartStep(replica, outside[i]);
      Collectives* const groups[] = {&dp, &replica};
      const Started* const started[] = {a.get(), b.get()};
      const int first = static_cast<int>(random() % 2);
      for (const int which : {first, 1 - first}) {
        ASSERT_EQ(ErrorOf(groups[which]->Wait(started[which]->ticket)), "no error");
        ASSERT_TRUE(*started[which]->result == started[which]->expected);
      }
    }
  });
}

TEST(Collectives, ABucketGivesTheBitsOfEachAlone) {
  const auto meshes = MeshesOf("dp", RanksTo(3));
  OnEachRank(3, [&](int rank) {
    Collectives group(meshes[rank], 60);
    const int64_t sizes[] = {5, 0, 4096, 33};
    const DType types[] = {DType::kF32, DType::kF32, DType::kBF16, DType::kI64};
    std::vector<Bytes> flats, alone(4), together(4);
    std::vector<TypedSpan> from, to;
    Bytes receive;
    for (int i = 0; i < 4; ++i) {
      flats.push_back(RandomNumbers(types[i], 3 * sizes[i], 10 * i + rank));
      alone[i].resize(sizes[i] * DTypeBytes(types[i]));
      together[i].resize(alone[i].size());
    }
    for (int i = 0; i < 4; ++i) {
      const std::vector<TypedSpan> shard{SpanOf(alone[i], types[i])};
      receive.resize(Collectives::ReceiveBytes(3, shard));
      const auto ticket = group.StartReduce({SpanOf(flats[i], types[i])}, shard, receive.data(), "reduce");
      ASSERT_EQ(ErrorOf(group.Wait(*ticket)), "no error");
      from.push_back(SpanOf(flats[i], types[i]));
      to.push_back(SpanOf(together[i], types[i]));
    }
    receive.resize(Collectives::ReceiveBytes(3, to));
    ASSERT_EQ(ErrorOf(group.Wait(*group.StartReduce(from, to, receive.data(), "bucket"))), "no error");
    EXPECT_TRUE(alone == together);
    EXPECT_EQ(group.stats().calls, 5);
  });
}

// That of a rank among so many rows and columns.
RankGrid GridOf(int rank, int rows, int columns) {
  RankGrid grid;
  for (int i = 0; i < columns; ++i) grid.within.push_back(rank / columns * columns + i);
  for (int i = 0; i < rows; ++i) grid.across.push_back(i * columns + rank % columns);
  return grid;
}

// Rows are summed in rank order, then the sums of the rows; while gathers and other reductions of the rows go on.
TEST(Collectives, AGridAddsUpItsRowsAndThenTheirSums) {
  struct Shape {
    int rows, columns;
  };
  for (const Shape shape : {Shape{2, 2}, Shape{3, 2}, Shape{2, 3}, Shape{2, 1}, Shape{1, 3}}) {
    const int size = shape.rows * shape.columns;
    SCOPED_TRACE(std::to_string(shape.rows) + " x " + std::to_string(shape.columns));
    const auto meshes = MeshesOf("replica,dp", RanksTo(size));
    OnEachRank(size, [&](int rank) {
      Collectives group(meshes[rank], 30);
      const RankGrid grid = GridOf(rank, shape.rows, shape.columns);
      const int column = rank % shape.columns;
      std::vector<Ticket> tickets;
      std::vector<Bytes> flats, shards, receives, expected;
      for (int round = 0; round < 6; ++round) {
        const DType dtype = kTypes[round];
        const int64_t elements = round % 2 == 0 ? 40'000 : 33;  // of a shard
        std::vector<Bytes> rows;
        for (int r = 0; r < shape.rows; ++r) {
          std::vector<Bytes> parts;
          for (int c = 0; c < shape.columns; ++c) {
            const auto seed = static_cast<uint64_t>(100 * round + r * shape.columns + c);
            parts.push_back(Slice(RandomNumbers(dtype, elements * shape.columns, seed), column, shape.columns));
          }
          rows.push_back(PlainSum(dtype, parts));
        }
        expected.push_back(PlainSum(dtype, rows));
        flats.push_back(RandomNumbers(dtype, elements * shape.columns, static_cast<uint64_t>(100 * round + rank)));
        shards.emplace_back(elements * DTypeBytes(dtype));
        receives.emplace_back(Collectives::GridReceiveBytes(grid, {SpanOf(shards.back(), dtype)}));
        const auto ticket = group.StartReduce({SpanOf(flats.back(), dtype)}, {SpanOf(shards.back(), dtype)}, grid,
                                              receives.back().data(), "reduce");
        ASSERT_TRUE(ticket.ok()) << ticket.error().ToString();
        tickets.push_back(*ticket);
      }
      for (size_t i = tickets.size(); i-- > 0;) {
        ASSERT_EQ(ErrorOf(group.Wait(tickets[i])), "no error");
        EXPECT_EQ(shards[i], expected[i]) << "operation " << i;
      }
    });
  }
}

// Every rank of a grid has a shard: a reduce has the bits of rows that add up and then their sums, and a gather puts
// all shards in rank order; between rows each rank sends its own column's part alone. Reduced shards may lie column
// after column instead.
TEST(Collectives, AGridOfShardsSendsItsOwnColumnBetweenRows) {
  struct Shape {
    int rows, columns;
    bool nested = false;
  };
  for (const Shape shape : {Shape{2, 2}, Shape{3, 2}, Shape{2, 3}, Shape{2, 1}, Shape{2, 2, true}, Shape{3, 2, true}}) {
    const int size = shape.rows * shape.columns;
    SCOPED_TRACE(std::to_string(shape.rows) + " x " + std::to_string(shape.columns));
    const auto meshes = MeshesOf("replica,dp", RanksTo(size));
    OnEachRank(size, [&](int rank) {
      Collectives group(meshes[rank], 30);
      RankGrid grid = GridOf(rank, shape.rows, shape.columns);
      grid.nested = shape.nested;
      const int mine = shape.nested ? rank % shape.columns * shape.rows + rank / shape.columns : rank;
      std::vector<Ticket> tickets;
      std::vector<Bytes> flats, shards, receives, fulls, sums, all;
      for (int round = 0; round < 6; ++round) {
        const DType dtype = kTypes[round];
        const int64_t elements = round % 2 == 0 ? 40'000 : 33;  // of a shard
        const auto of = [&](int r) {
          return RandomNumbers(dtype, elements * size, static_cast<uint64_t>(100 * round + r));
        };
        std::vector<Bytes> rows;
        for (int r = 0; r < shape.rows; ++r) {
          std::vector<Bytes> parts;
          for (int c = 0; c < shape.columns; ++c) parts.push_back(Slice(of(r * shape.columns + c), mine, size));
          rows.push_back(PlainSum(dtype, parts));
        }
        sums.push_back(PlainSum(dtype, rows));
        flats.push_back(of(rank));
        shards.emplace_back(elements * DTypeBytes(dtype));
        const std::vector<TypedSpan> shard{SpanOf(shards.back(), dtype)};
        receives.emplace_back(Collectives::GridScatterBytes(grid, shard));
        const auto reduce =
            group.StartReduce({SpanOf(flats.back(), dtype)}, shard, grid, receives.back().data(), "reduce");
        ASSERT_TRUE(reduce.ok()) << reduce.error().ToString();
        all.push_back(of(99));
        fulls.emplace_back(all.back().size());
        Bytes own = Slice(all.back(), rank, size);
        std::copy(own.begin(), own.end(), fulls.back().begin() + static_cast<int64_t>(own.size()) * rank);
        const TypedSpan full = SpanOf(fulls.back(), dtype);
        const TypedSpan place{full.data + static_cast<int64_t>(own.size()) * rank, elements, dtype};
        const auto gather = group.StartGather({place}, {full}, grid, "gather");
        ASSERT_TRUE(gather.ok()) << gather.error().ToString();
        tickets.insert(tickets.end(), {*reduce, *gather});
      }
      for (size_t i = tickets.size(); i-- > 0;) ASSERT_EQ(ErrorOf(group.Wait(tickets[i])), "no error");
      EXPECT_EQ(shards, sums);
      EXPECT_EQ(fulls, all);
    });
  }
}

TEST(Collectives, WhatIsStartedMovesWhileNobodyWaits) {
  // More than the kernel holds. The sender does nothing until all of it has come: its helper thread moves the data.
  const auto meshes = MeshesOf("dp", RanksTo(2));
  constexpr int64_t kBytes = int64_t{24} << 20;
  std::binary_semaphore came(0);
  OnEachRank(2, [&](int rank) {
    Collectives group(meshes[rank], 60);
    group.SetRecording(true);
    Bytes value(kBytes, static_cast<char>(rank));
    const TypedSpan buffer = SpanOf(value, DType::kU8);
    const Ticket ticket = rank == 0 ? *group.StartSend(buffer, 1, "send") : *group.StartRecv(buffer, 0, "receive");
    if (rank == 0) came.acquire();
    EXPECT_EQ(ErrorOf(group.Wait(ticket)), "no error");
    if (rank == 1) came.release();
    EXPECT_EQ(std::count(value.begin(), value.end(), 0), kBytes);
    const TransferTimes times = group.TakeTimes(ticket);
    EXPECT_EQ(times.bytes, rank == 1 ? kBytes : 0);
    EXPECT_LE(times.queued_ns, times.end_ns);
    EXPECT_EQ(group.TakeTimes(ticket).end_ns, 0);
  });
}

TEST(Collectives, ASendIsNotHeldBehindWhatAnotherPeerHasNotTaken) {
  // Rank 0 sends more to rank 1 than the kernel holds, and then to rank 2; rank 1 takes its part only when rank 2 has
  // told it that its own has come.
  const auto meshes = MeshesOf("dp", RanksTo(3));
  OnEachRank(3, [&](int rank) {
    Collectives group(meshes[rank], 60);
    Bytes large(int64_t{24} << 20, static_cast<char>(rank)), small(1, static_cast<char>(rank));
    const auto wait = [&](Result<Ticket> ticket) { EXPECT_EQ(ErrorOf(group.Wait(*ticket)), "no error"); };
    const TypedSpan all = SpanOf(large, DType::kU8), word = SpanOf(small, DType::kU8);
    if (rank == 0) {
      const Ticket first = *group.StartSend(all, 1, "large"), second = *group.StartBroadcast(word, 0, "word");
      EXPECT_EQ(ErrorOf(group.Wait(first)), "no error");
      EXPECT_EQ(ErrorOf(group.Wait(second)), "no error");
    } else if (rank == 1) {
      wait(group.StartRecv(word, 2, "go"));
      wait(group.StartRecv(all, 0, "large"));
      wait(group.StartBroadcast(word, 0, "word"));
      EXPECT_EQ(large.back(), 0);
    } else {
      wait(group.StartBroadcast(word, 0, "word"));
      wait(group.StartSend(word, 1, "go"));
    }
    EXPECT_EQ(small[0], 0);
  });
}

TEST(Collectives, MisuseIsTold) {
  const auto meshes = MeshesOf("dp", RanksTo(2));
  Collectives group(meshes[0], 60);
  Bytes four(16), eight(32), receive(64);
  const TypedSpan small = SpanOf(four, DType::kF32), large = SpanOf(eight, DType::kF32);
  EXPECT_EQ(ErrorOf(group.StartGather({small}, {small}, "gather u7")),
            "gather u7 on axis dp: the full buffer does not have the elements of all shards");
  EXPECT_EQ(ErrorOf(group.StartReduce({large}, {large}, receive.data(), "reduce u7")),
            "reduce u7 on axis dp: the full buffer does not have the elements of all shards");
  EXPECT_EQ(ErrorOf(group.StartGather({small}, {}, "g")), "g on axis dp: as many shards as full buffers are needed");
  EXPECT_EQ(ErrorOf(group.StartAllReduce(SpanOf(four, DType::kB8), receive.data(), "norm")),
            "norm on axis dp: no sum of b8");
  EXPECT_EQ(ErrorOf(group.StartAllToAll({small}, {small}, "tokens")),
            "tokens on axis dp: a part for each rank and a part of each rank are needed");
  EXPECT_EQ(ErrorOf(group.StartBroadcast(small, 2, "b")), "b on axis dp: no rank 2 to send it");
  EXPECT_EQ(ErrorOf(group.StartSend(small, 0, "s")), "s on axis dp: no other rank 0 to send to");
  EXPECT_EQ(ErrorOf(group.StartRecv(small, -1, "r")), "r on axis dp: no other rank -1 to receive from");
  EXPECT_EQ(ErrorOf(group.Wait(17)), "axis dp: no transfer 17 is under way (waited for twice?)");
}

}  // namespace
}  // namespace interlace
