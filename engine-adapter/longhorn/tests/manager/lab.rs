//! A running manager, the volumes that it was told to start, and what it said of them.

use crate::grpc::Service;
use crate::plain::Names;
use dbs_frontend::Listen;
use longhorn_testing::DataClient;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tonic::Status;

pub const SIZE: u64 = 16 << 20;
pub const BLOCK: u32 = 4096;
const PORT: u16 = 8500;
/// The manager gives a process 60 s to start, and 60 s to end.
const LIMIT: Duration = Duration::from_secs(150);

/// Whose engine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Whose {
    Ours,
    Upstreams,
}

impl Whose {
    /// Those that there are.
    pub fn all() -> Vec<Self> {
        let upstream = std::env::var_os("LONGHORN_BIN").is_some();
        if !upstream {
            crate::apart::skip("the comparison", "no LONGHORN_BIN, upstream's `longhorn`");
        }
        [Self::Ours].into_iter().chain(upstream.then_some(Self::Upstreams)).collect()
    }

    fn program(self) -> PathBuf {
        match self {
            Self::Ours => env!("CARGO_BIN_EXE_longhorn").into(),
            Self::Upstreams => fs::canonicalize(std::env::var_os("LONGHORN_BIN").unwrap()).unwrap(),
        }
    }
}

/// The manager's process, ended with what it started.
pub struct Manager {
    child: Child,
    log: PathBuf,
    pub processes: Service,
    pub proxy: Service,
    /// What Longhorn's manager asks for processes, in front of the service `processes`.
    pub instances: Service,
}

impl Manager {
    /// As its pod starts it.
    pub fn start(lab: &Path) -> Self {
        Self::start_with(lab, &[])
    }

    /// The same with further variables in the environment of its pod.
    fn start_with(lab: &Path, variables: &[(&str, &str)]) -> Self {
        let log = lab.join("manager.log");
        let file = fs::File::options().create(true).append(true).open(&log).unwrap();
        let mut command = Command::new(lab.join("manager"));
        command.args(["--debug", "daemon", "--listen", &format!("0.0.0.0:{PORT}")]);
        command.arg("--logs-dir").arg(lab.join("logs")).envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        let child = command.process_group(0).spawn().unwrap();
        let processes = Service::connect(PORT, "ProcessManagerService");
        let proxy = Service::connect(PORT + 1, "imrpc.ProxyEngineService");
        let instances = Service::connect(PORT + 3, "imrpc.InstanceService");
        Self { child, log, processes, proxy, instances }
    }

    /// What it has logged, its processes' lines included.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Sends a signal, and waits for the end.
    pub fn stop(&mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
        let mut ended = None;
        eventually("the manager ends", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!(
                "the manager's log:\n{}",
                lines[lines.len().saturating_sub(150)..].join("\n")
            );
        }
    }
}

/// A manager with one kind of engine.
pub struct Side {
    pub whose: Whose,
    pub manager: Manager,
    lab: PathBuf,
    pub names: Names,
    /// Steps and what came of them.
    pub said: Vec<String>,
}

/// A volume's controller.
#[derive(Clone)]
pub struct Engine {
    pub volume: String,
    pub name: String,
    pub address: String,
}

/// How a controller is started.
pub struct Start<'a> {
    pub frontend: &'a str,
    pub size: u64,
    pub current_size: u64,
    pub replicas: &'a [String],
    pub more: &'a [&'a str],
    /// Of two images with the same program, the first or the second.
    pub image: usize,
}

impl<'a> Start<'a> {
    pub fn new(frontend: &'a str, replicas: &'a [String]) -> Self {
        Self { frontend, size: SIZE, current_size: SIZE, replicas, more: &[], image: 1 }
    }
}

impl Side {
    pub fn new(lab: &Path, whose: Whose) -> Self {
        Self::with(lab, whose, &[])
    }

    /// The same with further variables in the manager's environment.
    pub fn with(lab: &Path, whose: Whose, variables: &[(&str, &str)]) -> Self {
        let mut names = Names::default();
        for image in [1, 2] {
            let program = binary(whose, image);
            fs::create_dir_all(Path::new(&program).parent().unwrap()).unwrap();
            symlink(whose.program(), &program).unwrap();
            names.add(&program, &format!("IMAGE{image}"));
        }
        names.add(&lab.display().to_string(), "LAB");
        let manager = Manager::start_with(lab, variables);
        let mut side = Self { whose, manager, lab: lab.to_owned(), names, said: Vec::new() };
        side.names.add(&side.directory(""), "DIRECTORY-");
        side
    }

