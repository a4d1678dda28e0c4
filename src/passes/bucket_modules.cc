#include "passes/bucket_modules.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "base/scan.h"
#include "base/sort.h"
#include "base/suggest.h"
#include "passes/transfers.h"

namespace interlace {
namespace {

// The module of `name` that the pattern stands for ("model.layers.*" and "model.layers.3.w" give "model.layers.3"), or
// "".
std::string_view OwnerIn(const std::vector<std::string_view>& pattern, std::string_view name) {
  const std::vector<std::string_view> path = Split(name, '.');
  if (path.size() <= pattern.size()) return {};  // the last component is the parameter's own
  size_t length = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != "*" && pattern[i] != path[i]) return {};
    length += path[i].size() + (i > 0 ? 1 : 0);
  }
  return name.substr(0, length);
}

struct Owner {
  std::string_view module;
  size_t entry = 0;
};

class ModuleBuckets {
 public:
  ModuleBuckets(const Program& program, const std::string& modules)
      : program_(program), text_(modules), entries_(Split(text_, '+')) {
    for (std::string_view entry : entries_) patterns_.push_back(Split(entry, '.'));
  }

  Result<std::vector<int32_t>> Run() {
    std::vector<bool> used(entries_.size(), false);
    std::vector<int32_t> bucket_of(program_.units.size(), -1);
    std::vector<const Param*> named(program_.units.size(),
                                    nullptr);  // the parameter that said so, or that has no owner
    std::map<std::string_view, int32_t> buckets;
    for (const Param& param : program_.params) {
      if (param.unit == kNone) continue;
      INTERLACE_ASSIGN(Owner owner, OwnerOf(param, used));
      int32_t bucket = -1;
      if (!owner.module.empty())
        bucket = buckets.try_emplace(owner.module, static_cast<int32_t>(buckets.size())).first->second;
      if (named[param.unit] != nullptr && bucket_of[param.unit] != bucket) {
        return MakeError("'", named[param.unit]->name, "' and '", param.name, "' share u", param.unit,
                         " but not a module of the list; bucket before units are joined");
      }
      bucket_of[param.unit] = bucket;
      named[param.unit] = &param;
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (used[i]) continue;
      return MakeError("option modules: '", entries_[i], "' owns no parameter", Suggestion(i));
    }
    return bucket_of;
  }

 private:
  // The first of a parameter's names that an entry owns; another entry that owns the same name overlaps.
  Result<Owner> OwnerOf(const Param& param, std::vector<bool>& used) const {
    Owner owner;
    auto look = [&](const std::string& name) -> Status {
      for (size_t i = 0; i < entries_.size(); ++i) {
        const std::string_view module = OwnerIn(patterns_[i], name);
        if (module.empty()) continue;
        if (!owner.module.empty()) {
          return MakeError("option modules: '", entries_[owner.entry], "' and '", entries_[i], "' overlap: both own '",
                           name, "'");
        }
        owner = {module, i};
        used[i] = true;
      }
      return Ok{};
    };
    INTERLACE_TRY(look(param.name));
    for (const std::string& alias : param.aliases) {
      if (owner.module.empty()) INTERLACE_TRY(look(alias));
    }
    return owner;
  }

  // The path nearest to an entry, with the entry's stars; where none is near, the shortest ones that own a parameter.
  std::string Suggestion(size_t entry) const {
    std::set<std::string> paths;
    for (const Param& param : program_.params) {
      const std::vector<std::string_view> parts = Split(param.name, '.');
      std::string path;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const bool star = i < patterns_[entry].size() && patterns_[entry][i] == "*";
        path += (i > 0 ? "." : "") + std::string(star ? "*" : parts[i]);
        paths.insert(path);
      }
    }
    std::vector<std::string_view> known(paths.begin(), paths.end());
    std::string nearest = DidYouMean(entries_[entry], known);
    if (!nearest.empty() || known.empty()) return nearest;
    StableSort(known, [](std::string_view a, std::string_view b) { return a.size() < b.size(); });
    constexpr size_t kShown = 3;
    std::string text;
    for (size_t i = 0; i < std::min(kShown, known.size()); ++i)
      text += (i > 0 ? ", '" : "; for example '") + std::string(known[i]) + "'";
    return text + (known.size() > 1 ? " do" : " does");
  }

  const Program& program_;
  const std::string text_;
  const std::vector<std::string_view> entries_;
  std::vector<std::vector<std::string_view>> patterns_;
};

}  // namespace

Result<std::vector<int32_t>> BucketsOfModules(const Program& program, const std::string& modules) {
  return ModuleBuckets(program, modules).Run();
}

}  // namespace interlace
