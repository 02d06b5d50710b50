//! Feeds bytes of the fuzzer to the target `gzip_bodies`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| statehouse_server::fuzzing::run("gzip_bodies", data));
