//! The other side: a client with several connections that share one sequence, as Longhorn's
//! controller has them.
//!
//! Each connection has a thread that receives. Callers send by themselves, so that one that waits
//! for its reply costs two switches of threads: for load in quantity see the load generator.

use dbs_frontend::{Listen, Socket, lock};
use longhorn_wire::frame::{Damaged, HEADER_BYTES, Header, Hello, Type};
use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufReader, Read};
use std::net::Shutdown;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Bytes received at once.
const RECEIVE_BYTES: usize = 64 << 10;

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientError {
    /// The replica says so.
    Replica(String),
    /// A connection is gone, and with it all of this client's requests.
    Lost(String),
    /// The reply did not come in time.
    Timeout,
    /// The reply is none of those the request may have.
    Unexpected(Header),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replica(text) => f.write_str(text),
            Self::Lost(text) => write!(f, "connection lost: {text}"),
            Self::Timeout => f.write_str("no reply in time"),
            Self::Unexpected(header) => write!(f, "unexpected reply {header:?}"),
        }
    }
}

impl std::error::Error for ClientError {}

/// Result with [`ClientError`].
pub type Result<T> = std::result::Result<T, ClientError>;

/// A reply as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Its header.
    pub header: Header,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// A client. Dropping it closes its connections.
pub struct DataClient {
    shared: Arc<Shared>,
    sockets: Vec<Arc<Sending>>,
    readers: Vec<JoinHandle<()>>,
    timeout: Duration,
}

struct Sending {
    socket: Socket,
    /// Messages are sent one at a time.
    turn: Mutex<()>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sequence: u32,
    pending: HashMap<u32, Asked>,
    /// Why nothing works any more.
    lost: Option<String>,
}

/// A request without a reply yet.
struct Asked {
    /// The index of the connection it went over.
    connection: usize,
    reply: mpsc::Sender<Result<Reply>>,
}

impl Shared {
    /// A connection has ended: nothing more can be asked, and its requests stay without replies.
    /// A server that stops answers what the others have asked before it ends them.
    fn lose(&self, connection: usize, why: &str) {
        let mut state = lock(&self.state);
        let lost = state.lost.get_or_insert_with(|| why.to_owned()).clone();
        let gone: Vec<_> =
            state.pending.extract_if(|_, asked| asked.connection == connection).collect();
        drop(state);
        for (_, asked) in gone {
            // An error: nobody waits for it any more.
            let _ = asked.reply.send(Err(ClientError::Lost(lost.clone())));
        }
    }

    /// Takes replies until the connection ends.
    fn receive(&self, mut input: impl Read) -> io::Result<()> {
        loop {
            let mut header = [0; HEADER_BYTES];
            input.read_exact(&mut header)?;
            let header = Header::decode(&header)?;
            let mut payload = vec![0; header.length as usize];
            input.read_exact(&mut payload)?;
            if header.kind() == Some(Type::Close) {
                return Err(io::Error::other("the server closes"));
            }
            // What nobody has asked for is ignored.
            if let Some(asked) = lock(&self.state).pending.remove(&header.sequence) {
                // An error: nobody waits for it any more.
                let _ = asked.reply.send(Ok(Reply { header, payload }));
            }
        }
    }
}

/// A request on its way.
pub struct Pending {
    kind: Type,
    reply: mpsc::Receiver<Result<Reply>>,
    timeout: Duration,
}

impl Pending {
    /// The reply, whatever it is.
    ///
    /// # Errors
    /// There is none.
    pub fn reply(self) -> Result<Reply> {
        match self.reply.recv_timeout(self.timeout) {
            Ok(reply) => reply,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(ClientError::Timeout),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(ClientError::Lost("the client is gone".to_owned()))
            }
        }
    }

    /// The reply if it is one of success.
    ///
    /// # Errors
    /// The replica's error, or there is no reply.
    pub fn wait(self) -> Result<Reply> {
        let read = self.kind == Type::Read;
        let reply = self.reply()?;
        match reply.header.kind() {
            Some(Type::Response) => Ok(reply),
            Some(Type::Eof) if read => Ok(reply),
            Some(Type::Error) => {
                let text = String::from_utf8_lossy(&reply.payload);
                Err(ClientError::Replica(text.into_owned()))
            }
            Some(Type::Damaged) => match Damaged::decode(&reply.payload) {
                Some(damaged) => Err(ClientError::Replica(damaged.text)),
                None => Err(ClientError::Unexpected(reply.header)),
            },
            _ => Err(ClientError::Unexpected(reply.header)),
        }
    }
}

