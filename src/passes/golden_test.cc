// Whole texts of one small model through the pipelines that people use; the files are read in review.
#include "passes/pass_test_support.h"

namespace interlace {
namespace {

struct Golden {
  const char* file;
  const char* pipeline;
};

class PassGolden : public ::testing::TestWithParam<Golden> {};

TEST_P(PassGolden, TextIsAsReviewed) {
  ExpectGolden(GetParam().file, RunText(GoldenInput("mlp.il"), GetParam().pipeline));
}

INSTANTIATE_TEST_SUITE_P(
    Files, PassGolden,
    ::testing::Values(
        Golden{"mlp.canonicalize.il", "canonicalize"}, Golden{"mlp.shard1.il", "canonicalize,shard(ranks=1),update"},
        Golden{"mlp.shard2.il", "canonicalize,shard(ranks=2),update(clip=1.0)"},
        Golden{"mlp.shard2_forward.il", "canonicalize,shard(ranks=2),update(clip=1.0),forward_only"},
        Golden{"mlp.shard2_plain.il", "canonicalize,shard(ranks=2,ahead=0,wait=now),update(norm=always)"},
        Golden{"mlp.replicate2.il", "canonicalize,replicate(ranks=2),update(clip=0.5)"},
        Golden{"mlp.zero1.il", "canonicalize,zero1(ranks=3),update(clip=0.5,momentum=false)"},
        Golden{"mlp.shard2_each.il", "canonicalize,shard(ranks=2),accumulate(steps=3),update"},
        Golden{"mlp.shard2_last.il", "canonicalize,shard(ranks=2),accumulate(steps=2,mode=reduce_last),update"},
        Golden{"mlp.shard1_last.il", "canonicalize,shard(ranks=1),accumulate(steps=2,mode=reduce_last),update"},
        Golden{"mlp.replicate2_each.il", "canonicalize,replicate(ranks=2),accumulate(steps=2),update"}),
    [](const auto& info) {
      std::string name = info.param.file;
      for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name;
    });

}  // namespace
}  // namespace interlace
