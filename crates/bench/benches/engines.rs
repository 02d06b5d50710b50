//! `cargo bench`: every engine against hand-written code, in one run. `cargo bench -- sqlite` runs one of them; so do
//! `postgres`, `http`, `fairness`, `jobs`, `bookings`, `auctions`, `constrained` (`constrained quick` shows in seconds that it runs),
//! `scans`, `feed`, `rebuild`, `endurance`, `batches`, `stock` (or `stock quick`) and `hotspots`, which may be followed by keywords of
//! archetypes.

/// The allocator that the shipped binary has.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> anyhow::Result<()> {
    // `cargo test --benches` only wants to know that this starts.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    // Other processes of one run are this program too.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--fairness", tenant, port, connections, millis] => {
            return statehouse_bench::http::fairness::generate(tenant, port, connections, millis);
        }
        ["--generate"] => return statehouse_bench::http::generate(),
        ["--serve", folder, address] => {
            return statehouse_bench::http::serve_only(std::path::Path::new(folder), address);
        }
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let only: Vec<String> = arguments.into_iter().filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |engine: &str| only.is_empty() || only.iter().any(|name| name == engine);
    runtime.block_on(async {
        if let Some(("hotspots", archetypes)) = only.split_first().map(|(name, more)| (name.as_str(), more)) {
            return statehouse_bench::hotspots::run(archetypes).await;
        }
        if wanted("sqlite") {
            statehouse_bench::sqlite::run().await?;
        }
        if wanted("postgres") {
            statehouse_bench::postgres::run().await?;
        }
        if wanted("http") {
            statehouse_bench::http::run().await?;
        }
        if wanted("fairness") {
            statehouse_bench::http::fairness::run().await?;
        }
        if wanted("jobs") {
            statehouse_bench::jobs::run().await?;
        }
        if wanted("bookings") {
            statehouse_bench::bookings::run().await?;
        }
        if wanted("auctions") {
            statehouse_bench::auctions::run().await?;
        }
        if wanted("constrained") {
            statehouse_bench::constrained::run(only.iter().any(|name| name == "quick")).await?;
        }
        if wanted("scans") {
            statehouse_bench::scans::run().await?;
        }
        if wanted("feed") {
            statehouse_bench::feed::run().await?;
        }
        if wanted("rebuild") {
            statehouse_bench::feed::rebuild().await?;
        }
        if wanted("endurance") {
            statehouse_bench::feed::endurance().await?;
        }
        if wanted("batches") {
            statehouse_bench::batches::run().await?;
        }
        if wanted("stock") {
            statehouse_bench::stock::run(only.iter().any(|name| name == "quick")).await?;
        }
        if wanted("hotspots") {
            statehouse_bench::hotspots::run(&[]).await?;
        }
        Ok(())
    })
}
