//! The `statehouse` command.
//!
//! Data goes to standard output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 wrong usage,
//! 3 the blueprint is invalid, 4 refused by a conflict.

mod affected;
mod arguments;
mod atlas;
mod audit;
mod backup;
mod blueprint;
mod call;
#[cfg(feature = "proof")]
mod demo;
#[cfg(feature = "proof")]
mod drill;
mod erase;
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
mod workflow;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use arguments::{Arguments, CliCommand};
use output::{CliFailure, Output};

/// Fast where many threads allocate, which is what a server does.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let output = Output::new(arguments.json);
    // Several libraries here speak TLS; they must agree on who does the arithmetic. The first one is fine.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(run(arguments, &output)),
        Err(error) => Err(CliFailure::from(anyhow::Error::from(error))),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => output.fail(&failure),
    }
}

async fn run(arguments: Arguments, output: &Output) -> Result<(), CliFailure> {
    match arguments.command {
        CliCommand::Init(init) => blueprint::init(&init, output),
        CliCommand::Check(check) => blueprint::check(&check, output),
        CliCommand::Plan(plan) => blueprint::plan(&plan, output).await,
        CliCommand::Apply(apply) => blueprint::apply(&apply, output).await,
        CliCommand::Backup(arguments) => backup::run(&arguments, output).await,
        CliCommand::Serve(serve) => serve::run(&serve, output).await,
        CliCommand::Config(serve) => serve::config(&serve, output),
        CliCommand::Key(key) => key::run(&key, output).await,
        CliCommand::Audit(audit) => audit::run(&audit, output).await,
        CliCommand::Projection(project) => projection::run(&project, output).await,
        CliCommand::Secret(secret) => secret::run(&secret, output).await,
        CliCommand::Workflow(arguments) => workflow::run(&arguments, output),
        CliCommand::Call(call) => call::run(call, output).await,
        CliCommand::Erase(erase) => erase::run(&erase, output).await,
        CliCommand::Explain(explain) => explain::run(&explain, output).await,
        #[cfg(feature = "proof")]
        CliCommand::Demo(demo) => demo::run(&demo, output).await,
        #[cfg(not(feature = "proof"))]
        CliCommand::Demo(_) => Err(omitted::command("demo")),
        #[cfg(feature = "proof")]
        CliCommand::Drill(drill) => drill::run(&drill, output).await,
        #[cfg(not(feature = "proof"))]
        CliCommand::Drill(_) => Err(omitted::command("drill")),
        #[cfg(feature = "proof")]
        CliCommand::Simulate(simulate) => simulate::run(&simulate, output).await,
        #[cfg(not(feature = "proof"))]
        CliCommand::Simulate(_) => Err(omitted::command("simulate")),
        CliCommand::Atlas(atlas) => atlas::run(&atlas, output),
        CliCommand::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "statehouse", &mut std::io::stdout());
            Ok(())
        }
    }
}
