//! `dbs bench`.

mod place;
mod plot;
mod table;

use crate::confirm::confirm;
use crate::context::Context;
use crate::output::{print, print_json};
use crate::progress::Unit;
use crate::spec::{self, Spec};
use crate::target::Target;
use clap::Args;
use clap::builder::PossibleValuesParser;
use dbs_bench::{
    Cpu, CpuOf, DEPTH, DEPTHS, DeviceSubject, Group, Measurement, Moment, NbdSubject, Options,
    Report, Runner, Subject, TESTS, TargetKind, Test,
};
use dbs_client::any_store::AnyStore;
use dbs_core::{Error, Result, format_size};
use dbs_nbd::NbdUri;
use place::StorePlace;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes measured, and time of a test, unless said otherwise: thoroughly, and with `--quick`.
const THOROUGH: (u64, Duration) = (1 << 30, Duration::from_secs(5));
const QUICK: (u64, Duration) = (128 << 20, Duration::from_secs(1));
/// An NBD server that is silent for so long has failed.
const NBD_TIMEOUT: Duration = Duration::from_secs(30);

/// Measure how fast a store, an NBD export or a device is.
///
/// Without a target, the command makes a temporary volume `dbs-bench-...` in the store, measures it and
/// deletes it. If the store is served, all requests go through its server. A target that exists already
/// (a volume, an NBD export, a device or file) is only read, unless `--write` allows its content to be
/// destroyed.
///
/// The tests measure requests a second (4 KiB, many in flight), bandwidth (128 KiB random, 1 MiB
/// sequential) and latency (4 KiB, one in flight), random and sequential, reading and writing; first
/// writes, overwrites and writes after a snapshot; writes with a flush each; and reads through chains
/// of snapshots. A test that the target does not support is left out, and the report says why.
#[derive(Debug, Args)]
pub struct Bench {
    /// VOLUME or VOLUME@SNAPSHOT of the store, nbd://HOST:PORT/EXPORT or
    /// nbd+unix:///EXPORT?socket=PATH
    target: Option<Place>,
    /// Measure this block device or file directly
    #[arg(long, value_name = "PATH", conflicts_with = "target")]
    device: Option<PathBuf>,
    /// Also measure writes to an existing target; its content is lost
    #[arg(long)]
    write: bool,
    /// Take one second for each test on 128 MiB, instead of five seconds on 1 GiB
    #[arg(long)]
    quick: bool,
    /// How long each test takes, such as 500ms or 10s
    #[arg(long, value_parser = spec::duration)]
    time: Option<Duration>,
    /// Bytes to measure, from the start of the target; by default all of a target that is only read
    #[arg(long, value_parser = spec::size)]
    size: Option<u64>,
    /// Requests in flight in tests with many at once; half as many in tests with large requests
    #[arg(long, value_name = "N", default_value_t = DEPTH, value_parser = depth())]
    depth: u32,
    /// Run only these tests or groups of tests; can be repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = names())]
    only: Vec<String>,
    /// Seed of the random offsets; the same seed gives the same offsets
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Also draw the results into this SVG file; an existing file is replaced
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

fn depth() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(i64::from(*DEPTHS.start())..=i64::from(*DEPTHS.end()))
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(
        Group::ALL.iter().map(|group| group.name()).chain(TESTS.iter().map(|test| test.name)),
    )
}

/// What to measure.
#[derive(Debug, Clone)]
enum Place {
    Volume(Spec),
    Nbd(NbdUri),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if text.contains("://") {
            text.parse().map(Self::Nbd)
        } else {
            text.parse().map(Self::Volume)
        }
    }
}

