//! All rows of a person: the rows of every resource that says by `person` in which column the person stands.
//!
//! Each row is erased by the `erase` action of its resource, one plan each, so that constraints are kept. A row that others refer to is
//! refused until these are erased, so the resources are gone through again as long as that erases something. Rows are found by a scan
//! of the tenant's tables, which is strong on every engine and needs no index.

use statehouse_store::{Cursor, PlanError, Row, Scan, Tenant, Value};

use crate::action::{Code, Refusal};
use crate::house::{House, Operation, Request};
use crate::resource::{Resource, key_text};

/// Rows that one step looks at.
const ROWS_MAX: usize = 200;

/// What was done for a person.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PersonProgress {
    /// How many rows were erased.
    pub erased: usize,
    /// Rows that could not be erased, as resource and key, and why.
    pub refused: Vec<(String, String, Refusal)>,
    /// Whether every row was looked at.
    pub is_done: bool,
}

/// The erasure of a person's rows, in bounded steps. It can be begun again at any time: what was erased is gone.
#[derive(Debug)]
pub struct PersonErasure<'h> {
    house: &'h House,
    tenant: Tenant,
    person: String,
    /// The resource that is gone through, and from where on.
    at: usize,
    cursor: Option<Cursor>,
    /// What this round has erased; another one follows if it erased something and rows were refused.
    erased_in_round: usize,
    progress: PersonProgress,
}

impl<'h> PersonErasure<'h> {
    /// The erasure of a person's rows in a tenant.
    pub fn of(house: &'h House, tenant: &Tenant, person: impl Into<String>) -> PersonErasure<'h> {
        PersonErasure {
            house,
            tenant: tenant.clone(),
            person: person.into(),
            at: 0,
            cursor: None,
            erased_in_round: 0,
            progress: PersonProgress::default(),
        }
    }

    /// The resources that say where the person stands.
    pub fn resources(house: &House) -> impl Iterator<Item = &Resource> {
        house.resources().iter().filter(|resource| resource.person.is_some())
    }

    /// Looks at the next rows and erases those of the person.
    pub async fn step(&mut self) -> Result<&PersonProgress, Refusal> {
        let house = self.house;
        let Some(resource) = PersonErasure::resources(house).nth(self.at) else {
            let again = self.erased_in_round > 0 && !self.progress.refused.is_empty();
            self.progress.is_done = !again;
            if again {
                (self.at, self.erased_in_round) = (0, 0);
                self.progress.refused.clear();
            }
            return Ok(&self.progress);
        };
        let (Some(table), Some(column)) = (resource.tables.first(), resource.person.as_deref()) else {
            self.at += 1;
            return Ok(&self.progress);
        };
        let bad = |error: PlanError| Refusal::from(error);
        let mut scan = Scan::of(table, &self.tenant).limit(ROWS_MAX).map_err(bad)?;
        if let Some(cursor) = self.cursor.take() {
            scan = scan.after(cursor).map_err(bad)?;
        }
        let page = house.store().scan(&scan).await?;
        let person = self.person.clone();
        for row in page.rows.iter().filter(|row| row.get(column).is_some_and(|value| is(value, &person))) {
            self.erase(resource, row).await?;
        }
        match page.next {
            Some(next) => self.cursor = Some(next),
            None => self.at += 1,
        }
        Ok(&self.progress)
    }

    /// All steps.
    pub async fn finish(mut self) -> Result<PersonProgress, Refusal> {
        while !self.step().await?.is_done {}
        Ok(self.progress)
    }

    async fn erase(&mut self, resource: &Resource, row: &Row) -> Result<(), Refusal> {
        let request = Request {
            action: format!("{}.erase", resource.name),
            key: row.key().to_vec(),
            input: serde_json::Map::new(),
            expected: None,
        };
        match self.house.call(&self.tenant, request, Operation::default()).await {
            Ok(_) => {
                self.progress.erased += 1;
                self.erased_in_round += 1;
                Ok(())
            }
            // Another caller erased it, or an attempt of this one whose answer was lost.
            Err(refusal) if refusal.code == Code::NotFound => Ok(()),
            Err(refusal) if refusal.code == Code::OutcomeUnknown || refusal.code == Code::Unavailable => {
                Err(refusal)
            }
            Err(refusal) => {
                self.progress.refused.push((resource.name.clone(), key_text(row.key()), refusal));
                Ok(())
            }
        }
    }
}

/// Whether a value is that of a person.
fn is(value: &Value, person: &str) -> bool {
    match value {
        Value::Text(text) => text == person,
        Value::Int(number) => number.to_string() == person,
        _ => false,
    }
}
