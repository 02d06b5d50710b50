//! `cargo bench`: every engine against hand-written code, in one run. `cargo bench -- sqlite` runs one of them.

/// The allocator that the shipped binary has.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<()> {
    // `cargo test --benches` only wants to know that this starts.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let only: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |engine: &str| only.is_empty() || only.iter().any(|name| name == engine);
    runtime.block_on(async {
        if wanted("sqlite") {
            statehouse_bench::sqlite::run().await?;
        }
        if wanted("postgres") {
            statehouse_bench::postgres::run().await?;
        }
        Ok(())
    })
}
