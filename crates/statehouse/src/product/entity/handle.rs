//! A typed handle on one entity: its rows as a struct of the caller's, its refusals as everywhere.
//!
//! ```
//! use serde::{Deserialize, Serialize};
//! use statehouse::entities::Mutation;
//! use statehouse::{Blueprint, Code, House};
//! use statehouse_store::Tenant;
//!
//! #[derive(Debug, Serialize, Deserialize)]
//! struct Profile {
//!     user_id: i64,
//!     display_name: String,
//!     points: i64,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let blueprint = Blueprint::read(
//!     "statehouse.toml",
//!     "[entity.profile]\nkey = { user_id = 'int' }\nfields = { display_name = 'text', points = 'int' }",
//! )?;
//! let house = House::open("memory:", &blueprint).await?;
//! let profiles = house.entity::<Profile>("profile", &Tenant::new("acme")?)?;
//!
//! let ann = profiles.create(&Profile { user_id: 42, display_name: "Ann".into(), points: 0 }).await?;
//! let renamed = Profile { display_name: "Anna".into(), ..ann.value };
//! profiles.update(42, ann.version, &renamed).await?;
//! let refusal = profiles.update(42, ann.version, &renamed).await.unwrap_err();
//! assert_eq!((refusal.code, refusal.current_version), (Code::VersionConflict, Some(2)));
//!
//! let counted = profiles.mutate(42, Mutation::new().increment("points", 5)).await?;
//! assert_eq!((counted.value.points, counted.version), (5, 3));
//! # Ok(())
//! # }
//! ```
//!
//! The struct has the key and the fields under their names in the blueprint; `status`, `updated_at` and `version` stand
//! beside it in [`Versioned`]. Fields that are declared `hot` stand in another row, which only a read brings along: give
//! them a `#[serde(default)]`. Creating and updating leave them alone; [`Entity::count`] changes them.

use std::marker::PhantomData;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use statehouse_store::table::VERSION;
use statehouse_store::{Tenant, Time, Type, Value};

use super::{CACHED, STATUS, UPDATED_AT};
use crate::action::{Answer, Code, Expected, Refusal};
use crate::cache::ReadToken;
use crate::form::{FieldError, Form, Property};
use crate::house::{House, Operation, Request};
use crate::resource::{Resource, key_text};

/// The keyword of the archetype.
const KEYWORD: &str = "entity";

/// One entity of a house, on behalf of one tenant, with rows of type `T`.
#[derive(Debug)]
pub struct Entity<'h, T> {
    house: &'h House,
    resource: &'h Resource,
    tenant: Tenant,
    operation: Option<String>,
    rows: PhantomData<fn() -> T>,
}

/// A row as it was at one version.
#[derive(Clone, Debug, PartialEq)]
pub struct Versioned<T> {
    /// The key and the fields.
    pub value: T,
    /// What the next write has to name.
    pub version: i64,
    /// Whether the row is there or deleted.
    pub status: EntityStatus,
    /// When it was last written, by the engine's clock.
    pub updated_at: Time,
    /// Of a write: what a cached read brings along to see it.
    pub token: Option<ReadToken>,
}

/// The states of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum EntityStatus {
    /// It can be read and written.
    #[default]
    Active,
    /// It was deleted and can be restored.
    Deleted,
}

/// The key of a row: one part, or a tuple of them.
#[derive(Clone, Debug, PartialEq)]
pub struct EntityKey(Vec<Value>);

/// What a mutation does. Several fields may be changed at once, each in one way.
#[derive(Clone, Debug, Default)]
pub struct Mutation {
    set: Map<String, Json>,
    increment: Map<String, Json>,
    append: Map<String, Json>,
    expected: Option<Expected>,
}

/// Which rows a list is about.
#[derive(Clone, Debug, Default)]
pub struct List {
    /// In which state.
    pub status: EntityStatus,
    /// How many at most; 50 if it is not said.
    pub limit: Option<u32>,
    /// Where a page before this one ended: its `next`.
    pub after: Option<String>,
}

/// A page of a list, newest first.
#[derive(Clone, Debug, PartialEq)]
pub struct EntityPage<T> {
    /// The rows, without their hot fields.
    pub rows: Vec<Versioned<T>>,
    /// Where the next page begins, if there is one.
    pub next: Option<String>,
}

