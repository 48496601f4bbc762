//! Sizes, times and images that the sections share.

use crate::results::Results;
use crate::systems::{SYSTEMS, System, Tools};
use clap::Args;
use dbs_benches::fio::Job;
use dbs_benches::server::Served;
use dbs_benches::{Outcome, machine};
use std::path::{Path, PathBuf};

const GIB: u64 = 1 << 30;

/// How much to measure.
#[derive(Debug, Clone, Args)]
pub struct Sizes {
    /// Rounds; each measures every system once [default: 3, quick: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Seconds of each load [default: 4, quick: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: Option<u32>,
    /// Size of images in MiB [default: 1024, quick: 512]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..=1 << 24))]
    size: Option<u64>,
    /// Size in MiB of the snapshot deleted under load [default: 3072, quick: 512]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..=1 << 24))]
    delete_size: Option<u64>,
    /// Snapshots and clones taken under load [default: 10, quick: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    snapshots: Option<u32>,
    /// About 6 minutes instead of 30, for a glance
    #[arg(long)]
    pub quick: bool,
}

impl Sizes {
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    pub fn seconds(&self) -> u32 {
        self.seconds.unwrap_or(if self.quick { 2 } else { 4 })
    }

    /// Bytes of an image.
    pub fn image(&self) -> u64 {
        self.size.unwrap_or(if self.quick { 512 } else { 1024 }) << 20
    }

    /// Bytes of an image in a chain: there are several.
    pub fn chain(&self) -> u64 {
        self.image() / 2
    }

    /// Bytes of the snapshot that is deleted.
    pub fn deleted(&self) -> u64 {
        self.delete_size.unwrap_or(if self.quick { 512 } else { 3072 }) << 20
    }

    pub fn snapshots(&self) -> u32 {
        self.snapshots.unwrap_or(if self.quick { 4 } else { 10 })
    }

    /// Bytes that everything takes at most.
    pub fn needed(&self) -> u64 {
        u64::from(11 + 8 * self.rounds()) * self.image() + 2 * self.deleted()
    }

    /// Bytes of a sparse store in which nothing runs out.
    pub fn store(&self) -> u64 {
        (16 * self.image()).max(64 * GIB)
    }
}

/// What a section works with.
pub struct Bench<'a> {
    pub tools: &'a Tools,
    pub sizes: Sizes,
    /// For images. All stay until the end: to remove one may keep the medium busy for minutes, where
    /// the file system tells it (`discard`), and what is measured next would feel that.
    pub dir: &'a Path,
    pub results: Results,
}

impl Bench<'_> {
    /// The systems there are, another one first in each round.
    pub fn systems(&self, round: u32) -> Vec<System> {
        let mut list: Vec<_> =
            SYSTEMS.into_iter().filter(|system| self.tools.has(*system)).collect();
        let first = round as usize % list.len();
        list.rotate_left(first);
        list
    }

    /// Serves an image on which everything has been written; made when first asked for. The bare
    /// file is also qemu's raw image: the same place on the medium.
    ///
    /// # Errors
    /// If it cannot be made or served.
    pub fn full(&self, system: System) -> Outcome<(PathBuf, Served)> {
        let image = self.dir.join(match system {
            System::Bare | System::QemuRaw => "raw.img",
            System::Dbs => "store.dbs",
            System::Unchecked => "unchecked.dbs",
            System::Prototype => "prototype.img",
            System::Qcow2 => "image.qcow2",
            System::Nbdkit => "nbdkit.img",
        });
        if image.exists() {
            let served = self.tools.serve(system, &image, "v")?;
            return Ok((image, served));
        }
        self.tools.create(system, &image, self.sizes.image(), self.sizes.store())?;
        let served = self.tools.serve(system, &image, "v")?;
        self.fill(&served, self.sizes.image())?;
        Ok((image, served))
    }

    /// Writes everything once.
    ///
    /// # Errors
    /// If it fails.
    pub fn fill(&self, served: &Served, size: u64) -> Outcome<()> {
        served.measure(&Job::fill(size), self.dir)?;
        Ok(())
    }

    /// Runs a load and keeps its figures. What a server left in the page cache is written back, so
    /// that it does not burden the next one, and dropped, so that the medium is measured.
    ///
    /// # Errors
    /// If the user asks for the end. A load that fails is a result.
    pub fn run(
        &mut self,
        cell: &str,
        (system, round): (System, u32),
        (image, served): (&Path, &Served),
        job: &Job,
    ) -> Outcome<()> {
        let outcome = served.measure(job, self.dir);
        self.results.add(cell, system, round, outcome)?;
        machine::forget_cached(image)
    }
}
