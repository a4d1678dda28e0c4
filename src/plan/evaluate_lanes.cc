// The vector code: loops over lanes without branches, compiled for several instruction sets. Each formula is the sum over
// equal layers of what stage_count.cc adds one by one; times agree to rounding, bytes exactly.
#include <algorithm>
#include <cmath>

#include "plan/stage_sums.h"

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define INTERLACE_LANES_CLONES [[gnu::target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")]]
#else
#define INTERLACE_LANES_CLONES
#endif
#define INTERLACE_INLINE [[gnu::always_inline]] inline

namespace interlace::plan {
namespace {

using Row = Lanes::Row;
struct Four { double a, b, c, d; };  // compute, device-device, in, out

// One set of classes of Algorithm 1: takes effect where `on`.
INTERLACE_INLINE void Overlap(bool on, const Four& f, const Four& inverse, Four& x, double& total) {
  constexpr double kFar = 1e300;
  const double sa = x.a > 0 ? x.a * f.a : kFar, sb = x.b > 0 ? x.b * f.b : kFar;
  const double sc = x.c > 0 ? x.c * f.c : kFar, sd = x.d > 0 ? x.d * f.d : kFar;
  const double least = std::min(std::min(sa, sb), std::min(sc, sd));
  const double o = on ? least : 0;
  total += o;
  const double ra = std::max(x.a - o * inverse.a, 0.0), rb = std::max(x.b - o * inverse.b, 0.0);
  const double rc = std::max(x.c - o * inverse.c, 0.0), rd = std::max(x.d - o * inverse.d, 0.0);
  x.a = sa == o ? 0 : ra, x.b = sb == o ? 0 : rb, x.c = sc == o ? 0 : rc, x.d = sd == o ? 0 : rd;
}

// table[i] where class i is the first of three that is not there; `i`, `j`, `k` name the columns.
INTERLACE_INLINE double Pick(bool first, double at_first, bool second, double at_second, double otherwise) {
  const double rest = second ? at_second : otherwise;
  return first ? at_first : rest;
}

INTERLACE_INLINE double Together(const OverlapFactors& f, double compute, double link, double in, double out) {
  Four x{compute, link, in, out};
  double total = 0;
  const auto four = [](const std::array<double, 4>& v) { return Four{v[0], v[1], v[2], v[3]}; };
  Overlap(x.a > 0 && x.b > 0 && x.c > 0 && x.d > 0, four(f.all), four(f.all_inverse), x, total);
  {
    // Three: at most one class is zero; the factors are those of the set without it.
    const bool za = !(x.a > 0), zb = !(x.b > 0), zc = !(x.c > 0), zd = !(x.d > 0);
    const bool on = za + zb + zc + zd == 1;
    const auto pick = [&](const std::array<std::array<double, 4>, 4>& t) {
      return Four{Pick(zb, t[1][0], zc, t[2][0], t[3][0]), Pick(za, t[0][1], zc, t[2][1], t[3][1]),
                  Pick(za, t[0][2], zb, t[1][2], t[3][2]), Pick(za, t[0][3], zb, t[1][3], t[2][3])};
    };
    Overlap(on, pick(f.without), pick(f.without_inverse), x, total);
  }
  {
    // Two: the factors are those of a class beside its partner.
    const bool ia = x.a > 0, ib = x.b > 0, ic = x.c > 0, id = x.d > 0;
    const bool on = ia + ib + ic + id == 2;
    const auto pick = [&](const std::array<std::array<double, 4>, 4>& t) {
      return Four{Pick(ib, t[0][1], ic, t[0][2], t[0][3]), Pick(ia, t[1][0], ic, t[1][2], t[1][3]),
                  Pick(ia, t[2][0], ib, t[2][1], t[2][3]), Pick(ia, t[3][0], ib, t[3][1], t[3][2])};
    };
    Overlap(on, pick(f.pair), pick(f.pair_inverse), x, total);
  }
  return total + x.a + x.b + x.c + x.d;
}

INTERLACE_INLINE double Split(double bytes, double ratio) { return std::floor(bytes * ratio); }

// Times of a phase, added to `us`.
template <Phase phase>
INTERLACE_INLINE void AddPhase(const StageSums& s, const Lanes& lanes, Row& us, bool serial) {
  constexpr bool backward = phase == kBackward || phase == kBackwardLast;
  const LayerPart &e = s.layer[0], &b = s.layer[1], &h = s.layer[2];
  const LinkTime gather = s.gather[phase][1], reduce = s.reduce[phase][1];
  // 1 where a block opens or closes the phase.
  const double opens = backward ? !s.head : !s.embedding, closes = backward ? !s.embedding : !s.head;
  const double block_us = backward ? b.cost.backward_us : b.cost.forward_us + (phase == kForwardFirst ? b.update_us : 0);
  const double tp_us = backward ? b.cost.tp_backward_us : b.cost.tp_forward_us;
  for (int i = 0; i < lanes.count; ++i) {
    const double n = lanes.layers[i], full = lanes.full[i], selective = lanes.selective[i], kept = n - full - selective;
    const double wo = lanes.wo[i], go = lanes.go[i], oo = lanes.oo[i], ao = lanes.ao[i];
    const double saved = kept * static_cast<double>(b.cost.saved_kept) + selective * static_cast<double>(b.cost.saved_selective) +
                         full * static_cast<double>(b.cost.saved_full);
    const double mean = ao * (saved / n);
    double coming, going;
    if constexpr (backward) {
      coming = wo * b.weights_in_us + go * b.gradients_in_us + mean * s.in_us_per_byte;
      going = go * b.gradients_out_us;
    } else if constexpr (phase == kForwardFirst) {
      coming = oo * b.states_in_us + go * b.gradients_in_us;
      going = oo * b.states_out_us + wo * b.weights_out_us + mean * s.out_us_per_byte;
    } else {
      coming = wo * b.weights_in_us;
      going = mean * s.out_us_per_byte;
    }
    const double early = n - opens, late = n - closes;
    double compute = n * block_us + early * gather.core_us + late * reduce.core_us;
    double exposed = n * tp_us + opens * (coming + gather.us) + closes * (going + reduce.us);
    if constexpr (backward) {
      compute += full * b.cost.recompute_full_us + selective * b.cost.recompute_selective_us;
      exposed += full * b.cost.tp_recompute_full_us + selective * b.cost.tp_recompute_selective_us;
    }
    const double link = early * gather.us + late * reduce.us, in = early * coming, out = late * going;
    us[i] += exposed + (serial ? compute + link + in + out : Together(s.factors, compute, link, in, out));
  }
  auto add_end = [&](int role, const LayerPart& part, bool opens_phase) {  // an embedding or a head, which opens or closes
    const bool needs_weights = !(backward && role == 0);
    const LinkTime g = s.gather[phase][role], r = s.reduce[phase][role];
    const double saved = static_cast<double>(part.cost.saved_kept);
    for (int i = 0; i < lanes.count; ++i) {
      const double wo = lanes.wo[i], go = lanes.go[i], oo = lanes.oo[i], ao = lanes.ao[i];
      double coming = 0, going = 0, compute = 0, exposed = 0;
      if constexpr (backward) {
        coming = (needs_weights ? wo * part.weights_in_us : 0) + go * part.gradients_in_us + ao * saved * s.in_us_per_byte;
        going = go * part.gradients_out_us;
        compute = part.cost.backward_us;
        exposed = part.cost.tp_backward_us;
      } else {
        coming = phase == kForwardFirst ? oo * part.states_in_us + go * part.gradients_in_us : wo * part.weights_in_us;
        going = ao * saved * s.out_us_per_byte + (phase == kForwardFirst ? oo * part.states_out_us + wo * part.weights_out_us : 0);
        compute = part.cost.forward_us + (phase == kForwardFirst ? part.update_us : 0);
        exposed = part.cost.tp_forward_us;
      }
      const double link = opens_phase ? r.us : g.us, in = opens_phase ? 0 : coming, out = opens_phase ? going : 0;
      compute += opens_phase ? r.core_us : g.core_us;
      exposed += opens_phase ? coming + g.us : going + r.us;
      us[i] += exposed + (serial ? compute + link + in + out : Together(s.factors, compute, link, in, out));
    }
  };
  if (s.embedding) add_end(0, e, !backward);
  if (s.head) add_end(2, h, backward);
}

}  // namespace

INTERLACE_LANES_CLONES
void EvaluateLanes(const StageSums& s, Lanes& lanes) {
  alignas(64) Row first, last;
  const bool serial = !s.factors.overlap;
  for (int i = 0; i < lanes.count; ++i) first[i] = last[i] = lanes.stable_us[i] = 0;
  AddPhase<kForwardFirst>(s, lanes, first, serial);
  AddPhase<kForward>(s, lanes, lanes.stable_us, serial);
  AddPhase<kBackward>(s, lanes, lanes.stable_us, serial);
  AddPhase<kBackwardLast>(s, lanes, last, serial);

  const LayerPart &e = s.layer[0], &b = s.layer[1], &h = s.layer[2];
  const double has_e = s.embedding ? 1 : 0, has_h = s.head ? 1 : 0;
  const double e_weights = has_e * static_cast<double>(e.weights) + has_h * static_cast<double>(h.weights);
  const double e_gradients = has_e * static_cast<double>(e.gradients) + has_h * static_cast<double>(h.gradients);
  const double e_states = has_e * static_cast<double>(e.states) + has_h * static_cast<double>(h.states);
  const double e_saved = has_e * static_cast<double>(e.cost.saved_kept), h_saved = has_h * static_cast<double>(h.cost.saved_kept);
  const double b_weights = static_cast<double>(b.weights), b_gradients = static_cast<double>(b.gradients);
  const double b_states = static_cast<double>(b.states);
  const double kept_saved = static_cast<double>(b.cost.saved_kept), full_saved = static_cast<double>(b.cost.saved_full);
  const double selective_saved = static_cast<double>(b.cost.saved_selective);
  const double kept_work = static_cast<double>(b.cost.work_backward), full_work = static_cast<double>(b.cost.work_backward_full);
  const double selective_work = static_cast<double>(b.cost.work_backward_selective);
  const double forward_work = static_cast<double>(b.cost.work_forward);
  // Where there is no embedding or head, its peak is below every other.
  constexpr double kNone = -1e18;
  const double e_forward = s.embedding ? static_cast<double>(e.cost.work_forward) : kNone;
  const double e_backward = s.embedding ? static_cast<double>(e.cost.work_backward) : kNone;
  const double h_forward = s.head ? static_cast<double>(h.cost.work_forward) : kNone;
  const double h_backward = s.head ? static_cast<double>(h.cost.work_backward) : kNone;
  for (int i = 0; i < lanes.count; ++i) {
    lanes.total_us[i] = first[i] + last[i];
    const double n = lanes.layers[i], full = lanes.full[i], selective = lanes.selective[i], kept = n - full - selective;
    const double p = lanes.in_flight[i], wo = lanes.wo[i], go = lanes.go[i], oo = lanes.oo[i], ao = lanes.ao[i];
    const double weights = n * b_weights + e_weights, gradients = n * b_gradients + e_gradients;
    const double states = n * b_states + e_states;
    const double blocks = kept * kept_saved + selective * selective_saved + full * full_saved;
    const double saved = blocks + e_saved + h_saved;
    const double m0 = kept > 0 ? kept_saved : 0, m1 = selective > 0 ? selective_saved : 0, m2 = full > 0 ? full_saved : 0;
    const double most = std::max(std::max(m0, m1), m2);
    const double w0 = kept > 0 ? kept_work : 0, w1 = selective > 0 ? selective_work : 0, w2 = full > 0 ? full_work : 0;
    const double work = std::max(std::max(w0, w1), w2);
    const bool many = n > 1;
    const double alone = many ? 2 * most : most;
    const double beside_e = s.embedding ? e_saved + most : 0, beside_h = s.head ? most + h_saved : 0;
    const double pair_saved = std::max(alone, std::max(beside_e, beside_h));
    const double on_w = Split(weights, wo), on_g = Split(gradients, go), on_o = Split(states, oo);
    const double buffer_w = Split(many ? s.pair_weights[1] : s.pair_weights[0], wo);
    const double buffer_g = Split(many ? s.pair_gradients[1] : s.pair_gradients[0], go);
    const double buffer_o = Split(many ? s.pair_states[1] : s.pair_states[0], oo);
    const double gathered_w = many ? s.pair_gathered_weights[1] : s.pair_gathered_weights[0];
    const double gathered_g = many ? s.pair_gathered_gradients[1] : s.pair_gathered_gradients[0];
    const double always = (weights - on_w) + (gradients - on_g) + (states - on_o) + gathered_w + buffer_w + s.neighbours;
    const auto live = [&](double bytes) { return bytes - Split(bytes, ao) + Split(std::min(bytes, pair_saved), ao); };
    const double at_e1 = live(e_saved), at_b1 = live(saved - h_saved), at_h1 = live(saved);
    const double at_e = live((p - 1) * saved + e_saved), at_b = live(p * saved - h_saved), at_h = live(p * saved);
    const double first_peak = std::max(at_b1 + forward_work, std::max(at_e1 + e_forward, at_h1 + h_forward));
    const double forward_peak = std::max(at_b + forward_work, std::max(at_e + e_forward, at_h + h_forward));
    const double backward_peak = std::max(at_b + work, std::max(at_e + e_backward, at_h + h_backward));
    lanes.peak_forward[i] = always + std::max(first_peak + buffer_g + buffer_o, forward_peak);
    lanes.peak_backward[i] = always + backward_peak + gathered_g + buffer_g;
    lanes.host[i] = on_w + on_g + on_o + Split(p * saved, ao);
  }
}

}  // namespace interlace::plan
