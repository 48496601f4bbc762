//! The frontends `tgt-blockdev` and `ublk`: a block device of the kernel's `ublk`, or for the former one over iSCSI
//! where there is none.
//!
//! Which of the two is decided when the frontend starts. A device of ublk that users of the volume have already, or
//! that waits for them, is not replaced by one of the other kind.

use super::device::{DeviceVolume, UBLK};
use super::iscsi::{ISCSI, IscsiVolume};
use dbs_core::Result;
use dbs_frontend::lock;
use dbs_service::log;
use longhorn_controller::frontend::UblkFrontend;
use longhorn_controller::volume::{Frontend, Offer};
use std::sync::Mutex;

/// What the block device of `tgt-blockdev` is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BlockDevice {
    /// ublk where the kernel has it, else iSCSI
    Auto,
    /// The kernel's ublk driver
    Ublk,
    /// tgtd and the host's iSCSI initiator
    Iscsi,
}

/// The volume as a block device of either kind.
pub(super) struct BlockVolume {
    /// What it is called.
    pub kind: &'static str,
    pub wanted: BlockDevice,
    pub ublk: DeviceVolume,
    pub iscsi: IscsiVolume,
    /// The one that was started last.
    pub chosen: Mutex<Option<Chosen>>,
}

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chosen {
    Ublk,
    Iscsi,
}

impl BlockVolume {
    fn one(&self, chosen: Chosen) -> &dyn Frontend {
        match chosen {
            Chosen::Ublk => &self.ublk,
            Chosen::Iscsi => &self.iscsi,
        }
    }

    fn running(&self) -> Option<&dyn Frontend> {
        let chosen = *lock(&self.chosen);
        chosen.map(|chosen| self.one(chosen))
    }

    /// Which one a start takes. A device of ublk waits for its next controller if its own dies, and its users with
    /// it. What of iSCSI a dead controller left has only errors for its users; it is looked for where there are
    /// signs of it, and else nothing but the kernel is asked.
    pub fn choose(&self, volume: &str) -> Result<Chosen> {
        if self.ublk.is_there(volume)? {
            if self.wanted == BlockDevice::Iscsi {
                let what = "the volume has a block device of ublk already: --block-device has effect when the \
                            frontend is started after `frontend shutdown`";
                log::warn("block-device", &[("volume", &volume), ("what", &what)]);
            }
            return Ok(Chosen::Ublk);
        }
        let has_ublk = || UblkFrontend::is_possible(&self.ublk.path);
        let chosen = match self.wanted {
            BlockDevice::Ublk => Chosen::Ublk,
            BlockDevice::Auto if has_ublk() => Chosen::Ublk,
            BlockDevice::Auto | BlockDevice::Iscsi => Chosen::Iscsi,
        };
        if chosen == Chosen::Ublk && self.iscsi.is_left(volume) {
            self.iscsi.clear(volume)?;
        }
        Ok(chosen)
    }
}

impl Frontend for BlockVolume {
    fn name(&self) -> &str {
        self.kind
    }

    fn endpoint(&self) -> String {
        self.running().map_or_else(String::new, Frontend::endpoint)
    }

    fn block_device(&self) -> &'static str {
        self.running().map_or("", Frontend::block_device)
    }

    fn is_up(&self) -> bool {
        self.running().is_some_and(Frontend::is_up)
    }

    fn is_ending(&self) -> bool {
        self.running().is_some_and(Frontend::is_ending)
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        let chosen = self.choose(&offer.volume)?;
        let kind = match chosen {
            Chosen::Ublk => UBLK,
            Chosen::Iscsi => ISCSI,
        };
        log::info("block-device", &[("volume", &offer.volume), ("kind", &kind)]);
        *lock(&self.chosen) = Some(chosen);
        self.one(chosen).start(offer).map_err(|error| match (chosen, self.wanted) {
            (Chosen::Iscsi, BlockDevice::Auto) => error.context(
                "the kernel has no ublk that can be used here (`modprobe ublk_drv`), so the block device \
                 is to be made over iSCSI",
            ),
            _ => error,
        })
    }

    fn expand(&self, size: u64) -> Result<()> {
        self.running().map_or(Ok(()), |frontend| frontend.expand(size))
    }

    fn stop(&self) -> Result<()> {
        self.running().map_or(Ok(()), Frontend::stop)
    }
}
