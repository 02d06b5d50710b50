//! Fuzz targets of this crate: parsers of text that callers and operators send.
//!
//! Each target takes any bytes. It panics if the parser panics, or if a property of the parser does not hold. Only the fuzzer
//! (`fuzz/`) and the tests use this module; the feature `fuzzing` compiles it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value as Json};
use statehouse_store::{ModelStore, Row, Table, Tenant, Time, Type, Value};

use crate::blueprint::Blueprint;
use crate::declare::rule::{Rule, RuleColumns, RuleValues};
use crate::egress::address::{is_allowed, place_of};
use crate::form::{Form, Property};
use crate::house::House;
use crate::infra::effect;
use crate::resource::{key_text, parse_key};

/// A target: what is done with the bytes of a fuzzer. It panics if a promise does not hold.
pub type FuzzTarget = fn(&[u8]);

/// Name and function of each target.
pub const TARGETS: [(&str, FuzzTarget); 5] = [
    ("rules", rules),
    ("blueprint", blueprint),
    ("keys", keys),
    ("egress_addresses", egress_addresses),
    ("egress_urls", egress_urls),
];

/// The row that rules are judged on, and what a rule may name.
struct RuleWorld {
    row: Row,
    columns: RuleColumns,
    inputs: Vec<Property>,
    claims: Map<String, Json>,
}

static RULES: LazyLock<Option<RuleWorld>> = LazyLock::new(|| {
    let table = Table::named("rows")
        .partition("id", Type::Int)
        .optional("name", Type::Text)
        .optional("points", Type::Int)
        .optional("price", Type::Float)
        .optional("ends_at", Type::Time)
        .optional("open", Type::Bool)
        .optional("missing", Type::Text)
        .build()
        .ok()?;
    let values = vec![
        Value::Int(1),
        Value::from("Ann"),
        Value::Int(7),
        Value::Float(1.5),
        Value::from(Time::from_micros(1_000)),
        Value::Bool(true),
        Value::Null,
    ];
    let columns = RuleColumns::of(&table);
    let row = Row::new(table, Tenant::new("acme").ok()?, values, 3);
    let inputs = vec![
        Property::optional("amount", Form::Value(Type::Int), "an amount"),
        Property::optional("word", Form::Value(Type::Text), "a word"),
    ];
    let claims = [("sub".to_owned(), Json::from("Ann")), ("groups".to_owned(), Json::from(vec!["a", "b"]))];
    Some(RuleWorld { row, columns, inputs, claims: claims.into_iter().collect() })
});

/// Rules and conditions of callers: the text of a rule parses to the same rule, a rule and its negation do not both hold, and
/// an error names a place in the text.
pub fn rules(data: &[u8]) {
    assert!(RULES.is_some(), "the row that rules are judged on cannot be made");
    let (Ok(text), Some(world)) = (std::str::from_utf8(data), &*RULES) else { return };
    let parse = |text: &str| Rule::parse(text, &world.columns, &world.inputs);
    let rule = match parse(text) {
        Ok(rule) => rule,
        Err(error) => {
            let place = error.span.clone().unwrap_or_default();
            assert!(text.get(place.clone()).is_some(), "the error names {place:?}, which is not in {text:?}");
            return;
        }
    };
    let shown = rule.to_string();
    assert_eq!(parse(&shown).as_ref(), Ok(&rule), "{shown}");
    let values = RuleValues { claims: Some(&world.claims), ..RuleValues::default() };
    let holds =
        |rule: &str| parse(rule).is_ok_and(|rule| rule.holds(&values, &world.row, Time::from_micros(5)));
    assert!(!(holds(text) && holds(&format!("not ({text})"))), "{text} holds, and so does its negation");
}

/// Blueprints: reading and declaring either works or names problems that can be shown.
pub fn blueprint(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let problems = match Blueprint::read("statehouse.toml", text) {
        Err(problems) => problems,
        Ok(blueprint) => match House::over(Arc::new(ModelStore::new()), &blueprint) {
            Err(problems) => problems,
            Ok(_) => return,
        },
    };
    assert!(!problems.is_empty(), "refused without a reason");
    assert!(!problems.render(false).is_empty() && !problems.to_json().is_null());
}

/// Keys of rows in paths: a key that was parsed is written so that it parses to the same key.
pub fn keys(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let kinds = [Type::Text, Type::Int, Type::Bool, Type::Time, Type::Bytes];
    for kind in kinds {
        let names = [("id".to_owned(), kind), ("part".to_owned(), Type::Text)];
        for columns in [names.get(..1), names.get(..2)].into_iter().flatten() {
            let Ok(key) = parse_key("row", columns, text) else { continue };
            let shown = key_text(&key);
            assert!(
                parse_key("row", columns, &shown).is_ok_and(|again| again == key),
                "{text:?}, then {shown:?}"
            );
        }
    }
}

/// Addresses of outbound requests: an IPv4 address is judged alike in every form, and `allow_private` permits more.
pub fn egress_addresses(data: &[u8]) {
    if let Some(bits) = data.first_chunk::<4>() {
        let address = Ipv4Addr::from(*bits);
        let [a, b, c, d] = *bits;
        let word = |high: u8, low: u8| u16::from_be_bytes([high, low]);
        let translated = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, word(a, b), word(c, d));
        let tunnelled = Ipv6Addr::new(0x2002, word(a, b), word(c, d), 0, 0, 0, 0, 1);
        for form in [address.to_ipv6_mapped(), translated, tunnelled] {
            assert_eq!(place_of(address.into()), place_of(form.into()), "{address} as {form}");
        }
        judge(address.into());
    }
    if let Some(bits) = data.first_chunk::<16>() {
        judge(Ipv6Addr::from(*bits).into());
    }
    if let Some(address) = std::str::from_utf8(data).ok().and_then(|text| text.parse::<IpAddr>().ok()) {
        judge(address);
    }
}

fn judge(address: IpAddr) {
    let is_own = address.is_loopback() || address.is_unspecified() || address.is_multicast();
    assert!(!is_own || !is_allowed(address, false), "{address} is not public");
    assert!(!is_allowed(address, false) || is_allowed(address, true), "{address}");
}

/// Addresses that callers give to effects, and the hosts that a blueprint allows: an allowed URL names its host openly.
pub fn egress_urls(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (allowed, url) = text.split_once('\n').unwrap_or(("*", text));
    effect::fuzz_url(allowed, url);
}
