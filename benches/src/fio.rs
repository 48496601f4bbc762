//! Runs of fio, on a file or an NBD server.

use crate::Outcome;
use crate::process::Process;
use serde::Serialize;
use serde_json::Value;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Beyond its running time, what fio may take.
const PATIENCE: Duration = Duration::from_secs(600);

/// What I/O goes to.
#[derive(Debug, Clone)]
pub enum Target {
    /// A file or block device, past the page cache.
    File(PathBuf),
    /// The URI of an NBD export.
    Nbd(String),
}

/// The load to make.
#[derive(Debug, Clone)]
pub struct Job {
    /// fio's name of it, as `randread`.
    pub pattern: &'static str,
    /// Bytes of a request.
    pub block: u64,
    /// Requests in flight of each client.
    pub depth: u32,
    /// Clients, each with a connection of its own.
    pub clients: u32,
    /// Bytes of the target that are used.
    pub size: u64,
    /// How long, at most; without it until all of `size` is done once.
    pub seconds: Option<u32>,
    /// Every block at most once: ends early when all were visited.
    pub once: bool,
    /// A flush after each write.
    pub flush: bool,
    /// Something to be written down on the way.
    pub log: Option<Log>,
}

/// What fio writes down, for windows of so many milliseconds.
#[derive(Debug, Clone)]
pub enum Log {
    /// The longest latency of each millisecond.
    Latency,
    /// Requests a second, in each tenth of a second.
    Rate,
}

/// What a run measured.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Figures {
    /// Requests a second.
    pub iops: f64,
    /// Megabytes (10^6) a second.
    pub mb_per_s: f64,
    /// Latency from submission to completion, microseconds: median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Longest.
    pub max_us: f64,
    /// Requests done, flushes not counted.
    pub requests: u64,
    /// Seconds of CPU that fio used.
    pub fio_cpu: f64,
    /// Seconds of CPU that the server used, if there is one.
    pub server_cpu: Option<f64>,
}

impl Figures {
    /// Seconds of CPU per 100,000 requests: the server's, without one fio's.
    #[must_use]
    pub fn cpu_per_100k(&self) -> f64 {
        self.server_cpu.unwrap_or(self.fio_cpu) / self.requests.max(1) as f64 * 1e5
    }
}

/// A line of a log: milliseconds since 1970, and the value.
pub type Logged = (u64, f64);

impl Job {
    /// Random 4 KiB requests for some time, any block at any time.
    #[must_use]
    pub fn random(pattern: &'static str, depth: u32, size: u64, seconds: u32) -> Self {
        let seconds = Some(seconds);
        Self {
            pattern,
            block: 4096,
            depth,
            clients: 1,
            size,
            seconds,
            once: false,
            flush: false,
            log: None,
        }
    }

