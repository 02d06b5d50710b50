//! Feeds bytes of the fuzzer to the target `credentials`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| statehouse_server::fuzzing::run("credentials", data));
