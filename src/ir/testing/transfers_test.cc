// Transfers of activations in the interpreter, along each axis and dimension of several meshes, against plain
// arithmetic over what the ranks put in.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "ir/testing/interpreter.h"
#include "ir/text.h"
#include "ir/verifier.h"

namespace interlace::testing {
namespace {

using Sizes = std::vector<int64_t>;
using Mesh = std::vector<Axis>;

const std::vector<Mesh>& Meshes() {
  static const std::vector<Mesh> meshes = {
      {{"a", 2}}, {{"a", 3}}, {{"a", 2}, {"b", 2}}, {{"a", 2}, {"b", 3}}, {{"a", 3}, {"b", 2}}};
  return meshes;
}

std::string TypeText(const Sizes& sizes) {
  std::string out = "f64[";
  for (size_t i = 0; i < sizes.size(); ++i) out += (i > 0 ? "," : "") + std::to_string(sizes[i]);
  return out + "]";
}

// By rank: the program's input x, and what `ops` made of it, y.
struct Ran {
  std::vector<std::vector<double>> x, y;
};
Ran RunOps(const Mesh& mesh, const Sizes& sizes, const std::string& ops) {
  std::string text = "interlace 1 sharded\n";
  for (const Axis& axis : mesh) text += "mesh " + axis.name + " " + std::to_string(axis.size) + "\n";
  text += "step 1 reduce_each\ninput %0: " + TypeText(sizes) + " \"x\"\nphase micro_batch takes () gives () {\n" + ops +
          "  output(%0) {name=\"x\"}\n  output(%1) {name=\"y\"}\n}\n";
  Result<Program> program = Parse(text);
  EXPECT_TRUE(program.ok()) << program.error().ToString() << "\n" << text;
  if (!program.ok()) return {};
  const Status valid = Verify(*program);
  EXPECT_TRUE(valid.ok()) << valid.error().ToString();
  Result<RunResult> result = Interpret(*program, {.steps = 1});
  EXPECT_TRUE(result.ok()) << result.error().ToString() << "\n" << text;
  if (!result.ok()) return {};
  return {result->outputs.at("x"), result->outputs.at("y")};
}

// Coordinates of a rank, the last axis fastest, and back.
Sizes CoordinatesOf(const Mesh& mesh, int64_t rank) {
  Sizes at(mesh.size());
  for (size_t i = mesh.size(); i-- > 0;) at[i] = rank % mesh[i].size, rank /= mesh[i].size;
  return at;
}
int64_t RankAt(const Mesh& mesh, const Sizes& at) {
  int64_t rank = 0;
  for (size_t i = 0; i < mesh.size(); ++i) rank = rank * mesh[i].size + at[i];
  return rank;
}

// Element `index` of a tensor.
double At(const std::vector<double>& data, const Sizes& sizes, const Sizes& index) {
  size_t flat = 0;
  for (size_t i = 0; i < sizes.size(); ++i) flat = flat * static_cast<size_t>(sizes[i]) + static_cast<size_t>(index[i]);
  return data.at(flat);
}
std::vector<double> Fill(const Sizes& sizes, const std::function<double(const Sizes&)>& element) {
  std::vector<double> out;
  Sizes index(sizes.size(), 0);
  while (true) {
    out.push_back(element(index));
    size_t i = sizes.size();
    while (i > 0 && ++index[i - 1] == sizes[i - 1]) index[--i] = 0;
    if (i == 0) return out;
  }
}

// Every rank's y must be what `expected(mine, x of the ranks of my group)` says, `mine` being its index there.
using Expected = std::function<std::vector<double>(size_t mine, const std::vector<std::vector<double>>& x)>;
void Check(const Mesh& mesh, size_t axis, const Sizes& sizes, const std::string& ops, const Expected& expected) {
  const Ran ran = RunOps(mesh, sizes, ops);
  int64_t ranks = 1;
  for (const Axis& a : mesh) ranks *= a.size;
  ASSERT_EQ(ran.y.size(), static_cast<size_t>(ranks));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    Sizes at = CoordinatesOf(mesh, rank);
    const auto mine = static_cast<size_t>(at[axis]);
    std::vector<std::vector<double>> group;
    for (at[axis] = 0; at[axis] < mesh[axis].size; ++at[axis])
      group.push_back(ran.x[static_cast<size_t>(RankAt(mesh, at))]);
    EXPECT_EQ(ran.y[static_cast<size_t>(rank)], expected(mine, group)) << ops << "rank " << rank;
  }
}

std::string Collective(const std::string& name, const Sizes& result, const std::string& attributes) {
  return "  %1: " + TypeText(result) + " = " + name + ".start(%0) {" + attributes + "}\n  " + name + ".wait(%1)\n";
}

const Sizes kSizes = {6, 12, 6};

template <typename F>
void ForEachAxis(F f) {
  for (const Mesh& mesh : Meshes()) {
    for (size_t axis = 0; axis < mesh.size(); ++axis) f(mesh, axis, mesh[axis].size, "axis=" + mesh[axis].name);
  }
}

TEST(Activations, AllGather) {
  ForEachAxis([](const Mesh& mesh, size_t axis, int64_t n, const std::string& along) {
    for (size_t dim = 0; dim < kSizes.size(); ++dim) {
      Sizes whole = kSizes;
      whole[dim] *= n;
      Check(mesh, axis, kSizes, Collective("all_gather", whole, along + " dim=" + std::to_string(dim)),
            [&](size_t, const auto& x) {
              return Fill(whole, [&](Sizes at) {
                const auto from = static_cast<size_t>(at[dim] / kSizes[dim]);
                at[dim] %= kSizes[dim];
                return At(x[from], kSizes, at);
              });
            });
    }
  });
}

double SumOf(const std::vector<std::vector<double>>& x, const Sizes& at) {
  double sum = At(x[0], kSizes, at);
  for (size_t i = 1; i < x.size(); ++i) sum += At(x[i], kSizes, at);
  return sum;
}

TEST(Activations, AllReduceAndReduceScatter) {
  ForEachAxis([](const Mesh& mesh, size_t axis, int64_t n, const std::string& along) {
    Check(mesh, axis, kSizes, Collective("all_reduce", kSizes, along),
          [&](size_t, const auto& x) { return Fill(kSizes, [&](const Sizes& at) { return SumOf(x, at); }); });
    for (size_t dim = 0; dim < kSizes.size(); ++dim) {
      Sizes part = kSizes;
      part[dim] /= n;
      Check(mesh, axis, kSizes, Collective("reduce_scatter", part, along + " dim=" + std::to_string(dim)),
            [&](size_t mine, const auto& x) {
              return Fill(part, [&](Sizes at) {
                at[dim] += static_cast<int64_t>(mine) * part[dim];
                return SumOf(x, at);
              });
            });
    }
  });
}

TEST(Activations, AllToAll) {
  ForEachAxis([](const Mesh& mesh, size_t axis, int64_t n, const std::string& along) {
    for (size_t dim = 0; dim < kSizes.size(); ++dim) {
      for (size_t to = 0; to < kSizes.size(); ++to) {
        Sizes piece = kSizes;
        piece[dim] /= n;
        Sizes result = piece;
        result[to] *= n;
        const std::string attributes = along + " dim=" + std::to_string(dim) + " to=" + std::to_string(to);
        Check(mesh, axis, kSizes, Collective("all_to_all", result, attributes), [&](size_t mine, const auto& x) {
          return Fill(result, [&](Sizes at) {
            const auto from = static_cast<size_t>(at[to] / piece[to]);
            at[to] %= piece[to];
            at[dim] += static_cast<int64_t>(mine) * piece[dim];
            return At(x[from], kSizes, at);
          });
        });
      }
    }
  });
}

TEST(Activations, Broadcast) {
  ForEachAxis([](const Mesh& mesh, size_t axis, int64_t n, const std::string& along) {
    for (int64_t root = 0; root < n; ++root) {
      Check(mesh, axis, kSizes, Collective("broadcast", kSizes, along + " root=" + std::to_string(root)),
            [&](size_t, const auto& x) { return x[static_cast<size_t>(root)]; });
    }
  });
}

// Each rank passes on what it got until everything was everywhere; two messages are under way at once.
TEST(Activations, RingOfMessages) {
  ForEachAxis([](const Mesh& mesh, size_t axis, int64_t n, const std::string& along) {
    const std::string type = TypeText(kSizes), ring = "rank_" + mesh[axis].name;
    const std::string next = along + " peer=(" + ring + "+1)%" + std::to_string(n);
    const std::string before = along + " peer=(" + ring + "+" + std::to_string(n - 1) + ")%" + std::to_string(n);
    std::string ops = "  %100: b8[0] = send.start(%0) {" + next + "}\n  %200: b8[0] = send.start(%0) {" + next +
                      "}\n  %300: " + type + " = recv.start() {" + before + "}\n  %400: " + type + " = recv.start() {" +
                      before + "}\n  recv.wait(%300)\n  recv.wait(%400)\n  send.wait(%100)\n" +
                      "  send.wait(%200)\n  %500: " + type + " = aten.add.Tensor(%300, %400)\n";
    for (int64_t i = 1; i < n; ++i) {  // the sum goes round
      const auto name = [&](int64_t base) { return "%" + std::to_string(base + i); };
      ops += "  " + name(100) + ": b8[0] = send.start(%" + std::to_string(499 + i) + ") {" + next + "}\n  " +
             name(300) + ": " + type + " = recv.start() {" + before + "}\n  recv.wait(" + name(300) +
             ")\n  send.wait(" + name(100) + ")\n  " + name(500) + ": " + type + " = aten.add.Tensor(" + name(300) +
             ", " + name(300) + ")\n";
    }
    ops += "  %1: " + type + " = aten.neg(%" + std::to_string(499 + n) + ")\n";
    Check(mesh, axis, kSizes, ops, [&](size_t mine, const auto& x) {
      std::vector<double> out = x[mine];  // once round
      for (double& value : out) {
        for (int64_t i = 0; i < n; ++i) value *= 2;
        value = -value;
      }
      return out;
    });
  });
}

TEST(Activations, AMessageThatNobodySends) {
  Result<Program> program = Parse(
      "interlace 1 sharded\nmesh a 2\nstep 1 reduce_each\nphase micro_batch takes () gives () {\n"
      "  %1: f32[4] = recv.start() {axis=a peer=1}\n  recv.wait(%1)\n}\n");
  ASSERT_TRUE(program.ok()) << program.error().ToString();
  ASSERT_TRUE(Verify(*program).ok());
  Result<RunResult> result = Interpret(*program, {.steps = 1});
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().ToString(),
            "phase micro_batch: recv.wait(%1): rank 0 waits for a message that rank 1 never sent");
}

}  // namespace
}  // namespace interlace::testing
