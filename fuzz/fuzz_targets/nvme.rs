#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| dbs_fuzz_targets::nvme(data));
