//! What differs between engines although a plan means the same on each: as data, for `plan` and for people who choose.
//!
//! What every store promises is the contract of [`statehouse_store::Store`] and is not repeated here. A [`Guarantee`]
//! is a subject on which the contract leaves room, with what each engine makes of it. Where one engine's answer is
//! weaker than another's, its rank is lower, so that a change of engine can say what is lost; answers that are only
//! different have the same rank.

use serde_json::{Value as Json, json};

use super::Engine;

/// A subject on which engines differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarantee {
    /// What it is about.
    pub subject: &'static str,
    /// What each engine makes of it, in the order of [`Engine::ALL`].
    answers: [EngineSupport; 4],
}

/// One engine's answer on a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSupport {
    /// Compares it with other engines' answers on the same subject; less is weaker.
    pub rank: u8,
    /// What holds.
    pub holds: &'static str,
}

impl Guarantee {
    /// What this engine makes of it.
    pub fn on(&self, engine: Engine) -> EngineSupport {
        let [model, sqlite, postgres, dynamodb] = self.answers;
        match engine {
            Engine::Model => model,
            Engine::Sqlite => sqlite,
            Engine::Postgres => postgres,
            Engine::Dynamodb => dynamodb,
        }
    }
}

/// What changes on one subject when a house moves to another engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuaranteeDifference {
    /// What it is about.
    pub subject: &'static str,
    /// What holds now.
    pub before: &'static str,
    /// What would hold then.
    pub after: &'static str,
    /// Whether that is less.
    pub weaker: bool,
}

impl GuaranteeDifference {
    /// For programs.
    pub fn to_json(&self) -> Json {
        json!({"subject": self.subject, "before": self.before, "after": self.after, "weaker": self.weaker})
    }
}

/// What changes with another engine, in the order of [`GUARANTEES`].
pub fn differences(from: Engine, to: Engine) -> Vec<GuaranteeDifference> {
    let pairs = GUARANTEES.iter().map(|guarantee| (guarantee.subject, guarantee.on(from), guarantee.on(to)));
    pairs
        .filter(|(_, before, after)| before != after)
        .map(|(subject, before, after)| GuaranteeDifference {
            subject,
            before: before.holds,
            after: after.holds,
            weaker: after.rank < before.rank,
        })
        .collect()
}

/// An answer with its rank.
const fn at(rank: u8, holds: &'static str) -> EngineSupport {
    EngineSupport { rank, holds }
}

