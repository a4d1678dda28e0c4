// The vector code of evaluate_vectors.cc, included once for each instruction set in a namespace of its own, with kVector set.
typedef double Vector __attribute__((vector_size(kVector * sizeof(double)), may_alias));
using Row = StrategyVectors::Row;

struct Four { Vector a, b, c, d; };  // compute, device-device, in, out

// One step of Algorithm 1, which takes effect where `on` is not 0: the classes with something left run together until the
// first of them is done.
INTERLACE_INLINE void Overlap(const Vector& on, const Four& f, const Four& inverse, Four& x, Vector& total) {
  constexpr double kFar = 1e300;
  const Vector far = Vector{} + kFar, none{};
  const Vector sa = x.a > 0 ? x.a * f.a : far, sb = x.b > 0 ? x.b * f.b : far;
  const Vector sc = x.c > 0 ? x.c * f.c : far, sd = x.d > 0 ? x.d * f.d : far;
  const Vector ab = INTERLACE_MIN(sa, sb), cd = INTERLACE_MIN(sc, sd), least = INTERLACE_MIN(ab, cd);
  const Vector o = on > 0 ? least : none;
  total += o;
  const Vector ra = x.a - o * inverse.a, rb = x.b - o * inverse.b, rc = x.c - o * inverse.c, rd = x.d - o * inverse.d;
  x.a = sa > o ? INTERLACE_MAX(ra, none) : none;
  x.b = sb > o ? INTERLACE_MAX(rb, none) : none;
  x.c = sc > o ? INTERLACE_MAX(rc, none) : none;
  x.d = sd > o ? INTERLACE_MAX(rd, none) : none;
}

// One of three numbers per lane: the first where `first` is not 0, else the second where `second` is not, else the third.
INTERLACE_INLINE void Pick(Vector& out, const Vector& first, double one, const Vector& second, double two, double three) {
  const Vector a = Vector{} + one, b = Vector{} + two, c = Vector{} + three;
  const Vector rest = second > 0 ? b : c;
  out = first > 0 ? a : rest;
}

INTERLACE_INLINE void AddTogether(Vector& us, const OverlapFactors& f, const Vector& compute, const Vector& link, const Vector& in,
                                  const Vector& out) {
  using Table = std::array<std::array<double, 4>, 4>;
  if (!f.overlap) {
    us += compute + link + in + out;
    return;
  }
  const Vector zero{}, one = zero + 1;
  Four x{compute, link, in, out};
  Vector total{};
  {
    const Vector ab = INTERLACE_MIN(x.a, x.b), cd = INTERLACE_MIN(x.c, x.d), all = INTERLACE_MIN(ab, cd);
    Overlap(all, {zero + f.all[0], zero + f.all[1], zero + f.all[2], zero + f.all[3]},
            {zero + f.all_inverse[0], zero + f.all_inverse[1], zero + f.all_inverse[2], zero + f.all_inverse[3]}, x, total);
  }
  {
    // Three: exactly one class has nothing left; the factors are those of the set without it.
    const Vector za = x.a > 0 ? zero : one, zb = x.b > 0 ? zero : one, zc = x.c > 0 ? zero : one, zd = x.d > 0 ? zero : one;
    const Vector on = za + zb + zc + zd == 1 ? one : zero;
    Four factor, inverse;
    auto pick = [&](Four& to, const Table& t) __attribute__((always_inline)) {
      Pick(to.a, zb, t[1][0], zc, t[2][0], t[3][0]);
      Pick(to.b, za, t[0][1], zc, t[2][1], t[3][1]);
      Pick(to.c, za, t[0][2], zb, t[1][2], t[3][2]);
      Pick(to.d, za, t[0][3], zb, t[1][3], t[2][3]);
    };
    pick(factor, f.without);
    pick(inverse, f.without_inverse);
    Overlap(on, factor, inverse, x, total);
  }
  {
    // Two: the factors are those of a class beside its partner.
    const Vector ia = x.a > 0 ? one : zero, ib = x.b > 0 ? one : zero, ic = x.c > 0 ? one : zero, id = x.d > 0 ? one : zero;
    const Vector on = ia + ib + ic + id == 2 ? one : zero;
    Four factor, inverse;
    auto pick = [&](Four& to, const Table& t) __attribute__((always_inline)) {
      Pick(to.a, ib, t[0][1], ic, t[0][2], t[0][3]);
      Pick(to.b, ia, t[1][0], ic, t[1][2], t[1][3]);
      Pick(to.c, ia, t[2][0], ib, t[2][1], t[2][3]);
      Pick(to.d, ia, t[3][0], ib, t[3][1], t[3][2]);
    };
    pick(factor, f.pair);
    pick(inverse, f.pair_inverse);
    Overlap(on, factor, inverse, x, total);
  }
  us += total + x.a + x.b + x.c + x.d;
}

