//! Which sources a position is of.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memfit::data::{
    Concat, DataPosition, Files, InMemory, Loader, Npy, Safetensors, Slice, Source, Tokens, Zip,
};
use memfit::optim::{Sgd, SgdConfig};
use memfit::snapshot::Extras;
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Error, Loss, Snapshots, Stack};

/// Whether a position in the first source is one in the second.
fn is_of<A: Source, B: Source>(first: A, second: B) -> bool {
    assert!(first.len() > 1 && first.len() == second.len(), "of the same number of records");
    let mut from = Loader::new(first).map(|_, _| Ok(0_i64)).shuffle(3).build().unwrap();
    let mut to = Loader::new(second).map(|_, _| Ok(0_i64)).shuffle(3).build().unwrap();
    let position = from.next().unwrap().unwrap().position;
    match to.seek(position) {
        Ok(()) => {
            assert_eq!(to.data_position(), position);
            true
        }
        Err(Error::State { problems }) => {
            assert!(problems[0].contains("of another order"), "{problems:?}");
            to.seek(DataPosition::at_epoch(2)).unwrap();
            assert_eq!((to.next().unwrap().unwrap().position.epoch, to.data_position().samples), (2, 1));
            false
        }
        Err(other) => panic!("{other:?}"),
    }
}

/// Files of these names, each with its name as content.
fn write(folder: &Path, names: &[&str]) -> Vec<PathBuf> {
    let paths = names.iter().map(|name| folder.join(name));
    paths
        .inspect(|path| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, path.file_name().unwrap().as_encoded_bytes()).unwrap();
        })
        .collect()
}

fn numbers() -> InMemory<i64> {
    InMemory::of((0..10).collect())
}

#[test]
fn a_folder_in_which_one_file_went_and_one_came_is_another() {
    let (folder, moved) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for folder in [&folder, &moved] {
        write(folder.path(), &["a", "b", "c"]);
    }
    let files = |folder: &tempfile::TempDir| Files::in_folder(folder.path(), &[]).unwrap();
    let before = files(&folder);
    assert!(is_of(before.clone(), files(&folder)));
    assert!(is_of(before.clone(), files(&moved)), "the folder may be another");
    fs::remove_file(folder.path().join("b")).unwrap();
    write(folder.path(), &["d"]);
    assert!(!is_of(before, files(&folder)));
}

#[test]
fn named_files_are_told_apart_below_the_folder_of_all_and_by_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let [train, moved, other] = [["x/1", "y/1"], ["there/x/1", "there/y/1"], ["x/1", "z/1"]]
        .map(|names| write(folder.path(), &names));
    assert!(is_of(Files::of(&train), Files::of(&moved)));
    assert!(!is_of(Files::of(&train), Files::of(&other)));
    assert!(!is_of(Files::of(&train), Files::of(train.iter().rev())));
}

#[test]
fn tokens_are_told_apart_by_file_width_header_and_range_and_rows_by_length_and_stride() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
    for path in [&one, &other] {
        fs::write(path, [1; 64]).unwrap();
    }
    let open = |path: &Path| Tokens::<u8>::open(path).unwrap();
    let rows = |range| open(&one).range(range).unwrap().rows(4).unwrap();
    assert!(is_of(rows(0..16), open(&one).mapped().unwrap().range(0..17).unwrap().rows(4).unwrap()));
    assert!(!is_of(rows(0..16), open(&other).range(0..16).unwrap().rows(4).unwrap()));
    assert!(!is_of(rows(0..16), rows(16..32)), "training and validation");
    let behind = Tokens::<u8>::open_with_header(&one, 8).unwrap().range(0..16).unwrap();
    assert!(!is_of(rows(0..16), behind.rows(4).unwrap()));
    let wide = Tokens::<u16>::open(&one).unwrap().range(0..16).unwrap();
    assert!(!is_of(rows(0..16), wide.rows(4).unwrap()));
    assert!(!is_of(rows(0..16), open(&one).range(0..20).unwrap().rows(5).unwrap()));
    assert!(!is_of(rows(0..16), rows(0..13).stride(3).unwrap()));
    let next = |context, stride| {
        let tokens = open(&one).range(0..context + 1 + stride).unwrap();
        tokens.next_token(context).unwrap().stride(stride).unwrap()
    };
    assert!(is_of(next(4, 4), next(4, 4)));
    assert!(!is_of(next(4, 4), next(5, 4)) && !is_of(next(4, 4), next(4, 3)));
    let memory = |range| Tokens::of(vec![0_u8; 64]).range(range).unwrap().rows(4).unwrap();
    assert!(is_of(memory(0..16), memory(0..16)) && !is_of(memory(0..16), memory(16..32)));
}

