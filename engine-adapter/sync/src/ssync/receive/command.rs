//! What a request asks for.

use crate::image::{Checksum, GRAIN};
use crate::ssync::{BATCH, ROOT};
use hyper::{Method, StatusCode, Uri};

/// The longest range of a request with content: a sender uses [`BATCH`].
const MAX_PIECE: u64 = 2 * BATCH;

/// A request, understood but not yet held against the image.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Open { size: u64 },
    Recorded,
    Checksum(Piece),
    Hole(Piece),
    Write(Piece),
    Close(Option<Checksum>),
}

/// A byte range; it may end behind the image, in the image's last block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub begin: u64,
    pub end: u64,
}

impl Piece {
    /// Offset and length inside an image of `size` bytes.
    pub fn inside(self, size: u64) -> Result<(u64, u64), Refusal> {
        let end = self.end.min(size);
        if self.begin > end || self.end > size.next_multiple_of(GRAIN) {
            let text = format!("{self:?} is outside the image of {size} bytes");
            return Err(Refusal::new(StatusCode::BAD_REQUEST, text));
        }
        if !self.begin.is_multiple_of(GRAIN) || (!end.is_multiple_of(GRAIN) && end != size) {
            let text = format!("{self:?} is not aligned to {GRAIN} bytes");
            return Err(Refusal::new(StatusCode::BAD_REQUEST, text));
        }
        Ok((self.begin, end - self.begin))
    }
}

/// Why a request is refused. A sender repeats what is refused with 500, and gives up at 4xx.
#[derive(Debug)]
pub struct Refusal {
    pub status: StatusCode,
    pub text: String,
}

impl Refusal {
    pub fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    pub fn bad(text: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, text)
    }
}

impl From<dbs_core::Error> for Refusal {
    fn from(error: dbs_core::Error) -> Self {
        let status = match error.kind() {
            dbs_core::ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

/// Understands the head of a request.
pub fn parse(method: &Method, uri: &Uri) -> Result<Command, Refusal> {
    let query = Query(uri.query().unwrap_or_default());
    let name = uri.path().strip_prefix(ROOT).unwrap_or_default();
    let (expected, command) = match name {
        "open" => (Method::GET, open(&query)),
        "getRecordedMetadata" => (Method::GET, Ok(Command::Recorded)),
        "getChecksum" => (Method::GET, query.short_piece().map(Command::Checksum)),
        "sendHole" => (Method::POST, query.piece().map(Command::Hole)),
        "writeData" => (Method::POST, query.short_piece().map(Command::Write)),
        "close" => (Method::POST, Ok(Command::Close(query.checksum()))),
        _ => return Err(Refusal::new(StatusCode::NOT_FOUND, "no such request")),
    };
    if *method != expected {
        let text = format!("`{name}` wants {expected}");
        return Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, text));
    }
    command
}

fn open(query: &Query<'_>) -> Result<Command, Refusal> {
    let size = query.piece()?.end;
    let direct = match query.get("directIO") {
        Some("1" | "t" | "T" | "TRUE" | "true" | "True") => true,
        Some("0" | "f" | "F" | "FALSE" | "false" | "False") => false,
        other => return Err(Refusal::bad(format!("directIO is {other:?}, not a boolean"))),
    };
    if direct && !size.is_multiple_of(GRAIN) {
        return Err(Refusal::bad(format!("invalid file size {size} for directIO")));
    }
    Ok(Command::Open { size })
}

struct Query<'a>(&'a str);

