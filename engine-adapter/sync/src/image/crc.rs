//! CRC-64/GO-ISO of data, of zeros, and of one run behind another.
//!
//! Upstream hashes layers with Go's `crc64.ISO`: x^64 + x^4 + x^3 + x + 1, bits reflected, register
//! and result inverted. Appending n zero bytes multiplies the register by x^8n modulo that
//! polynomial, so that a hole of any size costs about as much as a cache miss.

use crc_fast::CrcAlgorithm;

/// The polynomial without x^64, reflected: the highest bit is the coefficient of x^0.
const POLYNOMIAL: u64 = 0xD800_0000_0000_0000;

/// x^0.
const ONE: u64 = 1 << 63;

/// `POWERS[k]` is x^(2^k), for lengths in bits of up to 2^67.
const POWERS: [u64; 67] = {
    let mut powers = [1 << 62; 67];
    let mut k = 1;
    while k < powers.len() {
        powers[k] = multiply(powers[k - 1], powers[k - 1]);
        k += 1;
    }
    powers
};

/// The checksum of a run of bytes, and how many they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Crc64 {
    value: u64,
    length: u64,
}

impl Crc64 {
    /// Of these bytes.
    #[must_use]
    pub fn of(data: &[u8]) -> Self {
        let value = crc_fast::checksum(CrcAlgorithm::Crc64GoIso, data);
        Self { value, length: data.len() as u64 }
    }

    /// Of so many zero bytes.
    #[must_use]
    pub fn zeros(length: u64) -> Self {
        Self { value: !multiply(shift(length), !0), length }
    }

    /// Of these bytes and, behind them, the other's.
    #[must_use]
    pub fn then(self, other: Self) -> Self {
        let value = multiply(shift(other.length), self.value) ^ other.value;
        Self { value, length: self.length + other.length }
    }

    /// The value.
    #[must_use]
    pub fn value(self) -> u64 {
        self.value
    }
}

/// x^(8 * bytes).
fn shift(bytes: u64) -> u64 {
    let (mut rest, mut product) = (bytes, ONE);
    for power in &POWERS[3..] {
        if rest == 0 {
            break;
        }
        if rest & 1 == 1 {
            product = multiply(*power, product);
        }
        rest >>= 1;
    }
    product
}

/// The product of two polynomials, modulo the polynomial.
const fn multiply(a: u64, mut b: u64) -> u64 {
    let (mut bit, mut product) = (ONE, 0);
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = if b & 1 == 1 { (b >> 1) ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_the_check_value_of_the_catalogue() {
        assert_eq!(Crc64::of(b"123456789").value(), 0xb909_56c7_75a4_1001);
        assert_eq!(Crc64::of(b"").value(), 0);
    }

    #[test]
    fn zeros_are_as_if_hashed() {
        for length in [0, 1, 2, 7, 8, 4095, 4096, 65536 + 3] {
            assert_eq!(Crc64::zeros(length as u64), Crc64::of(&vec![0; length]), "{length}");
        }
    }

    #[test]
    fn parts_are_as_the_whole() {
        let data: Vec<u8> = (0..100_000_u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
        for cut in [0, 1, 8, 4096, 99_999, 100_000] {
            let (head, tail) = data.split_at(cut);
            assert_eq!(Crc64::of(head).then(Crc64::of(tail)), Crc64::of(&data), "{cut}");
        }
    }

    /// Values of Go's `hash/crc64` with the ISO table.
    #[test]
    fn long_zeros_agree_with_go() {
        for (length, value) in GO_ZEROS {
            assert_eq!(Crc64::zeros(length).value(), value, "{length}");
        }
        let mixed = Crc64::of(b"layer").then(Crc64::zeros((1 << 30) - 5)).then(Crc64::of(b"end"));
        assert_eq!(mixed.value(), GO_MIXED);
    }

    const GO_ZEROS: [(u64, u64); 3] = [
        (1 << 20, 0x430e_fbe3_cfd1_f78c),
        (1 << 30, 0xf91e_212a_8f2e_7958),
        ((5 << 30) + 12_345, 0x6159_0136_2489_cf34),
    ];
    const GO_MIXED: u64 = 0xc1cb_0085_3e99_850f;
}
