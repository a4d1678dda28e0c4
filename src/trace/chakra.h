// chakra.h — execution traces in the MLCommons Chakra format, which network simulators such as ASTRA-sim replay.
//
// A file holds one rank: a GlobalMetadata message, then one Node message an op, each preceded by its length as a
// varint. The messages are protobuf (schema/protobuf/et_def.proto of github.com/mlcommons/chakra); the few fields that
// a trace needs are written here by hand, so that no protobuf library is needed.
//
//   node 7 "aten.mm"       COMP_NODE       data_deps {4, 6}  ctrl_deps {6}
//   node 8 "gather.start"  COMM_COLL_NODE  ctrl_deps {7}     comm_type ALL_GATHER, comm_size (bytes of one rank's part)
//
// data_deps: who wrote what the op reads. ctrl_deps: what must have ended, or been issued, before it in program order.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace interlace {

// Numbers are the schema's.
enum class ChakraNodeType : uint8_t {
  kMemLoad = 2,
  kMemStore = 3,
  kComp = 4,
  kCommSend = 5,
  kCommRecv = 6,
  kCommColl = 7
};
enum class ChakraCommType : uint8_t {
  kAllReduce = 0,
  kAllGather = 2,
  kBroadcast = 5,
  kAllToAll = 6,
  kReduceScatter = 7
};

struct ChakraAttribute {
  std::string name;
  std::variant<int64_t, uint64_t, bool, std::string> value;
};

struct ChakraNode {
  uint64_t id = 0;
  std::string name;
  ChakraNodeType type = ChakraNodeType::kComp;
  std::vector<uint64_t> ctrl_deps, data_deps;
  int64_t start_ns = 0, duration_ns = 0;  // written in whole microseconds, as the schema has them
  std::vector<ChakraAttribute> attributes;
};

// The bytes of one rank's file.
std::string WriteChakra(const std::vector<ChakraNode>& nodes, const std::vector<ChakraAttribute>& metadata);

}  // namespace interlace
