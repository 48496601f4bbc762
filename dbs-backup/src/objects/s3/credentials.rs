//! Who signs requests: keys from the environment, or what a cloud gives to a pod or machine.
//!
//! Source: AWS's documentation of web identities (IAM roles for service accounts), container credentials (pod identity)
//! and the instance metadata service, version 2. The names of the variables are those of AWS's own tools.

use super::xml;
use crate::objects::http::{Answer, Http, Variables};
use crate::url::encode;
use dbs_core::{Error, Result};
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use ureq::http::Request;

/// New ones are asked for before the old ones end.
const AHEAD: SignedDuration = SignedDuration::from_secs(300);
/// After a failure they are asked for again as long as the old ones are valid.
const AGAIN: SignedDuration = SignedDuration::from_secs(10);
const LIMIT: u64 = 1 << 20;

/// A key, and for how long it is valid.
#[derive(Clone)]
pub struct Credentials {
    pub access: String,
    pub secret: String,
    pub token: Option<String>,
    pub expires: Option<Timestamp>,
    /// When new ones are to be asked for.
    pub renew: Option<Timestamp>,
}

/// Where credentials come from.
pub struct Provider {
    source: Source,
    http: Http,
    now: Mutex<Option<Credentials>>,
}

enum Source {
    Fixed,
    WebIdentity { role: String, session: String, file: String, endpoint: String },
    Container { url: String, token: Option<String>, token_file: Option<String> },
    Instance { endpoint: String },
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Given {
    access_key_id: String,
    secret_access_key: String,
    #[serde(alias = "SessionToken")]
    token: Option<String>,
    expiration: Option<String>,
}

impl Provider {
    /// From the environment.
    ///
    /// # Errors
    /// `Invalid` if half of a key is missing.
    pub fn new(variable: Variables<'_>, region: &str, stop: &Arc<AtomicBool>) -> Result<Self> {
        let keys = (variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY"));
        let mut now = None;
        let source = match keys {
            (Some(access), Some(secret)) => {
                let token = variable("AWS_SESSION_TOKEN");
                now = Some(Credentials { access, secret, token, expires: None, renew: None });
                Source::Fixed
            }
            (None, Some(_)) => {
                return Err(Error::invalid(
                    "s3 credential access key not found: set AWS_ACCESS_KEY_ID",
                ));
            }
            (Some(_), None) => {
                return Err(Error::invalid(
                    "s3 credential secret access key not found: set AWS_SECRET_ACCESS_KEY",
                ));
            }
            (None, None) => given_source(variable, region),
        };
        // What is beside the machine is not behind a proxy.
        let none = |_: &str| None;
        let (variable, url): (Variables<'_>, _) = match &source {
            Source::WebIdentity { endpoint, .. } => (variable, endpoint.as_str()),
            Source::Container { url, .. } => (&none, url.as_str()),
            _ => (&none, ""),
        };
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let host = rest.split('/').next().unwrap_or_default();
        let certificates = variable("AWS_CERT");
        let http = Http::new(variable, host, scheme == "https", certificates.as_deref(), stop)?;
        Ok(Self { source, http, now: Mutex::new(now) })
    }

    /// Credentials that are valid for a while.
    ///
    /// # Errors
    /// Those of reaching who gives them.
    pub fn get(&self) -> Result<Credentials> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*now
            && known.renew.is_none_or(|renew| Timestamp::now() < renew)
        {
            return Ok(known.clone());
        }
        let given = match (self.ask(), &mut *now) {
            (Ok(given), _) => given,
            // Who gives them may be back before they end.
            (Err(_), Some(known)) if known.expires.is_some_and(|end| Timestamp::now() < end) => {
                known.renew = Timestamp::now().checked_add(AGAIN).ok();
                return Ok(known.clone());
            }
            (Err(error), _) => {
                return Err(error.context(
                    "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give this machine a role",
                ));
            }
        };
        let expires: Option<Timestamp> =
            given.expiration.as_deref().and_then(|text| text.parse().ok());
        let credentials = Credentials {
            access: given.access_key_id,
            secret: given.secret_access_key,
            token: given.token,
            expires,
            // What ended at the beginning of time is asked for anew.
            renew: expires.map(|end| end.checked_sub(AHEAD).unwrap_or(Timestamp::MIN)),
        };
        Ok(now.insert(credentials).clone())
    }

    /// Forgets those that were refused, unless there are no others.
    pub fn forget(&self) -> bool {
        if matches!(self.source, Source::Fixed) {
            return false;
        }
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = None;
        true
    }

