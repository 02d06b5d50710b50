//! Feeds bytes of the fuzzer to the target `tokens`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| statehouse_server::fuzzing::run("tokens", data));
