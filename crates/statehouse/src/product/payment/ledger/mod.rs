//! The ledger of a payment: double entry in immutable amounts, in one phase or in two.
//!
//! ```text
//!            transfer                    pend              post
//!   (none) ───────────► POSTED   (none) ──────► PENDING ─────────► POSTED
//!                                                  │
//!                                                  └─────────────► VOIDED
//!                                                   void, timeout
//! ```
//!
//! **Rows.** `pay_transfers(tenant, transfer_id, debit, credit, currency, amount, memo, kind, expires_at, due_shard, due_at,
//! created_at, updated_at, version)`: XMovementState. One amount is taken from one account and given to another, so that debits
//! and credits are equal by construction. `pay_accounts(tenant, account, currency, cell, debits_posted, credits_posted,
//! debits_pending, credits_pending, available, updated_at, version)`: the sums of the transfers of an account. The accounts that
//! `covered` names have one row each; the others are counted in `cells` rows, each of which is increased blindly.
//!
//! **Invariants.**
//! - L1. The columns of an account are the sums of its transfers. *A transfer and its accounts change in one plan.*
//! - L2. A transfer exists once, and its amount does not change. *Guard:* it is absent; its columns are immutable.
//! - L3. A pending transfer is resolved once. *Guard of post, void and timeout:* `kind = 'PENDING'`; *of post:* `expires_at > now`,
//!   *of timeout:* `expires_at <= now`.
//! - L4. A covered account never has less than nothing. *`available` is what was posted to it, less what was taken from it or may be;
//!   guard of what takes:* `available >= amount`.

mod actions;
mod journal;
mod posting;
mod read;
mod transitions;

use std::sync::Arc;
use std::time::Duration;

use statehouse_store::Type;

use super::rules::{AMOUNT_MAX, card_number_problem, id_problem};
use super::{AMOUNT, CURRENCY};
use crate::action::Refusal;
use crate::declare::machine::PartUse;
use crate::declare::table::{CREATED_AT, UPDATED_AT};
use crate::declare::{Declare, ResourceSpec, SettingsReader, TableDef, TableSpec};
use crate::form::Form;
use crate::resource::plural;
use crate::view_source::ViewSource;
use posting::PostingTemplate;

/// The states of a transfer.
const KINDS: [&str; 3] = [PENDING, POSTED, VOIDED];
const PENDING: &str = "PENDING";
const POSTED: &str = "POSTED";
const VOIDED: &str = "VOIDED";
/// Columns of a transfer.
const TRANSFER_ID: &str = "transfer_id";
const DEBIT: &str = "debit";
const CREDIT: &str = "credit";
const MEMO: &str = "memo";
const KIND: &str = "kind";
const EXPIRES_AT: &str = "expires_at";
const BY_KIND: &str = "by_kind";
const BY_TIME: &str = "by_time";
/// Columns of an account.
const ACCOUNT: &str = "account";
const CELL: &str = "cell";
const DEBITS_POSTED: &str = "debits_posted";
const CREDITS_POSTED: &str = "credits_posted";
const DEBITS_PENDING: &str = "debits_pending";
const CREDITS_PENDING: &str = "credits_pending";
const AVAILABLE: &str = "available";
/// The sums of an account.
const SUMS: [&str; 4] = [DEBITS_POSTED, CREDITS_POSTED, DEBITS_PENDING, CREDITS_PENDING];

/// The length of the name of an account.
const ACCOUNT_CHARS_MAX: usize = 96;
/// Transfers that one outcome of a payment makes.
const POSTINGS_MAX: usize = 8;
const PENDING_MIN: Duration = Duration::from_millis(1);
const PENDING_MAX: Duration = Duration::from_secs(366 * 86_400);
const PENDING_DEFAULT: Duration = Duration::from_secs(7 * 86_400);

/// A declared ledger.
#[derive(Debug)]
pub(super) struct LedgerSpec {
    /// `pay_transfer`.
    transfers: String,
    /// `pay_account`.
    accounts: String,
    /// `pay_journal`.
    journal: String,
    transfers_def: Arc<TableDef>,
    accounts_def: Arc<TableDef>,
    currencies: Vec<String>,
    covered: Vec<AccountPattern>,
    cells: u32,
    pending_for: Duration,
    /// The transfers of a capture, and of a refund.
    pub on_capture: Vec<PostingTemplate>,
    pub on_refund: Vec<PostingTemplate>,
}

