//! Feeds bytes of the fuzzer to the target `key_sets`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| statehouse_server::fuzzing::run("key_sets", data));