    pub fn lab(&self) -> &Path {
        &self.lab
    }

    /// Where a replica's data is, as the manager's pod sees it.
    pub fn directory(&self, name: &str) -> String {
        format!("/host/var/lib/longhorn/replicas/{:?}-{name}", self.whose)
    }

    /// Starts a replica `volume-r-name` as Longhorn's manager does; its address once it runs.
    pub fn replica(&mut self, volume: &str, name: &str, size: u64) -> String {
        self.replica_of(volume, name, size, 1, &[])
    }

    /// The same of one of two images, which the name of the process tells as well, and with further arguments.
    pub fn replica_of(
        &mut self,
        volume: &str,
        name: &str,
        size: u64,
        image: usize,
        more: &[&str],
    ) -> String {
        let instance = format!("{volume}-r-{name}{}", if image == 1 { "" } else { "-new" });
        let (size, directory) = (size.to_string(), self.directory(&format!("{volume}-{name}")));
        let args = ["--volume-name", volume, "replica", &directory, "--size", &size];
        let args = [&args[..], &["--disableRevCounter", "--replica-instance-name", &instance]];
        let args =
            [&args.concat()[..], &["--snapshot-max-count", "250", "--snapshot-max-size", "0"]];
        let args = [&args.concat()[..], &["--sync-agent-port-count", "7"], more].concat();
        let spec = self.spec(&instance, image, &args, 10);
        self.manager.processes.call("ProcessCreate", &json!({ "spec": spec })).unwrap();
        let process = self.settled(&instance);
        assert_eq!(process["status"]["state"], "running", "{process}\n{}", self.log(&instance));
        let address = format!("tcp://127.0.0.1:{}", process["status"]["port_start"]);
        self.names.add(&address["tcp://".len()..], &format!("{instance}:PORT"));
        address
    }

    fn spec(&self, name: &str, image: usize, args: &[&str], ports: u16) -> Value {
        let binary = binary(self.whose, image);
        json!({
            "name": name, "binary": binary, "args": args, "port_count": ports,
            "port_args": ["--listen,:"],
        })
    }

    /// What Longhorn's manager asks for to start a volume's controller.
    pub fn engine_spec(&self, volume: &str, start: &Start) -> Value {
        let name = format!("{volume}-e-0");
        let (size, current) = (start.size.to_string(), start.current_size.to_string());
        let args = ["--engine-instance-name", &name, "controller", volume];
        let args = [&args[..], &["--frontend", start.frontend, "--disableRevCounter"]];
        let args = [&args.concat()[..], &["--size", &size, "--current-size", &current]];
        let args = [&args.concat()[..], &["--engine-replica-timeout", "8"]];
        let args = [&args.concat()[..], &["--file-sync-http-client-timeout", "30"]];
        let args =
            [&args.concat()[..], &["--snapshot-max-count", "250", "--snapshot-max-size", "0"]];
        let args = [&args.concat()[..], &["--rebuild-sync-concurrent-limit", "1"]];
        let mut args = args.concat();
        for replica in start.replicas {
            args.extend(["--replica", replica]);
        }
        args.extend(start.more);
        self.spec(&name, start.image, &args, 1)
    }

    /// A volume's controller, once it runs.
    pub fn engine(&mut self, volume: &str, start: &Start) -> Engine {
        let spec = self.engine_spec(volume, start);
        self.manager.processes.call("ProcessCreate", &json!({ "spec": spec })).unwrap();
        let name = format!("{volume}-e-0");
        let process = self.settled(&name);
        assert_eq!(process["status"]["state"], "running", "{process}\n{}", self.log(&name));
        self.engine_at(volume, &process)
    }

    pub fn engine_at(&mut self, volume: &str, process: &Value) -> Engine {
        let name = format!("{volume}-e-0");
        let address = format!("127.0.0.1:{}", process["status"]["port_start"]);
        self.names.add(&address, &format!("{name}:PORT"));
        Engine { volume: volume.to_owned(), name, address }
    }

