//! Rows of CSV.

use super::*;

fn rows(csv: Csv) -> LoaderBuilder<StreamJob<Row>, Vec<f32>> {
    Loader::stream(csv).map(numbers(..))
}

fn all(loader: LoaderBuilder<StreamJob<Row>, Vec<f32>>) -> (Vec<f64>, Vec<String>) {
    let (mut values, mut errors) = (Vec::new(), Vec::new());
    for loaded in loader.build().unwrap() {
        match loaded {
            Ok(loaded) => values.extend(support::values(&loaded.batch)),
            Err(error) => errors.push(error.to_string()),
        }
    }
    (values, errors)
}

#[test]
fn rows_are_quoted_named_and_of_one_width() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let text = "a,\"b,\n\"\"b\"\"\",c\n1,2,3\n\n4,5\n6,7,8,9\n\"10\", 11 ,1.2e1\n13,x,15\n";
    let path = write(&folder, "a.csv", text.as_bytes());
    let file = path.display();
    let (values, errors) = all(rows(Csv::of_file(&path)).batch(10).workers(2));
    assert_eq!(values, [1.0, 2.0, 3.0, 10.0, 11.0, 12.0]);
    // The header of 15 bytes, a row of 6, and an empty line.
    let wanted = [
        format!("record 1 at byte 22 of {file}: 2 fields where 3 are expected"),
        format!("record 2 at byte 26 of {file}: 4 fields where 3 are expected"),
        format!("record 4 at byte 50 of {file}: field 1 (b,\n\"b\"): `x` is no f32"),
    ];
    assert_eq!(errors, wanted);
    let (values, errors) = all(Loader::stream(Csv::of_file(&path).flexible()).map(numbers(["c"])).batch(9));
    assert_eq!((values, errors.len()), (vec![3.0, 8.0, 12.0, 15.0], 1));
    assert!(errors[0].ends_with("no field 2 (c): the row has 2"), "{}", errors[0]);
    let (_, errors) = all(Loader::stream(Csv::of_file(&path)).map(numbers(["d"])));
    assert!(errors[0].ends_with("no field is named `d`"), "{}", errors[0]);
    let plain = || Csv::of_reader(&b"1\t2\r\n3\t4\r\n"[..]).no_header().delimiter(b'\t');
    assert_eq!(all(rows(plain())).0, [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(all(Loader::stream(plain()).map(numbers([1, 0])).batch(2)).0, [2.0, 1.0, 4.0, 3.0]);
    let (_, errors) = all(Loader::stream(plain()).map(numbers(1..3)));
    assert_eq!(errors.len(), 2);
    assert!(errors[0].ends_with("no field 2: the row has 2"), "{}", errors[0]);
    for empty in [&b""[..], b"a,b\n", b"\n\n"] {
        assert_eq!(all(rows(Csv::of_reader(empty))), (vec![], vec![]));
    }
    let both = Fields::from(["a"]);
    let pairs = Csv::of_reader(&b"a,b\n1,2\n"[..]);
    let pairs =
        Loader::stream(pairs).map(move |row, _| Ok((both.of::<f32>(&row)?, row.text(1)?.len() as i64)));
    let (x, y) = pairs.build().unwrap().next().unwrap().unwrap().batch;
    assert_eq!((support::values(&x), support::values(&y)), (vec![1.0], vec![1.0]));
}

#[test]
#[cfg(target_os = "linux")]
fn a_quote_that_is_not_closed_ends_the_stream_and_takes_no_memory() {
    let _guard = support::serial();
    let _pages = SmallPages::hold();
    let folder = tempfile::tempdir().unwrap();
    let text = format!("a\n1\n2\n\"{}", "3\n".repeat(16 << 20));
    let path = write(&folder, "open.csv", text.as_bytes());
    drop(text);
    let before = anonymous();
    let mut loader = rows(Csv::of_file(&path).max_row(1 << 20)).batch(2).pass_over(9).build().unwrap();
    assert_eq!(support::values(&loader.next().unwrap().unwrap().batch), [1.0, 2.0]);
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(anonymous().saturating_sub(before) < 8 << 20);
    assert!(loader.next().is_none());
    let begin = format!("reading {}: record 2 at byte 6: a row of more than 1048576 bytes", path.display());
    assert!(error.starts_with(&begin), "{error}");
    let exact = format!("a\n{}\n5\n", "0".repeat(99));
    assert_eq!(all(rows(Csv::of_reader(Cursor::new(exact.clone())).max_row(100))).0, [0.0, 5.0]);
    let (values, errors) = all(rows(Csv::of_reader(Cursor::new(exact)).max_row(99)));
    assert_eq!((values.len(), errors.len()), (0, 1));
}

/// Files of 200 rows, some over several lines, with a header each and ends of all kinds.
fn row_files(folder: &TempDir) -> [PathBuf; 4] {
    let content = |from: u32, to: u32, end: &str| -> Vec<u8> {
        let rows = (from..to).map(|id| format!("{id},\"{}\"{end}", "x\n".repeat((id % 9) as usize)));
        (format!("id,text{end}") + &rows.collect::<String>()).into_bytes()
    };
    let mut last = content(180, 200, "\n\n");
    last.truncate(last.len() - 2);
    [
        write(folder, "a", &content(0, 80, "\r\n")),
        write(folder, "b", &gzip(&content(80, 170, "\n"))),
        write(folder, "c", &zstd(&content(170, 180, "\r"))),
        write(folder, "d", &last),
    ]
}

#[test]
fn rows_resume_with_exactly_those_that_remain() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let files = row_files(&folder);
    resumes_everywhere(&|batch, workers| {
        let rows = Loader::stream(Csv::of_files(&files)).map(|row, _| row_id(&row));
        rows.batch(batch).workers(workers)
    });
    resumes_everywhere(&|batch, workers| {
        let rows = Loader::stream(Csv::of_files(&files).shuffle_files(3));
        rows.shuffle(5).shuffle_buffer(12).map(|row, _| row_id(&row)).batch(batch).workers(workers)
    });
    // Without a header the first rows are records, too.
    let build = || {
        let rows = Loader::stream(Csv::of_files(&files).no_header()).map(|row, _| row_id(&row));
        rows.batch(7).build().unwrap()
    };
    let mut whole = build();
    let ids = epoch(&mut whole);
    assert_eq!(ids.len(), 204);
    for batches in 0..ids.len() / 7 {
        let mut first = build();
        let mut position = first.data_position();
        for loaded in first.by_ref().take(batches) {
            position = loaded.unwrap().position;
        }
        let mut resumed = build();
        resumed.seek(position).unwrap();
        assert_eq!(epoch(&mut resumed), &ids[batches * 7..]);
    }
}

