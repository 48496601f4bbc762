//! Seeds of hosts of NVMe.

use super::Seed;
use crate::nvme::{DATA, FABRICS, IO, PROOF, RAW};

const NOWHERE: u8 = 0;
const CAPSULE: u8 = 1;
const ASKED: u8 = 2;

pub(super) fn seeds(seeds: &mut Vec<Seed>) {
    let mut seed = |name: &str, flags: u8, steps: &[Vec<u8>]| {
        seeds.push(("nvme", name.to_owned(), [vec![flags], steps.concat()].concat()));
    };
    let (admin, disk) = (admin(), disk());
    seed("volume", 0, &disk);
    seed("digests", 2 | 4 | 8, &disk);
    seed("snapshot", 1 | 8, &disk);
    seed("admin", 4, &admin);
    seed("discovery", 16 | 2, &admin);
    seed("keyed", 64, &proof());
    let mut init = vec![0; 128];
    (init[2], init[4], init[11]) = (128, 128, 3);
    let raw = |bytes: &[u8]| [&[RAW, bytes.len() as u8], bytes].concat();
    seed("stranger", 32, &[raw(&init), raw(&[4, 0, 72, 0, 72, 0, 0, 0]), raw(&[0x7f, 0x40])]);
}

/// A command: its doublewords from the tenth on, where its data is, and how long.
fn command(opcode: u8, dwords: &[u32], place: u8, bytes: u32) -> Vec<u8> {
    let mut step = vec![opcode, 4 * dwords.len() as u8];
    step.extend(dwords.iter().flat_map(|dword| dword.to_le_bytes()));
    step.push(place);
    step.extend(((bytes / 16) as u16).to_le_bytes());
    step
}

/// An offer, its challenge, an answer that is wrong, and why; on each queue.
fn proof() -> Vec<Vec<u8>> {
    let mut offer = vec![0; 72];
    (offer[4], offer[7], offer[8]) = (7, 1, 1);
    offer[10..15].copy_from_slice(&[3, 1, 1, 2, 3]);
    let mut answer = vec![0; 80];
    (answer[0], answer[1], answer[4], answer[6], answer[8], answer[12]) = (1, 2, 7, 32, 1, 9);
    let step =
        |queue: u8, message: &[u8]| [&[PROOF | queue, message.len() as u8], message].concat();
    let each =
        |queue| [step(queue, &offer), step(queue, &[]), step(queue, &answer), step(queue, &[])];
    each(0).into_iter().chain(each(IO)).collect()
}

fn disk() -> Vec<Vec<u8>> {
    vec![
        command(IO | 1, &[8, 0, 7], CAPSULE, 4096),
        command(IO | 2, &[0, 0, 31], ASKED, 16384),
        // Asked for: under the first tag, and in two pieces.
        command(IO | 1, &[16, 0, 1 << 30 | 15], ASKED, 8192),
        vec![IO | DATA, 0, 4, 0, 8, 0],
        vec![IO | DATA, 0, 4, 8, 8, 1],
        command(IO, &[], NOWHERE, 0),
        command(IO | 8, &[64, 0, 1 << 25 | 15], NOWHERE, 0),
        command(IO | 8, &[96, 0, 3], NOWHERE, 0),
        command(IO | 9, &[0, 4], CAPSULE, 16),
        command(IO | 1, &[2047, 0, 1], CAPSULE, 1024),
    ]
}

fn admin() -> Vec<Vec<u8>> {
    let mut steps: Vec<Vec<u8>> =
        [0, 1, 2, 3, 6].iter().map(|kind| command(6, &[*kind], ASKED, 4096)).collect();
    steps.push(command(9, &[7, 3 | 3 << 16], NOWHERE, 0));
    steps.push(command(9, &[11, 1 << 8 | 1 << 31], NOWHERE, 0));
    steps.push(command(10, &[15], NOWHERE, 0));
    for log in [1, 2, 4, 5, 0x70] {
        steps.push(command(2, &[log | 15 << 16, 0, 0, 0], ASKED, 64));
    }
    steps.push(command(12, &[], NOWHERE, 0));
    steps.push(command(0x18, &[], NOWHERE, 0));
    // Reading and setting properties: the capabilities, shutting down, and disabling.
    steps.push(command(FABRICS, &[1, 0], 4 << 4, 0));
    steps.push(command(FABRICS, &[0, 0x14, 0x46_4001], NOWHERE, 0));
    steps.push(command(FABRICS, &[0, 0x14, 0x46_0000], NOWHERE, 0));
    steps
}
