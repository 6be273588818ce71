.PHONY: test public-api test-lua54 test-servers test-faults test-properties lint long-lines msrv \
  msrv-toolchain package features hosts nightly soak release-check bench bench-memory \
  bench-instructions bench-peers bench-servers connections request-path code-lines script \
  redis-server valgrind demo test-browser screenshots chromium curl pngquant record-dashboard \
  prometheus

test: redis-server curl msrv-toolchain
	cargo test --workspace --all-features

# Writes the list of the public items, tests/public-api.txt, with which a test compares them.
public-api: msrv-toolchain
	WRITE_LIST=1 cargo test -p public-api-list the_list_has_the_public_items

# Two replicas, Redis, load, and a page with a switch that breaks Redis.
demo: redis-server
	cargo run -p more-examples --example demo

BROWSER_TEST = cargo test --workspace --all-features --test browser --

# The page of the playground in a browser, without a window.
test-browser: redis-server chromium
	$(BROWSER_TEST)

# The pictures of docs/playground.md.
screenshots: chromium pngquant
	SCREENSHOTS=$(CURDIR)/docs $(BROWSER_TEST) the_page_fits_each_width
	pngquant --force --ext .png --strip docs/playground-*.png

# Tests of the alerts; then what the dashboard shows while something happens to the examples, for five
# minutes, and the picture of it. Prints which alerts fired.
record-dashboard: redis-server prometheus
	promtool test rules tests/tools/dashboard/alerts.yml
	cargo build --workspace --all-features --example server --example streams --example configured \
	  --bin limitctl
	cargo run -p test-tools --bin record-dashboard
	cargo run -p pictures

# SERVERS="redis-6.2 valkey-9.0" names some of those that the script lists.
test-servers:
	tests/servers.sh $(SERVERS)

# The text of a script as it is sent: the files of which it consists, then the text. NAME is one of
# scripts/sent/hashes.txt. A change of a script fails here once, and writes that file.
script:
	@cargo test -q -p tower-ratelimit -p tower-ratelimit-engine --all-features --lib the_script_of >&2
	@cat target/scripts/$(NAME).lua

# The scripts under Lua 5.1, as in Redis, and 5.4, as in Dragonfly: both print the same replies and
# stored bytes for one stream of calls. One build can contain only one Lua.
test-lua54:
	cargo test -p tower-ratelimit-engine --all-features --lib a_stream_of_calls_is_written
	for lua in 51 54; do \
	  cargo run --manifest-path tests/lua/Cargo.toml --target-dir target/lua$$lua --features lua$$lua \
	    -- target/lua/stream > target/lua/$$lua || exit 1; \
	done
	cmp target/lua/51 target/lua/54

# FAULTS=kill,planned selects rows; FAULTS=list prints their names. Rows that need network namespaces
# are left out without root.
test-faults: redis-server
	cargo run --release -p test-tools --bin faults -- $(FAULTS)

# The properties that take their number of random inputs from the environment, with 20 times as many
# histories as in `make test`; and 100,000 histories of holds per algorithm and language, which take
# half an hour. After a failure, the printed SEED repeats it, or the seed of all other inputs.
test-properties: export PROPTEST_RNG_SEED ?= $(shell date +%s)
test-properties: redis-server
	@echo PROPTEST_RNG_SEED=$$PROPTEST_RNG_SEED
	HISTORIES=20000 CASES=8000 PROPTEST_CASES=5000 \
	  cargo test -p tower-ratelimit -p tower-ratelimit-engine --all-features --lib -- --skip hold_histories
	HISTORIES=100000 cargo test -p tower-ratelimit-engine --all-features --lib hold_histories

# Those that change the library; the others only add dependencies to one of them.
FEATURES = axum cpu-counter metrics redis redis-1 redisson serde tls-rustls-no-provider tls-rustls tracing uuid

lint: msrv long-lines
	cargo fmt --all --check
	cargo clippy --workspace --all-features --all-targets -- -D warnings
	for feature in "" $(FEATURES); do \
	  cargo clippy -p tower-ratelimit --lib --no-default-features --features "$$feature" \
	    -- -D warnings || exit 1; \
	done
	RUSTDOCFLAGS="-D warnings" cargo doc $(PACKAGES) --all-features --no-deps
	@grep -rhoE '\]\((struct|guide|store)[^)]*' crates/engine/src | sort -u | while IFS='#' read -r page id; do \
	  page=target/doc/tower_ratelimit/$${page#*(}; grep -q "id=\"$$id" "$$page" || { \
	  echo "the docs of the engine name $$page#$$id, which does not exist" >&2; exit 1; }; done

