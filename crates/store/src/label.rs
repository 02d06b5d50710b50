//! Names of steps within a plan, such as `unit/named`, by which a refusal is attributed to its cause.
//!
//! A label is for the author of the plan only. Engines ignore it: it is neither sent nor stored, and two plans that differ
//! in labels alone compile to the same statements. A refusal carries the index of its step; the plan has the label
//! ([`crate::Refused::label`]).

use std::borrow::Cow;
use std::fmt;

/// The name of a step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Label(Cow<'static, str>);

impl Label {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&'static str> for Label {
    fn from(name: &'static str) -> Label {
        Label(Cow::Borrowed(name))
    }
}

impl From<String> for Label {
    fn from(name: String) -> Label {
        Label(Cow::Owned(name))
    }
}

impl PartialEq<str> for Label {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::guard::column;
    use crate::{Commit, Guard, Migrate, ModelStore, Plan, Schema, Step, Store, Table, Tenant, Type};

    fn units() -> Arc<Table> {
        Table::named("units").partition("unit", Type::Int).optional("holder", Type::Text).build().unwrap()
    }

    fn holder_is(name: &str) -> Guard {
        column("holder").eq(name)
    }

    #[test]
    fn a_step_prints_its_label_first() {
        let step = Step::update(&units(), [1.into()]).guard(holder_is("ann")).set("holder", "bob");
        let plain = step.to_string();
        assert_eq!(step.label("unit/named").to_string(), format!("unit/named: {plain}"));
    }

    #[test]
    fn a_label_survives_the_build_and_is_no_part_of_the_limits() {
        let tenant = Tenant::new("acme").unwrap();
        let step = Step::update(&units(), [1.into()]).set("holder", "bob");
        let plan = Plan::of(&tenant, "op").step(step.label("x".repeat(1_000_000))).build().unwrap();
        assert_eq!(plan.steps()[0].label.as_ref().map(|label| label.as_str().len()), Some(1_000_000));
        let again = plan.to_builder().build().unwrap();
        assert_eq!(again, plan);
    }

    #[tokio::test]
    async fn a_refusal_leads_to_the_label_and_the_failed_guard() {
        let (table, tenant) = (units(), Tenant::new("acme").unwrap());
        let store = ModelStore::new();
        store.migrate(&Schema::new([table.clone()]).unwrap(), Migrate::Apply).await.unwrap();
        let fill = Plan::of(&tenant, "fill").step(Step::insert(&table, [1.into()]).set("holder", "ann"));
        store.commit(&fill.build().unwrap()).await.unwrap();
        let insert = Step::insert(&table, [2.into()]).label("unit/new");
        let update = Step::update(&table, [1.into()]).guard(holder_is("bob")).label("unit/named".to_owned());
        let plan = Plan::of(&tenant, "op").step(insert.clone()).step(update).build().unwrap();
        let Commit::Refused(refused) = store.commit(&plan).await.unwrap() else { panic!("applied") };
        assert!(refused.label(&plan).is_some_and(|label| label == "unit/named"));
        assert_eq!(refused.guard(), Some(&holder_is("bob")));
        let again = Step::insert(&table, [1.into()]);
        let plan = Plan::of(&tenant, "op").step(again).step(insert).build().unwrap();
        let Commit::Refused(refused) = store.commit(&plan).await.unwrap() else { panic!("applied") };
        assert_eq!((refused.label(&plan), refused.guard()), (None, None));
    }
}
