//! One connection in its handshake, on a thread of its own.

use super::handshake::{Handshake, Step, TlsState};
use super::input::Input;
use super::options::ServerOptions;
use super::session::Session;
use super::wire::option::OptionHeader;
use super::wire::{self, Malformed, OPTION_MAX_BYTES};
use dbs_frontend::Socket;
use dbs_frontend::tls::TlsStream;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest data of an option that is skipped rather than taken for an attack.
const OPTION_SKIP_MAX_BYTES: u32 = 16 << 20;

/// A connection before and during its handshake.
pub(crate) struct Connection {
    socket: Arc<Socket>,
    input: Input,
}

impl Connection {
    pub fn new(socket: Arc<Socket>) -> Self {
        Self { input: Input::new(socket.clone()), socket }
    }

    /// How TLS stands at its start.
    pub fn initial_tls(&self, options: &ServerOptions, trusted: bool) -> TlsState {
        let covers = options.tls.as_ref().is_some_and(|tls| tls.covers(&self.socket));
        if covers && !trusted { TlsState::Required } else { TlsState::Off }
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
        self.socket.set_write_timeout(Some(timeout))?;
        self.input.set_deadline(Some(Instant::now() + timeout))?;
        self.send(wire::greeting().to_vec())?;
        let mut flags = [0; 4];
        self.input.read_exact(&mut flags)?;
        handshake.client_flags(u32::from_be_bytes(flags))?;
        loop {
            // Each option has its own time: a client may list thousands of exports. A stranger has
            // one for all, to the end of the handshake of TLS.
            if !handshake.awaits_tls() {
                self.input.set_deadline(Some(Instant::now() + timeout))?;
            }
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
        self.input.tls = Some(TlsStream::server(config)?);
        while self.input.tls.as_ref().is_some_and(TlsStream::is_handshaking) {
            let fed = self.input.feed_tls();
            let answered = self.send(Vec::new());
            fed?;
            answered?;
        }
        Ok(())
    }

    fn send(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        match &mut self.input.tls {
            Some(tls) => self.socket.send_all(&tls.seal(std::iter::once(bytes.as_slice()))?),
            None => self.socket.send_all(&bytes),
        }
    }

    /// What the transmission phase begins with: the socket, TLS, and bytes received already.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn into_parts(self) -> io::Result<(Socket, Option<TlsStream>, Vec<u8>)> {
        self.socket.set_read_timeout(None)?;
        let (tls, received) = self.input.into_parts();
        let socket = Arc::into_inner(self.socket);
        let socket = socket.ok_or_else(|| io::Error::other("the connection is being closed"))?;
        Ok((socket, tls, received))
    }
}
