//! The options of a store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use statehouse_store::{Clock, StoreError, SystemClock};

/// The billing of tables that the store creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Billing {
    /// By request.
    OnDemand,
    /// By provisioned units a second, the same for every table and index.
    Provisioned {
        /// Read units a second.
        read_units: i64,
        /// Write units a second.
        write_units: i64,
    },
}

/// The credentials of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// By the usual AWS configuration: environment, profiles, container or instance role.
    Configured,
    /// Fixed credentials, for emulators, which do not check them.
    Emulator,
}

/// How a [`crate::DynamoStore`] is opened.
#[derive(Clone)]
pub struct DynamoOptions {
    /// The prefix of every table name: table `profiles` is `<prefix>.profiles` on the server. Table names cannot contain a
    /// dot, so different prefixes never collide.
    pub prefix: String,
    /// The region; by the usual AWS configuration if it is not given.
    pub region: Option<String>,
    /// The server's address; by the usual AWS configuration if it is not given.
    pub endpoint: Option<String>,
    /// The credentials.
    pub credentials: Credentials,
    /// How many partitions the log gets when the store is created (16 if it is not given). A store that exists keeps
    /// its own number, and asking for another is an error.
    pub partitions: Option<u32>,
    /// The billing of new tables.
    pub billing: Billing,
    /// The clock behind `Now`.
    pub clock: Arc<dyn Clock>,
    /// The clock of pauses: between retries and between polls of the log. The server runs in real time, so this is the
    /// system clock even if a test controls `Now`.
    pub retry_clock: Arc<dyn Clock>,
    /// How far the clocks of the processes that share a store may be from true time.
    ///
    /// Guards on `Now` use the caller's clock, so a deadline may take effect this much too early or too late. The order of
    /// the log depends on it only through the lifetime of tombstones.
    pub clock_skew: Duration,
    /// The timeout of one attempt.
    pub request_timeout: Duration,
    /// The maximal age of the cached table definitions. A migration that has to backfill rows waits for twice this time, so
    /// that every process has the new definition when the backfill begins.
    pub schema_lease: Duration,
    /// The server's limit for the items of a transaction: 100. Old emulators have a smaller one.
    pub transaction_items: usize,
}

impl DynamoOptions {
    /// Options for a prefix, with defaults.
    pub fn new(prefix: impl Into<String>) -> DynamoOptions {
        DynamoOptions {
            prefix: prefix.into(),
            region: None,
            endpoint: None,
            credentials: Credentials::Configured,
            partitions: None,
            billing: Billing::OnDemand,
            clock: Arc::new(SystemClock),
            retry_clock: Arc::new(SystemClock),
            clock_skew: Duration::from_secs(1),
            request_timeout: Duration::from_secs(10),
            schema_lease: Duration::from_secs(10),
            transaction_items: 100,
        }
    }

    /// Reads `dynamodb://prefix?name=value&…`, with any of these names:
    ///
    /// | name | value |
    /// |---|---|
    /// | `region` | for example `eu-central-1` |
    /// | `endpoint` | for example `http://127.0.0.1:8000` |
    /// | `credentials` | `configured` (the default) or `emulator` |
    /// | `partitions` | of the log, for a new store |
    /// | `billing` | `on-demand` (the default) or `provisioned`, with `read_units` and `write_units` |
    /// | `clock_skew_micros` | the maximal error of clocks |
    /// | `request_timeout_ms`, `schema_lease_ms`, `transaction_items` | see the fields of [`DynamoOptions`] |
    pub fn from_url(url: &str) -> Result<DynamoOptions, StoreError> {
        let bad = |why: String| StoreError::schema(format!("the address {url}"), why);
        let rest = url
            .strip_prefix("dynamodb://")
            .ok_or_else(|| bad("it does not begin with dynamodb://".to_owned()))?;
        let (prefix, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let mut options = DynamoOptions::new(prefix.trim_end_matches('/'));
        let (mut provisioned, mut read_units, mut write_units) = (false, 5, 5);
        for pair in parameters.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value =
                percent_decoded(value).ok_or_else(|| bad(format!("{name} is not percent-encoded text")))?;
            let number = || -> Result<u32, StoreError> {
                let count = value.parse::<u32>().ok().filter(|count| *count > 0);
                count.ok_or_else(|| bad(format!("{name} is {value:?}; it takes a whole number from 1")))
            };
            match name {
                "region" => options.region = Some(value),
                "endpoint" => options.endpoint = Some(value),
                "partitions" => options.partitions = Some(number()?),
                "read_units" => read_units = i64::from(number()?),
                "write_units" => write_units = i64::from(number()?),
                "clock_skew_micros" => options.clock_skew = Duration::from_micros(number()?.into()),
                "request_timeout_ms" => options.request_timeout = Duration::from_millis(number()?.into()),
                "schema_lease_ms" => options.schema_lease = Duration::from_millis(number()?.into()),
                "transaction_items" => {
                    let count = usize::try_from(number()?).map_err(|error| bad(error.to_string()))?;
                    options.transaction_items = count;
                }
                "billing" if value == "on-demand" => provisioned = false,
                "billing" if value == "provisioned" => provisioned = true,
                "billing" => {
                    return Err(bad(format!("billing is {value:?}; it is on-demand or provisioned")));
                }
                "credentials" if value == "configured" => options.credentials = Credentials::Configured,
                "credentials" if value == "emulator" => options.credentials = Credentials::Emulator,
                "credentials" => {
                    return Err(bad(format!("credentials is {value:?}; it is configured or emulator")));
                }
                other => return Err(bad(format!("there is no parameter {other}"))),
            }
        }
        if provisioned {
            options.billing = Billing::Provisioned { read_units, write_units };
        }
        options.check()?;
        Ok(options)
    }

