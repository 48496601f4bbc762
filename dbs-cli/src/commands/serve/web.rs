//! The web page beside a served store.

use crate::context::Context;
use clap::Args;
use dbs_core::{Error, Result};
use dbs_nbd::TlsConfig;
use dbs_server::serve::Serving;
use dbs_web::{Token, WebAddress, WebOptions, WebServer};
use std::net::TcpListener;
use std::path::PathBuf;

/// Where and to whom the page is served.
#[derive(Debug, Args)]
pub struct Web {
    /// Serve a web page that shows the store, its volumes and what they do. With PORT alone it listens on loopback;
    /// another HOST needs TLS (--tls-dir). Who has the token is let in. The page changes nothing, unless --web-admin
    #[arg(long, value_name = "[HOST:]PORT")]
    web: Option<WebAddress>,
    /// File with the token of the web page. If it is not there it is made, with mode 0600. By default the
    /// token is another one each time, and part of the address that the command prints
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
    listener: TcpListener,
    options: WebOptions,
    /// What is put behind its address for who may have it.
    secret: String,
}

impl Web {
    /// Listens, and makes or reads the token.
    ///
    /// # Errors
    /// `Invalid` for a token file that cannot be used, `Usage` if nobody would be told the token; `Io`.
    pub fn ready(self, context: &Context, tls: Option<TlsConfig>) -> Result<Option<Ready>> {
        let Some(WebAddress(address)) = self.web else { return Ok(None) };
        let (token, secret) = match &self.web_token {
            Some(file) => (Token::from_file(file)?, String::new()),
            None if context.quiet && !context.json => {
                let text =
                    "with --quiet nobody is told the token of the web page: give --web-token FILE";
                return Err(Error::invalid(text));
            }
            None => {
                let token = Token::random()?;
                let secret = format!("#{}", token.text());
                (token, secret)
            }
        };
        let listener = address.bind().map_err(|e| Error::io(e, "serving the web page"))?;
        let names = self.web_name.into_iter().chain([address.host]).collect();
        let options = WebOptions { tls, names, token, admin: self.web_admin };
        Ok(Some(Ready { listener, options, secret }))
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
pub fn serve(serving: Serving, ready: Option<Ready>) -> Result<(Serving, Option<Shown>)> {
    let Some(Ready { listener, options, secret }) = ready else { return Ok((serving, None)) };
    match WebServer::start(serving.asked(), listener, options) {
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