impl Bench {
    pub fn run(self, context: &Context) -> Result<()> {
        // Before minutes are spent on what cannot be kept.
        let plot = self.plot.as_deref().map(create_plot).transpose()?;
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut report = match (&self.target, &self.device) {
            (Some(Place::Nbd(uri)), _) => self.nbd(context, uri),
            (Some(Place::Volume(spec)), _) => self.volume(context, spec),
            (None, Some(path)) => self.device(context, path),
            (None, None) => self.store(context),
        }?;
        report.started_ns = u64::try_from(started.as_nanos()).unwrap_or(u64::MAX);
        if let (Some(mut file), Some(path)) = (plot, &self.plot) {
            file.set_len(0)
                .and_then(|()| file.write_all(plot::svg(&report).as_bytes()))
                .map_err(|e| Error::io(e, format!("writing {}", path.display())))?;
        }
        if context.json {
            return print_json(&report);
        }
        print(&table::text(&report))
    }

    /// Temporary volumes in the store.
    fn store(&self, context: &Context) -> Result<Report> {
        context.stop.on_signals()?;
        let length = self.length();
        let (path, tests) = (context.store()?.display().to_string(), self.tests());
        context.with(true, |target| {
            let place = StorePlace::new(context, target)?;
            let cpu = cpu_of(target);
            let run = |runner: &mut Runner<'_>| runner.on_store(&place);
            let results = self.measure(context, tests, length, cpu.map(|cpu| cpu.1), run)?;
            let report = self.report(TargetKind::Store, path, length, driver_of(target));
            Ok(Report { results, ..of_cpu(report, cpu) })
        })
    }

    /// A volume or snapshot that is there.
    fn volume(&self, context: &Context, spec: &Spec) -> Result<Report> {
        let write = self.writes();
        context.with(write, |target| {
            let name = spec.to_string();
            let subject = place::open(target, &name)?;
            let cpu = cpu_of(target);
            let report = self.report(TargetKind::Volume, name, 0, driver_of(target));
            // What is written without a flush is committed as a server would do it.
            let _keeper = place::Keeper::of(target)?;
            self.existing(context, &*subject, cpu.map(|cpu| cpu.1), of_cpu(report, cpu), None)
        })
    }

    fn nbd(&self, context: &Context, uri: &NbdUri) -> Result<Report> {
        let name = uri.to_string();
        let failed = |e| Error::io(e, format!("connecting to {name}"));
        let connect = || uri.connect(NBD_TIMEOUT).map_err(failed);
        let subject = NbdSubject::new(connect, &uri.export)?;
        let report = self.report(TargetKind::Nbd, name.clone(), 0, "nbd".to_owned());
        self.existing(context, &subject, None, report, None)
    }

    fn device(&self, context: &Context, path: &Path) -> Result<Report> {
        let write = self.writes();
        let content = if write { place::check_unused(path)? } else { None };
        let driver = context.driver();
        let subject = DeviceSubject::open(path, !write, driver)?;
        let name = path.display().to_string();
        let mut report = self.report(TargetKind::Device, name, 0, subject.driver().to_owned());
        if !subject.is_direct() {
            let text = "no direct I/O here: the page cache is measured too";
            report.notes.push(text.to_owned());
        }
        self.existing(context, &subject, None, report, content)
    }

    /// Measures what is there already, once that is confirmed if it destroys something.
    fn existing(
        &self,
        context: &Context,
        subject: &dyn Subject,
        cpu: Option<Cpu>,
        mut report: Report,
        content: Option<&str>,
    ) -> Result<Report> {
        let tests = self.tests();
        let write = self.writes() && subject.refuses_writes().is_none();
        let size = subject.size() / PIECE_BYTES * PIECE_BYTES;
        let length = match self.size {
            Some(size) => size,
            None if write => self.length().min(size),
            None => size,
        };
        if length > subject.size() {
            return Err(Error::invalid(format!(
                "{} has {}: measure less than {} with --size",
                report.target.name,
                format_size(subject.size()),
                format_size(length)
            )));
        }
        report.target.length = length;
        if write {
            let (length, name) = (format_size(length), &report.target.name);
            let content = content.map(|what| format!(", which holds {what}")).unwrap_or_default();
            confirm(context, &format!("Write over the first {length} of {name}{content}?"))?;
        } else if let Some(share) = subject.data_share(length)?
            && share < 0.95
        {
            let percent = share * 100.0;
            report.notes.push(format!(
                "only {percent:.0} % of the target holds data: reading the rest costs no I/O"
            ));
        }
        context.stop.on_signals()?;
        let run = |runner: &mut Runner<'_>| runner.on_existing(subject, write);
        let results = self.measure(context, tests, length, cpu, run)?;
        Ok(Report { results, ..report })
    }