impl House {
    /// The entity of that name, with rows of type `T`, on behalf of a tenant.
    pub fn entity<T>(&self, name: &str, tenant: &Tenant) -> Result<Entity<'_, T>, Refusal> {
        let resource = self.resource(name).map_err(|refusal| {
            let names: Vec<&str> = self.resources().iter().map(|resource| resource.name.as_str()).collect();
            Refusal {
                message: format!("{}; the blueprint has {}", refusal.message, names.join(", ")),
                ..refusal
            }
        })?;
        check_archetype(resource)?;
        Ok(Entity { house: self, resource, tenant: tenant.clone(), operation: None, rows: PhantomData })
    }
}

fn check_archetype(resource: &Resource) -> Result<(), Refusal> {
    let keyword = resource.archetype.keyword();
    if keyword == KEYWORD {
        return Ok(());
    }
    let message =
        format!("`{}` is declared as [{keyword}.{}], not as an entity", resource.name, resource.name);
    Err(Refusal::new(Code::InvalidInput, message))
}

impl<T> Entity<'_, T> {
    /// The same handle for one write under an operation id: however often that write is repeated, it is done once and
    /// has one answer. Another write under the same id is refused.
    #[must_use]
    pub fn under(&self, operation: impl Into<String>) -> Self {
        Entity {
            house: self.house,
            resource: self.resource,
            tenant: self.tenant.clone(),
            operation: Some(operation.into()),
            rows: PhantomData,
        }
    }

    /// Changes hot fields, which stand in a row of their own, and answers with that row: its key and hot fields.
    pub async fn count<H: DeserializeOwned>(
        &self,
        key: impl Into<EntityKey>,
        mutation: Mutation,
    ) -> Result<H, Refusal> {
        let key = key.into();
        let answer = self.call("mutate", &key, mutation.expected, mutation.input()).await?;
        fitting(&self.what(&key), answer.body)
    }

    async fn call(
        &self,
        action: &str,
        key: &EntityKey,
        expected: Option<Expected>,
        input: Map<String, Json>,
    ) -> Result<Answer, Refusal> {
        let action = format!("{}.{action}", self.resource.name);
        let request = Request { action, key: key.0.clone(), input, expected };
        let operation =
            self.operation.as_ref().map_or_else(Operation::default, |id| Operation::under(id, &request));
        self.house.call(&self.tenant, request, operation).await
    }

    fn what(&self, key: &EntityKey) -> String {
        format!("{} {}", self.resource.name, key_text(&key.0))
    }

    /// The names that an action takes.
    fn taken(&self, action: &str) -> impl Iterator<Item = &str> {
        let action = self.resource.action(action);
        action.into_iter().flat_map(|action| &action.input).map(|property| property.name.as_str())
    }

    /// Whether a row has something under this name.
    fn has(&self, name: &str) -> bool {
        let row = self.resource.action("read").map(|action| &action.output);
        matches!(row, Some(Form::Object(properties)) if properties.iter().any(|Property { name: has, .. }| has == name))
    }
}

