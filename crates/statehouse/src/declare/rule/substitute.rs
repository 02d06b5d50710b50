//! Rules judged on values that are no stored row: a row that is about to be written, an answer, an event.

use statehouse_store::{Guard, Time, Value, eval};

use super::check::{CheckedLeaf, CheckedTree};
use super::{CheckedRule, Rule, RuleSource, Term};

/// The values of columns; `None` for a column that is not known.
pub type KnownColumns<'a> = dyn Fn(&str) -> Option<Value> + 'a;

impl CheckedRule {
    /// The guard for one call, with known values in place of columns and `now` in place of the clock. If all columns are
    /// known, it is [`Guard::always`] or [`Guard::never`].
    pub fn bind_over(&self, source: &dyn RuleSource, known: &KnownColumns<'_>, now: Time) -> Guard {
        self.tree.substituted(known, now).bind(source)
    }
}

impl CheckedTree {
    fn substituted(&self, known: &KnownColumns<'_>, now: Time) -> CheckedTree {
        let all =
            |parts: &[CheckedTree]| parts.iter().map(|part| part.substituted(known, now)).collect::<Vec<_>>();
        match self {
            CheckedTree::Leaf(leaf) => {
                let term = |term: &Term| substitute(term, known, now);
                let list = |list: &[Term]| list.iter().map(term).collect();
                let rule = match &leaf.rule {
                    Rule::Compare(left, comparison, right) => {
                        Rule::Compare(term(left), *comparison, term(right))
                    }
                    Rule::Null(one) => Rule::Null(term(one)),
                    Rule::NotNull(one) => Rule::NotNull(term(one)),
                    Rule::In(one, others) => Rule::In(term(one), list(others)),
                    Rule::NotIn(one, others) => Rule::NotIn(term(one), list(others)),
                    // These are not leaves.
                    whole @ (Rule::All(_) | Rule::Any(_)) => whole.clone(),
                };
                CheckedTree::Leaf(CheckedLeaf { rule, kind: leaf.kind })
            }
            CheckedTree::All(parts) => CheckedTree::All(all(parts)),
            CheckedTree::Any(parts) => CheckedTree::Any(all(parts)),
        }
    }
}

fn substitute(term: &Term, known: &KnownColumns<'_>, now: Time) -> Term {
    match term {
        Term::Column(name) => known(name).map_or_else(|| term.clone(), Term::Value),
        Term::Coalesce(name, default) => match known(name) {
            Some(Value::Null) => Term::Value(default.clone()),
            Some(value) => Term::Value(value),
            None => term.clone(),
        },
        Term::Now { plus_micros } => Term::Value(Value::Time(eval::now_moved(now, *plus_micros))),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::declare::rule::{RuleColumns, RuleValues};
    use serde_json::{Map, json};
    use statehouse_store::{Type, guard};

    fn judged(text: &str, known: &[(&str, Value)]) -> Guard {
        let columns = [("user_id", Type::Int), ("state", Type::Text), ("ends_at", Type::Time)];
        let columns = RuleColumns::named(columns.map(|(name, kind)| (name.to_owned(), kind)));
        let rule = Rule::parse(text, &columns, &[]).unwrap();
        let claims: Map<_, _> = json!({"sub": "7", "role": "staff"}).as_object().unwrap().clone();
        let source = RuleValues { claims: Some(&claims), ..RuleValues::default() };
        let known = |name: &str| known.iter().find(|(one, _)| *one == name).map(|(_, value)| value.clone());
        rule.bind_over(&source, &known, Time::from_millis(1_000))
    }

    #[test]
    fn known_columns_decide_a_rule() {
        let (always, never) = (Guard::always(), Guard::never());
        assert_eq!(judged("claims.sub = row.user_id", &[("user_id", 7.into())]), always);
        assert_eq!(judged("claims.sub = row.user_id", &[("user_id", 8.into())]), never);
        assert_eq!(judged("claims.sub = row.user_id", &[("user_id", Value::Json(json!(7)))]), always);
        assert_eq!(judged("claims.sub = row.user_id", &[("user_id", Value::Null)]), never);
        assert_eq!(judged("state is null", &[("state", Value::Null)]), always);
        assert_eq!(judged("state not in ('A')", &[("state", "B".into())]), always);
        assert_eq!(judged("coalesce(state, 'A') = 'A'", &[("state", Value::Null)]), always);
        let (early, late) = (Time::from_millis(999), Time::from_millis(1_001));
        assert_eq!(judged("ends_at <= now", &[("ends_at", early.into())]), always);
        assert_eq!(judged("ends_at <= now", &[("ends_at", late.into())]), never);
    }

    #[test]
    fn unknown_columns_are_left() {
        assert_eq!(judged("claims.sub = row.user_id", &[]), guard::value(7).eq(guard::column("user_id")));
        let known = [("state", "A".into())];
        let left = judged("state = 'A' and user_id = claim.sub", &known);
        assert_eq!(left, guard::column("user_id").eq(7));
        assert_eq!(judged("state = 'B' and user_id = claim.sub", &known), Guard::never());
        assert_eq!(judged("claim.role = 'staff' or user_id = claim.sub", &[]), Guard::always());
    }
}
