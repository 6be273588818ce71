#!/usr/bin/env bash
# Counts the instructions of each row of src/bin/instructions.rs with callgrind, in this checkout
# and in a commit before it, and fails if a row takes over 2 % more than before. Unlike times, counts do
# not depend on the hour or on other load. Rows that have a goal show whether they reach it.
#
#   instructions.sh                compares with the merge base with main; on main, with the commit
#                                  before, or with HEAD if there are changes that are not committed
#   BASE=v0.1.0 instructions.sh    compares with another commit
#   BASE=none instructions.sh      counts only this checkout
#   LIMIT=5 instructions.sh        allows 5 %
#   ROWS="token log" ..            only the rows whose names contain one of these words
#   PROFILE="check, sliding log, denied" ..   the functions of this row, by their instructions
#
# Both are built from the program of this checkout, or, if that does not compile with the library of
# the base, from the one that belongs to the base; rows are compared by name.
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=${LIMIT:-2} target=$PWD/target/memory folder=$PWD/target/memory/instructions
read -ra wanted <<<"${ROWS:-}"

base() {
  local main merge_base
  if ! git diff --quiet HEAD; then git rev-parse HEAD; return; fi
  for main in origin/main main; do
    merge_base=$(git merge-base HEAD "$main" 2>/dev/null) || continue
    [ "$merge_base" = "$(git rev-parse HEAD)" ] || { echo "$merge_base"; return; }
  done
  git rev-parse --verify --quiet HEAD~1 || {
    echo "no commit to compare with: this checkout has no history" >&2; return 1; }
}

build() { # folder of the checkout, name of the program
  nice cargo build --quiet --release --manifest-path "$1/benches/memory/Cargo.toml" \
    --target-dir "$target" --bin instructions
  cp "$target/release/instructions" "$folder/$2"
}

# Writes a dump for each row, of what the function does, and the rows as the program prints them.
run() { # program, parts of the names of rows
  local program=$1 function=instructions::counted_by_callgrind
  rm -rf "$program.out" && mkdir "$program.out"
  valgrind -q --tool=callgrind --callgrind-out-file="$program.out/dump.%p" \
    --toggle-collect=$function --dump-after=$function "$program" "${@:2}" > "$program.out/rows"
}

# Prints `<instructions per request> <name>` for each row.
count() { # program
  local out=$1.out row=0 base requests name
  local -a counts=(0)
  run "$1" "${wanted[@]}"
  while read -r base requests name; do
    row=$((row + 1))
    [[ $requests =~ ^[0-9]+$ ]] || { echo "$1 counts another number of requests" >&2; return 1; }
    counts[row]=$(sed -n 's/^summary: //p' "$out"/dump.*."$row")
    echo "$(((counts[row] - counts[base]) / requests)) $name"
  done < "$out/rows"
}

# Prints the functions of a row by the files of their lines: what is inlined has its own file.
profile() { # program, name
  local out=$1.out row requests
  run "$1" "$2"
  read -r row requests < <(awk -v name="$2" '{ line = $0; sub(/^[0-9]+ [0-9]+ /, "", line) }
    line == name { print NR, $2; exit }' "$out/rows") || {
    echo "no row \"$2\"; those like it:" >&2
    sed 's/^[0-9]* [0-9]* /  /' "$out/rows" >&2; return 1; }
  echo "instructions per request, of $2"
  callgrind_annotate --auto=no --threshold=95 "$out"/dump.*."$row" | awk -v requests="$requests" '
    / \([ 0-9.]+%\) / {
      count = $1; gsub(/,/, "", count)
      line = $0; sub(/^.*%\) +/, "", line); sub(/ \[[^]]*\]$/, "", line)
      sub(/^.*\/registry\/src\/[^\/]*\//, "", line); sub(/^.*\/library\//, "", line)
      gsub(/tower_ratelimit::/, "", line)
      printf "%8.1f  %s\n", count / requests, line }'
}

