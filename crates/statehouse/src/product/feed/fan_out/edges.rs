//! The effect of a follow or an unfollow on the rows of one reader (F2, F3).

use super::*;

/// The rows on either side of an edge.
struct EdgeRows {
    /// Posts in the author's list that the reader is to have.
    wanted: Vec<Row>,
    /// Posts of the author that the reader has.
    had: BTreeMap<(Time, String), Row>,
}

impl FanOutContext<'_> {
    /// What a reader has of these posts of an author.
    pub(super) async fn had_of(
        &self,
        viewer: &Value,
        author: &Value,
        wanted: &[Row],
    ) -> Result<BTreeMap<(Time, String), Row>, HandlerError> {
        let mut addresses = Vec::with_capacity(wanted.len());
        for row in wanted {
            let key = self.row_key(viewer, row.get_time(CREATED_AT)?, post_in(row)?);
            addresses.push(Address::new(&self.feed.rows, self.reading.tenant, key)?);
        }
        if addresses.is_empty() {
            return Ok(BTreeMap::new());
        }
        let rows = self.reading.store.get(&addresses, Consistency::Strong).await?;
        let of_author = rows.into_iter().flatten().filter(|row| row.get(AUTHOR) == Some(author));
        of_author.map(|row| Ok((place(&row)?, row))).collect()
    }

    /// The next piece of the difference between what a reader has of an author and what is wanted (F2, F3).
    pub(super) async fn edge(&self, viewer: Value, author: Value) -> Result<FanOutStep, HandlerError> {
        let feed = self.feed;
        let edges = &feed.relation.table;
        let edge_key = vec![viewer.clone(), author.clone()];
        let pulled_key = self.key([viewer.clone(), author.clone()]);
        let [edge, pulls, pulled] = self
            .get([
                (edges, edge_key.clone()),
                (&feed.authors, self.key([author.clone()])),
                (&feed.pulled, pulled_key.clone()),
            ])
            .await?;
        let since = edge.as_ref().map_or(Ok(None), |row| row.get_optional_time(relation::SINCE))?;
        let mut steps = vec![match &edge {
            Some(row) => Step::assert(edges, edge_key).guard(Guard::version(row.version())),
            None => Step::assert_absent(edges, edge_key),
        }];
        match (since.filter(|_| pulls.is_some()), &pulled) {
            (Some(since), Some(row)) if row.get_time(SINCE)? == since => {}
            (Some(since), _) => steps.push(Step::upsert(&feed.pulled, pulled_key).set(SINCE, since)),
            (None, Some(_)) => steps.push(Step::remove(&feed.pulled, pulled_key)),
            (None, None) => {}
        }
        let oldest = since.map(|since| feed.oldest_since(since, self.reading.now));
        let is_new = edge.as_ref().is_some_and(|row| row.version() == 1);
        let rows = self.rows_of_edge(&viewer, &author, oldest, is_new).await?;
        let differences = self.differences(&viewer, &author, oldest, rows)?;
        let is_last = differences.len() <= DIFFERENCES_MAX;
        steps.extend(differences.into_iter().take(DIFFERENCES_MAX).flatten());
        // The demand alone changes nothing.
        if steps.len() == 1 {
            steps.clear();
        }
        Ok(FanOutStep { steps, is_last })
    }

    /// The rows that a reader has of an author, and those that the author's list wants the reader to have.
    async fn rows_of_edge(
        &self,
        viewer: &Value,
        author: &Value,
        oldest: Option<Time>,
        is_new: bool,
    ) -> Result<EdgeRows, HandlerError> {
        let feed = self.feed;
        let list = self.key([author.clone(), PUSH.into()]);
        // An edge that was never there before has left nothing, so a few posts need no look at what there is.
        let mut wanted = match oldest.filter(|_| is_new) {
            Some(oldest) => Some(self.rows_from(&feed.lists, list.clone(), oldest).await?),
            None => None,
        };
        wanted = wanted.filter(|rows| rows.len() <= DIFFERENCES_MAX);
        let mut had = BTreeMap::new();
        if let Some(wanted) = &wanted {
            // What is there of them already is no difference any more: a record may have more to do after this.
            had = self.had_of(viewer, author, wanted).await?;
        } else {
            // What there is is read first: of what comes meanwhile, only what is wanted is seen.
            let rows = self.rows_from(&feed.rows, self.key([viewer.clone()]), Time::MIN).await?;
            let of_author = rows.into_iter().filter(|row| row.get(AUTHOR) == Some(author));
            for row in of_author {
                had.insert(place(&row)?, row);
            }
        }
        let wanted = match (wanted, oldest) {
            (Some(wanted), _) => wanted,
            (None, Some(oldest)) => self.rows_from(&feed.lists, list.clone(), oldest).await?,
            (None, None) => Vec::new(),
        };
        Ok(EdgeRows { wanted, had })
    }

    /// The steps of each difference between the two.
    fn differences(
        &self,
        viewer: &Value,
        author: &Value,
        oldest: Option<Time>,
        mut rows: EdgeRows,
    ) -> Result<Vec<Vec<Step>>, HandlerError> {
        let feed = self.feed;
        let list = self.key([author.clone(), PUSH.into()]);
        let mut differences: Vec<Vec<Step>> = Vec::new();
        for row in &rows.wanted {
            let has = rows.had.remove(&place(row)?);
            let preview = row.get(PREVIEW).cloned().unwrap_or(Value::Null);
            if has.is_some_and(|has: Row| has.get(PREVIEW) == Some(&preview)) {
                continue;
            }
            let (at, post) = (row.get_time(CREATED_AT)?, post_in(row)?.clone());
            let shown = ShownPost { post, author: author.clone(), at, preview };
            let order = row.get_int(SOURCE_ORDER)?;
            let listed = Step::assert(&feed.lists, row.key().to_vec()).guard(column(SOURCE_ORDER).eq(order));
            differences.push(vec![listed, self.put(viewer, &shown)]);
        }
        for ((at, _), row) in &rows.had {
            // Another author's post may have come to the very same place.
            let same = column(AUTHOR).eq(author.clone());
            let mut steps = vec![Step::remove(&feed.rows, row.key().to_vec()).guard(same)];
            // And the post itself may have come back, to a reader who still follows.
            if oldest.is_some_and(|oldest| *at >= oldest) {
                let behind = row.key().iter().skip(2).cloned();
                steps.push(Step::assert_absent(&feed.lists, list.iter().cloned().chain(behind)));
            }
            differences.push(steps);
        }
        Ok(differences)
    }
}
