//! Scopes: what a credential permits.
//!
//! ```text
//! scope    = "read" | "write" | "admin" | resource ":" action | name
//! resource = name | "*"
//! action   = name | "read" | "write" | "*"
//! ```
//!
//! `read` and `write` as actions stand for all reads and all writes of the resource, whatever the actions are called; reading
//! a resource includes its events. Actions that destroy for good, like `erase`, are not among the writes: they need a scope that names
//! them, or all actions of the resource. A transition of a workflow may declare a scope of its own, a name such as `warehouse`: it needs
//! that scope, or one that names it or all actions of the resource. Every other name is one action. `read` alone is `*:read`, `write` alone is `*:write`, and
//! `admin` includes everything, also what belongs to no resource.

use std::fmt;
use std::str::FromStr;

use statehouse::House;
use statehouse::blueprint::nearest;

/// Separates resource and action.
const SEPARATOR: char = ':';
/// Any resource, or any action.
const ANY: &str = "*";
const READ: &str = "read";
const WRITE: &str = "write";
const ADMIN: &str = "admin";

/// A permission.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Read rows and events of every resource.
    Read,
    /// Call every action that writes.
    Write,
    /// Everything, including metrics.
    Admin,
    /// Some actions of one resource, or of all.
    Actions {
        /// The resource; `None` is every resource.
        resource: Option<Box<str>>,
        /// Which of its actions.
        actions: ActionSet,
    },
    /// The actions that declare this scope in the blueprint.
    Declared(Box<str>),
}

/// Actions of a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActionSet {
    /// Every action that reads, and the events.
    Reads,
    /// Every action that writes.
    Writes,
    /// Every action, and the events.
    All,
    /// The action of this name.
    One(Box<str>),
}

/// What a request does, as far as scopes are concerned.
#[derive(Clone, Copy, Debug)]
pub enum Access<'a> {
    /// Calls an action.
    Action {
        /// The resource.
        resource: &'a str,
        /// The action's name within it.
        action: &'a str,
        /// Whether it writes.
        writes: bool,
        /// Whether writing in general does not permit it, but only a scope that names it.
        restricted: bool,
        /// The scope of its own that permits it.
        scope: Option<&'a str>,
    },
    /// Reads everything of a resource: its rows and its events.
    Resource(&'a str),
    /// Reads or does what belongs to the operator.
    Operator,
}

impl fmt::Display for Access<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Access::Action { scope: Some(scope), .. } => f.write_str(scope),
            Access::Action { resource, action, .. } => write!(f, "{resource}{SEPARATOR}{action}"),
            Access::Resource(resource) => write!(f, "{resource}{SEPARATOR}{READ}"),
            Access::Operator => f.write_str(ADMIN),
        }
    }
}

impl Scope {
    /// The scopes that name no resource.
    pub const GENERAL: [Scope; 3] = [Scope::Read, Scope::Write, Scope::Admin];
    /// Their names.
    const GENERAL_NAMES: [&str; 3] = [READ, WRITE, ADMIN];

    /// Whether the scope permits this.
    pub fn permits(&self, access: Access<'_>) -> bool {
        let (resource, actions) = match self {
            Scope::Admin => return true,
            Scope::Read => (None, &ActionSet::Reads),
            Scope::Write => (None, &ActionSet::Writes),
            Scope::Actions { resource, actions } => (resource.as_deref(), actions),
            Scope::Declared(name) => {
                return matches!(access, Access::Action { scope: Some(scope), .. } if *scope == **name);
            }
        };
        let is_of = |name: &str| resource.is_none_or(|own| own == name);
        match access {
            Access::Operator => false,
            Access::Resource(name) => is_of(name) && matches!(actions, ActionSet::Reads | ActionSet::All),
            Access::Action { resource, action, writes, restricted, scope: _ } => {
                is_of(resource)
                    && match actions {
                        ActionSet::Reads => !writes,
                        ActionSet::Writes => writes && !restricted,
                        ActionSet::All => true,
                        ActionSet::One(name) => **name == *action,
                    }
            }
        }
    }

    /// Checks that a house has the resource and the action that the scope names.
    pub fn check(&self, house: &House) -> Result<(), BadScope> {
        let resources = house.resources();
        if let Scope::Declared(name) = self {
            let declared =
                resources.iter().flat_map(|one| &one.actions).filter_map(|one| one.scope.as_deref());
            let names: Vec<&str> = Scope::GENERAL_NAMES.into_iter().chain(declared).collect();
            let is_known = names.contains(&&**name);
            return if is_known { Ok(()) } else { Err(self.unknown("scope", name, names.into_iter())) };
        }
        let Scope::Actions { resource, actions } = self else { return Ok(()) };
        let known = |name: &str| resources.iter().any(|declared| declared.name == name);
        if let Some(name) = resource.as_deref().filter(|name| !known(name)) {
            let names = resources.iter().map(|declared| declared.name.as_str());
            return Err(self.unknown("resource", name, names));
        }
        let ActionSet::One(action) = actions else { return Ok(()) };
        let meant = resources.iter().filter(|one| resource.as_deref().is_none_or(|name| one.name == name));
        let names: Vec<&str> = meant.flat_map(|one| &one.actions).map(|one| &*one.name).collect();
        if names.contains(&&**action) {
            return Ok(());
        }
        Err(self.unknown("action", action, names.into_iter()))
    }

