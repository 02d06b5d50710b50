//! Statehouse on DynamoDB.