impl DataClient {
    /// Connects so many times.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(address: &Listen, connections: usize) -> io::Result<Self> {
        let sockets = (0..connections.max(1)).map(|_| address.connect());
        Self::over(sockets.collect::<io::Result<_>>()?)
    }

    /// A client on connections that exist.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn over(sockets: Vec<Socket>) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let mut client = Self {
            shared,
            sockets: Vec::new(),
            readers: Vec::new(),
            timeout: Duration::from_secs(60),
        };
        for (connection, socket) in sockets.into_iter().enumerate() {
            socket.tune()?;
            let sending = Arc::new(Sending { socket, turn: Mutex::default() });
            client.sockets.push(Arc::clone(&sending));
            let shared = Arc::clone(&client.shared);
            let reader = thread::Builder::new().name("data-client".into()).spawn(move || {
                let input = BufReader::with_capacity(RECEIVE_BYTES, &sending.socket);
                if let Err(error) = shared.receive(input) {
                    shared.lose(connection, &error.to_string());
                }
            })?;
            client.readers.push(reader);
        }
        Ok(client)
    }

    /// Waits so long for each reply instead of a minute.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sends a request; consecutive ones go over different connections.
    ///
    /// # Errors
    /// A connection is lost.
    pub fn submit(&self, kind: Type, offset: i64, size: u32, payload: &[u8]) -> Result<Pending> {
        let (sender, reply) = mpsc::channel();
        let (sequence, connection) = {
            let mut state = lock(&self.shared.state);
            if let Some(lost) = &state.lost {
                return Err(ClientError::Lost(lost.clone()));
            }
            state.sequence = state.sequence.wrapping_add(1);
            let sequence = state.sequence;
            let connection = sequence as usize % self.sockets.len();
            state.pending.insert(sequence, Asked { connection, reply: sender });
            (sequence, connection)
        };
        let length = payload.len() as u32;
        let header = Header { length, ..Header::new(kind, sequence, offset, size) };
        let message = [&header.encode(), payload].concat();
        let sending = &self.sockets[connection];
        let sent = {
            let _turn = lock(&sending.turn);
            sending.socket.send_all(&message)
        };
        if let Err(error) = sent {
            self.shared.lose(connection, &error.to_string());
        }
        Ok(Pending { kind, reply, timeout: self.timeout })
    }

    /// Reads so many bytes.
    ///
    /// # Errors
    /// Those of the replica and of the connection: the same for all methods below.
    pub fn read(&self, offset: u64, length: u32) -> Result<Vec<u8>> {
        let reply = self.submit(Type::Read, offset as i64, length, &[])?.wait()?;
        if reply.payload.len() != length as usize || reply.header.size != length {
            return Err(ClientError::Unexpected(reply.header));
        }
        Ok(reply.payload)
    }

    /// Writes.
    ///
    /// # Errors
    /// See [`DataClient::read`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let length = data.len() as u32;
        let reply = self.submit(Type::Write, offset as i64, length, data)?.wait()?;
        if reply.header.size == length && reply.payload.is_empty() {
            Ok(())
        } else {
            Err(ClientError::Unexpected(reply.header))
        }
    }

    /// Unmaps; returns the bytes freed.
    ///
    /// # Errors
    /// See [`DataClient::read`].
    pub fn unmap(&self, offset: u64, length: u32) -> Result<u32> {
        Ok(self.submit(Type::Unmap, offset as i64, length, &[])?.wait()?.header.size)
    }

    /// Asks whether the replica is well.
    ///
    /// # Errors
    /// See [`DataClient::read`].
    pub fn ping(&self) -> Result<()> {
        self.submit(Type::Ping, 0, 0, &[])?.wait().map(drop)
    }

    /// Asks whether the server is of DBS, and what it can; `None` if it is another one.
    ///
    /// # Errors
    /// See [`DataClient::read`].
    pub fn hello(&self) -> Result<Option<Hello>> {
        let hello = Hello::of_client().encode();
        let reply = self.submit(Type::Ping, 0, hello.len() as u32, &hello)?.wait()?;
        Ok(Hello::decode(&reply.payload).filter(|hello| hello.server))
    }

    /// Makes all writes that were acknowledged durable; only for a server that
    /// [`DataClient::hello`] knows.
    ///
    /// # Errors
    /// See [`DataClient::read`].
    pub fn flush(&self) -> Result<()> {
        self.submit(Type::Flush, 0, 0, &[])?.wait().map(drop)
    }
}

impl fmt::Debug for DataClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataClient")
            .field("connections", &self.sockets.len())
            .finish_non_exhaustive()
    }
}

impl Drop for DataClient {
    fn drop(&mut self) {
        self.sockets.iter().for_each(|sending| sending.socket.shutdown(Shutdown::Both));
        for reader in self.readers.drain(..) {
            // A panic there has been reported already.
            let _ = reader.join();
        }
    }
}
