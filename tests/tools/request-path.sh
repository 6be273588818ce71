#!/usr/bin/env bash
# Lists the files of src/ of which an allowed request executes a line, and those of the inner crates,
# by the coverage that rustc measures. `make request-path` runs it. Three requests:
#
#   least     in memory, with the key in a header, and without headers in the response
#   memory    in memory, with the address as the key, and with headers: the default
#   redis     the same over Redis
#
# Functions that a compiler inlines count where they are written: the coverage is that of the source,
# and the build does not optimize. A line counts if each request executes it: it is executed at least
# 200 times more often by 300 requests than by 100. So what happens once, such as making the layer or
# connecting, does not count. The files stand in the order of their storeys, from above; those of the
# engine, crates/engine, are behind them. The connections to Redis, crates/connections, are not listed.
set -euo pipefail
cd "$(dirname "$0")/../.."

rustup component add llvm-tools >/dev/null 2>&1 || true
tools=$(dirname "$(find "$(rustc --print sysroot)" -name llvm-profdata | head -1)")
[ -x "$tools/llvm-cov" ] || {
  echo "llvm-cov is missing; run: rustup component add llvm-tools" >&2
  exit 1
}

folder=target/request-path
# By default, cargo writes profiles of build scripts into the current folder.
export LLVM_PROFILE_FILE=$PWD/$folder/build-%p.profraw
RUSTFLAGS="-C instrument-coverage" cargo build --package test-tools --bin request-path \
  --target-dir "$folder"
program=$folder/debug/request-path

# From above: a storey imports those behind it.
storeys="middleware redisson limiter store observe decision keys error time sync"

# Prints "FILE LINE TIMES" for all lines that a number of requests over a store executes.
lines() {
  LLVM_PROFILE_FILE=$folder/run.profraw "$program" "$1" "$2"
  "$tools/llvm-profdata" merge --sparse "$folder/run.profraw" --output "$folder/run.profdata"
  "$tools/llvm-cov" export "$program" --format=lcov --instr-profile="$folder/run.profdata" \
    --sources src crates |
    awk -F '[:,]' '/^SF:/ { file = $2; inner = match(file, /crates\/[^\/]*\//)
                            crate = substr(file, RSTART, RLENGTH); sub(/.*\/src\//, "", file)
                            if (inner) file = crate file }
                   /^DA:/ && $3 > 0 && crate != "crates/connections/" { print file, $2, $3 }'
}

for store in least memory redis; do
  lines "$store" 100 >"$folder/few"
  lines "$store" 300 >"$folder/many"
  awk -v storeys="$storeys" 'NR == FNR { few[$1 " " $2] = $3; next }
       $3 - few[$1 " " $2] >= 200 { lines[$1]++ }
       END { for (file in lines) { storey = file; sub(/[\/.].*/, "", storey)
               print storey == "crates" ? 999 : index(storeys, storey), file, lines[file] } }' \
    "$folder/few" "$folder/many" | sort -k1,1n -k2 | cut -d " " -f 2- >"$folder/$store"
  echo "$store: $(wc -l <"$folder/$store") files, and the lines of each that a request executes"
  sed 's/^/  /' "$folder/$store"
done
rm -f "$folder"/build-*.profraw
