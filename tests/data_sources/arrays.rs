use memfit::Result;
use memfit::data::{Array, ArrayFile, Loader, Npy, Source, Zip};
use memfit::tch::{Kind, Tensor};

use crate::{OneFile, all, data_error, get, is_config, is_io};

/// A header as numpy lays it out: padded so that the data begin at byte 128.
pub fn npy(version: u8, dictionary: &str, data: &[u8]) -> Vec<u8> {
    let mut file = b"\x93NUMPY".to_vec();
    file.extend([version, 0]);
    let text = 128 - if version == 1 { 10 } else { 12 };
    match version {
        1 => file.extend(u16::to_le_bytes(text)),
        _ => file.extend(u32::to_le_bytes(text.into())),
    }
    file.extend(format!("{dictionary:<width$}\n", width = usize::from(text) - 1).bytes());
    assert_eq!(file.len(), 128);
    file.extend(data);
    file
}

pub fn open(bytes: &[u8]) -> Result<ArrayFile> {
    Npy::open(&OneFile::of(bytes).path)
}

fn dictionary(descr: &str, shape: &str) -> String {
    format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}")
}

/// What numpy 2.4 wrote for `np.save(path, np.array([[1.5, -2], [0.25, 3e38], [5, 6]], np.float32))`.
const FLOATS: &[u8] = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }\
    \x20                                                         \n\
    \x00\x00\xc0\x3f\x00\x00\x00\xc0\x00\x00\x80\x3e\xe6\xb1\x61\x7f\x00\x00\xa0\x40\x00\x00\xc0\x40";

#[test]
fn rows_are_those_that_numpy_wrote() {
    let rows = open(FLOATS).unwrap();
    assert_eq!((rows.len(), rows.kind(), rows.shape()), (3, Kind::Float, &[2][..]));
    let expected = [[1.5_f32, -2.0], [0.25, 3e38], [5.0, 6.0]];
    let expected = expected.map(|row| Array::from_vec(vec![2], row).unwrap());
    assert_eq!(all(&rows), expected);
    assert_eq!(rows.origin(2).offset, Some(128 + 16));
}

/// The bytes are numpy's own of the values beside them.
#[test]
fn every_version_and_dtype_is_read() {
    let first = |version, descr: &str, shape: &str, data: &[u8]| {
        get(&open(&npy(version, &dictionary(descr, shape), data)).unwrap(), 0).unwrap()
    };
    let halves = [half::f16::from_f32(1.0), half::f16::from_f32(-0.5)];
    let longs = b"\x07\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0";
    let doubles = b"\x9a\x99\x99\x99\x99\x99\xb9\x3f";
    let ints = b"\0\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0\x05\0\0\0";
    let is = |shape: Vec<i64>, found: Array, wanted: Result<Array>| {
        assert_eq!(found, wanted.unwrap());
        assert_eq!(found.shape(), shape);
    };
    is(vec![2], first(2, "<i2", "(1, 2)", b"\x01\0\xfe\xff"), Array::from_vec(vec![2], [1_i16, -2]));
    is(vec![2], first(3, "<i8", "(1, 2)", longs), Array::from_vec(vec![2], [7_i64, 8]));
    is(vec![2], first(1, "|b1", "(1, 2)", b"\x01\0"), Array::from_vec(vec![2], [true, false]));
    is(vec![2], first(1, "<f2", "(1, 2)", b"\0\x3c\0\xb8"), Array::from_vec(vec![2], halves));
    is(vec![2], first(1, "|i1", "(1, 2)", b"\xff\x02"), Array::from_vec(vec![2], [-1_i8, 2]));
    is(vec![2], first(1, "|u1", "(1, 2)", b"\xff\x02"), Array::from_vec(vec![2], [255_u8, 2]));
    is(vec![], first(1, "<f8", "(1,)", doubles), Array::from_vec(vec![], [0.1_f64]));
    is(vec![2, 3], first(1, "<i4", "(1, 2, 3)", ints), Array::from_vec(vec![2, 3], [0_i32, 1, 2, 3, 4, 5]));
}

#[test]
fn arrays_that_end_too_early_or_too_late_are_refused() {
    let text = data_error(open(&FLOATS[..FLOATS.len() - 1]));
    assert!(text.contains("its array has 24 bytes, of which 23 are there"), "{text}");
    let text = data_error(open(&[FLOATS, &[0]].concat()));
    assert!(text.contains("1 bytes follow its array"), "{text}");
    assert!(data_error(open(&FLOATS[..100])).contains("its header is said to have 118 bytes"));
    for length in 0..12 {
        let text = data_error(open(&FLOATS[..length]));
        assert!(text.contains("does not begin as a .npy") || text.contains("header is said"), "{text}");
    }
}