    fn measure(
        &self,
        context: &Context,
        tests: Vec<&'static Test>,
        length: u64,
        cpu: Option<Cpu>,
        run: impl FnOnce(&mut Runner<'_>) -> Result<()>,
    ) -> Result<Vec<Measurement>> {
        let time = self.time();
        let options = Options { tests, time, depth: self.depth, seed: self.seed, length };
        let mut meter = context.meter("measuring", Unit::Steps);
        let mut watch = |moment: &Moment| meter.say(|| line(moment, time));
        let mut runner = Runner::new(options, cpu, &mut watch)?;
        run(&mut runner)?;
        Ok(runner.finish())
    }

    /// What is known before anything was measured.
    fn report(&self, kind: TargetKind, name: String, length: u64, driver: String) -> Report {
        Report {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            target: dbs_bench::Target { kind, name, length, driver, cpu_of: None },
            started_ns: 0,
            test_seconds: self.time().as_secs_f64(),
            depth: self.depth,
            seed: self.seed,
            notes: Vec::new(),
            results: Vec::new(),
        }
    }

    /// Whether what is there may be written.
    fn writes(&self) -> bool {
        self.write && self.tests().iter().any(|test| test.writes() && !test.needs_store())
    }

    fn tests(&self) -> Vec<&'static Test> {
        let chosen = |test: &&Test| {
            let named = |name: &String| name == test.name || name == test.group.name();
            self.only.is_empty() || self.only.iter().any(named)
        };
        TESTS.iter().filter(chosen).collect()
    }

    fn time(&self) -> Duration {
        self.time.unwrap_or(if self.quick { QUICK.1 } else { THOROUGH.1 })
    }

    fn length(&self) -> u64 {
        self.size.unwrap_or(if self.quick { QUICK.0 } else { THOROUGH.0 })
    }
}

/// A target is measured in whole pieces of the largest request.
const PIECE_BYTES: u64 = 1 << 20;

/// The line of progress.
fn line(moment: &Moment, time: Duration) -> String {
    let Moment { test, number, total, elapsed } = moment;
    let doing = match elapsed {
        None => "preparing".to_owned(),
        Some(elapsed) => {
            format!("{:.0} s left", time.saturating_sub(*elapsed).as_secs_f64().ceil())
        }
    };
    format!("measuring {test} ({number} of {total}): {doing}")
}

/// Whose CPU time tells what the store costs.
fn cpu_of(target: &Target) -> Option<(CpuOf, Cpu)> {
    match target {
        Target::Live(AnyStore::Served(server)) => {
            Cpu::of(server.server_process()?).map(|cpu| (CpuOf::Server, cpu))
        }
        Target::Live(AnyStore::Idle(..)) => {
            Cpu::of(std::process::id()).map(|cpu| (CpuOf::Process, cpu))
        }
        Target::Old(_) => None,
    }
}

fn of_cpu(mut report: Report, cpu: Option<(CpuOf, Cpu)>) -> Report {
    report.target.cpu_of = cpu.map(|cpu| cpu.0);
    report
}

/// How requests get to a store.
fn driver_of(target: &Target) -> String {
    match target {
        Target::Live(AnyStore::Idle(store, _)) => store.info().driver,
        Target::Live(AnyStore::Served(_)) => "nbd".to_owned(),
        Target::Old(_) => "pread".to_owned(),
    }
}

/// The file for the plot, which keeps what it holds until there is something to draw.
fn create_plot(path: &Path) -> Result<File> {
    if path.extension().is_none_or(|end| !end.eq_ignore_ascii_case("svg")) {
        return Err(Error::invalid(format!(
            "{} is no name of an SVG file: plots are drawn as .svg only",
            path.display()
        )));
    }
    File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(|e| Error::io(e, format!("creating {}", path.display())))
}
