use std::sync::Arc;

use memfit::data::{Concat, InMemory, Slice, Source, Tokens, Zip};

use crate::{OneFile, all, data_error, get, is_config};

fn numbers(range: std::ops::Range<i64>) -> InMemory<i64> {
    InMemory::of(range.collect())
}

#[test]
fn memory_gives_clones() {
    let source = numbers(3..6);
    assert_eq!(all(&source), [3, 4, 5]);
    assert_eq!(all(&source), [3, 4, 5]);
    assert!(data_error(get(&source, 3)).contains("there are 3 records"));
}

#[test]
fn parts_follow_each_other_and_empty_ones_are_passed_by() {
    let parts = [0..0, 0..2, 2..2, 2..5, 5..5].map(numbers);
    let source = Concat::of(parts.to_vec()).unwrap();
    assert_eq!(source.len(), 5);
    assert_eq!(all(&source), [0, 1, 2, 3, 4]);
    assert!(data_error(get(&source, 5)).contains("there are 5 records"));
    assert!(is_config(Concat::<InMemory<i64>>::of(Vec::new())));
    assert_eq!(Concat::of(vec![numbers(0..0)]).unwrap().len(), 0);
}

#[test]
fn a_record_of_a_part_comes_from_the_part_s_file() {
    let files = [OneFile::of(&[0, 1]), OneFile::of(&[2, 3, 4])];
    let parts = files.iter().map(|file| Tokens::<u8>::open(&file.path).unwrap().rows(1).unwrap());
    let source = Concat::of(parts.collect()).unwrap();
    let origin = source.origin(3);
    assert_eq!(origin.file.as_deref(), Some(files[1].path.as_path()));
    assert_eq!((origin.record, origin.offset), (Some(1), Some(1)));
    let slice = Slice::list(source, vec![4, 0]).unwrap();
    assert_eq!(slice.origin(0).offset, Some(2));
    assert_eq!(slice.origin(1).file.as_deref(), Some(files[0].path.as_path()));
}

#[test]
fn slices_choose_by_range_and_by_list() {
    let source = Arc::new(numbers(0..10));
    assert_eq!(all(&Slice::range(source.clone(), 7..10).unwrap()), [7, 8, 9]);
    assert_eq!(all(&Slice::list(source.clone(), vec![5, 0, 5]).unwrap()), [5, 0, 5]);
    assert!(is_config(Slice::range(source.clone(), 7..11)));
    assert!(is_config(Slice::list(source.clone(), vec![10])));
    let range = Slice::range(source, 7..10).unwrap();
    assert!(data_error(get(&range, 3)).contains("there are 3 records"), "not the source's own");
    assert!(data_error(get(&range, u64::MAX)).contains("there are 3 records"));
}

#[test]
fn an_error_in_a_pair_names_the_source_it_comes_from() {
    let files = [OneFile::of(&[0, 1]), OneFile::of(&[2, 9])];
    let [first, second] =
        files.each_ref().map(|file| Tokens::<u8>::open(&file.path).unwrap().vocabulary(5).rows(1).unwrap());
    let pair = Zip::of(first, second).unwrap();
    assert_eq!(get(&pair, 0).unwrap(), (vec![0], vec![2]));
    let text = data_error(get(&pair, 1));
    assert!(
        text.starts_with(&format!("record 1 at byte 1 of {}: the id 9", files[1].path.display())),
        "{text}"
    );
}

#[test]
fn a_number_that_no_record_has_is_an_error_of_a_pair_too() {
    let file = OneFile::of(&[0; 24]);
    let rows = || Tokens::<u16>::open_with_header(&file.path, 8).unwrap().rows(2).unwrap();
    let pair = Zip::of(rows(), numbers(0..4)).unwrap();
    for index in [4, u64::MAX / 4, u64::MAX] {
        assert!(data_error(get(&pair, index)).contains("there are 4 records"));
    }
    let origin = rows().origin(u64::MAX);
    assert_eq!((origin.record, origin.offset), (Some(u64::MAX), Some(u64::MAX)));
    assert_eq!(rows().origin(3).offset, Some(8 + 3 * 4));
}
