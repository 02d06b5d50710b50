//! One item's part of a write: what becomes of it, and under which condition. It is sent alone or in a transaction,
//! and printed by `explain` as it would be sent.

use aws_sdk_dynamodb::error::BuildError;
use aws_sdk_dynamodb::types::{
    AttributeValue, ConditionCheck, Delete, Put, ReturnValuesOnConditionCheckFailure, TransactWriteItem,
    Update,
};
use serde_json::{Map, Value as Json, json};

use crate::expression::{Condition, Terms};
use crate::item::Item;

/// What becomes of an item.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verb {
    /// The item is replaced by this one.
    Put(Item),
    /// The attributes change as this expression says.
    Update(String),
    /// The item goes.
    Delete,
    /// Nothing.
    Check,
}

/// One item's part of a write.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Action {
    /// The table's name on the server.
    pub(crate) table: String,
    pub(crate) key: Item,
    pub(crate) verb: Verb,
    pub(crate) condition: Option<String>,
    pub(crate) terms: Terms,
    /// Whether DynamoDB's limits on expressions are kept.
    pub(crate) fits: bool,
    /// Bytes that it is known to write.
    pub(crate) weight: usize,
}

/// The clauses of an update expression.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clauses {
    pub(crate) set: Vec<String>,
    pub(crate) remove: Vec<String>,
    pub(crate) add: Vec<String>,
}

impl Clauses {
    /// Sets an attribute to a value.
    pub(crate) fn set(&mut self, terms: &mut Terms, attribute: &str, value: AttributeValue) {
        self.set.push(format!("{} = {}", terms.name(attribute), terms.value(value)));
    }

    /// Takes an attribute away.
    pub(crate) fn remove(&mut self, terms: &mut Terms, attribute: &str) {
        self.remove.push(terms.name(attribute));
    }

    /// Adds an element to a set of texts.
    pub(crate) fn add(&mut self, terms: &mut Terms, attribute: &str, element: &str) {
        let set = AttributeValue::Ss(vec![element.to_owned()]);
        self.add.push(format!("{} {}", terms.name(attribute), terms.value(set)));
    }

    fn text(&self) -> String {
        let clause = |word: &str, parts: &[String]| match parts {
            [] => None,
            parts => Some(format!("{word} {}", parts.join(", "))),
        };
        let clauses = [clause("SET", &self.set), clause("REMOVE", &self.remove), clause("ADD", &self.add)];
        clauses.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }
}

impl Action {
    /// A part under a condition.
    pub(crate) fn new(table: &str, key: Item, verb: Verb, condition: Condition, mut terms: Terms) -> Action {
        let (condition, fits) = condition.print(&mut terms);
        let expression = if let Verb::Update(expression) = &verb { expression.as_str() } else { "" };
        terms.keep_used(&[expression, condition.as_deref().unwrap_or_default()]);
        Action { table: table.to_owned(), key, verb, condition, terms, fits, weight: 0 }
    }

    /// A change of attributes under a condition.
    pub(crate) fn update(
        table: &str,
        key: Item,
        clauses: &Clauses,
        condition: Condition,
        terms: Terms,
    ) -> Action {
        let expression = clauses.text();
        let fits = expression.len() <= 4_096;
        let mut action = Action::new(table, key, Verb::Update(expression), condition, terms);
        action.fits &= fits;
        action
    }

    /// Notes how many bytes it writes.
    #[must_use]
    pub(crate) fn weighing(mut self, bytes: usize) -> Action {
        self.weight = bytes;
        self
    }