# At most 100 columns: rustfmt does not break comments and strings, and does not format Lua. URLs
# and the rows of tables cannot be broken, and a test writes scripts/sent.
long-lines:
	@git ls-files '*.rs' '*.lua' ':!scripts/sent' | xargs awk 'length > 100 && !/https?:\/\// && !/^ *\/\/[\/!] \|/ { \
	  print FILENAME ":" FNR ": " length " columns, more than 100"; found = 1 } END { exit found }'

MSRV = $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

# Compiles with the oldest Rust version that Cargo.toml promises. Clippy's `incompatible_msrv` sees the
# standard library; only that compiler sees syntax. A folder of its own keeps `target`
# free for the other commands meanwhile.
msrv: msrv-toolchain
	rustup run $(MSRV) cargo check -p tower-ratelimit --lib --all-features --target-dir target/msrv

msrv-toolchain:
	@rustup run $(MSRV) cargo --version >/dev/null 2>&1 || \
	  rustup toolchain install $(MSRV) --profile minimal || { \
	  echo "cannot use rust-version = \"$(MSRV)\": that toolchain is not installed, and rustup" \
	  "cannot install it; run: rustup toolchain install $(MSRV) --profile minimal" >&2; exit 1; }

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)

# What is published.
INNER = connections engine redisson
PACKAGES = -p tower-ratelimit $(INNER:%=-p tower-ratelimit-%)

# Runs a command in the crate as it is published, outside of the checkout, with the inner crates as they
# are published, each in its folder. By the times in the archives, which are constant, Cargo would not
# notice changes: `-m` sets the current time.
define in-package
cargo package $(PACKAGES) --target-dir target --no-verify --allow-dirty && folder=$$(mktemp -d) && \
  unpack() { mkdir -p $$2 && \
    tar -xzmf target/package/tower-ratelimit$$1-$(VERSION).crate -C $$2 --strip-components 1; } && \
  unpack "" $$folder && \
  for crate in $(INNER); do unpack -$$crate $$folder/crates/$$crate || exit 1; done && \
  cd $$folder && $(1) && rm -r $$folder
endef

IN_PACKAGE = --config $(CURDIR)/.cargo/config.toml --target-dir $(CURDIR)/target
PATCHED = $(foreach crate,$(INNER),--config "patch.crates-io.tower-ratelimit-$(crate).path='crates/$(crate)'")

# The examples of the inner crates use `tower-ratelimit`, which they do not depend on: without them.
package: redis-server
	$(call in-package,cargo test --no-fail-fast --all-features $(IN_PACKAGE) $(PATCHED) && \
	  for crate in $(INNER); do \
	    (cd crates/$$crate && cargo test --no-fail-fast --all-features --lib $(IN_PACKAGE)) || exit 1; done)

# Each feature by itself, with cargo-hack. In the workspace, it would add the features that the examples
# use.
features:
	$(call in-package,cargo hack check --lib --each-feature $(IN_PACKAGE) $(PATCHED))

# For ten minutes and a minute, or SECONDS=60 for each.
soak: redis-server
	cargo run --release -p test-tools --bin soak-holds -- $(SECONDS)
	cargo run --release -p test-tools --bin soak -- $(SECONDS)

# The examples for hosts with many dependencies, against local servers.
hosts:
	cargo test --manifest-path examples/hosts/Cargo.toml --target-dir target/hosts

# What takes too long for each change: the workflow runs it every night. `make --keep-going nightly`
# runs the other parts after a failure, too.
nightly: features package hosts test-properties test-servers test-faults soak

# What a release needs in addition to lint and test. The tools are installed by hand: cargo-deny,
# cargo-hack and cargo-semver-checks.
release-check:
	@! grep -n '\.invalid' Cargo.toml || { echo "Cargo.toml: set the repository" >&2; exit 1; }
	@grep -q '^## \[$(VERSION)\]' CHANGELOG.md || \
	  { echo "CHANGELOG.md: name the version $(VERSION)" >&2; exit 1; }
	cargo deny --workspace check
	tag=$$(git describe --tags --abbrev=0 2>/dev/null) || exit 0; \
	  cargo semver-checks -p tower-ratelimit --baseline-rev "$$tag"
	$(MAKE) features package

# The CPU of several servers for the same decisions, beside that of the first one. SERVERS names some
# of those that tests/servers.sh lists.
bench-servers: SERVERS = valkey-9.0 valkey-sid redis-8.2
bench-servers:
	tests/servers.sh --fetch $(SERVERS)
	SERVERS="$(SERVERS:%=target/servers/%/server)" cargo bench --bench redis -- servers

