//! A03 in simulation: authors who append, edit and remove children, and moderators who hide and restore them.

use serde_json::json;
use statehouse_store::Value;

use crate::harness::simulation::{ClientFuture, SimulatedClient, Workload};

pub(crate) const WORKLOAD: Workload = Workload {
    archetype: "thread",
    blueprint: r#"
[house]
name = "simulation"

[thread.comment]
parent  = { post_id = "int" }
fields  = { body = "text" }
buckets = 2
"#,
    resource: "comment",
    egress: None,
    prepare: |_| Box::pin(async { Ok(()) }),
    act: |client| -> ClientFuture<'_> { Box::pin(act(client)) },
    check: |_| Box::pin(async { Ok(()) }),
};

const POSTS: u64 = 2;
/// Few, so that clients append under an id that is taken.
const COMMENTS: u64 = 12;

async fn act(client: &mut SimulatedClient) {
    let (post, comment) = (client.below(POSTS), format!("c{}", client.below(COMMENTS)));
    let key = [Value::from(post), Value::from(comment.as_str())];
    let choice = client.below(9);
    if choice < 4 {
        let body = format!("body {}", client.below(2));
        let input = json!({"post_id": post, "comment_id": comment, "body": body});
        drop(client.call("comment.append", &[], input, None).await);
        return;
    }
    let also_hidden = json!({"also_hidden": true});
    let Ok(known) = client.read().call("comment.read", &key, also_hidden, None).await else { return };
    let (action, input) = match choice {
        4 | 5 => ("comment.edit", json!({"body": format!("edited by {}", client.name)})),
        6 => ("comment.hide", json!({"reason": "rude"})),
        7 => ("comment.restore", json!({})),
        _ => ("comment.remove", json!({})),
    };
    drop(client.call(action, &key, input, known.version).await);
}
