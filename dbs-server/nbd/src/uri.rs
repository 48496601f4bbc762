//! Addresses of exports, as other NBD tools write them.

use super::client::Secure;
use dbs_frontend::Listen;
use dbs_frontend::tls::TlsClient;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Port of a URI that names none.
const PORT: u16 = 10809;

/// `nbd://HOST[:PORT]/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`; with TLS `nbds`, and
/// `tls-certificates=DIRECTORY` behind the `?`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri {
    /// Where the server listens.
    pub address: Listen,
    /// The export; empty for the server's default.
    pub export: String,
    /// With TLS, and the certificates in this directory.
    pub certificates: Option<PathBuf>,
}

impl NbdUri {
    /// Connects, with TLS if asked for. Both directions then give up after `timeout` without progress.
    ///
    /// # Errors
    /// Those of the system; certificates that cannot be used, or do not satisfy one side.
    pub fn connect(&self, timeout: Duration) -> io::Result<Box<dyn ReadWrite>> {
        if let Some(certificates) = &self.certificates {
            let tls = TlsClient::load_dir(certificates)?;
            let socket = self.address.connect()?;
            socket.set_read_timeout(Some(timeout))?;
            socket.set_write_timeout(Some(timeout))?;
            let name = match &self.address {
                Listen::Tcp(host, _) => host,
                // As libnbd has it.
                Listen::Unix(_) => "localhost",
            };
            return Ok(Box::new(Secure::start(socket, &tls, name)?));
        }
        match &self.address {
            Listen::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                Ok(Box::new(stream))
            }
            Listen::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port))?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                Ok(Box::new(stream))
            }
        }
    }
}

/// A stream of either kind.
pub trait ReadWrite: Read + Write + Send {}

impl<S: Read + Write + Send> ReadWrite for S {}

impl FromStr for NbdUri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is no NBD address; write nbd://HOST[:PORT]/EXPORT or \
                 nbd+unix:///EXPORT?socket=PATH"
            )
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(wrong)?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(export).ok_or_else(wrong)?;
        let of = |key| query.split('&').find_map(|pair| pair.strip_prefix(key));
        let (socket, certificates) = (of("socket="), of("tls-certificates="));
        let (scheme, certificates) = match (scheme.strip_prefix("nbds"), certificates) {
            (Some(rest), Some(path)) => {
                (format!("nbd{rest}"), Some(decode(path).ok_or_else(wrong)?))
            }
            (Some(_), None) => {
                return Err(format!(
                    "`{text}` asks for TLS: say where the certificates are, with \
                     ?tls-certificates=DIRECTORY"
                ));
            }
            (None, Some(_)) if scheme.starts_with("nbd") => {
                // Whoever names certificates does not want to go without TLS.
                return Err(format!(
                    "`{text}` names certificates, but is without TLS: write nbds://"
                ));
            }
            (None, _) => (scheme.to_owned(), None),
        };
        let address = match (scheme.as_str(), host, socket) {
            ("nbd+unix", "", Some(path)) => Listen::Unix(decode(path).ok_or_else(wrong)?.into()),
            ("nbd", host, None) => tcp(host).ok_or_else(wrong)?,
            _ => return Err(wrong()),
        };
        Ok(Self { address, export, certificates: certificates.map(PathBuf::from) })
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Where the certificates are is nobody's concern who reads a report.
        let scheme = if self.certificates.is_some() { "nbds" } else { "nbd" };
        match &self.address {
            Listen::Unix(path) => {
                write!(f, "{scheme}+unix:///{}?socket={}", self.export, path.display())
            }
            Listen::Tcp(host, port) if host.contains(':') => {
                write!(f, "{scheme}://[{host}]:{port}/{}", self.export)
            }
            Listen::Tcp(host, port) => write!(f, "{scheme}://{host}:{port}/{}", self.export),
        }
    }
}

/// `HOST`, `HOST:PORT`, `[V6]` or `[V6]:PORT`.
fn tcp(text: &str) -> Option<Listen> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = port.map_or(Ok(PORT), str::parse).ok()?;
    (!host.is_empty()).then(|| Listen::Tcp(host.to_owned(), port))
}

/// Undoes `%41`.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        // `from_str_radix` takes a sign, too.
        let digits = std::str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris() {
        let tcp = |host: &str, port| Listen::Tcp(host.to_owned(), port);
        for (text, address, export) in [
            ("nbd://host/a", tcp("host", 10809), "a"),
            ("nbd://host:1/a%40b", tcp("host", 1), "a@b"),
            ("nbd://host", tcp("host", 10809), ""),
            ("nbd://[::1]:7/a/b", tcp("::1", 7), "a/b"),
            ("nbd://[::1]/", tcp("::1", 10809), ""),
            ("nbd+unix:///a@s?socket=/run/x%20y", Listen::Unix("/run/x y".into()), "a@s"),
            ("nbd+unix://?x=1&socket=rel", Listen::Unix("rel".into()), ""),
        ] {
            let uri: NbdUri = text.parse().unwrap();
            assert_eq!((&uri.address, uri.export.as_str()), (&address, export), "{text}");
        }
        let secure: NbdUri = "nbds://host/a?tls-certificates=/etc/p%20ki".parse().unwrap();
        assert_eq!(secure.certificates, Some("/etc/p ki".into()));
        assert_eq!(
            (&secure.address, secure.to_string().as_str()),
            (&tcp("host", 10809), "nbds://host:10809/a")
        );
        for text in [
            "",
            "nbd:",
            "nbd://",
            "nbd:///a",
            "nbd://host:x/a",
            "nbd://[::1/a",
            "nbd+unix:///a",
            "nbd+unix://host/a?socket=b",
            "http://host/a",
            "nbds://host/a",
            "nbd://host/a?tls-certificates=/etc/pki",
            "nbd+unix:///a?socket=b&tls-certificates=/etc/pki",
            "nbd://host/%4",
            "nbd://host/%zz",
            "nbd://host/%+f",
            "nbd://host/%ff",
            "nbd://host/a?socket=b",
        ] {
            assert!(text.parse::<NbdUri>().is_err(), "{text}");
        }
        let text = "nbd+unix:///a?socket=b";
        assert_eq!(text.parse::<NbdUri>().unwrap().to_string(), text);
    }
}