/// Every subject. The answers stand in the order model, sqlite, postgres, dynamodb.
pub const GUARANTEES: &[Guarantee] = &[
    Guarantee {
        subject: "durability",
        answers: [
            at(0, "none: what is written is gone with the process"),
            at(
                1,
                "an acknowledged write is synchronized to the disk of this machine, and lost with that disk",
            ),
            at(
                2,
                "an acknowledged write is synchronized by the server, and replicated as the server is set up; a server \
                 with fsync or synchronous_commit off is refused",
            ),
            at(3, "an acknowledged write is stored by the service in several zones of the region"),
        ],
    },
    Guarantee {
        subject: "reach",
        answers: [
            at(0, "one process"),
            at(1, "processes of one machine that share the file"),
            at(2, "any number of machines, as long as one server is up"),
            at(3, "any number of machines"),
        ],
    },
    Guarantee {
        subject: "writers",
        answers: [
            at(0, "one at a time"),
            at(
                0,
                "one transaction at a time for the whole file, shared by up to 256 plans; rises with concurrency, not \
                 with machines",
            ),
            at(
                1,
                "one connection for each process unless the URL says `writers`; plans without a common row wait only \
                 for the head of a common log partition",
            ),
            at(
                2,
                "plans without a common row share nothing; a partition of keys takes 1,000 write units a second",
            ),
        ],
    },
    Guarantee {
        subject: "clock behind `now`",
        answers: [
            at(1, "the process's"),
            at(1, "the one machine's"),
            at(1, "the server's, one for all"),
            at(
                0,
                "each caller's own: a deadline may be seen too early or too late by the declared skew (1 s unless the \
                 URL says `clock_skew_micros`)",
            ),
        ],
    },
    Guarantee {
        subject: "reads of an index, lists",
        answers: [
            at(1, "current"),
            at(1, "current"),
            at(1, "current: they go to the primary"),
            at(0, "eventual: a list may lag behind the rows by some moments"),
        ],
    },
    Guarantee {
        subject: "place in the log",
        answers: [
            at(1, "known when a write is acknowledged"),
            at(1, "known when a write is acknowledged"),
            at(1, "known when a write is acknowledged"),
            at(
                0,
                "given out by the first reader after the write; a cached read that brings the write's token goes to \
                 the store",
            ),
        ],
    },
    Guarantee {
        subject: "log partitions of a new store",
        answers: [at(0, "16"), at(0, "1, because there is one writer"), at(0, "16"), at(0, "16")],
    },
    Guarantee {
        subject: "tenants",
        answers: [
            at(0, "apart by the key of every row"),
            at(0, "apart by the key of every row"),
            at(
                1,
                "apart by the key of every row and, with `rls=on`, by forced row-level security under a role that owns \
                 nothing",
            ),
            at(0, "apart by the key of every row"),
        ],
    },
    Guarantee {
        subject: "cost of a write",
        answers: [
            at(0, "memory"),
            at(0, "a share of one synchronization of the disk"),
            at(0, "one round trip alone; two for a whole batch of plans that wait together"),
            at(
                0,
                "one transaction: two write units for each kilobyte of each row and of two items of the log, and about \
                 six more when the record gets its place",
            ),
        ],
    },
    Guarantee {
        subject: "a plan of many rows",
        answers: [
            at(0, "costs its rows"),
            at(0, "costs its rows"),
            at(0, "costs its rows, locked in one order; others wait for them until it is done"),
            at(
                0,
                "costs its rows twice, and meets more conflicts the more rows it names; these are retried inside",
            ),
        ],
    },
    Guarantee {
        subject: "space of deleted rows",
        answers: [
            at(0, "free at once"),
            at(0, "used again by later writes"),
            at(0, "used again after the server's vacuum"),
            at(
                0,
                "a row that logged writes touched stays as a tombstone for 15 minutes and twice the declared skew, and \
                 ranges read past it",
            ),
        ],
    },
    Guarantee {
        subject: "a walk over a whole table",
        answers: [
            at(0, "reads the tenant's rows"),
            at(0, "reads the tenant's rows"),
            at(0, "reads the tenant's rows"),
            at(0, "reads, and pays for, the rows of all tenants"),
        ],
    },
    Guarantee {
        subject: "changing tables",
        answers: [
            at(0, "at once"),
            at(1, "in one transaction; writers wait meanwhile"),
            at(1, "in one transaction; a new index on a table with rows holds back its writers"),
            at(
                0,
                "step by step, finished by the next one if it is interrupted; filling in rows waits for twice the \
                 schema lease (10 s) and goes item by item beside the writers",
            ),
        ],
    },
    Guarantee {
        subject: "columns of a table",
        answers: [
            at(3, "as many as fit a row"),
            at(2, "2,000, two of them Statehouse's"),
            at(1, "1,600, two of them Statehouse's, and about 250 of them text, bytes or json"),
            at(0, "as many as one expression of 4 KB can name: about 200 with short names"),
        ],
    },
    Guarantee {
        subject: "indexes of a table",
        answers: [
            at(1, "any number"),
            at(1, "any number"),
            at(1, "any number, of 32 columns each"),
            at(0, "20"),
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_back_and_forth_changes_the_same_subjects() {
        for from in Engine::ALL {
            assert_eq!(differences(from, from), []);
            for to in Engine::ALL {
                let there = differences(from, to);
                let back = differences(to, from);
                assert_eq!(there.len(), back.len());
                for (there, back) in there.iter().zip(&back) {
                    assert_eq!((there.before, there.after), (back.after, back.before));
                    assert!(!(there.weaker && back.weaker), "{}", there.subject);
                }
            }
        }
    }

    #[test]
    fn what_is_lost_is_called_weaker() {
        let weaker = |from, to| {
            let found = differences(from, to).into_iter().filter(|difference| difference.weaker);
            found.map(|difference| difference.subject).collect::<Vec<_>>()
        };
        assert_eq!(
            weaker(Engine::Postgres, Engine::Dynamodb),
            [
                "clock behind `now`",
                "reads of an index, lists",
                "place in the log",
                "tenants",
                "changing tables",
                "columns of a table",
                "indexes of a table"
            ]
        );
        assert!(weaker(Engine::Postgres, Engine::Sqlite).contains(&"reach"));
    }
}
