//! Secrets that are kept in the store.

use super::*;

pub(super) async fn secrets_can_be_kept_in_the_house_and_rotated(
    namespace: &dyn TestNamespace,
) -> Result<()> {
    let blueprint = "[effect.call]\nurl = \"https://psp.example/\"\nheaders = { x-key = \"${house:psp}\" }\n";
    let fixture =
        EffectFixture::with(namespace, FakeTargets::of(|_, _| TargetBehavior::status(200)), blueprint)
            .await?;
    let store = fixture.client.house.store().clone();
    fixture.client.done("call.send", &[], json!({"key": "one"}), None).await?;
    fixture.client.drain_workers().await?;
    same("without a secret", &fixture.script.outbounds().len(), &0)?;
    for (number, secret) in ["first-secret", "second-secret"].into_iter().enumerate() {
        let (by, operation) = (AuditActor::program("case"), format!("keep-{number}"));
        let plan = keep_secret(&SecretKeys::default(), "psp", secret, changed_by(&by, &operation))?;
        ensure!(audit::commit(&*store, &plan).await?.is_none(), "the secret was not kept");
        // A caller that lost the answer commits the same plan again.
        ensure!(audit::commit(&*store, &plan).await?.is_none(), "a repetition was refused");
        fixture.client.done("call.send", &[], json!({"key": format!("{number}")}), None).await?;
        fixture.client.drain_workers().await?;
    }
    let keys: Vec<Option<String>> =
        fixture.script.outbounds().iter().map(|outbound| header(outbound, "x-key")).collect();
    same("what was sent", &keys.len(), &3)?;
    same("the first", &keys[0].as_deref(), &Some("first-secret"))?;
    same("the last", &keys[2].as_deref(), &Some("second-secret"))?;
    let told = format!("{:?}", whole_log(store.as_ref()).await?);
    ensure!(!told.contains("-secret"), "the log tells a secret");
    ensure!(
        keep_secret(&SecretKeys::default(), "../server", "x", changed_by(&AuditActor::open(), "op")).is_err(),
        "a name reaches out of its corner"
    );
    // Nothing prints them either.
    let printed = format!("{:?}", fixture.script.outbounds());
    ensure!(!printed.contains("-secret"), "{printed}");
    Ok(())
}

/// A change of a secret by an operator, as the command line makes it.
fn changed_by<'a>(by: &'a AuditActor, operation: &'a str) -> SecretChange<'a> {
    SecretChange { by, at: Time::from_micros(1_000_000), operation }
}

const SECRET: &str = "sk-live-topsecret";
const BLUEPRINT_OF_SECRETS: &str = "[effect.call]\nurl = \"https://psp.example/\"\nheaders = { x-key = \"${house:psp}\" }\n\
     [effect.mail]\nurl = \"https://psp.example/\"\nheaders = { x-key = \"${house:copy}\" }\n";

/// One store, used by processes with different keys.
struct SecretFixture {
    fixture: EffectFixture,
    store: Arc<dyn Store>,
}

impl SecretFixture {
    async fn open(namespace: &dyn TestNamespace) -> Result<SecretFixture> {
        let script = FakeTargets::of(|_, _| TargetBehavior::status(200));
        let fixture = EffectFixture::with(namespace, script, BLUEPRINT_OF_SECRETS).await?;
        let store = fixture.client.house.store().clone();
        Ok(SecretFixture { fixture, store })
    }

    /// A process with these keys.
    async fn process(&self, keys: &str) -> Result<TenantClient> {
        let EffectFixture { script, clock, .. } = &self.fixture;
        let egress = Egress { secret_keys: SecretKeys::parse(keys)?, ..script.egress(&[]) };
        TenantClient::before(self.store.clone(), BLUEPRINT_OF_SECRETS, Arc::new(clock.clone()), egress).await
    }

    async fn keep(&self, keys: &SecretKeys, operation: &str) -> Result<()> {
        let by = AuditActor::program("case");
        let plan = keep_secret(keys, "psp", SECRET, changed_by(&by, operation))?;
        ensure!(audit::commit(&*self.store, &plan).await?.is_none(), "the secret was not kept");
        Ok(())
    }

    /// The stored bytes of the secret.
    async fn stored(&self) -> Result<Vec<u8>> {
        let address = Address::new(
            &system::secrets()?,
            &system::tenant().context("no tenant")?,
            ["effect/psp".into()],
        )?;
        let rows = self.store.get(&[address], Consistency::Strong).await?;
        Ok(rows.into_iter().next().flatten().context("no row")?.get_bytes(CONTENT)?.to_vec())
    }