impl<'a> Query<'a> {
    /// The first value of a key. None of those we look at need escapes.
    fn get(&self, key: &str) -> Option<&'a str> {
        let mut pairs = self.0.split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
    }

    fn number(&self, key: &str) -> Result<u64, Refusal> {
        let text = self.get(key).unwrap_or_default();
        let number = text.parse::<i64>().ok().and_then(|number| u64::try_from(number).ok());
        number.ok_or_else(|| Refusal::bad(format!("{key} is `{text}`, not an offset")))
    }

    fn piece(&self) -> Result<Piece, Refusal> {
        let piece = Piece { begin: self.number("begin")?, end: self.number("end")? };
        if piece.begin > piece.end {
            return Err(Refusal::bad(format!("{piece:?} ends before it begins")));
        }
        Ok(piece)
    }

    fn short_piece(&self) -> Result<Piece, Refusal> {
        let piece = self.piece()?;
        if piece.end - piece.begin > MAX_PIECE {
            let text = format!("{piece:?} is longer than {MAX_PIECE} bytes");
            return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, text));
        }
        Ok(piece)
    }

    /// The checksum, if there is one of sane form.
    fn checksum(&self) -> Option<Checksum> {
        let word = |key| {
            let text = self.get(key)?;
            let sane = (1..=128).contains(&text.len())
                && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
            sane.then(|| text.to_owned())
        };
        Some(Checksum { method: word("checksumMethod")?, value: word("checksum")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(target: &str) -> Result<Command, StatusCode> {
        let uri = target.parse().map_err(|_| StatusCode::IM_A_TEAPOT)?;
        parse(&Method::GET, &uri).map_err(|refusal| refusal.status)
    }

    fn post(target: &str) -> Result<Command, StatusCode> {
        let uri = target.parse().map_err(|_| StatusCode::IM_A_TEAPOT)?;
        parse(&Method::POST, &uri).map_err(|refusal| refusal.status)
    }

    #[test]
    fn understands_what_upstream_sends() {
        let open = get("/v1-ssync/open?begin=0&directIO=true&end=33554432");
        assert_eq!(open, Ok(Command::Open { size: 33_554_432 }));
        let meta = get("/v1-ssync/open?begin=0&directIO=false&end=138");
        assert_eq!(meta, Ok(Command::Open { size: 138 }));
        let piece = Piece { begin: 8192, end: 12_288 };
        let range = "begin=8192&end=12288";
        assert_eq!(post(&format!("/v1-ssync/sendHole?{range}")), Ok(Command::Hole(piece)));
        assert_eq!(post(&format!("/v1-ssync/writeData?{range}")), Ok(Command::Write(piece)));
        assert_eq!(get(&format!("/v1-ssync/getChecksum?{range}")), Ok(Command::Checksum(piece)));
        assert_eq!(get("/v1-ssync/getRecordedMetadata"), Ok(Command::Recorded));
        let none = post("/v1-ssync/close?checksum=&checksumMethod=");
        assert_eq!(none, Ok(Command::Close(None)));
        let checksum = Checksum { method: "crc64".into(), value: "b90956c775a41001".into() };
        let some = post("/v1-ssync/close?checksum=b90956c775a41001&checksumMethod=crc64");
        assert_eq!(some, Ok(Command::Close(Some(checksum))));
    }

    #[test]
    fn refuses_all_else() {
        for target in [
            "/v1-ssync/open?begin=0&end=4096",
            "/v1-ssync/open?begin=0&end=4097&directIO=true",
            "/v1-ssync/open?begin=0&end=-4096&directIO=false",
            "/v1-ssync/getChecksum?begin=4096",
            "/v1-ssync/getChecksum?begin=4096&end=0",
            "/v1-ssync/getChecksum?begin=0&end=99999999999999999999",
        ] {
            assert_eq!(get(target), Err(StatusCode::BAD_REQUEST), "{target}");
        }
        let long = "/v1-ssync/writeData?begin=0&end=9000000";
        assert_eq!(post(long), Err(StatusCode::PAYLOAD_TOO_LARGE));
        assert_eq!(get("/v1-ssync/"), Err(StatusCode::NOT_FOUND));
        assert_eq!(get("/open?begin=0&end=0&directIO=false"), Err(StatusCode::NOT_FOUND));
        assert_eq!(get(long), Err(StatusCode::METHOD_NOT_ALLOWED));
        let odd = post("/v1-ssync/close?checksum=../x&checksumMethod=crc64");
        assert_eq!(odd, Ok(Command::Close(None)));
    }

    #[test]
    fn a_piece_may_end_in_the_last_block() {
        let piece = |begin, end| Piece { begin, end };
        assert_eq!(piece(0, 4096).inside(138).unwrap(), (0, 138));
        assert_eq!(piece(4096, 8192).inside(8192).unwrap(), (4096, 4096));
        for (piece, size) in [
            (piece(0, 8192), 138),
            (piece(4096, 8192), 4096),
            (piece(1, 4096), 4096),
            (piece(0, 100), 4096),
            (piece(0, 12_288), 8192),
        ] {
            assert!(piece.inside(size).is_err(), "{piece:?} {size}");
        }
    }
}