bench: redis-server bench-memory
	cargo bench --bench redis
	cargo bench --bench waiting
	cargo bench --bench concurrency

# The memory store and the layer beside other rate limiters, and the least that is possible: times,
# by both clocks, allocations, bytes, instructions, and the ratios that are aimed at.
# MEMORY="checks layers" selects parts of the times: see benches/memory/src/bin/memory/main.rs.
BUILD_MEMORY = cargo build --release --manifest-path benches/memory/Cargo.toml --target-dir target/memory

bench-memory: valgrind
	$(BUILD_MEMORY) --no-default-features
	cp target/memory/release/memory target/memory/memory-by-system-clock
	$(BUILD_MEMORY)
	target/memory/release/memory $(MEMORY)
	@echo
	target/memory/memory-by-system-clock $(or $(MEMORY),checks threads)
	@echo
	target/memory/release/allocations
	@echo
	BASE=none benches/memory/instructions.sh

# The instructions of checks, holds and the layer, beside those of the commit before, and the goals.
# Fails if a row takes over 2 % more. BASE=commit compares with another one, BASE=none with none.
# ROWS="token log" counts the rows whose names contain one of these words, in seconds.
# PROFILE="check, sliding log, denied" prints the functions of that row.
bench-instructions: valgrind
	benches/memory/instructions.sh

# This crate beside other rate limiters. PEERS="--quick throttled" measures some of them for a short
# time; PEERS=--list prints their names; PEERS="--commit=HEAD~1 token-bucket" compares a commit with
# another one. Without PEERS, it writes the tables of docs/benchmarks.md.
bench-peers: redis-server
	cargo run --release --manifest-path benches/peers/Cargo.toml --target-dir target/peers \
	  --features driver --bin peers -- $(PEERS)

# The files that an allowed request goes through, by coverage.
request-path: redis-server
	tests/tools/request-path.sh

# The lines of code of each storey, without tests and comments.
code-lines:
	tests/tools/code-lines.sh

# What the clients of the crate `redis` do in eight faults, and what this crate does: the table of
# docs/connections.md. EXPERIMENTS="late order" runs some of them.
connections: redis-server
	cargo run --release --manifest-path benches/connections/Cargo.toml \
	  --target-dir target/connections -- $(EXPERIMENTS)

SUDO = $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT = $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -qy

valgrind:
	@command -v valgrind >/dev/null || { \
	  if command -v apt-get >/dev/null; then $(APT) valgrind; \
	  else echo "install valgrind, then run this again" >&2; exit 1; fi; }

# The browser and its driver. Google Chrome with a chromedriver will do, too.
chromium:
	@find() { for name; do command -v $$name >/dev/null && return; done; false; }; \
	  find chromium chromium-browser google-chrome && find chromedriver chromium.chromedriver || { \
	  if command -v apt-get >/dev/null; then $(APT) --no-install-recommends chromium chromium-driver fonts-liberation; \
	  elif command -v apk >/dev/null; then $(SUDO) apk add chromium chromium-chromedriver; \
	  elif command -v dnf >/dev/null; then $(SUDO) dnf install -y chromium chromedriver; \
	  else echo "install chromium and chromedriver, then run this again" >&2; exit 1; fi; }

prometheus:
	@command -v prometheus >/dev/null || { \
	  if command -v apt-get >/dev/null; then $(APT) --no-install-recommends prometheus; \
	  else echo "install prometheus, then run this again" >&2; exit 1; fi; }

# The programs of docs/copy-one-of-these.md are asked by its commands.
curl:
	@command -v curl >/dev/null || { $(APT) curl; }

pngquant:
	@command -v pngquant >/dev/null || { $(APT) pngquant; }

# Debian and Ubuntu, Alpine, Fedora, macOS; elsewhere install it by hand. REDIS_SERVER names another one.
redis-server:
	@command -v "$${REDIS_SERVER:-redis-server}" >/dev/null || { \
	  [ -z "$$REDIS_SERVER" ] || { echo "$$REDIS_SERVER is not executable" >&2; exit 1; }; \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  if command -v apt-get >/dev/null; then \
	    $$SUDO apt-get update -q && $$SUDO env DEBIAN_FRONTEND=noninteractive apt-get install -qy redis-server; \
	  elif command -v apk >/dev/null; then $$SUDO apk add redis; \
	  elif command -v dnf >/dev/null; then $$SUDO dnf install -y redis; \
	  elif command -v brew >/dev/null; then brew install redis; \
	  else echo "install redis-server, then run this again" >&2; exit 1; fi; }
