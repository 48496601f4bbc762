//! The handshake without threads or sockets: fixed newstyle option haggling as a state machine.

use super::export::{Export, Exports, Peer};
use super::session::Session;
use super::wire::option::{InfoRequest, MetaRequest, OptionReplies};
use super::wire::request::Style;
use super::wire::{
    CONTEXTS_MAX, Cursor, Malformed, STRING_MAX_BYTES, handshake_flag, info, opt, rep,
};
use std::sync::Arc;

/// Bytes of padding after the answer to `EXPORT_NAME`, for clients that do not decline them.
const PADDING_BYTES: usize = 124;

/// Where a connection stands with TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsState {
    /// Not offered.
    Off,
    /// Nothing else is answered until it is started.
    Required,
    /// Started.
    Active,
}

/// What to do after an option, once the output is sent.
pub enum Step {
    /// Read the next option.
    Continue,
    /// Begin TLS; then call [`Handshake::tls_started`].
    StartTls,
    /// Enter the transmission phase.
    Transmit(Session),
    /// Close the connection.
    Close,
}

/// The state of one handshake.
pub struct Handshake {
    exports: Arc<dyn Exports>,
    peer: Peer,
    tls: TlsState,
    refusal: Option<(u32, String)>,
    no_zeroes: bool,
    style: Style,
    /// Export they were selected for, and what it calls them; the id is the index.
    contexts: Option<(String, Vec<String>)>,
}

impl Handshake {
    /// A handshake at its start.
    #[must_use]
    pub fn new(exports: Arc<dyn Exports>, tls: TlsState) -> Self {
        let (peer, style) = (Peer::default(), Style::default());
        Self { exports, peer, tls, refusal: None, no_zeroes: false, style, contexts: None }
    }

    /// The same with a client of whom something is known.
    #[must_use]
    pub fn of(self, peer: Peer) -> Self {
        Self { peer, ..self }
    }

    /// Answers every option with this error and text from now on.
    pub fn refuse(&mut self, kind: u32, message: impl Into<String>) {
        self.refusal = Some((kind, message.into()));
    }

    /// Takes the client's flags, the answer to the greeting.
    ///
    /// # Errors
    /// Unknown flags: the connection must be closed.
    pub fn client_flags(&mut self, flags: u32) -> Result<(), Malformed> {
        let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        if flags & !u32::from(known) != 0 {
            return Err(Malformed("unknown handshake flags"));
        }
        self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
        Ok(())
    }

    /// Whether nobody knows yet who the client is, and TLS is to tell.
    #[must_use]
    pub fn awaits_tls(&self) -> bool {
        self.tls == TlsState::Required
    }

    /// TLS is in place; what was negotiated before it is forgotten.
    pub fn tls_started(&mut self) {
        self.tls = TlsState::Active;
        self.style = Style::Simple;
        self.contexts = None;
    }

    /// Answers an option too long to look at; its data has been skipped.
    pub fn option_too_big(&self, option: u32, out: &mut Vec<u8>) -> Step {
        if option == opt::EXPORT_NAME {
            return Step::Close;
        }
        OptionReplies::new(option, out).error(rep::ERR_TOO_BIG, "option data too long");
        Step::Continue
    }

    /// Answers one option, appending to `out`.
    pub fn option(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        let mut replies = OptionReplies::new(option, out);
        if option == opt::ABORT {
            replies.ack();
            return Step::Close;
        }
        if let Some((kind, message)) = self.blocked(option) {
            // EXPORT_NAME has no way to carry an error.
            if option == opt::EXPORT_NAME {
                return Step::Close;
            }
            replies.error(kind, &message);
            return Step::Continue;
        }
        match option {
            opt::EXPORT_NAME => return self.export_name(data, out),
            opt::INFO | opt::GO => return self.describe(option == opt::GO, data, &mut replies),
            opt::STARTTLS => return self.start_tls(data, &mut replies),
            opt::LIST => self.list(data, &mut replies),
            opt::STRUCTURED_REPLY => self.upgrade(Style::Structured, data, &mut replies),
            opt::EXTENDED_HEADERS => self.upgrade(Style::Extended, data, &mut replies),
            opt::LIST_META_CONTEXT => self.list_contexts(data, &mut replies),
            opt::SET_META_CONTEXT => self.set_contexts(data, &mut replies),
            _ => replies.error(rep::ERR_UNSUP, &format!("option {option} is not known here")),
        }
        Step::Continue
    }

    fn blocked(&self, option: u32) -> Option<(u32, String)> {
        if self.refusal.is_some() {
            return self.refusal.clone();
        }
        let needs_tls = self.tls == TlsState::Required && option != opt::STARTTLS;
        needs_tls.then(|| (rep::ERR_TLS_REQD, "this server wants TLS first".to_owned()))
    }

    fn start_tls(&mut self, data: &[u8], replies: &mut OptionReplies<'_>) -> Step {
        match self.tls {
            _ if !data.is_empty() => replies.error(rep::ERR_INVALID, "STARTTLS takes no data"),
            TlsState::Off => replies.error(rep::ERR_POLICY, "this server is set up without TLS"),
            TlsState::Active => replies.error(rep::ERR_INVALID, "TLS is active already"),
            TlsState::Required => {
                replies.ack();
                return Step::StartTls;
            }
        }
        Step::Continue
    }

