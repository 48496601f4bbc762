//! Signatures of requests: AWS Signature Version 4.
//!
//! Source: AWS, *Signature Version 4 signing process*, with its published example as the test.

use super::credentials::Credentials;
use crate::names::hex;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use ring::{digest, hmac};

/// What of a request is signed.
pub struct Signed<'a> {
    /// `GET` and others.
    pub method: &'a str,
    /// The path, encoded.
    pub path: &'a str,
    /// The query, encoded and sorted.
    pub query: &'a str,
    /// Host, with the port if it is another than the usual.
    pub host: &'a str,
    /// The SHA-256 of the body.
    pub body: &'a str,
    /// Region.
    pub region: &'a str,
    /// When.
    pub time: Timestamp,
}

/// The hexadecimal SHA-256.
pub fn sha256(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

/// The headers that sign a request.
pub fn headers(request: &Signed<'_>, credentials: &Credentials) -> Vec<(&'static str, String)> {
    let time = request.time.to_zoned(TimeZone::UTC);
    let (date, stamp) =
        (time.strftime("%Y%m%d").to_string(), time.strftime("%Y%m%dT%H%M%SZ").to_string());
    // In the order of their names.
    let mut signed = vec![
        ("host", request.host.to_owned()),
        ("x-amz-content-sha256", request.body.to_owned()),
        ("x-amz-date", stamp.clone()),
    ];
    signed.extend(credentials.token.clone().map(|token| ("x-amz-security-token", token)));
    let names: Vec<_> = signed.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let lines: String = signed.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    let Signed { method, path, query, body, region, .. } = request;
    let canonical = format!("{method}\n{path}\n{query}\n{lines}\n{names}\n{body}");
    let scope = format!("{date}/{region}/s3/aws4_request");
    let text = format!("AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{}", sha256(canonical.as_bytes()));
    let mut key = format!("AWS4{}", credentials.secret).into_bytes();
    for part in [&*date, *region, "s3", "aws4_request"] {
        key = mac(&key, part);
    }
    let signature = hex(&mac(&key, &text));
    let access = &credentials.access;
    signed.push((
        "authorization",
        format!("AWS4-HMAC-SHA256 Credential={access}/{scope},SignedHeaders={names},Signature={signature}"),
    ));
    signed
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "GET Bucket (List Objects)" of AWS's documentation.
    #[test]
    fn the_published_example() {
        let credentials = Credentials {
            access: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            token: None,
            expires: None,
            renew: None,
        };
        let request = Signed {
            method: "GET",
            path: "/",
            query: "max-keys=2&prefix=J",
            host: "examplebucket.s3.amazonaws.com",
            body: &sha256(b""),
            region: "us-east-1",
            time: "2013-05-24T00:00:00Z".parse().unwrap(),
        };
        let signed = headers(&request, &credentials);
        let (_, authorization) = signed.last().unwrap();
        assert!(
            authorization.ends_with(
                "SignedHeaders=host;x-amz-content-sha256;x-amz-date,\
                 Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
            ),
            "{authorization}"
        );
    }
}
