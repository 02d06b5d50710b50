//! The actions of a time sequence, and the form of a worker id.

use super::*;

/// The states that leases of worker ids change.
const TARGET: &str = "WorkerIdState + EpochState";

pub(super) fn actions(ids: &Arc<TimeSequenceSpec>) -> [ActionSpec; 6] {
    let holder = || {
        Property::required(HOLDER, Form::Value(Type::Text), "who mints; a name that no other program uses")
    };
    let epoch = || Property::required(EPOCH, Form::Value(Type::Int), "the epoch that lease returned");
    let step = |name: &'static str, summary: &'static str, mechanism: &'static str, verb: TimeVerb| {
        ActionSpec::transition(name, summary)
            .target(TARGET)
            .mechanism(mechanism)
            .gives(row_form())
            .codes(&[Code::NotFound, Code::NotHolder, Code::Expired])
            .answers(&["duplicate IDs", "clock rollback / stale epoch"])
            .after(["lease"])
            .try_answer_with({
                let ids = ids.clone();
                move |_, key, event| TimeWrite::answer(&ids, verb, key, event)
            })
            .writes(TimeWrite { ids: ids.clone(), verb })
    };
    let drawn = Form::List(Box::new(Form::Value(Type::Int)));
    let [read, list] = reads(ids);
    [
        step(
            "lease",
            "Take a worker id of {name} that is free or has expired, and a first span of time.",
            "guarded exclusive claim with epoch, and reservation behind the mark",
            TimeVerb::Lease,
        )
        .on(Method::Post, RouteKind::Collection)
        .takes([holder()])
        .codes(&[Code::Held, Code::Contended])
        .answers(&["duplicate IDs", "worker-id exhaustion", "clock rollback / stale epoch"])
        .after([]),
        step(
            "reserve",
            "Reserve the next span of time for a worker id of {name}, and hold it for longer.",
            "conditional update guarded by epoch, and reservation behind the mark",
            TimeVerb::Reserve,
        )
        .takes([holder(), epoch()]),
        step(
            "release",
            "Let go of a worker id of {name}. What was reserved stays used.",
            "conditional update guarded by epoch",
            TimeVerb::Release,
        )
        .takes([holder(), epoch()])
        .codes(&[Code::NotFound, Code::NotHolder])
        .answers(&["worker-id exhaustion"]),
        step(
            "next",
            "Draw ids of {name} through the store, from a worker id that is shared.",
            "reservation behind the mark, one write a call",
            TimeVerb::Next,
        )
        .target(state_name(&ids.name))
        .shape("overwrite")
        .takes([Property::optional(COUNT, Form::Range(1, COUNT_MAX), "how many; 1 if not given")])
        .gives(Form::Object(vec![Property::required(IDS, drawn, "in the order of their making")]))
        .codes(&[Code::WrongState, Code::OutOfRange, Code::Contended])
        .answers(&["duplicate IDs", "non-monotonic IDs", "clock rollback / stale epoch"])
        .after([]),
        read,
        list,
    ]
}

fn reads(ids: &Arc<TimeSequenceSpec>) -> [ActionSpec; 2] {
    let read = |action: ActionSpec, list: bool| {
        action.target(TARGET).after(["lease"]).reads(WorkerIdRead { ids: ids.clone(), list })
    };
    [
        read(
            ActionSpec::read("read", "Read who has a worker id of {name}, and what is reserved for it.")
                .gives(row_form())
                .codes(&[Code::OutOfRange]),
            false,
        ),
        read(
            ActionSpec::list("list", "List the worker ids of {name} that were ever used.")
                .mechanism("strong range read of the pool")
                .gives_rows(row_form()),
            true,
        ),
    ]
}

fn row_form() -> Form {
    let int = |name: &str, about: &str| Property::required(name, Form::Value(Type::Int), about);
    let time = |name: &str, about: &str| Property::required(name, Form::Value(Type::Time), about);
    Form::Object(vec![
        int(WORKER, "the worker id"),
        Property::required(STATE, Form::one_of(&STATES), "a held one whose time is up can be leased"),
        Property::required(HOLDER, Form::Value(Type::Text), "").or_null(),
        int(EPOCH, "counts leases and is never reset"),
        time(ACQUIRED_AT, "").or_null(),
        time(EXPIRES_AT, "by the store's clock").or_null(),
        time(RESERVED_FROM, "the span that was reserved last begins here").or_null(),
        time(RESERVED_UNTIL, "and ends before this: the mark").or_null(),
        Property::required(
            LAYOUT,
            Form::Object(vec![
                int("epoch_ms", "where an id's time begins, in milliseconds since 1970"),
                int("worker_bits", ""),
                int("sequence_bits", ""),
            ]),
            "how an id is put together: time, worker, number",
        ),
        int(VERSION, "raised by every write"),
    ])
}
