// wire.h — a rank whose two peers say what the input says, for the fuzzer and the tests. The input chooses operations
// and then what comes on the wire: frames as they should be, frames with wrong fields, any bytes, notes.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "transport/collectives.h"
#include "transport/mesh.h"

namespace interlace {

// A frame's header (mesh.h).
struct WireHeader {
  uint32_t magic = 0x464d4c49;
  int32_t kind = 0;
  uint64_t number = 0, bytes = 0;
  char tag[40] = {};
};

// A header and its bytes, with the checksum behind them.
inline std::string Summed(std::string frame) {
  FrameSum sum;
  sum.Add(frame.data(), frame.size());
  const FrameTag tag = sum.Finish();
  return frame.append(tag.data(), tag.size());
}

class WireInput {
 public:
  WireInput(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool empty() const { return at_ == end_; }
  uint8_t Byte() { return at_ < end_ ? *at_++ : 0; }
  std::string Take(size_t bytes) {
    const size_t taken = std::min<size_t>(bytes, static_cast<size_t>(end_ - at_));
    at_ += taken;
    return {reinterpret_cast<const char*>(at_ - taken), taken};
  }

 private:
  const uint8_t *at_, *end_;
};

// Runs to its end, in no more than moments: what the peers say is there before it begins, and then they are silent.
inline void RunWire(const uint8_t* data, size_t size) {
  WireInput input(data, size);
  std::vector<PeerSockets> near(3), far(3);
  for (int peer = 1; peer < 3; ++peer) {
    for (Socket PeerSockets::*which : {&PeerSockets::data, &PeerSockets::control}) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) return;
      near[peer].*which = Socket(pair[0]);
      far[peer].*which = Socket(pair[1]);
    }
  }
  // The operations; what each peer should send for them.
  std::vector<uint8_t> kinds(1 + input.Byte() % 4);
  std::vector<std::vector<WireHeader>> frames(3);
  for (uint8_t& kind : kinds) {
    kind = input.Byte() % 6;
    for (int peer = 1; peer < 3; ++peer) {
      WireHeader header;
      header.kind = kind;
      header.bytes = kind == 2 ? 32 << 10 : 96;
      if (kind == 5 && peer == 2) continue;
      std::memcpy(header.tag, "x", 2);
      for (int round = 0; round < (kind == 2 ? 2 : 1); ++round) {
        header.number = frames[peer].size();
        frames[peer].push_back(header);
      }
    }
  }
  const auto say = [](const Socket& socket, const std::string& bytes) {
    (void)!send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  std::vector<size_t> next(3);
  while (!input.empty()) {
    const uint8_t what = input.Byte();
    const int peer = 1 + (what >> 3 & 1);
    switch (what % 8) {
      case 0:
      case 1:
      case 2:  // as it should be, or nearly
        if (next[peer] < frames[peer].size()) {
          const WireHeader header = frames[peer][next[peer]++];
          std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
          if (what % 8 == 2) frame[input.Byte() % sizeof header] ^= static_cast<char>(input.Byte());
          frame = Summed(frame + std::string(header.bytes, '\7'));
          if (what % 8 == 1 && what >= 128) frame[input.Byte() % frame.size()] ^= static_cast<char>(input.Byte());
          say(far[peer].data, frame);
        }
        break;
      case 3:
      case 4:
        say(far[peer].data, input.Take(input.Byte()));
        break;
      case 5:
        say(far[peer].control, input.Take(input.Byte()));
        break;
      case 6: {
        Note note(Note::kTimedOut, {0, 1}, "x", 1);
        reinterpret_cast<char*>(&note)[input.Byte() % sizeof note] ^= static_cast<char>(input.Byte());
        if (what < 128) note.sum = note.Sum();
        say(far[peer].control, std::string(reinterpret_cast<const char*>(&note), sizeof note));
        break;
      }
      default:
        shutdown((input.Byte() % 2 == 0 ? far[peer].data : far[peer].control).fd(), SHUT_WR);
    }
  }
  for (int peer = 1; peer < 3; ++peer) {
    shutdown(far[peer].data.fd(), SHUT_WR);
    shutdown(far[peer].control.fd(), SHUT_WR);
  }
  auto mesh = std::make_shared<Mesh>(RankGroup{"dp", {0, 1, 2}, 0}, std::move(near),
                                     MeshOptions{.lost_patience_ms = 0, .silent_patience_ms = 0});
  std::vector<std::vector<char>> memory;
  {
    Collectives group(std::move(mesh), 1e-3);
    std::vector<Ticket> open;
    for (const uint8_t kind : kinds) {
      char* const from = memory.emplace_back(96 << 10).data();
      char* const to = memory.emplace_back(96 << 10).data();
      const TypedSpan shard{from, 96, DType::kU8}, full{to, 3 * 96, DType::kU8}, large{from, 96 << 10, DType::kU8};
      const auto part = [&](char* base, int i) { return TypedSpan{base + 96 * i, 96, DType::kU8}; };
      Result<Ticket> ticket = kind == 0   ? group.StartGather({shard}, {full}, "x")
                              : kind == 1 ? group.StartReduce({full}, {shard}, to + 1024, "x")
                              : kind == 2 ? group.StartAllReduce(large, to, "x")
                              : kind == 3 ? group.StartAllToAll({part(from, 0), part(from, 1), part(from, 2)},
                                                                {part(to, 0), part(to, 1), part(to, 2)}, "x")
                              : kind == 4 ? group.StartBroadcast(shard, 1, "x")
                                          : group.StartRecv(shard, 1, "x", "x");
      if (ticket.ok()) open.push_back(*ticket);
    }
    for (size_t i = open.size(); i-- > 0;) (void)group.Wait(open[i]).ok();
  }
}

}  // namespace interlace
