//! The arithmetic and the words of a payment. No I/O: what is known goes in, what becomes of the payment comes out.

use statehouse_store::{Row, StoreError};

use super::provider::ProviderVerdict;
use super::{
    AMOUNT, ATTEMPT, CANCELLED, CAPTURABLE, CAPTURE_METHOD, CAPTURED, FAILED, LIVE_TRANSACTION, MANUAL,
    PENDING, REFUNDABLE, REFUNDED, REFUNDING, REQUIRES_ACTION, REQUIRES_CAPTURE, REQUIRES_RECONCILIATION,
    RETRYABLE, STATUS, SUCCEEDED,
};
use crate::infra::effect::settle::EffectEnd;

/// The greatest amount, in minor units.
pub(super) const AMOUNT_MAX: i64 = 1_000_000_000_000;
/// The length of an id of a payment or a transaction.
const ID_CHARS_MAX: usize = 48;

/// What a transaction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransactionKind {
    Charge,
    Capture,
    Void,
    Refund,
}

impl TransactionKind {
    pub(super) const WORDS: [&'static str; 4] = ["CHARGE", "CAPTURE", "VOID", "REFUND"];

    pub(super) fn word(self) -> &'static str {
        match self {
            TransactionKind::Charge => "CHARGE",
            TransactionKind::Capture => "CAPTURE",
            TransactionKind::Void => "VOID",
            TransactionKind::Refund => "REFUND",
        }
    }

    pub(super) fn of(word: &str) -> Option<TransactionKind> {
        let all = [
            TransactionKind::Charge,
            TransactionKind::Capture,
            TransactionKind::Void,
            TransactionKind::Refund,
        ];
        all.into_iter().find(|kind| kind.word() == word)
    }
}

/// What is known of a transaction, and so of its payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransactionEnd {
    /// The money was captured, or refunded, or the authorization was voided.
    Done,
    /// The money is reserved.
    Authorized,
    /// The provider declined it.
    Declined,
    /// It was certainly not done.
    Failed,
    /// The payer has to act first.
    ActionRequired,
    /// The provider is still working on it.
    Processing,
    /// It may have been done.
    Unknown,
}

/// What the outcome of a request says about its transaction. `verdict` is what the provider answered.
pub(super) fn transaction_end(
    kind: TransactionKind,
    manual: bool,
    end: EffectEnd,
    verdict: Option<&ProviderVerdict>,
) -> Option<TransactionEnd> {
    match (end, verdict) {
        (EffectEnd::Parked, _) => Some(TransactionEnd::Failed),
        (EffectEnd::Uncertain, Some(ProviderVerdict::ActionRequired)) => Some(TransactionEnd::ActionRequired),
        (EffectEnd::Uncertain, Some(ProviderVerdict::Processing)) => Some(TransactionEnd::Processing),
        (EffectEnd::Uncertain, _) => Some(TransactionEnd::Unknown),
        // A person found out that it was done.
        (EffectEnd::Delivered, None) if kind == TransactionKind::Charge && manual => {
            Some(TransactionEnd::Authorized)
        }
        (EffectEnd::Delivered, None | Some(ProviderVerdict::Done)) => Some(TransactionEnd::Done),
        (EffectEnd::Delivered, Some(ProviderVerdict::Authorized)) => Some(TransactionEnd::Authorized),
        (EffectEnd::Delivered, Some(ProviderVerdict::Declined)) => Some(TransactionEnd::Declined),
        (EffectEnd::Delivered, Some(ProviderVerdict::Failed)) => Some(TransactionEnd::Failed),
        // An answer that says none of this is not definite.
        (EffectEnd::Delivered, Some(_)) => None,
    }
}

/// The amounts and the state of a payment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PaymentBalance {
    pub status: String,
    pub live: Option<String>,
    pub attempt: i64,
    pub is_manual: bool,
    pub amount: i64,
    pub capturable: i64,
    pub captured: i64,
    pub refundable: i64,
    pub refunding: i64,
    pub refunded: i64,
}

/// What becomes of a payment: its amounts and its state afterwards, and the case of the transition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PaymentChange {
    /// The case of `settle`, which is also the name of the event.
    pub case: &'static str,
    pub after: PaymentBalance,
}

impl PaymentBalance {
    pub(super) fn of(row: &Row) -> Result<PaymentBalance, StoreError> {
        Ok(PaymentBalance {
            status: row.get_text(STATUS)?.to_owned(),
            live: row.get_optional_text(LIVE_TRANSACTION)?.map(str::to_owned),
            attempt: row.get_int(ATTEMPT)?,
            is_manual: row.get_text(CAPTURE_METHOD)? == MANUAL,
            amount: row.get_int(AMOUNT)?,
            capturable: row.get_int(CAPTURABLE)?,
            captured: row.get_int(CAPTURED)?,
            refundable: row.get_int(REFUNDABLE)?,
            refunding: row.get_int(REFUNDING)?,
            refunded: row.get_int(REFUNDED)?,
        })
    }