    fn ask(&self) -> Result<Given> {
        match &self.source {
            Source::Fixed => Err(Error::invalid("there is only one key")),
            Source::WebIdentity { role, session, file, endpoint } => {
                let token = read(file)?;
                let query = format!(
                    "Action=AssumeRoleWithWebIdentity&RoleArn={}&RoleSessionName={}&Version=2011-06-15&WebIdentityToken={}",
                    encode(role, ""),
                    encode(session, ""),
                    encode(&token, "")
                );
                let url = format!("{endpoint}/?{query}");
                let body = self.request("GET", &url, &[])?;
                let answer: AssumeRoleAnswer = xml::parse(&body, "the answer of STS")?;
                Ok(answer.assume_role_with_web_identity_result.credentials)
            }
            Source::Container { url, token, token_file } => {
                let token = match token_file {
                    Some(file) => Some(read(file)?),
                    None => token.clone(),
                };
                let header = token.iter().map(|token| ("authorization", token.as_str()));
                json(&self.request("GET", url, &header.collect::<Vec<_>>())?)
            }
            Source::Instance { endpoint } => {
                let ttl = [("x-aws-ec2-metadata-token-ttl-seconds", "21600")];
                let token = self.request("PUT", &format!("{endpoint}/latest/api/token"), &ttl)?;
                let header = [("x-aws-ec2-metadata-token", token.trim())];
                let folder = format!("{endpoint}/latest/meta-data/iam/security-credentials/");
                let role = self.request("GET", &folder, &header)?;
                let role = role.lines().next().unwrap_or_default().trim().to_owned();
                json(&self.request("GET", &format!("{folder}{}", encode(&role, "")), &header)?)
            }
        }
    }

    fn request(&self, method: &str, url: &str, headers: &[(&str, &str)]) -> Result<String> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        // The query of a URL can have a secret, and so can what an error says of it.
        let place = url.split('?').next().unwrap_or(url);
        let request = request
            .body(Vec::new())
            .map_err(|_| Error::invalid(format!("{place} is no URL that can be asked")))?;
        let Answer { status, body, .. } = self.http.send(request, LIMIT)?;
        let text = String::from_utf8_lossy(&body).into_owned();
        if status == 200 {
            return Ok(text);
        }
        Err(Error::invalid(format!("{place} answers {status}: {:.300}", xml::error_text(&text))))
    }
}