// Whole bytes of `bytes * ratio`. Exact floor below 2^51: adding 2^52 leaves no room for a fraction.
INTERLACE_INLINE void Split(Vector& out, const Vector& bytes, const Vector& ratio) {
  const Vector product = bytes * ratio, whole = (product + 0x1p52) - 0x1p52;
  out = whole > product ? whole - 1 : whole;
}

// Times of the blocks in a phase, added to `us`.
template <StagePhase phase>
INTERLACE_INLINE void AddBlocks(const StageSums& s, const StrategyVectors& vectors, Row& us) {
  constexpr bool backward = phase == kBackward || phase == kBackwardLast;
  const LayerPart& b = s.layer[1];
  const LinkTime& gather = s.gather[phase][1];
  const LinkTime& reduce = s.reduce[phase][1];
  // 1 where a block opens or closes the phase.
  const double opens = backward ? !s.head : !s.embedding, closes = backward ? !s.embedding : !s.head;
  const double block_us = backward ? b.cost.backward_us : b.cost.forward_us + (phase == kForwardFirst ? b.update_us : 0);
  const double tp_us = backward ? b.cost.tp_backward_us : b.cost.tp_forward_us;
  const double saved_kept = static_cast<double>(b.cost.saved_kept), saved_selective = static_cast<double>(b.cost.saved_selective);
  const double saved_full = static_cast<double>(b.cost.saved_full);
  for (int i = 0; i < vectors.count; i += kVector) {
    const Vector n = INTERLACE_AT(vectors.layers), full = INTERLACE_AT(vectors.full), selective = INTERLACE_AT(vectors.selective);
    const Vector kept = n - full - selective;
    const Vector wo = INTERLACE_AT(vectors.wo), go = INTERLACE_AT(vectors.go), oo = INTERLACE_AT(vectors.oo), ao = INTERLACE_AT(vectors.ao);
    const Vector mean = ao * ((kept * saved_kept + selective * saved_selective + full * saved_full) / n);
    Vector coming, going;
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
    const Vector early = n - opens, late = n - closes;
    Vector compute = n * block_us + early * gather.core_us + late * reduce.core_us;
    Vector exposed = n * tp_us + opens * (coming + gather.us) + closes * (going + reduce.us);
    if constexpr (backward) {
      compute += full * b.cost.recompute_full_us + selective * b.cost.recompute_selective_us;
      exposed += full * b.cost.tp_recompute_full_us + selective * b.cost.tp_recompute_selective_us;
    }
    Vector sum = INTERLACE_AT(us) + exposed;
    AddTogether(sum, s.factors, compute, early * gather.us + late * reduce.us, early * coming, late * going);
    *reinterpret_cast<Vector*>(&us[i]) = sum;
  }
}

