// kernels_clones.h — one source, several instruction sets: a function marked INTERLACE_CLONES is compiled for the baseline, AVX2 and
// AVX-512 and the loader picks. The bits are the same in all of them, because nothing contracts a*b+c (-ffp-contract=off) and
// loops carry no reordered sums.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define INTERLACE_CLONES [[gnu::target_clones("default", "avx2", "arch=skylake-avx512")]]
#else
#define INTERLACE_CLONES
#endif
