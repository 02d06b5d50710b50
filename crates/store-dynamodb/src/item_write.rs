//! A conditional write of one item. It is sent as a single request or as a part of a transaction, and `explain` prints
//! it as it would be sent.

use aws_sdk_dynamodb::error::BuildError;
use aws_sdk_dynamodb::types::{
    AttributeValue, ConditionCheck, Delete, Put, ReturnValuesOnConditionCheckFailure, TransactWriteItem,
    Update,
};
use serde_json::{Map, Value as Json, json};

use crate::expression::{Condition, ExpressionPlaceholders};
use crate::item::Item;

/// The kind of a write.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum WriteKind {
    /// The item is replaced by this one.
    Put(Item),
    /// The attributes are updated by this expression.
    Update(String),
    /// The item is deleted.
    Delete,
    /// Only the condition is checked.
    Check,
}

/// A conditional write of one item.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ItemWrite {
    /// The table's name on the server.
    pub(crate) table: String,
    pub(crate) key: Item,
    pub(crate) kind: WriteKind,
    pub(crate) condition: Option<String>,
    pub(crate) terms: ExpressionPlaceholders,
    /// Whether the expressions are within DynamoDB's limits.
    pub(crate) fits: bool,
    /// Bytes that it writes, as far as they are known.
    pub(crate) weight: usize,
}

/// The clauses of an update expression.
#[derive(Clone, Debug, Default)]
pub(crate) struct UpdateClauses {
    pub(crate) set: Vec<String>,
    pub(crate) remove: Vec<String>,
    pub(crate) add: Vec<String>,
}

impl UpdateClauses {
    /// Sets an attribute to a value.
    pub(crate) fn set(&mut self, terms: &mut ExpressionPlaceholders, attribute: &str, value: AttributeValue) {
        self.set.push(format!("{} = {}", terms.name(attribute), terms.value(value)));
    }

    /// Removes an attribute.
    pub(crate) fn remove(&mut self, terms: &mut ExpressionPlaceholders, attribute: &str) {
        self.remove.push(terms.name(attribute));
    }

    /// Adds an element to a set of texts.
    pub(crate) fn add(&mut self, terms: &mut ExpressionPlaceholders, attribute: &str, element: &str) {
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

impl ItemWrite {
    /// A write under a condition.
    pub(crate) fn new(
        table: &str,
        key: Item,
        kind: WriteKind,
        condition: Condition,
        mut terms: ExpressionPlaceholders,
    ) -> ItemWrite {
        let (condition, fits) = condition.print(&mut terms);
        let expression = if let WriteKind::Update(expression) = &kind { expression.as_str() } else { "" };
        terms.keep_used(&[expression, condition.as_deref().unwrap_or_default()]);
        ItemWrite { table: table.to_owned(), key, kind, condition, terms, fits, weight: 0 }
    }

    /// A change of attributes under a condition.
    pub(crate) fn update(
        table: &str,
        key: Item,
        clauses: &UpdateClauses,
        condition: Condition,
        terms: ExpressionPlaceholders,
    ) -> ItemWrite {
        let expression = clauses.text();
        let fits = expression.len() <= 4_096;
        let mut write = ItemWrite::new(table, key, WriteKind::Update(expression), condition, terms);
        write.fits &= fits;
        write
    }

    /// Sets the number of bytes that it writes.
    #[must_use]
    pub(crate) fn weighing(mut self, bytes: usize) -> ItemWrite {
        self.weight = bytes;
        self
    }

    /// The write as a part of a transaction. A failed condition returns the item.
    pub(crate) fn in_transaction(&self) -> Result<TransactWriteItem, BuildError> {
        let old = ReturnValuesOnConditionCheckFailure::AllOld;
        let item = TransactWriteItem::builder();
        Ok(match &self.kind {
            WriteKind::Put(content) => item.put(
                Put::builder()
                    .table_name(&self.table)
                    .set_item(Some(content.clone()))
                    .set_condition_expression(self.condition.clone())
                    .set_expression_attribute_names(self.terms.names())
                    .set_expression_attribute_values(self.terms.values())
                    .return_values_on_condition_check_failure(old)
                    .build()?,
            ),
            WriteKind::Update(expression) => item.update(
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
            WriteKind::Delete => item.delete(
                Delete::builder()
                    .table_name(&self.table)
                    .set_key(Some(self.key.clone()))
                    .set_condition_expression(self.condition.clone())
                    .set_expression_attribute_names(self.terms.names())
                    .set_expression_attribute_values(self.terms.values())
                    .return_values_on_condition_check_failure(old)
                    .build()?,
            ),
            WriteKind::Check => item.condition_check(
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

    /// The name of the single request.
    pub(crate) fn request_name(&self) -> &'static str {
        match self.kind {
            WriteKind::Put(_) => "PutItem",
            WriteKind::Update(_) => "UpdateItem",
            WriteKind::Delete => "DeleteItem",
            WriteKind::Check => "ConditionCheck",
        }
    }

    /// The name of its part in a transaction.
    pub(crate) fn part_name(&self) -> &'static str {
        match self.kind {
            WriteKind::Put(_) => "Put",
            WriteKind::Update(_) => "Update",
            WriteKind::Delete => "Delete",
            WriteKind::Check => "ConditionCheck",
        }
    }

    /// The fields of the request, as they are sent.
    pub(crate) fn to_json(&self) -> Json {
        let mut fields = Map::new();
        fields.insert("TableName".into(), self.table.clone().into());
        match &self.kind {
            WriteKind::Put(item) => drop(fields.insert("Item".into(), item_json(item))),
            _ => drop(fields.insert("Key".into(), item_json(&self.key))),
        }
        if let WriteKind::Update(expression) = &self.kind {
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
            // Printed as hex for readability. The request itself carries base64.
            let hex: String = blob.as_ref().iter().map(|octet| format!("{octet:02x}")).collect();
            json!({ "B": format!("0x{hex}") })
        }
        AttributeValue::Ss(texts) => json!({ "SS": texts }),
        other => json!({ "?": format!("{other:?}") }),
    }
}