    fn unknown<'n>(&self, what: &str, name: &str, known: impl Iterator<Item = &'n str>) -> BadScope {
        let advice = nearest(name, known).map(|near| format!("; did you mean `{near}`?"));
        BadScope(format!("{self}: there is no {what} `{name}`{}", advice.unwrap_or_default()))
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scope::Read => f.write_str(READ),
            Scope::Write => f.write_str(WRITE),
            Scope::Admin => f.write_str(ADMIN),
            Scope::Declared(name) => f.write_str(name),
            Scope::Actions { resource, actions } => {
                let actions = match actions {
                    ActionSet::Reads => READ,
                    ActionSet::Writes => WRITE,
                    ActionSet::All => ANY,
                    ActionSet::One(name) => name,
                };
                write!(f, "{}{SEPARATOR}{actions}", resource.as_deref().unwrap_or(ANY))
            }
        }
    }
}

/// A text that is no scope, or names what the house does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadScope(String);

impl FromStr for Scope {
    type Err = BadScope;

    fn from_str(text: &str) -> Result<Scope, BadScope> {
        let bad = || {
            let message = "is not a scope; write read, write, admin or RESOURCE:ACTION such as profile:read";
            BadScope(format!("{text:?} {message}"))
        };
        let Some((resource, action)) = text.split_once(SEPARATOR) else {
            let found = Scope::GENERAL.into_iter().find(|scope| scope.to_string() == text);
            let declared = || plain(text).map(Scope::Declared);
            return found.or_else(declared).ok_or_else(bad);
        };
        let resource = match resource {
            ANY => None,
            name => Some(plain(name).ok_or_else(bad)?),
        };
        let actions = match action {
            ANY => ActionSet::All,
            READ => ActionSet::Reads,
            WRITE => ActionSet::Writes,
            name => ActionSet::One(plain(name).ok_or_else(bad)?),
        };
        Ok(Scope::Actions { resource, actions })
    }
}

/// A name as resources and actions have them.
fn plain(name: &str) -> Option<Box<str>> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    (!name.is_empty() && name.chars().all(is_plain)).then(|| name.into())
}

/// Scopes as text, separated by spaces.
pub fn scopes_text(scopes: &[Scope]) -> String {
    scopes.iter().map(Scope::to_string).collect::<Vec<_>>().join(" ")
}

/// The scopes in a text. Unknown words are ignored, because tokens may carry scopes of other services.
pub fn read_scopes(text: &str) -> Vec<Scope> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permits(scopes: &str, access: Access<'_>) -> bool {
        read_scopes(scopes).iter().any(|scope| scope.permits(access))
    }

    fn action<'a>(resource: &'a str, action: &'a str, writes: bool) -> Access<'a> {
        Access::Action { resource, action, writes, restricted: action == "erase", scope: None }
    }

    #[test]
    fn scopes_are_written_as_they_are_read() {
        for text in [
            "read",
            "write",
            "admin",
            "profile:read",
            "seat_booking:hold",
            "*:read",
            "a:*",
            "*:*",
            "warehouse",
        ] {
            assert_eq!(text.parse::<Scope>().unwrap().to_string(), text);
        }
        for text in
            ["", "Fly", "*", ":", "a:", ":read", "a:b:c", "A:read", "a b", "https://x/read", "a:re-ad"]
        {
            assert!(text.parse::<Scope>().is_err(), "{text}");
        }
    }

    #[test]
    fn each_scope_permits_what_it_names() {
        let (get, list) = (action("profile", "read", false), action("profile", "list", false));
        let (update, hold) = (action("profile", "update", true), action("seat", "hold", true));
        let table = [
            ("read", [true, true, false, false]),
            ("*:read", [true, true, false, false]),
            ("profile:read", [true, true, false, false]),
            ("seat:read", [false; 4]),
            ("profile:list", [false, true, false, false]),
            ("write", [false, false, true, true]),
            ("profile:write", [false, false, true, false]),
            ("seat:hold", [false, false, false, true]),
            ("*:hold", [false, false, false, true]),
            ("profile:*", [true, true, true, false]),
            ("openid profile:list seat:hold", [false, true, false, true]),
            ("admin", [true; 4]),
            ("", [false; 4]),
        ];
        for (scopes, expected) in table {
            assert_eq!([get, list, update, hold].map(|access| permits(scopes, access)), expected, "{scopes}");
        }
    }

    #[test]
    fn a_restricted_action_has_to_be_named() {
        let erase = action("profile", "erase", true);
        for scopes in ["admin", "profile:erase", "*:erase", "profile:*", "*:*"] {
            assert!(permits(scopes, erase), "{scopes}");
        }
        for scopes in ["write", "profile:write", "*:write", "read write", "seat:erase", "seat:*"] {
            assert!(!permits(scopes, erase), "{scopes}");
        }
    }

    #[test]
    fn a_declared_scope_permits_what_declares_it() {
        let scope = Some("warehouse");
        let ship =
            Access::Action { resource: "order", action: "ship", writes: true, restricted: true, scope };
        for scopes in ["warehouse", "admin", "order:ship", "order:*", "read warehouse"] {
            assert!(permits(scopes, ship), "{scopes}");
        }
        for scopes in ["write", "order:write", "office", "order:pay"] {
            assert!(!permits(scopes, ship), "{scopes}");
        }
        assert!(!permits("warehouse", action("order", "read", false)));
        assert!(!permits("warehouse", Access::Resource("order")));
    }

    #[test]
    fn events_need_all_reads_of_their_resource() {
        for scopes in ["read", "*:read", "profile:read", "profile:*", "*:*", "admin"] {
            assert!(permits(scopes, Access::Resource("profile")), "{scopes}");
        }
        for scopes in ["write", "profile:list", "profile:write", "seat:read"] {
            assert!(!permits(scopes, Access::Resource("profile")), "{scopes}");
        }
        assert!(permits("admin", Access::Operator));
        assert!(!permits("read write *:*", Access::Operator));
    }
}
