//! Buyers at several servers who want the same seats.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value as Json, json};

use crate::served::{Namespace, Server, counted, system};

const SEATS: i64 = 50;
const BUYERS: i64 = 200;
/// Of the seats so many are asked for by name. The others go to buyers that take any free seat.
const NAMED: i64 = 25;

#[test]
fn two_hundred_buyers_for_fifty_seats_at_three_servers() {
    let (namespace, folder) = (Namespace::new(), tempfile::tempdir().unwrap());
    let start = || Server::start(&system("tickets"), &namespace.url(), folder.path(), &[]);
    let servers = [start(), start(), start()];
    for seat in 1..=SEATS {
        servers[0].send("POST", "/v1/seat", &json!({"event_id": "gala", "seat_no": seat}));
    }
    let (bought, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for buyer in 0..BUYERS {
            let server = &servers[usize::try_from(buyer).unwrap() % servers.len()];
            let (bought, refused) = (&bought, &refused);
            scope.spawn(move || {
                let stats = if buys(server, buyer) { bought } else { refused };
                stats.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(bought.into_inner(), usize::try_from(SEATS).unwrap());
    assert_eq!(refused.into_inner(), usize::try_from(BUYERS - SEATS).unwrap());
    drop(servers);
    every_seat_is_sold_once(&namespace);
}

/// Wants a seat by name, then any; pays for it at once. Says whether it has one.
fn buys(server: &Server, buyer: i64) -> bool {
    let booking = format!("b{buyer}");
    let wish = |what: Json| {
        let mut body = json!({"booking_id": booking, "event_id": "gala", "holder": format!("buyer {buyer}")});
        body.as_object_mut().unwrap().extend(what.as_object().unwrap().clone());
        body
    };
    let mut body = wish(json!({"seat_no": [1 + buyer % NAMED]}));
    // A buyer that gets `contended` retries; all others have a final answer.
    for _ in 0..200 {
        let (status, answer) = server.ask("POST", "/v1/seat_booking", &body);
        match (status, answer["code"].as_str()) {
            (200..300, _) => {
                server.send("POST", &format!("/v1/seat_booking/{booking}/confirm"), &json!({}));
                return true;
            }
            (_, Some("held" | "wrong_state")) if body.get("count").is_none() => {
                body = wish(json!({"count": 1}));
            }
            (_, Some("held")) => return false,
            (_, Some("contended")) => {}
            _ => panic!("{booking}: {status} {answer}"),
        }
    }
    panic!("{booking} never learned whether there is a seat")
}

fn every_seat_is_sold_once(namespace: &Namespace) {
    let (seats, records) = namespace.stored(&system("tickets"), "seats");
    let (bookings, _) = namespace.stored(&system("tickets"), "seat_bookings");
    let by_id: BTreeMap<&str, Vec<i64>> = bookings
        .iter()
        .inspect(|row| assert_eq!(row.text("state"), Some("CONFIRMED"), "{row}"))
        .map(|row| {
            let units = row.json("units").unwrap().as_array().unwrap();
            (row.text("booking_id").unwrap(), units.iter().map(|unit| unit.as_i64().unwrap()).collect())
        })
        .collect();
    assert_eq!(seats.len(), usize::try_from(SEATS).unwrap());
    let mut owners = BTreeSet::new();
    for seat in &seats {
        assert_eq!(seat.text("state"), Some("SOLD"), "{seat}");
        let owner = seat.text("booking_id").unwrap();
        assert!(owners.insert(owner), "{owner} has two seats");
        assert_eq!(by_id[owner], [seat.int("seat_no").unwrap()], "{owner}");
    }
    assert_eq!(owners.len(), by_id.len(), "a booking has no seat");
    let confirmed = counted(&records, "seat_booking.confirmed");
    assert_eq!(confirmed.keys().copied().collect::<BTreeSet<_>>(), owners);
    assert!(confirmed.values().all(|times| *times == 1), "{confirmed:?}");
}
