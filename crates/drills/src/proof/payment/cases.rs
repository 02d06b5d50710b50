//! A07 Payments: one charge at a time, unknown outcomes stay unknown until they are known, and refunds within what was captured.

mod authorized;
mod charges;
mod doubts;
mod ledger;
mod notices;
mod refunds;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use statehouse::{Answer, Code};
use statehouse_store::{Clock as _, ManualClock, Time, Value};

use self::authorized::*;
use self::charges::*;
use self::doubts::*;
use self::ledger::*;
use self::notices::*;
use self::refunds::*;
use super::provider::{ProviderReaction, TestProvider};
use super::{cases as payment, invariants};
use crate::conformance::{Case, cases};
use crate::harness::drill::Drill;
use crate::harness::engines::TestNamespace;
use crate::harness::fake_targets::FakeTargets;
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

pub(crate) const CASES: &[Case] = cases! {
    payment {
        a_payment_is_charged_and_captured(12),
        an_id_names_one_payment(12),
        bad_input_writes_nothing(6),
        card_numbers_are_refused(6),
        a_second_charge_waits_for_the_first(12),
        racing_charges_are_one_charge(12),
        a_repeated_charge_gets_the_first_answer(12),
        attempts_are_bounded(6),
        every_action_begins_with_its_states(12),
        an_unknown_outcome_is_reconciled_and_never_failed(12),
        a_request_outlives_its_process(12),
        nonsense_is_no_answer(12),
        a_payer_who_has_to_act_and_a_slow_provider(12),
        a_person_resolves_what_cannot_be_known(12),
        a_status_query_is_recorded_once(12),
        a_query_can_be_asked_for(6),
        what_was_authorized_is_captured_once(6),
        an_authorization_is_voided(6),
        cancel_and_charge_contend_on_one_row(12),
        refunds_stay_within_what_was_captured(12),
        racing_refunds_stay_within_what_was_captured(12),
        a_refund_in_doubt_is_neither_done_nor_free(12),
        a_merchant_is_told_what_the_row_says(12),
        a_transfer_moves_an_amount_once(6),
        a_covered_account_never_has_less_than_nothing(6),
        a_pending_transfer_is_resolved_once(6),
        timeouts_contend_with_callers_by_the_engines_clock(6),
        captures_and_refunds_are_posted_with_the_payment(12),
        cells_of_an_account_are_one_account(6),
    }
};

/// The failures of the atlas, each provoked by a case.
pub(crate) const DRILLS: &[Drill] = &[
    Drill::by_case(
        CASES,
        "duplicate commit",
        "Callers charge one payment at once under different ids, in several processes, and again while the outcome is unknown.",
        "payment::racing_charges_are_one_charge",
    ),
    Drill::by_case(
        CASES,
        "invalid transition",
        "Each action is called on a payment in each of its states.",
        "payment::every_action_begins_with_its_states",
    ),
    Drill::by_case(
        CASES,
        "crash after commit before side effect",
        "The process that charged dies before it sends, and another one dies after it has sent.",
        "payment::a_request_outlives_its_process",
    ),
    Drill::by_case(
        CASES,
        "retry ambiguity against provider",
        "The provider captures and its answer is lost, or the request is lost, and the payment is charged again meanwhile.",
        "payment::an_unknown_outcome_is_reconciled_and_never_failed",
    ),
    Drill::by_case(
        CASES,
        "reconciliation drift",
        "Several processes ask what became of a payment, and record the answer at once.",
        "payment::a_status_query_is_recorded_once",
    ),
];

const START_MS: i64 = 1_800_000_000_000;
const SECOND: Duration = Duration::from_secs(1);

/// One kind of payment whose merchant is told, and one that reserves first.
const BLUEPRINT: &str = r#"
[house]
name = "drill"

[payment.pay]
key          = { payment_intent_id = "text" }
fields       = { merchant_id = { type = "text", default = "m-1" }, note = "json?" }
currencies   = ["EUR", "USD"]
attempts_max = 3
webhook      = "hook"

[payment.pay.http]
url       = "https://psp.example/v1"
headers   = { authorization = "Bearer ${env:PSP_KEY}" }
reconcile = { after = "10s", max_checks = 3 }
back_off  = { min = "1s", max = "8s" }
lease     = "1m"
breaker   = { failures = 100 }

[payment.pay.ledger]
covered    = ["wallet:*"]
cells      = 4
on_capture = [["psp:{provider}", "merchant:{merchant_id}", "amount"]]
on_refund  = [["merchant:{merchant_id}", "psp:{provider}", "amount"]]

[payment.card]
key        = { payment_intent_id = "text" }
currencies = ["EUR"]
capture    = "manual"

