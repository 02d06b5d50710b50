//! The errors of requests, classified by what they say about the outcome.

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use statehouse_store::StoreError;

/// The server's limit for the bytes of an item.
const SERVER_ITEM_BYTES_MAX: usize = 400 * 1_024;
/// Characters of a server message that are kept in errors.
const MESSAGE_MAX: usize = 400;

/// Why one attempt failed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RequestError {
    /// Not applied, for lack of capacity.
    Throttled(String),
    /// Not applied, because a transaction on the same item is under way.
    Conflict(String),
    /// Not applied, because a condition failed.
    Condition,
    /// The same transaction is being applied.
    InProgress,
    /// The table does not exist.
    TableNotFound(String),
    /// The table is being changed.
    TableInUse(String),
    /// The server rejects the content of the request.
    Invalid(String),
    /// The server rejects the credentials, or the request for another permanent reason.
    Rejected(String),
    /// The request did not reach the server.
    NotSent(String),
    /// The request may have been applied.
    UnknownOutcome(String),
}

impl RequestError {
    /// The error of a request that was not applied.
    pub(crate) fn into_error(self, what: &str) -> StoreError {
        match self {
            RequestError::TableNotFound(why) => {
                StoreError::schema(what, format!("{why}; migrate to a schema that has it"))
            }
            // The contract's row limit leaves room for the attributes that this store adds. Only rows with many indexes
            // whose keys are all long and escaped reach the server's limit.
            RequestError::Invalid(why) if why.contains("Item size") => StoreError::LimitExceeded {
                what: format!("{what}, with its index keys,"),
                limit: SERVER_ITEM_BYTES_MAX,
                actual: SERVER_ITEM_BYTES_MAX + 1,
            },
            RequestError::Invalid(why) => {
                StoreError::corrupt(what, format!("the server rejects the request: {why}"))
            }
            RequestError::Condition => {
                StoreError::unavailable(format!("{what}: a condition failed unexpectedly"))
            }
            RequestError::InProgress => StoreError::unavailable(format!("{what}: still in progress")),
            RequestError::Throttled(why)
            | RequestError::Conflict(why)
            | RequestError::TableInUse(why)
            | RequestError::Rejected(why)
            | RequestError::NotSent(why)
            | RequestError::UnknownOutcome(why) => StoreError::unavailable(format!("{what}: {why}")),
        }
    }

    /// Whether a retry can succeed.
    pub(crate) fn is_retryable(&self) -> bool {
        matches!(
            self,
            RequestError::Throttled(_)
                | RequestError::Conflict(_)
                | RequestError::InProgress
                | RequestError::NotSent(_)
                | RequestError::UnknownOutcome(_)
        )
    }
}

/// Classifies an error of the SDK.
pub(crate) fn classify<E>(error: &SdkError<E>) -> RequestError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    let SdkError::ServiceError(context) = error else {
        let why = error_chain(error);
        let not_sent = match error {
            SdkError::ConstructionFailure(_) => true,
            // The connector reports a failed connection only in the text of its error.
            SdkError::DispatchFailure(_) => why.contains("tcp connect error") || why.contains("dns error"),
            _ => false,
        };
        return if not_sent { RequestError::NotSent(why) } else { RequestError::UnknownOutcome(why) };
    };
    let (status, code) = (context.raw().status().as_u16(), error.code().unwrap_or("no code"));
    // Some servers include the whole request in the message.
    let message: String = error.message().unwrap_or("no message").chars().take(MESSAGE_MAX).collect();
    let why = format!("{code}: {message}");
    match code {
        "ProvisionedThroughputExceededException"
        | "RequestLimitExceeded"
        | "ThrottlingException"
        | "Throttling"
        | "LimitExceededException" => RequestError::Throttled(why),
        "TransactionConflictException" => RequestError::Conflict(why),
        "ConditionalCheckFailedException" => RequestError::Condition,
        "TransactionInProgressException" => RequestError::InProgress,
        "ResourceNotFoundException" => RequestError::TableNotFound(why),
        "ResourceInUseException" => RequestError::TableInUse(why),
        "ValidationException" | "ItemCollectionSizeLimitExceededException" => RequestError::Invalid(why),
        _ if status >= 500 => RequestError::UnknownOutcome(why),
        _ => RequestError::Rejected(why),
    }
}

fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
