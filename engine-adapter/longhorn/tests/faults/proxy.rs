//! What is between a controller and a replica: passes on what comes, or does to the data what a test wants.

use crate::lab::{Replica, free_ports};
use longhorn_wire::frame::{HEADER_BYTES, Header};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Which way messages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Requests,
    Replies,
}

/// What happens to a message.
#[derive(Debug, Clone, Copy)]
pub enum Damage {
    /// A byte of the header is changed by these bits.
    Flip(usize, u8),
    /// So many bytes of it are the last ones.
    Cut(usize),
    /// It does not arrive.
    Lose,
    /// Bytes come in between that nobody sent.
    Insert(usize),
}

/// What is to happen to the next message that this holds for.
pub struct Fault {
    pub way: Way,
    pub to: fn(&Header) -> bool,
    pub damage: Damage,
}

#[derive(Default)]
struct Shared {
    fault: Mutex<Option<Fault>>,
    delay_ms: AtomicU64,
    sockets: Mutex<Vec<TcpStream>>,
    /// Those of data connections.
    data: Mutex<Vec<TcpStream>>,
    /// Data connections are closed as soon as they are made.
    shut: AtomicBool,
    ended: AtomicBool,
}

/// In front of a replica's ports.
pub struct Proxy {
    shared: Arc<Shared>,
    port: u16,
}

impl Proxy {
    pub fn before(replica: &Replica) -> Self {
        let port = free_ports();
        let shared = Arc::<Shared>::default();
        for index in 0..3 {
            let listener = TcpListener::bind(("127.0.0.1", port + index)).unwrap();
            let (shared, to) = (Arc::clone(&shared), replica.port + index);
            thread::spawn(move || {
                while let Ok((stream, _)) = listener.accept() {
                    if shared.ended.load(Ordering::SeqCst) {
                        return;
                    }
                    if index == 1 && shared.shut.load(Ordering::SeqCst) {
                        continue;
                    }
                    // Nobody there: it is closed again.
                    if let Ok(other) = TcpStream::connect(("127.0.0.1", to)) {
                        shared.join(&stream, &other, index == 1);
                    }
                }
            });
        }
        Self { shared, port }
    }

    pub fn address(&self) -> String {
        format!("tcp://127.0.0.1:{}", self.port)
    }

    /// Plans a fault.
    pub fn plan(&self, fault: Fault) {
        *self.shared.fault.lock().unwrap() = Some(fault);
    }

    /// Whether a planned fault has not happened yet.
    pub fn is_planned(&self) -> bool {
        self.shared.fault.lock().unwrap().is_some()
    }

    /// All data connections break; others can be made, or not.
    pub fn cut(&self, shut: bool) {
        self.shared.shut.store(shut, Ordering::SeqCst);
        for socket in self.shared.data.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Lets each reply take so much longer.
    pub fn delay(&self, delay: Duration) {
        let millis = u64::try_from(delay.as_millis()).unwrap();
        self.shared.delay_ms.store(millis, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for socket in &*self.shared.sockets.lock().unwrap() {
            let _ = socket.shutdown(Shutdown::Both);
        }
        for index in 0..3 {
            // Wakes the thread that accepts.
            let _ = TcpStream::connect(("127.0.0.1", self.port + index));
        }
    }
}

impl Shared {
    /// Passes on what comes, both ways.
    fn join(self: &Arc<Self>, client: &TcpStream, server: &TcpStream, data: bool) {
        let clone = |stream: &TcpStream| stream.try_clone().unwrap();
        for stream in [client, server] {
            stream.set_nodelay(true).unwrap();
            self.sockets.lock().unwrap().push(clone(stream));
            if data {
                self.data.lock().unwrap().push(clone(stream));
            }
        }
        let ways = [(Way::Requests, client, server), (Way::Replies, server, client)];
        for (way, from, to) in ways {
            let (shared, mut from, mut to) = (Arc::clone(self), clone(from), clone(to));
            thread::spawn(move || {
                let _ended = match data {
                    true => shared.messages(way, &mut from, &to),
                    false => std::io::copy(&mut from, &mut to).map(drop),
                };
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    }

    /// Passes on messages, each as late as it is to be: those behind it do not wait for that.
    fn messages(&self, way: Way, from: &mut TcpStream, to: &TcpStream) -> std::io::Result<()> {
        let (queue, queued) = mpsc::channel::<(Instant, Vec<u8>)>();
        let mut to = to.try_clone()?;
        thread::spawn(move || {
            while let Ok((due, bytes)) = queued.recv() {
                thread::sleep(due.saturating_duration_since(Instant::now()));
                if to.write_all(&bytes).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        });
        loop {
            let mut message = vec![0; HEADER_BYTES];
            from.read_exact(&mut message)?;
            let header = Header::decode(&message).map_err(std::io::Error::other)?;
            message.resize(HEADER_BYTES + header.length as usize, 0);
            from.read_exact(&mut message[HEADER_BYTES..])?;
            let damage = self.next_damage(way, &header);
            let cut = matches!(damage, Some(Damage::Cut(_)));
            match damage {
                None => {}
                Some(Damage::Flip(at, bits)) => message[at] ^= bits,
                Some(Damage::Cut(length)) => message.truncate(length),
                Some(Damage::Lose) => message.clear(),
                Some(Damage::Insert(count)) => drop(message.splice(..0, vec![0xa5; count])),
            }
            let delay = if way == Way::Replies { self.delay_ms.load(Ordering::SeqCst) } else { 0 };
            let due = Instant::now() + Duration::from_millis(delay);
            if queue.send((due, message)).is_err() || cut {
                return Ok(());
            }
        }
    }

    fn next_damage(&self, way: Way, header: &Header) -> Option<Damage> {
        let mut fault = self.fault.lock().unwrap();
        let next = fault.take_if(|fault| fault.way == way && (fault.to)(header));
        next.map(|fault| fault.damage)
    }
}