[payment.card.http]
url       = "https://psp.example/v1"
reconcile = { after = "10s" }
back_off  = { min = "1s", max = "8s" }
lease     = "1m"
breaker   = { failures = 100 }

[effect.hook]
hosts      = ["shop.example"]
idempotent = true
shards     = 1
"#;

const SECRETS: &[(&str, &str)] = &[("PSP_KEY", "sk-topsecret")];

fn key(id: &str) -> [Value; 1] {
    [id.into()]
}

fn pair(id: &str, transaction: &str) -> [Value; 2] {
    [id.into(), transaction.into()]
}

/// A house whose provider can be told what to do.
struct PaymentFixture {
    client: TenantClient,
    provider: TestProvider,
    targets: Arc<FakeTargets>,
    clock: ManualClock,
}

impl PaymentFixture {
    async fn open(namespace: &dyn TestNamespace) -> Result<PaymentFixture> {
        PaymentFixture::with(namespace, BLUEPRINT).await
    }

    async fn with(namespace: &dyn TestNamespace, blueprint: &str) -> Result<PaymentFixture> {
        let clock = ManualClock::at(Time::from_millis(START_MS));
        let store = namespace.open_at(Arc::new(clock.clone())).await?;
        let provider = TestProvider::default();
        let targets = FakeTargets::of({
            let provider = provider.clone();
            move |outbound, _| match outbound.url.host() {
                Some("psp.example") => provider.react(outbound),
                _ => crate::harness::fake_targets::TargetBehavior::status(200),
            }
        });
        let egress = targets.egress(SECRETS);
        let client = TenantClient::before(store, blueprint, Arc::new(clock.clone()), egress).await?;
        Ok(PaymentFixture { client, provider, targets, clock })
    }

    /// Another process over the same store, with its own workers.
    async fn process(&self, blueprint: &str) -> Result<TenantClient> {
        let store = self.client.house.store().clone();
        let egress = self.targets.egress(SECRETS);
        TenantClient::before(store, blueprint, Arc::new(self.clock.clone()), egress).await
    }

    async fn create(&self, id: &str) -> Result<Answer> {
        self.create_as("pay", id, 100).await
    }

    async fn create_as(&self, resource: &str, id: &str, amount: i64) -> Result<Answer> {
        let input = json!({"payment_intent_id": id, "amount": amount, "currency": "EUR"});
        self.client.done(&format!("{resource}.create"), &[], input, None).await
    }

    async fn begin(&self, action: &str, id: &str, input: Json) -> Result<Answer> {
        self.client.done(action, &key(id), input, None).await
    }

    async fn charge(&self, id: &str, transaction: &str) -> Result<Answer> {
        self.begin("pay.charge", id, json!({"transaction_id": transaction, "method": "pm_1"})).await
    }

    /// A payment of 100 that was captured.
    async fn captured(&self, id: &str) -> Result<()> {
        self.create(id).await?;
        self.charge(id, &format!("{id}-charge")).await?;
        self.pass(Duration::ZERO).await?;
        self.shows(id, json!({"status": "SUCCEEDED", "captured": 100})).await
    }

    async fn refund(&self, id: &str, transaction: &str, amount: i64) -> Result<Answer> {
        self.begin("pay.refund", id, json!({"transaction_id": transaction, "amount": amount})).await
    }

    async fn refused(&self, action: &str, id: &str, input: Json, code: Code) -> Result<()> {
        self.client.refused(action, &key(id), input, None, code).await.map(drop)
    }

    /// Lets time pass, and everything that is due then happen.
    async fn pass(&self, span: Duration) -> Result<()> {
        self.clock.advance(span);
        self.client.drain_workers().await?;
        self.check().await
    }

    /// Checks the invariants of every payment of the house.
    async fn check(&self) -> Result<()> {
        invariants::check(&self.client.scope("pay")).await?;
        invariants::check(&self.client.scope("card")).await
    }

    async fn shows(&self, id: &str, expected: Json) -> Result<()> {
        self.client.shows("pay", &key(id), &expected).await
    }

    async fn shows_transaction(&self, id: &str, transaction: &str, expected: Json) -> Result<()> {
        self.client.shows("pay_transaction", &pair(id, transaction), &expected).await
    }

    async fn shows_request(&self, id: &str, transaction: &str, expected: Json) -> Result<()> {
        self.client.shows("pay_attempt", &key(&format!("{id}:{transaction}")), &expected).await
    }

    /// Requires the provider to have moved as much money as the payment says.
    async fn agrees(&self, id: &str) -> Result<()> {
        let shown = self.client.shown("pay", &key(id), &["captured", "refunded"]).await?;
        let moved = [self.provider.captured(id), self.provider.refunded(id)].map(Json::from);
        same("what the provider has captured and refunded", &moved.to_vec(), &shown)
    }
}