    /// What the end of a transaction of this amount makes of the payment. `None`: nothing that it does not say already.
    pub(super) fn after(
        &self,
        kind: TransactionKind,
        end: TransactionEnd,
        amount: i64,
        attempts_max: i64,
    ) -> Option<PaymentChange> {
        if kind == TransactionKind::Refund {
            return self.after_refund(end, amount);
        }
        let open = |case, status: &str| {
            (self.status != status)
                .then(|| (case, PaymentBalance { status: status.to_owned(), ..self.clone() }))
        };
        let closed = |case, status: &str| {
            Some((case, PaymentBalance { status: status.to_owned(), live: None, ..self.clone() }))
        };
        let (case, after) = match (end, kind) {
            (TransactionEnd::ActionRequired, _) => open("action_required", REQUIRES_ACTION),
            (TransactionEnd::Processing, _) => open("pending", PENDING),
            (TransactionEnd::Unknown, _) => open("uncertain", REQUIRES_RECONCILIATION),
            (TransactionEnd::Authorized, _) => closed("authorized", REQUIRES_CAPTURE)
                .map(|(case, after)| (case, PaymentBalance { capturable: amount, ..after })),
            (TransactionEnd::Done, TransactionKind::Void) => closed("voided", CANCELLED)
                .map(|(case, after)| (case, PaymentBalance { capturable: 0, ..after })),
            (TransactionEnd::Done, _) => closed("captured", SUCCEEDED).map(|(case, after)| {
                let (captured, refundable) = (after.captured + amount, after.refundable + amount);
                (case, PaymentBalance { capturable: 0, captured, refundable, ..after })
            }),
            (TransactionEnd::Declined | TransactionEnd::Failed, TransactionKind::Charge) => {
                match self.attempt < attempts_max {
                    true => closed("declined", RETRYABLE),
                    false => closed("failed", FAILED),
                }
            }
            (TransactionEnd::Declined | TransactionEnd::Failed, _) => closed("kept", REQUIRES_CAPTURE),
        }?;
        Some(PaymentChange { case, after })
    }

    fn after_refund(&self, end: TransactionEnd, amount: i64) -> Option<PaymentChange> {
        let refunding = self.refunding - amount;
        match end {
            TransactionEnd::Done => {
                let refunded = self.refunded + amount;
                let after = PaymentBalance { refunding, refunded, ..self.clone() };
                Some(PaymentChange { case: "refunded", after })
            }
            TransactionEnd::Declined | TransactionEnd::Failed => {
                let refundable = self.refundable + amount;
                let after = PaymentBalance { refunding, refundable, ..self.clone() };
                Some(PaymentChange { case: "refund_failed", after })
            }
            _ => None,
        }
    }
}

/// Why a text cannot be the id of a payment or a transaction.
pub(super) fn id_problem(id: &str) -> Option<String> {
    let fits = |byte: u8| (0x20..0x7f).contains(&byte) && byte != b':';
    if id.is_empty() || id.len() > ID_CHARS_MAX || !id.bytes().all(fits) {
        return Some(format!("expected 1 to {ID_CHARS_MAX} printable ASCII characters without `:`"));
    }
    card_number_problem(id)
}

/// Why a text must not be stored: it has the number of a card in it.
pub(super) fn card_number_problem(text: &str) -> Option<String> {
    let mut digits: Vec<u32> = Vec::new();
    let mut is_card = false;
    for c in text.chars().chain(['\0']) {
        match (c.to_digit(10), c) {
            (Some(digit), _) => digits.push(digit),
            (None, ' ' | '-') => {}
            _ => {
                is_card |= has_card_number(&digits);
                digits.clear();
            }
        }
    }
    is_card.then(|| {
        "this looks like the number of a card: send a reference of your provider, such as `pm_…`, instead"
            .to_owned()
    })
}

/// Whether digits in a row, with spaces and dashes left out, are a card number by their length and check digit.
fn has_card_number(digits: &[u32]) -> bool {
    (13..=19).contains(&digits.len()) && digits.iter().any(|digit| *digit != 0) && passes_luhn(digits)
}

fn passes_luhn(digits: &[u32]) -> bool {
    let weighted = digits.iter().rev().enumerate().map(|(index, digit)| match index % 2 {
        1 if *digit > 4 => digit * 2 - 9,
        1 => digit * 2,
        _ => *digit,
    });
    weighted.sum::<u32>() % 10 == 0
}

#[cfg(test)]
mod tests {
    use super::super::{CREATED, PROCESSING};
    use super::*;

    fn balance(status: &str) -> PaymentBalance {
        PaymentBalance {
            status: status.to_owned(),
            live: Some("t1".to_owned()),
            attempt: 1,
            is_manual: false,
            amount: 100,
            capturable: 0,
            captured: 0,
            refundable: 0,
            refunding: 0,
            refunded: 0,
        }
    }