    /// Everything written once, in order, and flushed.
    #[must_use]
    pub fn fill(size: u64) -> Self {
        let job = Self::random("write", 4, size, 0);
        Self { block: 1 << 20, seconds: None, once: true, ..job }
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// If fio is missing or fails, or the user asks for the end.
    pub fn run(&self, target: &Target, dir: &Path) -> Outcome<Figures> {
        self.start(target, dir)?.finish()
    }

    /// Starts it; its files go to `dir`.
    ///
    /// # Errors
    /// If fio is missing.
    pub fn start(&self, target: &Target, dir: &Path) -> Outcome<Running> {
        let output = dir.join("fio.json");
        let mut command = Command::new("fio");
        command.current_dir(dir).args(self.arguments(target)).arg("--output").arg(&output);
        let process = Process::start("fio", command, &dir.join("fio.log"))?;
        let seconds = Duration::from_secs(self.seconds.unwrap_or(600).into());
        Ok(Running { process, output, deadline: Instant::now() + seconds + PATIENCE })
    }

    fn arguments(&self, target: &Target) -> Vec<String> {
        let mut list = vec![
            "--name=peers".to_owned(),
            "--output-format=json".to_owned(),
            format!("--rw={}", self.pattern),
            format!("--bs={}", self.block),
            format!("--size={}", self.size),
        ];
        let mut add = |arguments: &[&str]| list.extend(arguments.iter().map(ToString::to_string));
        add(&[
            "--randrepeat=0",
            "--group_reporting",
            "--clat_percentiles=0",
            "--lat_percentiles=1",
        ]);
        match target {
            Target::Nbd(uri) => add(&["--ioengine=nbd", &format!("--uri={uri}")]),
            Target::File(path) => {
                let engine = if self.flush { "psync" } else { "io_uring" };
                let [engine, file] =
                    [format!("--ioengine={engine}"), format!("--filename={}", path.display())];
                add(&["--direct=1", "--overwrite=0", &engine, &file]);
            }
        }
        let [depth, clients] =
            [format!("--iodepth={}", self.depth), format!("--numjobs={}", self.clients)];
        add(&[&depth, &clients, "--thread"]);
        match (self.flush, target) {
            (false, _) => {}
            (true, Target::Nbd(_)) => add(&["--fsync=1"]),
            (true, Target::File(_)) => add(&["--fdatasync=1"]),
        }
        match self.seconds {
            Some(seconds) => add(&[&format!("--runtime={seconds}")]),
            None => add(&["--end_fsync=1"]),
        }
        if !self.once {
            add(&["--time_based", "--norandommap"]);
        }
        match self.log {
            Some(Log::Latency) => {
                add(&["--write_lat_log=log", "--log_avg_msec=1", "--log_max_value=1"]);
            }
            Some(Log::Rate) => add(&["--write_iops_log=log", "--log_avg_msec=100"]),
            None => {}
        }
        if self.log.is_some() {
            add(&["--log_unix_epoch=1", "--per_job_logs=0"]);
        }
        list
    }
}

/// A run on its way.
#[derive(Debug)]
pub struct Running {
    process: Process,
    output: PathBuf,
    deadline: Instant,
}

impl Running {
    /// Waits for its end.
    ///
    /// # Errors
    /// If it fails, does nothing, or the user asks for the end.
    pub fn finish(mut self) -> Outcome<Figures> {
        self.process.wait(self.deadline)?;
        figures(&read_to_string(&self.output)?)
    }

    /// Ends it early; its logs are complete up to now.
    ///
    /// # Errors
    /// If it ended by itself and failed.
    pub fn stop(mut self) -> Outcome<()> {
        self.process.interrupt()
    }
}

/// Reads a log that a job left in `dir`, in the order of time.
///
/// # Errors
/// If there is none, or it is not such a log.
pub fn read_log(dir: &Path, kind: &Log) -> Outcome<Vec<Logged>> {
    let name = match kind {
        Log::Latency => "log_lat.log",
        Log::Rate => "log_iops.log",
    };
    let text = read_to_string(dir.join(name)).map_err(|e| format!("fio's {name}: {e}"))?;
    let mut entries = Vec::new();
    for line in text.lines() {
        let mut fields = line.split(',').map(str::trim);
        let entry = fields.next().and_then(|f| f.parse().ok());
        let value = fields.next().and_then(|f| f.parse().ok());
        entries.push(entry.zip(value).ok_or_else(|| format!("fio's {name} has `{line}`"))?);
    }
    entries.sort_by_key(|entry| entry.0);
    Ok(entries)
}

/// Reads fio's report. Other lines may precede the JSON.
fn figures(text: &str) -> Outcome<Figures> {
    let json = text.find("\n{").map(|at| &text[at..]).unwrap_or(text);
    let report: Value = serde_json::from_str(json).map_err(|e| format!("fio's report: {e}"))?;
    let job = &report["jobs"][0];
    let number = |value: &Value| value.as_f64().unwrap_or_default();
    let [read, write] = ["read", "write"].map(|side| &job[side]);
    let both = |name: &str| number(&read[name]) + number(&write[name]);
    let requests = both("total_ios") as u64;
    if number(&job["error"]) != 0.0 || requests == 0 {
        return Err(format!("fio: error {} after {requests} requests", job["error"]).into());
    }
    // Of a mixture, the slower side's latency.
    let latency = |name: &str| {
        let micros = |side: &Value| {
            let latency = &side["lat_ns"];
            number(latency.get(name).unwrap_or(&latency["percentile"][name])) / 1e3
        };
        micros(read).max(micros(write))
    };
    let cpu = (number(&job["usr_cpu"]) + number(&job["sys_cpu"])) / 100.0;
    Ok(Figures {
        iops: both("iops"),
        mb_per_s: both("bw_bytes") / 1e6,
        p50_us: latency("50.000000"),
        p99_us: latency("99.000000"),
        max_us: latency("max"),
        requests,
        fio_cpu: cpu * number(&job["job_runtime"]) / 1e3,
        server_cpu: None,
    })
}
