#!/bin/sh
# system.sh NEED... - checks for system packages: cxx python venv headers gtest clang tidy make.
# What is missing is installed when we are root on a Debian system; otherwise the command that installs it is printed.
set -eu
python="${PYTHON:-python3}"
missing=""

has_header() { printf '#include <%s>\n' "$1" | c++ -E -x c++ - >/dev/null 2>&1; }
# A virtual environment that exists already, or is active, needs no ensurepip.
has_venv() { [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ -x .venv/bin/pip ] || "$python" -c 'import venv, ensurepip' 2>/dev/null; }
has_python_h() {
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null
}

# Fuzzing links clang's sanitizer and fuzzer libraries, which Debian packs apart from the compiler.
has_fuzzer() {
  out=$(mktemp)
  printf 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    clang++ -x c++ -fsanitize=fuzzer,address,undefined -o "$out" - >/dev/null 2>&1 && rm -f "$out" || { rm -f "$out"; return 1; }
}

for need in "$@"; do
  case "$need" in
    cxx) command -v c++ >/dev/null 2>&1 || missing="$missing g++" ;;
    python) command -v "$python" >/dev/null 2>&1 || missing="$missing python3" ;;
    venv) has_venv || missing="$missing python3-venv" ;;
    headers) has_python_h || missing="$missing python3-dev" ;;
    gtest) case "$missing" in
             *g++*) missing="$missing libgtest-dev" ;;
             *) has_header gtest/gtest.h || missing="$missing libgtest-dev" ;;
           esac ;;
    clang) has_fuzzer || missing="$missing clang libclang-rt-dev" ;;
    tidy) command -v clang-tidy >/dev/null 2>&1 || missing="$missing clang-tidy" ;;
    make) command -v make >/dev/null 2>&1 || missing="$missing make" ;;
    *) echo "system.sh: unknown need '$need'" >&2; exit 2 ;;
  esac
done
[ -n "$missing" ] || exit 0

if [ -e /etc/debian_version ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "» installing system packages:$missing"
  log=$(mktemp)
  # shellcheck disable=SC2086 # a list of words on purpose
  if { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends $missing; } >"$log" 2>&1
  then rm -f "$log"; exit 0
  fi
  tail -n 20 "$log" >&2
  rm -f "$log"
  echo "error: could not install$missing (see above)" >&2
  exit 1
fi
echo "error: system packages are missing. Install them, then run the same command again:" >&2
echo "  sudo apt-get update && sudo apt-get install -y$missing" >&2
[ -e /etc/debian_version ] || echo "  (Debian's names; other systems call them differently)" >&2
exit 1
