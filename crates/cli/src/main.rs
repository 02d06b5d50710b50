//! The `statehouse` command.
//!
//! Data goes to standard output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 wrong usage,
//! 3 the blueprint is invalid, 4 refused by a conflict.

mod arguments;
mod atlas;
mod backup;
mod blueprint;
mod call;
#[cfg(feature = "proof")]
mod demo;
#[cfg(feature = "proof")]
mod drill;
mod explain;
mod hint;
mod key;
mod omitted;
mod output;
mod projection;
mod secret;
mod serve;
mod settings;
#[cfg(feature = "proof")]
mod simulate;
mod stop;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use arguments::{Arguments, Command};
use output::{Failure, Output};

/// Fast where many threads allocate, which is what a server does.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let output = Output::new(arguments.json);
    // Several libraries here speak TLS; they must agree on who does the arithmetic. Whoever was first is fine.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(run(arguments, &output)),
        Err(error) => Err(Failure::from(anyhow::Error::from(error))),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => output.fail(&failure),
    }
}

async fn run(arguments: Arguments, output: &Output) -> Result<(), Failure> {
    match arguments.command {
        Command::Init(init) => blueprint::init(&init, output),
        Command::Check(check) => blueprint::check(&check, output),
        Command::Plan(plan) => blueprint::plan(&plan, output).await,
        Command::Apply(apply) => blueprint::apply(&apply, output).await,
        Command::Backup(arguments) => backup::run(&arguments, output).await,
        Command::Serve(serve) => serve::run(&serve, output).await,
        Command::Config(serve) => serve::config(&serve, output),
        Command::Key(key) => key::run(&key, output).await,
        Command::Projection(project) => projection::run(&project, output).await,
        Command::Secret(secret) => secret::run(&secret, output).await,
        Command::Call(call) => call::run(call, output).await,
        Command::Explain(explain) => explain::run(&explain, output).await,
        #[cfg(feature = "proof")]
        Command::Demo(demo) => demo::run(&demo, output).await,
        #[cfg(not(feature = "proof"))]
        Command::Demo(_) => Err(omitted::command("demo")),
        #[cfg(feature = "proof")]
        Command::Drill(drill) => drill::run(&drill, output).await,
        #[cfg(not(feature = "proof"))]
        Command::Drill(_) => Err(omitted::command("drill")),
        #[cfg(feature = "proof")]
        Command::Simulate(simulate) => simulate::run(&simulate, output).await,
        #[cfg(not(feature = "proof"))]
        Command::Simulate(_) => Err(omitted::command("simulate")),
        Command::Atlas(atlas) => atlas::run(&atlas, output),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "statehouse", &mut std::io::stdout());
            Ok(())
        }
    }
}