impl<T: Serialize + DeserializeOwned> Entity<'_, T> {
    /// Creates a row.
    pub async fn create(&self, value: &T) -> Result<Versioned<T>, Refusal> {
        let input = self.whole("create", value)?;
        self.row("create", &EntityKey(Vec::new()), None, input).await
    }

    /// Reads a row as it is.
    pub async fn read(&self, key: impl Into<EntityKey>) -> Result<Versioned<T>, Refusal> {
        self.row("read", &key.into(), None, Map::new()).await
    }

    /// Reads a row from memory if it is there: some moments old at most, and never older than the writes whose tokens
    /// are given.
    pub async fn read_cached(
        &self,
        key: impl Into<EntityKey>,
        after: &[ReadToken],
    ) -> Result<Versioned<T>, Refusal> {
        let mut input = Map::from_iter([("consistency".to_owned(), CACHED.into())]);
        if !after.is_empty() {
            let tokens: Vec<String> = after.iter().map(ToString::to_string).collect();
            input.insert("after".to_owned(), tokens.join(",").into());
        }
        self.row("read", &key.into(), None, input).await
    }

    /// Replaces all fields, under the version that was read. A key in the value must be the row's own.
    pub async fn update(
        &self,
        key: impl Into<EntityKey>,
        expected: impl Into<Expected>,
        value: &T,
    ) -> Result<Versioned<T>, Refusal> {
        let key = key.into();
        let object = object(value)?;
        for ((name, _), part) in self.resource.key.iter().zip(&key.0) {
            if object.get(name).is_some_and(|given| *given != part.to_json()) {
                let detail = format!("the row is {}; a key cannot be changed", self.what(&key));
                return Err(Refusal::invalid(vec![FieldError { pointer: format!("/{name}"), detail }]));
            }
        }
        let input = self.whole("update", value)?;
        self.row("update", &key, Some(expected.into()), input).await
    }

    /// Changes the fields that are given, under the version that was read; null clears an optional one.
    pub async fn patch(
        &self,
        key: impl Into<EntityKey>,
        expected: impl Into<Expected>,
        changes: &impl Serialize,
    ) -> Result<Versioned<T>, Refusal> {
        self.row("patch", &key.into(), Some(expected.into()), object(changes)?).await
    }

    /// Sets, increments or appends to fields where they stand, without reading them first.
    pub async fn mutate(
        &self,
        key: impl Into<EntityKey>,
        mutation: Mutation,
    ) -> Result<Versioned<T>, Refusal> {
        let mut names = mutation.set.keys().chain(mutation.increment.keys()).chain(mutation.append.keys());
        if let Some(hot) =
            names.find(|name| self.has(name) && !self.taken("patch").any(|taken| taken == *name))
        {
            let message = format!("{hot} is hot and stands in a row of its own; use `count`");
            return Err(Refusal::new(Code::InvalidInput, message));
        }
        self.row("mutate", &key.into(), mutation.expected, mutation.input()).await
    }

    /// Deletes a row; it is kept and can be restored. [`Expected::Any`] deletes it at whatever version it is.
    pub async fn delete(
        &self,
        key: impl Into<EntityKey>,
        expected: impl Into<Expected>,
    ) -> Result<Versioned<T>, Refusal> {
        self.row("delete", &key.into(), Some(expected.into()), Map::new()).await
    }

    /// Brings a deleted row back.
    pub async fn restore(
        &self,
        key: impl Into<EntityKey>,
        expected: impl Into<Expected>,
    ) -> Result<Versioned<T>, Refusal> {
        self.row("restore", &key.into(), Some(expected.into()), Map::new()).await
    }

    /// Lists rows by status, newest first. Hot fields are not in a list.
    pub async fn list(&self, list: &List) -> Result<EntityPage<T>, Refusal> {
        let status = serde_json::to_value(list.status).unwrap_or_default();
        let mut input = Map::from_iter([(STATUS.to_owned(), status)]);
        if let Some(limit) = list.limit {
            input.insert("limit".to_owned(), limit.into());
        }
        if let Some(cursor) = &list.after {
            input.insert("cursor".to_owned(), cursor.as_str().into());
        }
        let answer = self.call("list", &EntityKey(Vec::new()), None, input).await?;
        let Json::Array(rows) = answer.body else {
            return Err(Refusal::new(Code::Internal, format!("a list of {} is no list", self.resource.name)));
        };
        let what = format!("a row of {}", self.resource.name);
        let rows = rows.into_iter().map(|row| versioned(&what, Answer::row(row)));
        Ok(EntityPage { rows: rows.collect::<Result<_, Refusal>>()?, next: answer.next })
    }

    async fn row(
        &self,
        action: &str,
        key: &EntityKey,
        expected: Option<Expected>,
        input: Map<String, Json>,
    ) -> Result<Versioned<T>, Refusal> {
        let answer = self.call(action, key, expected, input).await?;
        versioned(&self.what(key), answer)
    }

    /// A whole value as an action takes it: without what the row has and the action does not take.
    fn whole(&self, action: &str, value: &T) -> Result<Map<String, Json>, Refusal> {
        let mut input = object(value)?;
        input.retain(|name, _| self.taken(action).any(|taken| taken == name) || !self.has(name));
        Ok(input)
    }
}

