use memfit::data::{Loader, Source, Tokens};

use crate::{OneFile, all, data_error, get, is_config, is_io};

/// 0, 1, 2, … as 16-bit tokens.
fn counting(tokens: u16) -> OneFile {
    OneFile::of(&(0..tokens).flat_map(u16::to_le_bytes).collect::<Vec<u8>>())
}

#[test]
fn rows_are_the_numbers_of_the_file_in_their_order() {
    let file = counting(10);
    let rows = Tokens::<u16>::open(&file.path).unwrap().rows(3).unwrap();
    assert_eq!(all(&rows), [[0, 1, 2], [3, 4, 5], [6, 7, 8]], "token 9 fills no row");
    assert_eq!(rows.origin(2).to_string(), format!("record 2 at byte 12 of {}", file.path.display()));
    let wide = OneFile::of(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    assert_eq!(all(&Tokens::<u32>::open(&wide.path).unwrap().rows(2).unwrap()), [[1, 4_294_967_295]]);
    assert_eq!(all(&Tokens::<u8>::open(&wide.path).unwrap().rows(5).unwrap()), [[1, 0, 0, 0, 255]]);
}

#[test]
fn a_stride_shorter_than_a_row_makes_rows_overlap_and_a_longer_one_leaves_tokens_out() {
    let tokens = Tokens::of((0..10_u16).collect());
    let with = |stride| all(&tokens.clone().rows(4).unwrap().stride(stride).unwrap());
    assert_eq!(with(3), [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]);
    assert_eq!(with(6), [[0, 1, 2, 3], [6, 7, 8, 9]]);
    assert_eq!(with(1).len(), 7);
    assert_eq!(with(100), [[0, 1, 2, 3]]);
}

#[test]
fn targets_are_the_tokens_one_later_and_each_token_is_an_input_once() {
    let samples = all(&Tokens::of((0..10_u8).collect()).next_token(3).unwrap());
    let expected: [(Vec<i64>, Vec<i64>); 3] =
        [(vec![0, 1, 2], vec![1, 2, 3]), (vec![3, 4, 5], vec![4, 5, 6]), (vec![6, 7, 8], vec![7, 8, 9])];
    assert_eq!(samples, expected);
    assert_eq!(Tokens::of(vec![0_u8; 9]).next_token(3).unwrap().len(), 2, "the last has no target");
}

#[test]
fn ranges_split_a_file_and_know_where_they_are() {
    let file = counting(10);
    let tokens = Tokens::<u16>::open(&file.path).unwrap();
    let validation = tokens.range(6..10).unwrap().rows(2).unwrap();
    assert_eq!(all(&validation), [[6, 7], [8, 9]]);
    assert_eq!(validation.origin(1).offset, Some(16));
    let inner = tokens.range(2..9).unwrap().range(1..4).unwrap();
    assert_eq!((inner.len(), all(&inner.rows(3).unwrap())), (3, vec![vec![3, 4, 5]]));
    assert!(is_config(tokens.range(6..11)));
    assert!(is_config(tokens.range(2..9).unwrap().range(0..8)), "not beyond the outer range");
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = tokens.range(5..4);
    assert!(is_config(reversed));
    assert!(tokens.range(3..3).unwrap().is_empty());
}

#[test]
fn a_header_is_left_out() {
    let file = OneFile::of(&[9, 9, 9, 1, 0, 2, 0]);
    let rows = Tokens::<u16>::open_with_header(&file.path, 3).unwrap().rows(1).unwrap();
    assert_eq!(all(&rows), [[1], [2]]);
    assert_eq!(rows.origin(1).offset, Some(5));
    assert!(data_error(Tokens::<u16>::open(&file.path)).contains("7 bytes are no whole number"));
    for header in [7, 8, u64::MAX] {
        assert!(
            data_error(Tokens::<u8>::open_with_header(&file.path, header)).contains("no token in 7 bytes")
        );
    }
}

#[test]
fn files_that_cannot_be_tokens_are_refused_when_they_are_opened() {
    let file = OneFile::of(&[1, 2, 3]);
    let text = data_error(Tokens::<u16>::open(&file.path));
    assert!(text.contains("no whole number of tokens of 16 bits") && text.contains("data"), "{text}");
    assert!(data_error(Tokens::<u8>::open(&OneFile::of(&[]).path)).contains("no token in 0 bytes"));
    assert!(is_io(Tokens::<u8>::open(file.folder())), "a folder");
    assert!(is_io(Tokens::<u8>::open(file.folder().join("missing"))));
    assert!(is_io(Tokens::<u8>::open("/dev/zero")), "no end");
    let pipe = file.folder().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(is_io(Tokens::<u8>::open(&pipe)), "a pipe, which nobody writes to");
}

#[test]
fn rows_that_cannot_be_are_refused() {
    let file = counting(4);
    let tokens = Tokens::<u16>::open(&file.path).unwrap();
    assert!(data_error(tokens.clone().rows(5)).contains("4 tokens, where one record has 5"));
    assert!(data_error(tokens.clone().next_token(4)).contains("4 tokens, where one record has 5"));
    assert!(data_error(tokens.clone().next_token(u64::MAX)).contains("4 tokens"));
    assert!(is_config(tokens.clone().rows(0)) && is_config(tokens.clone().next_token(0)));
    assert!(is_config(tokens.clone().rows(2).unwrap().stride(0)));
    let rows = tokens.rows(2).unwrap();
    assert!(data_error(get(&rows, 2)).contains("there are 2 records"));
    assert!(data_error(get(&rows, u64::MAX)).contains("there are 2 records"));
}

#[test]
fn an_id_beyond_the_vocabulary_is_an_error_of_its_record() {
    let file = OneFile::of(&[0, 1, 2, 3, 4, 9, 5, 6]);
    let tokens = Tokens::<u8>::open(&file.path).unwrap();
    let rows = tokens.clone().vocabulary(9).rows(4).unwrap();
    assert_eq!(get(&rows, 0).unwrap(), [0, 1, 2, 3]);
    assert!(data_error(get(&rows, 1)).contains("the id 9 at byte 5 is not in the vocabulary of 9"));
    assert_eq!(all(&tokens.vocabulary(10).rows(4).unwrap()).len(), 2);
    let memory = Tokens::of(vec![0_u8, 1, 7]).vocabulary(7).rows(3).unwrap();
    assert!(data_error(get(&memory, 0)).contains("the id 7 at token 2"));
    let mut batches = Loader::new(rows).build().unwrap();
    assert!(batches.next().unwrap().is_ok());
    let text = data_error(batches.next().unwrap());
    assert_eq!(
        text,
        format!(
            "record 1 at byte 4 of {}: the id 9 at byte 5 is not in the vocabulary of 9",
            file.path.display()
        )
    );
}

/// Case 62.
#[test]
fn a_file_that_is_cut_underneath_is_an_error_of_its_records_and_no_crash() {
    let file = counting(12);
    let rows = Tokens::<u16>::open(&file.path).unwrap().rows(4).unwrap();
    let mut batches = Loader::new(rows).workers(2).build().unwrap();
    file.set_len(14);
    assert!(batches.next().unwrap().is_ok(), "it is all there");
    for (record, offset) in [(1, 8), (2, 16)] {
        let text = data_error(batches.next().unwrap());
        let place = format!("record {record} at byte {offset} of {}", file.path.display());
        assert_eq!(text, format!("{place}: the file ends at byte 14; it had 24 when it was opened"));
    }
    assert!(batches.next().is_none());
    file.set_len(24);
    let (rest, _) = (batches.next().unwrap(), batches.next());
    assert!(rest.is_ok(), "the file is whole again");
}

#[test]
fn a_file_that_is_deleted_underneath_is_read_on() {
    let file = counting(4);
    let rows = Tokens::<u16>::open(&file.path).unwrap().rows(4).unwrap();
    std::fs::remove_file(&file.path).unwrap();
    assert_eq!(all(&rows), [[0, 1, 2, 3]]);
}

#[test]
fn a_mapping_checks_what_a_read_checks() {
    let file = OneFile::of(&[0, 1, 2, 3, 4, 9, 5, 6]);
    let rows = Tokens::<u8>::open(&file.path).unwrap().mapped().unwrap().vocabulary(9).rows(4).unwrap();
    assert_eq!(get(&rows, 0).unwrap(), [0, 1, 2, 3]);
    assert!(data_error(get(&rows, 1)).contains("the id 9 at byte 5"));
    assert!(data_error(get(&rows, 2)).contains("there are 2 records"));
    let memory = Tokens::of(vec![1_u8]).mapped().unwrap().drop_behind(1).rows(1).unwrap();
    assert_eq!(all(&memory), [[1]], "in memory both are nothing");
}

/// Else its first touch would be a bus error.
#[test]
fn a_file_that_was_cut_is_not_mapped() {
    let file = counting(12);
    let tokens = Tokens::<u16>::open(&file.path).unwrap();
    file.set_len(14);
    let says = "the file ends at byte 14; it had 24 when it was opened";
    assert!(data_error(tokens.clone().mapped()).contains(says));
    assert!(data_error(tokens.clone().mapped_within(1)).contains(says));
    file.set_len(25);
    assert_eq!(all(&tokens.mapped().unwrap().rows(12).unwrap()).len(), 1, "a longer one is mapped");
}

#[test]
fn a_range_is_read_as_rows_are_and_checked_as_they_are() {
    // More than one block of them.
    let count = 200_000_u32;
    let file = OneFile::of(&(0..count).flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    let tokens = Tokens::<u32>::open(&file.path).unwrap();
    let expected: Vec<i64> = (10..i64::from(count) - 3).collect();
    for tokens in [tokens.clone(), Tokens::of((0..count).collect()), tokens.clone().mapped().unwrap()] {
        let inner = tokens.range(3..u64::from(count)).unwrap();
        assert_eq!(inner.read(7..u64::from(count) - 6).unwrap(), expected);
        assert!(inner.read(5..5).unwrap().is_empty());
        assert!(is_config(inner.read(0..u64::from(count) - 2)) && is_config(inner.read(0..u64::MAX)));
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = inner.read(5..4);
        assert!(is_config(reversed));
    }
    let small = tokens.clone().vocabulary(190_000);
    assert_eq!(small.read(189_999..190_000).unwrap(), [189_999]);
    let text = data_error(small.read(1..190_002));
    let name = file.path.display();
    let problem = "the id 190000 at byte 760000 is not in the vocabulary of 190000";
    assert_eq!(text, format!("the data at byte 4 of {name}: {problem}"));
    file.set_len(400_000);
    let text = data_error(tokens.read(50_000..150_000));
    let problem = "the file ends at byte 400000; it had 800000 when it was opened";
    assert_eq!(text, format!("the data at byte 200000 of {name}: {problem}"));
}