    /// Checks the options that a server would reject.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        if self.prefix.is_empty() || self.prefix.len() > 128 || !self.prefix.chars().all(plain) {
            let why = "a prefix is 1 to 128 of the characters A-Z a-z 0-9 _ -";
            return Err(StoreError::schema(format!("the prefix {:?}", self.prefix), why));
        }
        if self.transaction_items < 4 {
            let why =
                "a logged plan of one step takes 3 items, so fewer than 4 items a transaction are of no use";
            return Err(StoreError::schema("transaction_items", why));
        }
        Ok(())
    }
}

impl fmt::Debug for DynamoOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DynamoOptions { prefix, region, endpoint, partitions, billing, .. } = self;
        f.debug_struct("Options")
            .field("prefix", prefix)
            .field("region", region)
            .field("endpoint", endpoint)
            .field("partitions", partitions)
            .field("billing", billing)
            .finish_non_exhaustive()
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut octets = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(octet) = rest.next() {
        if octet == b'%' {
            let digit = |octet: Option<u8>| char::from(octet?).to_digit(16);
            let (high, low) = (digit(rest.next())?, digit(rest.next())?);
            octets.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            octets.push(octet);
        }
    }
    String::from_utf8(octets).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_say_all_that_is_needed() {
        let url = "dynamodb://shop?region=eu-central-1&endpoint=http://127.0.0.1:8000&partitions=4\
                   &billing=provisioned&read_units=7&write_units=9&clock_skew_micros=500";
        let options = DynamoOptions::from_url(url).unwrap();
        assert_eq!(options.prefix, "shop");
        assert_eq!(options.region.as_deref(), Some("eu-central-1"));
        assert_eq!(options.endpoint.as_deref(), Some("http://127.0.0.1:8000"));
        assert_eq!(options.partitions, Some(4));
        assert_eq!(options.billing, Billing::Provisioned { read_units: 7, write_units: 9 });
        assert_eq!(options.clock_skew, Duration::from_micros(500));
        let encoded = DynamoOptions::from_url("dynamodb://shop?endpoint=http%3A%2F%2Flocalhost").unwrap();
        assert_eq!(encoded.endpoint.as_deref(), Some("http://localhost"));
        assert_eq!(encoded.billing, Billing::OnDemand);
    }

    #[test]
    fn addresses_that_make_no_sense_say_why() {
        for (url, why) in [
            ("sqlite://x", "does not begin with dynamodb://"),
            ("dynamodb://", "a prefix is"),
            ("dynamodb://a.b", "a prefix is"),
            ("dynamodb://shop?colour=red", "no parameter colour"),
            ("dynamodb://shop?partitions=0", "whole number from 1"),
            ("dynamodb://shop?billing=free", "on-demand or provisioned"),
        ] {
            let error = DynamoOptions::from_url(url).unwrap_err().to_string();
            assert!(error.contains(why), "{url}: {error}");
        }
    }
}