/// What the blueprint says of a ledger.
pub(super) struct LedgerSettings {
    covered: Vec<AccountPattern>,
    cells: u32,
    shards: u32,
    pending_for: Duration,
    on_capture: Vec<PostingTemplate>,
    on_refund: Vec<PostingTemplate>,
}

/// Accounts by name: one, or all that begin with a text.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AccountPattern {
    text: String,
    is_prefix: bool,
}

impl AccountPattern {
    fn parse(text: &str) -> Option<AccountPattern> {
        let (text, is_prefix) = match text.strip_suffix('*') {
            Some(prefix) => (prefix, true),
            None => (text, false),
        };
        let fits = !text.contains('*') && (is_prefix || account_problem(text).is_none());
        fits.then(|| AccountPattern { text: text.to_owned(), is_prefix })
    }

    fn admits(&self, account: &str) -> bool {
        if self.is_prefix { account.starts_with(&self.text) } else { account == self.text }
    }
}

/// A ledger with the transitions by which payments post to it.
#[derive(Debug)]
pub(super) struct Ledger {
    pub spec: Arc<LedgerSpec>,
    /// Inserts a posted transfer.
    record: PartUse,
    /// Changes the sums of an account.
    change: PartUse,
}

impl LedgerSettings {
    /// Reads the table `ledger`. `columns` are the texts of a payment that accounts may be named after.
    pub(super) fn read(settings: &mut SettingsReader<'_>, columns: &[String]) -> Option<LedgerSettings> {
        settings.nested("ledger", |settings| {
            let mut covered = Vec::new();
            for text in settings.texts("covered") {
                match AccountPattern::parse(&text) {
                    Some(pattern) => covered.push(pattern),
                    None => {
                        let advice = "write the name of an account, or its beginning: \"wallet:*\"";
                        settings.problem_with_advice("covered", format!("`{text}` names no account"), advice);
                    }
                }
            }
            let cells = settings.count("cells", 1, 1..=64);
            let shards = settings.count("shards", 4, 1..=1_024);
            let pending_for = settings.duration("pending_for", PENDING_DEFAULT, PENDING_MIN..=PENDING_MAX);
            let on_capture = posting::read(settings, "on_capture", columns);
            let on_refund = posting::read(settings, "on_refund", columns);
            // Money that has moved is posted, whatever an account has.
            for template in on_capture.iter().chain(&on_refund) {
                let text = template.taken_from();
                let is_covered = |pattern: &&AccountPattern| {
                    text.starts_with(&pattern.text) || (pattern.text.starts_with(text) && !text.is_empty())
                };
                if covered.iter().any(|pattern| is_covered(&pattern)) {
                    let title = format!("`on_capture` and `on_refund` cannot take from covered accounts such as `{text}`");
                    let advice = "money that the provider has moved is posted, also if an account has too little for it";
                    settings.problem_with_advice("covered", title, advice);
                }
            }
            LedgerSettings { covered, cells, shards, pending_for, on_capture, on_refund }
        })
    }
}

/// Declares the transfers and the accounts of a payment.
pub(super) fn declare(
    cx: &mut Declare<'_>,
    currencies: &[String],
    settings: LedgerSettings,
) -> Option<Arc<Ledger>> {
    let name = cx.name();
    let LedgerSettings { covered, cells, shards, pending_for, on_capture, on_refund } = settings;
    let (transfers, accounts) = (format!("{name}_transfer"), format!("{name}_account"));
    let transfers_def = cx.build(transfers_table(&transfers, shards))?;
    let accounts_def = cx.build(accounts_table(&accounts))?;
    let spec = Arc::new(LedgerSpec {
        transfers,
        accounts,
        journal: format!("{name}_journal"),
        transfers_def,
        accounts_def,
        currencies: currencies.to_vec(),
        covered,
        cells,
        pending_for,
        on_capture,
        on_refund,
    });
    let account_machine = cx.machine(transitions::of_accounts(&spec))?;
    let change = cx.part(&account_machine, "change")?;
    let machine = cx.machine(transitions::of_transfers(&spec, &change))?;
    let ledger = Ledger { spec: spec.clone(), record: cx.part(&machine, "record")?, change };
    cx.resource(
        ResourceSpec::of(&spec.transfers, &spec.transfers_def)
            .actions(actions::transfer_reads(&spec))
            .machine(&machine),
    );
    cx.resource(
        ResourceSpec::of(&spec.accounts, &spec.accounts_def)
            .key(vec![(ACCOUNT.to_owned(), Type::Text), (CURRENCY.to_owned(), Type::Text)])
            .telling(ViewSource::nothing(
                "its rows are cells of accounts",
                format!("make the view of `{}`", spec.transfers),
            ))
            .actions(actions::account_reads(&spec))
            .machine(&account_machine),
    );
    cx.resource(journal::resource(&spec));
    Some(Arc::new(ledger))
}