# Prints the counts of each row, the ratio, and the goals: `<goal> | <row>`, or a ratio of two rows.
table() { # counts before, counts now
  awk -F ' *[|] *' -v limit="$limit" '
    function reached(value, goal) { return (value + 0 <= goal + 0 ? "" : "! ") goal }
    function quotient(a, b) { return a && b ? sprintf("%.2f", a / b) : "-" }
    function line(before, now, ratio, goal, name) {
      printf "%8s %8s %7s %8s  %s\n", before, now, ratio, goal, name
    }
    FNR == 1 { file++ }
    file < 3 && NF { count = $0; sub(/ .*/, "", count); sub(/^[0-9]+ /, "") }
    file == 1 { if (NF) before[$0] = count; next }
    file == 2 { now[$0] = count; names[++rows] = $0; next }
    $3 == "" { goals[$2] = $1; next }
    { ratios[++pairs] = $0 }
    END {
      line("before", "now", "ratio ", "at most", "instructions per request")
      for (row = 1; row <= rows; row++) {
        name = names[row]; goal = name in goals ? reached(now[name], goals[name]) : ""
        if (!(name in before)) { line("-", now[name], "- ", goal, name); continue }
        ratio = before[name] ? now[name] / before[name] : 1
        # Rounded counts of a few instructions are no measure.
        slower = ratio > 1 + limit / 100 && now[name] - before[name] > 2
        failed += slower
        line(before[name], now[name], sprintf("%.3f%s", ratio, slower ? "!" : " "), goal, name)
      }
      for (pair = 1; pair <= pairs; pair++) {
        split(ratios[pair], part, / *[|] */)
        if (!(part[2] in now) || !(part[3] in now)) continue
        is = quotient(now[part[2]], now[part[3]])
        was = quotient(before[part[2]], before[part[3]])
        line(was, is, "", reached(is, part[1]), part[2] " / " part[3])
      }
      if (failed) { print failed " rows take over " limit " % more instructions" > "/dev/stderr"; exit 1 }
    }' "$1" "$2" - <<'GOALS'
370 | check, token bucket, admitted
370 | check, token bucket, denied
360 | check, fixed window, admitted
360 | check, fixed window, denied
700 | check, sliding window, admitted
700 | check, sliding window, denied
1100 | check, sliding window of 10 buckets, admitted
1100 | check, sliding window of 10 buckets, denied
600 | check, sliding log, admitted
600 | check, sliding log, denied
450 | check, leaky bucket, admitted at once
450 | check, leaky bucket, admitted with a delay
450 | check, leaky bucket, denied
340 | now(), token bucket, admitted
1000 | check, new key, full store
1500 | hold and end, token bucket
2000 | hold and end, sliding log
900 | hold and end, concurrency
4 | check, two limits in one charge, admitted | check, token bucket, admitted
4 | check, two limits in one charge, denied | check, token bucket, denied
0.62 | layer, allowed, headers (the default) | tower_governor, allowed, headers
1.0 | layer, allowed, no headers | tower_governor, allowed
0.5 | layer, denied, headers (the default) | tower_governor, denied, headers
0.5 | layer, denied, no headers | tower_governor, denied
1.6 | layer, concurrency, allowed | layer, allowed, headers (the default)
1.6 | layer, concurrency, allowed, no headers | layer, allowed, no headers
GOALS
}

mkdir -p "$folder"
build . now
if [ -n "${PROFILE:-}" ]; then profile "$folder/now" "$PROFILE"; exit; fi
echo > "$folder/counts-before"
if [ "${BASE:-}" != none ]; then
  base=$(git rev-parse "${BASE:-$(base)}^{commit}")
  git worktree remove --force "$folder/base" 2>/dev/null || true
  git worktree add --quiet --force --detach "$folder/base" "$base"
  trap 'git worktree remove --force "$folder/base"' EXIT
  [ ! -d "$folder/base/benches/memory" ] ||
    mv "$folder/base/benches/memory" "$folder/base/benches/own"
  cp -R benches/memory "$folder/base/benches/memory"
  if ! build "$folder/base" before 2> "$folder/errors"; then
    rm -r "$folder/base/benches/memory"
    mv "$folder/base/benches/own" "$folder/base/benches/memory" && build "$folder/base" before || {
      cat "$folder/errors" >&2; echo "the library of $base has another interface" >&2; exit 1; }
  fi
  count "$folder/before" > "$folder/counts-before" &
  before=$!
  echo "before: $(git log -1 --format=%h "$base"); ! is over $limit % more, or above the goal"
fi
count "$folder/now" > "$folder/counts-now"
[ -z "${before:-}" ] || wait "$before"
[ -s "$folder/counts-now" ] || { echo "no row has one of the words of ROWS" >&2; exit 1; }
table "$folder/counts-before" "$folder/counts-now"
