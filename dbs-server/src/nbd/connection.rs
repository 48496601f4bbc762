//! One connection in its reader thread: the handshake, then requests handed to the workers.

use super::handshake::{Handshake, Step, TlsState};
use super::outbox::{Limits, Outbox};
use super::server::{ServerOptions, Shared};
use super::session::{Admitted, Reply, Session};
use super::socket::{Input, Socket};
use super::tls::TlsStream;
use super::wire::option::OptionHeader;
use super::wire::request::Request;
use super::wire::{self, Malformed, OPTION_MAX_BYTES, PAYLOAD_MAX_BYTES, cmd};
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest data of an option that is skipped rather than taken for an attack.
const OPTION_SKIP_MAX_BYTES: u32 = 16 << 20;
/// Longest payload of a refused request that is skipped, likewise.
const PAYLOAD_SKIP_MAX_BYTES: u64 = 2 * PAYLOAD_MAX_BYTES as u64;

/// A connection before and during its handshake.
pub(crate) struct Connection {
    socket: Arc<Socket>,
    input: Input,
    tls: Option<Arc<TlsStream>>,
}

impl Connection {
    pub fn new(socket: Arc<Socket>) -> Self {
        Self { input: Input::new(socket.clone()), socket, tls: None }
    }

    /// The handshake. `None` if the client ended it, or was refused: nothing more is to be done.
    ///
    /// # Errors
    /// The client is gone, silent for too long, or does not speak the protocol.
    pub fn negotiate(
        &mut self,
        mut handshake: Handshake,
        timeout: Duration,
        options: &ServerOptions,
    ) -> io::Result<Option<Session>> {
        self.socket.set_write_timeout(timeout)?;
        self.input.set_deadline(Some(Instant::now() + timeout))?;
        self.send(wire::greeting().to_vec())?;
        let mut flags = [0; 4];
        self.input.read_exact(&mut flags)?;
        handshake.client_flags(u32::from_be_bytes(flags))?;
        loop {
            // Each option has its own time: a client may list thousands of exports.
            self.input.set_deadline(Some(Instant::now() + timeout))?;
            let mut out = Vec::new();
            let step = self.option(&mut handshake, &mut out)?;
            let sent = self.send(out);
            match step {
                Step::Continue => sent?,
                Step::Close => return Ok(None),
                Step::StartTls => {
                    sent?;
                    self.start_tls(options)?;
                    handshake.tls_started();
                }
                Step::Transmit(session) => {
                    sent?;
                    return Ok(Some(session));
                }
            }
        }
    }

    fn option(&mut self, handshake: &mut Handshake, out: &mut Vec<u8>) -> io::Result<Step> {
        let mut header = [0; OptionHeader::BYTES];
        self.input.read_exact(&mut header)?;
        let header = OptionHeader::decode(&header)?;
        if header.length > OPTION_SKIP_MAX_BYTES {
            return Err(Malformed("option data of an absurd length").into());
        }
        if header.length > OPTION_MAX_BYTES {
            self.input.skip(u64::from(header.length))?;
            return Ok(handshake.option_too_big(header.option, out));
        }
        let mut data = vec![0; header.length as usize];
        self.input.read_exact(&mut data)?;
        Ok(handshake.option(header.option, &data, out))
    }

    fn start_tls(&mut self, options: &ServerOptions) -> io::Result<()> {
        let config = options.tls.as_ref().ok_or(Malformed("TLS without a certificate"))?;
        if self.input.has_buffered() {
            // Plain bytes after STARTTLS could be an attacker's, to be taken for the client's.
            return Err(Malformed("data after STARTTLS, before its answer").into());
        }
        let tls = Arc::new(TlsStream::new(config)?);
        self.input.start_tls(tls.clone());
        while tls.is_handshaking() {
            let fed = self.input.feed_tls();
            let answered = self.socket.send_all(tls.seal(&[])?);
            fed?;
            answered?;
        }
        self.tls = Some(tls);
        Ok(())
    }

    fn send(&self, bytes: Vec<u8>) -> io::Result<()> {
        match &self.tls {
            Some(tls) => self.socket.send_all(tls.seal(&[bytes])?),
            None => self.socket.send_all(bytes),
        }
    }

    /// The transmission phase: until the client disconnects or the server stops, and everything
    /// in flight is answered.
    ///
    /// # Errors
    /// The client does not speak the protocol. A client that goes away is no error.
    pub fn transmit(mut self, session: Session, shared: &Shared) -> io::Result<()> {
        let options = &shared.options;
        self.socket.set_write_timeout(options.write_timeout)?;
        self.input.set_deadline(None)?;
        let limits = Limits { requests: options.requests_max, bytes: options.bytes_max };
        let outbox = Arc::new(Outbox::new(self.socket.clone(), self.tls.clone(), limits));
        let session = Arc::new(session);
        let mut result = Ok(true);
        while matches!(result, Ok(true)) && !shared.is_stopping() {
            result = self.request(&session, &outbox, shared);
        }
        outbox.finish();
        match result {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(error),
            _ => Ok(()),
        }
    }

    /// Receives one request and hands it to a worker; `false` if it was the last.
    fn request(
        &mut self,
        session: &Arc<Session>,
        outbox: &Arc<Outbox>,
        shared: &Shared,
    ) -> io::Result<bool> {
        let mut header = [0; Request::EXTENDED_BYTES];
        let header = &mut header[..session.style().request_bytes()];
        self.input.read_exact(header)?;
        let request = Request::decode(session.style(), header)?;
        if request.command == cmd::DISC {
            return Ok(false);
        }
        let admitted = session.admit(&request);
        if admitted.skip_bytes > PAYLOAD_SKIP_MAX_BYTES {
            return Err(Malformed("payload of an absurd length").into());
        }
        self.input.skip(admitted.skip_bytes)?;
        let cost = admitted.cost_bytes;
        if !outbox.reserve(cost) {
            return Ok(false);
        }
        let mut payload = vec![0; admitted.payload_bytes];
        if let Err(error) = self.input.read_exact(&mut payload) {
            // Half a write is no write.
            outbox.cancel(cost);
            return Err(error);
        }
        outbox.kick();
        let (session, outbox) = (session.clone(), outbox.clone());
        shared.pool.submit(move || outbox.send(run(&session, &admitted, &payload), cost));
        Ok(true)
    }
}

/// Runs a request so that a bug in an export costs one reply, not a worker.
fn run(session: &Session, admitted: &Admitted, payload: &[u8]) -> Reply {
    catch_unwind(AssertUnwindSafe(|| session.run(admitted, payload)))
        .unwrap_or_else(|_| Reply::internal_error(admitted))
}

/// How TLS stands at the start of a connection.
pub(crate) fn initial_tls(options: &ServerOptions, trusted: bool) -> TlsState {
    if options.tls.is_some() && !trusted { TlsState::Required } else { TlsState::Off }
}
