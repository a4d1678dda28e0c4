#!/bin/sh
# fuzz.sh SECONDS - runs every fuzz target of build/asan for so long, beside one another. A finding ends it and is kept in out/.
# FUZZ_SEED=n draws the same inputs again. Three quarters of the time go to inputs of at most 1.5 KB, thousands a second; the rest to inputs of any size, hundreds.
set -eu
seconds="$1"
targets=$(find build/asan -maxdepth 1 -name '*_fuzz' -type f -perm -u+x | sort)
[ -n "$targets" ] || { echo "error: no fuzz targets in build/asan" >&2; exit 1; }
mkdir -p out
all="tests/golden tests/models tests/regress"
# shellcheck disable=SC2086 # a list of folders on purpose
{ small=build/fuzz/small-seeds
  mkdir -p "$small" && find $all -type f -size -1500c -exec cp {} "$small" \;
  find $all -type f -name '*.??*' -exec grep -ohE '[a-z_][A-Za-z0-9_.]{2,30}' {} + | sort | uniq -c | sort -rn |
    awk 'NR <= 500 {print "\"" $2 "\""}' >build/fuzz/words; }
export ASAN_OPTIONS="malloc_context_size=1:${ASAN_OPTIONS:-}"  # an artifact that is run again without it says more

# one TARGET: its exit status, with what it did in build/fuzz/NAME.log
one() {
  name=$(basename "$1")
  corpus="build/fuzz/corpus-$name"
  mkdir -p "$corpus"
  long=$(( seconds / 4 > 0 ? seconds / 4 : 1 ))
  for length in 1500 65536; do
    # shellcheck disable=SC2086
    case $length in
      1500) set -- "$1" "$(( seconds - long ))" build/fuzz/small-seeds ;;
      *) set -- "$1" "$long" $all ;;
    esac
    target="$1" time="$2"
    shift 2
    "$target" -max_total_time="$time" -max_len="$length" -seed="${FUZZ_SEED:-0}" -rss_limit_mb=1024 -timeout=30 -dict=build/fuzz/words \
      -print_final_stats=1 -artifact_prefix="out/$name-" "$corpus" "$@" || return 1
    set -- "$target"
  done >"build/fuzz/$name.log" 2>&1
}

for target in $targets; do
  name=$(basename "$target")
  { one "$target" && echo fine >"build/fuzz/$name.end" || echo finding >"build/fuzz/$name.end"; } &
done
wait
total=0
for target in $targets; do
  name=$(basename "$target")
  if [ "$(cat "build/fuzz/$name.end")" != fine ]; then
    tail -n 40 "build/fuzz/$name.log" >&2
    echo "error: $name found an input (kept in out/)" >&2
    exit 1
  fi
  count=$(awk '/stat::number_of_executed_units/ {n += $2} END {print n + 0}' "build/fuzz/$name.log")
  echo "  $name: $count inputs"
  total=$(( total + count ))
done
echo "» $total inputs in $seconds s, no finding"
