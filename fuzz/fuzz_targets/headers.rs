//! Feeds bytes of the fuzzer to the target `headers`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| statehouse_server::fuzzing::run("headers", data));
