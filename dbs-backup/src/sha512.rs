//! SHA-512 of eight blocks at once, each in a lane of vector registers: each step of one block needs the one before, so that
//! one alone uses a quarter of what a CPU with AVX-512 can do. Others hash block by block: with AVX2, four lanes are not faster.
//!
//! Source: FIPS 180-4.
#![allow(unsafe_code, reason = "functions for CPUs that have certain instructions")]
#![cfg_attr(
    not(any(target_arch = "x86_64", test)),
    allow(dead_code, reason = "others have no lanes")
)]

use std::array::from_fn;

/// Bytes of a step.
const STEP: usize = 128;
/// Bytes that are read, and hashed together, at most: two workers have these twice, and a replica is to stay below 128 MiB.
const RUN: u64 = 12 << 20;

/// The first words of the square roots of the first 8 primes.
#[rustfmt::skip]
const START: [u64; 8] = [
    0x6a09_e667_f3bc_c908, 0xbb67_ae85_84ca_a73b, 0x3c6e_f372_fe94_f82b, 0xa54f_f53a_5f1d_36f1,
    0x510e_527f_ade6_82d1, 0x9b05_688c_2b3e_6c1f, 0x1f83_d9ab_fb41_bd6b, 0x5be0_cd19_137e_2179,
];
/// The same of the cube roots of the first 80.
#[rustfmt::skip]
const KEYS: [u64; 80] = [
    0x428a_2f98_d728_ae22, 0x7137_4491_23ef_65cd, 0xb5c0_fbcf_ec4d_3b2f, 0xe9b5_dba5_8189_dbbc,
    0x3956_c25b_f348_b538, 0x59f1_11f1_b605_d019, 0x923f_82a4_af19_4f9b, 0xab1c_5ed5_da6d_8118,
    0xd807_aa98_a303_0242, 0x1283_5b01_4570_6fbe, 0x2431_85be_4ee4_b28c, 0x550c_7dc3_d5ff_b4e2,
    0x72be_5d74_f27b_896f, 0x80de_b1fe_3b16_96b1, 0x9bdc_06a7_25c7_1235, 0xc19b_f174_cf69_2694,
    0xe49b_69c1_9ef1_4ad2, 0xefbe_4786_384f_25e3, 0x0fc1_9dc6_8b8c_d5b5, 0x240c_a1cc_77ac_9c65,
    0x2de9_2c6f_592b_0275, 0x4a74_84aa_6ea6_e483, 0x5cb0_a9dc_bd41_fbd4, 0x76f9_88da_8311_53b5,
    0x983e_5152_ee66_dfab, 0xa831_c66d_2db4_3210, 0xb003_27c8_98fb_213f, 0xbf59_7fc7_beef_0ee4,
    0xc6e0_0bf3_3da8_8fc2, 0xd5a7_9147_930a_a725, 0x06ca_6351_e003_826f, 0x1429_2967_0a0e_6e70,
    0x27b7_0a85_46d2_2ffc, 0x2e1b_2138_5c26_c926, 0x4d2c_6dfc_5ac4_2aed, 0x5338_0d13_9d95_b3df,
    0x650a_7354_8baf_63de, 0x766a_0abb_3c77_b2a8, 0x81c2_c92e_47ed_aee6, 0x9272_2c85_1482_353b,
    0xa2bf_e8a1_4cf1_0364, 0xa81a_664b_bc42_3001, 0xc24b_8b70_d0f8_9791, 0xc76c_51a3_0654_be30,
    0xd192_e819_d6ef_5218, 0xd699_0624_5565_a910, 0xf40e_3585_5771_202a, 0x106a_a070_32bb_d1b8,
    0x19a4_c116_b8d2_d0c8, 0x1e37_6c08_5141_ab53, 0x2748_774c_df8e_eb99, 0x34b0_bcb5_e19b_48a8,
    0x391c_0cb3_c5c9_5a63, 0x4ed8_aa4a_e341_8acb, 0x5b9c_ca4f_7763_e373, 0x682e_6ff3_d6b2_b8a3,
    0x748f_82ee_5def_b2fc, 0x78a5_636f_4317_2f60, 0x84c8_7814_a1f0_ab72, 0x8cc7_0208_1a64_39ec,
    0x90be_fffa_2363_1e28, 0xa450_6ceb_de82_bde9, 0xbef9_a3f7_b2c6_7915, 0xc671_78f2_e372_532b,
    0xca27_3ece_ea26_619c, 0xd186_b8c7_21c0_c207, 0xeada_7dd6_cde0_eb1e, 0xf57d_4f7f_ee6e_d178,
    0x06f0_67aa_7217_6fba, 0x0a63_7dc5_a2c8_98a6, 0x113f_9804_bef9_0dae, 0x1b71_0b35_131c_471b,
    0x28db_77f5_2304_7d84, 0x32ca_ab7b_40c7_2493, 0x3c9e_be0a_15c9_bebc, 0x431d_67c4_9c10_0d4c,
    0x4cc5_d4be_cb3e_42b6, 0x597f_299c_fc65_7e2a, 0x5fcb_6fab_3ad6_faec, 0x6c44_198c_4a47_5817,
];

