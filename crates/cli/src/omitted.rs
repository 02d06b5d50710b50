//! What this build was made without, and the command that makes one with it.
//!
//! Features of the crate leave out what takes long to compile. A command or an address that needs one of them is still understood,
//! so that the answer can say what to do.

use crate::output::CliFailure;

/// What is wrong if this build lacks a feature.
pub(crate) fn message(what: &str, feature: &str) -> String {
    format!(
        "this program was built without {what}; in the checkout, install one that has it: \
         cargo install --locked --path crates/cli --features {feature}"
    )
}

/// The failure of a command that this build lacks.
#[cfg(not(feature = "proof"))]
pub(crate) fn command(name: &str) -> CliFailure {
    CliFailure::Other(anyhow::anyhow!(message(&format!("`{name}`"), "proof")))
}

/// The failure of an engine, or of Redis, that this build lacks. The features have their names.
pub(crate) fn engine(name: &str) -> CliFailure {
    CliFailure::Other(anyhow::anyhow!(message(name, name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_that_adds_it_is_named() {
        let CliFailure::Other(error) = engine("dynamodb") else { panic!("another failure") };
        let said = error.to_string();
        assert!(said.contains("built without dynamodb"), "{said}");
        assert!(said.ends_with("cargo install --locked --path crates/cli --features dynamodb"), "{said}");
    }
}
