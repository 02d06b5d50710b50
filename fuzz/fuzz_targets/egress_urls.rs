//! Feeds bytes of the fuzzer to the target `egress_urls`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| statehouse_server::fuzzing::run("egress_urls", data));
