use memfit::Error;
use memfit::data::{Files, Loader, Source};

use crate::{OneFile, data_error, get, is_io};

fn folder_of(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        std::fs::write(folder.path().join(name), name).unwrap();
    }
    folder
}

#[test]
fn a_folder_s_files_come_sorted_and_by_extension() {
    let folder = folder_of(&["c.png", "a.jpg", "b.JPG", "jpg", "notes.txt"]);
    std::fs::create_dir(folder.path().join("d.jpg")).unwrap();
    let names = |extensions: &[&str]| -> Vec<String> {
        let files = Files::in_folder(folder.path(), extensions).unwrap();
        (0..files.len()).map(|index| String::from_utf8(get(&files, index).unwrap().bytes).unwrap()).collect()
    };
    assert_eq!(names(&["jpg", "png"]), ["a.jpg", "b.JPG", "c.png"]);
    assert_eq!(names(&[]), ["a.jpg", "b.JPG", "c.png", "jpg", "notes.txt"]);
    assert!(data_error(Files::in_folder(folder.path(), &["gif"])).contains("no file with an extension"));
    assert!(is_io(Files::in_folder(folder.path().join("missing"), &[])));
    let empty = folder_of(&[]);
    let text = data_error(Files::in_folder(empty.path(), &[]));
    assert!(text.ends_with("it has no file"), "{text}");
}

#[test]
fn links_are_what_they_lead_to() {
    let (folder, elsewhere) = (folder_of(&["a"]), folder_of(&["file"]));
    for (name, target) in
        [("b", elsewhere.path().join("file")), ("c", elsewhere.path().into()), ("d", "missing".into())]
    {
        std::os::unix::fs::symlink(target, folder.path().join(name)).unwrap();
    }
    let files = Files::in_folder(folder.path(), &[]).unwrap();
    let name = |index| files.path(index).unwrap().file_name().unwrap().to_owned();
    assert_eq!([0, 1, 2].map(name), ["a", "b", "d"], "a folder is left out");
    assert_eq!(files.len(), 3);
    assert_eq!(get(&files, 1).unwrap().bytes, b"file");
    assert!(is_io(get(&files, 2)), "there is nothing");
}

/// The kernel's own files are at once longer, and shorter, than they say: as one that is written meanwhile.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_changes_its_length_while_it_is_read_is_an_error() {
    let text = data_error(get(&Files::of(["/proc/self/status"]), 0));
    assert!(text.contains("it goes on after the 0 bytes that it had when it was opened"), "{text}");
    let short = std::path::Path::new("/sys/devices/system/cpu/online");
    let Ok(content) = std::fs::read(short) else {
        eprintln!("skipped: there is no {}", short.display());
        return;
    };
    let (there, said) = (content.len(), short.metadata().unwrap().len());
    if there as u64 == said {
        eprintln!("skipped: {} tells its length", short.display());
        return;
    }
    let text = data_error(get(&Files::of([short]), 0));
    assert!(text.contains(&format!("the file ends at byte {there}; it had {said}")), "{text}");
}

#[test]
fn files_come_in_the_order_they_are_named_in_with_their_number_and_path() {
    let folder = folder_of(&["b", "a"]);
    let paths = [folder.path().join("b"), folder.path().join("a")];
    let files = Files::of(&paths);
    for (index, path) in paths.iter().enumerate() {
        let file = get(&files, index as u64).unwrap();
        assert_eq!((&file.path, file.index), (path, index as u64));
        assert_eq!(files.path(index as u64).as_ref(), Some(path));
    }
    assert_eq!((files.len(), files.path(2)), (2, None));
    assert!(data_error(get(&files, 2)).contains("there are 2 records"));
}

#[test]
fn a_file_that_was_deleted_is_an_error_in_its_place_with_its_path() {
    let folder = folder_of(&["a", "b", "c"]);
    let files = Files::in_folder(folder.path(), &[]).unwrap().drop_behind();
    let gone = folder.path().join("b");
    std::fs::remove_file(&gone).unwrap();
    assert!(is_io(get(&files, 1)));
    let mut numbers = Loader::new(files).map(|file, _| Ok(i64::from(file.bytes[0]))).build().unwrap();
    assert_eq!(numbers.next().unwrap().unwrap().batch.int64_value(&[0]), i64::from(b'a'));
    let error = numbers.next().unwrap().unwrap_err();
    let Error::Data { origin, source, .. } = &error else { panic!("{error:?}") };
    assert_eq!((origin.file.as_deref(), origin.record), (Some(gone.as_path()), Some(1)));
    assert!(matches!(source.as_deref(), Some(Error::Io { .. })));
    assert_eq!(numbers.next().unwrap().unwrap().batch.int64_value(&[0]), i64::from(b'c'));
}

#[test]
fn a_file_larger_than_allowed_is_not_read() {
    let file = OneFile::of(&[0; 100]);
    let files = Files::of([&file.path]);
    assert_eq!(get(&files.clone().at_most(100), 0).unwrap().bytes.len(), 100);
    assert!(
        data_error(get(&files.clone().at_most(99), 0)).contains("100 bytes, where Files::at_most allows 99")
    );
    if file.try_set_len(1 << 40).is_err() {
        eprintln!("skipped: no sparse file of a terabyte in {}", file.folder().display());
        return;
    }
    assert!(data_error(get(&files, 0)).contains("1099511627776 bytes"), "a sparse file of a terabyte");
}

#[test]
fn what_is_no_regular_file_is_refused() {
    let file = OneFile::of(&[]);
    assert!(is_io(get(&Files::of([file.folder()]), 0)));
    assert!(is_io(get(&Files::of(["/dev/zero"]), 0)));
}
