create table house.jobs (
    tenant text collate "C" not null,
    queue text collate "C" not null,
    number bigint not null,
    due_shard bigint,
    due_at timestamptz,
    version bigint not null default 1,
    primary key (tenant, queue, number) with (deduplicate_items = off)
);
create index jobs_due_idx on house.jobs (due_shard, due_at, tenant, queue, number) with (deduplicate_items = off) where tenant <> '' and due_shard is not null and due_at is not null;
