//! Labels of a snapshot: a count, then key and value of each, every string with its length.

use crate::info::Labels;
use crate::limits::LABELS_MAX_BYTES;

/// Encodes labels; `None` if they do not fit.
#[must_use]
pub fn encode(labels: &Labels) -> Option<Vec<u8>> {
    let mut out = (labels.len() as u32).to_le_bytes().to_vec();
    for text in labels.iter().flat_map(|(key, value)| [key, value]) {
        out.extend_from_slice(&u16::try_from(text.len()).ok()?.to_le_bytes());
        out.extend_from_slice(text.as_bytes());
    }
    (out.len() <= LABELS_MAX_BYTES).then_some(out)
}

/// Decodes labels; `None` if the bytes are no encoding of any.
#[must_use]
pub fn decode(mut bytes: &[u8]) -> Option<Labels> {
    let count = u32::from_le_bytes(take(&mut bytes, 4)?.try_into().ok()?);
    let mut labels = Labels::new();
    for _ in 0..count {
        let key = text(&mut bytes)?;
        labels.insert(key, text(&mut bytes)?);
    }
    (labels.len() == count as usize).then_some(labels)
}

fn text(bytes: &mut &[u8]) -> Option<String> {
    let length = u16::from_le_bytes(take(bytes, 2)?.try_into().ok()?);
    String::from_utf8(take(bytes, length as usize)?.to_vec()).ok()
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (head, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(head)
}
