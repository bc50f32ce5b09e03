use memfit::Result;
use memfit::data::{Array, Safetensors, Source};
use memfit::tch::{Kind, Tensor};

use crate::{OneFile, all, data_error, get, is_io};

/// A file by the format's rules: a length, JSON, bytes.
pub fn file_of(header: &str, data: &[u8]) -> OneFile {
    OneFile::of(&[&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat())
}

fn open(header: &str, data: &[u8]) -> Result<Safetensors> {
    Safetensors::open(&file_of(header, data).path)
}

const TWO: &str = r#"{"x":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},
"y":{"dtype":"U8","shape":[2],"data_offsets":[16,18]}}"#;

fn eighteen() -> Vec<u8> {
    [[1.0_f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat(), vec![7, 8]].concat()
}

#[test]
fn rows_of_tensors_are_found_by_name() {
    let file = file_of(TWO, &eighteen());
    let open = Safetensors::open(&file.path).unwrap();
    assert_eq!(open.names(), ["x", "y"]);
    let (x, y) = (open.tensor("x").unwrap(), open.tensor("y").unwrap());
    let expected = [[1.0_f32, 2.0], [3.0, 4.0]].map(|row| Array::from_vec(vec![2], row).unwrap());
    assert_eq!(all(&x), expected);
    assert_eq!(all(&y), [7_u8, 8].map(|label| Array::from_vec(vec![], [label]).unwrap()));
    assert_eq!(y.origin(1).offset, Some(8 + TWO.len() as u64 + 17));
}

#[test]
fn what_tch_writes_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.safetensors");
    let t = Tensor::arange(24, (Kind::BFloat16, memfit::tch::Device::Cpu)).view([4, 2, 3]);
    Tensor::write_safetensors(&[("t", &t)], &path).unwrap();
    let rows = Safetensors::open(&path).unwrap().tensor("t").unwrap();
    assert_eq!((rows.len(), rows.kind(), rows.shape()), (4, Kind::BFloat16, &[2, 3][..]));
    let third = (12..18).flat_map(|number| half::bf16::from_f32(number as f32).to_le_bytes()).collect();
    assert_eq!(get(&rows, 2).unwrap(), Array::from_bytes(Kind::BFloat16, vec![2, 3], third).unwrap());
    assert_eq!(rows.view(1..3).unwrap(), t.narrow(0, 1, 2));
}

#[test]
fn files_that_do_not_follow_the_format_are_refused_one_by_one() {
    let data = eighteen();
    for (from, to, says) in [
        ("[16,18]", "[16,19]", "cannot be read"),
        ("[16,18]", "[17,19]", "cannot be read"),
        ("[16,18]", "[18,16]", "cannot be read"),
        ("[0,16]", "[0,18446744073709551615]", "cannot be read"),
        ("[2,2]", "[2,3]", "cannot be read"),
        ("[2,2]", "[-2,2]", "cannot be read"),
        ("[2,2]", "[4294967296,4294967296]", "cannot be read"),
        ("\"F32\"", "\"F33\"", "cannot be read"),
        ("}}", "}", "cannot be read"),
        ("}}", "}} more", "cannot be read"),
        ("\"y\"", "\"x\"", "cannot be read"),
    ] {
        let text = data_error(open(&TWO.replacen(from, to, 1), &data));
        assert!(text.contains(says), "{from} as {to}: {text}");
    }
    let text = data_error(open(TWO, &data[..17]));
    let bytes = 8 + TWO.len();
    assert!(text.contains(&format!("has {} bytes, where its header speaks of {}", bytes + 17, bytes + 18)));
    assert!(data_error(open(TWO, &[&data[..], &[0]].concat())).contains("where its header speaks of"));
    assert!(data_error(Safetensors::open(&OneFile::of(&[1; 7]).path)).contains("too short"));
    for size in [u64::MAX, 1 << 40, 3] {
        let bytes = [&size.to_le_bytes()[..], b"{}"].concat();
        let text = data_error(Safetensors::open(&OneFile::of(&bytes).path));
        assert!(text.contains(&format!("said to have {size} bytes")), "{text}");
    }
    assert!(is_io(Safetensors::open(OneFile::of(&[]).folder())));
}

#[test]
fn tensors_that_are_no_rows_are_refused() {
    let open_two = open(TWO, &eighteen()).unwrap();
    let text = data_error(open_two.tensor("z"));
    assert!(text.contains("no tensor `z`; it has x, y"), "{text}");
    let header = r#"{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"u":{"dtype":"U16","shape":[2],"data_offsets":[4,8]}}"#;
    let other = open(header, &[0; 8]).unwrap();
    assert!(data_error(other.tensor("s")).contains("without dimensions"));
    assert!(data_error(other.tensor("u")).contains("has the dtype U16"));
}

/// Case 62.
#[test]
fn a_tensor_that_is_cut_underneath_is_an_error_of_its_records() {
    let file = file_of(TWO, &eighteen());
    let open = Safetensors::open(&file.path).unwrap();
    let (x, y) = (open.tensor("x").unwrap(), open.tensor("y").unwrap());
    let (now, then) = (8 + TWO.len() + 8, 8 + TWO.len() + 18);
    file.set_len(now as u64);
    assert!(get(&x, 0).is_ok());
    let says = format!("the file ends at byte {now}; it had {then} when it was opened");
    assert!(data_error(get(&x, 1)).contains(&says));
    assert!(data_error(get(&y, 0)).contains(&says));
}