// The same of an embedding or a head: one layer, which opens the phase or closes it.
template <StagePhase phase, int role>
INTERLACE_INLINE void AddEnd(const StageSums& s, const StrategyVectors& vectors, Row& us) {
  constexpr bool backward = phase == kBackward || phase == kBackwardLast, opens = (role == 0) != backward;
  const LayerPart& part = s.layer[role];
  const LinkTime& gather = s.gather[phase][role];
  const LinkTime& reduce = s.reduce[phase][role];
  const double saved = static_cast<double>(part.cost.saved_kept);
  const double weights_in_us = backward && role == 0 ? 0 : part.weights_in_us;
  const double compute_us = (backward ? part.cost.backward_us : part.cost.forward_us + (phase == kForwardFirst ? part.update_us : 0)) +
                            (opens ? reduce.core_us : gather.core_us);
  const double fixed_us = (backward ? part.cost.tp_backward_us : part.cost.tp_forward_us) + (opens ? gather.us : reduce.us);
  const Vector zero{}, compute = zero + compute_us, link = zero + (opens ? reduce.us : gather.us);
  for (int i = 0; i < vectors.count; i += kVector) {
    const Vector wo = INTERLACE_AT(vectors.wo), go = INTERLACE_AT(vectors.go), oo = INTERLACE_AT(vectors.oo), ao = INTERLACE_AT(vectors.ao);
    Vector coming, going;
    if constexpr (backward) {
      coming = wo * weights_in_us + go * part.gradients_in_us + ao * (saved * s.in_us_per_byte);
      going = go * part.gradients_out_us;
    } else if constexpr (phase == kForwardFirst) {
      coming = oo * part.states_in_us + go * part.gradients_in_us;
      going = ao * (saved * s.out_us_per_byte) + oo * part.states_out_us + wo * part.weights_out_us;
    } else {
      coming = wo * weights_in_us;
      going = ao * (saved * s.out_us_per_byte);
    }
    Vector sum = INTERLACE_AT(us) + fixed_us + (opens ? coming : going);
    AddTogether(sum, s.factors, compute, link, opens ? zero : coming, opens ? going : zero);
    *reinterpret_cast<Vector*>(&us[i]) = sum;
  }
}

template <StagePhase phase>
INTERLACE_INLINE void AddPhase(const StageSums& s, const StrategyVectors& vectors, Row& us) {
  AddBlocks<phase>(s, vectors, us);
  if (s.embedding) AddEnd<phase, 0>(s, vectors, us);
  if (s.head) AddEnd<phase, 2>(s, vectors, us);
}