#[test]
fn arrays_are_told_apart_by_file_and_by_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = Tensor::from_slice(&[1_i64, 2, 3]);
    let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
    for path in [&one, &other] {
        tensor.write_npy(path.with_extension("npy")).unwrap();
        Tensor::write_safetensors(&[("x", &tensor), ("y", &tensor)], path).unwrap();
    }
    let npy = |path: &Path| Npy::open(path.with_extension("npy")).unwrap();
    assert!(is_of(npy(&one), npy(&one).mapped().unwrap()) && !is_of(npy(&one), npy(&other)));
    let rows = |path, name| Safetensors::open(path).unwrap().tensor(name).unwrap();
    assert!(is_of(rows(&one, "x"), rows(&one, "x")));
    assert!(!is_of(rows(&one, "x"), rows(&one, "y")) && !is_of(rows(&one, "x"), rows(&other, "x")));
}

#[test]
fn a_slice_is_told_apart_by_its_range_or_list_and_by_its_source() {
    let range = |range| Slice::range(numbers(), range).unwrap();
    assert!(is_of(range(0..5), range(0..5)) && !is_of(range(0..5), range(5..10)));
    let list = |list: &[u64]| Slice::list(numbers(), list.to_vec()).unwrap();
    let drawn = list(&[3, 1, 7]);
    assert!(is_of(drawn.clone(), list(&[3, 1, 7])));
    for again in [[3, 1, 8], [2, 1, 7], [1, 3, 7]] {
        assert!(!is_of(drawn.clone(), list(&again)), "{again:?}");
    }
    let inner = |start: u64| Slice::range(Slice::range(numbers(), start..start + 5).unwrap(), 1..3).unwrap();
    assert!(!is_of(inner(0), inner(2)));
}

#[test]
fn compositions_are_told_apart_by_their_parts() {
    let part = |start: u64, len: u64| Slice::range(numbers(), start..start + len).unwrap();
    let shards = |parts: &[(u64, u64)]| {
        Concat::of(parts.iter().map(|(start, len)| part(*start, *len)).collect()).unwrap()
    };
    assert!(is_of(shards(&[(0, 2), (5, 3)]), shards(&[(0, 2), (5, 3)])));
    for other in [[(5, 3), (0, 2)], [(0, 2), (6, 3)], [(0, 3), (5, 2)]] {
        assert!(!is_of(shards(&[(0, 2), (5, 3)]), shards(&other)), "{other:?}");
    }
    let pair = |one, other| Zip::of(part(one, 3), part(other, 3)).unwrap();
    assert!(is_of(pair(0, 1), pair(0, 1)));
    for (one, other) in [(0, 2), (1, 1), (1, 0)] {
        assert!(!is_of(pair(0, 1), pair(one, other)), "{one} {other}");
    }
    let boxed = |start| -> Box<dyn Source<Sample = i64>> { Box::new(Arc::new(part(start, 3))) };
    assert!(is_of(part(4, 3), boxed(4)) && !is_of(boxed(4), boxed(5)));
    assert_eq!((numbers().order(), boxed(4).order()), (0, part(4, 3).order()));
}

/// A model that learns nothing, so that a step only consumes.
fn stack() -> (Tensor, Stack, nn::VarStore) {
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[1]);
    let stack = Stack::of(&vs, Sgd::new(&vs, SgdConfig::default().lr(0.0)).unwrap()).build().unwrap();
    (w, stack, vs)
}

fn split(training: &[u64]) -> Loader<Tensor> {
    let source = Slice::list(numbers(), training.to_vec()).unwrap();
    Loader::new(source).batch(2).shuffle(3).build().unwrap()
}

#[test]
fn a_run_that_resumes_refuses_a_split_that_was_drawn_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut snapshots = Snapshots::in_folder(folder.path()).unwrap();
    let (w, mut training, _vs) = stack();
    let mut loader = split(&[0, 2, 4, 6, 8, 9]);
    let mut seen = Vec::new();
    for micro in training.try_windows(&mut loader).take(2) {
        let outcome = training.step(micro.unwrap(), |batch| {
            seen.extend(Vec::<i64>::try_from(&batch.batch)?);
            Ok(Loss::mean((&w * &batch.batch).sum(Kind::Float), batch.batch.size()[0]))
        });
        assert!(outcome.unwrap().stepped());
    }
    snapshots.save(&mut training, &Extras::new()).unwrap();

    let (_, mut training, _vs) = stack();
    let back = snapshots.latest().unwrap().unwrap().resume(&mut training).unwrap();
    let position = back.data.unwrap();
    assert_eq!((training.data_position(), position.samples), (Some(position), 4));
    let mut again = split(&[0, 2, 4, 6, 8, 7]);
    assert!(matches!(again.seek(position), Err(Error::State { .. })));
    let mut same = split(&[0, 2, 4, 6, 8, 9]);
    same.seek(position).unwrap();
    seen.extend(same.next().map(|batch| Vec::<i64>::try_from(&batch.unwrap().batch).unwrap()).unwrap());
    seen.sort_unstable();
    assert_eq!(seen, [0, 2, 4, 6, 8, 9], "each once");
}
