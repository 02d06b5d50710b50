create table house.profiles (
    tenant text collate "C" not null,
    user_id bigint not null,
    display_name text not null,
    bio text,
    avatar_url text,
    status text collate "C" not null default 'ACTIVE',
    updated_at timestamptz,
    version bigint not null default 1,
    primary key (tenant, user_id) with (deduplicate_items = off)
);
create index profiles_by_status_idx on house.profiles (tenant, status, updated_at, user_id) with (deduplicate_items = off) where tenant <> '' and updated_at is not null;