INTERLACE_INLINE void CountBytes(const StageSums& s, StrategyVectors& vectors) {
  const LayerPart &e = s.layer[0], &b = s.layer[1], &h = s.layer[2];
  const auto real = [](int64_t bytes) __attribute__((always_inline)) { return static_cast<double>(bytes); };
  const auto ends = [&](int64_t LayerPart::*member) __attribute__((always_inline)) {
    return (s.embedding ? real(e.*member) : 0) + (s.head ? real(h.*member) : 0);
  };
  const double end_weights = ends(&LayerPart::weights), end_gradients = ends(&LayerPart::gradients), end_states = ends(&LayerPart::states);
  const double e_saved = s.embedding ? real(e.cost.saved_kept) : 0, h_saved = s.head ? real(h.cost.saved_kept) : 0;
  // Where there is no embedding or head, its peak is below every other.
  constexpr double kNone = -1e18;
  const double e_forward = s.embedding ? real(e.cost.work_forward) : kNone, h_forward = s.head ? real(h.cost.work_forward) : kNone;
  const double e_backward = s.embedding ? real(e.cost.work_backward) : kNone, h_backward = s.head ? real(h.cost.work_backward) : kNone;
  const double b_forward = real(b.cost.work_forward);
  const double saved_kept = real(b.cost.saved_kept), saved_selective = real(b.cost.saved_selective), saved_full = real(b.cost.saved_full);
  const double work_kept = real(b.cost.work_backward), work_selective = real(b.cost.work_backward_selective);
  const double work_full = real(b.cost.work_backward_full);
  const Vector zero{};
  for (int i = 0; i < vectors.count; i += kVector) {
    const Vector n = INTERLACE_AT(vectors.layers), full = INTERLACE_AT(vectors.full), selective = INTERLACE_AT(vectors.selective);
    const Vector kept = n - full - selective, p = INTERLACE_AT(vectors.in_flight);
    const Vector wo = INTERLACE_AT(vectors.wo), go = INTERLACE_AT(vectors.go), oo = INTERLACE_AT(vectors.oo), ao = INTERLACE_AT(vectors.ao);
    const Vector weights = n * real(b.weights) + end_weights, gradients = n * real(b.gradients) + end_gradients;
    const Vector states = n * real(b.states) + end_states;
    const Vector saved = kept * saved_kept + selective * saved_selective + full * saved_full + e_saved + h_saved;
    // The largest of the kinds of block that occur.
    Vector most = kept > 0 ? zero + saved_kept : zero, work = kept > 0 ? zero + work_kept : zero;
    const Vector most_s = selective > 0 ? zero + saved_selective : zero, work_s = selective > 0 ? zero + work_selective : zero;
    const Vector most_f = full > 0 ? zero + saved_full : zero, work_f = full > 0 ? zero + work_full : zero;
    most = INTERLACE_MAX(most, most_s), most = INTERLACE_MAX(most, most_f);
    work = INTERLACE_MAX(work, work_s), work = INTERLACE_MAX(work, work_f);
    const auto by_count = [&](Vector& out, const std::array<double, 2>& pair) __attribute__((always_inline)) {
      out = n > 1 ? zero + pair[1] : zero + pair[0];
    };
    Vector buffer_w, buffer_g, buffer_o, gathered_w, gathered_g, on_w, on_g, on_o, on_a;
    by_count(buffer_w, s.pair_weights), by_count(buffer_g, s.pair_gradients), by_count(buffer_o, s.pair_states);
    by_count(gathered_w, s.pair_gathered_weights), by_count(gathered_g, s.pair_gathered_gradients);
    Split(buffer_w, buffer_w, wo), Split(buffer_g, buffer_g, go), Split(buffer_o, buffer_o, oo);
    Split(on_w, weights, wo), Split(on_g, gradients, go), Split(on_o, states, oo), Split(on_a, p * saved, ao);
    Vector pair_saved = n > 1 ? 2 * most : most;
    if (s.embedding) pair_saved = INTERLACE_MAX(pair_saved, e_saved + most);
    if (s.head) pair_saved = INTERLACE_MAX(pair_saved, most + h_saved);
    const Vector always = (weights - on_w) + (gradients - on_g) + (states - on_o) + gathered_w + buffer_w + s.neighbours;

    const auto raise = [&](Vector& peak, const Vector& live, const Vector& layer) __attribute__((always_inline)) {
      Vector out, buffer;
      const Vector streamed = INTERLACE_MIN(live, pair_saved);
      Split(out, live, ao), Split(buffer, streamed, ao);
      const Vector here = live - out + buffer + layer;
      peak = INTERLACE_MAX(peak, here);
    };
    const auto forward_at = [&](Vector& peak, const Vector& count) __attribute__((always_inline)) {
      raise(peak, count * saved - h_saved, zero + b_forward);
      if (s.embedding) raise(peak, (count - 1) * saved + e_saved, zero + e_forward);
      if (s.head) raise(peak, count * saved, zero + h_forward);
    };
    Vector first{}, forward{}, backward{};
    forward_at(first, zero + 1);
    forward_at(forward, p);
    raise(backward, p * saved - h_saved, work);
    if (s.embedding) raise(backward, (p - 1) * saved + e_saved, zero + e_backward);
    if (s.head) raise(backward, p * saved, zero + h_backward);
    first += buffer_g + buffer_o;
    *reinterpret_cast<Vector*>(&vectors.peak_forward[i]) = always + INTERLACE_MAX(first, forward);
    *reinterpret_cast<Vector*>(&vectors.peak_backward[i]) = always + backward + gathered_g + buffer_g;
    *reinterpret_cast<Vector*>(&vectors.host[i]) = on_w + on_g + on_o + on_a;
  }
}

void EvaluateVectors(const StageSums& s, StrategyVectors& vectors, Wanted wanted) {
  static_assert(StrategyVectors::kWidth % kVector == 0);
  for (Row* row : {&vectors.layers, &vectors.full, &vectors.selective, &vectors.in_flight, &vectors.wo, &vectors.go, &vectors.oo, &vectors.ao}) {
    for (int i = vectors.count; i % kVector != 0; ++i) (*row)[i] = (*row)[vectors.count - 1];
  }
  vectors.stable_us.fill(0), vectors.total_us.fill(0);
  AddPhase<kForward>(s, vectors, vectors.stable_us);
  AddPhase<kBackward>(s, vectors, vectors.stable_us);
  AddPhase<kForwardFirst>(s, vectors, vectors.total_us);
  AddPhase<kBackwardLast>(s, vectors, vectors.total_us);
  if (wanted == Wanted::kAll) CountBytes(s, vectors);
}
