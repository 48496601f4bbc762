# What one needs every day; anything longer than a few lines is in scripts/.
CARGO ?= cargo
PREFIX ?= /usr/local
# make run
DATA ?= dbs-data
PORT ?= 10809
# make soak: how long, in either unit; make xfstests, make powercut: in seconds
HOURS ?=
SECONDS ?= 3600
# make fuzz: SECONDS for each (60), and which of them
TARGET ?=
# make bench, make scale: where their images and stores are made
DIR ?= target
# Their options, as "--quick --only random"; without any they rewrite docs/performance.md
ARGS ?=

# make bench-micro: part of a name
FILTER ?=
# make vm: which of them
SCENARIO ?=
# make upstream, make upstream-manager
SOURCE ?=
PROBE ?=
# make check: which crate, and which of its test programs
CRATE ?=
TEST ?=

.PHONY: build longhorn static packages packages-test run check test lint upstream upstream-manager python wheel vm \
	xfstests guard guard-accept deny soak powercut mutants fuzz coverage bench bench-micro bench-replica bench-engine bench-fuse bench-vhost bench-python scale \
	man book install clean

build:
	$(CARGO) build --release --locked -p dbs-cli

# The Longhorn replica as one static binary: docs/replica.md. Needs the musl target and musl-gcc, and
# installs them where it can.
longhorn:
	@scripts/static.sh longhorn

# `dbs` alike, and `longhorn`.
static:
	@scripts/static.sh dbs longhorn

# deb, rpm, static tarball, container image and wheel, into target/packages. ARGS="deb rpm" for some of them, ARCH=arm64 for
# another machine's: scripts/packages.sh.
packages:
	@scripts/packages.sh $(ARGS)

# Each of them installed, used and removed where nothing else is, and the units under a real systemd, in the virtual
# machine. As root; some minutes, most of them in the machine.
packages-test:
	@scripts/packages-test.sh $(ARGS)

# Serves a store of its own in dbs-data/ until Ctrl-C; the next run continues with it. Not a release: see Cargo.toml.
run:
	$(CARGO) build --profile quick --locked -p dbs-cli
	@scripts/run.sh target/quick/dbs "$(DATA)" "$(PORT)"

# What a change in one crate must pass first: format, clippy, its tests. CRATE=dbs-core; TEST="lib suite" for some of them.
check:
	@scripts/check.sh $(CRATE) $(TEST)

test:
	@scripts/test.sh

# What a change must pass besides: format, clippy, documentation, the guard of the hot path, dependencies, manifests.
lint:
	@scripts/lint.sh

# Upstream's `longhorn`, into target/upstream, for the tests and benchmarks that take it from LONGHORN_BIN, which
# `make test` leaves out without it: docs/testing.md. SOURCE is a git repository, upstream's own unless given.
upstream:
	@scripts/upstream.sh $(SOURCE)

# Upstream's instance manager, beside it, for the tests that take it from INSTANCE_MANAGER_BIN. PROBE is the repository of
# grpc_health_probe, by which it sees that a process is up.
upstream-manager:
	@scripts/upstream.sh --manager "$(SOURCE)" "$(PROBE)"

# The Python package alone: tests, types, examples.
python:
	@scripts/python.sh

# A wheel of it, into target/wheels.
wheel:
	@scripts/python.sh wheel

# What a read costs from Python, beside the Rust API. 2 minutes.
bench-python:
	@scripts/python.sh bench --dir "$(DIR)" $(or $(ARGS),--document docs/performance.md)

# Kernel block devices: Debian's kernel 6.12 in QEMU, with our static binaries. SCENARIO=name for one
# (`scripts/vm/run.sh --list`), `scripts/vm/run.sh --shell` for a shell in the machine. Then the other way round: a machine
# whose disks are volumes. 12 minutes.
vm: static
	@scripts/vm/run.sh $(SCENARIO)
	@$(if $(SCENARIO),,DBS=$(or $(CARGO_TARGET_DIR),target)/$(shell uname -m)-unknown-linux-musl/release/dbs scripts/vm/vhost-user.sh)

# xfstests' quick generic group on volumes, as far as SECONDS go. The first time it makes a Debian, as root.
xfstests: static
	@scripts/vm/xfstests.sh $(SECONDS)

