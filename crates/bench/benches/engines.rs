//! `cargo bench`: every engine against hand-written code, in one run.

/// The allocator that the shipped binary has.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<()> {
    // `cargo test --benches` only wants to know that this starts.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(statehouse_bench::sqlite::run())
}
