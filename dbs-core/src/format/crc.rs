//! CRC32C, the checksum of metadata, of data and of streams.

use crc_fast::{CrcAlgorithm, Digest};

/// The CRC32C of these bytes.
#[must_use]
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The CRC32C of bytes that have the CRC32C `crc`, followed by these.
#[must_use]
#[inline]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    // The register is what a checksum is the inverse of.
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As it is defined, bit by bit.
    fn bitwise(bytes: &[u8]) -> u32 {
        let step = |crc: u32, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
    }

    #[test]
    fn any_length_has_the_crc_by_its_definition_in_one_or_two_parts() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let mut random = fastrand::Rng::with_seed(1);
        for length in (0..200).chain([508, 4095, 4096, 4097, 3 * 4096]) {
            let bytes: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
            assert_eq!(crc32c(&bytes), bitwise(&bytes), "{length}");
            let (first, second) = bytes.split_at(random.usize(..=length));
            assert_eq!(crc32c_append(crc32c(first), second), bitwise(&bytes), "{length}");
        }
    }
}