# Instructions, allocations and device requests of the hot path, against benches/guard/baseline.json.
guard:
	@scripts/guard.sh

# What they are now becomes the baseline; the commit says why.
guard-accept:
	@scripts/guard.sh accept

# Licences, advisories and sources of all dependencies. Compiles cargo-deny the first time.
deny:
	@scripts/deny.sh install

# kill -9 of a loaded server, and simulated crashes, for as long as you like.
soak:
	@scripts/soak.sh $(if $(HOURS),$$(( $(HOURS) * 3600 )),$(SECONDS))

# Power cuts under `dbs serve` on a disk that remembers what was synced, for SECONDS (3600), from SEED on. Needs root and
# FUSE.
powercut:
	@DBS_POWERCUT_SECONDS=$(SECONDS) DBS_POWERCUT_SEED=$(or $(SEED),1) \
		$(CARGO) test --locked -p dbs-cli --test powercut what_a_power -- --nocapture

# Edits of dbs-core, one at a time, each of which some test must notice. ARGS=NAME for one of them. 30 minutes.
mutants:
	@scripts/mutants.py $(ARGS)

# Bytes nobody should trust, to everything that reads them: fuzz/, under AddressSanitizer. What fails is
# in fuzz/artifacts. Compiles cargo-fuzz the first time.
fuzz:
	@scripts/fuzz.sh $(if $(filter file,$(origin SECONDS)),60,$(SECONDS)) $(TARGET)

# Which lines of format, recovery and parsers the tests and the fuzzer's corpus run; ARGS=--missing names
# the others. Builds everything once more. 20 minutes.
coverage:
	@scripts/coverage.sh $(ARGS)

# `dbs serve` against qemu-nbd, nbdkit, the bare file and, if DBS_PROTOTYPE says how to serve it, the
# Go prototype, with fio. 30 minutes.
bench: build
	$(CARGO) run --release --locked -p dbs-benches --bin peers -- --dir "$(DIR)" \
		--json target/peers.json $(or $(ARGS),--document docs/performance.md)

# Our replica against that of Longhorn, whose binary LONGHORN_BIN names. 20 minutes.
bench-replica:
	$(CARGO) build --release --locked -p longhorn
	$(CARGO) run --release --locked -p dbs-benches --bin replica -- --dir "$(DIR)" \
		--json target/replica.json $(or $(ARGS),--document docs/performance.md)

# The same for the whole engine, controller and replicas, through the socket frontend; and without
# storage, and the frontend alone.
bench-engine:
	$(CARGO) build --release --locked -p longhorn
	$(CARGO) run --release --locked -p dbs-benches --bin engine -- --dir "$(DIR)" \
		--json target/engine.json $(or $(ARGS),--document docs/performance.md)

# Reading through `dbs mount` against the Rust API, qemu-storage-daemon and nbdfuse. 5 minutes.
bench-fuse: build
	$(CARGO) run --release --locked -p dbs-benches --bin fuse -- --dir "$(DIR)" \
		$(or $(ARGS),--document docs/performance.md)

# A volume as the disk of a virtual machine, beside NBD, qemu-storage-daemon and the bare file: 5 minutes. ARGS=--quick
# sees in half a minute that it works.
bench-vhost: build
	$(CARGO) run --release --locked -p dbs-benches --bin vhost -- --dir "$(DIR)" $(ARGS)

# Snapshots, volumes, clones, clients and extents by the thousand, and less memory for checksums than data
# needs: tables into docs/performance.md, plots into docs/scale. 35 to 40 minutes.
scale: build
	$(CARGO) run --release --locked -p dbs-benches --bin scale -- --dir "$(DIR)" \
		$(or $(ARGS),--document docs/performance.md --plots docs/scale)

# Parts of the store alone, in memory: lookups, map updates, journal, recovery. FILTER=name for some.
bench-micro:
	$(CARGO) bench --locked -p dbs-benches --bench '*' -- $(FILTER)

man: build
	target/release/dbs man target/man

# The book of docs/, with the help of each command, into target/book/html. Compiles mdBook the first time, some minutes.
book:
	@scripts/book.py

install: man
	@scripts/install.sh target/release/dbs target/man "$(DESTDIR)$(PREFIX)" "$(PREFIX)"

# What was built. The store in dbs-data/ is yours: it stays.
clean:
	$(CARGO) clean