fn transfers_table(name: &str, shards: u32) -> TableSpec {
    TableSpec::named(plural(name))
        .partition(TRANSFER_ID, Type::Text)
        .text(DEBIT)
        .about("the account that it is taken from")
        .immutable()
        .text(CREDIT)
        .about("the account that it is given to")
        .immutable()
        .text(CURRENCY)
        .immutable()
        .int(AMOUNT)
        .shown_as(Form::Range(1, AMOUNT_MAX))
        .about("in minor units")
        .immutable()
        .text(MEMO)
        .null()
        .about("what it is for")
        .immutable()
        .states_in(KIND, &KINDS)
        .time(EXPIRES_AT)
        .null()
        .about("when a pending transfer is voided")
        .created_at()
        .updated_at()
        .deadline(&[PENDING], EXPIRES_AT, shards)
        .index(BY_KIND, &[KIND], &[UPDATED_AT])
        .index(BY_TIME, &[CURRENCY], &[CREATED_AT])
}

fn accounts_table(name: &str) -> TableSpec {
    let spec = TableSpec::named(plural(name))
        .partition(ACCOUNT, Type::Text)
        .sort(CURRENCY, Type::Text)
        .sort(CELL, Type::Int);
    let spec = SUMS.into_iter().fold(spec, |spec, column| spec.int(column).default(0));
    spec.int(AVAILABLE)
        .default(0)
        .about("of a covered account: posted to it, less what was taken from it or may be")
        .updated_at()
}

/// Why a text cannot name an account.
fn account_problem(account: &str) -> Option<String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
    if account.is_empty() || account.len() > ACCOUNT_CHARS_MAX || !account.bytes().all(fits) {
        return Some(format!(
            "expected 1 to {ACCOUNT_CHARS_MAX} of the characters A-Z, a-z, 0-9, `_`, `-`, `.` and `:`"
        ));
    }
    card_number_problem(account)
}

impl LedgerSpec {
    fn is_covered(&self, account: &str) -> bool {
        self.covered.iter().any(|pattern| pattern.admits(account))
    }

    /// The row of an account that a transfer is counted in.
    fn cell(&self, account: &str, transfer: &str) -> i64 {
        if self.cells == 1 || self.is_covered(account) {
            return 0;
        }
        let hash = transfer.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        i64::try_from((hash ^ (hash >> 33)) % u64::from(self.cells)).unwrap_or(0)
    }

    /// Refuses a transfer that cannot be.
    fn check(&self, debit: &str, credit: &str) -> Result<(), Refusal> {
        for (name, account) in [(DEBIT, debit), (CREDIT, credit)] {
            if let Some(problem) = account_problem(account) {
                return Err(Refusal::field(name, problem));
            }
        }
        match debit == credit {
            true => Err(Refusal::field(CREDIT, "an account cannot pay itself: name another one")),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_accounts() {
        for (pattern, account, admitted) in [
            ("wallet:*", "wallet:7", true),
            ("wallet:*", "wallet", false),
            ("wallet:7", "wallet:7", true),
            ("wallet:7", "wallet:77", false),
            ("*", "anything", true),
        ] {
            let parsed = AccountPattern::parse(pattern).unwrap_or_else(|| panic!("{pattern}"));
            assert_eq!(parsed.admits(account), admitted, "{pattern} {account}");
        }
        for bad in ["", "a*b", "a b", "**"] {
            assert_eq!(AccountPattern::parse(bad), None, "{bad}");
        }
        for bad in ["", "a b", "a,b", "wallet:4242424242424242", &"x".repeat(97)] {
            assert!(account_problem(bad).is_some(), "{bad}");
        }
        assert_eq!(account_problem("psp:http.eu-1"), None);
    }
}
