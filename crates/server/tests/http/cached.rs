//! Cached reads over HTTP: they see the caller's own writes, and everybody else's soon.

use serde_json::json;

use crate::support::{Running, Site, cases};

cases![
    a_token_makes_a_cached_read_see_the_write,
    others_writes_arrive_through_the_log,
    what_is_not_a_token_is_refused,
];

const CACHED: &str = "/v1/profile/1?consistency=cached";

/// Reads until the cache has answered.
async fn warm(server: &Running) {
    let hits = server.house.cache().figures().hits;
    while server.house.cache().figures().hits == hits {
        server.get(CACHED).await.ok(200);
        tokio::task::yield_now().await;
    }
}

async fn a_token_makes_a_cached_read_see_the_write(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    warm(&server).await;
    for version in 1..50_i64 {
        let tag = format!("\"{version}\"");
        let body = json!({"bio": version.to_string()});
        let written = server.put("PATCH", "/v1/profile/1", &[("if-match", &tag)], body).await.ok(200);
        let path = format!("{CACHED}&after={}", written.header("statehouse-token"));
        let read = server.get(&path).await.ok(200);
        assert_eq!(read.json()["version"], version + 1);
    }
    // Hot fields and restored rows too.
    let counted =
        server.put("POST", "/v1/profile/1/mutate", &[], json!({"increment": {"views": 1}})).await.ok(200);
    let read = server.get(&format!("{CACHED}&after={}", counted.header("statehouse-token"))).await.ok(200);
    assert_eq!(read.json()["views"], 1);
}

async fn others_writes_arrive_through_the_log(site: Site) {
    let house = site.house().await;
    let (here, there) = (
        Running::of(house.clone(), Default::default()).await,
        crate::support::house_over(house.store().clone()).await,
    );
    let there = Running::of(there, Default::default()).await;
    here.create(1).await;
    warm(&here).await;
    // Written by another house over the same store, and as the second row of a batch.
    let calls = json!([
        {"action": "profile.create", "input": {"user_id": 2, "display_name": "Bob"}},
        {"action": "profile.patch", "key": "1", "input": {"bio": "new"}, "expected_version": 1},
    ]);
    there.put("POST", "/v1/batch", &[], calls).await.ok(200);
    // This would go on for ever if nothing discarded the row.
    loop {
        let hits = here.house.cache().figures().hits;
        let read = here.get(CACHED).await.ok(200);
        let from_cache = here.house.cache().figures().hits > hits;
        if from_cache && read.json()["version"] == 2 {
            break;
        }
        tokio::task::yield_now().await;
    }
}

async fn what_is_not_a_token_is_refused(site: Site) {
    let server = site.server().await;
    server.create(1).await;
    for token in ["x", "", "w-1", "1-2", "w1-2,x", "w0-999999"] {
        let problem = server.get(&format!("{CACHED}&after={token}")).await.problem(400, "invalid_input");
        assert_eq!(problem["errors"][0]["pointer"], "/after");
    }
    server.get("/v1/profile/1?consistency=eventual").await.problem(400, "invalid_input");
}
