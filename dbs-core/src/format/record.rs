//! Records of the journal and the tail: absolute values, so that redo is idempotent, and each
//! touches one metadata block, so that the block's LSN tells whether it is already in.

/// Volume extents of a block run and its new state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FillState {
    /// The parent shows through.
    Absent,
    /// Data.
    Data,
    /// Zeros.
    Zero,
}

/// A change of metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<'a> {
    /// First in each group: groups up to `sequence` are not needed any more, and the high-water
    /// marks before this group.
    Checkpoint {
        /// Last group that all metadata blocks include.
        sequence: u64,
        /// Valid metadata blocks of the volume, snapshot, spare and extent regions.
        marks: [u32; 4],
        /// Boot the writing process runs in.
        boot: [u8; 16],
        /// Whether it keeps a tail.
        tail: bool,
    },
    /// A volume slot.
    Volume {
        /// Slot index.
        index: u32,
        /// Its 504 bytes.
        slot: &'a [u8],
    },
    /// A snapshot slot.
    Snapshot {
        /// Slot index.
        index: u32,
        /// Its 504 bytes.
        slot: &'a [u8],
    },
    /// One label block of a snapshot.
    Labels {
        /// Label block index: twice the snapshot slot index, plus the part.
        index: u32,
        /// Content.
        bytes: &'a [u8],
    },
    /// A whole extent or spare entry.
    Entry {
        /// Device extent, or spare id.
        entry: u32,
        /// Its bytes.
        bytes: &'a [u8],
    },
    /// Blocks of an entry change state.
    Fill {
        /// Device extent, or spare id.
        entry: u32,
        /// First block in the extent.
        start: u16,
        /// Blocks.
        count: u16,
        /// Their state.
        state: FillState,
    },
    /// An entry becomes free.
    Free {
        /// Device extent, or spare id.
        entry: u32,
    },
    /// A snapshot is deleted: it loses name, labels and all flags but the deleted one.
    Drop {
        /// Slot index.
        index: u32,
        /// Volume it still belongs to, or 0.
        volume: u32,
    },
    /// A region's high-water mark rises; the new blocks hold nothing.
    Mark {
        /// Index into [`super::RegionKind::MARKED`].
        region: u8,
        /// Blocks valid from now on.
        blocks: u32,
    },
}

/// Bytes in front of each record's body.
const HEADER_BYTES: usize = 4;

