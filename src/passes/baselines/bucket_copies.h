// baselines/bucket_copies.h — coalesced calls in the form that peers use: one collective on a buffer of the whole
// bucket, and copies in and out of it (SimpleFSDP 3.2.1), as ops that cost time and memory.
//
//   %1, %2 = gather.start(%s0, %s1)        %c = aten.cat([%s0, %s1], 0)   %f = gather.start(%c) units=[bucket]
//   gather.wait(%1)                   →    gather.wait(%f)   %1, %2: copies of rows of %f   release(%f)
//   gather.wait(%2)
//
//   %3, %4 = reduce.start(%g0, %g1)        %c = aten.cat([%g0, %g1 by rank], 1)   release(%g0)   release(%g1)
//   reduce.wait(%3)  release(%g0)     →    %r = reduce.start(%c) units=[bucket]
//   reduce.wait(%4)  release(%g1)          reduce.wait(%r)  release(%c)   %3, %4: copies of parts of %r   release(%r)
//
// The bucket is a unit without parameters and states; its shard is the shards of its units one behind the other.
#pragma once

#include <map>
#include <vector>

#include "base/result.h"
#include "ir/program.h"

namespace interlace {

class CopiedBuckets {
 public:
  explicit CopiedBuckets(Program& program) : program_(program) {}

  // Rewrites the starts named, which have two or more buffers of one dtype and are waited for in this phase.
  // Error: a buffer that is handed on to another phase.
  Status Rewrite(Phase& phase, const std::vector<OpId>& starts);

 private:
  UnitId UnitOf(std::vector<UnitId> members, DType dtype);

  Program& program_;
  std::map<std::pair<std::vector<UnitId>, DType>, UnitId> units_;
};

}  // namespace interlace