    #[test]
    fn what_is_unknown_keeps_its_transaction() {
        for end in [TransactionEnd::Unknown, TransactionEnd::Processing, TransactionEnd::ActionRequired] {
            let change = balance(PROCESSING).after(TransactionKind::Charge, end, 100, 3).unwrap();
            assert_eq!(change.after.live.as_deref(), Some("t1"), "{end:?}");
            assert_eq!(change.after.captured, 0, "{end:?}");
            // Asked again with the same finding, nothing changes.
            assert_eq!(change.after.after(TransactionKind::Charge, end, 100, 3), None, "{end:?}");
        }
    }

    #[test]
    fn amounts_follow_from_ends() {
        let captured =
            balance(PROCESSING).after(TransactionKind::Charge, TransactionEnd::Done, 100, 3).unwrap();
        let after = captured.after;
        assert_eq!((captured.case, after.status.as_str()), ("captured", SUCCEEDED));
        assert_eq!((after.live.as_deref(), after.captured, after.refundable), (None, 100, 100));
        let refunding = PaymentBalance { refundable: 40, refunding: 60, ..after };
        let done = refunding.after(TransactionKind::Refund, TransactionEnd::Done, 60, 3).unwrap().after;
        assert_eq!((done.refundable, done.refunding, done.refunded), (40, 0, 60));
        let back = refunding.after(TransactionKind::Refund, TransactionEnd::Failed, 60, 3).unwrap().after;
        assert_eq!((back.refundable, back.refunding, back.refunded), (100, 0, 0));
        assert_eq!(refunding.after(TransactionKind::Refund, TransactionEnd::Unknown, 60, 3), None);
        let authorized =
            balance(PROCESSING).after(TransactionKind::Charge, TransactionEnd::Authorized, 100, 3).unwrap();
        assert_eq!((authorized.after.capturable, authorized.after.status.as_str()), (100, REQUIRES_CAPTURE));
        let part =
            authorized.after.after(TransactionKind::Capture, TransactionEnd::Done, 70, 3).unwrap().after;
        assert_eq!((part.capturable, part.captured, part.refundable), (0, 70, 70));
        let kept = authorized.after.after(TransactionKind::Capture, TransactionEnd::Failed, 70, 3).unwrap();
        assert_eq!((kept.case, kept.after.capturable), ("kept", 100));
        let void = authorized.after.after(TransactionKind::Void, TransactionEnd::Done, 100, 3).unwrap().after;
        assert_eq!((void.capturable, void.status.as_str()), (0, CANCELLED));
    }

    #[test]
    fn a_declined_payment_can_be_charged_again_until_its_attempts_are_used() {
        let end = |attempt| {
            let balance = PaymentBalance { attempt, ..balance(PROCESSING) };
            balance.after(TransactionKind::Charge, TransactionEnd::Declined, 100, 3).unwrap()
        };
        assert_eq!((end(2).case, end(2).after.status.as_str()), ("declined", RETRYABLE));
        assert_eq!((end(3).case, end(3).after.status.as_str()), ("failed", FAILED));
        assert_eq!(end(3).after.live, None);
    }

    #[test]
    fn outcomes_of_requests_say_what_is_known() {
        let charge = |end, verdict: Option<ProviderVerdict>| {
            transaction_end(TransactionKind::Charge, true, end, verdict.as_ref())
        };
        assert_eq!(charge(EffectEnd::Delivered, None), Some(TransactionEnd::Authorized));
        assert_eq!(charge(EffectEnd::Delivered, Some(ProviderVerdict::Done)), Some(TransactionEnd::Done));
        assert_eq!(charge(EffectEnd::Delivered, Some(ProviderVerdict::Processing)), None);
        assert_eq!(charge(EffectEnd::Uncertain, Some(ProviderVerdict::Done)), Some(TransactionEnd::Unknown));
        assert_eq!(charge(EffectEnd::Parked, Some(ProviderVerdict::Unclear)), Some(TransactionEnd::Failed));
        let capture = transaction_end(TransactionKind::Capture, true, EffectEnd::Delivered, None);
        assert_eq!(capture, Some(TransactionEnd::Done));
    }

    #[test]
    fn card_numbers_are_recognized_and_references_are_not() {
        for card in
            ["4242424242424242", "4242 4242 4242 4242", "5555-5555-5555-4444", "no 378282246310005, thanks"]
        {
            assert!(card_number_problem(card).is_some(), "{card}");
        }
        for fine in [
            "pm_1MqLiJLkdIwHu7ix",
            "4242424242424241",
            "order 2026-11-19 12",
            "123456789012",
            "0000000000000",
            "",
        ] {
            assert_eq!(card_number_problem(fine), None, "{fine}");
        }
        for bad in ["", "a:b", "a\nb", "é", "4242424242424242", &"x".repeat(49)] {
            assert!(id_problem(bad).is_some(), "{bad}");
        }
        assert_eq!(id_problem("order-7, retry 1"), None);
        assert!(CREATED < PROCESSING);
    }
}