#[test]
fn files_that_are_no_arrays_of_numbers_are_refused_one_by_one() {
    let header = |descr: &str, shape: &str| npy(1, &dictionary(descr, shape), &[]);
    for (bytes, says) in [
        (b"PK\x03\x04 and so on".to_vec(), "np.savez"),
        (b"\x93NUMPX\x01\x00v\x00 and so on".to_vec(), "does not begin as"),
        ([b"\x93NUMPY\x04\x00", &FLOATS[8..]].concat(), "version 4"),
        ([b"\x93NUMPY\x00\x00", &FLOATS[8..]].concat(), "version 0"),
        ([b"\x93NUMPY\x02\x00\xff\xff\xff\xff", &FLOATS[12..]].concat(), "said to have 4294967295 bytes"),
        ([b"\x93NUMPY\x01\x00\xff\xff", &FLOATS[10..]].concat(), "said to have 65535 bytes"),
        ([b"\x93NUMPY\x01\x00\x00\x00", &FLOATS[10..]].concat(), "cannot be read"),
        (header("<f4", "()"), "without dimensions"),
        (header("<f4", "(9223372036854775807, 2)"), "no array is"),
        (header("<f4", "(2, 9223372036854775807, 9)"), "no array is"),
        (header("<f4", "(9223372036854775807,)"), "no array is"),
        (header("<f4", "(1073741824,)"), "has 4294967296 bytes, of which 0"),
        (header("<u2", "(1,)"), "astype(np.int32)"),
        (header("|O", "(1,)"), "never run"),
        (header(">f4", "(1,)"), "big-endian"),
        (npy(1, &dictionary("<f4", "(1,)").replace("False", "True"), &[0; 4]), "ascontiguousarray"),
        (npy(1, &dictionary("<f4", "(1,)").replace("'<f4'", "[('x', '<f4')]"), &[0; 4]), "has fields"),
    ] {
        let text = data_error(open(&bytes));
        assert!(text.contains(says), "{says}: {text}");
    }
    assert!(is_io(Npy::open(OneFile::of(&[]).folder())));
}

#[test]
fn an_array_without_rows_has_no_records() {
    let rows = open(&npy(1, &dictionary("<f4", "(0, 3)"), &[])).unwrap();
    assert_eq!((rows.len(), rows.shape()), (0, &[3][..]));
    assert!(data_error(get(&rows, 0)).contains("there are 0 records"));
}

#[test]
fn a_bool_that_is_neither_true_nor_false_is_an_error_of_its_record() {
    let rows = open(&npy(1, &dictionary("|b1", "(2, 2)"), &[1, 0, 1, 2])).unwrap();
    assert_eq!(get(&rows, 0).unwrap(), Array::from_vec(vec![2], [true, false]).unwrap());
    assert!(data_error(get(&rows, 1)).contains("neither true nor false"));
}

/// Case 62.
#[test]
fn an_array_that_is_cut_underneath_is_an_error_of_its_records() {
    let file = OneFile::of(FLOATS);
    let rows = Npy::open(&file.path).unwrap();
    file.set_len(137);
    assert!(get(&rows, 0).is_ok());
    assert!(data_error(get(&rows, 1)).contains("the file ends at byte 137; it had 152 when it was opened"));
    assert!(data_error(rows.view(0..3)).contains("the file ends at byte 137"));
}

#[test]
fn two_arrays_are_batched_side_by_side() {
    let labels = npy(1, &dictionary("<i8", "(3,)"), &[7_i64, 8, 9].map(i64::to_le_bytes).concat());
    let labels = open(&labels).unwrap();
    let mut batches =
        Loader::new(Zip::of(open(FLOATS).unwrap(), labels.clone()).unwrap()).batch(2).build().unwrap();
    let (x, y) = batches.next().unwrap().unwrap().batch;
    assert_eq!(x, Tensor::from_slice2(&[[1.5_f32, -2.0], [0.25, 3e38]]));
    assert_eq!(y, Tensor::from_slice(&[7_i64, 8]));
    let two = open(&npy(1, &dictionary("<i8", "(2,)"), &[0; 16])).unwrap();
    assert!(is_config(Zip::of(labels, two)));
}

#[test]
fn a_mapping_of_an_array_reads_the_same() {
    let file = OneFile::of(FLOATS);
    let rows = Npy::open(&file.path).unwrap();
    for mapped in [rows.clone().mapped().unwrap(), rows.clone().mapped_within(1).unwrap().drop_behind(1)] {
        assert_eq!(all(&mapped), all(&rows));
    }
}