    /// As a part of a transaction. A failed condition returns the item.
    pub(crate) fn in_transaction(&self) -> Result<TransactWriteItem, BuildError> {
        let old = ReturnValuesOnConditionCheckFailure::AllOld;
        let item = TransactWriteItem::builder();
        Ok(match &self.verb {
            Verb::Put(content) => item.put(
                Put::builder()
                    .table_name(&self.table)
                    .set_item(Some(content.clone()))
                    .set_condition_expression(self.condition.clone())
                    .set_expression_attribute_names(self.terms.names())
                    .set_expression_attribute_values(self.terms.values())
                    .return_values_on_condition_check_failure(old)
                    .build()?,
            ),
            Verb::Update(expression) => item.update(
                Update::builder()
                    .table_name(&self.table)
                    .set_key(Some(self.key.clone()))
                    .update_expression(expression)
                    .set_condition_expression(self.condition.clone())
                    .set_expression_attribute_names(self.terms.names())
                    .set_expression_attribute_values(self.terms.values())
                    .return_values_on_condition_check_failure(old)
                    .build()?,
            ),
            Verb::Delete => item.delete(
                Delete::builder()
                    .table_name(&self.table)
                    .set_key(Some(self.key.clone()))
                    .set_condition_expression(self.condition.clone())
                    .set_expression_attribute_names(self.terms.names())
                    .set_expression_attribute_values(self.terms.values())
                    .return_values_on_condition_check_failure(old)
                    .build()?,
            ),
            Verb::Check => item.condition_check(
                ConditionCheck::builder()
                    .table_name(&self.table)
                    .set_key(Some(self.key.clone()))
                    .set_condition_expression(self.condition.clone())
                    .set_expression_attribute_names(self.terms.names())
                    .set_expression_attribute_values(self.terms.values())
                    .return_values_on_condition_check_failure(old)
                    .build()?,
            ),
        }
        .build())
    }

    /// The name of the request that sends it alone.
    pub(crate) fn request_name(&self) -> &'static str {
        match self.verb {
            Verb::Put(_) => "PutItem",
            Verb::Update(_) => "UpdateItem",
            Verb::Delete => "DeleteItem",
            Verb::Check => "ConditionCheck",
        }
    }

    /// The name of its part in a transaction.
    pub(crate) fn part_name(&self) -> &'static str {
        match self.verb {
            Verb::Put(_) => "Put",
            Verb::Update(_) => "Update",
            Verb::Delete => "Delete",
            Verb::Check => "ConditionCheck",
        }
    }

    /// The fields of the request, as they are sent.
    pub(crate) fn to_json(&self) -> Json {
        let mut fields = Map::new();
        fields.insert("TableName".into(), self.table.clone().into());
        match &self.verb {
            Verb::Put(item) => drop(fields.insert("Item".into(), item_json(item))),
            _ => drop(fields.insert("Key".into(), item_json(&self.key))),
        }
        if let Verb::Update(expression) = &self.verb {
            fields.insert("UpdateExpression".into(), expression.clone().into());
        }
        if let Some(condition) = &self.condition {
            fields.insert("ConditionExpression".into(), condition.clone().into());
        }
        if let Some(names) = self.terms.names() {
            let names = names.into_iter().map(|(placeholder, name)| (placeholder, Json::from(name)));
            fields.insert("ExpressionAttributeNames".into(), Json::Object(names.collect()));
        }
        if let Some(values) = self.terms.values() {
            fields.insert("ExpressionAttributeValues".into(), item_json(&values));
        }
        fields.insert("ReturnValuesOnConditionCheckFailure".into(), "ALL_OLD".into());
        Json::Object(fields)
    }
}

/// An item as it is sent.
pub(crate) fn item_json(item: &Item) -> Json {
    Json::Object(item.iter().map(|(name, value)| (name.clone(), attribute_json(value))).collect())
}

fn attribute_json(value: &AttributeValue) -> Json {
    match value {
        AttributeValue::S(text) => json!({ "S": text }),
        AttributeValue::N(number) => json!({ "N": number }),
        AttributeValue::Bool(bool) => json!({ "BOOL": bool }),
        AttributeValue::B(blob) => {
            // Printed for people: the request itself carries base64.
            let hex: String = blob.as_ref().iter().map(|octet| format!("{octet:02x}")).collect();
            json!({ "B": format!("0x{hex}") })
        }
        AttributeValue::Ss(texts) => json!({ "SS": texts }),
        other => json!({ "?": format!("{other:?}") }),
    }
}
