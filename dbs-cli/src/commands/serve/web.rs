//! The web page beside a served store.

use crate::context::Context;
use clap::Args;
use dbs_core::{Error, ErrorKind, Result};
use dbs_nbd::TlsConfig;
use dbs_server::serve::Serving;
use dbs_web::{StorePage, Token, WebAddress, WebOptions, WebServer, WebSocket};
use std::fs::File;
use std::io::stdout;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How long to wait for an address that an older server may have still.
const PATIENCE: Duration = Duration::from_secs(6);

/// Where and to whom the page is served.
#[derive(Debug, Args)]
pub struct Web {
    /// Serve a web page that shows the store, its volumes and what they do. With PORT alone it listens on loopback;
    /// another HOST needs TLS (--tls-dir). Whoever has the token is let in. Without --web-admin the page changes nothing
    #[arg(long, value_name = "[HOST:]PORT")]
    web: Option<WebAddress>,
    /// File with the token of the web page. If the file is not there, the server makes it, with mode 0600. Without
    /// a file the server makes another token at each start, and prints it as part of the address
    #[arg(long, value_name = "FILE", requires = "web")]
    web_token: Option<PathBuf>,
    /// Name under which browsers ask for the web page, beside localhost, the HOST of --web and addresses; can be
    /// repeated. Requests for other names are refused
    #[arg(long, value_name = "NAME", requires = "web")]
    web_name: Vec<String>,
    /// Let the web page take snapshots, make clones, roll back, and delete snapshots and volumes
    #[arg(long, requires = "web")]
    web_admin: bool,
}

/// The page, before the store is open.
pub struct Ready {
    socket: WebSocket,
    options: WebOptions,
    /// Of the store.
    path: String,
    /// What is put behind its address for who may have it.
    secret: String,
}

/// Whether the standard output goes to the journal, as that of a service does.
fn tells_the_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let output = stdout().as_fd().try_clone_to_owned().map(File::from);
    let output = output.and_then(|file| file.metadata());
    output.is_ok_and(|output| stream == format!("{}:{}", output.dev(), output.ino()))
}

impl Web {
    /// Listens, and makes or reads the token. What keeps the page from being served, and is not a mistake of who
    /// started the server, does not keep the store from it: it is the inner error.
    ///
    /// # Errors
    /// `Invalid` for a token file that cannot be used, and if nobody would be told the token, or everybody who may
    /// read the journal.
    pub fn ready(self, context: &Context, tls: Option<TlsConfig>) -> Result<Option<Result<Ready>>> {
        let Some(WebAddress(address)) = self.web else { return Ok(None) };
        let token = match &self.web_token {
            Some(file) => Token::from_file(file).map(|token| (token, String::new())),
            None if context.quiet && !context.json => {
                let text =
                    "with --quiet nobody is told the token of the web page: give --web-token FILE";
                return Err(Error::invalid(text));
            }
            None if tells_the_journal() => {
                let text = "the token of the web page would be in the journal: give --web-token FILE, as \
                            /var/lib/dbs/web-token";
                return Err(Error::invalid(text));
            }
            None => Token::random().map(|token| {
                let secret = format!("#{}", token.text());
                (token, secret)
            }),
        };
        let (token, secret) = match token {
            Ok(token) => token,
            Err(error) if error.kind() == ErrorKind::Invalid => return Err(error),
            Err(error) => return Ok(Some(Err(error))),
        };
        let bound = WebSocket::take(&address).map_err(|e| Error::io(e, "serving the web page"));
        let socket = match bound {
            Ok(socket) => socket,
            Err(error) => return Ok(Some(Err(error))),
        };
        let path = context.store()?.display().to_string();
        let names = self.web_name.into_iter().chain([address.host]).collect();
        let options = WebOptions { tls, names, token, admin: self.web_admin, patience: PATIENCE };
        Ok(Some(Ok(Ready { socket, options, path, secret })))
    }
}

/// A page that is served, and the address to open it with.
pub struct Shown {
    /// Dropped before the store is closed.
    pub server: WebServer,
    /// Its address, with the token if nothing else has it.
    pub url: String,
}

/// Serves the page of the store that is served, if it is to be; else it is served no longer.
///
/// # Errors
/// Those of [`WebServer::start`].
pub fn serve(serving: Serving, ready: Option<Result<Ready>>) -> Result<(Serving, Option<Shown>)> {
    let Ready { socket, options, path, secret } = match ready {
        None => return Ok((serving, None)),
        Some(Ok(ready)) => ready,
        Some(Err(error)) => {
            serving.notice(format!("the web page is not served: {error}"));
            return Ok((serving, None));
        }
    };
    let page = Arc::new(StorePage::new(serving.asked(), path));
    match WebServer::start(page, socket, options) {
        Ok(server) => {
            let url = format!("{}{secret}", server.url());
            Ok((serving, Some(Shown { server, url })))
        }
        Err(error) => {
            serving.stop()?;
            Err(error)
        }
    }
}
