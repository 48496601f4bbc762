//! A volume as the disk of a virtual machine, beside the same volume over NBD, the vhost-user-blk export of
//! qemu-storage-daemon, and the bare file: random 4 KiB reads and overwrites. Prints Markdown.
//!
//! The load on vhost-user is that of `dbs-guest`: one queue, one thread, signalled by eventfds as a guest's driver is by
//! interrupts. That on NBD and on the file is fio's.

use clap::Parser;
use dbs_benches::fio::{Figures, Job, Target};
use dbs_benches::process::{Process, catch_interrupts, check_interrupted, exit};
use dbs_benches::samples::progress;
use dbs_benches::server::{Dbs, Served};
use dbs_benches::{Outcome, machine};
use dbs_guest::{Guest, Options, Request};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
const DEPTHS: [u32; 3] = [1, 32, 128];
const PATIENCE: Duration = Duration::from_secs(60);

/// Random 4 KiB requests over vhost-user, beside others.
#[derive(Debug, Parser)]
struct Arguments {
    /// Where the images are made: on the disk to be measured
    #[arg(long, default_value = "target")]
    dir: PathBuf,
    /// The command `dbs`; by default the one beside this program
    #[arg(long)]
    dbs: Option<PathBuf>,
    /// Seconds of each run
    #[arg(long, default_value_t = 2)]
    seconds: u32,
    /// Rounds, in each of which all have their turn
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Mebibytes that are read and overwritten
    #[arg(long, default_value_t = 512)]
    size: u64,
    /// One round of a second each, of 64 MiB, to see that it works: the figures mean nothing
    #[arg(long)]
    quick: bool,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::parse();
    if arguments.quick {
        arguments = Arguments { seconds: 1, rounds: 1, size: 64, ..arguments };
    }
    exit("vhost", run(&arguments))
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    Vhost,
    Nbd,
    Daemon,
    Bare,
}

const SUBJECTS: [(Subject, &str); 4] = [
    (Subject::Vhost, "DBS, vhost-user"),
    (Subject::Nbd, "DBS, NBD"),
    (Subject::Daemon, "qemu-storage-daemon, raw"),
    (Subject::Bare, "the bare file"),
];

struct Stage {
    dir: PathBuf,
    size: u64,
    seconds: u32,
    served: Served,
    daemon: Option<Process>,
}

fn run(arguments: &Arguments) -> Outcome<()> {
    catch_interrupts()?;
    let dir = tempfile::tempdir_in(&arguments.dir)?;
    let stage = Stage::new(dir.path(), arguments)?;
    let mut cells = Vec::new();
    for round in 0..arguments.rounds {
        for pattern in ["randread", "randwrite"] {
            for depth in DEPTHS {
                for (subject, name) in SUBJECTS {
                    if subject == Subject::Daemon && stage.daemon.is_none() {
                        continue;
                    }
                    check_interrupted()?;
                    let figures = stage.measure(subject, pattern, depth)?;
                    progress(&format!(
                        "round {round}, {pattern} {depth}, {name}: {:.0} IOPS, {:.1} µs",
                        figures.iops, figures.p50_us
                    ));
                    cells.push(((pattern, depth, subject), figures));
                }
            }
        }
    }
    println!("{}", machine::describe(dir.path(), "make bench-vhost")?);
    print(&cells);
    Ok(())
}

impl Stage {
    fn new(dir: &Path, arguments: &Arguments) -> Outcome<Self> {
        let (dbs, size) = (Dbs::find(arguments.dbs.as_deref())?, arguments.size << 20);
        let (raw, store) = (dir.join("raw"), dir.join("store"));
        File::create(&raw)?.set_len(size)?;
        dbs.run(&store, &["init", &store.to_string_lossy(), "--size", &(2 * size).to_string()])?;
        dbs.run(&store, &["volume", "create", "v", &size.to_string()])?;
        let machines = dir.join("vm");
        let options = ["--vhost-user", &*machines.to_string_lossy()];
        let served = dbs.serve_with(&store, "v", &dir.join("nbd.sock"), &options)?;
        // All blocks are there: what is measured are reads of data, and overwrites.
        Job::fill(size).run(&Target::File(raw.clone()), dir)?;
        served.measure(&Job::fill(size), dir)?;
        let mut daemon = None;
        if Command::new("qemu-storage-daemon").arg("--version").output().is_ok() {
            let socket = dir.join("daemon.sock");
            let mut command = Command::new("qemu-storage-daemon");
            let file = format!(
                "driver=file,node-name=raw,filename={},cache.direct=on,aio=io_uring",
                raw.display()
            );
            let export = format!(
                "type=vhost-user-blk,id=e,node-name=raw,addr.type=unix,addr.path={},writable=on",
                socket.display()
            );
            command.args(["--blockdev", &file, "--export", &export]);
            let mut process =
                Process::start("qemu-storage-daemon", command, &dir.join("daemon.log"))?;
            process.wait_listening(&socket)?;
            daemon = Some(process);
        } else {
            println!("SKIPPED qemu-storage-daemon: it is not installed");
        }
        let (dir, seconds) = (dir.to_owned(), arguments.seconds);
        Ok(Self { dir, size, seconds, served, daemon })
    }