#[test]
fn a_position_in_the_middle_of_a_row_is_refused() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let begin = |text: &[u8], offset: u64| {
        let path = write(&folder, "a.csv", text);
        let mut csv = Csv::of_file(path);
        csv.begin(0, Some(Mark { file: 0, offset, record: 1 })).map(|()| csv)
    };
    let text = b"a,b\n11,2\r\n33,4";
    for offset in [1, 3, 5, 8, 12, 13] {
        let error = begin(text, offset).unwrap_err().to_string();
        assert!(error.contains(&format!("no row begins at byte {offset}: ")), "{error}");
        let error = begin(&gzip(text), offset).unwrap_err().to_string();
        assert!(error.contains(&format!("no row begins at byte {offset}: ")), "{error}");
    }
    for (offset, rows) in [(4, 2), (9, 1), (10, 1), (14, 0)] {
        let mut csv = begin(text, offset).unwrap();
        assert_eq!(std::iter::from_fn(|| csv.next()).map(Result::unwrap).count(), rows, "{offset}");
    }
    for offset in [15, 16, 1000] {
        assert!(matches!(begin(text, offset), Err(Error::Io { .. })));
    }
}

type Fieldss = Vec<Vec<Vec<u8>>>;

/// The csv crate's own reading.
fn by_csv(content: &[u8]) -> Fieldss {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(content);
    reader.byte_records().map(|row| row.unwrap().iter().map(<[u8]>::to_vec).collect()).collect()
}

/// What comes from a mark on, the marks before each row, and whether an error ended it.
fn by_stream(csv: &mut Csv, from: Option<Mark>) -> (Fieldss, Vec<Mark>, bool) {
    let (mut rows, mut marks) = (Vec::new(), Vec::new());
    csv.begin(0, from).unwrap();
    loop {
        marks.push(csv.mark().unwrap());
        match csv.next() {
            None => return (rows, marks, false),
            Some(Err(_)) => return (rows, marks, true),
            Some(Ok((row, _))) => {
                rows.push((0..row.len()).map(|field| row.get(field).unwrap().to_vec()).collect());
            }
        }
    }
}

