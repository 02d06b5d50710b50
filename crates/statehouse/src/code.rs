//! The table of refusal codes: each code is declared once, with its name, its kind and its meaning.
//!
//! A code is part of the public API: programs branch on its name. Names are never changed or reused.

use std::fmt;

use serde::{Serialize, Serializer};

/// A property of a code that callers and surfaces ask for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flag {
    /// The current state stands in the way of a request that is right in itself.
    Conflict,
    /// The very same request may succeed a moment later.
    Passing,
}

macro_rules! codes {
    ($($variant:ident = $name:literal [$($flag:ident)*], $meaning:literal;)*) => {
        /// Why an action was refused. Stable.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Code {
            $(#[doc = $meaning] $variant,)*
        }

        impl Code {
            /// Every code.
            pub const ALL: [Code; [$($name),*].len()] = [$(Code::$variant),*];

            /// The name that callers see.
            pub const fn name(self) -> &'static str {
                match self { $(Code::$variant => $name,)* }
            }

            /// What the code means, in one sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $(Code::$variant => $meaning,)* }
            }

            const fn flags(self) -> &'static [Flag] {
                match self { $(Code::$variant => &[$(Flag::$flag),*],)* }
            }
        }
    };
}

codes! {
    InvalidInput = "invalid_input" [],
        "The input does not fit the action's form.";
    NotFound = "not_found" [],
        "There is no such row, action or resource.";
    AlreadyExists = "already_exists" [Conflict],
        "A row with this key exists.";
    Forbidden = "forbidden" [],
        "The caller may not do this: its scopes, or the rules of the resource, do not allow it.";
    InvalidSignature = "invalid_signature" [],
        "The message is not signed with a secret of the endpoint, or was signed too long ago.";
    VersionConflict = "version_conflict" [Conflict],
        "The row is at another version than the caller has seen.";
    VersionRequired = "version_required" [Conflict],
        "The caller has to say which version it has seen.";
    Deleted = "deleted" [Conflict],
        "The row was deleted.";
    NotDeleted = "not_deleted" [Conflict],
        "The row is not deleted.";
    Erased = "erased" [Conflict],
        "The operation was applied, and its answer was erased with the row.";
    Held = "held" [Conflict],
        "Another holder has it, and its time is not up.";
    NotHolder = "not_holder" [Conflict],
        "The caller does not hold it, or no longer under this epoch.";
    Expired = "expired" [Conflict],
        "The caller's time was up.";
    TooLow = "too_low" [Conflict],
        "The bid is below the least amount that is accepted now.";
    WrongState = "wrong_state" [Conflict],
        "The action does not start from the state that the row is in.";
    OutOfStock = "out_of_stock" [Conflict],
        "Less is available than the call wants.";
    Contended = "contended" [Conflict Passing],
        "Too many callers write this row; it was tried several times.";
    ConditionFailed = "condition_failed" [Conflict],
        "The condition that the caller put on the row does not hold.";
    OutOfRange = "out_of_range" [Conflict],
        "The result would be out of a number's range.";
    NotUnique = "not_unique" [Conflict],
        "Another row has this value, and one at most may have it.";
    MissingReference = "missing_reference" [Conflict],
        "A field refers to a row that does not exist or was deleted.";
    Referenced = "referenced" [Conflict],
        "Other rows refer to the row, so it cannot be deleted.";
    TooLarge = "too_large" [],
        "The row or the request is larger than any engine can hold.";
    OperationReused = "operation_reused" [Conflict],
        "The operation id was used for another request.";
    OperationFenced = "operation_fenced" [Conflict],
        "The operation id was given up before it was applied; use a new one.";
    OutcomeUnknown = "outcome_unknown" [],
        "It is not known whether the write was applied. Repeat it under the same operation id.";
    Unavailable = "unavailable" [Passing],
        "The store cannot be reached. Nothing was done.";
    SchemaMismatch = "schema_mismatch" [],
        "The tables of the store do not fit this house: another blueprint was applied. Nothing was done.";
    Internal = "internal" [],
        "A defect of the server.";
}

impl Code {
    /// Whether the current state stands in the way of a request that is right in itself.
    pub fn is_conflict(self) -> bool {
        self.flags().contains(&Flag::Conflict)
    }

    /// Whether the very same request may succeed a moment later.
    pub fn is_passing(self) -> bool {
        self.flags().contains(&Flag::Passing)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names are public API. A change of this list breaks programs.
    #[test]
    fn names_are_stable_and_unique() {
        let names: Vec<&str> = Code::ALL.iter().map(|code| code.name()).collect();
        let expected = [
            "invalid_input",
            "not_found",
            "already_exists",
            "forbidden",
            "invalid_signature",
            "version_conflict",
            "version_required",
            "deleted",
            "not_deleted",
            "erased",
            "held",
            "not_holder",
            "expired",
            "too_low",
            "wrong_state",
            "out_of_stock",
            "contended",
            "condition_failed",
            "out_of_range",
            "not_unique",
            "missing_reference",
            "referenced",
            "too_large",
            "operation_reused",
            "operation_fenced",
            "outcome_unknown",
            "unavailable",
            "schema_mismatch",
            "internal",
        ];
        assert_eq!(names, expected);
        assert_eq!(serde_json::to_string(&Code::NotHolder).unwrap(), "\"not_holder\"");
    }

    #[test]
    fn conflicts_and_passing_codes_are_as_before() {
        let named = |has: fn(Code) -> bool| -> Vec<&str> {
            Code::ALL.iter().copied().filter(|code| has(*code)).map(Code::name).collect()
        };
        assert_eq!(
            named(|code| !code.is_conflict()),
            [
                "invalid_input",
                "not_found",
                "forbidden",
                "invalid_signature",
                "too_large",
                "outcome_unknown",
                "unavailable",
                "schema_mismatch",
                "internal"
            ]
        );
        assert_eq!(named(Code::is_passing), ["contended", "unavailable"]);
    }
}
