#!/usr/bin/env bash
# Counts the lines of code of each storey in src/, and of each crate in crates/, without tests,
# comments and blank lines; the stores in memory and in Redis by themselves. `make code-lines` runs
# it.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Modules of tests with another name.
tests() {
  git ls-files 'src/*.rs' 'crates/*/src/*.rs' | xargs awk '
    is_test && /^#\[/ { next }
    is_test && sub(/^(pub(\([a-z]+\))? )?mod /, "") { sub(/;$/, ""); name = FILENAME; sub(/\.rs$/, "", name)
                                  print name "/" $0 ".rs" }
    { is_test = /^#\[cfg\(test\)\]$/ }'
}

git ls-files 'src/*.rs' 'crates/*/src/*.rs' | grep -v -e '/tests/' -e 'tests\.rs$' -e '/testing' | grep -vxFf <(tests) | xargs awk '
  FNR == 1 { storey = FILENAME; in_tests = 0; sub(/^src\//, "", storey); sub(/\.rs$/, "", storey)
             if (sub(/^crates\/engine\/src\//, "", storey)) { sub(/\/.*/, "", storey); storey = "engine/" storey }
             else { sub(/^crates\//, "", storey); sub(/\/src\/.*/, "", storey)
             if (match(storey, /^store\/(memory|redis)/)) storey = substr(storey, 1, RLENGTH)
             else sub(/\/.*/, "", storey) } }
  # The unit tests are at the end of a file.
  /^mod tests \{/ { in_tests = 1 }
  !in_tests && NF && !/^ *\/\// { lines[storey]++
                                 if (storey != "connections") others++ }
  END { for (storey in lines) printf "%6d %s\n", lines[storey], storey
        printf "%6d all, without connections\n", others }' | sort -n