proptest! {
    #![proptest_config(support::random::cases(512))]

    /// Whatever the bytes, in reads of any size, from the start and from each mark.
    #[test]
    fn any_bytes_are_the_rows_that_the_csv_crate_finds(
        content in prop::collection::vec(
            prop::sample::select(vec!["\n", "\r", "\r\n", "\"", ",", "a", "\u{feff}"]),
            0..60,
        ),
        step in 1_usize..20,
    ) {
        let _guard = support::serial();
        let content: Arc<[u8]> = content.concat().into_bytes().into();
        let mut wanted = by_csv(&content);
        // Only in an open quote is a further newline of any weight.
        let open = wanted != by_csv(&[&content, &b"\n"[..]].concat());
        if open {
            wanted.pop();
        }
        let again = content.clone();
        let mut csv = Csv::with(move || Ok(Box::new(Steps(Cursor::new(again.clone()), step))));
        csv = csv.no_header().flexible();
        let (rows, marks, failed) = by_stream(&mut csv, None);
        prop_assert_eq!((&rows, failed), (&wanted, open));
        for (at, mark) in marks.into_iter().enumerate().take(wanted.len() + 1) {
            let (rest, _, failed) = by_stream(&mut csv, Some(mark));
            prop_assert_eq!((&rest[..], failed), (&wanted[at..], open), "from {:?}", mark);
        }
    }
}

#[test]
fn a_quote_that_is_open_at_the_end_ends_the_stream_by_an_error() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    for (text, values, row) in [
        ("a\n1\n\"2\n3\n4", vec![1.0], Some("record 1 at byte 4: ")),
        ("a\n1\n\n\n\"2\"\"\n", vec![1.0], Some("record 1 at byte 6: ")),
        ("\"a\n1\n", vec![], Some("record 0 at byte 0: ")),
        ("a\n1\n\"2\"", vec![1.0, 2.0], None),
        ("a\n1\n\"2\"\r", vec![1.0, 2.0], None),
    ] {
        let path = write(&folder, "open.csv", text.as_bytes());
        let (found, errors) = all(rows(Csv::of_file(&path)).pass_over(9));
        assert_eq!((found, errors.len()), (values, usize::from(row.is_some())), "{text:?}: {errors:?}");
        if let Some(row) = row {
            assert!(
                errors[0].contains(row) && errors[0].ends_with("a quote that is not closed"),
                "{}",
                errors[0]
            );
        }
    }
}

#[test]
fn empty_lines_do_not_count_towards_a_row() {
    let _guard = support::serial();
    let text = format!("a\n1\n{}2\nx\n", "\r\n".repeat(200_000));
    let (values, errors) = all(rows(Csv::of_reader(Cursor::new(text)).max_row(100)));
    assert_eq!(values, [1.0, 2.0]);
    assert!(errors[0].starts_with("record 2 at byte 400006: "), "{}", errors[0]);
}

/// A row of 20 MiB, and one of as many fields as take as much.
#[test]
#[cfg(target_os = "linux")]
fn the_room_of_a_long_row_is_given_back() {
    let _guard = support::serial();
    if !is_alone("tables::the_room_of_a_long_row_is_given_back") {
        return;
    }
    let _pages = SmallPages::hold();
    keep_nothing_for_later();
    for long in ["x".repeat(20 << 20), ",".repeat(4 << 20)] {
        let text = format!("a\n{long}\n{}", "1\n".repeat(100));
        let mut csv = Csv::of_reader(Cursor::new(text)).flexible().max_row(32 << 20);
        csv.begin(0, None).unwrap();
        let before = anonymous();
        for _ in 0..50 {
            drop(csv.next().unwrap().unwrap());
        }
        // They took 32 and 80 MiB.
        let more = anonymous().saturating_sub(before);
        assert!(more < 2 << 20, "{more} bytes");
    }
}

#[test]
fn a_range_without_fields_is_an_error() {
    let _guard = support::serial();
    let errors =
        |fields: Fields| all(Loader::stream(Csv::of_reader(&b"a,b,c\n1,2,3\n"[..])).map(numbers(fields))).1;
    assert_eq!(errors((5..).into()), ["record 0 at byte 6: no field 5: the row has 3"]);
    assert_eq!(errors((3..).into()), ["record 0 at byte 6: no field 3: the row has 3"]);
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 4..2;
    assert_eq!(errors(backwards.into()), ["record 0 at byte 6: no field is in the range 4..2"]);
    assert_eq!(errors((1..1).into()), ["record 0 at byte 6: no field is in the range 1..1"]);
}
