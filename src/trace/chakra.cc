#include "trace/chakra.h"

namespace interlace {
namespace {

// Field numbers of et_def.proto.
enum NodeField { kId = 1, kName = 2, kType = 3, kCtrlDeps = 4, kDataDeps = 5, kStart = 6, kDuration = 7, kAttr = 10 };
enum MetadataField { kVersion = 1, kMetadataAttr = 2 };
enum AttributeField { kAttributeName = 1, kInt64 = 9, kUint64 = 13, kBool = 27, kString = 29 };
enum WireType { kVarint = 0, kBytes = 2 };

constexpr std::string_view kSchemaVersion = "1.0.0";

void AppendVarint(std::string& out, uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

void AppendTag(std::string& out, int field, WireType type) {
  AppendVarint(out, static_cast<uint64_t>(field) << 3 | type);
}

// proto3 leaves out numbers that are zero, except where they are alternatives (`value` of an attribute).
void AppendNumber(std::string& out, int field, uint64_t value, bool always = false) {
  if (value == 0 && !always) return;
  AppendTag(out, field, kVarint);
  AppendVarint(out, value);
}

void AppendBytes(std::string& out, int field, std::string_view bytes) {
  AppendTag(out, field, kBytes);
  AppendVarint(out, bytes.size());
  out.append(bytes);
}

// Repeated numbers are packed into one field.
void AppendNumbers(std::string& out, int field, const std::vector<uint64_t>& values) {
  if (values.empty()) return;
  std::string packed;
  for (uint64_t value : values) AppendVarint(packed, value);
  AppendBytes(out, field, packed);
}

void AppendAttribute(std::string& out, int field, const ChakraAttribute& attribute) {
  std::string message;
  AppendBytes(message, kAttributeName, attribute.name);
  if (const auto* integer = std::get_if<int64_t>(&attribute.value)) {
    AppendNumber(message, kInt64, static_cast<uint64_t>(*integer), true);
  } else if (const auto* natural = std::get_if<uint64_t>(&attribute.value)) {
    AppendNumber(message, kUint64, *natural, true);
  } else if (const auto* boolean = std::get_if<bool>(&attribute.value)) {
    AppendNumber(message, kBool, *boolean, true);
  } else {
    AppendBytes(message, kString, std::get<std::string>(attribute.value));
  }
  AppendBytes(out, field, message);
}

void AppendMessage(std::string& out, std::string_view message) {
  AppendVarint(out, message.size());
  out.append(message);
}

uint64_t Micros(int64_t nanoseconds) {
  return static_cast<uint64_t>((nanoseconds + 500) / 1000);
}

}  // namespace

std::string WriteChakra(const std::vector<ChakraNode>& nodes, const std::vector<ChakraAttribute>& metadata) {
  std::string out, message;
  AppendBytes(message, kVersion, kSchemaVersion);
  for (const ChakraAttribute& attribute : metadata) AppendAttribute(message, kMetadataAttr, attribute);
  AppendMessage(out, message);
  for (const ChakraNode& node : nodes) {
    message.clear();
    AppendNumber(message, kId, node.id);
    AppendBytes(message, kName, node.name);
    AppendNumber(message, kType, static_cast<uint64_t>(node.type));
    AppendNumbers(message, kCtrlDeps, node.ctrl_deps);
    AppendNumbers(message, kDataDeps, node.data_deps);
    AppendNumber(message, kStart, Micros(node.start_ns));
    AppendNumber(message, kDuration, Micros(node.duration_ns));
    for (const ChakraAttribute& attribute : node.attributes) AppendAttribute(message, kAttr, attribute);
    AppendMessage(out, message);
  }
  return out;
}

}  // namespace interlace
