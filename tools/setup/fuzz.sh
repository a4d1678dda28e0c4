#!/bin/sh
# fuzz.sh SECONDS - runs every fuzz target of build/fuzz, each for its part of the time. A finding ends it and is kept in out/.
set -eu
seconds="$1"
targets=$(find build/fuzz -maxdepth 1 -name '*_fuzz' -type f -perm -u+x | sort)
[ -n "$targets" ] || { echo "error: no fuzz targets in build/fuzz" >&2; exit 1; }
count=$(echo "$targets" | wc -l)
share=$(( seconds / count > 0 ? seconds / count : 1 ))
mkdir -p out
for target in $targets; do
  name=$(basename "$target")
  corpus="build/fuzz/corpus-$name"
  mkdir -p "$corpus"
  seeds=""
  for folder in tests/golden tests/models tests/regress; do [ -d "$folder" ] && seeds="$seeds $folder"; done
  echo "» fuzzing with $name for $share s"
  # shellcheck disable=SC2086 # a list of folders on purpose
  "$target" -max_total_time="$share" -rss_limit_mb=1024 -timeout=10 -max_len=65536 -print_final_stats=1 \
    -artifact_prefix="out/$name-" "$corpus" $seeds >"build/fuzz/$name.log" 2>&1 || {
      tail -n 40 "build/fuzz/$name.log" >&2
      echo "error: $name found an input (kept in out/)" >&2
      exit 1
    }
  grep -E "stat::number_of_executed_units|DONE" "build/fuzz/$name.log" | sed 's/^/  /'
done
