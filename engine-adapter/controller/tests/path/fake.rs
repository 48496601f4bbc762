//! Replicas that do what a test wants.

use dbs_frontend::Listen;
use longhorn_controller::path::BackendAddress;
use longhorn_wire::frame::{HEADER_BYTES, Header, Type};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// What a replica does with a request.
#[derive(Clone)]
pub enum Do {
    /// What it should.
    Serve,
    /// Carries it out and says nothing, now and later.
    Silence,
    /// An error of this text.
    Fail(&'static str),
    /// Sends these bytes instead of a reply.
    Bytes(Vec<u8>),
    /// Closes the connection.
    Close,
    /// Waits for [`Fake::open_gate`], then does what it should.
    AtGate,
}

type Behaviour = Box<dyn Fn(&Header) -> Do + Send + Sync>;

struct Shared {
    data: Mutex<Vec<u8>>,
    behaviour: Mutex<Arc<Behaviour>>,
    seen: Mutex<Vec<Header>>,
    gate: (Mutex<bool>, Condvar),
    sockets: Mutex<Vec<TcpStream>>,
    ended: AtomicBool,
}

/// A replica in memory, with a thread for each connection.
pub struct Fake {
    shared: Arc<Shared>,
    port: u16,
}

impl Fake {
    /// One that does what it should.
    pub fn new(size: usize) -> Self {
        Self::with(size, |_| Do::Serve)
    }

    pub fn with(size: usize, behaviour: impl Fn(&Header) -> Do + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            data: Mutex::new(vec![0; size]),
            behaviour: Mutex::new(Arc::new(Box::new(behaviour))),
            seen: Mutex::default(),
            gate: Default::default(),
            sockets: Mutex::default(),
            ended: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if accepting.ended.load(Ordering::SeqCst) {
                    return;
                }
                stream.set_nodelay(true).unwrap();
                accepting.sockets.lock().unwrap().push(stream.try_clone().unwrap());
                let shared = Arc::clone(&accepting);
                thread::spawn(move || shared.serve(stream));
            }
        });
        Self { shared, port }
    }

    pub fn address(&self) -> BackendAddress {
        BackendAddress::Remote(Listen::Tcp("127.0.0.1".into(), self.port))
    }

    pub fn behave(&self, behaviour: impl Fn(&Header) -> Do + Send + Sync + 'static) {
        *self.shared.behaviour.lock().unwrap() = Arc::new(Box::new(behaviour));
    }

    /// Lets go of what waits at the gate, and of all that comes later.
    pub fn open_gate(&self) {
        *self.shared.gate.0.lock().unwrap() = true;
        self.shared.gate.1.notify_all();
    }

    pub fn content(&self) -> Vec<u8> {
        self.shared.data.lock().unwrap().clone()
    }

    /// The requests of this type that have come.
    pub fn seen(&self, kind: Type) -> Vec<Header> {
        let seen = self.shared.seen.lock().unwrap();
        seen.iter().filter(|header| header.kind() == Some(kind)).copied().collect()
    }

    /// All connections break.
    pub fn kill(&self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for socket in &*self.shared.sockets.lock().unwrap() {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
        self.open_gate();
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Shared {
    fn serve(&self, mut stream: TcpStream) {
        loop {
            let mut header = [0; HEADER_BYTES];
            if stream.read_exact(&mut header).is_err() {
                return;
            }
            let header = Header::decode(&header).expect("the path keeps to the protocol");
            let mut payload = vec![0; header.length as usize];
            if stream.read_exact(&mut payload).is_err() {
                return;
            }
            self.seen.lock().unwrap().push(header);
            let behaviour = Arc::clone(&self.behaviour.lock().unwrap());
            let reply = match behaviour(&header) {
                Do::Serve => self.execute(&header, &payload),
                Do::Silence => {
                    self.execute(&header, &payload);
                    continue;
                }
                Do::Fail(text) => message(Type::Error, &header, text.as_bytes()),
                Do::Bytes(bytes) => bytes,
                Do::Close => {
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                    return;
                }
                Do::AtGate => {
                    let shut = self.gate.0.lock().unwrap();
                    drop(self.gate.1.wait_while(shut, |open| !*open).unwrap());
                    self.execute(&header, &payload)
                }
            };
            if stream.write_all(&reply).is_err() {
                return;
            }
        }
    }

    fn execute(&self, header: &Header, payload: &[u8]) -> Vec<u8> {
        let mut data = self.data.lock().unwrap();
        let start = header.offset as usize;
        match header.kind() {
            Some(Type::Read) => {
                message(Type::Response, header, &data[start..start + header.size as usize])
            }
            Some(Type::Write) => {
                data[start..start + payload.len()].copy_from_slice(payload);
                done(header, payload.len() as u32)
            }
            Some(Type::Unmap) => {
                data[start..start + header.size as usize].fill(0);
                done(header, header.size)
            }
            // Only one that a test made damaged is asked.
            Some(Type::Heal) => done(header, 0),
            // As upstream's does it: a hello comes back as it is.
            Some(Type::Ping) => message(Type::Response, header, payload),
            kind => panic!("upstream's replica does not know {kind:?}"),
        }
    }
}

/// A reply with a payload.
pub fn message(kind: Type, to: &Header, payload: &[u8]) -> Vec<u8> {
    let header = Header::with_payload(kind, to.sequence, to.offset, payload.len() as u32);
    [header.encode().as_slice(), payload].concat()
}

/// A reply of success without one.
pub fn done(to: &Header, size: u32) -> Vec<u8> {
    Header::new(Type::Response, to.sequence, to.offset, size).encode().to_vec()
}
