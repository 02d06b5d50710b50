//! Feeds bytes of the fuzzer to the target `strict_json`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| statehouse_server::fuzzing::run("strict_json", data));