/// A word of each of so many blocks.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Words<const N: usize>([u64; N]);

/// Blocks of this size that are worth to be hashed together.
pub(crate) fn run(block_size: u64) -> usize {
    (RUN / block_size).clamp(1, 8) as usize
}

/// The first half of the SHA-512 of a block.
pub(crate) fn half(content: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA512, content);
    let mut half = [0; 32];
    half.copy_from_slice(&digest.as_ref()[..32]);
    half
}

/// The same of several blocks.
pub(crate) fn halves(contents: &[&[u8]]) -> Vec<[u8; 32]> {
    let length = contents.first().map_or(0, |content| content.len());
    if !length.is_multiple_of(STEP) || contents.iter().any(|content| content.len() != length) {
        return contents.iter().map(|content| half(content)).collect();
    }
    // Without the optimiser, lanes are much slower.
    #[cfg(target_arch = "x86_64")]
    if !cfg!(debug_assertions) && std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has what the function is compiled for.
        return together(contents, |blocks| unsafe { eight(blocks) });
    }
    contents.iter().map(|content| half(content)).collect()
}

/// By `hash` where at least half of its lanes have a block.
fn together<const N: usize>(
    contents: &[&[u8]],
    hash: impl Fn(&[&[u8]; N]) -> [[u8; 32]; N],
) -> Vec<[u8; 32]> {
    let mut all = Vec::with_capacity(contents.len());
    for some in contents.chunks(N) {
        if some.len() * 2 < N {
            all.extend(some.iter().map(|content| half(content)));
        } else {
            // What is missing is hashed for nothing.
            let blocks = from_fn(|lane| some[lane % some.len()]);
            all.extend_from_slice(&hash(&blocks)[..some.len()]);
        }
    }
    all
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn eight(blocks: &[&[u8]; 8]) -> [[u8; 32]; 8] {
    hash(blocks)
}

/// Of blocks of one length, a multiple of a step.
#[inline(always)]
fn hash<const N: usize>(blocks: &[&[u8]; N]) -> [[u8; 32]; N] {
    let length = blocks[0].len();
    let mut state = START.map(|word| Words([word; N]));
    let mut words = [Words([0; N]); 16];
    for at in (0..length).step_by(STEP) {
        for (lane, block) in blocks.iter().enumerate() {
            let bytes = block[at..at + STEP].as_chunks::<8>().0;
            for (word, bytes) in words.iter_mut().zip(bytes) {
                word.0[lane] = u64::from_be_bytes(*bytes);
            }
        }
        step(&mut state, &mut words);
    }
    // One bit, zeros, and the bits of the block.
    words = [Words([0; N]); 16];
    (words[0], words[15]) = (Words([1 << 63; N]), Words([length as u64 * 8; N]));
    step(&mut state, &mut words);
    from_fn(|lane| {
        let mut half = [0; 32];
        for (bytes, word) in half.as_chunks_mut::<8>().0.iter_mut().zip(&state) {
            *bytes = word.0[lane].to_be_bytes();
        }
        half
    })
}

#[inline(always)]
fn each<const N: usize>(word: impl Fn(usize) -> u64) -> Words<N> {
    Words(from_fn(word))
}

#[inline(always)]
fn step<const N: usize>(state: &mut [Words<N>; 8], words: &mut [Words<N>; 16]) {
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (round, key) in KEYS.iter().enumerate() {
        let at = round % 16;
        if round >= 16 {
            let (next, last) = (words[(at + 1) % 16].0, words[(at + 14) % 16].0);
            let (old, middle) = (words[at].0, words[(at + 9) % 16].0);
            words[at] = each(|i| {
                let low = next[i].rotate_right(1) ^ next[i].rotate_right(8) ^ (next[i] >> 7);
                let high = last[i].rotate_right(19) ^ last[i].rotate_right(61) ^ (last[i] >> 6);
                old[i].wrapping_add(low).wrapping_add(middle[i]).wrapping_add(high)
            });
        }
        let word = words[at].0;
        let first: Words<N> = each(|i| {
            let e = e.0[i];
            let sum = e.rotate_right(14) ^ e.rotate_right(18) ^ e.rotate_right(41);
            let choice = (e & f.0[i]) ^ (!e & g.0[i]);
            let key = key.wrapping_add(word[i]);
            h.0[i].wrapping_add(sum).wrapping_add(choice).wrapping_add(key)
        });
        let second: Words<N> = each(|i| {
            let (a, b, c) = (a.0[i], b.0[i], c.0[i]);
            let sum = a.rotate_right(28) ^ a.rotate_right(34) ^ a.rotate_right(39);
            sum.wrapping_add((a & b) ^ (a & c) ^ (b & c))
        });
        let below = each(|i| d.0[i].wrapping_add(first.0[i]));
        let above = each(|i| first.0[i].wrapping_add(second.0[i]));
        (h, g, f, e, d, c, b, a) = (g, f, e, below, c, b, a, above);
    }
    for (old, new) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *old = each(|i| old.0[i].wrapping_add(new.0[i]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(count: usize, length: usize) -> Vec<Vec<u8>> {
        let mut random = fastrand::Rng::with_seed((count * 7 + length) as u64);
        let block = |_| (0..length).map(|_| random.u8(..)).collect();
        (0..count).map(block).collect()
    }

    fn proven(contents: &[&[u8]]) -> Vec<[u8; 32]> {
        contents.iter().map(|content| half(content)).collect()
    }

    #[test]
    fn together_as_one_by_one() {
        for length in [0, 1, 128, 4096, 3 * 4096] {
            for count in 0..20 {
                let blocks = blocks(count, length);
                let contents: Vec<&[u8]> = blocks.iter().map(|block| &**block).collect();
                assert_eq!(halves(&contents), proven(&contents), "{count} of {length}");
            }
        }
        assert_eq!(halves(&[&[1; 128], &[1; 256]]), proven(&[&[1; 128], &[1; 256]]));
    }

    /// Whatever this CPU has.
    #[test]
    fn as_wide_as_other_cpus_have_it() {
        let blocks = blocks(8, 4096);
        let contents: [&[u8]; 8] = from_fn(|lane| &*blocks[lane]);
        let expected = proven(&contents);
        assert_eq!(hash::<8>(&contents)[..], expected);
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has what the function is compiled for.
            assert_eq!(unsafe { eight(&contents) }[..], expected);
        }
        assert_eq!(hash::<4>(&from_fn(|lane| contents[lane]))[..], expected[..4]);
        assert_eq!(together(&contents[..7], hash::<4>), expected[..7]);
    }
}
