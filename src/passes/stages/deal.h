// deal.h — which rank has which of the `ranks` * `chunks` stages of a model. Three ranks, two chunks:
//
//   in turns   rank 0: 0 3   rank 1: 1 4   rank 2: 2 5    Narayanan et al. 2021: the last rank sends to the first
//   v          rank 0: 0 5   rank 1: 1 4   rank 2: 2 3    Qi et al. 2024: there and back; the loss is on the first rank
#pragma once

#include <cstdint>

namespace interlace::stages {

struct Deal {
  int64_t ranks = 1, chunks = 1;
  bool v = false;

  int64_t Stages() const { return ranks * chunks; }
  int32_t ChunkOf(int64_t stage) const { return static_cast<int32_t>(stage / ranks); }
  int32_t RankOf(int64_t stage) const { return static_cast<int32_t>(Mirrored(ChunkOf(stage), stage % ranks)); }
  int64_t StageOf(int64_t rank, int64_t chunk) const { return chunk * ranks + Mirrored(chunk, rank); }
  friend bool operator==(const Deal&, const Deal&) = default;

 private:
  int64_t Mirrored(int64_t chunk, int64_t place) const { return v && chunk % 2 == 1 ? ranks - 1 - place : place; }
};

}  // namespace interlace::stages