impl<'a> Record<'a> {
    /// Appends the record's bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[self.tag(), 0, 0, 0]);
        match *self {
            Self::Checkpoint { sequence, marks, boot, tail } => {
                out.extend_from_slice(&sequence.to_le_bytes());
                marks.iter().for_each(|mark| out.extend_from_slice(&mark.to_le_bytes()));
                out.extend_from_slice(&boot);
                out.push(u8::from(tail));
            }
            Self::Volume { index, slot: bytes }
            | Self::Snapshot { index, slot: bytes }
            | Self::Labels { index, bytes }
            | Self::Entry { entry: index, bytes } => {
                out.extend_from_slice(&index.to_le_bytes());
                out.extend_from_slice(bytes);
            }
            Self::Fill { entry, start, count, state } => {
                out.extend_from_slice(&entry.to_le_bytes());
                out.extend_from_slice(&start.to_le_bytes());
                out.extend_from_slice(&count.to_le_bytes());
                out.push(state as u8);
            }
            Self::Free { entry } => out.extend_from_slice(&entry.to_le_bytes()),
            Self::Drop { index, volume } => {
                out.extend_from_slice(&index.to_le_bytes());
                out.extend_from_slice(&volume.to_le_bytes());
            }
            Self::Mark { region, blocks } => {
                out.extend_from_slice(&blocks.to_le_bytes());
                out.push(region);
            }
        }
        let body = (out.len() - start - HEADER_BYTES) as u16;
        out[start + 2..start + 4].copy_from_slice(&body.to_le_bytes());
    }

    /// Takes one record off the front of `bytes`; `None` if they are no record.
    #[must_use]
    pub fn decode(bytes: &mut &'a [u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEADER_BYTES)?;
        let length = u16::from_le_bytes([head[2], head[3]]) as usize;
        let (body, rest) = rest.split_at_checked(length)?;
        if head[1] != 0 {
            return None;
        }
        let record = Self::decode_body(head[0], body)?;
        *bytes = rest;
        Some(record)
    }

    fn decode_body(tag: u8, mut body: &'a [u8]) -> Option<Self> {
        let record = match tag {
            1 => Self::Checkpoint {
                sequence: u64::from_le_bytes(take(&mut body)?),
                marks: [u32(&mut body)?, u32(&mut body)?, u32(&mut body)?, u32(&mut body)?],
                boot: take(&mut body)?,
                tail: take::<1>(&mut body)? != [0],
            },
            2 => Self::Volume { index: u32(&mut body)?, slot: std::mem::take(&mut body) },
            3 => Self::Snapshot { index: u32(&mut body)?, slot: std::mem::take(&mut body) },
            4 => Self::Labels { index: u32(&mut body)?, bytes: std::mem::take(&mut body) },
            5 => Self::Entry { entry: u32(&mut body)?, bytes: std::mem::take(&mut body) },
            7 => Self::Fill {
                entry: u32(&mut body)?,
                start: u16::from_le_bytes(take(&mut body)?),
                count: u16::from_le_bytes(take(&mut body)?),
                state: match take::<1>(&mut body)?[0] {
                    0 => FillState::Absent,
                    1 => FillState::Data,
                    2 => FillState::Zero,
                    _ => return None,
                },
            },
            8 => Self::Free { entry: u32(&mut body)? },
            9 => Self::Mark { blocks: u32(&mut body)?, region: take::<1>(&mut body)?[0] },
            10 => Self::Drop { index: u32(&mut body)?, volume: u32(&mut body)? },
            _ => return None,
        };
        body.is_empty().then_some(record)
    }

    pub(super) fn tag(&self) -> u8 {
        match self {
            Self::Checkpoint { .. } => 1,
            Self::Volume { .. } => 2,
            Self::Snapshot { .. } => 3,
            Self::Labels { .. } => 4,
            Self::Entry { .. } => 5,
            Self::Fill { .. } => 7,
            Self::Free { .. } => 8,
            Self::Mark { .. } => 9,
            Self::Drop { .. } => 10,
        }
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*head)
}

fn u32(bytes: &mut &[u8]) -> Option<u32> {
    take(bytes).map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn records_round_trip() {
        let slot = [3; 504];
        let records = [
            Record::Checkpoint {
                sequence: 1 << 40,
                marks: [1, 2, 3, 4],
                boot: [6; 16],
                tail: true,
            },
            Record::Volume { index: 7, slot: &slot },
            Record::Snapshot { index: 8, slot: &slot },
            Record::Labels { index: 9, bytes: b"x" },
            Record::Entry { entry: 10, bytes: &[0; 80] },
            Record::Fill { entry: 14, start: 15, count: 16, state: FillState::Zero },
            Record::Free { entry: 17 },
            Record::Mark { region: 3, blocks: 18 },
            Record::Drop { index: 19, volume: 20 },
        ];
        let mut bytes = Vec::new();
        records.iter().for_each(|record| record.encode(&mut bytes));
        let mut rest = bytes.as_slice();
        for record in records {
            assert_eq!(Record::decode(&mut rest), Some(record));
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn impossible_records_are_none() {
        let cases: [&[u8]; 6] = [
            &[],
            // Cut off, a length of another record, and a byte that must be zero.
            &[8, 0, 4, 0, 1, 2, 3],
            &[8, 0, 5, 0, 1, 2, 3, 4, 5],
            &[8, 1, 4, 0, 1, 2, 3, 4],
            // A state and a tag that nobody knows.
            &[7, 0, 9, 0, 1, 0, 0, 0, 2, 0, 3, 0, 3],
            &[99, 0, 0, 0],
        ];
        for bytes in cases {
            assert_eq!(Record::decode(&mut &*bytes), None, "{bytes:?}");
        }
        assert!(Record::decode(&mut &[7, 0, 9, 0, 1, 0, 0, 0, 2, 0, 3, 0, 2][..]).is_some());
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_record_or_none(bytes: Vec<u8>) {
            let mut rest = bytes.as_slice();
            while let Some(record) = Record::decode(&mut rest) {
                let mut again = Vec::new();
                record.encode(&mut again);
                prop_assert_eq!(Record::decode(&mut again.as_slice()), Some(record));
            }
        }
    }
}