    fn export_name(&mut self, data: &[u8], out: &mut Vec<u8>) -> Step {
        // Clients with extended headers must use GO.
        let name = Cursor::new(data).string(data.len());
        let (Ok(name), false) = (name, self.style == Style::Extended) else { return Step::Close };
        let Ok(export) = self.exports.open(&name, &self.peer) else { return Step::Close };
        let session = self.session(&name, export);
        out.extend(session.size().to_be_bytes());
        out.extend(session.transmission_flags().to_be_bytes());
        if !self.no_zeroes {
            out.resize(out.len() + PADDING_BYTES, 0);
        }
        Step::Transmit(session)
    }

    fn describe(&mut self, go: bool, data: &[u8], replies: &mut OptionReplies<'_>) -> Step {
        let request = match InfoRequest::decode(data) {
            Ok(request) => request,
            Err(malformed) => {
                replies.error(rep::ERR_INVALID, malformed.0);
                return Step::Continue;
            }
        };
        let Some(export) = self.open(&request.name, replies) else { return Step::Continue };
        let session = self.session(&request.name, export.clone());
        replies.export(session.size(), session.transmission_flags());
        // Always told, as the minimum is not the protocol's default of 1.
        let sizes = export.block_sizes();
        replies.block_size([sizes.minimum, sizes.preferred, sizes.maximum]);
        if request.wanted.contains(&info::NAME) {
            replies.text(info::NAME, &export.name());
        }
        if request.wanted.contains(&info::DESCRIPTION) {
            replies.text(info::DESCRIPTION, &export.description());
        }
        replies.ack();
        if go { Step::Transmit(session) } else { Step::Continue }
    }

    fn list(&self, data: &[u8], replies: &mut OptionReplies<'_>) {
        if !data.is_empty() {
            return replies.error(rep::ERR_INVALID, "LIST takes no data");
        }
        for (name, description) in self.exports.list(&self.peer) {
            if name.len() <= STRING_MAX_BYTES {
                replies.server(&name, &description);
            }
        }
        replies.ack();
    }

    fn upgrade(&mut self, style: Style, data: &[u8], replies: &mut OptionReplies<'_>) {
        if !data.is_empty() {
            return replies.error(rep::ERR_INVALID, "this option takes no data");
        }
        if self.style == Style::Extended && style == Style::Structured {
            return replies.error(rep::ERR_EXT_HEADER_REQD, "extended headers are in force");
        }
        self.style = style;
        replies.ack();
    }

    fn list_contexts(&self, data: &[u8], replies: &mut OptionReplies<'_>) {
        let Some((request, export)) = self.meta_request(data, replies) else { return };
        let mut names = Vec::new();
        if request.queries.is_empty() {
            names = export.contexts("");
        }
        for query in &request.queries {
            let wildcard = query.ends_with(':');
            let found = export.contexts(query);
            names.extend(found.into_iter().filter(|name| wildcard || name == query));
        }
        names.sort();
        names.dedup();
        for name in names.iter().filter(|name| name.len() <= STRING_MAX_BYTES) {
            replies.meta_context(0, name);
        }
        replies.ack();
    }

    fn set_contexts(&mut self, data: &[u8], replies: &mut OptionReplies<'_>) {
        // Whatever happens now, an earlier selection is over.
        self.contexts = None;
        let Some((request, export)) = self.meta_request(data, replies) else { return };
        let mut selected: Vec<String> = Vec::new();
        for query in request.queries {
            let Some(context) = export.select(&query) else { continue };
            if !selected.contains(&context) {
                replies.meta_context(selected.len() as u32, &query);
                selected.push(context);
            }
        }
        replies.ack();
        self.contexts = Some((request.name, selected));
    }

    fn meta_request(
        &self,
        data: &[u8],
        replies: &mut OptionReplies<'_>,
    ) -> Option<(MetaRequest, Arc<dyn Export>)> {
        if !self.style.chunked() {
            replies.error(rep::ERR_INVALID, "ask for structured replies first");
            return None;
        }
        match MetaRequest::decode(data) {
            Err(malformed) => replies.error(rep::ERR_INVALID, malformed.0),
            Ok(request) if request.queries.len() > CONTEXTS_MAX => {
                replies.error(rep::ERR_TOO_BIG, &format!("more than {CONTEXTS_MAX} queries"));
            }
            Ok(request) => {
                let export = self.open(&request.name, replies)?;
                return Some((request, export));
            }
        }
        None
    }

    fn open(&self, name: &str, replies: &mut OptionReplies<'_>) -> Option<Arc<dyn Export>> {
        match self.exports.open(name, &self.peer) {
            Ok(export) => Some(export),
            Err(failure) => {
                replies.error(rep::ERR_UNKNOWN, &failure.message);
                None
            }
        }
    }

    fn session(&self, name: &str, export: Arc<dyn Export>) -> Session {
        let contexts = match &self.contexts {
            Some((selected_for, contexts)) if selected_for == name => contexts.clone(),
            _ => Vec::new(),
        };
        Session::new(export, self.style, contexts)
    }
}
