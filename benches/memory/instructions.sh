#!/usr/bin/env bash
# Counts the instructions of each row of src/bin/instructions.rs with callgrind, in this checkout and
# in a commit before it, and fails if a row takes over 2 % more than before. Unlike times, counts do
# not depend on the hour or on other load.
#
#   instructions.sh               compares with the merge base with main; on main, with the commit
#                                 before, or with HEAD if there are changes that are not committed
#   BASE=v0.1.0 instructions.sh   compares with another commit
#   BASE=none instructions.sh     only prints the counts, and the goals
#   PEERS=1 BASE=none ..          prints those of other rate limiters, too, and the ratios to them
#   LIMIT=5 instructions.sh       allows 5 %
#
# Both are built from the program of this checkout, or, if that does not compile with the library of
# the base, from the one that belongs to the base; rows are compared by name.
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=${LIMIT:-2}
features=() target=$PWD/target/instructions
[ -z "${PEERS:-}" ] || features=(--features peers) target=$PWD/target/memory
requests=$(sed -n 's/^const REQUESTS: usize = \([0-9_]*\);/\1/p' benches/memory/src/bin/instructions.rs)
requests=${requests//_/}

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

build() { # folder of the checkout, target folder
  nice cargo build --quiet --release --manifest-path "$1/benches/memory/Cargo.toml" --target-dir "$2" \
    --bin instructions "${features[@]}"
}

# Prints `<instructions per request> <name>` for each row.
count() { # program
  local out function=instructions::counted_by_callgrind
  out=$(mktemp -d)
  # One dump for each row, of what the function does.
  valgrind -q --tool=callgrind --callgrind-out-file="$out/dump.%p" \
    --toggle-collect=$function --dump-after=$function "$1" > "$out/rows"
  local row=0 base name
  local -a counts=()
  while read -r base name; do
    row=$((row + 1))
    counts[row]=$(sed -n 's/^summary: //p' "$out"/dump.*."$row")
    echo "$(((counts[row] - (base ? counts[base] : 0)) / requests)) $name"
  done < "$out/rows"
  rm -r "$out"
}

# Prints the goals whose rows were counted: the ratio to another row, or the number of instructions.
ratios() { # counts
  echo "goals, by instructions"
  awk -F ' *[|] *' '
    NR == FNR { count = $0; sub(/ .*/, "", count); sub(/^[0-9]+ /, ""); counts[$0] = count; next }
    !($2 in counts) || $3 != "" && !($3 in counts) { next }
    $3 == "" { printf "%8d  at most %4s  %s\n", counts[$2], $1, $2; next }
    { printf "%8.2f  at most %4s  %s / %s\n", counts[$2] / counts[$3], $1, $2, $3 }
  ' "$1" - <<'GOALS'
400 | check, token bucket, admitted
1.6 | layer, concurrency, allowed | layer, allowed, headers (the default)
1.6 | layer, concurrency, allowed, no headers | layer, allowed, no headers
0.65 | layer, allowed, headers (the default) | tower_governor, allowed, headers
1.0 | layer, allowed, no headers | tower_governor, allowed
0.55 | layer, denied, headers (the default) | tower_governor, denied, headers
0.55 | layer, denied, no headers | tower_governor, denied
GOALS
}

folder=$PWD/target/instructions/work
mkdir -p "$folder"
build . "$target"
count "$target/release/instructions" > "$folder/after"
if [ "${BASE:-}" = none ]; then
  awk '{ count = $1; $1 = ""; printf "%8d %s\n", count, $0 }' "$folder/after"
  ratios "$folder/after"
  exit
fi

base=$(git rev-parse "${BASE:-$(base)}^{commit}")
git worktree remove --force "$folder/base" 2>/dev/null || true
git worktree add --quiet --force --detach "$folder/base" "$base"
trap 'git worktree remove --force "$folder/base"' EXIT
[ -d "$folder/base/benches/memory" ] && mv "$folder/base/benches/memory" "$folder/base/benches/own"
cp -R benches/memory "$folder/base/benches/memory"
if ! build "$folder/base" "$target" 2> "$folder/errors"; then
  rm -r "$folder/base/benches/memory"
  mv "$folder/base/benches/own" "$folder/base/benches/memory" && build "$folder/base" "$target" || {
    cat "$folder/errors" >&2; echo "the library of $base has another interface" >&2; exit 1; }
fi
count "$target/release/instructions" > "$folder/before"

ratios "$folder/after"
echo
echo "instructions per request, in $(git log -1 --format=%h "$base") and now; at most $limit % more"
awk -v limit="$limit" '
  { count = $1; $1 = ""; name = substr($0, 2) }
  NR == FNR { before[name] = count; next }
  !(name in before) { printf "%8s %8d          %s\n", "-", count, name; next }
  {
    percent = (count / before[name] - 1) * 100
    # Rounded counts of a few instructions are no measure.
    slower = percent > limit && count - before[name] > 2
    failed += slower
    printf "%8d %8d %+7.1f %%%s %s\n", before[name], count, percent, slower ? "!" : " ", name
  }
  END {
    if (failed) { print failed " rows take over " limit " % more instructions" > "/dev/stderr"; exit 1 }
  }' "$folder/before" "$folder/after"
