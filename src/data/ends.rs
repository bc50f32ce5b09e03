use std::ops::Range;

/// Where a part lies, of parts that lie one after another and of which the ends are known; `None`
/// beyond the last.
pub(super) fn part<T: Copy + Default>(ends: &[T], number: usize) -> Option<Range<T>> {
    let end = *ends.get(number)?;
    let start = number.checked_sub(1).and_then(|before| ends.get(before)).copied().unwrap_or_default();
    Some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_begins_where_the_one_before_it_ends() {
        let ends = [2_u64, 2, 5];
        assert_eq!(
            [0, 1, 2, 3].map(|number| part(&ends, number)),
            [Some(0..2), Some(2..2), Some(2..5), None]
        );
        assert_eq!(part::<usize>(&[], 0), None);
    }
}
