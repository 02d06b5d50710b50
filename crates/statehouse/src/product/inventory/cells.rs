//! A stock that is cut into several rows, its cells, so that callers do not all write one row (C1 to C4 in [`super`]). Pure.
//!
//! Cell 0 is the row of the stock itself; the others are in a table of their own. A cell that does not exist has nothing.

use statehouse_store::{Row, StoreError};

use super::{AVAILABLE, RESERVED, SOLD, STOCKED};

/// Cells of one stock. A plan can assert all of them.
pub(super) const CELLS_MAX: u32 = 40;

/// All rows of a stock as they were read, by the numbers of their cells.
#[derive(Clone, Debug)]
pub(super) struct CellRows(pub Vec<Option<Row>>);

/// A quantity of one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CellQuantity {
    pub cell: usize,
    pub quantity: i64,
}

/// The quantities of a stock, all cells together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CellTotals {
    pub available: i64,
    pub reserved: i64,
    pub sold: i64,
    pub stocked: i64,
    /// Raised by every write of every cell.
    pub version: i64,
}

impl CellRows {
    /// The row of the stock itself.
    pub(super) fn main(&self) -> Option<&Row> {
        self.0.first().and_then(Option::as_ref)
    }

    /// What each cell has in a column.
    pub(super) fn column(&self, name: &str) -> Result<Vec<i64>, StoreError> {
        self.0.iter().map(|row| row.as_ref().map_or(Ok(0), |row| row.get_int(name))).collect()
    }

    /// All cells together.
    pub(super) fn totals(&self) -> Result<CellTotals, StoreError> {
        let sum = |name: &str| Ok::<i64, StoreError>(self.column(name)?.iter().sum());
        Ok(CellTotals {
            available: sum(AVAILABLE)?,
            reserved: sum(RESERVED)?,
            sold: sum(SOLD)?,
            stocked: sum(STOCKED)?,
            version: self.0.iter().flatten().map(Row::version).sum(),
        })
    }
}

/// Takes a quantity from cells: from those that have most, as few as possible, and what is missing from cell 0.
pub(super) fn take(has: &[i64], quantity: i64) -> Vec<CellQuantity> {
    let mut order: Vec<usize> = (0..has.len()).collect();
    let of = |cell: usize| has.get(cell).copied().unwrap_or(0);
    order.sort_by_key(|cell| (std::cmp::Reverse(of(*cell)), *cell));
    let mut left = quantity;
    let mut taken: Vec<CellQuantity> = Vec::new();
    for cell in order {
        let quantity = of(cell).min(left);
        if quantity > 0 {
            taken.push(CellQuantity { cell, quantity });
            left -= quantity;
        }
    }
    if left > 0 {
        match taken.iter_mut().find(|taken| taken.cell == 0) {
            Some(main) => main.quantity += left,
            None => taken.push(CellQuantity { cell: 0, quantity: left }),
        }
    }
    taken.sort_by_key(|taken| taken.cell);
    taken
}

/// Divides a quantity evenly over cells, beginning with one of them.
pub(super) fn split(quantity: i64, cells: usize, first: usize) -> Vec<CellQuantity> {
    let count = i64::try_from(cells.max(1)).unwrap_or(1);
    let (each, rest) = (quantity / count, quantity % count);
    let share = |index: usize| {
        let more = i64::from(i64::try_from(index).unwrap_or(0) < rest);
        CellQuantity { cell: (first + index) % cells.max(1), quantity: each + more }
    };
    let mut shares: Vec<CellQuantity> = (0..cells).map(share).filter(|share| share.quantity > 0).collect();
    shares.sort_by_key(|share| share.cell);
    shares
}

/// By how much each cell has to change so that all have the same, but for one; those that need not change are left out. What is
/// ordered beyond what there is stands in cell 0 alone.
pub(super) fn balance(has: &[i64]) -> Vec<CellQuantity> {
    let total: i64 = has.iter().sum();
    let count = i64::try_from(has.len().max(1)).unwrap_or(1);
    let (each, rest) = (total.div_euclid(count), total.rem_euclid(count));
    // Those that have most keep what cannot be divided, so that no unit moves without need.
    let mut order: Vec<usize> = (0..has.len()).collect();
    order.sort_by_key(|cell| (std::cmp::Reverse(has.get(*cell).copied().unwrap_or(0)), *cell));
    let mut changes: Vec<CellQuantity> = Vec::new();
    for (index, cell) in order.into_iter().enumerate() {
        let more = i64::from(i64::try_from(index).unwrap_or(0) < rest);
        let target = match (total < 0, cell) {
            (false, _) => each + more,
            (true, 0) => total,
            (true, _) => 0,
        };
        let quantity = target - has.get(cell).copied().unwrap_or(0);
        if quantity != 0 {
            changes.push(CellQuantity { cell, quantity });
        }
    }
    changes.sort_by_key(|change| change.cell);
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(quantities: &[CellQuantity]) -> Vec<(usize, i64)> {
        quantities.iter().map(|one| (one.cell, one.quantity)).collect()
    }

    #[test]
    fn as_few_cells_as_possible_are_taken_from() {
        assert_eq!(pairs(&take(&[1, 5, 3], 4)), [(1, 4)]);
        assert_eq!(pairs(&take(&[1, 5, 3], 7)), [(1, 5), (2, 2)]);
        assert_eq!(pairs(&take(&[1, 5, 3], 9)), [(0, 1), (1, 5), (2, 3)]);
        // What is missing is ordered from cell 0, or refused there.
        assert_eq!(pairs(&take(&[1, 5, 0], 9)), [(0, 4), (1, 5)]);
        assert_eq!(pairs(&take(&[-2, 0, 0], 3)), [(0, 3)]);
        assert_eq!(pairs(&take(&[-2, 3, 0], 3)), [(1, 3)]);
    }

    #[test]
    fn a_quantity_is_divided_without_loss() {
        assert_eq!(pairs(&split(10, 4, 0)), [(0, 3), (1, 3), (2, 2), (3, 2)]);
        assert_eq!(pairs(&split(2, 4, 3)), [(0, 1), (3, 1)]);
        assert_eq!(pairs(&split(3, 1, 0)), [(0, 3)]);
    }

    #[test]
    fn cells_are_made_even_without_moving_more_than_needed() {
        assert_eq!(pairs(&balance(&[9, 0, 0])), [(0, -6), (1, 3), (2, 3)]);
        assert_eq!(pairs(&balance(&[3, 4, 3])), []);
        assert_eq!(pairs(&balance(&[0, 1, 0])), []);
        assert_eq!(pairs(&balance(&[-3, 4, 1])), [(0, 3), (1, -3)]);
        assert_eq!(pairs(&balance(&[-2, 0, 0])), []);
        assert_eq!(pairs(&balance(&[-4, 2, 0])), [(0, 2), (1, -2)]);
        for has in [[5, 0, 7, 1], [0, 0, 0, 3], [-4, 9, 2, 2]] {
            assert_eq!(balance(&has).iter().map(|change| change.quantity).sum::<i64>(), 0);
        }
    }
}
