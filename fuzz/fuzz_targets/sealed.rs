//! Feeds bytes of the fuzzer to the target `sealed`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| statehouse_server::fuzzing::run("sealed", data));