/// What there is if the environment has no keys.
fn given_source(variable: Variables<'_>, region: &str) -> Source {
    if let (Some(file), Some(role)) =
        (variable("AWS_WEB_IDENTITY_TOKEN_FILE"), variable("AWS_ROLE_ARN"))
    {
        let session = variable("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| "dbs".to_owned());
        let endpoint = variable("AWS_ENDPOINT_URL_STS")
            .unwrap_or_else(|| format!("https://sts.{region}.{}", super::domain(region)));
        return Source::WebIdentity { role, session, file, endpoint };
    }
    let url = variable("AWS_CONTAINER_CREDENTIALS_FULL_URI").or_else(|| {
        let path = variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")?;
        Some(format!("http://169.254.170.2{path}"))
    });
    if let Some(url) = url {
        return Source::Container {
            url,
            token: variable("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
            token_file: variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
        };
    }
    let endpoint = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    Source::Instance { endpoint: endpoint.unwrap_or_else(|| "http://169.254.169.254".to_owned()) }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AssumeRoleAnswer {
    assume_role_with_web_identity_result: AssumeRoleResult,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AssumeRoleResult {
    credentials: Given,
}

fn read(file: &str) -> Result<String> {
    let text =
        std::fs::read_to_string(file).map_err(|e| Error::io(e, format!("reading {file}")))?;
    Ok(text.trim().to_owned())
}

fn json(text: &str) -> Result<Given> {
    serde_json::from_str(text)
        .map_err(|e| Error::invalid(format!("credentials that cannot be understood: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    const KEYS: &str = r#"{"AccessKeyId":"a","SecretAccessKey":"s","Token":"t","Expiration":"2040-01-01T00:00:00Z"}"#;

    /// Answers requests in order; what was asked comes back as lines.
    fn serve(answers: Vec<String>) -> (String, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let mut asked = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut text = String::new();
                for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                    let line = line.unwrap();
                    if line.is_empty() {
                        break;
                    }
                    text += &(line + "\n");
                }
                asked.push(text.to_ascii_lowercase());
                let length = answer.len();
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
                );
                stream.write_all((head + &answer).as_bytes()).unwrap();
            }
            asked
        });
        (address, server)
    }

    fn provider(variables: &[(&str, String)]) -> Provider {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
        };
        Provider::new(&variable, "eu-west-1", &Arc::new(AtomicBool::new(false))).unwrap()
    }

    #[test]
    fn the_role_of_a_machine() {
        let (address, server) = serve(vec!["token".into(), "role\n".into(), KEYS.into()]);
        let provider = provider(&[("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)]);
        let given = provider.get().unwrap();
        assert_eq!((&*given.access, given.token.as_deref()), ("a", Some("t")));
        // Known until they end.
        assert_eq!(provider.get().unwrap().secret, "s");
        let asked = server.join().unwrap();
        assert!(asked[0].starts_with("put /latest/api/token"));
        assert!(asked[2].starts_with("get /latest/meta-data/iam/security-credentials/role"));
        assert!(asked[2].contains("x-aws-ec2-metadata-token: token"));
    }

    #[test]
    fn a_web_identity_and_a_container() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "jwt+/\n").unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        let xml = "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>\
                   <AccessKeyId>a</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>\
                   <Expiration>2040-01-01T00:00:00Z</Expiration></Credentials>\
                   </AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>";
        let (address, server) = serve(vec![xml.to_owned()]);
        let identity = provider(&[
            ("AWS_WEB_IDENTITY_TOKEN_FILE", path.clone()),
            ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r".to_owned()),
            ("AWS_ENDPOINT_URL_STS", address),
        ]);
        assert_eq!(identity.get().unwrap().token.as_deref(), Some("t"));
        assert!(server.join().unwrap()[0].contains("webidentitytoken=jwt%2b%2f"));
        let (address, server) = serve(vec![KEYS.to_owned()]);
        let container = provider(&[
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("{address}/v1")),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", path),
        ]);
        assert_eq!(container.get().unwrap().access, "a");
        assert!(server.join().unwrap()[0].contains("authorization: jwt+/"));
    }

    /// Credentials end by the clock of who gives them, which may say anything.
    #[test]
    fn the_end_of_credentials() {
        let given = |end: &str| KEYS.replace("2040-01-01T00:00:00Z", end);
        let soon = Timestamp::now() + SignedDuration::from_secs(100);
        for (end, asked, valid) in [
            ("-009999-01-02T01:59:59Z", 2, false),
            ("9999-12-30T22:00:00Z", 1, true),
            // They are to be renewed: whoever gives them is away by now.
            (&*soon.to_string(), 1, true),
            ("2020-01-01T00:00:00Z", 1, false),
        ] {
            let (address, server) = serve(vec![given(end); asked]);
            let provider = provider(&[("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)]);
            assert_eq!(provider.get().unwrap().access, "a", "{end}");
            let second = provider.get();
            assert_eq!(second.is_ok(), valid || asked == 2, "{end}");
            server.join().unwrap();
        }
    }

    #[test]
    fn secrets_are_not_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "secret").unwrap();
        for endpoint in ["sts.example.com", "http://ho st", "http://127.0.0.1:1", "nothing://x", ""]
        {
            let identity = provider(&[
                ("AWS_WEB_IDENTITY_TOKEN_FILE", file.path().to_str().unwrap().to_owned()),
                ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r".to_owned()),
                ("AWS_ENDPOINT_URL_STS", endpoint.to_owned()),
            ]);
            let error = identity.get().map(drop).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    /// STS is reached as S3 is: past a proxy that is not for it, and by certificates of the user.
    #[test]
    fn the_way_to_sts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let variables = |no_proxy: &str| {
            vec![
                ("AWS_WEB_IDENTITY_TOKEN_FILE", file.path().to_str().unwrap().to_owned()),
                ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r".to_owned()),
                ("AWS_ENDPOINT_URL_STS", "https://sts.inner:1/".to_owned()),
                ("HTTPS_PROXY", "no proxy".to_owned()),
                ("NO_PROXY", no_proxy.to_owned()),
            ]
        };
        let open = |variables: &[(&str, String)]| {
            let variable = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
            };
            Provider::new(&variable, "eu-west-1", &Arc::default()).map(drop)
        };
        assert!(open(&variables("")).is_err(), "the proxy is none");
        open(&variables("sts.inner")).unwrap();
        let mut both = variables("sts.inner");
        both.push(("AWS_CERT", "no certificate".to_owned()));
        assert!(open(&both).is_err(), "the certificate is looked at");
    }
}