    fn measure(&self, subject: Subject, pattern: &'static str, depth: u32) -> Outcome<Figures> {
        let job = Job::random(pattern, depth, self.size, self.seconds);
        match subject {
            Subject::Bare => job.run(&Target::File(self.dir.join("raw")), &self.dir),
            Subject::Nbd => self.served.measure(&job, &self.dir),
            Subject::Vhost => {
                let before = self.served.cpu_seconds()?;
                let figures = self.guest("vm/v.sock", pattern == "randread", depth)?;
                let used = self.served.cpu_seconds()?.zip(before).map(|(after, then)| after - then);
                Ok(Figures { server_cpu: used, ..figures })
            }
            Subject::Daemon => {
                let cpu = || self.daemon.as_ref().map(Process::cpu_seconds).transpose();
                let before = cpu()?;
                let figures = self.guest("daemon.sock", pattern == "randread", depth)?;
                Ok(Figures {
                    server_cpu: cpu()?.zip(before).map(|(after, then)| after - then),
                    ..figures
                })
            }
        }
    }

    /// Random requests of a guest for some time.
    fn guest(&self, socket: &str, read: bool, depth: u32) -> Outcome<Figures> {
        let data_bytes = BLOCK as u32;
        let options = Options { places: 128, data_bytes, inflight: true, ..Options::default() };
        let mut guest = Guest::connect(&self.dir.join(socket), &options)?;
        let queue = &mut guest.queues[0];
        let mut random = fastrand::Rng::new();
        let data: Vec<u8> = (0..BLOCK).map(|_| random.u8(..)).collect();
        let mut begun_at = vec![Instant::now(); usize::from(options.places)];
        let mut latencies = Vec::new();
        let (begun, limit) = (Instant::now(), Duration::from_secs(self.seconds.into()));
        let mut running = 0;
        loop {
            let over = begun.elapsed() >= limit;
            while !over && running < depth {
                let offset = random.u64(0..self.size / BLOCK) * BLOCK;
                let request = match read {
                    true => Request::read(offset, BLOCK as u32),
                    false => Request::write(offset, data.clone()),
                };
                begun_at[usize::from(queue.add(&request))] = Instant::now();
                running += 1;
            }
            queue.tell();
            if running == 0 {
                break;
            }
            if !queue.wait(PATIENCE) {
                return Err("no answer".into());
            }
            while let Some((head, _)) = queue.take() {
                let (slot, outcome) = queue.end(head);
                if outcome != 0 {
                    return Err(format!("a request failed: {outcome}").into());
                }
                latencies.push(begun_at[usize::from(slot)].elapsed());
                running -= 1;
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        latencies.sort_unstable();
        let at = |part: f64| {
            let index = (latencies.len() as f64 * part) as usize;
            latencies.get(index).map_or(0.0, |latency| latency.as_secs_f64() * 1e6)
        };
        let iops = latencies.len() as f64 / seconds;
        Ok(Figures {
            iops,
            mb_per_s: iops * BLOCK as f64 / 1e6,
            p50_us: at(0.5),
            p99_us: at(0.99),
            max_us: at(0.999_999),
            requests: latencies.len() as u64,
            ..Figures::default()
        })
    }
}

type Cell = (&'static str, u32, Subject);

fn print(cells: &[(Cell, Figures)]) {
    let median = |cell: Cell, figure: &dyn Fn(&Figures) -> f64| {
        let mut values: Vec<f64> = cells
            .iter()
            .filter(|(at, _)| *at == cell)
            .map(|(_, figures)| figure(figures))
            .collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    println!(
        "\nIOPS, p50 and p99 in µs, CPU seconds of the server for 100,000 requests; medians of the rounds.\n"
    );
    println!("| load | subject | IOPS | of the bare file | p50 | p99 | CPU |");
    println!("|---|---|---|---|---|---|---|");
    for pattern in ["randread", "randwrite"] {
        for depth in DEPTHS {
            let bare = median((pattern, depth, Subject::Bare), &|f| f.iops).unwrap_or(f64::NAN);
            for (subject, name) in SUBJECTS {
                let cell = (pattern, depth, subject);
                let Some(iops) = median(cell, &|f| f.iops) else { continue };
                let of = |figure: &dyn Fn(&Figures) -> f64| median(cell, figure).unwrap_or(0.0);
                println!(
                    "| {pattern}, QD {depth} | {name} | {iops:.0} | {:.2} | {:.0} | {:.0} | {:.2} |",
                    iops / bare,
                    of(&|f| f.p50_us),
                    of(&|f| f.p99_us),
                    of(&Figures::cpu_per_100k),
                );
            }
        }
    }
}
