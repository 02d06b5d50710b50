//! The blueprints of the systems in `systems`, for `statehouse init`. Their scenarios are in [`crate::scenario`], if it is built.

/// A system by name, with its blueprint.
pub struct SystemBlueprint {
    /// The name of the system and of its folder.
    pub name: &'static str,
    /// The text of its `statehouse.toml`.
    pub text: &'static str,
}

macro_rules! blueprints {
    ($($name:literal),*) => {
        /// All of them, by name.
        pub const BLUEPRINTS: &[SystemBlueprint] = &[$(SystemBlueprint {
            name: $name,
            text: include_str!(concat!("../../../../systems/", $name, "/statehouse.toml")),
        }),*];
    };
}

blueprints!("auction", "catalog", "feed", "jobs", "library", "profile", "tickets");

#[cfg(all(test, feature = "proof"))]
mod tests {
    use super::*;
    use crate::scenario::SYSTEMS;

    #[test]
    fn every_system_has_its_blueprint_here() {
        let scenarios: Vec<(&str, &str)> =
            SYSTEMS.iter().map(|system| (system.name, system.blueprint)).collect();
        let here: Vec<(&str, &str)> =
            BLUEPRINTS.iter().map(|blueprint| (blueprint.name, blueprint.text)).collect();
        assert_eq!(scenarios, here);
    }
}