    /// Whether the secret can be seen in what is stored.
    async fn is_plain(&self) -> Result<bool> {
        Ok(self.stored().await?.windows(SECRET.len()).any(|window| window == SECRET.as_bytes()))
    }

    /// Lets a process send an effect, and returns its failures.
    async fn failures(&self, process: &TenantClient, effect: &str, name: &str) -> Result<String> {
        let script = &self.fixture.script;
        process.done(&format!("{effect}.send"), &[], json!({"key": name}), None).await?;
        let before = script.outbounds().len();
        for _ in 0..1_000 {
            let progress = process.work(20).await?;
            let failures: Vec<String> = progress.into_iter().flat_map(|progress| progress.failures).collect();
            if !failures.is_empty() {
                same("requests of a process that failed", &script.outbounds().len(), &before)?;
                return Ok(failures.join("; "));
            }
            if script.outbounds().len() > before {
                let key = script.outbounds().last().and_then(|outbound| header(outbound, "x-key"));
                same("the header", &key.as_deref(), &Some(SECRET))?;
                return Ok(String::new());
            }
            pause().await;
        }
        anyhow::bail!("{effect} {name} was neither sent nor reported")
    }

    async fn sends(&self, process: &TenantClient, name: &str) -> Result<()> {
        same("failures", &self.failures(process, "call", name).await?.as_str(), &"")
    }
}

/// A key from outside the store encrypts its secrets. A process without it sends nothing and names the key.
pub(super) async fn secrets_are_encrypted_at_rest(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = SecretFixture::open(namespace).await?;
    let (key, other) = (SecretKeys::generate()?, SecretKeys::generate()?);
    // A value that was written without a key is plain, and is read with one.
    fixture.keep(&SecretKeys::default(), "keep-plain").await?;
    ensure!(fixture.is_plain().await?, "this case would not find a plain secret");
    let process = fixture.process(&key).await?;
    fixture.sends(&process, "plain").await?;
    let done = reencrypt(&process.house, &AuditActor::program("case")).await?;
    same("encrypted", &(done.total, done.changed), &(1, 1))?;
    ensure!(!fixture.is_plain().await?, "the secret is stored as plain text");
    same("again", &reencrypt(&process.house, &AuditActor::program("case")).await?.changed, &0)?;
    fixture.sends(&process, "encrypted").await?;
    fixture.keep(process.house.secret_keys(), "keep-encrypted").await?;
    ensure!(!fixture.is_plain().await?, "the secret is stored as plain text");
    fixture.sends(&process, "written").await?;
    let id = process.house.secret_keys().ids().next().context("no id")?.to_owned();
    for (number, keys) in ["", other.as_str()].into_iter().enumerate() {
        let process = fixture.process(keys).await?;
        let failures = fixture.failures(&process, "call", &format!("missing-{number}")).await?;
        ensure!(failures.contains(&id) && !failures.contains(SECRET), "{failures:?}");
    }
    let log = format!("{:?}", whole_log(&*fixture.store).await?);
    ensure!(!log.contains(SECRET), "the log has a secret");
    Ok(())
}

/// A new key takes over from an old one, and an encrypted value is of no use in another row.
pub(super) async fn keys_of_secrets_are_rotated(namespace: &dyn TestNamespace) -> Result<()> {
    let fixture = SecretFixture::open(namespace).await?;
    let (old, new) = (SecretKeys::generate()?, SecretKeys::generate()?);
    fixture.keep(&SecretKeys::parse(&old)?, "keep").await?;
    let with_both = fixture.process(&format!("{new}\n{old}\n")).await?;
    fixture.sends(&with_both, "both").await?;
    same("rotated", &reencrypt(&with_both.house, &AuditActor::program("case")).await?.changed, &1)?;
    let with_new = fixture.process(&new).await?;
    fixture.sends(&with_new, "rotated").await?;
    ensure!(!fixture.is_plain().await?, "the secret is stored as plain text");
    let copied = Value::Bytes(fixture.stored().await?);
    let step = Step::upsert(&system::secrets()?, ["effect/copy".into()]).set(CONTENT, copied);
    let tenant = system::tenant().context("no tenant")?;
    fixture.store.commit(&Plan::of(&tenant, "copy").step(step).build()?).await?;
    let failures = fixture.failures(&with_new, "mail", "copied").await?;
    ensure!(failures.contains("copied from another row"), "{failures:?}");
    Ok(())
}
