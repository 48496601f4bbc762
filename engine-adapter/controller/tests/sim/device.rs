//! A volume with a block device, step by step.

use crate::directed::{BLOCKS, SIZE, nothing_violated, volume};
use crate::parts::{Sim, options};
use crate::world::address;
use dbs_core::{Error, ErrorKind, Result};
use longhorn_controller::rules::Mode;
use longhorn_controller::volume::{Controller, Frontend, Frontends, Offer, Parts};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// A block device whose kernel cannot change its size in use, unless it can.
#[derive(Default)]
struct Device {
    offered: Mutex<Vec<u64>>,
    up: Mutex<bool>,
    grows: Mutex<bool>,
    ending: Mutex<bool>,
    /// Whoever has it keeps a start waiting.
    gate: Mutex<()>,
    fails: Mutex<bool>,
}

impl Frontend for Device {
    fn name(&self) -> &str {
        "device"
    }

    fn endpoint(&self) -> String {
        String::new()
    }

    fn is_up(&self) -> bool {
        *self.up.lock().unwrap()
    }

    fn is_ending(&self) -> bool {
        *self.ending.lock().unwrap()
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        drop(self.gate.lock().unwrap());
        if *self.fails.lock().unwrap() {
            return Err(Error::busy("it does not start"));
        }
        self.offered.lock().unwrap().push(offer.size);
        *self.up.lock().unwrap() = true;
        Ok(())
    }

    fn expand(&self, size: u64) -> Result<()> {
        if !*self.grows.lock().unwrap() {
            return Err(Error::unsupported("before Linux 6.16"));
        }
        self.offered.lock().unwrap().push(size);
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        *self.up.lock().unwrap() = false;
        Ok(())
    }
}

struct Devices(Arc<Device>);

impl Frontends for Devices {
    fn create(&self, _kind: &str) -> Result<Arc<dyn Frontend>> {
        Ok(Arc::clone(&self.0) as _)
    }
}

/// A volume of the first of two replicas, with a device.
fn volume_with_device() -> (Arc<Sim>, Arc<Controller>, Arc<Device>) {
    let (sim, _) = volume(2, 0);
    let device = Arc::<Device>::default();
    let parts = Parts {
        replicas: Arc::clone(&sim) as _,
        path: Arc::clone(&sim) as _,
        frontends: Arc::new(Devices(Arc::clone(&device))),
        host: Arc::clone(&sim) as _,
    };
    let controller = Controller::new(options(false, false), parts, &sim.new_relay());
    controller.start(&[address(0)], SIZE, SIZE).unwrap();
    controller.start_frontend("device").unwrap();
    (sim, controller, device)
}

#[test]
fn a_frontend_that_could_not_be_ended_is_not_taken_for_one_that_serves() {
    let (sim, controller, device) = volume_with_device();
    controller.snapshot("one", HashMap::new(), false).unwrap();
    controller.start_frontend("device").unwrap();
    *device.ending.lock().unwrap() = true;
    let error = controller.start_frontend("device").unwrap_err();
    assert!(error.to_string().contains("frontend shutdown"), "{error}");
    controller.revert("one").unwrap_err();
    *device.ending.lock().unwrap() = false;
    // One that does not start leaves what was there.
    controller.shutdown_frontend().unwrap();
    *device.fails.lock().unwrap() = true;
    controller.start_frontend("device").unwrap_err();
    assert_eq!(controller.volume().frontend_state, "down");
    nothing_violated(&sim);
}

/// It stayed up over no replicas.
#[test]
fn a_frontend_that_comes_up_amid_a_shutdown_is_ended() {
    let (_sim, controller, device) = volume_with_device();
    controller.shutdown_frontend().unwrap();
    let moment = || std::thread::sleep(std::time::Duration::from_millis(200));
    let (sender, taken) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let gate = device.gate.lock().unwrap();
            sender.send(()).unwrap();
            moment();
            moment();
            drop(gate);
        });
        taken.recv().unwrap();
        let starting = scope.spawn(|| controller.start_frontend("device"));
        moment();
        // The reactors are of this thread.
        controller.shutdown().unwrap();
        starting.join().unwrap().unwrap();
    });
    assert!(!device.is_up());
}

/// It found nothing to do, and the device kept its size until its next start.
#[test]
fn an_expansion_that_its_device_did_not_show_is_finished_by_the_next_try() {
    let (sim, controller, device) = volume_with_device();
    let expand = |grows: bool| {
        *device.grows.lock().unwrap() = grows;
        assert!(controller.begin_expansion(2 * SIZE).unwrap());
        controller.run_expansion(2 * SIZE);
        controller.volume().last_expansion_error
    };
    assert!(expand(false).contains("before Linux 6.16"));
    let pauses = sim.world().pauses;
    assert!(expand(false).contains("before Linux 6.16"), "it is said again");
    assert_eq!(expand(true), "");
    assert_eq!(*device.offered.lock().unwrap(), [SIZE, 2 * SIZE]);
    assert_eq!(sim.world().pauses, pauses, "replicas have nothing to do");
    controller.shutdown_frontend().unwrap();
    assert!(!controller.begin_expansion(2 * SIZE).unwrap(), "nobody is there to see it");
}

/// Found by review: beside one that had failed, or was being rebuilt, the last complete one could be removed in use.
#[test]
fn the_last_complete_replica_stays_while_the_volume_is_in_use() {
    let (sim, controller, _device) = volume_with_device();
    controller.create_replica(&address(1), "", true, Mode::Wo).unwrap();
    let remove = |replica| controller.delete_replica(&address(replica)).map_err(|e| e.kind());
    assert_eq!(remove(0), Err(ErrorKind::Busy));
    controller.update_replica(&address(1), Mode::Err).unwrap();
    assert_eq!(remove(0), Err(ErrorKind::Busy));
    assert_eq!((remove(1), remove(0)), (Ok(()), Err(ErrorKind::Busy)));
    controller.shutdown_frontend().unwrap();
    assert_eq!(remove(0), Ok(()));
    nothing_violated(&sim);
}

#[test]
fn a_volume_has_the_size_of_its_replicas_whatever_its_device_shows() {
    let (sim, controller, device) = volume_with_device();
    assert!(controller.begin_expansion(2 * SIZE).unwrap());
    controller.run_expansion(2 * SIZE);
    let info = controller.volume();
    assert_eq!((info.size as u64, info.is_expanding), (2 * SIZE, false));
    assert!(info.last_expansion_error.contains("before Linux 6.16"), "{info:?}");
    assert_eq!(sim.world().path.size, 2 * SIZE);
    // A replica of that size can join.
    sim.world().replicas[1].size = 2 * BLOCKS;
    controller.create_replica(&address(1), "", true, Mode::Wo).unwrap();
    controller.shutdown_frontend().unwrap();
    controller.start_frontend("device").unwrap();
    assert_eq!(*device.offered.lock().unwrap(), [SIZE, 2 * SIZE]);
}
