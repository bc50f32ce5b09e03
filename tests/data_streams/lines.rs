//! Lines and what they are made of.

use super::*;

#[test]
fn line_ends_and_empty_lines_are_as_documented() {
    let _guard = support::serial();
    assert_eq!(raw(lines_of(b"a\nb\r\n\n\r\nc\rd\ne\r")), ok(&["a", "b", "", "", "c\rd", "e\r"]));
    assert_eq!(raw(lines_of(b"a\nb\r\n\n\r\nc").pass_over_empty()), ok(&["a", "b", "c"]));
    assert_eq!(raw(lines_of(b"\n\n\n")), ok(&["", "", ""]));
    assert_eq!(raw(lines_of(b"\n\n\n").pass_over_empty()), ok(&[]));
    assert_eq!(raw(lines_of(b"")), ok(&[]));
    assert_eq!(raw(Lines::of_files(Vec::<PathBuf>::new())), ok(&[]));
}

#[test]
fn text_says_where_it_is_none() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "a.txt", b"1\nab\xffc\n3\n");
    let mut loader = Loader::stream(Lines::of_file(path)).map(|line, _| id(&line)).batch(3).build().unwrap();
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("record 1 at byte 2 of ") && error.contains("no UTF-8 at byte 2"), "{error}");
    assert_eq!(read(&loader.next().unwrap().unwrap().batch), [1, 3]);
}

proptest! {
    #![proptest_config(support::random::cases(64))]

    /// Against `split`, through every kind of source, in reads of any size.
    #[test]
    fn any_bytes_are_the_lines_that_split_finds(
        content in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), any::<u8>()], 0..300),
        step in 1_usize..40,
    ) {
        let _guard = support::serial();
        let content = [b"-".to_vec(), content].concat();
        let mut wanted: Vec<Vec<u8>> = content.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
        let last = wanted.pop().unwrap();
        for line in &mut wanted {
            if line.ends_with(b"\r") {
                line.pop();
            }
        }
        if !last.is_empty() {
            wanted.push(last);
        }
        let wanted: Vec<_> = wanted.into_iter().map(Ok).collect();
        prop_assert_eq!(&raw(Lines::of_reader(Steps(Cursor::new(content.clone()), step))), &wanted);
        prop_assert_eq!(&raw(Lines::of_reader(Steps(Cursor::new(gzip(&content)), step))), &wanted);
        prop_assert_eq!(&raw(Lines::of_reader(Steps(Cursor::new(zstd(&content)), step))), &wanted);
    }
}

#[test]
fn a_line_that_is_too_long_is_one_bad_record_and_the_stream_goes_on() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let long = "y".repeat(300_000);
    let fits = "z".repeat(1000);
    let text = format!("1\n{fits}\n{fits}\r\n{fits}-\n{long}\n5\n{long}");
    let path = write(&folder, "long.txt", text.as_bytes());
    let found = raw(Lines::of_file(&path).max_line(1000));
    assert_eq!(found.len(), 7);
    assert_eq!(found[0], Ok(b"1".to_vec()));
    assert_eq!((&found[1], &found[2]), (&Ok(fits.clone().into_bytes()), &Ok(fits.into_bytes())));
    let at = |record: usize, offset: usize, len: usize| {
        let file = path.display();
        Err(format!("record {record} at byte {offset} of {file}: a line of {len} bytes; at most 1000"))
    };
    assert_eq!(found[3], at(3, 2005, 1001));
    assert_eq!(found[4], at(4, 3007, 300_000));
    assert_eq!(found[5], Ok(b"5".to_vec()));
    assert_eq!(found[6], at(6, 303_010, 300_000));
    let mut passing = loader(Lines::of_file(&path).max_line(10)).pass_over(10).batch(10).build().unwrap();
    assert_eq!(epoch(&mut passing), [1, 5]);
    assert_eq!(passing.passed_over(), 5);
}

#[test]
fn json_is_made_on_the_workers_and_its_errors_say_where() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let path =
        write(&folder, "a.jsonl", b"{\"x\": [1, 2], \"y\": 3}\n{\"x\": [1, }\n\n{\"x\": [4, 5], \"y\": 6}");
    #[derive(serde::Deserialize)]
    struct Point {
        x: Vec<f32>,
        y: i64,
    }
    let points =
        Loader::stream(Lines::of_file(&path)).map(json::<Point>()).map(|point, _| Ok((point.x, point.y)));
    let mut points = points.batch(4).workers(2).build().unwrap();
    let texts: Vec<_> = (0..2).map(|_| points.next().unwrap().unwrap_err().to_string()).collect();
    let file = path.display();
    let wanted = format!("record 1 at byte 22 of {file}: column 11: expected value");
    assert_eq!(texts[0], wanted);
    assert!(texts[1].starts_with(&format!("record 2 at byte 34 of {file}: column 0: EOF")), "{}", texts[1]);
    let (x, y) = points.next().unwrap().unwrap().batch;
    assert_eq!((support::values(&x), support::values(&y)), (vec![1.0, 2.0, 4.0, 5.0], vec![3.0, 6.0]));
    let values = Loader::stream(lines_of(b"{\"n\": 1}\n{\"n\": 2}\n")).map(json::<serde_json::Value>());
    let mut values = values.map(|value, _| Ok(value["n"].as_i64().unwrap_or(-1))).batch(2).build().unwrap();
    assert_eq!(epoch(&mut values), [1, 2]);
}
