use memfit::Error;
use memfit::data::{Npy, Safetensors, Tokens};
use memfit::tch::{Kind, Tensor};

use crate::arrays::npy;
use crate::safetensors::file_of;
use crate::{OneFile, data_error, is_config};

fn numbers(count: i64) -> OneFile {
    let data: Vec<u8> = (0..count).flat_map(|number| (number as f32).to_le_bytes()).collect();
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, 4), }}", count / 4);
    OneFile::of(&npy(1, &header, &data))
}

/// Whether the process has a mapping of a file.
#[cfg(target_os = "linux")]
fn is_mapped(file: &OneFile) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    // Links on the way to it are none in there.
    maps.contains(file.path.canonicalize().unwrap().to_str().unwrap())
}

#[test]
fn a_view_has_the_file_s_numbers_at_any_row() {
    let file = numbers(40_000);
    let rows = Npy::open(&file.path).unwrap();
    let all = Tensor::arange(40_000, (Kind::Float, memfit::tch::Device::Cpu)).view([10_000, 4]);
    assert_eq!(rows.view(0..10_000).unwrap(), all);
    assert_eq!(rows.view(4_567..9_000).unwrap(), all.narrow(0, 4_567, 9_000 - 4_567));
    assert_eq!(rows.view(7..7).unwrap().size(), [0, 4]);
    assert!(is_config(rows.view(9_999..10_001)));
}

#[test]
fn a_write_into_a_view_reaches_neither_the_file_nor_another_view() {
    let file = numbers(400);
    let before = std::fs::read(&file.path).unwrap();
    let rows = Npy::open(&file.path).unwrap();
    let (mut written, other) = (rows.view(0..100).unwrap(), rows.view(0..100).unwrap());
    let _ = written.fill_(-1.0);
    assert_eq!(written.sum(Kind::Float).double_value(&[]), -400.0);
    assert_eq!(other.double_value(&[1, 0]), 4.0);
    drop(written);
    assert_eq!(std::fs::read(&file.path).unwrap(), before);
}

#[cfg(target_os = "linux")]
#[test]
fn a_mapping_ends_with_its_last_view_and_with_the_graph_that_saved_it() {
    let file = numbers(400);
    let whole = Npy::open(&file.path).unwrap().view(0..100).unwrap();
    let part = whole.narrow(0, 50, 2);
    drop(whole);
    assert!(is_mapped(&file), "a part holds it");
    assert_eq!(part.double_value(&[0, 0]), 200.0);
    let weight = Tensor::ones([4, 1], (Kind::Float, memfit::tch::Device::Cpu)).set_requires_grad(true);
    let loss = part.matmul(&weight).sum(Kind::Float);
    drop(part);
    assert!(is_mapped(&file), "the graph holds it");
    loss.backward();
    // 200 + 204, and so on.
    assert_eq!(Vec::<f32>::try_from(weight.grad().view(-1)).unwrap(), [404.0, 406.0, 408.0, 410.0]);
    drop(loss);
    assert!(!is_mapped(&file));
}

#[test]
fn a_view_where_numbers_cannot_lie_in_memory_is_refused_and_its_rows_are_read() {
    let header = r#"{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}"#;
    assert_eq!((8 + header.len()) % 4, 2, "neither is at a multiple of four");
    let file = file_of(header, &[[9].as_slice(), &2.5_f32.to_le_bytes()].concat());
    let open = Safetensors::open(&file.path).unwrap();
    let x = open.tensor("x").unwrap();
    assert!(data_error(x.view(0..1)).contains("no place for Float in memory; read it row by row"));
    assert_eq!(crate::get(&x, 0).unwrap().bytes(), 2.5_f32.to_le_bytes());
    assert_eq!(open.tensor("b").unwrap().view(0..1).unwrap(), Tensor::from_slice(&[9_u8]));
}

#[test]
fn bytes_of_a_text_are_a_tensor_without_a_copy() {
    let file = OneFile::of(b"to be or not");
    let tokens = Tokens::<u8>::open(&file.path).unwrap();
    assert_eq!(tokens.view(3..5).unwrap(), Tensor::from_slice(b"be"));
    assert_eq!(tokens.range(3..12).unwrap().view(3..5).unwrap(), Tensor::from_slice(b"or"));
    assert!(is_config(tokens.range(3..12).unwrap().view(3..10)));
    file.set_len(4);
    assert!(data_error(tokens.view(3..5)).contains("the file ends at byte 4; it had 12"));
    assert!(matches!(Tokens::of(vec![1_u8]).view(0..1), Err(Error::Unsupported { .. })));
}