/// A value as an object.
fn object(value: &impl Serialize) -> Result<Map<String, Json>, Refusal> {
    let detail = match serde_json::to_value(value) {
        Ok(Json::Object(object)) => return Ok(object),
        Ok(_) => "a row is a struct or a map with a name for each field".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Refusal::invalid(vec![FieldError { pointer: String::new(), detail }]))
}

/// What was read or written, as the caller's type.
fn fitting<T: DeserializeOwned>(what: &str, body: Json) -> Result<T, Refusal> {
    serde_json::from_value(body).map_err(|error| {
        let message = format!("{what} is in order, but it does not fit the type that was asked for: {error}");
        Refusal::new(Code::Internal, message)
    })
}

fn versioned<T: DeserializeOwned>(what: &str, answer: Answer) -> Result<Versioned<T>, Refusal> {
    let Answer { mut body, version, token, .. } = answer;
    let mut take = |name: &str| body.as_object_mut().and_then(|row| row.remove(name)).unwrap_or_default();
    take(VERSION);
    let status = serde_json::from_value(take(STATUS));
    let updated_at = Value::from_json(take(UPDATED_AT), Type::Time);
    let (Some(version), Ok(status), Ok(Value::Time(updated_at))) = (version, status, updated_at) else {
        return Err(Refusal::new(Code::Internal, format!("{what} has no version, status or time")));
    };
    let token = token.and_then(|token| token.parse().ok());
    Ok(Versioned { value: fitting(what, body)?, version, status, updated_at, token })
}

impl Mutation {
    /// Does nothing yet.
    pub fn new() -> Mutation {
        Mutation::default()
    }

    /// Sets a field.
    #[must_use]
    pub fn set(mut self, field: &str, content: impl Into<Json>) -> Mutation {
        self.set.insert(field.to_owned(), content.into());
        self
    }

    /// Adds to a number.
    #[must_use]
    pub fn increment(mut self, field: &str, amount: impl Into<Json>) -> Mutation {
        self.increment.insert(field.to_owned(), amount.into());
        self
    }

    /// Adds an item at the end of a list.
    #[must_use]
    pub fn append(mut self, field: &str, item: impl Into<Json>) -> Mutation {
        self.append.insert(field.to_owned(), item.into());
        self
    }

    /// Only if the row is at this version.
    #[must_use]
    pub fn at(mut self, version: i64) -> Mutation {
        self.expected = Some(Expected::Version(version));
        self
    }

    fn input(self) -> Map<String, Json> {
        let parts = [("set", self.set), ("increment", self.increment), ("append", self.append)];
        let given = parts.into_iter().filter(|(_, fields)| !fields.is_empty());
        given.map(|(name, fields)| (name.to_owned(), Json::Object(fields))).collect()
    }
}

impl From<Vec<Value>> for EntityKey {
    fn from(parts: Vec<Value>) -> EntityKey {
        EntityKey(parts)
    }
}

/// Keys of one part.
macro_rules! key_of_one_part {
    ($($kind:ty),*) => {
        $(impl From<$kind> for EntityKey {
            fn from(part: $kind) -> EntityKey {
                EntityKey(vec![part.into()])
            }
        })*
    };
}

key_of_one_part!(i64, i32, f64, bool, &str, String, Time);

impl<A: Into<Value>, B: Into<Value>> From<(A, B)> for EntityKey {
    fn from((first, second): (A, B)) -> EntityKey {
        EntityKey(vec![first.into(), second.into()])
    }
}

impl<A: Into<Value>, B: Into<Value>, C: Into<Value>> From<(A, B, C)> for EntityKey {
    fn from((first, second, third): (A, B, C)) -> EntityKey {
        EntityKey(vec![first.into(), second.into(), third.into()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Blueprint, resource};

    #[test]
    fn what_is_no_entity_is_refused_with_what_it_is() {
        let blueprint = Blueprint::read("statehouse.toml", "[entity.seat]\nkey = { id = 'int' }").unwrap();
        let entity = resource::declare(&blueprint).unwrap().remove(0);
        check_archetype(&entity).unwrap();
        let other = Resource { archetype: crate::atlas::by_keyword("booking").unwrap(), ..entity };
        let refusal = check_archetype(&other).unwrap_err();
        assert!(refusal.message.contains("declared as [booking.seat]"), "{refusal}");
    }
}