    /// A process once it has started or failed.
    pub fn settled(&self, name: &str) -> Value {
        let mut process = Value::Null;
        eventually(&format!("{name} starts or fails"), || {
            process = self.manager.processes.call("ProcessGet", &json!({ "name": name })).unwrap();
            !["starting", "stopping"].contains(&process["status"]["state"].as_str().unwrap())
        });
        process
    }

    /// Ends a process, and waits until the manager has forgotten it.
    pub fn delete(&self, name: &str) -> Value {
        let ended = self.manager.processes.call("ProcessDelete", &json!({ "name": name })).unwrap();
        eventually(&format!("{name} is gone"), || {
            self.manager.processes.call("ProcessGet", &json!({ "name": name })).is_err()
        });
        ended
    }

    /// What a process has logged, as the manager tells it.
    pub fn log(&self, name: &str) -> String {
        let lines =
            self.manager.processes.stream("ProcessLog", &json!({ "name": name }), |_| false);
        let lines: Vec<_> = lines.iter().map(|line| line["line"].as_str().unwrap()).collect();
        lines.join("\n")
    }

    /// A call of the proxy for a volume, with further fields of the request.
    pub fn call(&self, engine: &Engine, method: &str, fields: &Value) -> Result<Value, Status> {
        let whose = json!({
            "address": engine.address, "engine_name": engine.name, "volume_name": engine.volume,
            "data_engine": 0,
        });
        let mut request = fields.clone();
        match self.manager.proxy.method(method).input().get_field_by_name("proxy_engine_request") {
            Some(_) => request["proxy_engine_request"] = whose,
            None => request = whose,
        }
        self.manager.proxy.call(method, &request)
    }

    /// The same, noted with what came of it.
    pub fn step(&mut self, engine: &Engine, method: &str, fields: Value) -> Value {
        let answer = self.call(engine, method, &fields);
        self.note(&format!("{method} of {}: {fields}", engine.volume), answer)
    }

    /// Calls until what is answered is so, and notes the last answer.
    pub fn settle(
        &mut self,
        engine: &Engine,
        method: &str,
        fields: Value,
        over: impl Fn(&Value) -> bool,
    ) -> Value {
        let mut answer = Value::Null;
        eventually(&format!("{method} settles"), || {
            answer = self.call(engine, method, &fields).unwrap();
            over(&answer)
        });
        self.note(&format!("{method} of {}, at last: {fields}", engine.volume), Ok(answer))
    }

    pub fn note(&mut self, step: &str, answer: Result<Value, Status>) -> Value {
        let text = match &answer {
            Ok(value) => format!("{:#}", self.names.plain_value(value)),
            Err(status) => {
                format!("{:?}: {}", status.code(), self.names.plain(status.message()))
            }
        };
        self.said.push(format!("{}\n{text}", self.names.plain(step)));
        answer.unwrap_or_default()
    }

    pub fn client(&self, volume: &str) -> DataClient {
        let socket = PathBuf::from(format!("/var/run/longhorn-{volume}.sock"));
        let connect = || DataClient::connect(&Listen::Unix(socket.clone()), 1);
        if self.whose == Whose::Upstreams {
            // It answers before it listens.
            eventually("the socket is there", || connect().is_ok());
        }
        connect().unwrap().with_timeout(LIMIT)
    }
}

fn binary(whose: Whose, image: usize) -> String {
    format!("/host/var/lib/longhorn/engine-binaries/{whose:?}-{image}/longhorn")
}

/// Does the same with each engine, and compares what was said.
pub fn compare(lab: &Path, script: impl Fn(&mut Side)) {
    let mut all = Vec::new();
    for whose in Whose::all() {
        let mut side = Side::new(lab, whose);
        script(&mut side);
        all.push((whose, std::mem::take(&mut side.said)));
    }
    for (whose, said) in &all {
        println!("==== {whose:?}\n{}\n", said.join("\n"));
    }
    let [(_, ours), (_, upstreams)] = &all[..] else { return };
    let mut different = Vec::new();
    for (ours, upstreams) in ours.iter().zip(upstreams) {
        if ours != upstreams {
            different.push(format!("---- ours: {ours}\n---- upstream's: {upstreams}\n"));
        }
    }
    assert!(different.is_empty(), "{} differ:\n{}", different.len(), different.join("\n"));
    assert_eq!(ours.len(), upstreams.len());
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A block with this byte.
pub fn block(byte: u8) -> Vec<u8> {
    vec![byte; BLOCK as usize]
}
