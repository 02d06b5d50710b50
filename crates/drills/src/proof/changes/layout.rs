//! Numbers of the blueprint that say where rows are: buckets, shards and their like.

use anyhow::{Result, ensure};
use serde_json::json;
use statehouse_store::Migrate;

use super::{applied, house, refused};
use crate::harness::engines::TestNamespace;
use crate::harness::store_client::same;
use crate::harness::tenant_client::TenantClient;

/// Every number that says where rows are: a setting of a declaration, what the store has, and a value that rows would be lost
/// with. Where a number must not change at all, it is a greater one.
const NUMBERS: &[(&str, &str, i64, i64)] = &[
    ("[relation.follow]\nfrom = { a = \"int\" }\nto = { b = \"int\" }\ncount_shards = 1", "buckets", 4, 2),
    ("[relation.like]\nfrom = { a = \"int\" }\nto = { b = \"int\" }", "out_buckets", 4, 2),
    ("[relation.block]\nfrom = { a = \"int\" }\nto = { b = \"int\" }", "count_shards", 4, 2),
    ("[thread.comment]\nparent = { post_id = \"int\" }\nfields = { body = \"text\" }", "buckets", 4, 3),
    ("[schedule.job]", "shards", 4, 2),
    ("[schedule.task]", "priorities", 3, 2),
    ("[booking.seat]\nkey = { event_id = \"int\", seat_no = \"int\" }", "shards", 4, 2),
    ("[timer.alarm]\nkey = { id = \"int\" }", "shards", 4, 2),
    ("[effect.hook]\nurl = \"https://example.org\"", "shards", 4, 2),
    ("[entity.part]\nkey = { id = \"int\" }\n[scan.review]\nof = \"part\"", "shards", 4, 2),
    ("[sequence.order]\nkind = \"time\"", "worker_bits", 10, 11),
    ("[sequence.parcel]\nkind = \"time\"", "sequence_bits", 10, 11),
];

const HOUSE: &str = "[house]\nname = \"drill\"\n";

/// Everything that has such a number; one of them with another.
fn all(other: Option<(usize, i64)>) -> String {
    let declared = NUMBERS.iter().enumerate().map(|(index, (declared, name, number, _))| {
        let number = other.filter(|(at, _)| *at == index).map_or(*number, |(_, other)| other);
        format!("{declared}\n{name} = {number}\n")
    });
    format!("{HOUSE}\n{}", declared.collect::<Vec<_>>().join("\n"))
}

pub(super) async fn lower_layout_numbers_are_refused(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    applied(&store, &all(None), Migrate::Apply).await?;
    for (place, (_, name, number, wrong)) in NUMBERS.iter().enumerate() {
        // Beside it something is declared that is not there yet, and must not come.
        let changed = format!("{}\n[lease.extra]\nkey = {{ id = \"int\" }}\n", all(Some((place, *wrong))));
        let changed = house(&store, &changed)?;
        for how in [Migrate::Show, Migrate::Apply, Migrate::ApplyWithLoss] {
            let message = refused(changed.migrate(how).await).await?;
            let says = [format!("`{name}`"), number.to_string(), wrong.to_string()];
            ensure!(says.iter().all(|part| message.contains(part)), "{name}: {message}");
        }
    }
    same("what has changed", &house(&store, &all(None))?.migrate(Migrate::Show).await?.len(), &0)?;
    // Ranges are cut when a run begins: their number says where no row is, and may be lower.
    let fewer = all(None).replace("[scan.review]\n", "[scan.review]\nranges = 2\n");
    same("what fewer ranges change", &house(&store, &fewer)?.migrate(Migrate::Show).await?.len(), &0)
}

pub(super) async fn layout_numbers_are_recorded(namespace: &dyn TestNamespace) -> Result<()> {
    let store = namespace.open().await?;
    let follows = |buckets: i64| {
        format!(
            "{HOUSE}\n[relation.follow]\nfrom = {{ a = \"int\" }}\nto = {{ b = \"int\" }}\nbuckets = {buckets}\n"
        )
    };
    let few = applied(&store, &follows(2), Migrate::Apply).await?;
    let listed = async |client: &TenantClient| -> Result<(usize, i64)> {
        let list = client.done("follow_in.list", &[], json!({"b": 9, "limit": 100}), None).await?;
        let count = client.done("follow_in.count", &[9.into()], json!({}), None).await?;
        Ok((list.body.as_array().map_or(0, Vec::len), count.body["count"].as_i64().unwrap_or(-1)))
    };
    for follower in 0..20 {
        few.done("follow.add", &[follower.into(), 9.into()], json!({}), None).await?;
    }
    // More is taken, and said to be a change.
    let shown = house(&store, &follows(8))?.migrate(Migrate::Show).await?;
    ensure!(shown.iter().any(|change| change.to_string().contains("buckets")), "{shown:?}");
    let many = applied(&store, &follows(8), Migrate::Apply).await?;
    for follower in 20..40 {
        many.done("follow.add", &[follower.into(), 9.into()], json!({}), None).await?;
    }
    same("listed and counted", &listed(&many).await?, &(40, 40))?;
    same("what is left to do", &house(&store, &follows(8))?.migrate(Migrate::Show).await?.len(), &0)?;
    // From now on the former number is too low, for a server that was rolled back as well.
    refused(house(&store, &follows(2))?.migrate(Migrate::Apply).await).await?;
    for follower in 0..40 {
        many.done("follow.remove", &[follower.into(), 9.into()], json!({}), None).await?;
    }
    same("listed and counted", &listed(&many).await?, &(0, 0))
}
