#include "passes/stages/stage_lives.h"

#include <algorithm>

#include "ir/op_table.h"
#include "passes/sharding.h"

namespace interlace::stages {

StageLives::StageLives(const Program& program, const Flow& flow, const Layout& layout, int32_t rank)
    : program_(program), flow_(flow), layout_(layout), rank_(rank) {
  FindLast();
  FindPlaces();
}

void StageLives::FindLast() {
  const auto add = [&](ValueId id, int32_t stage) {
    if (stage < 0 || !IsHere(stage)) return;
    int32_t& last = last_.try_emplace(program_.RootOf(id), stage).first->second;
    last = std::min(last, stage);
  };
  for (int32_t i = flow_.first_backward(); i < flow_.size(); ++i) {
    for (ValueId root : flow_.Needs(i)) add(root, layout_.stage[i]);
  }
  for (const auto& [grad, parts] : layout_.gradients) {
    for (const GradPart& part : parts) {
      for (ValueId id : part.values) add(id, part.place.stage);
    }
  }
}

void StageLives::FindPlaces() {
  const auto add = [&](const Station& place) {
    if (IsHere(place.stage) && IndexOf(place) < 0) places_.push_back(place);
  };
  for (int32_t i = 0; i < flow_.size(); ++i) {
    if (layout_.stage[i] >= 0) add({layout_.stage[i], layout_.turn[i]});
  }
  for (const auto& [grad, parts] : layout_.gradients) {
    for (const GradPart& part : parts) add(part.place);
  }
  for (const Message& message : layout_.messages) {
    add(message.from);
    add(message.to);
    if (message.from.turn == Turn::kBackward && IsHere(message.from.stage)) add(WaitsAt(message));
  }
  std::sort(places_.begin(), places_.end(), Before);
}

int32_t StageLives::IndexOf(const Station& place) const {
  const auto found = std::find(places_.begin(), places_.end(), place);
  return found == places_.end() ? -1 : static_cast<int32_t>(found - places_.begin());
}

const StageLives::Life* StageLives::Received(ValueId root) const {
  const auto found = lives_.find(Key(root, 0));
  return found == lives_.end() || !found->second.received ? nullptr : &found->second;
}

const GradPart* StageLives::PartAt(int32_t index, const Station& place) const {
  const auto found = layout_.gradients.find(index);
  if (found == layout_.gradients.end()) return nullptr;
  for (const GradPart& part : found->second) {
    if (part.place == place) return &part;
  }
  return nullptr;
}

Station StageLives::WaitsAt(const Message& message) const {
  if (message.from.turn == Turn::kForward) return {message.from.stage, Turn::kBackward};
  const auto last = last_.find(message.root);
  return {last == last_.end() ? message.from.stage : std::min(last->second, message.from.stage), Turn::kSent};
}

int32_t StageLives::WaitedAt(const Message& message) const {
  return std::max(IndexOf(message.from), IndexOf(WaitsAt(message)));
}

StageLives::Key StageLives::KeyOf(ValueId root, int32_t place) const {
  const int32_t def = flow_.DefOf(root);
  const bool own = def >= 0 && flow_.Repeats(def);
  return {root, own ? layout_.deal.ChunkOf(places_[static_cast<size_t>(place)].stage) : 0};
}

// Made again in every place that uses it: casts of parameters that are there.
bool StageLives::IsMadeAnew(ValueId root) const {
  const int32_t def = flow_.DefOf(root);
  return def >= 0 && flow_.op(def).Attr(kOnShard) != nullptr;
}

void StageLives::Want(ValueId root, int32_t place) {
  if (IsDeclared(root)) return;
  const int32_t def = flow_.DefOf(root);
  if (IsMadeAnew(root)) return Want(program_.RootOf(flow_.op(def).args[0].value), place);
  const Key key = KeyOf(root, place);
  const bool first = lives_.find(key) == lives_.end();
  lives_[key].wanted.insert(place);
  if (!first || def < 0 || !flow_.Repeats(def)) return;
  lives_[key].from = place;  // made where it is first needed, and kept
  ForEachOperand(flow_.op(def), [&](ValueId id) { Want(program_.RootOf(id), place); });
}

void StageLives::FindAt(int32_t place) {
  const Station& here = places_[static_cast<size_t>(place)];
  for (int32_t i = 0; i < flow_.size(); ++i) {
    if (const GradPart* part = PartAt(i, here)) {
      for (ValueId id : part->values) Want(program_.RootOf(id), place);
    }
    if (!layout_.At(i, here)) continue;
    for (ValueId id : flow_.op(i).results) {
      if (id == kNone || program_.RootOf(id) != id) continue;
      Life& life = lives_[Key(id, 0)];
      life.from = place, life.wanted.insert(place);
    }
    if (flow_.op(i).kind == OpKind::kGrad) {
      Want(program_.RootOf(flow_.op(i).args[1].value), place);
    } else {
      ForEachOperand(flow_.op(i), [&](ValueId id) { Want(program_.RootOf(id), place); });
    }
  }
  for (const Message& message : layout_.messages) {
    if (!(message.from == here)) continue;
    Want(message.root, place);
    if (const int32_t end = WaitedAt(message); end > place) Want(message.root, end);
  }
}

Status StageLives::Find() {
  for (const Message& message : layout_.messages) {
    if (!IsHere(message.to.stage)) continue;
    Life& life = lives_[Key(message.root, 0)];
    life.from = IndexOf(message.to);
    life.received = true;
    life.sender = message.from.stage;
    life.wanted.insert(life.from);
  }
  for (size_t p = 0; p < places_.size(); ++p) FindAt(static_cast<int32_t>(p));
  for (const auto& [key, life] : lives_) {
    if (life.from < 0 || *life.wanted.begin() < life.from)
      return MakeError("%", key.first, " would be needed before it is made; choose other borders of the stages");
  }
  return Ok{};
}

}  // namespace interlace::stages
